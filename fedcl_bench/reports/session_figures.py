"""FCUCR's figures from finished runs: Figure 2, and the sensitivity and noise curves of Figures 3-10."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Callable

import numpy as np

from ..toolbox.prototypes import DELTA, gaussian_epsilon
from ..records.run import Run
from . import draw, frame
from .paper_figures import Drawn, Job, Skip, curves, sensitivity

PROBABILITY = "target_probability"  # kind of analysis: the sigmoid of a test target's logit, per user
_EDGES = np.linspace(0.0, 1.0, 21)


def _gather(job: Job, figure: str, rows: dict[str, tuple[str, dict[str, Any]]],
            measure: Callable[[list[Run]], Any]) -> tuple[dict[str, dict[str, dict[str, Any]]], list[str]]:
    """What there is of a figure's rows, and what there is not.

    Args:
        rows: label to (method, settings of its own).

    Returns:
        Dataset to backbone to row to what ``measure`` makes of its runs, None without, where datasets without any are
        omitted; and sentences on rows without records.

    Raises:
        Skip: if no row has a record anywhere.
    """
    by_dataset: dict[str, dict[str, dict[str, Any]]] = {}
    missing: dict[str, None] = {}
    notes = []
    for dataset in job.datasets:
        panels: dict[str, dict[str, Any]] = {}
        for backbone in job.backbones:
            runs = {row: job.find(method, backbone, dataset, settings) for row, (method, settings) in rows.items()}
            frame.same_tests([run for row_runs in runs.values() for run in row_runs], f"figure {figure}")
            lacking = [job.label(row) for row, row_runs in runs.items() if not row_runs]
            if len(lacking) < len(rows):
                panels[backbone] = {row: measure(row_runs) if row_runs else None for row, row_runs in runs.items()}
            if lacking:
                notes.append(f"figure {figure}: no records of {', '.join(lacking)} on {backbone}, {dataset}: left "
                             f"empty")
                missing[dataset] = None
        if panels:
            by_dataset[dataset] = panels
    command = f"make them with: {job.command(figure, list(missing), '--backbones', ','.join(job.backbones))}"
    if not by_dataset:
        raise Skip(f"no records of its runs.\n{command[0].upper()}{command[1:]}")
    return by_dataset, [*notes, command] if missing else []


def _panels(job: Job, dataset: str, backbones: dict[str, Any]) -> dict[str, Any]:
    return {f"{job.label(backbone)}, {job.label(dataset)}": rows for backbone, rows in backbones.items()}


def _early(job: Job) -> Drawn:
    column = f"early_{job.metric}"

    def curve(runs: list[Run]) -> frame.Curve:
        for run in runs:
            if column not in run.rounds:
                raise Skip(f"the record {run.hash[:12]} has no column {column}; "
                           f"other metrics: --metric hit@10, ndcg@10")
        return frame.validation_curves(runs, column)[0]
    rows = {method: (method, {"early_session": True}) for method in job.methods}
    by_dataset, notes = _gather(job, "early", rows, curve)
    yield from notes
    for dataset, backbones in by_dataset.items():
        yield job.file("early", dataset), draw.early_curves(_panels(job, dataset, backbones), job.looks,
                                                                job.label(job.metric))


def _probability(job: Job) -> Drawn:
    ours = job.paper.OURS
    rows = {row: (ours, dict(job.paper.row_spec(row, "", "").settings)) for row in job.paper.TRANSFER}
    other = rows.keys() - {ours}
    look = {ours: replace(job.looks[ours], line="-"),
            **{row: replace(job.looks[ours], label=job.label(row), color="#000000", line="--") for row in other}}
    by_dataset, notes = _gather(job, "probability", rows, lambda runs: frame.user_histogram(runs, PROBABILITY, _EDGES))
    yield from notes
    for dataset, backbones in by_dataset.items():
        yield f"probability-{dataset}", draw.user_histograms(_panels(job, dataset, backbones), look,
                                                                 "predicted probability of the test target")


def _noise(job: Job) -> Drawn:
    def text(deviation: float) -> str:
        return f"{gaussian_epsilon(deviation, DELTA):.1f}" if deviation else "∞"
    return sensitivity("noise", job, text, "ε at δ = 10⁻⁵")


MAKERS = {"early": _early, "probability": _probability, "k": partial(sensitivity, "k"),
          "lambda": partial(sensitivity, "lambda"), "noise": _noise, "curves": curves}
