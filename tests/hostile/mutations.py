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
from typing import Any, Callable, Iterator

from hypothesis import strategies as st

from fedcl_bench.cli.main import main
from fedcl_bench.errors import RunFailed, UserError

SECONDS = 60  # most that a command may take, on a busy machine
DEEP = "[" * 100_000
ODD = (None, True, -1, 0, 7, 10 ** 30, 0.5, 1e308, float("nan"), float("inf"), "", "a text", "x" * 5000, "../x", "[/b]",
       "\x1b[2J", "\ud800", [], {}, [[[]]], {"a": {"b": None}}, [1, "a"], [0.1] * 4)
_BLOBS = (b"", b"{}", b"[]", b"null", b"0", DEEP.encode(), b"\xff\xfe", b"PAR1", b"PK\x03\x04", b"\x93NUMPY",
          b"\0" * 999)
_fraction = st.floats(0, 1, exclude_max=True)


@st.composite
def changed_bytes(draw, content: bytes) -> bytes:
    """A file's bytes with a few of them flipped, cut off, doubled or put in; or something else altogether."""
    kind = draw(st.sampled_from(("flip", "cut", "double", "insert", "other")))
    at = int(draw(_fraction) * max(len(content), 1))
    if kind == "flip":
        result = bytearray(content)
        for _ in range(draw(st.integers(1, 3))):
            result[int(draw(_fraction) * len(result))] ^= draw(st.integers(1, 255))
        return bytes(result)
    if kind == "cut":
        return content[:at]
    if kind == "double":
        return content[:at] + content[at // 2:]
    if kind == "insert":
        return content[:at] + draw(st.binary(min_size=1, max_size=20)) + content[at:]
    return draw(st.sampled_from(_BLOBS))


@st.composite
def changed_value(draw, value: Any) -> Any:
    """A value of mappings and lists in which one is replaced, left out, renamed or added."""
    value = copy.deepcopy(value)
    at = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return draw(st.sampled_from(ODD))
        key = draw(st.sampled_from(keys))
        if isinstance(at[key], (dict, list, tuple)) and len(at[key]) and draw(st.integers(0, 3)):
            if isinstance(at[key], tuple):
                at[key] = list(at[key])
            at = at[key]
            continue
        kind = draw(st.sampled_from(("replace", "replace", "leave out", "rename", "add")))
        if kind == "replace":
            at[key] = draw(st.sampled_from(ODD))
        elif kind == "leave out":
            del at[key]
        elif isinstance(at, dict):
            at[draw(st.sampled_from(("another", "../x", "", "x\ny", "[/b]")))] = at.pop(key) if kind == "rename" else 1
        else:
            at.append(draw(st.sampled_from(ODD)))
        return value


def every_change(value: Any, at: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """A value of mappings and lists with one replaced, left out, renamed or added: each of all, and the path to it."""
    if not isinstance(value, (dict, list, tuple)):
        return
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        def with_instead(*instead: Any, key=key) -> Any:
            """The value with some, or nothing, instead of one of its."""
            if isinstance(value, dict):
                return {name: each for name, each in value.items() if name != key} | {key: each for each in instead}
            return [*value[:key], *instead, *value[key + 1:]]
        for odd in ODD:
            yield (*at, key, odd), with_instead(odd)
        yield (*at, key, "left out"), with_instead()
        if isinstance(value, dict):
            yield (*at, key, "renamed"), {**with_instead(), "another": value[key]}
        for path, changed in every_change(value[key], (*at, key)):
            yield path, with_instead(changed)
    for odd in (1,) if isinstance(value, dict) else ODD:
        yield (*at, "added", odd), {**value, "another": odd} if isinstance(value, dict) else [*value, odd]


def changed_json(content: bytes, seal: Callable[[Any], Any] = lambda value: value) -> st.SearchStrategy[bytes]:
    """A JSON file with one value changed, and sealed anew as somebody who means harm would."""
    def written(value: Any) -> bytes:
        try:
            value = seal(value)
        except (TypeError, AttributeError, ValueError):  # nothing that has a seal
            pass
        return json.dumps(value).encode()
    return changed_value(json.loads(content)).map(written)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "of a user").touch()


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop_instead(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def closed(path: Path) -> None:
    path.unlink()


INSTEAD = (folder_instead, pipe_instead, loop_instead, closed)


@contextlib.contextmanager
def in_place_of(path: Path, change: bytes | Callable[[Path], None]):
    """While the block runs, a file has other content, or something else is in its place."""
    before = path.read_bytes()
    try:
        if callable(change):
            change(path)
        else:
            path.write_bytes(change)
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
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
    assert status in (0, 1, 2) and len(lines) <= 4, (status, lines)
    assert not any(sign in line for line in lines for sign in ("Traceback", "\x1b")), lines
    assert status == 0 or lines
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
