"""Checkpoints and shared blocks: a run's progress in one file, which is checked before anything is computed with it.

A file begins with the checksum of the rest, and carries the version of its format and the hash of its run. Its tables
must have the shapes that the run's data and settings give them. Against damage and mix-ups that is enough.

``model.pt`` of a record, with its checksum beside it, holds the tables after the last block, the ids of their rows and
the method's state.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch

from ..core.errors import Corrupt
from ..evaluation.ranking import UserScores
from ..federation.parts import Best, Federation, Progress, PartialRound
from ..core.files import read_required, reading, replacing, write_atomically
from ..federation.loop import clients_of
from ..plugin.state import Snapshot
from ..records.record import MODEL, MODEL_SUM
from .plugin_errors import words

VERSION = 3  # of the format; raised where a former file would be read otherwise than it was meant
DIGEST = 32  # bytes of a checksum
CURE = "Delete the file; what it held is computed again."
_MODEL_CURE = "Delete the file: no table needs it. Running the record again makes it."
_SNAPSHOTS = "model", "previous"


def digest_from(file: BinaryIO, start: int) -> bytes:
    """The checksum of a file's content from ``start`` on, without a copy of it all in memory."""
    file.seek(start)
    digest = hashlib.blake2b(digest_size=DIGEST)
    while part := file.read(1 << 22):
        digest.update(part)
    return digest.digest()


def write_packed(path: Path, value: Any) -> None:
    """Write tensors, numbers, texts and containers of them to a file that begins with the hash of the rest. Checkpoints
    are replaced while a run may be killed, and two files are never replaced at once. So theirs is inside."""
    with replacing(path) as file:
        file.write(bytes(DIGEST))
        torch.save(value, file)
        digest = digest_from(file, DIGEST)
        file.seek(0)
        file.write(digest)


def unpack(path: Path, device: str) -> Any:
    """What ``write_packed`` wrote, without its bytes in memory besides the tensors; raises Corrupt, and
    FileNotFoundError if nothing is there."""
    with reading(path, CURE) as file:
        if file.read(DIGEST) != digest_from(file, DIGEST):
            raise Corrupt(f"{path}: its hash does not match its content", CURE)
        file.seek(DIGEST)
        return read_tensors(file, path, device)


def read_tensors(file: IO[bytes], path: Path, device: str) -> Any:
    """What ``torch.save`` wrote, if that is tensors, numbers, texts and containers of them. Raises Corrupt. Anything
    else is pickled, and reading it would run code of whoever wrote it."""
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except pickle.UnpicklingError:
        raise Corrupt(f"{path}: holds more than tensors, numbers and texts, which the suite never writes and which "
                      f"could run code of others", CURE) from None
    except Exception as error:  # PyTorch raises whatever its readers do
        raise Corrupt(f"{path}: is no file of tensors ({words(error)})", CURE) from None


def save_progress(path: Path, progress: Progress, elapsed: float, run: str = "") -> None:
    """Write a checkpoint. ``elapsed``: wall time spent on the run so far, in seconds; ``run``: hash of the run or, of a
    shared block 0, its ``base_hash``."""
    write_packed(path, {"version": VERSION, "run": run, "progress": _as_plain_data(progress), "elapsed": elapsed})


def _as_plain_data(progress: Progress) -> dict[str, Any]:
    """A progress as tensors, numbers, texts and containers of them."""
    content = {f.name: getattr(progress, f.name) for f in fields(Progress) if f.name != "fraction_done"}
    if progress.within:
        within = progress.within()
        content["within"] = {**vars(within), "model": dict(vars(within.model))}
    for name in _SNAPSHOTS:
        content[name] = dict(vars(content[name]))
    content["best"] = {**vars(progress.best), "model": dict(vars(progress.best.model))}
    content["tests"] = [(t, s, scores.users, scores.values) for t, s, scores in progress.tests]
    return content


def bytes_from_progress(progress: Progress) -> bytes:
    file = io.BytesIO()
    torch.save(_as_plain_data(progress), file)
    return file.getvalue()


def progress_from_bytes(content: bytes, where: Path) -> Progress:
    """The inverse of ``bytes_from_progress``; raises Corrupt."""
    return _progress_from(read_tensors(io.BytesIO(content), where, "cpu"))


