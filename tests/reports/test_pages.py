"""results/pages: pages, numbers, figure and index are those of the published records."""

from __future__ import annotations

import csv
import re
from collections import Counter

import make_pages
import pytest
from helpers import ROOT
from standing import MARKS, Judged, Reading, standing

from fedcl_bench.experiments.papers import Key, Printed, fcucr
from fedcl_bench.reports.cells import Cell

FOLDER = ROOT / make_pages.FOLDER
AGAIN = f"run python {make_pages.COMMAND}"


@pytest.fixture(scope="module")
def kept():
    """The published numbers, line by line."""
    with open(FOLDER / "standing.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_pages_are_those_of_the_records(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "recbole-models.md").write_bytes((FOLDER / "recbole-models.md").read_bytes())
    make_pages.main(["--out", str(tmp_path)])
    for file in sorted({*FOLDER.iterdir()} - {FOLDER / "standing.svg"}):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), f"{file.name}: {AGAIN}"


def test_a_page_is_that_of_its_records(monkeypatch):
    monkeypatch.chdir(ROOT)
    (page,) = [page for page in make_pages.PAGES if page.name == "reproduction-fcucr-tuned.md"]
    text = make_pages.paper_page(page, make_pages.source_of(page.reading))
    assert text == (FOLDER / page.name).read_text(encoding="utf-8"), AGAIN


@pytest.mark.parametrize("difference, p, words", [
    (0.0179, 0.01, "**yes**"), (0.0023, 0.39, "sign only, not significant"), (-0.0023, 0.39, "**no**"),
    (-0.02, 0.001, "**no**"), (0.0, 1.0, "**no**")])
def test_a_lead_is_that_of_the_paper_only_where_it_is_significant(difference, p, words):
    assert make_pages.as_printed(difference, 0.0179, p) == words
    assert make_pages.as_printed(-difference, -0.0179, p) == words


def test_the_index_is_that_of_the_pages():
    assert make_pages.index(FOLDER) == (FOLDER / "README.md").read_text(encoding="utf-8"), AGAIN


def test_the_counts_of_the_page_are_those_of_its_numbers(kept):
    text = (FOLDER / "standing.md").read_text(encoding="utf-8")
    for name, paper in (("**all**", None), ("**F3CRec**", "f3crec"), ("**FCUCR**", "fcucr"), ("**FFMSR**", "ffmsr")):
        kinds = Counter(line["standing"] for line in kept if paper in (None, line["paper"]))
        numbers = [sum(kinds.values()), *(kinds[kind] for kind in MARKS)]
        assert f"| {name} | all | {' | '.join(map(str, numbers))} |" in text


def test_the_figure_has_a_square_per_number(kept):
    drawn = (FOLDER / "standing.svg").read_text()
    for kind, number in Counter(line["standing"] for line in kept).items():
        (group,) = re.findall(rf'<g id="{kind.replace(" ", "-")}">(.*?)\n   </g>', drawn, re.DOTALL)
        assert group.count("<use ") == number, kind


def test_the_first_reading_with_enough_seeds_decides_and_not_the_best():
    """Rows that stand for one printed line share a place: FedAvg on DMI-GNN, trained with one negative."""
    key, table = Key("xing", "dmi-gnn", "ft", "hit@10", "value"), fcucr.TABLES[2]
    empty = Cell(key, 4, printed=Printed("0.2561"), missing="no record")
    cells = [empty, *(Cell(key._replace(row=fcucr.BCE), 4, mean, 0.01, seeds, printed=empty.printed)
                      for mean, seeds in ((0.2561, (0, 1)), (0.3, (0, 1, 2)), (0.2561, (0, 1, 2))))]
    every = [make_pages.Entry("fcucr", table, key, Reading(str(i), "", (2,)), Judged(cell, standing(cell)))
             for i, cell in enumerate(cells)]
    assert [entry.reading.title for entry in make_pages.deciding(every)] == ["2"]
    assert [entry.reading.title for entry in make_pages.deciding(every[:1])] == ["0"]


def test_a_paper_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        make_pages.main(["f4crec"])
    assert "found 'f4crec', accepted: f3crec, fcucr, ffmsr" in capsys.readouterr().err
