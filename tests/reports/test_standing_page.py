"""results/pages/standing: its page, numbers and figure are those of the published records."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter

import pytest
from helpers import ROOT

from fedcl_bench.cli.commands.paper import statistics_of
from fedcl_bench.core.errors import UserError
from fedcl_bench.experiments.papers import PAPERS
from fedcl_bench.reports import overview
from fedcl_bench.reports.pages import FOLDER, STANDING
from fedcl_bench.reports.standing import MARKS
from fedcl_bench.reports.tables import Source
from fedcl_bench.runs.specs import Tuned
from fedcl_bench.records.store import load_runs


COMMAND = "run_bench.py reproduction --overview --records results/published"
AGAIN = f"run python {COMMAND}"


@pytest.fixture(scope="module")
def kept():
    """The published numbers, line by line."""
    with open(ROOT / FOLDER / "standing.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def published(registry, kept, papers):
    """Every cell of some papers in every reading of theirs. Statistics of datasets that are not on this machine are
    taken from the page."""
    def statistics(dataset):
        if dataset == "ml-100k":
            return statistics_of(dataset, None, {})
        values: dict[str, list[float]] = {}
        for line in kept:
            if not line["backbone"] and line["dataset"] == dataset and line["ours"]:  # a statistic has none
                values.setdefault(line["row"], []).append(float(line["ours"]))
        if not values:
            raise UserError("no data")
        return values

    def source(reading):
        tuned = None if reading.tuned is None else Tuned((ROOT / "results/tuned" / reading.tuned,))
        return Source(load_runs(ROOT / "results/published" / reading.folder), registry, tuned, reading.settings,
                      statistics)
    return [entry for paper in papers for entry in overview.entries(paper, source)]


def test_fcucrs_numbers_are_those_of_the_records(registry, kept):
    numbers = overview.csv_text(overview.deciding(published(registry, kept, ["fcucr"])))
    assert list(csv.DictReader(io.StringIO(numbers))) == [line for line in kept if line["paper"] == "fcucr"], AGAIN


@pytest.mark.long
def test_page_and_numbers_are_those_of_the_records(registry, kept):
    everything = published(registry, kept, PAPERS)
    assert overview.csv_text(overview.deciding(everything)) == (ROOT / FOLDER / "standing.csv").read_text(), AGAIN
    text = overview.page(everything, COMMAND, "standing.svg", "standing.csv")
    assert text == (ROOT / FOLDER / STANDING).read_text(encoding="utf-8"), AGAIN


def test_the_counts_of_the_page_are_those_of_its_numbers(kept):
    text = (ROOT / FOLDER / STANDING).read_text(encoding="utf-8")
    for name, paper in (("**all**", None), ("**F3CRec**", "f3crec"), ("**FCUCR**", "fcucr"), ("**FFMSR**", "ffmsr")):
        kinds = Counter(line["standing"] for line in kept if paper in (None, line["paper"]))
        numbers = [sum(kinds.values()), *(kinds[kind] for kind in MARKS)]
        assert f"| {name} | all | {' | '.join(map(str, numbers))} |" in text


def test_the_figure_has_a_square_per_number(kept):
    drawn = (ROOT / FOLDER / "standing.svg").read_text()
    for kind, number in Counter(line["standing"] for line in kept).items():
        (group,) = re.findall(rf'<g id="{kind.replace(" ", "-")}">(.*?)\n   </g>', drawn, re.DOTALL)
        assert group.count("<use ") == number, kind
