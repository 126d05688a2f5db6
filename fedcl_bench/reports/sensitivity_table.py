"""How far each reading of a paper moves a metric, and the lead over another method: table and figure from runs."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from ..core.text import for_csv, for_markdown
from ..data.settings import StreamSettings
from ..experiments.sensitivity import Case
from ..records.store import Run
from ..runs.readings import READING
from ..runs.specs import seed_text
from .cells import DASH
from .draw import FigurePanel, estimates
from .frame import OverSeeds, over_seeds, seed_averages

_NUMBERS = ("value", "value_change", "lead", "lead_change")  # fields of an Effect
# Settings that say on what users are tested.
_TESTED = {"candidate_draw", *(field.name for field in fields(StreamSettings))}


@dataclass(frozen=True)
class Effect:
    """What the runs of a case say."""

    case: Case
    seeds: int  # how many all have, over which the numbers are; without any, all of these are None
    value: OverSeeds | None = None  # the metric
    lead: OverSeeds | None = None  # how far it is above that of the other method
    # By how much these differ from the default case, seed by seed; None in that case.
    value_change: OverSeeds | None = None
    lead_change: OverSeeds | None = None


def effects(runs: Mapping[Case, tuple[Sequence[Run], Sequence[Run]]], metric: str) -> list[Effect]:
    """One effect per case: the default first, then those that move the metric most, last all settings together.
    ``runs``: of each case, those of the proposed method and of the other; ``metric``: on the block just trained,
    averaged over all blocks but the first."""
    frames = {}
    for case, (proposed, against) in runs.items():  # a row per seed that both have
        frames[case] = seed_averages(proposed, metric).to_frame("value")
        if case.against is not None:
            frames[case]["lead"] = frames[case]["value"] - seed_averages(against, metric)
    default, *_ = frames.values()
    measured = []
    for case, frame in frames.items():
        here = frame.dropna().loc[lambda rows: rows.index.isin(default.dropna().index)]
        if case.setting:
            here = here.join((here - default).add_suffix("_change"))
        measured.append(Effect(case, len(here), **{name: over_seeds(here[name]) for name in here if len(here)}))
    return [measured[0], *sorted(measured[1:], key=lambda e: (
        e.case.setting == READING, -abs(e.value_change.mean) if e.value_change else 1.0))]


_LETTERS = 44  # of a reading in a figure; tables have all


def figure(measured: Sequence[Effect], metric: str, against: str, title: str) -> Figure:
    """A tornado: how far each reading moves the metric and, where there is another method, the lead over it;
    ``metric``, ``against``: what they are called."""
    first, *others = measured
    panels = [_panel(metric, first.value, {_label(e): e.value_change for e in others})]
    if first.lead is not None:
        panels.append(_panel(f"lead over {against}", first.lead, {_label(e): e.lead_change for e in others}))
    return estimates([panels], {}, title)


def _label(effect: Effect) -> str:
    return f"{effect.case.setting}\n{textwrap.shorten(effect.case.other, _LETTERS, placeholder=' ...')}"


def _panel(name: str, default: OverSeeds, changes: Mapping[str, OverSeeds | None]) -> FigurePanel:
    """How far each reading moves a number; the deviation is that of the change."""
    return FigurePanel(f"default: {default.mean:.4f}", name, {
        label: change and replace(change, mean=default.mean + change.mean) for label, change in changes.items()},
        default.mean, written=True)


def rows(measured: Sequence[Effect], metric: str, against: str) -> list[list[str]]:
    """The table's heading and lines, as text; ``against``: what the other method is called; empty without one."""
    names = _NUMBERS if against else _NUMBERS[:2]
    heads = [metric, "change", f"lead over {against}", "change"][:len(names)]
    lines = [["setting", "default", "here", *heads, "seeds"]]
    for e in measured:
        numbers = [over.text(".4f" if name == "value" else "+.4f") if (over := getattr(e, name)) else DASH
                   for name in names]
        lines.append([e.case.setting or "all as by default", e.case.default or DASH, e.case.other or DASH, *numbers,
                      str(e.seeds)])
    return lines


def markdown(measured: Sequence[Effect], metric: str, against: str, notes: Sequence[str]) -> str:
    head, *lines = [f"| {' | '.join(map(for_markdown, line))} |" for line in rows(measured, metric, against)]
    rule = f"|{'---|' * 3}{'--:|' * (head.count(' | ') - 2)}"
    return "\n".join([head, rule, *lines, "", *(f"- {for_markdown(note)}" for note in notes)]) + "\n"


def csv_text(measured: Sequence[Effect], metric: str) -> str:
    lines = []
    for e in measured:
        names = ("setting", e.case.setting), ("default", e.case.default), ("here", e.case.other), ("metric", metric)
        line: dict[str, Any] = {**{name: for_csv(text) for name, text in names}, "seeds": e.seeds}
        for name in _NUMBERS:
            over = getattr(e, name)
            line |= {name: over and over.mean, f"{name}_std": over.deviation if over and over.n > 1 else None}
        lines.append(line)
    return pd.DataFrame(lines).to_csv(index=False, lineterminator="\n")


def notes(measured: Sequence[Effect], default_seeds: Sequence[int], left_out: Sequence[str]) -> list[str]:
    several = len(default_seeds) > 1
    said = [f"Mean ± sample standard deviation over seeds {seed_text(default_seeds)}. A change is that of the same "
            f"seed, so its deviation says whether the seeds agree." if several else
            f"Seed {seed_text(default_seeds)} alone, so nothing says how much seeds differ.",
            "In each line one setting differs from the first line; it differs for both methods if both have it."]
    if tested := sorted({e.case.setting for e in measured} & _TESTED):
        said.append(f"{', '.join(tested)}: what is tested changes too, so the change is also one of the test.")
    if any(e.case.setting == READING for e in measured):
        said.append("In lines of `reading` all settings named differ at once.")
    said += [f"{e.case.setting} = {e.case.other}: no seed of all its runs finished." for e in measured if not e.seeds]
    return [*said, *left_out]


def as_json(effect: Effect) -> dict[str, Any]:
    case, numbers = effect.case, {name: getattr(effect, name) for name in _NUMBERS}
    return {"setting": case.setting, "default": case.default, "here": case.other, "seeds": effect.seeds,
            **{name: over and asdict(over) for name, over in numbers.items()}}
