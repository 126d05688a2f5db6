"""Reading finished runs: from a results folder or from compact records, in the same form.

A results folder holds full records under ``runs/`` (``records.py``); a folder of compact records holds an
``index.json`` (``compact.py``). Only what is verified is returned.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, Collection, Iterable, Mapping, Sequence

import pandas as pd

from ..data.source import DatasetSource, dataset_name, load_config
from ..errors import UserError
from ..settings import declared_idle
from . import compact
from .config import RunConfig, effective, resolve
from .records import SCHEMA, Corrupt, Record
from .registry import Registry
from .run import Run
from .specs import RunSpec, Tuned, seed_text

# Settings that say how numbers are taken, with the value of records from before the setting existed.
PROTOCOL = {"stream": "blocks", "candidates": "all", "sampled_candidates": None, "candidate_lists": None}


def describe(meta: Mapping[str, Any]) -> str:
    """A run in words."""
    return f"{meta['method']} on {meta['backbone']}, {meta['dataset']}, seed {meta['seed']}"


def _check_schema(meta: Mapping[str, Any], path: Path) -> None:
    schema = meta.get("schema", 1)
    if schema != SCHEMA:
        raise UserError(f"{path}: its schema version is {schema!r}, this version of the suite reads {SCHEMA}.\n"
                        f"Run it again with this version, read it with the version that wrote it, or take it away.")


def _read_frame(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_parquet(folder / f"{name}.parquet")


def _read_full(folder: Path) -> Run | None:
    """A run of a results folder, verified; None if it has not finished."""
    path = folder / "run.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["status"] != "finished":
            return None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: is not a complete run record; take its folder away, or run it again.") from None
    _check_schema(meta, path)
    try:
        meta = Record(folder).read()
    except Corrupt as error:
        raise UserError(f"{error}; take its folder away, or run it again.") from None
    return Run(meta, folder, partial(_read_frame, folder))


def load_record(folder: Path) -> Run:
    """The finished run of one record's folder.

    Raises:
        UserError: if it has not finished, is corrupt or is of another schema version.
    """
    run = _read_full(folder)
    if run is None:
        raise UserError(f"{folder}: has no finished run; the command that began it goes on with it.")
    return run


def _folders(folder: Path) -> Iterable[Path]:
    """Folders of compact records: this one or those in it."""
    if compact.is_compact(folder):
        return [folder]
    return sorted(path for path in folder.iterdir() if path.is_dir() and compact.is_compact(path))


def load_runs(folder: Path) -> list[Run]:
    """All finished runs of a results folder, of a folder of compact records, or of a folder of such folders.

    Returns:
        One Run per hash, sorted by dataset, backbone, method, seed and hash.

    Raises:
        UserError: if there is none, or one is corrupt or of another schema version.
    """
    if not folder.is_dir():
        raise UserError(f"records: no folder {folder}; name a results folder, or one of compact records.")
    runs: dict[str, Run] = {}
    if (folder / "runs").is_dir():
        for path in sorted((folder / "runs").iterdir()):
            if path.is_dir() and ".corrupt" not in path.name and (run := _read_full(path)):
                runs[run.hash] = run
    else:
        for path in _folders(folder):
            for meta, load in compact.read(path):
                _check_schema(meta, path)
                runs.setdefault(meta["hash"], Run(meta, path, load))
    if not runs:
        failed = load_failed(folder)
        says = f"; {len(failed)} failed, as {describe(failed[0])}: {_why(failed[0])}" if failed else ""
        raise UserError(f"records: no finished run in {folder}{says}.\nA results folder has runs/*/run.json, a folder "
                        f"of compact records {compact.INDEX}; name another folder.")
    return sorted(runs.values(), key=lambda run: (run.meta["dataset"], run.meta["backbone"], run.meta["method"],
                                                  run.seed, run.hash))


def load_failed(folder: Path) -> list[dict[str, Any]]:
    """The content of ``run.json`` of the runs of a results folder that failed; compact records hold none."""
    failed = []
    for path in sorted((folder / "runs").glob("*/run.json")):
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            if meta["status"] == "failed" and ".corrupt" not in path.parent.name:
                failed.append(meta)
        except (OSError, ValueError, KeyError, TypeError):  # `load_runs` says what is wrong with it
            continue
    return failed


def _why(meta: Mapping[str, Any]) -> str:
    return meta.get("error", "").partition("\n")[0].rstrip(".") or "no reason is recorded"


def failure(failed: Iterable[Mapping[str, Any]], registry: Registry, spec: RunSpec, tuned: Tuned | None = None) -> str:
    """That the runs of a spec failed, and why; empty if none of them did."""
    parts = resolve(registry, spec.method, spec.backbone, spec.dataset, spec.layers(tuned))
    wanted, idle = comparable(effective(parts)), declared_idle(parts)
    names = spec.method, spec.backbone, dataset_name(spec.dataset)
    alike = [meta for meta in failed if (meta["method"], meta["backbone"], meta["dataset"]) == names
             and comparable(meta["settings"], idle) == wanted]
    if not alike:
        return ""
    seeds = seed_text({meta["seed"] for meta in alike})
    return f"failed with seed{'s' if len(alike) > 1 else ''} {seeds} ({_why(alike[0])})"


def comparable(settings: Mapping[str, Any], idle: Collection[str] = ()) -> dict[str, Any]:
    """Settings in the form in which those of a record and of a spec are compared.

    A split file's bytes are in the data fingerprint and its place means nothing, so only whether there is one counts.
    Metrics that are taken besides change no other number, so they do not count.

    Args:
        idle: names that are left out: records that older versions made of the spec hold them.
    """
    return {name: value for name, value in {**settings, "split_file": bool(settings.get("split_file"))}.items()
            if name not in idle and name != "extra_metrics"}


def _current_hashes(registry: Registry, spec: RunSpec, tuned: Tuned | None,
                    meta: Mapping[str, Any]) -> list[str | None]:
    """The hashes that the run would have if it were made by the plugins as they are now: the present, the former. None
    of them if a metric of the run is not installed."""
    extra = {"extra_metrics": meta["settings"].get("extra_metrics", [])}
    try:
        parts = resolve(registry, spec.method, spec.backbone, spec.dataset, [*spec.layers(tuned), ("record", extra)])
    except UserError:  # a metric that is not installed
        return []
    source = DatasetSource(dataset_name(spec.dataset), load_config(spec.dataset), Path(), meta["data_fingerprint"])
    config = RunConfig(source, registry.get("backbone", spec.backbone), registry.get("method", spec.method), *parts,
                       meta["seed"], meta["device"], registry)
    return [config.hash, config.former_hash]


def matching(runs: Iterable[Run], registry: Registry, spec: RunSpec, tuned: Tuned | None = None) -> list[Run]:
    """The runs of a spec, sorted by seed: same names, and the settings the spec stands for.

    Of several runs of one seed (a plugin was edited in between) the one of the present code is taken; of several of
    those the one whose hash has no idle settings, and the one with the most metrics.

    Raises:
        UserError: for an unknown name or setting of the spec; if none or several of a seed's runs are of the present
            code, or runs of the spec used different data.
    """
    parts = resolve(registry, spec.method, spec.backbone, spec.dataset, spec.layers(tuned))
    wanted, idle = comparable(effective(parts)), declared_idle(parts)
    wanted_names = spec.method, spec.backbone, dataset_name(spec.dataset)
    seeds: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        names = (run.meta["method"], run.meta["backbone"], run.meta["dataset"])
        if (names == wanted_names
                and comparable(run.meta["settings"], idle) == wanted):
            seeds[run.seed].append(run)
    chosen = []
    for seed in sorted(seeds):
        several = seeds[seed]
        if len(several) > 1:
            several = [run for which in (0, 1) for run in sorted(several, key=lambda run: -len(run.meta["metrics"]))
                       if _current_hashes(registry, spec, tuned, run.meta)[which:which + 1] == [run.hash]]
            if len({(run.meta["device"], run.meta["data_fingerprint"]) for run in several}) == 1:
                several = several[:1]
        if len(several) != 1:
            raise UserError(f"{len(seeds[seed])} records of {describe(seeds[seed][0].meta)} have the same settings: "
                            f"{', '.join(run.hash[:12] for run in seeds[seed])} (other data, device or code).\n"
                            f"Take away all but one of them.")
        chosen += several
    one_data(chosen)
    return chosen


def one_data(runs: Iterable[Run]) -> None:
    """Raise UserError if runs of one dataset used different data files."""
    first: dict[str, Run] = {}
    for run in runs:
        other = first.setdefault(run.meta["dataset"], run)
        if other.meta["data_fingerprint"] != run.meta["data_fingerprint"]:
            raise UserError(f"records of {run.meta['dataset']} come from different data files and are not comparable: "
                            f"{describe(other.meta)} ({other.hash[:12]}) and {describe(run.meta)} ({run.hash[:12]}).\n"
                            f"Take the records of one of the two files away.")


def protocol(run: Run) -> tuple[tuple[str, Any], ...]:
    """How the run's numbers were taken: stream and candidates; settings that the run does not have are left out."""
    values = {name: run.meta["settings"].get(name, old) for name, old in PROTOCOL.items()}
    return tuple((name, value) for name, value in values.items() if value is not None)


