"""results/pages and results/domains: pages, numbers, figure and index are those of the published records. And the
standing of a printed number: every rule, at its edges, and the comparison with FT behind it."""

import csv
import math
import re
import runpy
from collections import Counter
from dataclasses import replace

import make_pages
import numpy as np
import pytest
from fabricate import fabricate, level
from helpers import ROOT
from scipy import stats
from standing import (ABSENT, CLAIM_REPRODUCED, DIFFERS, DIRECTION, FACTS, IN_EFFECT, MARKS, NO_DATA, OPEN, OPPOSITE,
                      REPRODUCED, SMALLER, UNCLEAR, WIDE, Against, Interval, Judged, Known, Reading, Standing,
                      claim_standing, counted, half_width, judge, standing)

from fedcl_bench.experiments.papers import Key, Printed, f3crec, fcucr
from fedcl_bench.records.store import load_runs, user_scores
from fedcl_bench.reports import comparison
from fedcl_bench.reports.cells import Cell
from fedcl_bench.reports.selection import Source
from fedcl_bench.reports.tables import build
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.stats.significance import compare_paired, power_of_paired_t

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


def test_a_page_is_that_of_its_records_and_the_index_of_the_pages(monkeypatch):
    monkeypatch.chdir(ROOT)
    (page,) = [page for page in make_pages.PAGES if page.name == "reproduction-fcucr-tuned.md"]
    text = make_pages.paper_page(page, make_pages.source_of(page.reading))
    assert text == (FOLDER / page.name).read_text(encoding="utf-8"), AGAIN
    assert make_pages.index(FOLDER) == (FOLDER / "README.md").read_text(encoding="utf-8"), AGAIN


@pytest.mark.parametrize("difference, p, words", [
    (0.0179, 0.01, "**yes**"), (0.0023, 0.39, "sign only, not significant"), (-0.0023, 0.39, "**no**"),
    (-0.02, 0.001, "**no**"), (0.0, 1.0, "**no**")])
def test_a_lead_is_that_of_the_paper_only_where_it_is_significant(difference, p, words):
    assert make_pages.as_printed(difference, 0.0179, p) == words
    assert make_pages.as_printed(-difference, -0.0179, p) == words


def test_the_counts_of_page_and_figure_are_those_of_the_numbers(kept):
    text = (FOLDER / "standing.md").read_text(encoding="utf-8")
    for name, paper in (("**all**", None), ("**F3CRec**", "f3crec"), ("**FCUCR**", "fcucr"), ("**FFMSR**", "ffmsr")):
        kinds = Counter(line["standing"] for line in kept if paper in (None, line["paper"]))
        numbers = [sum(kinds.values()), *(kinds[kind] for kind in MARKS)]
        assert f"| {name} | all | {' | '.join(map(str, numbers))} |" in text
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


def test_the_tables_of_domains_are_those_of_the_records(monkeypatch):
    """They show the p of the t-test alone: no bootstrap and no permutations."""
    monkeypatch.setattr(comparison, "compare_paired", lambda a, b, draws, unit: compare_paired(a, b, 1, unit=unit))
    made = runpy.run_path(str(ROOT / "results/domains/make_tables.py"))["text"]()
    kept = (ROOT / "results/domains/tables.md").read_text(encoding="utf-8")
    assert kept == made, "run python results/domains/make_tables.py"


KEY = Key("ml-100k", "fedmf", "kd", "recall@20", "avg")
CELL = Cell(KEY, 4, mean=0.1, std=0.002, seeds=(0, 1, 2, 3, 4), printed=Printed("0.1000"))
HALF = 2.7764451051977987 * 0.002 * math.sqrt(1.2)  # t(.975, 4)
AHEAD = Against(0.002, 0.01, 482, 0.004, 0.01)  # FT, in the paper too


