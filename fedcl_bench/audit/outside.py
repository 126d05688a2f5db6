"""What plugins' code looks at besides what its hooks are given: files, frames of its callers, all objects there are."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Collection

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_LOOKS = {"sys._getframe": "looks at its callers' frames", "gc.get_objects": "lists all objects that there are",
          "gc.get_referrers": "lists what refers to an object"}
_HEARD = {"open", *_LOOKS}
_IMPORT = "<frozen importlib"
_listening: list["Outside"] = []


@functools.cache
def _hook() -> None:
    """Once a process: a hook stays for ever, and every call of ``id`` waits for each."""
    sys.addaudithook(_tell)


def _tell(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _HEARD:
        for one in _listening:
            one.hear(event, arguments)


class Outside:
    """Listens while the block runs to code in the ``folders`` of plugins, which may write in ``own`` and must not read
    ``data``. What was found is in ``seen``, with file and line."""

    def __init__(self, folders: Collection[Path], own: Path, data: Collection[Path]):
        self._folders, self._own, self._data = {*map(str, folders)}, own.resolve(), {*data}
        self._thread, self._began = threading.local(), time.time()
        self.seen: dict[str, None] = {}

    def __enter__(self) -> "Outside":
        _hook()
        _listening.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _listening.remove(self)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An event that Python tells its hooks, of the kinds listened to."""
        if getattr(self._thread, "busy", False):
            return
        self._thread.busy = True
        try:
            what = _LOOKS.get(event) or self._opened(*arguments)
            if what and (line := self._line(sys._getframe(1), event in _LOOKS)):
                self.seen[f"{what} ({line})"] = None
        finally:
            self._thread.busy = False

    def _opened(self, path: Any, mode: str | None, flags: int) -> str:
        file = Path(os.fsdecode(path)).resolve() if isinstance(path, (str, bytes, os.PathLike)) else Path("/dev/fd")
        if file in self._data:
            return f"reads {file}"
        if self._own in file.parents or file.parts[1:2] == ("dev",):
            return ""
        if flags & _WRITES:
            return f"writes {file}"
        return f"reads {file}, new since the run began" if file.is_file() and file.stat().st_mtime > self._began else ""

    def _line(self, frame: FrameType | None, near: bool) -> str:
        """The plugin's line that a frame was called from, but for an ``import``, which compiles modules; if ``near``,
        directly or by Python's own ``inspect``."""
        while frame is not None:
            file = frame.f_code.co_filename
            if os.path.dirname(file) in self._folders:
                return f"{os.path.basename(file)}:{frame.f_lineno}"
            if near and os.path.basename(file) not in ("inspect.py", "outside.py") or file.startswith(_IMPORT):
                break
            frame = frame.f_back
        return ""
