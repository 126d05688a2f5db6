"""What a run's record says of it: from its configuration and its progress to the fields of ``run.json`` and the frames
beside it."""

from __future__ import annotations

import functools
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from ..core.arrow import from_numbers, from_texts
from ..core.version import __version__
from ..data.items.features import silent
from ..data.stream import Stream
from ..evaluation.beyond_accuracy import summarise
from ..evaluation.continual import summaries
from ..evaluation.metrics import RATING_ERRORS
from ..evaluation.ranking import pooled
from ..federation.cross_device import most_rounds
from ..federation.parts import STAGE, Progress
from ..kernels import ops
from ..kernels.memory import peak_mib
from ..plugin.silo import ModuleBackbone
from ..plugin.state import Snapshot
from ..records.frames import Columns, columns_of, of_last_stage
from ..rng import Tables
from ..stats import accounting
from ..stats.significance import interval_of_sample
from .config import RunConfig


def failed(config: RunConfig, message: str, updates: Sequence[int] = ()) -> dict[str, Any]:
    """The content of ``run.json`` of a run that failed; ``updates``: participants summed over the rounds that were
    done, per block."""
    return {"error": message, "method": config.method.name, "backbone": config.backbone.name,
            "dataset": config.source.name, "seed": config.seed, "settings": config.settings, "hash": config.hash,
            "environment": environment(config.device), "client_updates": list(updates)}


def method_uploads(config: RunConfig) -> list[str]:
    """What clients send besides public parameters."""
    method, backbone = config.instances()
    return list(method.uploads(backbone, 0))


