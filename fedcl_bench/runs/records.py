"""Run records: one folder per run, written atomically, verified when read.

A run in progress keeps one ``checkpoint.pt``; a finished one has

- ``run.json``        status, settings, environment, metrics, R[t, s], seconds, bytes, and the other files' hashes
- ``metrics.parquet`` trained block, tested block, metric, mean over users, users
- ``rounds.parquet``  one row per round: loss, validation metric, participants, bytes, seconds
- ``users.parquet``   trained block, tested block, user, metric, value
- ``analysis.parquet`` block, kind, id, value: shift of users and items between blocks (see
  ``evaluation/drift.py``)
- ``model.pt``        the tables after the last block, the original ids of their rows and the method's state; by far the
  largest, and no report needs it: it may be deleted. ``torch.load(path, weights_only=True)`` opens it
- ``model.pt.b2sum``  its checksum, as ``b2sum --length 256`` writes it

``run.json`` is written last, so a folder without a finished one is an unfinished run whatever else is in it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import platform
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Sequence

import numpy as np
import pandas as pd
import torch

from ..errors import Busy, UserError
from ..evaluation.beyond import summarise
from ..evaluation.continual import summaries
from ..evaluation.ranking import UserScores
from ..federation.parts import Best, Federation, Progress
from ..files import replacing, write_atomically
from ..method import Method
from ..model import Snapshot
from ..names import refuse_link
from ..ops import kernels
from ..ops.memory import peak_mib
from ..stats import accounting
from ..version import __version__
from .config import RunConfig
from .faults import words

FILES = ("metrics.parquet", "rounds.parquet", "users.parquet", "analysis.parquet")
MODEL, MODEL_SUM = "model.pt", "model.pt.b2sum"
SCHEMA = 2  # of a record's files; raised when their content changes
_DIGEST = 32
_SNAPSHOTS = "model", "previous"
_ZIP = b"PK\x03\x04"  # how a file of torch.save begins; models of former versions begin with their hash


class Corrupt(Exception):
    """A record that exists and cannot be trusted."""


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _digest_from(file: BinaryIO, start: int) -> bytes:
    """The hash of a file's content from ``start`` on, without a copy of it all in memory."""
    file.seek(start)
    digest = hashlib.blake2b(digest_size=_DIGEST)
    while part := file.read(1 << 22):
        digest.update(part)
    return digest.digest()


def _write_packed(path: Path, value: Any) -> None:
    """Write tensors, numbers, texts and containers of them to a file that begins with the hash of the rest.

    Checkpoints are replaced while a run may be killed, and two files are never replaced at once. So theirs is inside.
    """
    with replacing(path) as file:
        file.write(bytes(_DIGEST))
        torch.save(value, file)
        digest = _digest_from(file, _DIGEST)
        file.seek(0)
        file.write(digest)


def ranks_by_state(method: Method) -> bool:
    """Whether a method's state may change how a model ranks. Others' states are left out of models: they hold whole
    tables of the step before."""
    return method.overrides("rescore") or method.overrides("represent")


def _write_model(folder: Path, progress: Progress, federation: Federation | None) -> None:
    """Write ``model.pt`` and its checksum; without the run's parts there are neither ids nor state."""
    best, content = progress.best, dict(vars(progress.best.model))
    if federation is not None:
        stream, stateful = federation.stream, ranks_by_state(federation.method)
        content |= {"client_state": best.client_state if stateful else {},
                    "server_state": best.server_state if stateful else {},
                    "user_ids": stream.user_tokens.astype(str).tolist(),
                    "item_ids": stream.item_tokens.astype(str).tolist()}
    with replacing(folder / MODEL) as file:
        torch.save(content, file)
        digest = _digest_from(file, 0)
    write_atomically(folder / MODEL_SUM, f"{digest.hex()}  {MODEL}\n".encode())


