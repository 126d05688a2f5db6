"""Which finished runs a command is about: methods as the user writes them, their records, and what is missing."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from ..data.source import configured, dataset_name
from ..core.errors import UserError, unknown
from ..runs.config import resolve
from ..runs.registry import Registry
from ..records.run import Run
from ..runs.specs import RunSpec, Tuned, Where, spelled_spec
from ..core.settings import parse_assignments
from .tables import DAGGER, Source, find

FOOTNOTE = f"{DAGGER} re-implementation from the description: its code was never released."


def parse_method(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """``"f3crec:without=arm,eps=0.01"`` as its name and settings; raises UserError for anything else.

    A part without ``=`` continues the value before it, as in ``ft:topk=5,20``.
    """
    name, colon, rest = text.partition(":")
    parts: list[str] = []
    for part in rest.split(",") if colon else ():
        if "=" in part or not parts:
            parts.append(part)
        else:
            parts[-1] += f",{part}"
    return name, tuple(parse_assignments(parts, f"{name}:").items())


def checked_spec(registry: Registry, spec: RunSpec, common: Mapping[str, Any] | None = None,
                 tuned: Tuned | None = None) -> RunSpec:
    """A spec over the settings that all have, checked, with every name in its spelling.

    Args:
        common: settings of ``--set``; the spec's win over them.

    Raises:
        UserError: for an unknown name or setting, or a value out of its range.
    """
    spec = spelled_spec(registry, spec)
    settings, common = dict(spec.settings), dict(common or {})
    below = replace(spec, settings=()).layers(tuned)[:-1]
    resolve(registry, spec.method, spec.backbone, spec.dataset,
            [*below, ("--set", common), (f"{spec.method}:", settings)])
    return replace(spec, settings=tuple({**common, **settings}.items()))


def grid_command(options: Iterable[str], settings: Iterable[tuple[str, Any]], tuned: Tuned | None,
                 where: Where) -> str:
    """A command of `grid`: its options, 5 seeds, the settings of the records that are read, and where things are."""
    words = ["run_bench.py", "grid", *options, "--seeds", "5"]
    for name, value in settings:
        words += ["--set", f"{name}={value}"]
    return shlex.join([*words, *(tuned.words if tuned else ()), *where.words()])


def command_for(specs: Sequence[RunSpec], tuned: Tuned | None = None, where: Where = Where()) -> str:
    """The command, or commands with ``&&``, that make the runs of some specs."""
    groups: dict[tuple, list[RunSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.backbone, spec.dataset, spec.settings), []).append(spec)
    merged: dict[tuple, list[RunSpec]] = {}  # backbones and datasets that miss the same methods need one command
    for (backbone, dataset, settings), alike in groups.items():
        key = (tuple(dict.fromkeys(s.method for s in alike)), dataset, settings)
        merged.setdefault(key, []).append(replace(alike[0], backbone=backbone))
    commands = []
    for (methods, dataset, settings), alike in merged.items():
        options = ("--methods", ",".join(methods), "--backbones", ",".join(spec.backbone for spec in alike),
                   "--datasets", dataset)
        commands.append(grid_command(options, settings, tuned, where))
    return " && ".join(commands)


def find_all(runs: Sequence[Run], registry: Registry, specs: Iterable[RunSpec], tuned: Tuned | None,
             records: Path, where: Where = Where(),
             failed: Sequence[Mapping[str, Any]] = ()) -> dict[RunSpec, list[Run]]:
    """The runs of every spec, sorted by seed.

    Args:
        records: the folder that was read. where: folders of the command's options.
        failed: the content of ``run.json`` of runs that failed.

    Raises:
        UserError: if a spec has none, naming it and the command that makes them, or two specs are the same runs.
    """
    specs = list(specs)
    known = {*configured(), *(run.head["dataset"] for run in runs)}
    for spec in specs:
        if dataset_name(spec.dataset) not in known:
            raise unknown("dataset", spec.dataset, known)
    source = Source(runs, registry, tuned, (), lambda dataset: {}, where, failed)
    runs_of, reasons = {}, {}
    for spec in specs:
        runs_of[spec], reasons[spec] = find(source, spec)
    missing = [spec for spec, spec_runs in runs_of.items() if not spec_runs]
    owner: dict[str, RunSpec] = {}
    for spec, spec_runs in runs_of.items():
        for run in spec_runs:
            if (other := owner.setdefault(run.hash, spec)) != spec:
                raise UserError(f"{other.title} and {spec.title} are the same runs on {spec.backbone}, {spec.dataset}; "
                                f"leave one of them out.")
    if failed := [f"{spec.title} on {spec.backbone}, {spec.dataset} {reasons[spec]}" for spec in missing
                  if reasons[spec].startswith("failed")]:
        raise UserError(f"runs in {records} failed: {'; '.join(failed)}.\nLeave them out, or take other settings with "
                        f"--set; `grid --retry-failed` tries them again.")
    if missing:
        titles_of: dict[str, list[str]] = {}
        for spec in missing:
            titles_of.setdefault(f"on {spec.backbone}, {spec.dataset}", []).append(spec.title)
        names = "; ".join(f"{', '.join(titles)} {where}" for where, titles in titles_of.items())
        nearest = next((f" ({spec.method}: {reasons[spec]}; take other settings with --set)" for spec in missing
                        if reasons[spec] != "no record"), "")
        raise UserError(f"no record in {records} of {names}{nearest}.\n"
                        f"Make them with: {command_for(missing, tuned, where)}")
    return runs_of
