"""What goes wrong in plugins' code, as messages that name the plugin, the file and the line."""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Iterator

from ..core.errors import HookFailed, RunFailed, UserError

_LONGEST = 200  # characters of an error's own words: PyTorch writes pages
_FRAMES = 3  # lines of a plugin that are shown


def words(error: BaseException) -> str:
    """An error's type and the first line of what it says."""
    if isinstance(error, SystemExit):
        return f"SystemExit: it ends the program with status {error.code!r}"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:_LONGEST]}".removesuffix(": ")


def at_import(error: BaseException, path: Path) -> str:
    """Why a plugin's file cannot be imported: the file, the line, and the error."""
    line = None
    if isinstance(error, SyntaxError):
        line = error.lineno if error.filename == str(path) else None
        error = SyntaxError(error.msg if line else f"{error.msg} ({error.filename}, line {error.lineno})")
    else:
        for frame in traceback.extract_tb(error.__traceback__):
            line = frame.lineno if frame.filename == str(path) else line
    said = str(error) if isinstance(error, UserError) else words(error)
    if isinstance(error, ModuleNotFoundError) and path.with_name(f"{error.name}.py").is_file():
        said += "; a file beside it begins with _ and is imported as from ._shared import ..."
    return f"{path}{f', line {line}' if line else ''}: {said}"


@contextmanager
def named() -> Iterator[None]:
    """Whatever a plugin's code raises inside comes out as ``HookFailed``, with that as its cause. ``UserError`` and
    ``RunFailed`` pass, as do errors that no plugin's code was at."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except (Exception, SystemExit) as error:
        if (message := in_hook(error)) is None:
            raise
        raise HookFailed(message) from error


def in_hook(error: BaseException) -> str | None:
    """Plugin, hook and error, then the plugin's lines that led to it; None if no plugin's code was at it."""
    frames = [(plugin, frame.f_code.co_filename, line, frame.f_code.co_name)
              for frame, line in traceback.walk_tb(error.__traceback__) if (plugin := _plugin_at(frame))]
    if not frames:
        return None
    plugin, _, _, hook = frames[0]
    lines = [f"  {path}, line {line}, in {function}: {linecache.getline(path, line).strip()[:_LONGEST]}"
             for _, path, line, function in dict.fromkeys([*frames[:1], *frames[1:][1 - _FRAMES:]])]
    return "\n".join([f"{plugin}: {hook} raised {words(error)}", *lines])


def _plugin_at(frame: FrameType) -> str | None:
    """Which plugin's code a frame is in, in words, also a hook that a method inherits from the suite; None if none's.
    """
    from ..plugin.method import HOOKS, Method

    plugin, of_file = frame.f_locals.get("self"), _plugin_of(frame.f_globals.get("__name__", ""))
    named = all(isinstance(getattr(plugin, what, None), str) for what in ("kind", "name"))
    if named and (of_file or isinstance(plugin, Method) and frame.f_code.co_name in HOOKS):
        return f"{plugin.kind} '{plugin.name}'"
    return of_file


def _plugin_of(module: str) -> str | None:
    """Which plugin a module is, in words; None if it is none."""
    if module.startswith("fedcl_bench.") or module not in sys.modules:
        return None
    for value in list(vars(sys.modules[module]).values()):
        if inspect.isclass(value) and value.__module__ == module and isinstance(getattr(value, "kind", None), str) \
                and isinstance(vars(value).get("name"), str):
            return f"{value.kind} '{value.name}'"
    return None