def _read_model(folder: Path, device: str) -> dict[str, Any]:
    """The verified content of ``model.pt``. Raises Corrupt or FileNotFoundError."""
    path = folder / MODEL
    with open(path, "rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return _unpack(path.read_bytes(), device)
        try:
            recorded = (folder / MODEL_SUM).read_text(encoding="utf-8").split()
        except FileNotFoundError:
            raise Corrupt(f"its checksum {MODEL_SUM} is missing") from None
        if recorded[:1] != [_digest_from(file, 0).hex()]:
            raise Corrupt("its hash does not match its content")
        file.seek(0)
        return _tensors(file, device)


def _unpack(content: bytes, device: str) -> Any:
    packed = memoryview(content)[_DIGEST:]
    if _digest(packed) != content[:_DIGEST]:
        raise Corrupt("its hash does not match its content")
    return _tensors(io.BytesIO(packed), device)


def _tensors(file: BinaryIO, device: str) -> Any:
    """What ``torch.save`` wrote, if that is tensors, numbers, texts and containers of them. Raises Corrupt.

    Anything else is pickled, and reading it would run code of whoever wrote it.
    """
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except pickle.UnpicklingError:
        raise Corrupt("holds more than tensors, numbers and texts, which the suite never writes and which could run "
                      "code of others; delete the file") from None
    except Exception as error:  # PyTorch raises whatever its readers do
        raise Corrupt(f"is no file of tensors ({words(error)}); delete the file") from None


def save_progress(path: Path, progress: Progress, elapsed: float) -> None:
    """Write a checkpoint; ``elapsed`` is the wall time in seconds spent on the run so far."""
    content = {f.name: getattr(progress, f.name) for f in fields(Progress)}
    for name in _SNAPSHOTS:
        content[name] = dict(vars(content[name]))
    content["best"] = {**vars(progress.best), "model": dict(vars(progress.best.model))}
    content["tests"] = [(t, s, scores.users, scores.values) for t, s, scores in progress.tests]
    _write_packed(path, {"progress": content, "elapsed": elapsed})


def load_progress(path: Path, device: str) -> tuple[Progress, float] | None:
    """Read a checkpoint, or None if there is none.

    Raises:
        Corrupt: if the file is not what was written.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        saved = _unpack(content, device)
        progress = saved["progress"]
        for name in _SNAPSHOTS:
            progress[name] = Snapshot(**progress[name])
        progress["best"] = Best(**{**progress["best"], "model": Snapshot(**progress["best"]["model"])})
        progress["ways"] = tuple(progress["ways"])
        progress["tests"] = tuple((t, s, UserScores(users, values)) for t, s, users, values in progress["tests"])
        progress["analysis"] = tuple(map(tuple, progress["analysis"]))
        return Progress(**progress), saved["elapsed"]
    except Corrupt as error:
        raise Corrupt(f"{path}: {error}") from None
    except (TypeError, KeyError, ValueError) as error:  # written by another version of the suite
        raise Corrupt(f"{path}: is not a checkpoint of this version ({error})") from None


def privacy_notes(config: RunConfig, rounds: int) -> list[str]:
    """What clipping and noise guarantee the client that took part in most rounds, and what they do not."""
    method = config.method.cls(config.method_settings)
    return [*method.privacy(), *accounting.sentences(config.server.protection, rounds, method_uploads(config))]


def method_uploads(config: RunConfig) -> list[str]:
    """What clients send besides public parameters."""
    return list(config.method.cls(config.method_settings).uploads(config.backbone.cls(config.backbone_settings), 0))


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware of this process."""
    packages = {name: version(name) for name in ("torch", "recbole", "numpy", "pandas", "scipy")}
    return {"fedcl_bench": __version__, "python": platform.python_version(), **packages,
            "system": f"{platform.system()} {platform.machine()}", "processor": _processor(),
            "compiled_kernels": kernels.why_not() is None,
            "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "accelerator": torch.cuda.get_device_name() if device == "cuda" else None}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _tables(progress: Progress) -> dict[str, pd.DataFrame]:
    means, users = [], []
    for t, s, scores in progress.tests:
        for metric, values in scores.values.items():
            means.append((t, s, metric, float(values.mean()), len(values)))
            users.append(pd.DataFrame({"trained_block": np.int16(t), "tested_block": np.int16(s),
                                       "user": scores.users.cpu().numpy(), "metric": metric,
                                       "value": values.cpu().numpy()}))
    every = pd.concat(users, ignore_index=True)
    every["metric"] = every["metric"].astype("category")
    analysis = [pd.DataFrame({"block": np.int16(t), "kind": kind, "id": ids.cpu().numpy().astype(np.int32),
                              "value": values.cpu().numpy()}) for t, kind, ids, values in progress.analysis]
    shifts = pd.concat(analysis or [pd.DataFrame({"block": np.zeros(0, np.int16), "kind": [], "id": np.zeros(
        0, np.int32), "value": np.zeros(0)})], ignore_index=True)
    shifts["kind"] = shifts["kind"].astype("category")
    return {"analysis.parquet": shifts,
            "metrics.parquet": pd.DataFrame(
                means, columns=["trained_block", "tested_block", "metric", "mean", "users"]),
            "rounds.parquet": pd.DataFrame(list(progress.curve)), "users.parquet": every}


def matrices(progress: Progress) -> dict[str, np.ndarray]:
    """R[t, s] of every metric, nan above the diagonal."""
    steps = 1 + max(t for t, _, _ in progress.tests)
    result = {metric: np.full((steps, steps), np.nan) for metric in progress.tests[0][2].values}
    for t, s, scores in progress.tests:
        for metric in result:
            result[metric][t, s] = scores.mean(metric)
    return result


NEARLY = 0.95


def nearly_best(curve: pd.DataFrame) -> dict[str, Any]:
    """What it takes to come to ``NEARLY`` of each block's best validation metric.

    Args:
        curve: one row per round, as ``rounds.parquet`` has them.

    Returns:
        Per block: ``rounds`` from 1; ``seconds`` of training and evaluation; ``bytes_up`` and ``bytes_down`` of all
        clients, up to that round.
    """
    result: dict[str, Any] = {"share": NEARLY, "rounds": [], "seconds": [], "bytes_up": [], "bytes_down": []}
    for _, block in curve.groupby("step"):
        valid = block["valid"].to_numpy()
        first = int(np.argmax(valid >= NEARLY * np.nanmax(valid))) + 1  # nan is not
        rows = block.iloc[:first]
        asked = rows["participants"] + rows.get("dropped", 0)
        result["rounds"].append(first)
        result["seconds"].append(float((rows["train_seconds"] + rows["evaluate_seconds"]).sum()))
        result["bytes_up"].append(int((rows["bytes_up"] * rows["participants"]).sum()))
        result["bytes_down"].append(int((rows["bytes_down"] * asked).sum()))
    return result


def summary(config: RunConfig, progress: Progress, elapsed: float, shared_base: bool,
            most_rounds: int | None = None, interactions: Sequence[int] | None = None) -> dict[str, Any]:
    """The content of ``run.json`` but for status and file hashes.

    Args:
        elapsed: wall time of the run, in seconds.
        shared_base: whether block 0 was taken from an earlier run.
        most_rounds: that a client took part in; None: all of the run's.
        interactions: to find in each block's test; None: not known.
    """
    curve = pd.DataFrame(list(progress.curve))
    per_block = curve.groupby("step")
    asked = curve["participants"] + curve.get("dropped", 0)  # who fails has received the model
    notes = privacy_notes(config, len(curve) if most_rounds is None else most_rounds)
    metrics, matrix, continual = {}, {}, {}
    for name, r in matrices(progress).items():
        diagonal = [float(x) for x in np.diag(r)]
        metrics[name] = {"per_block": diagonal,
                         "avg_incremental": float(np.mean(diagonal[1:])) if len(diagonal) > 1 else None}
        matrix[name] = [[float(r[t, s]) for s in range(t + 1)] for t in range(len(r))]
        continual[name] = summaries(r)
    return {
        "method": config.method.name, "backbone": config.backbone.name, "dataset": config.source.name,
        "seed": config.seed, "device": config.device, "settings": config.settings, "idle_settings": config.idle,
        "metrics": metrics,
        "tested": {"users": [len(scores.users) for t, s, scores in progress.tests if t == s],
                   "interactions": None if interactions is None else list(interactions)},
        "continual": continual, "matrix": matrix,
        **summarise(progress.tests, progress.analysis, max(config.evaluation.topk)),
        "rounds": per_block.size().tolist(),
        "best_round": [progress.best_round(step, config.server.best_round) for step in per_block.groups],
        "seconds": {"total": elapsed, "train": float(curve["train_seconds"].sum()),
                    "evaluate": float(curve["evaluate_seconds"].sum())},
        "peak_memory_mib": peak_mib(), "block0_shared": shared_base,
        "bytes": {"up_per_client_round": per_block["bytes_up"].max().tolist(),
                  "down_per_client_round": per_block["bytes_down"].min().tolist(),
                  "total_up": int((curve["bytes_up"] * curve["participants"]).sum()),
                  "total_down": int((curve["bytes_down"] * asked + curve.get("bytes_down_new", 0)).sum())},
        "nearly_best": nearly_best(curve),
        "privacy": {"uploaded": [] if config.is_central else [
                        *progress.best.model.public, *progress.best.model.dense, *method_uploads(config)],
                    "kept_at_client": [*progress.best.model.private, *progress.client_state],
                    "upload_noise": config.server.upload_noise, "notes": notes},
        "hash": config.hash, "base_hash": config.base_hash, "data_fingerprint": config.source.fingerprint,
        "environment": {**environment(config.device), "ways": list(progress.ways)},
    }


@dataclass(frozen=True)
class SavedModel:
    """What ``model.pt`` holds.

    Attributes:
        tables: after the last block, of its best round.
        user_ids, item_ids: original ids in the order of the tables' rows; None in records of former versions.
        client_state, server_state: the method's in that round, empty if it does not rank by them; None in records of
            former versions.
    """

    tables: Snapshot
    user_ids: list[str] | None
    item_ids: list[str] | None
    client_state: dict[str, torch.Tensor] | None
    server_state: dict[str, torch.Tensor] | None


@dataclass(frozen=True)
class Record:
    """The folder of one run."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def read(self) -> dict[str, Any] | None:
        """The content of ``run.json``, verified; None if the run has not ended.

        Raises:
            Corrupt: if a file is missing, half-written or changed since it was recorded.
        """
        path = self.folder / "run.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            status, files = content["status"], content.get("files", {})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Corrupt(f"{path}: is not a complete run record") from None
        if content.get("schema", 1) != SCHEMA:
            raise Corrupt(f"{path}: is a record of schema {content.get('schema', 1)}, this version reads {SCHEMA}")
        for name in FILES if status == "finished" else ():
            try:
                digest = _digest((self.folder / name).read_bytes()).hex()
            except OSError:
                raise Corrupt(f"{self.folder / name}: is missing") from None
            if files.get(name) != digest:
                raise Corrupt(f"{self.folder / name}: has changed since it was recorded")
        return content

    def finish(self, content: dict[str, Any], progress: Progress,
               federation: Federation | None = None) -> dict[str, Any]:
        """Write all files of a finished run, ``run.json`` last, and drop the checkpoint.

        Args:
            federation: gives ``model.pt`` the original ids of users and items, and the state that the method ranks by.
        """
        blobs = {}
        for name, table in _tables(progress).items():
            buffer = io.BytesIO()
            table.to_parquet(buffer, index=False)
            blobs[name] = buffer.getvalue()
        _write_model(self.folder, progress, federation)
        for name in FILES:
            write_atomically(self.folder / name, blobs[name])
        content = {"schema": SCHEMA, "status": "finished", **content,
                   "files": {name: _digest(blobs[name]).hex() for name in FILES}}
        write_atomically(self.folder / "run.json", json.dumps(content, indent=1).encode())
        self.checkpoint.unlink(missing_ok=True)
        for leftover in self.folder.glob(".*.*"):  # of a file that was being written when a process was killed
            leftover.unlink()
        return content

    def fail(self, config: RunConfig, message: str) -> None:
        """Mark the run as failed."""
        content = {"schema": SCHEMA, "status": "failed", "error": message, "method": config.method.name,
                   "backbone": config.backbone.name, "dataset": config.source.name, "seed": config.seed,
                   "settings": config.settings, "hash": config.hash, "environment": environment(config.device)}
        write_atomically(self.folder / "run.json", json.dumps(content, indent=1).encode())

    def clear(self) -> None:
        """Remove everything of the run but the folder and its lock."""
        for path in self.folder.iterdir():
            if path.name != ".lock":
                path.unlink()

    def set_aside(self) -> Path:
        """Move the record's files into a sibling folder and return it."""
        number = 1
        while (target := self.folder.with_name(f"{self.folder.name}.corrupt{number}")).exists():
            number += 1
        target.mkdir()
        for path in list(self.folder.iterdir()):
            if path.name != ".lock":
                path.rename(target / path.name)
        return target

    def saved_model(self, device: str = "cpu") -> SavedModel:
        """The content of ``model.pt`` of a finished run.

        Raises:
            Corrupt: if the file was deleted or has changed.
        """
        path = self.folder / MODEL
        try:
            content = _read_model(self.folder, device)
        except FileNotFoundError:
            raise Corrupt(f"{path}: is missing") from None
        except Corrupt as error:
            raise Corrupt(f"{path}: {error}") from None
        tables = Snapshot(**{f.name: content.pop(f.name) for f in fields(Snapshot) if f.name in content})
        return SavedModel(tables, *(content.get(f.name) for f in fields(SavedModel)[1:]))

    def model(self, device: str = "cpu") -> Snapshot:
        """The tables after the last block of a finished run; raises as ``saved_model``."""
        return self.saved_model(device).tables

    def users(self) -> pd.DataFrame:
        """Per-user scores of a finished run."""
        return pd.read_parquet(self.folder / "users.parquet")

    @classmethod
    def of(cls, config: RunConfig, results: Path) -> "Record":
        """Where a run is kept in a results folder: under its name, or, if there is only that, under its former one.

        Raises:
            UserError: if that is a symbolic link.
        """
        folder = results / "runs" / config.name
        if config.former_name and not folder.exists():
            former = folder.with_name(config.former_name)
            folder = former if former.exists() else folder
        refuse_link(folder)
        return cls(folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from the same run; the lock vanishes with the process.

        Raises:
            UserError: if the folder cannot be written.
            Busy: if another process is at the run.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            refuse_link(self.folder / ".lock")
            lock = open(self.folder / ".lock", "a")
        except OSError as error:
            raise UserError(f"results folder {self.folder}: cannot be written ({error.strerror}); "
                            f"choose another with --results DIR.") from None
        with lock:
            try:
                import fcntl
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:  # no advisory locks on this system
                pass
            except OSError:
                raise Busy(f"{self.folder}: another process is at this run; wait for it, or stop it first.") from None
            yield