def test_interval_is_that_of_more_runs():
    """A printed mean of m runs lies nearer to ours than one more run does: s sqrt(1/m + 1/n)."""
    assert half_width(0.002, 5) == pytest.approx(HALF)
    assert half_width(1.0, 100000) == pytest.approx(stats.norm.ppf(0.975), rel=1e-4)
    assert half_width(0.01, 5, 5) == pytest.approx(2.7764451051977987 * 0.01 * math.sqrt(0.4))
    of_runs = replace(CELL, key=KEY._replace(metric="hit@10"), mean=0.30, std=0.01, printed=Printed("0.2800"))
    assert standing(of_runs) == Standing(REPRODUCED) and standing(of_runs, 5) == Standing(DIFFERS)
    assert standing(replace(of_runs, printed=Printed("0.2830")), 5) == Standing(REPRODUCED)


NDCG = {"key": KEY._replace(metric="ndcg@20"), "mean": 0.0149, "std": 0.0001, "printed": Printed("0.0100")}
CHANGE = {"key": KEY._replace(column="change"), "decimals": 2, "mean": 10.0, "std": 10.0}
WIDE_ONE = {"mean": 0.03, "printed": Printed("0.0345")}
FAR = {"printed": Printed("0.2000")}
ODD = {"contradiction": "it prints another one too"}
COUNT = {"key": Key("ml-100k", "", "interactions", "", "D0"), "decimals": 0, "mean": 58771.0, "std": None, "seeds": (),
         "printed": Printed("58771")}


@pytest.mark.parametrize("cell, more, expected", [
    # The paper's rounding counts; a number inside the interval but more than 10 % away is open.
    ({}, {}, Standing(REPRODUCED)), ({"mean": 0.1 + HALF}, {}, Standing(REPRODUCED)),
    ({"mean": 0.1 + HALF + 0.00004}, {}, Standing(REPRODUCED)), ({"mean": 0.1 + HALF + 0.00006}, {}, Standing(DIFFERS)),
    ({"mean": 0.1 - HALF - 0.00006}, {}, Standing(DIFFERS)), (WIDE_ONE, {}, Standing(OPEN, WIDE)),
    ({"mean": 0.03, "printed": Printed("0.0315")}, {}, Standing(REPRODUCED)),
    ({"mean": 0.03, "printed": Printed("0.0400")}, {}, Standing(DIFFERS)),
    # N@20 is reproduced within a two hundredth, far from the interval or a small number; other metrics and changes not,
    # but by their rounding.
    (NDCG, {}, Standing(REPRODUCED)), ({**NDCG, "mean": 0.0151}, {}, Standing(DIFFERS)),
    ({**NDCG, "key": KEY}, {}, Standing(DIFFERS)),
    ({**NDCG, "key": NDCG["key"]._replace(column="change"), "decimals": 2, "printed": Printed("0.02"), "mean": 0.025},
     {}, Standing(REPRODUCED)),
    # Changes are near within five points.
    ({**CHANGE, "printed": Printed("14.90")}, {}, Standing(REPRODUCED)),
    ({**CHANGE, "printed": Printed("15.10")}, {}, Standing(OPEN, WIDE)),
    ({**CHANGE, "std": 1.0, "printed": Printed("-5.00")}, {}, Standing(DIFFERS)),
    # A direction needs the printed sign and p.
    (FAR, {"against": AHEAD}, Standing(DIRECTION)),
    (FAR, {"against": replace(AHEAD, difference=-0.1, printed=-0.1)}, Standing(DIRECTION)),
    *((FAR, {"against": replace(AHEAD, **other), "known": "a reason"}, Standing(DIFFERS, "a reason"))
      for other in ({"p": 0.05}, {"difference": -0.002}, {"printed": 0.0})),
    ({}, {"against": AHEAD}, Standing(REPRODUCED)), (WIDE_ONE, {"against": AHEAD}, Standing(DIRECTION)),
    (WIDE_ONE, {"against": replace(AHEAD, p=0.2)}, Standing(OPEN, WIDE)),
    # What is open or has no data.
    ({"printed": None}, {}, None),
    ({"printed": Printed("OOM")}, {}, Standing(OPEN, "the paper's run went out of memory")),
    ({"mean": None, "missing": "no record"}, {}, Standing(OPEN, "no record")),
    ({"mean": None}, {"no_data": "no file"}, Standing(NO_DATA, "no file")),
    ({}, {"no_data": "no file"}, Standing(REPRODUCED)),
    ({"seeds": (0, 1)}, {}, Standing(OPEN, "fewer than 3 seeds")),
    ({"seeds": (0,), "std": None}, {}, Standing(OPEN, "fewer than 3 seeds")),
    ({"key": KEY._replace(metric="round_seconds"), "mean": 1.5, "printed": Printed("672")}, {},
     Standing(OPEN, "seconds depend on the machine")),
    # A contradiction of the paper is the reason where its number is not reproduced.
    (ODD, {}, Standing(REPRODUCED)),
    ({**ODD, "mean": 0.5}, {"known": "something else"}, Standing(DIFFERS, ODD["contradiction"])),
    # Statistics must be equal.
    (COUNT, {}, Standing(REPRODUCED)), ({**COUNT, "mean": 58772.0}, {}, Standing(DIFFERS)),
    ({**COUNT, "decimals": 2, "mean": 91.19, "printed": Printed("91.19")}, {}, Standing(REPRODUCED)),
    ({**COUNT, "decimals": 2, "mean": 91.18, "printed": Printed("91.19")}, {}, Standing(DIFFERS))])
