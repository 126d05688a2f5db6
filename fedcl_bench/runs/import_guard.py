"""What importing a plugin must leave as it is, for the numbers of all others and for what is printed."""

from __future__ import annotations

import sys
from contextlib import contextmanager, redirect_stdout
from typing import Any, Callable, Iterator

import torch

from ..core.errors import UserError

# What stands for the whole process: how it is read, and how it is put back. Generators are not among it, as every draw
# has a key of its own.
_OF_PROCESS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's determinism": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms)}


@contextmanager
def nothing_else_changes() -> Iterator[None]:
    """While a plugin is imported: what it prints goes to standard error. What it changes of what stands for the whole
    process is put back, also if its import fails; raises UserError if there was something."""
    before, changed = {name: read() for name, (read, _) in _OF_PROCESS.items()}, []
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        for name, (read, put_back) in _OF_PROCESS.items():
            if read() != before[name]:
                put_back(before[name])
                changed.append(name)
    if changed:
        raise UserError(f"importing it changes {', '.join(changed)}, on which other runs depend; do so in the plugin's "
                        f"own hooks, on its own objects.")
