"""What runs a results folder has, from one index beside them, so that a table of 90 runs need not read 5,000 records.

The index keeps the head of every ``run.json``: names, seed, settings. An entry counts only while that file has the same
size, times and number on its disk; of any other the record itself is read. Numbers never come from the index: whoever
uses a run reads its record, and its head must be the same.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Callable, Iterator

from ..core.errors import Corrupt, UserError
from ..core.files import sweep, write_atomically
from ..core.schema import fields_of, lists, mapping, one_of, read_json, whole
from . import schema
from .schema import NAME, read_head

INDEX = ".heads.json"
MANY = 200  # records; fewer are read as fast, and nothing is written beside them
_FORMAT = 1
Head = dict[str, Any]
_ENTRY = fields_of({"file": lists(whole()), "head": schema.check_head}, {})
_INDEX = fields_of({"format": one_of(_FORMAT), "records": mapping(_ENTRY)}, {})


def heads(results: Path, left_out: Callable[[Corrupt], None]) -> Iterator[tuple[Path, Head]]:
    """The folder and head of every record of a results folder that ended, sorted by folder.

    Args:
        left_out: told of each record that is not what a run wrote.
    """
    folder = results / "runs"
    known, kept = _read(results / INDEX), {}
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if ".corrupt" in name or not path.is_dir():
            continue
        try:
            file = _file(path / NAME)
            entry = known.get(name)
            if entry is None or entry["file"] != file:
                head = read_head(path)
                entry = head and {"file": file, "head": head}
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            left_out(Corrupt(f"{path / NAME}: cannot be read ({error.strerror})", schema.CURE))
            continue
        except Corrupt as error:
            left_out(error)
            continue
        if entry:
            kept[name] = entry
            yield path, entry["head"]
    if len(kept) >= MANY and kept != known:
        _write(results / INDEX, kept)


def _file(path: Path) -> list[int]:
    """What changes when a file does."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of an index; none if there is none that can be read."""
    try:
        return read_json(path, _INDEX, "")["records"]
    except (Corrupt, FileNotFoundError):
        return {}


def _write(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Write an index, where the folder can be written."""
    index = {"format": _FORMAT, "records": entries}
    try:
        sweep(path.parent)
        write_atomically(path, json.dumps(index, separators=(",", ":")).encode())
    except (OSError, UserError):
        pass
