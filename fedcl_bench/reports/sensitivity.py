"""How far each reading of a paper moves a metric, and the lead over another method: table and figure from runs."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass
from typing import Any, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from ..experiments.sensitivity import Case
from ..names import for_csv, for_markdown
from ..runs.run import Run
from ..runs.specs import seed_text
from .draw import Swing, SwingPanel, tornado
from .scores import OverSeeds, over_seeds, seed_averages

NONE = "–"


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
    scores = {case: [seed_averages(of_method, metric) for of_method in both] for case, both in runs.items()}
    default = next(iter(runs))
    found = [_effect(case, scores[default], of_case) for case, of_case in scores.items()]
    return [found[0], *sorted(found[1:], key=lambda e: -abs(e.value_change.mean) if e.value_change else 1.0)]


def _effect(case: Case, default: Sequence, changed: Sequence) -> Effect:
    """The effect of one case from both cases' averages by seed."""
    both = case.against is not None
    of_all = [*default[:1 + both], *changed[:1 + both]]
    seeds = sorted(set.intersection(*(set(values.index) for values in of_all)))
    if not seeds:
        return Effect(case, 0)
    (before, *rest_before), (after, *rest_after) = ([values[seeds].to_numpy() for values in part[:1 + both]]
                                                    for part in (default, changed))
    lead_before, lead_after = (mine - other[0] if both else None
                               for mine, other in ((before, rest_before), (after, rest_after)))
    differs = bool(case.setting)
    return Effect(case, len(seeds), over_seeds(after), over_seeds(lead_after) if both else None,
                  over_seeds(after - before) if differs else None,
                  over_seeds(lead_after - lead_before) if both and differs else None)


def figure(found: Sequence[Effect], metric: str, against: str, title: str) -> Figure:
    """A tornado: how far each reading moves the metric and, where there is another method, the lead over it.

    Args:
        metric, against: what they are called.
    """
    first, others = found[0], found[1:]
    panels = [SwingPanel(metric, first.value.mean, [_swing(e.value, e.value_change) for e in others])]
    if first.lead is not None:
        panels.append(SwingPanel(f"lead over {against}", first.lead.mean,
                                 [_swing(e.lead, e.lead_change) for e in others], zero=True))
    return tornado([f"{e.case.setting}\n{e.case.other}" for e in others], panels, title)


def _swing(value: OverSeeds | None, change: OverSeeds | None) -> Swing | None:
    return None if value is None or change is None else Swing(change.mean, change.deviation if change.n > 1 else None)


def _heads(metric: str, against: str) -> list[str]:
    return ["setting", "default", "here", metric, "change", *([f"lead over {against}", "change"] if against else []),
            "seeds"]


def rows(found: Sequence[Effect], metric: str, against: str) -> list[list[str]]:
    """The table's heading and lines, as text.

    Args:
        against: what the other method is called; empty without one.
    """
    lines = []
    for e in found:
        leads = [_text(e.lead, "+"), _text(e.lead_change, "+")] if against else []
        lines.append([e.case.setting or "all as by default", e.case.default or NONE, e.case.other or NONE,
                      _text(e.value), _text(e.value_change, "+"), *leads, str(e.seeds)])
    return [_heads(metric, against), *lines]


def _text(value: OverSeeds | None, sign: str = "") -> str:
    if value is None:
        return NONE
    return f"{value.mean:{sign}.4f}" + (f" ± {value.deviation:.4f}" if value.n > 1 else "")


def markdown(found: Sequence[Effect], metric: str, against: str, notes: Sequence[str]) -> str:
    """The table as Markdown, with notes below."""
    head, *lines = [[for_markdown(text) for text in line] for line in rows(found, metric, against)]
    rule = "---|" * 3 + "--:|" * (len(head) - 3)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    below = "".join(f"- {for_markdown(note)}\n" for note in notes)
    return f"| {' | '.join(head)} |\n|{rule}\n{table}\n\n{below}"


CSV_FIELDS = ("setting", "default", "here", "metric", "seeds", "value", "value_std", "value_change", "value_change_std",
              "lead", "lead_std", "lead_change", "lead_change_std")


def csv_text(found: Sequence[Effect], metric: str) -> str:
    """One line per case, all numbers in full precision; what there is not is empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for e in found:
        numbers = [number for part in (e.value, e.value_change, e.lead, e.lead_change)
                   for number in ((part.mean, part.deviation if part.n > 1 else "") if part else ("", ""))]
        names = map(for_csv, (e.case.setting, e.case.default, e.case.other, metric))
        writer.writerow([*names, e.seeds, *(float(n) if isinstance(n, np.floating) else n for n in numbers)])
    return buffer.getvalue()


def notes(found: Sequence[Effect], default_seeds: Sequence[int], left_out: Sequence[str]) -> list[str]:
    """Sentences below the table."""
    said = [f"Mean ± sample standard deviation over seeds {seed_text(default_seeds)}. A change is that of the same "
            f"seed, so its deviation says whether the seeds agree.",
            "In each line one setting differs from the first line; it differs for both methods if both have it."]
    if any(e.case.setting == "inc_split" for e in found):
        said.append("inc_split changes which interactions are tested, so its change is also one of the test.")
    said += [f"{e.case.setting} = {e.case.other}: no seed of all its runs finished." for e in found if not e.seeds]
    return [*said, *left_out]


def as_json(effect: Effect) -> dict[str, Any]:
    """An effect, JSON-ready; what there is not is None."""
    case = effect.case
    numbers = {name: value and asdict(value) for name, value in (
        ("value", effect.value), ("value_change", effect.value_change), ("lead", effect.lead),
        ("lead_change", effect.lead_change))}
    return {"setting": case.setting, "default": case.default, "here": case.other, "seeds": effect.seeds, **numbers}
