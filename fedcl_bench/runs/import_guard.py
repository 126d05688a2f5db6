"""What importing a plugin must leave as it is, for the numbers of all others and for what is printed."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager, redirect_stdout
from inspect import isclass, isroutine
from operator import is_
from typing import Any, Callable, Iterator

import numpy as np
import torch

from ..core.errors import UserError

PACKAGE = "fedcl_bench"
# What stands for the whole process: how it is read, and how it is put back.
_OF_PROCESS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's determinism": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "torch's generator": (lambda: torch.get_rng_state().numpy().tobytes(),
                          lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))),
    "numpy's generator": (lambda: [part.tolist() if isinstance(part, np.ndarray) else part
                                   for part in np.random.get_state()],
                          lambda state: np.random.set_state(tuple(state))),
    "Python's generator": (random.getstate, random.setstate)}


@contextmanager
def nothing_else_changes() -> Iterator[None]:
    """While a plugin is imported: what it prints goes to standard error. Raises UserError if it changed what stands for
    the whole process, or a class or function of the suite or of another plugin. That is put back first."""
    process, members = {name: read() for name, (read, _) in _OF_PROCESS.items()}, list(_members())
    with redirect_stdout(sys.stderr):
        yield
    changed = []
    for name, (read, put_back) in _OF_PROCESS.items():
        if read() != process[name]:
            put_back(process[name])
            changed.append(name)
    for owner, before in members:
        now = vars(owner)
        if len(now) == len(before) and all(map(is_, before.values(), now.values())):
            continue
        for name, value in before.items():
            if now.get(name) is not value and _is_code(owner, name, value):
                setattr(owner, name, value)
                changed.append(f"{owner.__module__}.{owner.__qualname__}.{name}" if isclass(owner) else
                               f"{owner.__name__}.{name}")
    if changed:
        raise UserError(f"importing it changes {', '.join(changed)}, on which other runs depend; do so in the plugin's "
                        f"own hooks, on its own objects.")


def _members() -> Iterator[tuple[Any, dict[str, Any]]]:
    """The package's modules, those of plugins, and their classes, each with what it holds."""
    for module in [module for name, module in sys.modules.items() if name.split(".")[0].startswith(PACKAGE)]:
        values = dict(vars(module))
        yield from ((value, dict(vars(value))) for value in values.values()
                    if isinstance(value, type) and value.__module__ == module.__name__)
        yield module, values


def _is_code(owner: Any, name: str, value: Any) -> bool:
    """Whether a member is what others run: a module's function or class, or anything that a class defines."""
    return not name.startswith("__") or callable(value) if isclass(owner) else isroutine(value) or isclass(value)
