"""Checkpoints and shared blocks: a run's progress in one file, which is checked before anything is computed with it.

A file begins with the checksum of the rest. What it holds is compared with a schema, and its tables with the stream
and the backbone of the run that is to go on from it: compiled code looks rows up without asking whether they exist.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..backbone import Backbone
from ..data.stream import Step
from ..domain_module import ModuleBackbone
from ..errors import Corrupt
from ..evaluation.beyond import missing_of_lists
from ..evaluation.ranking import UserScores
from ..evaluation.sessions import FULL
from ..federation.parts import Best, Federation, Progress
from ..federation.silos import stages_of
from ..files import replacing
from ..model import Snapshot
from ..schema import Wrong, fields_of, fitting, flag, lists, mapping, number, read_bytes, text, whole
from .faults import words
from .frames import COLUMNS

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


def tensor(value: Any, field: str) -> None:
    """A tensor whose elements are all in it."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise Wrong(field, getattr(value, "layout", type(value).__name__), "a dense tensor")


_COUNT, _TENSORS = whole(), mapping(tensor)
snapshot = fields_of({"public": _TENSORS, "private": _TENSORS}, {
    f.name: _TENSORS for f in fields(Snapshot) if f.name not in ("public", "private")})
_ROW = fields_of({"step": _COUNT, "round": _COUNT, **dict.fromkeys(COLUMNS["rounds"].keys() - {"step", "round"},
                                                                   number)})


def _row(value: Any, field: str) -> None:
    """A round: numbers, some of which every round has."""
    _ROW(value, field)
    mapping(number)(value, field)


_PROGRESS = fields_of({
    "step": _COUNT, "round": _COUNT, "trained": flag, **dict.fromkeys(_SNAPSHOTS, snapshot),
    "best": fields_of({"model": snapshot, "round": _COUNT, "client_state": _TENSORS, "server_state": _TENSORS}, {}),
    "best_value": number, "stale": _COUNT, "client_state": _TENSORS, "server_state": _TENSORS, "curve": lists(_row),
    "tests": lists(lambda value, field: _parts(value, field, _COUNT, _COUNT, tensor, _TENSORS)),
    "analysis": lists(lambda value, field: _parts(value, field, _COUNT, text, tensor, tensor)),
    "ways": lists(text)}, {})
_SAVED = fields_of({"progress": _PROGRESS, "elapsed": number}, {})


def _parts(value: Any, field: str, *checks: Any) -> None:
    """A tuple of parts that each fit; the last two are values of the same users or items."""
    lists(lambda each, name: None, len(checks))(value, field)
    for i, (check, part) in enumerate(zip(checks, value)):
        check(part, f"{field}[{i}]")
    for values in value[-1].values() if isinstance(value[-1], dict) else [value[-1]]:
        if values.ndim != 1 or values.shape != value[-2].shape:
            raise Wrong(field, f"{tuple(values.shape)} values of {tuple(value[-2].shape)} ids", "a value of each")


def save_progress(path: Path, progress: Progress, elapsed: float) -> None:
    """Write a checkpoint; ``elapsed`` is the wall time in seconds spent on the run so far."""
    content = {f.name: getattr(progress, f.name) for f in fields(Progress) if f.name != "under_way"}
    for name in _SNAPSHOTS:
        content[name] = dict(vars(content[name]))
    content["best"] = {**vars(progress.best), "model": dict(vars(progress.best.model))}
    content["tests"] = [(t, s, scores.users, scores.values) for t, s, scores in progress.tests]
    write_packed(path, {"progress": content, "elapsed": elapsed})


def load_progress(path: Path, device: str, federation: Federation | None = None) -> tuple[Progress, float] | None:
    """Read a checkpoint, or None if there is none.

    Args:
        federation: of the run that is to go on from it; None: its tables are not compared with anything.

    Raises:
        Corrupt: if the file is not what was written, or not of this run.
    """
    try:
        content = read_bytes(path, CURE)
    except FileNotFoundError:
        return None
    saved = fitting(unpack(content, path, device), _SAVED, f"{path}: is not a checkpoint of this version", CURE)
    progress = saved["progress"]
    for name in _SNAPSHOTS:
        progress[name] = Snapshot(**progress[name])
    progress["best"] = Best(**{**progress["best"], "model": Snapshot(**progress["best"]["model"])})
    progress["ways"], progress["curve"] = tuple(progress["ways"]), tuple(progress["curve"])
    progress["tests"] = tuple((t, s, UserScores(users, values)) for t, s, users, values in progress["tests"])
    progress["analysis"] = tuple(map(tuple, progress["analysis"]))
    progress = Progress(**progress)
    if federation is not None:
        fitting(progress, lambda value, field: _check_run(value, federation), f"{path}: is of another run", CURE)
    return progress, saved["elapsed"]