def test_standing(cell, more, expected):
    assert standing(replace(CELL, **cell), **more) == expected


def test_what_is_known_is_of_some_cells():
    known = Known("a reason", tables=(2,), rows=("kd",))
    assert known.holds(2, KEY) and not known.holds(3, KEY) and not known.holds(2, KEY._replace(row="ft"))
    assert Known("another").holds(3, KEY)
    for paper in (f3crec, fcucr):
        for known in FACTS[paper.OURS].known:
            assert any(known.holds(table.number, key) for table in paper.TABLES.values() for key in table.keys())


@pytest.fixture(scope="module")
def source(registry, tmp_path_factory):
    """FedMF: KD leads FT for every user, F3CRec is FT. PFedRec: RLP2 alone."""
    folder = tmp_path_factory.mktemp("standing")
    for method, backbone, mean in (("ft", "fedmf", 0.06), ("kd", "fedmf", 0.065), ("f3crec", "fedmf", 0.06),
                                   ("rlp2", "pfedrec", 0.01)):
        for seed in range(3):
            fabricate(folder, registry, RunSpec(method, backbone, "ml-100k"), seed,
                      level(mean, gap=0.001, noise=method == "kd"))
    return Source(load_runs(folder), registry)


@pytest.fixture(scope="module")
def judged(source):
    """The numbers of a table of F3CRec, by its number."""
    return {number: judge("f3crec", table, build("f3crec", table, source).cells(), source)
            for number, table in f3crec.TABLES.items() if number in (2, 3)}


def test_rows_are_compared_with_ft_and_reasons_are_those_of_the_cell(source, judged):
    found = judged[2]
    key = Key("ml-100k", "fedmf", "kd", "ndcg@20", "D2")
    runs = {row: [run for run in source.runs if run.head["method"] == row and run.head["backbone"] == "fedmf"]
            for row in ("kd", "ft")}
    scores = [user_scores(runs[row], "ndcg@20", (2,)).to_numpy() for row in ("kd", "ft")]
    expected = stats.ttest_rel(*scores)
    against = found[key].against
    assert (against.users, against.difference) == (len(scores[0]), pytest.approx(np.mean(scores[0] - scores[1])))
    assert against.p == pytest.approx(expected.pvalue) and against.printed == pytest.approx(0.0824 - 0.0768)
    deviation = np.std(scores[0] - scores[1], ddof=1)
    assert power_of_paired_t(against.detectable / deviation, against.users) == pytest.approx(0.8)
    assert found[key._replace(column="change")].against.printed == 9.72
    assert found[key._replace(row="ft")].against is None  # FT itself
    assert found[key._replace(backbone="pfedrec", row="rlp2")].against is None  # FT has no record there
    ablation = judged[3][Key("ml-100k", "fedmf", "f3crec", "ndcg@20", "avg")]
    assert ablation.against.printed == pytest.approx(0.1034 - 0.0855)
    assert found[Key("ml-100k", "fedmf", "f3crec", "ndcg@20", "D3")].standing == Standing(DIFFERS, IN_EFFECT)
    assert "re-implementation" in found[Key("ml-100k", "pfedrec", "rlp2", "ndcg@20", "D3")].standing.reason
    assert found[Key("hetrec2011-ml", "fedmf", "rlp2", "ndcg@20", "D1")].standing == Standing(
        NO_DATA, FACTS["f3crec"].without_data["hetrec2011-ml"])
    assert found[Key("ml-latest-small", "fedmf", "ft", "ndcg@20", "D1")].standing == Standing(OPEN, "no record")


