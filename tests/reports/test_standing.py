"""The standing of a printed number: every rule, at its edges, and the comparison with FT behind it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from fabricate import fabricate, level
from scipy import stats
from standing import (DIFFERS, DIRECTION, FACTS, IN_EFFECT, NO_DATA, OPEN, REPRODUCED, WIDE, Against, Known, Standing,
                      half_width, judge, standing)

from fedcl_bench.experiments.papers import Key, Printed, f3crec, fcucr
from fedcl_bench.reports.tables import Cell, Source, build
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.records.store import load_runs, user_scores
from fedcl_bench.stats.power import power_of_paired_t

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


@pytest.mark.parametrize("mean,printed,expected", [
    (0.1, "0.1000", Standing(REPRODUCED)), (0.1 + HALF, "0.1000", Standing(REPRODUCED)),
    (0.1 + HALF + 0.00004, "0.1000", Standing(REPRODUCED)), (0.1 + HALF + 0.00006, "0.1000", Standing(DIFFERS)),
    (0.1 - HALF - 0.00006, "0.1000", Standing(DIFFERS)), (0.03, "0.0345", Standing(OPEN, WIDE)),
    (0.03, "0.0315", Standing(REPRODUCED)), (0.03, "0.0400", Standing(DIFFERS))])
def test_standing_follows_the_interval(mean, printed, expected):
    """The paper's rounding counts; a number inside the interval but more than 10 % away is open."""
    assert standing(replace(CELL, mean=mean, printed=Printed(printed))) == expected


def test_ndcg_is_reproduced_within_a_two_hundredth():
    """Far from the interval or a small number; other metrics and changes are not."""
    near = replace(CELL, key=KEY._replace(metric="ndcg@20"), mean=0.0149, std=0.0001, printed=Printed("0.0100"))
    assert standing(near) == Standing(REPRODUCED)
    assert standing(replace(near, mean=0.0151)) == standing(replace(near, key=KEY)) == Standing(DIFFERS)
    assert standing(replace(near, key=near.key._replace(column="change"), decimals=2, printed=Printed("0.02"),
                            mean=0.025)) == Standing(REPRODUCED)  # by its rounding


def test_changes_are_near_within_five_points():
    change = replace(CELL, key=KEY._replace(column="change"), decimals=2, mean=10.0, std=10.0, printed=Printed("14.90"))
    assert standing(change) == Standing(REPRODUCED)
    assert standing(replace(change, printed=Printed("15.10"))) == Standing(OPEN, WIDE)
    assert standing(replace(change, std=1.0, printed=Printed("-5.00"))) == Standing(DIFFERS)


def test_direction_needs_the_printed_sign_and_p():
    far = replace(CELL, printed=Printed("0.2000"))
    assert standing(far, 1, AHEAD) == standing(far, 1, replace(AHEAD, difference=-0.1, printed=-0.1)) \
        == Standing(DIRECTION)
    for other in (replace(AHEAD, p=0.05), replace(AHEAD, difference=-0.002), replace(AHEAD, printed=0.0)):
        assert standing(far, 1, other, "a reason") == Standing(DIFFERS, "a reason")
    assert standing(CELL, 1, AHEAD) == Standing(REPRODUCED)
    wide = replace(CELL, mean=0.03, printed=Printed("0.0345"))
    assert standing(wide, 1, AHEAD) == Standing(DIRECTION) and standing(wide, 1, replace(AHEAD, p=0.2)).kind == OPEN


def test_what_is_open_or_has_no_data():
    assert standing(replace(CELL, printed=None)) is None
    assert standing(replace(CELL, printed=Printed("OOM"))) == Standing(OPEN, "the paper's run went out of memory")
    assert standing(replace(CELL, mean=None, missing="no record")) == Standing(OPEN, "no record")
    assert standing(replace(CELL, mean=None), no_data="no file") == Standing(NO_DATA, "no file")
    assert standing(CELL, no_data="no file") == Standing(REPRODUCED)
    assert standing(replace(CELL, seeds=(0, 1))) == standing(replace(CELL, seeds=(0,), std=None)) \
        == Standing(OPEN, "fewer than 3 seeds")
    seconds = replace(CELL, key=KEY._replace(metric="round_seconds"), mean=1.5, printed=Printed("672"))
    assert standing(seconds) == Standing(OPEN, "seconds depend on the machine")


def test_a_contradiction_of_the_paper_is_the_reason_where_its_number_is_not_reproduced():
    odd = replace(CELL, contradiction="it prints another one too")
    assert standing(odd) == Standing(REPRODUCED)
    assert standing(replace(odd, mean=0.5), known="something else") == Standing(DIFFERS, odd.contradiction)


def test_statistics_must_be_equal():
    count = Cell(Key("ml-100k", "", "interactions", "", "D0"), 0, mean=58771.0, printed=Printed("58771"))
    assert standing(count) == Standing(REPRODUCED)
    assert standing(replace(count, mean=58772.0)) == Standing(DIFFERS)
    sparsity = replace(count, decimals=2, mean=91.19, printed=Printed("91.19"))
    assert standing(sparsity) == Standing(REPRODUCED) and standing(replace(sparsity, mean=91.18)) == Standing(DIFFERS)


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
    return Source(load_runs(folder), registry, None, (), lambda dataset: {})


def judged(source, number=2):
    table = f3crec.TABLES[number]
    return judge("f3crec", table, build("f3crec", table, source).cells(), source)


def test_rows_are_compared_with_ft_over_the_blocks_of_their_cell(source):
    found = judged(source)
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
    ablation = judged(source, 3)[Key("ml-100k", "fedmf", "f3crec", "ndcg@20", "avg")]
    assert ablation.against.printed == pytest.approx(0.1034 - 0.0855)


def test_reasons_are_those_of_the_cell(source):
    found = judged(source)
    assert found[Key("ml-100k", "fedmf", "f3crec", "ndcg@20", "D3")].standing == Standing(DIFFERS, IN_EFFECT)
    assert "re-implementation" in found[Key("ml-100k", "pfedrec", "rlp2", "ndcg@20", "D3")].standing.reason
    assert found[Key("hetrec2011-ml", "fedmf", "rlp2", "ndcg@20", "D1")].standing == Standing(
        NO_DATA, FACTS["f3crec"].without_data["hetrec2011-ml"])
    assert found[Key("ml-latest-small", "fedmf", "ft", "ndcg@20", "D1")].standing == Standing(OPEN, "no record")
