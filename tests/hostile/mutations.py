"""Real files made wrong: bytes changed, JSON values replaced, other things in a file's place."""

import contextlib
import copy
import io
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any, Callable

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import RunFailed, UserError

TRIES = int(os.environ.get("FUZZ", 3))
SECONDS = 60  # most that a command may take, on a busy machine
_ODD = (None, True, -1, 7, 10 ** 30, 0.5, float("nan"), "", "a text", "../x", "\ud800", [], {}, [1, "a"], {"a": None})
_BLOBS = (b"", b"{}", b"[" * 3000, b"\xff\xfe", b"PAR1", b"PK\x03\x04", b"\x93NUMPY", b"\0" * 999)


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """A file's bytes with one of them flipped, cut off or with some put in; or something else altogether."""
    at = rng.randrange(len(content) or 1)
    return rng.choice((content[:at] + bytes([rng.randrange(256)]) + content[at + 1:], content[:at],
                       content[:at] + rng.randbytes(9) + content[at:], rng.choice(_BLOBS)))


def changed_json(content: bytes, rng: random.Random) -> bytes:
    """A JSON file in which one value, however deep, is replaced, left out or added."""
    at = value = copy.deepcopy(json.loads(content))
    while True:
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not (isinstance(at[key], (dict, list)) and at[key] and rng.randrange(4)):
            break
        at = at[key]
    kind = rng.randrange(4)
    if kind < 2:
        at[key] = rng.choice(_ODD)
    elif kind == 2:
        del at[key]
    elif isinstance(at, dict):
        at["another"] = at[key]
    else:
        at.append(rng.choice(_ODD))
    return json.dumps(value).encode()


def _folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "of a user").touch()


def _pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


INSTEAD = (_folder_instead, _pipe_instead, Path.unlink)


def fuzz(path: Path, check: Callable[[], None], changed=changed_bytes, tries: int = TRIES) -> None:
    """Call ``check`` while a file is wrong, in different ways."""
    before, rng = path.read_bytes(), random.Random(path.name)
    for change in (*(changed(before, rng) for _ in range(tries)), *(INSTEAD if changed is changed_bytes else ())):
        try:
            change(path) if callable(change) else path.write_bytes(change)
            check()
        finally:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
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