def _check_domains(progress: Progress, federation: Federation) -> None:
    """Raise Wrong unless the progress can be one of a stream of domains: each has its rows, and its copy of dense
    parameters; the rounds of each follow one another, and each that has ended is tested."""
    steps = federation.stream.steps
    if progress.step not in (0, len(steps)) or progress.trained and progress.step:
        raise Wrong("step", progress.step, f"0, or {len(steps)} once all domains have ended")
    rounds: dict[int, list[int]] = {}
    for row in progress.curve:
        rounds.setdefault(row["step"], []).append(row["round"])
    if set(rounds) != set(range(len(steps) if progress.round or progress.step else 0)) or any(
            of != list(range(len(of))) for of in rounds.values()) or (
            not progress.step and not _fits(progress.round, [len(of) for of in rounds.values()], federation)):
        raise Wrong("curve", progress.curve, f"{progress.round} rounds of {len(steps)} domains")
    tested = [t for t, s, _ in progress.tests if t == s]
    if len(tested) != len(progress.tests) or tested != sorted(set(tested) & set(rounds)) or (
            (progress.trained or progress.step) and len(tested) < len(steps)):
        raise Wrong("tests", progress.tests, f"those of {len(steps)} domains")
    if not {row["step"] for row in progress.curve if not math.isnan(row["valid"])}.issuperset(tested):
        raise Wrong("curve", progress.curve, "a validation in every domain that was tested")
    for field, model in (("model", progress.model), ("best.model", progress.best.model)):
        if isinstance(federation.backbone, ModuleBackbone):
            _check_of_modules(field, model, steps[-1].n_items, len(steps))
        else:
            _check_tables(field, model, federation, steps[-1], len(steps))
    item_rows = set(progress.model.public)
    for name, values in progress.server_state.items():
        part, _, parameter = name.partition(" of ")
        rows = steps[-1].n_items if parameter in item_rows and part != "step" else len(steps)
        if not values.ndim or len(values) != rows:
            raise Wrong(f"server_state.{name}", f"shape {tuple(values.shape)}", f"{rows} rows")


def _fits(done: int, rounds: list[int], federation: Federation) -> bool:
    """Whether so many rounds can be done, given those of each domain; it sits rounds out once it has ended a stage."""
    if len(stages_of(federation)) == 1:
        return max(rounds, default=0) == done
    return max(rounds, default=0) <= done <= sum(rounds)


def _check_of_modules(field: str, model: Snapshot, items: int, domains: int) -> None:
    """Every table of modules has the rows of all domains' items, or a copy per domain. Their other lengths are compared
    when the modules are made."""
    for kind, rows in (("public", items), ("dense", domains)):
        for name, table in getattr(model, kind).items():
            if not table.ndim or len(table) != rows:
                raise Wrong(f"{field}.{kind}.{name}", f"shape {tuple(table.shape)}", f"{rows} rows")


def _check_run(progress: Progress, federation: Federation) -> None:
    """Raise Wrong unless a run's progress can be one of these parts."""
    if federation.stream.domains:
        return _check_domains(progress, federation)
    steps = federation.stream.steps
    begun = progress.round > 0 or progress.trained
    if progress.step + begun > len(steps):
        raise Wrong("step", progress.step, f"one of {len(steps)} blocks")
    _check_rounds(progress, begun)
    _check_metrics(progress, federation)
    done = progress.step + begun
    for name, model, which in (("model", progress.model, done - 1), ("best.model", progress.best.model, done - 1),
                               ("previous", progress.previous, progress.step - 1)):
        if which >= 0 and (name != "previous" or begun):
            _check_tables(name, model, federation, steps[which])
    users = steps[max(done - 1, 0)].n_users
    for name, values in (*progress.client_state.items(), *progress.best.client_state.items()):
        if not values.ndim or len(values) > users:
            raise Wrong(f"client_state.{name}", f"shape {tuple(values.shape)}", f"at most {users} rows")


