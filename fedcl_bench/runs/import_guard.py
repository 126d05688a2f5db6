"""What importing a plugin must leave as it is, for the numbers of all others and for what is printed."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager, redirect_stdout
from inspect import isclass, isroutine
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
    """While a plugin is imported: what it prints goes to standard error.

    Raises:
        UserError: if it changed what stands for the whole process, or a class or function of the suite or of another
            plugin. That is put back first.
    """
    process, code = {name: read() for name, (read, _) in _OF_PROCESS.items()}, list(_code())
    with redirect_stdout(sys.stderr):
        yield
    changed = []
    for name, (read, put_back) in _OF_PROCESS.items():
        if read() != process[name]:
            put_back(process[name])
            changed.append(name)
    for owner, name, value in code:
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)
            changed.append(f"{owner.__module__}.{owner.__qualname__}.{name}" if isclass(owner) else
                           f"{owner.__name__}.{name}")
    if changed:
        raise UserError(f"importing it changes {', '.join(changed)}, on which other runs depend; do so in the plugin's "
                        f"own hooks, on its own objects.")


def _code() -> Iterator[tuple[Any, str, Any]]:
    """Every function and class of the package's modules and of plugins, and every member of these classes, with where
    it lies."""
    for module in [module for name, module in sys.modules.items() if name.split(".")[0].startswith(PACKAGE)]:
        for name, value in list(vars(module).items()):
            if isroutine(value) or isclass(value):
                yield module, name, value
            if isclass(value) and value.__module__ == module.__name__:
                for member, of_class in list(vars(value).items()):
                    if not member.startswith("__") or callable(of_class):
                        yield value, member, of_class
