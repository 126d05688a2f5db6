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

import io
import json
import os
import platform
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy as np
import pandas as pd
import torch

from ..data.features import silent
from ..data.stream import Stream
from ..plugin.silo import ModuleBackbone
from ..rng import Tables
from ..core.errors import Busy, Corrupt, UserError
from ..evaluation.beyond_accuracy import summarise
from ..evaluation.continual import summaries
from ..federation.parts import STAGE, Federation, Progress
from ..core.files import replacing, sweep, write_atomically
from ..plugin.method import Method
from ..plugin.state import Snapshot
from ..core.text import refuse_link
from ..kernels import ops
from ..kernels.memory import peak_mib
from ..core.schema import Wrong, fields_of, fitting, lists, mapping, read_bytes, text
from ..stats import accounting
from ..core.version import __version__
from .checkpoints import digest_from, read_tensors, unpack
from .config import RunConfig
from .frames import digest, read_content, read_frame
from .run_json import CURE, FILES, NAME as RUN, SCHEMA, read_run

MODEL, MODEL_SUM = "model.pt", "model.pt.b2sum"
_MODEL_CURE = "Delete the file: no table needs it. Running the record again makes it."
_NEAR = 1e-6  # of means that were added up in another order
_ZIP = b"PK\x03\x04"  # how a file of torch.save begins; models of former versions begin with their hash


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
        checksum = digest_from(file, 0)
    write_atomically(folder / MODEL_SUM, f"{checksum.hex()}  {MODEL}\n".encode())


def _read_model(folder: Path, device: str) -> dict[str, Any]:
    """The verified content of ``model.pt``. Raises Corrupt."""
    path = folder / MODEL
    try:
        if not path.is_file():
            raise Corrupt(f"{path}: is missing" if not path.exists() else f"{path}: is no file", _MODEL_CURE)
        with open(path, "rb") as file:
            if file.read(len(_ZIP)) != _ZIP:
                return unpack(path.read_bytes(), path, device)
            recorded = read_bytes(folder / MODEL_SUM, _MODEL_CURE).split()
            if recorded[:1] != [digest_from(file, 0).hex().encode()]:
                raise Corrupt(f"{path}: its hash does not match its content", _MODEL_CURE)
            file.seek(0)
            return read_tensors(file, path, device)
    except FileNotFoundError:
        raise Corrupt(f"{path}: its checksum {MODEL_SUM} is missing", _MODEL_CURE) from None
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read ({error.strerror})", _MODEL_CURE) from None


