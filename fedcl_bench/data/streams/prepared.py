"""Streams kept as arrays on disk: runs map them into memory instead of reading and splitting the interactions again.

A prepared stream is a folder beside the dataset's file, named by a hash of all that the stream depends on: the bytes of
the file, the columns and filters of the dataset's config, the stream's settings and the version of the code's numbers.
One of other settings or of a changed file is not found, rather than wrong.

Pages of the arrays belong to the system's cache, so that a stream may be larger than memory, and several runs at once
share one copy. When a stream is opened they are read once: each file must have the digest that was written with it,
since compiled code looks its ids up.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

import numpy as np
import torch

from ...core.errors import UserError
from ...core.files import folder_beside, free_bytes
from ...core.text import hash_of
from ...core.version import NUMBERS
from ..files.recbole_files import SPLITS
from ..settings import CENTRAL_ONLY, DOMAINS_ONLY, StreamSettings
from ..stream import DomainPart, Ragged, Sessions, Step, Stream, fingerprint

if TYPE_CHECKING:
    from ..source import DatasetConfig, DatasetSource

_NUMBERS = ("index", "n_users", "n_items", "old_users", "old_items", "interactions")
_LISTS = ("indptr", "values")  # of lists; ratings are read from the dataset's file
_ABOUT = "stream.json"


def folder_of(source: DatasetSource, settings: StreamSettings) -> Path:
    """Where the stream of a dataset under some settings is kept, whether it is there or not."""
    columns = _columns(source.config)
    if source.parts:
        columns = {part.name: _columns(part.config) for part in source.parts}
    values, domains = asdict(settings), settings.stream == "domains"
    left_out = () if domains else DOMAINS_ONLY
    if settings.tie_order == "file":  # as folders were named before there was another
        left_out += ("tie_order",)
    if domains or settings.topology == "federated":  # likewise
        left_out += ("topology", *CENTRAL_ONLY)
    values = {name: value for name, value in values.items() if name not in left_out}
    name = hash_of([NUMBERS, source.fingerprint, columns, values], 6)
    return source.path.parent / f"{source.name if source.parts else source.path.stem}.stream-{name}"


def _columns(config: DatasetConfig) -> dict[str, Any]:
    """What a dataset's config says of the columns to read and the rows to keep."""
    return {f.name: getattr(config, f.name) for f in fields(config)
            if f.name.endswith("_FIELD") and f.name != "RATING_FIELD" or f.name in ("drop_events", "val_interval")}


def save(stream: Stream, folder: Path) -> int:
    """Write a stream as a folder, whole or not at all; returns its bytes. Raises UserError if it cannot be written."""
    _require_room(stream, folder)
    about = {"steps": [{name: getattr(step, name) for name in _NUMBERS} | {"sessions": list(step.sessions)}
                       for step in stream.steps], "unfiltered": dict(stream.unfiltered), "digests": {}}
    if stream.domains:
        about["domains"] = [{"name": part.name, "users": [part.users.start, part.users.stop],
                             "items": [part.items.start, part.items.stop], "interactions": list(part.interactions)}
                            for part in stream.domains]
    try:
        with folder_beside(folder) as beside:
            whole = beside / "whole"
            whole.mkdir()
            for name, values in _arrays(stream):
                np.save(whole / f"{name}.npy", values)
                about["digests"][name] = fingerprint(whole / f"{name}.npy")
            (whole / _ABOUT).write_text(json.dumps(about | {"digest": hash_of(about)}))
            size = sum(path.stat().st_size for path in whole.iterdir())
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(whole, folder)
    except OSError as error:
        # NumPy says how many bytes were not written instead of why.
        raise UserError(f"{folder}: cannot be written ({error.strerror or 'no space left'}).") from None
    return size


def _require_room(stream: Stream, folder: Path) -> None:
    """Raise UserError if the disk has not enough room for the stream, saying for how much of it."""
    needed, free = sum(values.nbytes for _, values in _arrays(stream)), free_bytes(folder)
    if needed > free:
        rows = sum(step.interactions for step in stream.steps)
        raise UserError(f"{folder}: not enough room: {free / (1 << 20):,.1f} MiB are free, and the stream takes "
                        f"{needed / (1 << 20):,.1f} MiB.\nAbout {rows * free // needed:,} of the {rows:,} interactions "
                        f"would fit. Runs read the dataset's file without it.")


def _arrays(stream: Stream) -> Iterator[tuple[str, np.ndarray]]:
    yield "users", stream.user_tokens.astype(str, copy=False)
    yield "items", stream.item_tokens.astype(str, copy=False)
    for step in stream.steps:
        for split in SPLITS:
            for part in _LISTS:
                yield f"{step.index}-{split}-{part}", getattr(step.split(split), part).numpy()
        for split, sessions in step.sessions.items():
            for part in fields(Sessions):
                yield f"{step.index}-{split}-sessions-{part.name}", getattr(sessions, part.name).numpy()


def load(folder: Path) -> Stream:
    """A stream that was saved, mapped from its files, all of which are read once and compared with their digests;
    raises UserError if a file is missing or changed."""
    name = _ABOUT
    try:
        about = json.loads(_regular(folder / _ABOUT).read_text())
        if about.pop("digest") != hash_of(about):
            raise ValueError("its content is not what was written, or is of a former version")
        arrays = {}
        for part, digest in about["digests"].items():
            name = f"{part}.npy"
            if fingerprint(_regular(folder / name)) != digest:
                raise ValueError("its content is not what was written")
            arrays[part] = np.load(folder / name, mmap_mode="c")  # "c": never written back
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wrong = " ".join(str(getattr(error, "strerror", None) or error).split())[:120]
        raise UserError(f"{folder}: is damaged, {name}: {wrong}.\n"
                        f"Delete the folder, or make it anew with `data prepare`.") from None

    def parts(cls: type, name: str) -> Any:
        names = _LISTS if cls is Ragged else [part.name for part in fields(cls)]
        return cls(*(torch.from_numpy(arrays[f"{name}-{part}"]) for part in names))

    steps = []
    for numbers in about["steps"]:
        at, splits = numbers["index"], numbers.pop("sessions")
        steps.append(Step(**numbers, **{split: parts(Ragged, f"{at}-{split}") for split in SPLITS},
                          sessions={split: parts(Sessions, f"{at}-{split}-sessions") for split in splits}))
    domains = [DomainPart(part["name"], range(*part["users"]), range(*part["items"]), tuple(part["interactions"]))
               for part in about.get("domains", ())]
    return Stream(tuple(steps), arrays["users"], arrays["items"], about["unfiltered"], tuple(domains))


def _regular(path: Path) -> Path:
    """The path of a file; raises ValueError if there is none, as a pipe would be waited for."""
    if not path.is_file():
        raise ValueError("is missing, or no file")
    return path
