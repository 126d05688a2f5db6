"""How far each reading of a paper moves a metric, and the lead over another method: table and figure from runs."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from ..data.settings import StreamSettings
from ..experiments.sensitivity import Case
from ..core.text import for_csv, for_markdown
from ..records.run import Run
from ..runs.specs import seed_text
from .draw import Panel, estimates
from .scores import OverSeeds, over_seeds, seed_averages

NONE = "–"
# Settings that say on what users are tested.
_TESTED = {"candidate_draw", *(field.name for field in fields(StreamSettings))}


@dataclass(frozen=True)
class Effect:
    """What the runs of a case say.

    Attributes:
        value, lead: the metric, and how far it is above that of the other method; over the seeds that all have.
        value_change, lead_change: by how much these differ from the default case, seed by seed; None in that case.
        seeds: how many there are; without any, all numbers are None.
    """

    case: Case
    seeds: int
    value: OverSeeds | None = None
    lead: OverSeeds | None = None
    value_change: OverSeeds | None = None
    lead_change: OverSeeds | None = None


def effects(runs: Mapping[Case, tuple[Sequence[Run], Sequence[Run]]], metric: str) -> list[Effect]:
    """One effect per case: the default first, then those that move the metric most.

    Args:
        runs: of each case, those of the proposed method and of the other; the first case is the default one.
        metric: as ``ndcg@20``; on the block just trained, averaged over all blocks but the first.
    """
    scores = {case: _by_seed(case, *both, metric) for case, both in runs.items()}
    default = next(iter(scores.values()))
    measured = [_effect(case, default, here) for case, here in scores.items()]
    return [measured[0], *sorted(measured[1:], key=lambda e: -abs(e.value_change.mean) if e.value_change else 1.0)]


def _by_seed(case: Case, proposed: Sequence[Run], against: Sequence[Run], metric: str) -> pd.DataFrame:
    """A case's averages by seed: ``value``, and ``lead`` where there is another method, of seeds that both have."""
    value = seed_averages(proposed, metric)
    if case.against is None:
        return pd.DataFrame({"value": value})
    return pd.DataFrame({"value": value, "lead": value - seed_averages(against, metric)}).dropna()


def _effect(case: Case, default: pd.DataFrame, here: pd.DataFrame) -> Effect:
    """The effect of a case over the seeds that it has in common with the default one."""
    seeds = default.index.intersection(here.index)
    if not len(seeds):
        return Effect(case, 0)

    def over(frame: pd.DataFrame, column: str) -> OverSeeds | None:
        return over_seeds(frame[column]) if column in frame else None
    here = here.loc[seeds]
    change = here - default.loc[seeds] if case.setting else pd.DataFrame()
    return Effect(case, len(seeds), over(here, "value"), over(here, "lead"), over(change, "value"),
                  over(change, "lead"))


def figure(measured: Sequence[Effect], metric: str, against: str, title: str) -> Figure:
    """A tornado: how far each reading moves the metric and, where there is another method, the lead over it.

    Args:
        metric, against: what they are called.
    """
    first, *others = measured
    panels = [_panel(metric, first.value, {_label(e): e.value_change for e in others})]
    if first.lead is not None:
        panels.append(_panel(f"lead over {against}", first.lead, {_label(e): e.lead_change for e in others}))
    return estimates([panels], {}, title)


def _label(effect: Effect) -> str:
    return f"{effect.case.setting}\n{effect.case.other}"


def _panel(name: str, default: OverSeeds, changes: Mapping[str, OverSeeds | None]) -> Panel:
    """How far each reading moves a number; the deviation is that of the change."""
    return Panel(f"default: {default.mean:.4f}", name, {
        label: change and replace(change, mean=default.mean + change.mean) for label, change in changes.items()},
        default.mean, written=True)


def _heads(metric: str, against: str) -> list[str]:
    return ["setting", "default", "here", metric, "change", *([f"lead over {against}", "change"] if against else []),
            "seeds"]


def rows(measured: Sequence[Effect], metric: str, against: str) -> list[list[str]]:
    """The table's heading and lines, as text.

    Args:
        against: what the other method is called; empty without one.
    """
    lines = []
    for e in measured:
        leads = [_text(e.lead, "+"), _text(e.lead_change, "+")] if against else []
        lines.append([e.case.setting or "all as by default", e.case.default or NONE, e.case.other or NONE,
                      _text(e.value), _text(e.value_change, "+"), *leads, str(e.seeds)])
    return [_heads(metric, against), *lines]


def _text(value: OverSeeds | None, sign: str = "") -> str:
    if value is None:
        return NONE
    return f"{value.mean:{sign}.4f}" + (f" ± {value.deviation:.4f}" if value.n > 1 else "")


def markdown(measured: Sequence[Effect], metric: str, against: str, notes: Sequence[str]) -> str:
    """The table as Markdown, with notes below."""
    head, *lines = [[for_markdown(text) for text in line] for line in rows(measured, metric, against)]
    rule = "---|" * 3 + "--:|" * (len(head) - 3)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    below = "".join(f"- {for_markdown(note)}\n" for note in notes)
    return f"| {' | '.join(head)} |\n|{rule}\n{table}\n\n{below}"


CSV_FIELDS = ("setting", "default", "here", "metric", "seeds", "value", "value_std", "value_change", "value_change_std",
              "lead", "lead_std", "lead_change", "lead_change_std")


def csv_text(measured: Sequence[Effect], metric: str) -> str:
    """One line per case, all numbers in full precision; what there is not is empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for e in measured:
        numbers = [number for part in (e.value, e.value_change, e.lead, e.lead_change)
                   for number in ((part.mean, part.deviation if part.n > 1 else "") if part else ("", ""))]
        names = map(for_csv, (e.case.setting, e.case.default, e.case.other, metric))
        writer.writerow([*names, e.seeds, *numbers])
    return buffer.getvalue()


def notes(measured: Sequence[Effect], default_seeds: Sequence[int], left_out: Sequence[str]) -> list[str]:
    """Sentences below the table."""
    several = len(default_seeds) > 1
    said = [f"Mean ± sample standard deviation over seeds {seed_text(default_seeds)}. A change is that of the same "
            f"seed, so its deviation says whether the seeds agree." if several else
            f"Seed {seed_text(default_seeds)} alone, so nothing says how much seeds differ.",
            "In each line one setting differs from the first line; it differs for both methods if both have it."]
    if tested := sorted({e.case.setting for e in measured} & _TESTED):
        said.append(f"{', '.join(tested)}: what is tested changes too, so the change is also one of the test.")
    said += [f"{e.case.setting} = {e.case.other}: no seed of all its runs finished." for e in measured if not e.seeds]
    return [*said, *left_out]


def as_json(effect: Effect) -> dict[str, Any]:
    """An effect, JSON-ready; what there is not is None."""
    case = effect.case
    numbers = {name: value and asdict(value) for name, value in (
        ("value", effect.value), ("value_change", effect.value_change), ("lead", effect.lead),
        ("lead_change", effect.lead_change))}
    return {"setting": case.setting, "default": case.default, "here": case.other, "seeds": effect.seeds, **numbers}