def one_protocol(runs: Iterable[Run], where: str) -> None:
    """Raise UserError if runs that are to stand in one table, figure or test follow different protocols."""
    first: Run | None = None
    for run in runs:
        first = first or run
        if protocol(run) != protocol(first):
            words = [", ".join(f"{name}={value}" for name, value in protocol(r)) for r in (first, run)]
            raise UserError(f"{where}: records of different protocols are not comparable: {describe(first.meta)} "
                            f"({words[0]}) and {describe(run.meta)} ({words[1]}).\nPut them into separate ones.")


def tested(run: Run) -> dict[str, Any]:
    """How many ``users`` each block's test has, and how many ``interactions`` they are to find: None in a record from
    before these were counted."""
    if "tested" in run.meta:
        return run.meta["tested"]
    users = run.users
    diagonal = users[users["trained_block"] == users["tested_block"]]
    return {"users": diagonal.groupby("tested_block")["user"].nunique().sort_index().tolist(), "interactions": None}


def incremental(run: Run) -> tuple[int, ...]:
    """Blocks 1, 2, ... of a run; block 0 if it has no other."""
    return tuple(range(1, len(run.meta["rounds"]))) or (0,)


def user_scores(runs: Iterable[Run], metric: str, blocks: Sequence[int] | None = None) -> pd.Series:
    """One score per user: the metric on the block just trained, averaged over blocks and the runs' seeds.

    Args:
        blocks: None is ``incremental``. A user is averaged over those in which it has a test item.

    Returns:
        Values by user id, sorted.
    """
    parts = []
    for run in runs:
        users = run.users
        users = users[(users["metric"] == metric).to_numpy()]  # one of many: the rest is asked of few rows
        keep = ((users["trained_block"] == users["tested_block"])
                & users["trained_block"].isin(incremental(run) if blocks is None else blocks))
        parts.append(users.loc[keep, ["user", "value"]])
    return pd.concat(parts).groupby("user")["value"].mean()
