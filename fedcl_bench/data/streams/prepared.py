"""Streams kept on disk: runs map them into memory instead of reading and splitting the interactions again.

A prepared stream is a file beside the dataset's, named by a hash of all that the stream depends on: the bytes of the
dataset's file, the columns and filters of the dataset's config, the stream's settings and the version of the code's
numbers. One of other settings or of a changed file is not found, rather than wrong.

Pages of the file belong to the system's cache, so that a stream may be larger than memory, and several runs at once
share one copy. When a stream is opened, its file is read once and the checksums in it are compared, since compiled code
looks its ids up.
"""

from __future__ import annotations

import zipfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.files import free_bytes, replacing, sweep
from ...core.settings import inactive
from ...core.text import hash_of
from ...core.version import NUMBERS
from ..files.recbole_files import SPLITS
from ..settings import StreamSettings
from ..source import DatasetConfig, DatasetSource
from ..stream import DomainPart, Ragged, Sessions, Step, Stream

_PARTS = [Stream, Step, Ragged, Sessions, DomainPart, range]  # what a file holds besides tensors and plain values
_TRAINING = ("topology", "known_users")  # say how domains are trained, whose stream is the same


def file_of(source: DatasetSource, settings: StreamSettings) -> Path:
    """Where the stream of a dataset under some settings is kept, whether it is there or not."""
    columns = _columns(source.config)
    if source.parts:
        columns = {part.name: _columns(part.config) for part in source.parts}
    without_effect = {*inactive([settings]), *(_TRAINING if source.parts else ())}
    values = {name: value for name, value in asdict(settings).items() if name not in without_effect}
    name = hash_of([NUMBERS, source.fingerprint, columns, values], 6)
    return source.path.parent / f"{source.name if source.parts else source.path.stem}.stream-{name}"


def _columns(config: DatasetConfig) -> dict[str, Any]:
    """What a dataset's config says of the columns to read and the rows to keep."""
    return {f.name: getattr(config, f.name) for f in fields(config)
            if f.name.endswith("_FIELD") and f.name != "RATING_FIELD" or f.name in ("drop_events", "val_interval")}


def save(stream: Stream, path: Path) -> int:
    """Write a stream without ratings, which are read from the dataset's file, whole or not at all; returns its bytes.
    Raises UserError if it cannot be written."""
    _require_room(stream, path)
    try:
        sweep(path.parent)
        with replacing(path) as file:
            steps = tuple(replace(step, **{name: replace(step.split(name), ratings=None) for name in SPLITS})
                          for step in stream.steps)
            torch.save(replace(stream, steps=steps, user_tokens=_as_tensor(stream.user_tokens),
                               item_tokens=_as_tensor(stream.item_tokens)), file)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}).") from None
    return path.stat().st_size


def _require_room(stream: Stream, path: Path) -> None:
    """Raise UserError if the disk has not enough room for the stream, saying for how much of it."""
    parts = [part for step in stream.steps for part in (*map(step.split, SPLITS), *step.sessions.values())]
    needed = sum(values.nbytes for part in parts for values in vars(part).values() if values is not None)
    if needed > (free := free_bytes(path)):
        rows = sum(step.interactions for step in stream.steps)
        raise UserError(f"{path}: not enough room: {free / (1 << 20):,.1f} MiB are free, and the stream takes "
                        f"{needed / (1 << 20):,.1f} MiB.\nAbout {rows * free // needed:,} of the {rows:,} interactions "
                        f"would fit. Runs read the dataset's file without it.")


def load(path: Path) -> Stream:
    """A stream that was saved, mapped from its file, all of which is read once and compared with its checksums; raises
    UserError if it was changed."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no file")
        with zipfile.ZipFile(path) as archive:
            if wrong := archive.testzip():
                raise ValueError(f"{wrong} is not what was written")
        with torch.serialization.safe_globals(_PARTS):
            stream = torch.load(path, mmap=True, weights_only=True)  # copied where it is written to
    except Exception as error:  # readers of zip files and of what is in them raise many
        raise UserError(f"{path}: is damaged ({' '.join(str(error).split())[:120]}).\n"
                        f"Delete it, or make it anew with `data prepare`.") from None
    return replace(stream, user_tokens=_as_texts(stream.user_tokens), item_tokens=_as_texts(stream.item_tokens))


def _as_tensor(texts: np.ndarray) -> Tensor:
    """The characters' numbers, int32 of shape (texts, longest)."""
    return torch.from_numpy(texts.astype(str).view(np.int32).reshape(len(texts), -1))


def _as_texts(characters: Tensor) -> np.ndarray:
    return characters.numpy().view(f"<U{characters.shape[1]}")[:, 0]
