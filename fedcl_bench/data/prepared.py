"""Streams kept as arrays on disk: runs map them into memory instead of reading and splitting the interactions again.

A prepared stream is a folder beside the dataset's file, named by a hash of all that the stream depends on: the bytes of
the file, the columns and filters of the dataset's config, the stream's settings and the version of the code's numbers.
One of other settings or of a changed file is not found, rather than wrong.

Pages of the arrays are read when they are looked at and belong to the system's cache, so that a stream may be larger
than memory, and several runs at once share one copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Iterator

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..version import NUMBERS_VERSION
from .stream import Ragged, Sessions, Step, Stream, StreamSettings

if TYPE_CHECKING:
    from .source import DatasetSource

_SPLITS = ("train", "valid", "test")
_NUMBERS = ("index", "n_users", "n_items", "old_users", "old_items", "interactions")
_ABOUT = "stream.json"


def folder_of(source: DatasetSource, settings: StreamSettings) -> Path:
    """Where the stream of a dataset under some settings is kept, whether it is there or not."""
    columns = {f.name: getattr(source.config, f.name) for f in fields(source.config)
               if f.name.endswith("_FIELD") or f.name in ("drop_events", "val_interval")}
    text = json.dumps([NUMBERS_VERSION, source.fingerprint, columns, asdict(settings)], sort_keys=True)
    name = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return source.path.parent / f"{source.path.stem}.stream-{name}"


def save(stream: Stream, folder: Path) -> int:
    """Write a stream; the folder is there whole or not at all. Returns its bytes.

    Raises:
        UserError: if it cannot be written.
    """
    about = {"steps": [{name: getattr(step, name) for name in _NUMBERS} | {"sessions": list(step.sessions)}
                       for step in stream.steps], "unfiltered": dict(stream.unfiltered)}
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
            whole = Path(beside) / "whole"
            whole.mkdir()
            for name, values in _arrays(stream):
                np.save(whole / f"{name}.npy", values)
            (whole / _ABOUT).write_text(json.dumps(about))
            size = sum(path.stat().st_size for path in whole.iterdir())
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(whole, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}).") from None
    return size


def _arrays(stream: Stream) -> Iterator[tuple[str, np.ndarray]]:
    yield "users", stream.user_tokens.astype(str)
    yield "items", stream.item_tokens.astype(str)
    for step in stream.steps:
        for split in _SPLITS:
            for part in fields(Ragged):
                yield f"{step.index}-{split}-{part.name}", getattr(step.split(split), part.name).numpy()
        for split, sessions in step.sessions.items():
            for part in fields(Sessions):
                yield f"{step.index}-{split}-sessions-{part.name}", getattr(sessions, part.name).numpy()


def load(folder: Path) -> Stream:
    """A stream that was saved, mapped from its files.

    Raises:
        UserError: if a file is missing or damaged.
    """
    def array(name: str) -> np.ndarray:
        return np.load(folder / f"{name}.npy", mmap_mode="c")  # "c": never written back

    def tensors(cls: type, name: str) -> dict[str, Tensor]:
        return {part.name: torch.from_numpy(array(f"{name}-{part.name}")) for part in fields(cls)}

    try:
        about = json.loads((folder / _ABOUT).read_text())
        steps = []
        for step in about["steps"]:
            at, splits = step["index"], step.pop("sessions")
            steps.append(Step(**step, **{split: Ragged(**tensors(Ragged, f"{at}-{split}")) for split in _SPLITS},
                              sessions={split: Sessions(**tensors(Sessions, f"{at}-{split}-sessions"))
                                        for split in splits}))
        return Stream(tuple(steps), array("users"), array("items"), about["unfiltered"])
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise UserError(f"{folder}: is damaged ({' '.join(str(error).split())[:120]}); delete it, or make it anew with "
                        f"`data prepare`.") from None
