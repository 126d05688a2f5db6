"""The page over all papers: which reading decides, counts, power, figure and command."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace

import pytest
from fabricate import fabricate, level

from fedcl_bench.cli.main import main
from fedcl_bench.experiments.papers import PAPERS, Key, Printed, Reading, f3crec, fcucr, ffmsr
from fedcl_bench.reports import overview
from fedcl_bench.reports.pages import FOLDER
from fedcl_bench.reports.standing import MARKS, OPEN, Judged, Standing, standing
from fedcl_bench.reports.tables import Cell, Source
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.records.store import load_runs

FIRST, SECOND = Reading("the first way", "first", (2,)), Reading("the second way", "second", (2, 3))


@pytest.fixture(scope="module")
def records(registry, tmp_path_factory):
    """FedMF on ML-100K. First: FT, KD ahead of it for every user, Reg with two seeds. Second: FT and Reg as printed."""
    folder = tmp_path_factory.mktemp("readings")
    for name, method, mean, seeds in (("first", "ft", 0.06, 3), ("first", "kd", 0.07, 3), ("first", "reg", 0.2, 2),
                                      ("second", "ft", 0.0655, 3), ("second", "reg", 0.0753, 3)):
        for seed in range(seeds):
            fabricate(folder / name, registry, RunSpec(method, "fedmf", "ml-100k"), seed,
                      level(mean, gap=0.001, noise=len(method)))
    return folder


@pytest.fixture(scope="module")
def everything(records, registry):
    """All cells in both readings, which are those of the papers in this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f3crec, "READINGS", (FIRST, SECOND))
        patch.setattr(fcucr, "READINGS", (Reading("none", "first", (2,)),))
        patch.setattr(ffmsr, "READINGS", ())
        yield [entry for paper in PAPERS for entry in overview.entries(
            paper, lambda reading: Source(load_runs(records / reading.folder), registry, None, reading.settings,
                                          lambda dataset: {}))]


@pytest.fixture(scope="module")
def chosen(everything):
    return overview.deciding(everything)


def found(entries, row, column="avg", table=2):
    (entry,) = [entry for entry in entries if entry.table.number == table
                and entry.key == Key("ml-100k", "fedmf", row, "ndcg@20", column)]
    return entry


def test_the_first_reading_with_enough_seeds_decides_and_not_the_best(chosen):
    assert found(chosen, "ft").reading is FIRST  # though FT of the second is nearer
    assert found(chosen, "reg").reading is SECOND  # the first has two seeds
    assert found(chosen, "spp").judged.standing == Standing(OPEN, "no record")
    assert found(chosen, "ft", table=3).reading is SECOND


def test_every_printed_number_counts_once(chosen):
    places = Counter((entry.paper, entry.table.number, entry.key) for entry in chosen)
    assert set(places.values()) == {1}
    expected = {("f3crec", number, key) for number in (2, 3) for key in f3crec.printed()[number]}
    lines = {key._replace(row=fcucr.SAME_LINE.get(key.row, key.row)) for key in fcucr.printed()[2]}
    assert set(places) == expected | {("fcucr", 2, key) for key in lines} and len(lines) == 96


def test_rows_of_one_printed_line_are_judged_by_the_one_that_was_run():
    """FedAvg on DMI-GNN, trained with one negative."""
    table, reading = fcucr.TABLES[2], FIRST
    place = Key("xing", "dmi-gnn", "ft", "hit@10", "value")
    empty = Cell(place, 4, printed=Printed("0.2561"), missing="no record")
    run = replace(empty, key=place._replace(row=fcucr.BCE), mean=0.2561, std=0.01, seeds=(0, 1, 2))
    entries = [overview.Entry("fcucr", table, place, reading, Judged(cell, standing(cell))) for cell in (empty, run)]
    (chosen,) = overview.deciding(entries)
    assert chosen.judged.cell is run


def test_page_counts_and_power(everything, chosen):
    text = overview.page(everything, "COMMAND", "p.svg", "t.csv")
    assert text == overview.page(everything, "COMMAND", "p.svg", "t.csv")
    total = overview.counts(chosen)
    assert total[0] == sum(total[1:]) == len(chosen) and f"| **all** | all | {' | '.join(map(str, total))} |" in text
    first = overview.counts(e for e in everything if e.reading is FIRST and e.judged.cell.mean is not None)
    assert f"| F3CRec | the first way | `first` | 2 | {' | '.join(map(str, first))} |" in text
    power = text.split("## Which difference could have been seen")[1]
    against = found(chosen, "kd").judged.against
    (line,) = [line for line in power.splitlines() if "| ML-100K | FedMF | KD |" in line]
    seen = "yes" if abs(0.0938 - 0.0855) >= against.detectable else "no"
    assert line == (f"| F3CRec | ML-100K | FedMF | KD | {against.difference:+.4f} | < 0.0001 | 40 | 0-2 | "
                    f"{against.detectable:.4f} | +0.0083 | {seen} |")  # of the printed D1-D3
    assert f"In {int(seen == 'no')} of 2 comparisons" in power  # Reg too


def test_figure_has_a_square_per_number(chosen):
    drawn = overview.figure(chosen)
    squares = {c.get_gid(): len(c.get_offsets()) for axes in drawn.axes for c in axes.collections if c.get_gid()}
    expected = Counter(entry.judged.standing.kind.replace(" ", "-") for entry in chosen)
    assert squares == expected
    legend = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert legend == [f"{expected[kind.replace(' ', '-')]} {kind}" for kind in MARKS]


def test_command_writes_page_figure_and_numbers(records, everything, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduction", "--overview", "--records", str(records)]) == 0
    names = [f"{FOLDER}/standing.{kind}" for kind in ("md", "svg", "csv")]
    assert capsys.readouterr().out.splitlines() == names
    text = (tmp_path / names[0]).read_text()
    assert f"`run_bench.py reproduction --overview --records {records.name}`" in text and "](standing.svg)" in text
    with open(tmp_path / names[2], newline="") as file:
        lines = list(csv.DictReader(file))
    kinds = Counter(line["standing"] for line in lines)
    assert f"| **all** | all | {len(lines)} | {' | '.join(str(kinds[kind]) for kind in MARKS)} |" in text
    assert "(standing.md)" in (tmp_path / FOLDER / "README.md").read_text()
    for options in (["--table", "2"], ["--paper", "fcucr"], ["--tuned"], ["--set", "lr=1"], ["--datasets", "ml-100k"]):
        assert main(["reproduction", "--overview", "--records", str(records), *options]) == 2
        assert f"leave {options[0]} out" in capsys.readouterr().err