@pytest.mark.parametrize("printed, low, high, expected", [
    (0.02, 0.01, 0.03, CLAIM_REPRODUCED), (0.02, 0.03, 0.05, CLAIM_REPRODUCED), (0.02, 0.001, 0.01, SMALLER),
    (0.02, -0.01, 0.01, ABSENT), (0.02, -0.01, 0.03, UNCLEAR), (0.02, -0.05, -0.01, OPPOSITE),
    (-0.02, -0.03, -0.01, CLAIM_REPRODUCED), (-0.02, -0.01, -0.001, SMALLER), (-0.02, 0.01, 0.05, OPPOSITE),
    (-0.02, -0.01, 0.01, ABSENT), (-0.02, -0.03, 0.01, UNCLEAR),
    (0.02, 0.001, 0.0199, CLAIM_REPRODUCED), (0.02, -0.01, 0.0199, UNCLEAR)])  # within the paper's rounding
def test_claim_standing(printed, low, high, expected):
    found = Interval((low + high) / 2, low, high, 5, 0.1, 0.01)
    assert claim_standing(printed, 0.0002, found) == expected


def test_claims_are_paired_by_user_and_by_seed(source, judged):
    """Means and intervals of scipy's tests; each unit is averaged over the other."""
    found = judged[2][Key("ml-100k", "fedmf", "kd", "ndcg@20", "avg")].claim
    runs = {row: {run.seed: run for run in source.runs
                  if (run.head["method"], run.head["backbone"]) == (row, "fedmf")} for row in ("kd", "ft")}
    by_seed = np.array([user_scores([runs["kd"][seed]], "ndcg@20", (1, 2, 3)).to_numpy()
                        - user_scores([runs["ft"][seed]], "ndcg@20", (1, 2, 3)).to_numpy() for seed in range(3)])
    for axis, interval in ((0, found.by_user), (1, found.by_seed)):
        test = stats.ttest_1samp(by_seed.mean(axis=axis), 0.0)
        assert (interval.mean, interval.p) == (pytest.approx(by_seed.mean()), pytest.approx(test.pvalue))
        assert (interval.low, interval.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    numbers = {row: [f3crec.printed()[2][Key("ml-100k", "fedmf", row, "ndcg@20", f"D{t}")].value for t in (1, 2, 3)]
               for row in ("kd", "ft")}
    assert found.base == "ft" and found.printed == pytest.approx(np.mean(numbers["kd"]) - np.mean(numbers["ft"]))


def test_what_the_number_of_the_base_would_get(judged):
    """FT's number in the place of others': the same rule, and none for FT itself and for changes. Repeated numbers are
    counted once."""
    found = judged[2]
    cell = Key("ml-100k", "fedmf", "kd", "ndcg@20", "D2")
    of_ft = found[cell._replace(row="ft")].cell
    there = standing(replace(of_ft, printed=found[cell].cell.printed, decimals=found[cell].cell.decimals))
    assert found[cell].base_kind == there.kind and found[cell._replace(row="ft")].base_kind == ""
    assert found[cell._replace(column="change")].base_kind == ""
    assert found[cell._replace(backbone="pfedrec", row="rlp2")].base_kind == ""  # FT has no record there
    table, found = f3crec.TABLES[3], judged[3]
    kept = {key.row for key, each in found.items() if counted("f3crec", table, each)}
    assert kept == set(table.rows) - {"ft", "f3crec"}