def _check_rounds(progress: Progress, begun: bool) -> None:
    """The rounds and tests are those of the blocks that are done, and of the one that has begun."""
    rounds: dict[int, list[int]] = {}
    for row in progress.curve:
        rounds.setdefault(row["step"], []).append(row["round"])
    if list(rounds) != list(range(progress.step + begun)) or any(of != list(range(len(of))) for of in rounds.values()):
        raise Wrong("curve", progress.curve, f"the rounds of {progress.step + begun} blocks")
    if progress.round and len(rounds[progress.step]) != progress.round:
        raise Wrong("round", progress.round, f"{len(rounds[progress.step])}, as the curve has")
    validated = {row["step"] for row in progress.curve if not math.isnan(row["valid"])}
    if not validated.issuperset(range(progress.step + progress.trained)):
        raise Wrong("curve", progress.curve, "a validation in every block that was trained")
    tested = [(t, s) for t in range(progress.step + progress.trained) for s in range(t + 1)]
    if [(t, s) for t, s, _ in progress.tests] != tested:
        raise Wrong("tests", progress.tests, f"those of {progress.step + progress.trained} blocks")
    _check_analysis(progress, progress.step + begun)


def _check_metrics(progress: Progress, federation: Federation) -> None:
    """Tests have the run's metrics of users, and no others than the run's."""
    names = {metric.of_items: set() for metric in federation.metrics} | {False: set()}
    for metric in federation.metrics:
        names[metric.of_items].update(f"{metric.name}@{k}" for k in federation.topk)
    known = set().union(*names.values())
    for at, (_, _, scores) in enumerate(progress.tests):
        if wrong := {name for name in scores.values if name.removeprefix(FULL) not in known}:
            raise Wrong(f"tests[{at}]", ", ".join(sorted(wrong)), "metrics of the run")
        if missing := names[False] - set(scores.values):
            raise Wrong(f"tests[{at}]", "no such metrics", ", ".join(sorted(missing)))


def _check_analysis(progress: Progress, blocks: int) -> None:
    """What is known of a block's lists is whole; it is added in the block's last round, with its tests."""
    kinds: dict[int, list[str]] = {t: [] for t in range(blocks)}
    for t, kind, *_ in progress.analysis:
        if t not in kinds:
            raise Wrong("analysis", t, f"one of {blocks} blocks")
        kinds[t].append(kind)
    if missing := missing_of_lists(kinds.values()):
        raise Wrong("analysis", "blocks without them", f"{', '.join(missing)} in every block")


def _check_tables(field: str, model: Snapshot, federation: Federation, step: Step, domains: int = 0) -> None:
    """Every table has the rows of a step's users and items, and the backbone's have its widths; of so many domains
    each has a copy of dense parameters."""
    dtype = getattr(torch, federation.server.precision)
    for (kind, name), shape in _shapes(federation.backbone, step.n_users, step.n_items).items():
        shape = (domains, *shape) if domains and kind == "dense" else shape
        table = getattr(model, kind).get(name)
        if table is None or tuple(table.shape) != shape or table.dtype != dtype:
            raise Wrong(f"{field}.{kind}.{name}", "no table" if table is None else
                        f"{table.dtype} of shape {tuple(table.shape)}", f"{dtype} of shape {shape}")
        if kind == "private" and name in model.start and model.start[name].shape != shape[1:]:
            raise Wrong(f"{field}.start.{name}", f"shape {tuple(model.start[name].shape)}", f"shape {shape[1:]}")
    for kind in ("private", "memory"):
        for name, table in getattr(model, kind).items():
            if not table.ndim or len(table) != step.n_users:
                raise Wrong(f"{field}.{kind}.{name}", f"shape {tuple(table.shape)}", f"{step.n_users} rows")


def _shapes(backbone: Backbone, users: int, items: int) -> dict[tuple[str, str], tuple[int, ...]]:
    """The shape of every table of a backbone, by kind and name."""
    public, private = backbone.new_rows(0, range(1), range(1))
    personal, dense = backbone.new_personal(0, range(1)), backbone.new_dense(0)
    shapes = {("public", name): (items, *rows.shape[1:]) for name, rows in public.items()}
    shapes |= {("private", name): (users, *rows.shape[1:]) for name, rows in private.items()}
    shapes |= {("private", name): (users, items, *rows.shape[1:]) for name, rows in personal.items()}
    shapes |= {("dense", name): tuple(values.shape) for name, values in dense.items()}
    for kind, kept in (("local", backbone.keeps_local_tables), ("served", backbone.serves_tables)):
        shapes |= {(kind, name): (users, *shapes["public", name]) for name in public if kept}
    return shapes