def _tensor(value: Any, field: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise Wrong(field, type(value).__name__, "a tensor")


def _check_model(content: Any, field: str) -> None:
    """Raise Wrong unless these are the parts of a saved model, whose rows have ids. State may lack new users."""
    ids, tables = lists(text), mapping(_tensor)
    fields_of({"public": tables, "private": tables}, {
        "client_state": tables, "server_state": tables, "user_ids": ids, "item_ids": ids,
        **{f.name: tables for f in fields(Snapshot)}})(content, field)
    for of, kinds in (("user_ids", ("private", "memory", "client_state")), ("item_ids", ("public",))):
        for kind in kinds if of in content else ():
            for name, table in content.get(kind, {}).items():
                count = len(content[of])
                part = kind == "client_state" or "/" in name  # rows of one domain
                if not table.ndim or len(table) > count or (len(table) < count and not part):
                    raise Wrong(f"{kind}.{name}", f"shape {tuple(table.shape)}", f"{count} rows, as {of}")


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
            "compiled_kernels": ops.why_not() is None,
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


def matrices(progress: Progress, domains: bool = False) -> dict[str, np.ndarray]:
    """R[t, s] of every metric, nan above the diagonal.

    Args:
        domains: the steps are domains, which are tested once: with a model of their own, whatever comes after.
    """
    steps = 1 + max(t for t, _, _ in progress.tests)
    result = {metric: np.full((steps, steps), np.nan) for metric in progress.tests[0][2].values}
    for t, s, scores in progress.tests:
        for metric in result:
            result[metric][t:steps if domains else t + 1, s] = scores.mean(metric)
    return result


NEARLY = 0.95


def last_stage(curve: pd.DataFrame) -> pd.DataFrame:
    """The rounds, of which only those of a method's last stage count as validated, whose best is tested."""
    if STAGE not in curve:
        return curve
    return curve.assign(valid=curve["valid"].where(curve[STAGE] == curve[STAGE].max()))


def nearly_best(curve: pd.DataFrame) -> dict[str, Any]:
    """What it takes to come to ``NEARLY`` of each block's best validation metric.

    Args:
        curve: one row per round, as ``rounds.parquet`` has them.

    Returns:
        Per block: ``rounds`` from 1; ``seconds`` of training and evaluation; ``bytes_up`` and ``bytes_down`` of all
        clients, up to that round.
    """
    result: dict[str, Any] = {"share": NEARLY, "rounds": [], "seconds": [], "bytes_up": [], "bytes_down": []}
    for _, block in last_stage(curve).groupby("step"):
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
    averaged = slice(None if config.is_domains else 1, None)
    for name, r in matrices(progress, config.is_domains).items():
        diagonal = [float(x) for x in np.diag(r)]
        metrics[name] = {"per_block": diagonal,
                         "avg_incremental": float(np.mean(diagonal[averaged])) if len(diagonal) > 1 else None}
        matrix[name] = [[float(r[t, s]) for s in range(t + 1)] for t in range(len(r))]
        continual[name] = summaries(r)
    return {
        "method": config.method.name, "backbone": config.backbone.name, "dataset": config.source.name,
        "seed": config.seed, "device": config.device, "settings": config.settings, "idle_settings": config.inactive,
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
        "privacy": {**_who_has(config, progress.best.model, progress.client_state),
                    "upload_noise": config.server.upload_noise, "notes": notes},
        "hash": config.hash, "base_hash": config.base_hash, "data_fingerprint": config.source.fingerprint,
        "environment": {**environment(config.device), "ways": list(progress.ways)},
    }


def of_features(config: RunConfig, stream: Stream) -> dict[str, Any]:
    """What a record says of the features of a run's items, per domain; nothing if it has none.

    ``silent`` are the items without a text or vector, whose features are zeros.
    """
    if config.features is None:
        return {}
    each = stream.features
    return {"features": {"fingerprint": config.features.fingerprint, "items": [len(vectors) for vectors in each],
                         "silent": [silent(vectors) for vectors in each], "layers": [v.shape[1] for v in each],
                         "dim": [v.shape[2] for v in each]}}


def _who_has(config: RunConfig, model: Snapshot, state: Tables) -> dict[str, list[str]]:
    """What clients upload, and what they keep; where there is no server, neither."""
    if config.is_central or (config.is_domains and config.stream.topology == "central"):
        return {"uploaded": [], "kept_at_client": []}
    if config.is_domains:
        public, dense = ([*dict.fromkeys(name.rpartition("/")[2] for name in tables)]
                         for tables in (model.public, model.dense))
        shared = dense if config.stream.topology == "federated" else []
        prepared = getattr(config.backbone.cls, "prepared", ModuleBackbone.prepared)
        texts = ["features"] if shared and prepared is not ModuleBackbone.prepared else []
        if shared and (sent := getattr(config.method.cls, "sent", ())):
            uploaded = [name for name in dense if name.startswith(sent)]
            others = [name for name in sent if not any(each.startswith(name) for each in uploaded)]
            return {"uploaded": [*uploaded, *others, *texts],
                    "kept_at_client": [*public, *(name for name in dense if name not in uploaded)]}
        return {"uploaded": [*shared, *texts], "kept_at_client": [*public, *([] if shared else dense)]}
    return {"uploaded": [*model.public, *model.dense, *method_uploads(config)],
            "kept_at_client": [*model.private, *state]}


def _compare(content: dict[str, Any], means: pd.DataFrame, folder: Path) -> None:
    """Raise Corrupt unless the numbers of a ``run.json`` are those of ``metrics.parquet``."""
    said = {(t, s, name): value for name, rows in content["matrix"].items() for t, row in enumerate(rows)
            for s, value in enumerate(row)}
    for row in means.itertuples():
        key = row.trained_block, row.tested_block, row.metric
        if key not in said or abs(said[key] - row.mean) > _NEAR:
            raise Corrupt(f"{folder / RUN}: field 'matrix' is not what metrics.parquet holds", CURE)


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
        content = read_run(self.folder)
        if content is None or content["status"] == "failed":
            return content
        files = content.get("files", {})
        for name in FILES:
            read_content(self.folder / name, files.get(name))
        _compare(content, read_frame(self.folder, "metrics", files), self.folder)
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
                   "files": {name: digest(blobs[name]) for name in FILES}}
        write_atomically(self.folder / RUN, json.dumps(content, indent=1).encode())
        self.tidy()
        return content

    def tidy(self) -> None:
        """Remove what a process that was killed left beside a finished record."""
        self.checkpoint.unlink(missing_ok=True)
        sweep(self.folder)

    def fail(self, config: RunConfig, message: str, updates: Sequence[int] = ()) -> None:
        """Mark the run as failed.

        Args:
            updates: participants summed over the rounds that were done, per block.
        """
        content = {"schema": SCHEMA, "status": "failed", "error": message, "method": config.method.name,
                   "backbone": config.backbone.name, "dataset": config.source.name, "seed": config.seed,
                   "settings": config.settings, "hash": config.hash, "environment": environment(config.device),
                   "client_updates": list(updates)}
        write_atomically(self.folder / RUN, json.dumps(content, indent=1).encode())

    def clear(self) -> None:
        """Remove the run's files, ``run.json`` first; whatever else is in the folder stays.

        Raises:
            UserError: before anything is removed, if a folder has the name of one of them.
        """
        paths = [self.folder / name for name in (RUN, *FILES, MODEL, MODEL_SUM, self.checkpoint.name)]
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                raise UserError(f"{path}: is a folder where the run has a file; nothing was removed. Move it away, and "
                                f"give the same command again.")
        for path in paths:
            path.unlink(missing_ok=True)
        sweep(self.folder)

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
        content = fitting(_read_model(self.folder, device), _check_model, str(self.folder / MODEL), _MODEL_CURE)
        tables = Snapshot(**{f.name: content.pop(f.name) for f in fields(Snapshot) if f.name in content})
        return SavedModel(tables, *(content.get(f.name) for f in fields(SavedModel)[1:]))

    def model(self, device: str = "cpu") -> Snapshot:
        """The tables after the last block of a finished run; raises as ``saved_model``."""
        return self.saved_model(device).tables

    def users(self) -> pd.DataFrame:
        """Per-user scores of a finished run; raises Corrupt."""
        return read_frame(self.folder, "users", (read_run(self.folder) or {}).get("files", {}))

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
