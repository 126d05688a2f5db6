"""Checkpoints and shared blocks: a run's progress in one file, which is checked before anything is computed with it.

A file begins with the checksum of the rest. ``resumable.py`` says what it must hold.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import Corrupt
from ..evaluation.ranking import UserScores
from ..federation.parts import Best, Federation, Progress, Within
from ..files import replacing
from ..model import Snapshot
from ..schema import fitting, read_bytes
from . import resumable
from .faults import words

DIGEST = 32  # bytes of a checksum
CURE = "Delete the file; what it held is computed again."
_SNAPSHOTS = "model", "previous"


def digest_from(file: BinaryIO, start: int) -> bytes:
    """The checksum of a file's content from ``start`` on, without a copy of it all in memory."""
    file.seek(start)
    digest = hashlib.blake2b(digest_size=DIGEST)
    while part := file.read(1 << 22):
        digest.update(part)
    return digest.digest()


def write_packed(path: Path, value: Any) -> None:
    """Write tensors, numbers, texts and containers of them to a file that begins with the hash of the rest.

    Checkpoints are replaced while a run may be killed, and two files are never replaced at once. So theirs is inside.
    """
    with replacing(path) as file:
        file.write(bytes(DIGEST))
        torch.save(value, file)
        digest = digest_from(file, DIGEST)
        file.seek(0)
        file.write(digest)


def unpack(content: bytes, path: Path, device: str) -> Any:
    """What ``write_packed`` wrote; raises Corrupt."""
    packed = memoryview(content)[DIGEST:]
    if hashlib.blake2b(packed, digest_size=DIGEST).digest() != content[:DIGEST]:
        raise Corrupt(f"{path}: its hash does not match its content", CURE)
    return read_tensors(io.BytesIO(packed), path, device)


def read_tensors(file: BinaryIO, path: Path, device: str) -> Any:
    """What ``torch.save`` wrote, if that is tensors, numbers, texts and containers of them. Raises Corrupt.

    Anything else is pickled, and reading it would run code of whoever wrote it.
    """
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except pickle.UnpicklingError:
        raise Corrupt(f"{path}: holds more than tensors, numbers and texts, which the suite never writes and which "
                      f"could run code of others", CURE) from None
    except Exception as error:  # PyTorch raises whatever its readers do
        raise Corrupt(f"{path}: is no file of tensors ({words(error)})", CURE) from None


def save_progress(path: Path, progress: Progress, elapsed: float) -> None:
    """Write a checkpoint; ``elapsed`` is the wall time in seconds spent on the run so far."""
    content = {f.name: getattr(progress, f.name) for f in fields(Progress) if f.name != "under_way"}
    if progress.within:
        within = progress.within()
        content["within"] = {**vars(within), "model": dict(vars(within.model))}
    for name in _SNAPSHOTS:
        content[name] = dict(vars(content[name]))
    content["best"] = {**vars(progress.best), "model": dict(vars(progress.best.model))}
    content["tests"] = [(t, s, scores.users, scores.values) for t, s, scores in progress.tests]
    write_packed(path, {"progress": content, "elapsed": elapsed})


def load_progress(path: Path, device: str, federation: Federation | None = None) -> tuple[Progress, float] | None:
    """Read a checkpoint, or None if there is none.

    Args:
        federation: of the run that is to go on from it; None: it is compared with no run.

    Raises:
        Corrupt: if the file is not what was written, or not of this run.
    """
    try:
        content = read_bytes(path, CURE)
    except FileNotFoundError:
        return None
    content = unpack(content, path, device)
    saved = fitting(content, resumable.saved, f"{path}: is not a checkpoint of this version", CURE)
    progress = saved["progress"]
    for name in _SNAPSHOTS:
        progress[name] = Snapshot(**progress[name])
    progress["best"] = Best(**{**progress["best"], "model": Snapshot(**progress["best"]["model"])})
    progress["ways"], progress["curve"] = tuple(progress["ways"]), tuple(progress["curve"])
    progress["tests"] = tuple((t, s, UserScores(users, values)) for t, s, users, values in progress["tests"])
    progress["analysis"] = tuple(map(tuple, progress["analysis"]))
    if within := progress["within"]:
        within = Within(**{**within, "model": Snapshot(**within["model"])})
        progress["within"] = lambda: within
    progress = Progress(**progress)
    if federation is not None:
        fitting(progress, lambda value, field: resumable.check(value, federation), f"{path}: is of another run", CURE)
    return progress, saved["elapsed"]
