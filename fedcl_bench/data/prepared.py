"""Streams kept as arrays on disk: runs map them into memory instead of reading and splitting the interactions again.

A prepared stream is a folder beside the dataset's file, named by a hash of all that the stream depends on: the bytes of
the file, the columns and filters of the dataset's config, the stream's settings and the version of the code's numbers.
One of other settings or of a changed file is not found, rather than wrong.

Pages of the arrays belong to the system's cache, so that a stream may be larger than memory, and several runs at once
share one copy. When a stream is opened they are read once: each file must have the digest that was written with it,
since compiled code looks its ids up.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from ..core.errors import Corrupt, UserError
from ..core.files import folder_beside
from ..core.schema import fields_of, lists, mapping, one_of, plain, read_json, text, whole
from ..core.version import NUMBERS_VERSION
from .stream import CENTRAL_ONLY, DOMAINS_ONLY, DomainPart, Ragged, Sessions, Step, Stream, StreamSettings

if TYPE_CHECKING:
    from .source import DatasetConfig, DatasetSource

_SPLITS = ("train", "valid", "test")
_NUMBERS = ("index", "n_users", "n_items", "old_users", "old_items", "interactions")
_ABOUT = "stream.json"
_STEP = fields_of({**dict.fromkeys(_NUMBERS, whole()), "sessions": lists(one_of(*_SPLITS, "known"))}, {})
_RANGE = lists(whole(), 2)
_DOMAIN = fields_of({"name": text, "users": _RANGE, "items": _RANGE, "interactions": lists(whole())})
_CONTENT = fields_of({"steps": lists(_STEP), "unfiltered": mapping(plain), "digests": mapping(text), "digest": text},
                     {"domains": lists(_DOMAIN)})


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
    text = json.dumps([NUMBERS_VERSION, source.fingerprint, columns, values], sort_keys=True)
    name = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return source.path.parent / f"{source.name if source.parts else source.path.stem}.stream-{name}"


def _columns(config: DatasetConfig) -> dict[str, Any]:
    """What a dataset's config says of the columns to read and the rows to keep."""
    return {f.name: getattr(config, f.name) for f in fields(config)
            if f.name.endswith("_FIELD") or f.name in ("drop_events", "val_interval")}


def save(stream: Stream, folder: Path) -> int:
    """Write a stream; the folder is there whole or not at all. Returns its bytes.

    Raises:
        UserError: if it cannot be written.
    """
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
                about["digests"][name] = _digest_in(whole / f"{name}.npy")
            (whole / _ABOUT).write_text(json.dumps(about | {"digest": _digest_of(about)}))
            size = sum(path.stat().st_size for path in whole.iterdir())
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(whole, folder)
    except OSError as error:
        # NumPy says how many bytes were not written instead of why.
        raise UserError(f"{folder}: cannot be written ({error.strerror or 'no space left'}).") from None
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


class _Damaged(Exception):
    """A file of a prepared stream is not what was written: its name, and what is wrong."""


def load(folder: Path) -> Stream:
    """A stream that was saved, mapped from its files, all of which are read once and compared with their digests.

    Raises:
        UserError: if a file is missing or changed.
    """
    try:
        about = _read_about(folder)
        steps = tuple(_read_step(folder, about["digests"], step) for step in about["steps"])
        domains = tuple(DomainPart(part["name"], range(*part["users"]), range(*part["items"]),
                                   tuple(part["interactions"])) for part in about.get("domains", ()))
        return Stream(steps, *(_array(folder, about["digests"], name) for name in ("users", "items")),
                      about["unfiltered"], domains)
    except _Damaged as error:
        name, wrong = error.args
    raise UserError(f"{folder}: is damaged, {name}: {wrong}.\n"
                    f"Delete the folder, or make it anew with `data prepare`.") from None


def _said(error: Exception) -> str:
    """What an error says, in part of a line."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:120]


def _read_about(folder: Path) -> dict[str, Any]:
    """The content of ``stream.json``."""
    path = folder / _ABOUT
    try:
        about = read_json(path, _CONTENT, "")
    except FileNotFoundError:
        raise _Damaged(_ABOUT, "is missing") from None
    except Corrupt as error:
        raise _Damaged(_ABOUT, error.wrong.removeprefix(f"{path}: ")) from None
    if about.pop("digest") != _digest_of(about):
        raise _Damaged(_ABOUT, "its content is not what was written, or is of a former version")
    return about


def _digest_of(about: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()


def _digest_in(path: Path) -> str:
    """A digest of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _array(folder: Path, digests: Mapping[str, str], name: str) -> np.ndarray:
    """An array, mapped from its file."""
    path = folder / f"{name}.npy"
    if not path.is_file():
        raise _Damaged(path.name, "is missing, or no file")
    try:
        if _digest_in(path) != digests.get(name):
            raise _Damaged(path.name, "its content is not what was written")
        return np.load(path, mmap_mode="c")  # "c": never written back
    except (OSError, ValueError) as error:
        raise _Damaged(path.name, _said(error)) from None


def _read_step(folder: Path, digests: Mapping[str, str], numbers: dict[str, Any]) -> Step:
    """A step, given its numbers and the splits of its sessions."""
    def tensors(cls: type, name: str) -> dict[str, Tensor]:
        return {part.name: torch.from_numpy(_array(folder, digests, f"{name}-{part.name}")) for part in fields(cls)}

    at, splits = numbers["index"], numbers.pop("sessions")
    lists = {split: Ragged(**tensors(Ragged, f"{at}-{split}")) for split in _SPLITS}
    sessions = {split: Sessions(**tensors(Sessions, f"{at}-{split}-sessions")) for split in splits}
    return Step(**numbers, **lists, sessions=sessions)