def environment(device: str) -> dict[str, Any]:
    packages = {name: version(name) for name in ("torch", "recbole", "numpy", "pandas", "scipy")}
    return {"fedcl_bench": __version__, "python": platform.python_version(), **packages,
            "system": f"{platform.system()} {platform.machine()}", "processor": _processor(),
            "instructions": torch.backends.cpu.get_cpu_capability(),  # that PyTorch uses: they round differently
            "compiled_kernels": ops.why_not() is None,
            "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "accelerator": torch.cuda.get_device_name() if device == "cuda" else None}


@functools.cache
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search("^model name[^:]*:(.*)", info.read_text() if info.is_file() else "", re.MULTILINE)
    return named[1].strip() if named else platform.processor() or "unknown"


def test_means(progress: Progress) -> list[dict[str, Any]]:
    """The mean over users of each metric of each test: the rows of ``metrics.parquet``."""
    return [{"trained_block": t, "tested_block": s, "metric": metric, "mean": float(values.mean()),
             "users": len(values)} for t, s, scores in progress.tests for metric, values in scores.values.items()]


def frames(progress: Progress) -> dict[str, pa.Table]:
    tests = [((t, s, metric), scores.users, values) for t, s, scores in progress.tests
             for metric, values in scores.values.items()]
    means = test_means(progress)
    analysis = [((t, kind), ids, values) for t, kind, ids, values in progress.analysis]
    rounds = {name: from_numbers(values) for name, values in columns_of(progress.curve).items()}
    return {"analysis.parquet": _long(("block", "kind"), "id", np.int32, analysis),
            "metrics.parquet": pa.table({name: (from_texts if name == "metric" else from_numbers)(
                [row[name] for row in means]) for name in means[0]}),
            "rounds.parquet": pa.table(rounds),
            "users.parquet": _long(("trained_block", "tested_block", "metric"), "user", np.int64, tests).select(
                ["trained_block", "tested_block", "user", "metric", "value"])}


_Part = tuple[tuple[Any, ...], torch.Tensor, torch.Tensor]


def _long(names: Sequence[str], of: str, id_type: type, parts: Sequence[_Part]) -> pa.Table:
    """A long table of numbers of users or items. ``names``: of the columns that say what the numbers are: those of
    blocks, and a last one of text; ``of``: the column of ids, of ``id_type``; ``parts``: what the former columns say,
    the ids, and a number of each."""
    parts = [part for part in parts if len(part[1])]
    sizes, kinds = [len(ids) for _, ids, _ in parts], sorted({key[-1] for key, _, _ in parts})
    ids, values = (np.concatenate([np.zeros(0, dtype), *(part[place].cpu().numpy() for part in parts)])
                   for place, dtype in ((1, id_type), (2, np.float64)))
    blocks = {name: np.repeat(np.array([key[place] for key, _, _ in parts], np.int16), sizes)
              for place, name in enumerate(names[:-1])}
    codes = np.repeat(np.array([kinds.index(key[-1]) for key, _, _ in parts], np.int32), sizes)
    texts = pa.DictionaryArray.from_arrays(from_numbers(codes), from_texts(kinds))
    of_numbers = {**blocks, of: ids.astype(id_type), "value": values}
    columns = {name: from_numbers(column) for name, column in of_numbers.items()} | {names[-1]: texts}
    return pa.table({name: columns[name] for name in (*names, of, "value")})


def matrices(progress: Progress) -> dict[str, np.ndarray]:
    """R[t, s] of every metric, nan above the diagonal; a domain is tested with its own latest model."""
    blocks = 1 + max(t for t, _, _ in progress.tests)
    result = {metric: np.full((blocks, blocks), np.nan) for metric in progress.tests[0][2].values}
    for t, s, scores in progress.tests:
        for metric in result:
            result[metric][t:, s] = scores.mean(metric)  # until a later test of it
    return result


NEARLY = 0.95


def _blocks(curve: Columns) -> Iterator[NDArray[Any]]:
    """The rows of each block in turn, as numbers of rows."""
    step = np.asarray(curve["step"])
    for block in np.unique(step):
        yield np.flatnonzero(step == block)


def nearly_best(curve: Columns) -> dict[str, Any]:
    """What it takes to come to ``NEARLY`` of each block's best validation metric, per block: ``rounds`` from 1;
    ``seconds`` of training and evaluation; ``bytes_up`` and ``bytes_down`` of all clients, up to that round."""
    result: dict[str, Any] = {"share": NEARLY, "rounds": [], "seconds": [], "bytes_up": [], "bytes_down": []}
    valid = of_last_stage(curve)
    seconds = np.asarray(curve["train_seconds"]) + np.asarray(curve["evaluate_seconds"])
    spent = {**_bytes_of_all(curve), "seconds": seconds}
    for rows in _blocks(curve):
        best = np.fmax.reduce(valid[rows])  # of an error it is negative
        first = int(np.argmax(valid[rows] >= (NEARLY * best if best >= 0 else best / NEARLY))) + 1  # nan is not
        result["rounds"].append(first)
        for name, of_round in spent.items():
            result[name].append(of_round[rows[:first]].sum().item())
    return result


def _stages(config: RunConfig, curve: Columns) -> dict[str, Any]:
    """The rounds of each stage per block or domain, of a method with several."""
    if STAGE not in curve:
        return {}
    return {"stages": {config.stages[number].name: [int((curve[STAGE][rows] == number).sum()) for rows in
                                                    _blocks(curve)] for number in map(int, np.unique(curve[STAGE]))}}


def _bytes_of_all(curve: Columns) -> dict[str, NDArray[Any]]:
    """What all clients together sent and received in each round; who fails has received the model."""
    participants = np.asarray(curve["participants"])
    lost = np.nan_to_num(np.asarray(curve["dropped"])).astype(np.int64) if "dropped" in curve else 0
    return {"bytes_up": np.asarray(curve["bytes_up"]) * participants,
            "bytes_down": np.asarray(curve["bytes_down"]) * (participants + lost)}


def summary(config: RunConfig, progress: Progress, elapsed: float, shared_base: bool, stream: Stream | None = None
            ) -> dict[str, Any]:
    """The content of ``run.json`` but for status and file hashes. ``elapsed``: wall time of the run, in seconds;
    ``shared_base``: whether block 0 was taken from an earlier run; ``stream``: the run's data; None if they are not at
    hand: what only they tell is left out."""
    curve = columns_of(progress.curve)
    blocks, sent = list(_blocks(curve)), _bytes_of_all(curve)
    up, down = curve["bytes_up"], curve["bytes_down"]
    metrics, matrix, continual = {}, {}, {}
    for name, r in matrices(progress).items():
        diagonal = [float(x) for x in np.diag(r)]
        later = diagonal[config.per_step:] or diagonal
        metrics[name] = {"per_block": diagonal, "avg_incremental": float(np.mean(later)) if len(r) > 1 else None}
        matrix[name] = [[float(r[t, s]) for s in range(t + 1)] for t in range(len(r))]
        continual[name] = summaries(r, config.per_step if len(r) > config.per_step else 1, name in RATING_ERRORS)
    return {
        "method": config.method.name, "backbone": config.backbone.name, "dataset": config.source.name,
        "seed": config.seed, "device": config.device, "settings": config.settings, "inactive_settings": config.inactive,
        "readings": config.readings,
        "metrics": metrics,
        "tested": {"users": [len(scores.users) for t, s, scores in progress.tests if t == s],
                   "interactions": stream and _items_to_find(progress, stream)},
        **_sampled(config, progress, stream),
        **_pooled_errors(progress, stream), "continual": continual, "matrix": matrix,
        **summarise(progress.tests, progress.analysis, max(config.evaluation.topk)),
        "rounds": [len(rows) for rows in blocks], **_stages(config, curve),
        "best_round": [progress.best_round(int(curve["step"][rows[0]]), config.server.best_round) for rows in blocks],
        "seconds": {"total": elapsed, "train": float(curve["train_seconds"].sum()),
                    "evaluate": float(curve["evaluate_seconds"].sum())},
        "peak_memory_mib": peak_mib(), "block0_shared": shared_base,
        # Down: of rounds in which most is sent, as a domain's stage may have no exchange, and without the first
        # download of a client of one user, which is larger.
        "bytes": {"up_per_client_round": [up[rows].max().item() for rows in blocks],
                  "down_per_client_round": [down[rows][up[rows] == up[rows].max()].min().item() for rows in blocks],
                  "total_up": int(np.nansum(sent["bytes_up"] + curve.get("bytes_up_new", 0))),
                  "total_down": int(np.nansum(sent["bytes_down"] + curve.get("bytes_down_new", 0)))},
        "nearly_best": nearly_best(curve),
        "privacy": {**_who_has(config, progress.best.model, progress.client_state, bool(sent["bytes_up"].sum())),
                    "upload_noise": config.server.upload_noise,
                    "notes": _privacy_notes(config, progress, stream)},
        "hash": config.hash, "base_hash": config.base_hash, "data_fingerprint": config.source.fingerprint,
        "environment": {**environment(config.device), "strategies": list(progress.strategies)},
        **({"features": _of_features(config, stream)} if stream and config.features else {}),
    }


def _items_to_find(progress: Progress, stream: Stream) -> list[int]:
    """Of each block's test, interactions of the users who are evaluated."""
    users = {s: scores.users.cpu() for t, s, scores in progress.tests if t == s}
    if stream.domains:
        return [len(unit.test.values) for unit in stream.units()]
    return [len(users[number]) if step.sessions else int(step.test.counts(users[number]).sum())  # of a session the last
            for number, step in enumerate(stream.steps)]


def _sampled(config: RunConfig, progress: Progress, stream: Stream | None) -> dict[str, Any]:
    """What was measured on samples of users, if there are more clients than a sample has."""
    of_users = stream is not None and not config.stream.in_epochs
    clients = stream.steps[-1].n_users if of_users else 0
    samples = {"evaluate_users": config.evaluation.evaluate_users}
    if of_users and len(stream.steps) > 1:
        samples["drift_users"] = config.evaluation.drift_users
    if not (samples := {name: about for name, about in samples.items() if 0 < about < clients}):
        return {}
    intervals: dict[str, list[Any]] = {}
    for t, s, scores in progress.tests if "evaluate_users" in samples else ():
        for metric, values in scores.values.items() if t == s else ():
            intervals.setdefault(metric, []).append(interval_of_sample(values.cpu().numpy()))
    return {"sampled": {"settings": samples, "clients": clients, "intervals": intervals,
                        "to_find": [int((step.test.lengths > 0).sum()) for step in stream.steps]}}


def _pooled_errors(progress: Progress, stream: Stream | None) -> dict[str, Any]:
    """The errors of predicted ratings over all of a block's, which no mean over users is."""
    if stream is None or "rmse" not in progress.tests[0][2].values:
        return {}
    blocks = [pooled(scores, stream.steps[t].test.counts(scores.users.cpu()))
              for t, s, scores in progress.tests if t == s]
    return {"ratings": {name: [block[name] for block in blocks] for name in blocks[0]}}


def _privacy_notes(config: RunConfig, progress: Progress, stream: Stream | None) -> list[str]:
    """What clipping and noise guarantee the client that took part in most rounds, and what they do not."""
    rounds = len(progress.curve)
    if stream and config.server.upload_clip:  # without it, noise guarantees nothing
        rounds = most_rounds(config.federation(stream), progress.curve)
    method, _ = config.instances()
    return [*method.privacy(), *accounting.sentences(config.server.protection, rounds, method_uploads(config),
                                                     learns=[each.learns for each in config.server.disclosures])]


def _of_features(config: RunConfig, stream: Stream) -> dict[str, Any]:
    """What a record says of the features of a run's items, per block. ``silent`` are the items without a text or
    vector, whose features are zeros."""
    each = stream.features * len(stream.steps)
    if (of_users := stream.item_features) is not None:
        each = [of_users[:step.n_items, None] for step in stream.steps]
    return {"fingerprint": config.features.fingerprint, "items": [len(vectors) for vectors in each],
            "silent": [silent(vectors) for vectors in each], "layers": [v.shape[1] for v in each],
            "dim": [v.shape[2] for v in each]}


def _who_has(config: RunConfig, model: Snapshot, state: Tables, sends: bool) -> dict[str, list[str]]:
    """What clients upload, if they send anything, and what they keep; where there is no server, neither."""
    nothing: dict[str, list[str]] = {"uploaded": [], "kept_at_client": []}
    if config.stream.topology_in_effect == "central":
        return nothing
    method, backbone = config.instances()
    if config.stream.of_domains:
        public, dense = ([*dict.fromkeys(name.rpartition("/")[2] for name in tables)]
                         for tables in (model.public, model.dense))
        shared = dense if config.stream.topology == "federated" else []
        together = isinstance(backbone, ModuleBackbone) and backbone.prepares_together
        texts = ["features"] if shared and together else []
        if shared and (sent := getattr(method, "sent", ())):
            uploaded = [name for name in dense if name.startswith(sent)]
            others = [name for name in sent if not any(each.startswith(name) for each in uploaded)]
            return {"uploaded": [*uploaded, *others, *texts],
                    "kept_at_client": [*public, *(name for name in dense if name not in uploaded)]}
        return {"uploaded": [*shared, *texts], "kept_at_client": [*public, *([] if shared else dense)]}
    if method.trains != "clients" and method.first_step == 0:
        return nothing
    shared = [*method.sums(backbone, model.n_items)] or [*model.sent]
    return {"uploaded": [*shared, *method_uploads(config)] if sends else [],
            "kept_at_client": [*model.private, *state]}
