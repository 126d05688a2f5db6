"""A submission's rows: what the runs of a method say of it on one backbone and dataset, beside those of FT."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np
from msgspec import Struct

from ..core.errors import UserError
from ..records.run import Run
from ..records.schema import Count, Value
from ..records.store import LEAKS, comparable, describe, leaks, load_all, protocol
from ..reports.comparison import changed_settings, paired_tests
from ..reports.frame import common_seeds, over_seeds, paired_scores, same_tests, seed_averages
from ..reports.headroom import headroom_rows
from ..runs.registry import Registry
from ..runs.specs import seed_text, tuned_file
from ..stats.power import detectable

REFERENCE, BOUND = "ft", "joint"  # what a method is tested against; what could be reached
MIN_SEEDS = 3
TUNED = "tuned"  # folder of a submission
Place = tuple[str, str]  # backbone, dataset
Cells = Mapping[Place, Mapping[str, Sequence[Run]]]  # method to its runs, by seed


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is shown of a method on one backbone and dataset.

    Attributes:
        metric: of the runs' validation; on the block just trained, averaged over the blocks after the first.
        settings: those that are not today's defaults.
        tuned: whether the settings that `tune` chose are in the submission.
        users, difference, p, detectable: of the paired t-test against FT over users: mean difference, p without a
            correction, and the difference that is found with probability .8.
        mean, deviation: over seeds; reference: FT's mean over the same ones.
        share: of the headroom between FT and the bound, and its 95 % interval; None without headroom or bound.
        bounded: whether the submission has runs of the bound.
        megabytes: that all clients of a run send and receive.
        privacy: what clients upload, and what is guaranteed of it. leaks: which test items reach training.
        gives_up: the statements of docs/constraints.md that the method gives up.
    """

    backbone: str
    dataset: str
    stream: str
    metric: str
    settings: dict[str, Value]
    tuned: bool
    seeds: list[Count]
    users: Count
    mean: float
    deviation: float
    reference: float
    difference: float
    p: float
    detectable: float
    share: list[float] | None
    bounded: bool
    megabytes: float
    privacy: str
    leaks: str
    gives_up: list[str]


def cells_of(folder: Path, method: str) -> Cells:
    """The runs of a submission's folder, checked.

    Raises:
        UserError: unless each backbone and dataset has the method and FT, with one setting and the same seeds each, at
            least ``MIN_SEEDS``. Corrupt.
    """
    cells: dict[Place, dict[str, list[Run]]] = {}
    for run in load_all(folder)[0]:
        cells.setdefault((run.head["backbone"], run.head["dataset"]), {}).setdefault(run.head["method"], []).append(run)
    require(cells, method)
    return cells


def require(cells: Cells, method: str) -> None:
    """Raise UserError unless these are runs of a submission: see ``cells_of``."""
    for (backbone, dataset), runs in cells.items():
        where = f"{method} on {backbone}, {dataset}"
        if lacking := [name for name in (method, REFERENCE) if name not in runs]:
            raise UserError(f"{where}: there is no run of {lacking[0]}, accepted: runs of {method} and {REFERENCE}.")
        if others := sorted(runs.keys() - {method, REFERENCE, BOUND}):
            raise UserError(f"{where}: found runs of {others[0]} too, accepted: {method}, {REFERENCE} and {BOUND}.")
        seeds = sorted(run.seed for run in runs[method])
        if len(seeds) < MIN_SEEDS:
            raise UserError(f"{where}: found {len(seeds)} seed{'s' * (len(seeds) > 1)} ({seed_text(seeds)}), accepted: "
                            f"{MIN_SEEDS} or more.\nRun more with `grid --seeds 5` and the same settings.")
        for name, several in runs.items():
            if (found := sorted(run.seed for run in several)) != seeds:
                raise UserError(f"{where}: {name} has seeds {seed_text(found)}, and {method} {seed_text(seeds)}; "
                                f"accepted: the same of both.\nRun those that lack with the same settings.")
            for run in several[1:]:
                if comparable(run.head["settings"]) != comparable(several[0].head["settings"]):
                    raise UserError(f"{describe(run.head)}: has other settings than seed {several[0].seed}, accepted: "
                                    f"the same for all seeds.")
        same_tests([run for several in runs.values() for run in several], "submit")


def rows_of(folder: Path, cells: Cells, method: str, registry: Registry) -> list[Row]:
    """The rows of a submission's folder, sorted by dataset and backbone."""
    return [_row(folder, place, cells[place], method, registry) for place in sorted(cells, key=lambda p: p[::-1])]


def _row(folder: Path, place: Place, runs: Mapping[str, Sequence[Run]], method: str, registry: Registry) -> Row:
    mine, theirs, meta = runs[method], runs[REFERENCE], runs[method][0].meta
    metric = meta["settings"]["valid_metric"]
    test = paired_tests(mine, theirs, metric).users
    scores = paired_scores(common_seeds(mine, theirs), metric).dropna()
    over = over_seeds(seed_averages(mine, metric))
    shares = {row.method: row.against for row in headroom_rows(runs, REFERENCE, BOUND, metric)} if BOUND in runs else {}
    against = shares.get(method)
    return Row(
        backbone=place[0], dataset=place[1],
        stream=", ".join(str(value) if name == "stream" else f"{name} {value}" for name, value in protocol(mine[0])),
        metric=metric, settings=changed_settings(registry, meta, place[1]),
        tuned=tuned_file(folder / TUNED, method, *place).is_file(), seeds=sorted(run.seed for run in mine),
        users=test.n, mean=over.mean, deviation=over.deviation,
        reference=over_seeds(seed_averages(theirs, metric)).mean, difference=test.difference, p=test.p,
        detectable=detectable(float(np.std(scores["mine"] - scores["theirs"], ddof=1)), test.n),
        share=list(against.share) if against and against.share else None, bounded=BOUND in runs,
        megabytes=float(np.mean([run.meta["bytes"][way] for run in mine for way in ("total_up", "total_down")])) / 5e5,
        privacy=_privacy(meta["privacy"]), leaks=LEAKS if leaks(meta["settings"]) else "none known",
        gives_up=list(registry.gives_up(method, meta["settings"])))


def _privacy(privacy: Mapping[str, Any]) -> str:
    """What a record says of privacy, as a sentence or more."""
    sent = ", ".join(privacy["uploaded"]) or "nothing"
    return " ".join([f"Sends {sent}.", *(privacy["notes"] or ["No formal guarantee."])])
