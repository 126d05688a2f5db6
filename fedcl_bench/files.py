"""Files and paths: writing so that a file is never half there, where shipped ones lie, a bar for long reading."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Callable, Iterator


def shipped(name: str) -> Path:
    """The folder ``plugins`` or ``dataset_configs``: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    return package / name if (package / name).is_dir() else package.parent / name


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is either the old one or wholly the new one, whenever the process dies."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def closed_to_others() -> Iterator[None]:
    """While the block runs, nothing that the process and its children write can be written by other users, whatever the
    umask allows."""
    before = os.umask(0o077)  # it can be asked for only by setting it
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, for writing and reading, that takes the place of ``path`` when the block ends without an error.

    Raises:
        OSError: also if ``path`` is something else than a file, as a device or a folder.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is there and is no file", str(path))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def bar(label: str, total: int | None, unit: str, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar with the time left on a terminal's standard error, and nothing elsewhere; it vanishes at the end.

    Args:
        total: how many units there are, or None if that is not known.
        unit: ``bytes``, or what is counted.
        quiet: show nothing.

    Yields:
        A function to call with the number of units done since its last call.
    """
    from rich.console import Console
    from rich.progress import (BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn,
                               TransferSpeedColumn)

    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    amount = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
    with Progress(TextColumn("{task.description}"), BarColumn(bar_width=20), *amount, TimeRemainingColumn(),
                  console=console, transient=True, refresh_per_second=5, disable=quiet or not console.is_terminal) as display:
        task = display.add_task(label, total=total)
        yield lambda count: display.update(task, advance=count)