def load_progress(path: Path, device: str, federation: Federation | None = None, run: str = ""
                  ) -> tuple[Progress, float] | None:
    """Read a checkpoint, or None if there is none. Returns the progress and the seconds that it took. Raises Corrupt if
    the file is not what was written, or not of this run. ``federation``: of the run that is to go on from it; None: the
    shapes of its tables are not looked at; ``run``: as it was saved with."""
    try:
        content = unpack(path, device)
    except FileNotFoundError:
        return None
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise Corrupt(f"{path}: is not a checkpoint of this version: found {version}, accepted: {VERSION}", CURE)
    if content["run"] != run:
        raise Corrupt(f"{path}: is of another run: found the hash {content['run']}, accepted: {run}", CURE)
    progress = _progress_from(content["progress"])
    if federation is not None:
        check_tables(path, progress, federation)
    return progress, content["elapsed"]


def _progress_from(saved: dict[str, Any]) -> Progress:
    for name in _SNAPSHOTS:
        saved[name] = Snapshot(**saved[name])
    saved["best"] = Best(**{**saved["best"], "model": Snapshot(**saved["best"]["model"])})
    saved["tests"] = tuple((t, s, UserScores(users, values)) for t, s, users, values in saved["tests"])
    if within := saved["within"]:
        within = PartialRound(**{**within, "model": Snapshot(**within["model"])})
        saved["within"] = lambda: within
    return Progress(**saved)


def check_tables(path: Path, progress: Progress, federation: Federation) -> None:
    """Raise Corrupt unless a progress that was read from ``path`` has the tables of the run, with their shapes and
    types. Of a method's own private tables only the rows are known, one per user."""
    step = federation.stream.steps[progress.step + (progress.round > 0) - 1]
    expected = clients_of(federation).untrained(federation, step)
    for kind in ("public", "private", "dense", "local", "personalised"):
        known = getattr(expected, kind)
        for found in (getattr(progress.model, kind), getattr(progress.best.model, kind)):
            for name in {**known, **found}:
                table, like = found.get(name), known.get(name)
                if like is None and kind == "private" and table.shape[:1] == (step.n_users,):
                    continue
                if table is None or like is None or (table.shape, table.dtype) != (like.shape, like.dtype):
                    raise Corrupt(f"{path}: does not fit the run's data and settings: found {_form(table)} as table "
                                  f"'{kind}.{name}', accepted: {_form(like)}", CURE)


def _form(table: torch.Tensor | None) -> str:
    """Type and shape of a table in words."""
    return "none" if table is None else f"{str(table.dtype).removeprefix('torch.')} {tuple(table.shape)}"


@dataclass(frozen=True)
class SavedModel:
    """What ``model.pt`` holds."""

    tables: Snapshot  # after the last block, of its best round
    # Original ids in the order of the tables' rows.
    user_ids: list[str]
    item_ids: list[str]
    # The method's in that round, empty if it does not rank by them.
    client_state: dict[str, torch.Tensor]
    server_state: dict[str, torch.Tensor]


def write_model(folder: Path, progress: Progress, federation: Federation) -> None:
    best, stream = progress.best, federation.stream
    # State that changes no ranking is left out: it may hold whole tables of the step before.
    stateful = any(map(federation.method.overrides, ("rescore", "rescore_session", "represent")))
    content = {**vars(best.model), "user_ids": stream.user_tokens.astype(str, copy=False).tolist(),
               "item_ids": stream.item_tokens.astype(str, copy=False).tolist(),
               "client_state": best.client_state if stateful else {},
               "server_state": best.server_state if stateful else {}}
    with replacing(folder / MODEL) as file:
        torch.save(content, file)
        checksum = digest_from(file, 0)
    write_atomically(folder / MODEL_SUM, f"{checksum.hex()}  {MODEL}\n".encode())


def read_model(folder: Path) -> SavedModel:
    """The model of a finished run's folder; raises Corrupt if the file was deleted or has changed."""
    path = folder / MODEL
    if not path.is_file():
        raise Corrupt(f"{path}: is {'no file' if path.exists() else 'missing'}", _MODEL_CURE)
    recorded = read_required(folder / MODEL_SUM, _MODEL_CURE).split()
    try:
        with open(path, "rb") as file:
            if recorded[:1] != [digest_from(file, 0).hex().encode()]:
                raise Corrupt(f"{path}: its hash does not match its content", _MODEL_CURE)
            file.seek(0)
            content = read_tensors(file, path, "cpu")
        return SavedModel(Snapshot(**{f.name: content.pop(f.name) for f in fields(Snapshot)}), **content)
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read ({error.strerror})", _MODEL_CURE) from None
    except (AttributeError, KeyError, TypeError):
        raise Corrupt(f"{path}: is not a model of this version", _MODEL_CURE) from None
