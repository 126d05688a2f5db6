"""Real files made wrong: bytes changed, JSON values replaced, other things in a file's place."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any, Callable

from hypothesis import strategies as st

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import RunFailed, UserError

SECONDS = 60  # most that a command may take, on a busy machine
_ODD = (None, True, -1, 7, 10 ** 30, 0.5, float("nan"), "", "a text", "../x", "\ud800", [], {}, [1, "a"], {"a": None})
_BLOBS = (b"", b"{}", b"[" * 3000, b"\xff\xfe", b"PAR1", b"PK\x03\x04", b"\x93NUMPY", b"\0" * 999)
_fraction = st.floats(0, 1, exclude_max=True)


@st.composite
def changed_bytes(draw, content: bytes) -> bytes:
    """A file's bytes with a few of them flipped, cut off or put in; or something else altogether."""
    kind, at = draw(st.sampled_from(("flip", "cut", "insert", "other"))), int(draw(_fraction) * max(len(content), 1))
    if kind == "flip" and content:
        return content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1:]
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + draw(st.binary(min_size=1, max_size=20)) + content[at:]
    return draw(st.sampled_from(_BLOBS))


@st.composite
def changed_json(draw, content: bytes) -> bytes:
    """A JSON file in which one value, however deep, is replaced, left out or added."""
    at = value = copy.deepcopy(json.loads(content))
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw(st.sampled_from(keys))
        if isinstance(at[key], (dict, list)) and at[key] and draw(st.integers(0, 3)):
            at = at[key]
            continue
        kind = draw(st.sampled_from(("replace", "replace", "leave out", "add")))
        if kind == "replace":
            at[key] = draw(st.sampled_from(_ODD))
        elif kind == "leave out":
            del at[key]
        elif isinstance(at, dict):
            at["another"] = at[key]
        else:
            at.append(draw(st.sampled_from(_ODD)))
        return json.dumps(value).encode()


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "of a user").touch()


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


INSTEAD = (folder_instead, pipe_instead, Path.unlink)


@contextlib.contextmanager
def in_place_of(path: Path, change: bytes | Callable[[Path], None]):
    """While the block runs, a file has other content, or something else is in its place."""
    before = path.read_bytes()
    try:
        change(path) if callable(change) else path.write_bytes(change)
        yield
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(before)


def said(words: list[str]) -> tuple[int, str, list[str]]:
    """Status, output and messages of a command; raises AssertionError unless it ends as commands have to."""
    out, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(messages), in_time():
        status = main(words)
    lines = messages.getvalue().splitlines()
    assert status in (0, 1, 2) and len(lines) <= 4 and (status == 0 or lines), (status, lines)
    assert not any(sign in line for line in lines for sign in ("Traceback", "\x1b")), lines
    return status, out.getvalue(), lines


class Hangs(BaseException):
    """Nothing that reads files catches it."""


@contextlib.contextmanager
def in_time():
    """End a block that hangs."""
    def hangs(number, frame):
        raise Hangs
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(read: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether something refuses in a few lines to be read, and else what it holds; any other error is raised."""
    try:
        with in_time():
            return False, read()
    except (UserError, RunFailed) as error:
        assert 0 < len(str(error).splitlines()) <= 4, error
        return True, None
