"""The ways a command can fail, and the wording they share."""

from __future__ import annotations

import difflib
from typing import Callable, Iterable


_LONGEST = 60  # characters of a wrong name that are shown


class UserError(Exception):
    """Something the user can fix: an option, a setting, a file. Shown in one or two lines, exit status 2."""


class Corrupt(UserError):
    """A file of the suite's own that does not hold what it should: ``wrong`` says the file, the field, what was there
    and what is accepted, without a full stop; ``cure`` what to do about it, a sentence."""

    def __init__(self, wrong: str, cure: str):
        super().__init__(f"{wrong}.\n{cure}")
        self.wrong, self.cure = wrong, cure


class Busy(UserError):
    """Another process is at the same run."""


class Incompatible(UserError):
    """Plugins that do not go together. Whoever knows all plugins can add which others of a kind, ``method`` or
    ``backbone``, would do: those whose class ``fits``."""

    def __init__(self, reason: str, kind: str, fits: Callable[[type], bool]):
        super().__init__(reason)
        self.kind, self.fits = kind, fits


class PluginError(UserError):
    """A plugin's hook returned something else than its contract says."""


class OutOfMemory(UserError):
    """The memory of the machine or its GPU does not hold what cannot be made smaller."""


class RunFailed(Exception):
    """A run that started and cannot go on (a loss that is not finite). Exit status 1."""


class HookFailed(RunFailed):
    """A plugin's hook raised an error; the run may go on from its checkpoint once the plugin is mended."""


def unknown(kind: str, wrong: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not among ``known``, naming the nearest one."""
    known = sorted(known)
    spelled = {name.lower(): name for name in known}
    near = difflib.get_close_matches(wrong.lower()[:_LONGEST], spelled, n=1, cutoff=0.5)
    hint = f"Did you mean '{spelled[near[0]]}'? " if near else ""
    wrong = wrong if len(wrong) <= _LONGEST else f"{wrong[:_LONGEST]}…"
    return UserError(f"unknown {kind} '{wrong}'.\n{hint}Known: {', '.join(known) or 'none'}.")


def require_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``unknown`` for the first of the names that is not among ``known``."""
    known = list(known)
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on a GPU or for the process: PyTorch, NumPy, pandas and the
    compiled kernels each have their own."""
    return (isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            or any(words in str(error) for words in ("DefaultCPUAllocator", "out of memory", "can't start new thread")))
