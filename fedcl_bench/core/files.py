"""Files and paths: writing so that a file is never half there, reading those of the suite's own, where shipped ones
lie, a bar for long reading.
"""

from __future__ import annotations

import errno
import functools
import glob
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator

import msgspec

from .errors import Corrupt, UserError
from .text import for_terminal

_PART = ".part"  # how the name of a file ends that is being written


@functools.cache
def shipped(name: str) -> Path:
    """The folder ``plugins`` or ``dataset_configs``: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / name if (package / name).is_dir() else package.parent / name


def read_bytes(path: Path, cure: str) -> bytes:
    """A file's content; raises Corrupt if it is no file or cannot be read, FileNotFoundError if nothing is there."""
    with reading(path, cure) as file:
        return file.read()


def digest(path: Path, algorithm: str, **options: int) -> str:
    """The checksum in hexadecimal of any file; raises UserError if it cannot be read."""
    result = hashlib.new(algorithm, usedforsecurity=False, **options)
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                result.update(piece)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
    return result.hexdigest()


def fingerprint(path: Path) -> str:
    """Of a data file's bytes, which the hashes of runs hold; raises as ``digest``."""
    return digest(path, "blake2b", digest_size=16)


@contextmanager
def reading(path: Path, cure: str) -> Iterator[BinaryIO]:
    """A file of which parts are read; raises as ``read_bytes``."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise Corrupt(f"{path}: is no file, but a folder or a device", cure)
        with open(path, "rb") as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read ({error.strerror})", cure) from None


def read_required(path: Path, cure: str) -> bytes:
    """A file's content; raises Corrupt also if nothing is there."""
    try:
        return read_bytes(path, cure)
    except FileNotFoundError:
        raise Corrupt(f"{path}: is missing", cure) from None


def read_json(path: Path, form: Any, cure: str) -> Any:
    """The content of a JSON file of the form of a msgspec type; raises as ``read_bytes``."""
    return require_form(loaded_json(read_bytes(path, cure), str(path), cure), form, str(path), cure)


def loaded_json(content: bytes | str, where: str, cure: str) -> Any:
    """The value of a JSON text, in which nan may stand for what was not measured; raises Corrupt."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a character cannot be written again
        return value
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:80]
        raise Corrupt(f"{where}: is no JSON text ({' '.join(said.split())})", cure) from None


def require_form(value: Any, form: Any, where: str, cure: str) -> Any:
    """The value; raises Corrupt, which names its place and field, unless it has the form of a msgspec type."""
    try:
        msgspec.convert(value, form)
        return value
    except (msgspec.ValidationError, RecursionError) as error:
        said, _, at = for_terminal(str(error)).rpartition(" - at `")
        field = at.rstrip("`").removeprefix("$").removeprefix(".")
        raise Corrupt(f"{where}: {f'field {field!r}: {said}' if said else at}", cure) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is either the old one or wholly the new one, whenever the process dies."""
    with replacing(path) as file:
        file.write(content)


class _Watched(io.BufferedRandom):
    """A file that remembers why it could not be written; ``torch.save`` says only that it could not."""

    error: OSError | None = None

    def write(self, content: Any) -> int:
        return self._watched(super().write, content)

    def flush(self) -> None:
        self._watched(super().flush)

    def _watched(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OSError as error:
            self.error = error
            raise


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, for writing and reading, that takes the place of ``path`` when the block ends without an error;
    raises UserError if there is no space left for it, OSError for whatever else is in its way, as a folder or a device.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is there and is no file", str(path))
    temporary, file = None, None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path), suffix=_PART)
        with _Watched(io.FileIO(handle, "w+b")) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        cause = file.error if file is not None and file.error is not None else error
        if isinstance(cause, OSError) and cause.errno in NO_SPACE:
            raise no_space(path, cause) from None
        raise


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """A folder that is there while the block runs, made if need be. After an error those that were made for it are
    gone, unless something was put into them. Raises OSError if it cannot be made."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):  # it is not empty
                path.rmdir()
        raise


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """An empty folder next to ``path`` in which to make what takes its place; it is gone at the end. Those that killed
    processes left for the same path go first. Raises OSError if it cannot be made."""
    for left in _left_behind(path.parent, f".{glob.escape(path.name)}.*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(dir=path.parent, prefix=_prefix(path), suffix=_PART)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove the files in a folder that were being written when a process was killed, and no others."""
    for path in _left_behind(folder, ".*"):
        if not path.is_dir():
            with suppress(OSError):  # it can only be read, or another process has removed it
                path.unlink()


def _prefix(path: Path) -> str:
    """How the name begins of what is to take the place of ``path``: it says which process of which machine makes it."""
    return f".{path.name}.{platform.node()}-{os.getpid()}-"


def _left_behind(folder: Path, pattern: str) -> Iterator[Path]:
    """What processes of this machine were making that are no more."""
    mine = re.compile(rf"\.{re.escape(platform.node())}-(\d+)-\w*{re.escape(_PART)}")
    for path in folder.glob(pattern + _PART):
        if (made := mine.search(path.name)) and not _is_alive(int(made[1])):
            yield path


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        return True
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's


# Of errors: the disk, the user's share of it, or the size that a file may have (``ulimit -f``) is exhausted.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def free_bytes(path: Path) -> int:
    """What the disk has left that a path is on, which need not exist yet."""
    there = next((folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir()), Path("/"))
    return shutil.disk_usage(there).free


def no_space(path: Path | str, error: OSError) -> UserError:
    """The error for a file that did not fit; what stood there before still does."""
    return UserError(f"no space left at {path} ({error.strerror}): it is not written.\nFree some, or choose another "
                     f"folder, and give the same command again; runs go on from their last checkpoint.")


@contextmanager
def bar(label: str, total: int | None, unit: str, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar with the time left on a terminal's standard error, and nothing elsewhere, or if it is to be quiet;
    it vanishes at the end. Yields a function to call with the number of units done since its last call.

    A ``total`` of None is not known; a unit is ``bytes``, or what is counted.
    """
    from rich.console import Console
    from rich.progress import (BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn,
                               TransferSpeedColumn)

    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    amount = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
    with Progress(TextColumn("{task.description}"), BarColumn(bar_width=20), *amount, TimeRemainingColumn(),
                  console=console, transient=True, refresh_per_second=5,
                  disable=quiet or not console.is_terminal) as display:
        task = display.add_task(label, total=total)
        yield lambda count: display.update(task, advance=count)
