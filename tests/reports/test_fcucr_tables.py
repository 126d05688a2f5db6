"""FCUCR's tables from records over sessions: numbers, stars, and what is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from fabricate import fabricate_sessions
from scipy import stats

from fedcl_bench.cli.main import main
from fedcl_bench.experiments import grid
from fedcl_bench.experiments.papers import Key, Printed, fcucr
from fedcl_bench.records.published import write as write_packs
from fedcl_bench.records.store import load_runs, user_scores
from fedcl_bench.reports.render import markdown
from fedcl_bench.reports.selection import Source
from fedcl_bench.reports.tables import build
from fedcl_bench.runs.specs import RunSpec


loaded = cache(load_runs)


def table(number, folder, registry, assignments=(), datasets=("xing",), **only):
    source = Source(loaded(folder), registry, None, tuple(assignments))
    return build("fcucr", fcucr.TABLES[number], source, datasets, **only)


def cell(built, row, metric="hit@10", backbone="sasrec", dataset="xing"):
    (found,) = [c for c in built.cells() if c.key == Key(dataset, backbone, row, metric, "value")]
    return found


def of(row, backbone="sasrec", dataset="xing", **settings) -> RunSpec:
    spec = fcucr.row_spec(row, backbone, dataset)
    return replace(spec, settings=(*spec.settings, *settings.items()))


@pytest.fixture(scope="module")
def runs(registry, tmp_path_factory):
    """XING. SASRec with both starts, seeds 0-2: FCUCR .05 above FedAvg if clients start alone, .01 below it if they
    start alike. GRU4Rec: FedAvg alone. PFedRec and TiSASRec's FCUCR: one seed."""
    folder = tmp_path_factory.mktemp("fcucr")
    levels = {"ft": 0.20, "fcucr": 0.25, "without=tasd": 0.24, "without=iupr": 0.23, "without=both": 0.22}
    for i, (row, level) in enumerate(levels.items()):
        for seed in range(3):
            fabricate_sessions(folder, registry, of(row), seed, level + 0.01 * seed, noise=i, full=0.02 + 0.001 * i)
    for i, (row, level) in enumerate((("ft", 0.16), ("fcucr", 0.15))):
        for seed in range(3):
            fabricate_sessions(folder, registry, of(row, init="server"), seed, level, noise=i, full=0.03)
    for seed in range(3):
        fabricate_sessions(folder, registry, of("ft", "gru4rec"), seed, 0.19, seconds=0.5)
    fabricate_sessions(folder, registry, of("ft", "pfedrec"), 0, 0.19)
    fabricate_sessions(folder, registry, of("fcucr", "tisasrec"), 0, 0.28)
    for row, seconds in (("window=1", 1.0), ("window=5", 1.25), ("transfer_interval=3", 0.75)):
        for seed in range(2):
            fabricate_sessions(folder, registry, of(row), seed, 0.2, seconds=seconds + 0.1 * seed)
    return folder


# The tables

@pytest.fixture(scope="module")
def built(runs, registry):
    """Table 2 on XING."""
    return table(2, runs, registry)


def test_means_ranks_and_layout(built):
    found = cell(built, "fcucr")
    assert found.mean == pytest.approx(0.26) and found.std == pytest.approx(0.01) and found.seeds == (0, 1, 2)
    assert found.printed == Printed("0.2882", True)
    assert cell(built, "fcucr", "ndcg@10").mean == pytest.approx(0.13)
    assert cell(built, "fcucr", "all:hit@10").mean == pytest.approx(0.021)
    assert cell(built, "fcucr", "all:hit@10").printed is None
    assert cell(built, "fcucr", backbone="tisasrec").rank == 1 and found.rank == 2  # among all lines of the dataset
    (panel,) = built.panels
    assert [line.labels for line in panel.lines] == [
        ("XING", "PFedRec", "FedAvg"), ("XING", "FedRAP", "FedAvg"), ("XING", "GPFedRec", "FedAvg"),
        *(("XING", backbone, row) for backbone in ("DMI-GNN", "HearInt", "MiaSRec")
          for row in ("FedAvg", "FedAvg, one negative")),
        ("XING", "GRU4Rec", "FedAvg"), ("XING", "GRU4Rec", "FCUCR"), ("XING", "SASRec", "FedAvg"),
        ("XING", "SASRec", "FCUCR"), ("XING", "TiSASRec", "FedAvg"), ("XING", "TiSASRec", "FCUCR")]
    assert built.heads == ("HR@10", "NDCG@10", "HR@10, all items", "NDCG@10, all items",
                           "MiB sent per client and round")
    sent = cell(built, "fcucr", "upload_mib")
    assert sent.mean == pytest.approx(4 / 2 ** 20) and sent.rank == 0 and not sent.star


def test_star_is_against_the_same_backbone(built, runs):
    """The paired t-test over users of FCUCR and FedAvg on SASRec; TiSASRec has no FedAvg, and no star although its
    FCUCR beats every other line."""
    mine, base = (user_scores([run for run in loaded(runs) if run.meta["method"] == method
                               and run.meta["backbone"] == "sasrec" and run.meta["settings"]["init"] == "per_client"
                               and run.meta["settings"].get("without", "none") == "none"
                               and run.meta["settings"].get("window", 0) == 0
                               and run.meta["settings"].get("transfer_interval", 1) == 1], "all:hit@10")
                  for method in ("fcucr", "ft"))
    assert cell(built, "fcucr", "all:hit@10").p == pytest.approx(stats.ttest_rel(mine, base).pvalue, rel=1e-6)
    assert {c.key[1:4] for c in built.cells() if c.star} == {
        ("sasrec", "fcucr", m) for m in fcucr.TABLES[2].metrics if m != "upload_mib"}
    assert any(note.startswith("p over users / over seeds of FCUCR on SASRec, XING: HR@10 < 0.0001 / < 0.0001; NDCG@10")
               for note in built.notes)
    assert any(note.startswith("TiSASRec, XING: not tested; no baseline has a record") for note in built.notes)


def test_the_best_line_is_tested_against_those_on_other_backbones(built, runs):
    """FCUCR is best on TiSASRec, .28, of one seed, which PFedRec, .19, has too. A line of no FCUCR gets no star."""
    mine, base = (user_scores([run for run in loaded(runs) if run.meta["backbone"] == backbone], "ndcg@10")
                  for backbone in ("tisasrec", "pfedrec"))
    tested = cell(built, "ft", "ndcg@10", backbone="pfedrec")
    assert tested.p == pytest.approx(stats.ttest_rel(mine, base).pvalue, rel=1e-6) and not tested.star
    assert cell(built, "ft").p is None and cell(built, "ft", "upload_mib", backbone="pfedrec").p is None
    (across,) = [note for note in built.notes if note.startswith("p over users / over seeds of FCUCR on TiSASRec, its "
                                                                 "best line by HR@10 on XING, against lines on other ")]
    assert re.search(r"FedAvg on PFedRec: HR@10 (< )?0\.\d{4}, NDCG@10", across)
    assert any(note.startswith("One seed: no test over seeds (") for note in built.notes)


def test_no_star_for_the_worse(runs, registry):
    built = table(2, runs, registry, [("init", "server")])
    assert cell(built, "fcucr").mean == pytest.approx(0.15) and cell(built, "ft").mean == pytest.approx(0.16)
    assert cell(built, "fcucr").p < 1e-4 and not any(c.star for c in built.cells())
    assert cell(built, "ft", backbone="pfedrec").mean == pytest.approx(0.19)  # starts from the server's in any case


def test_missing_is_named(built, runs, registry):
    assert ("missing: ft on fedrap, gpfedrec, tisasrec, xing: no record; run: run_bench.py grid --paper fcucr "
            "--table 2 --datasets xing --backbones fedrap,gpfedrec,tisasrec --methods ft --seeds 3") in built.missing
    assert all(c.missing for c in built.cells() if c.mean is None)
    assert all(cell(built, row, backbone="hearint").printed.text == "0.1387" for row in ("ft", "loss=bce"))
    only = table(2, runs, registry, backbones=["sasrec"])
    assert len(only.cells()) == 10 and not only.missing
    assert table(3, runs, registry, backbones=["gru4rec"]) is None


def test_windows_intervals_and_seconds(runs, registry):
    """A round's seconds are training and evaluation; the paper's 1h8min is 4080."""
    four, five = (table(number, runs, registry, datasets=None) for number in (4, 5))
    seconds = cell(four, "window=5", "round_seconds")
    assert seconds.mean == pytest.approx(1.3) and seconds.std == pytest.approx(0.1 / 2 ** 0.5)
    assert cell(four, "fcucr", "round_seconds").mean == pytest.approx(1.5)
    assert cell(four, "window=3").missing.startswith("no record with these settings")
    assert cell(five, "transfer_interval=3", "round_seconds").mean == pytest.approx(0.8)
    assert cell(five, "fcucr").mean == cell(four, "fcucr").mean == pytest.approx(0.26)
    assert cell(four, "fcucr", "round_seconds", dataset="lastfm-1k").printed.value == 4080.0
    text = markdown(four)
    assert "|  | last 5 rounds | 0.2000 ± 0.0000 (0.2829) | 0.1000 ± 0.0000 (0.1858) | 1.30 ± 0.07 (668) |" in text
    assert "| – (0.3426) | – (0.1944) | – (4,080) |" in text


def test_records_with_blocks(registry, tmp_path):
    fabricate_sessions(tmp_path, registry, of("ft"), 0, 0.2)
    (run,) = load_runs(tmp_path)
    run.meta["metrics"]["ndcg@10"]["per_block"] = [0.1] * 4
    built = build("fcucr", fcucr.TABLES[2], Source([run], registry), ["xing"], ["sasrec"])
    assert cell(built, "ft").mean == pytest.approx(0.2)
    assert cell(built, "ft", "ndcg@10").missing == "its record has 4 blocks, the table is of runs without blocks"


def test_compact_records_give_the_same_tables(runs, registry, tmp_path):
    write_packs(tmp_path, loaded(runs), "pack", lambda run: False)
    for number in (2, 4):
        assert markdown(table(number, tmp_path, registry)) == markdown(table(number, runs, registry))
    (run, *_), (full, *_) = loaded(tmp_path), loaded(runs)
    assert np.allclose(run.analysis["value"], full.analysis["value"], atol=1e-6)
    assert list(run.analysis["kind"].unique()) == ["target_probability", "negative_probability"]


# The commands

def test_pack_and_grid_take_figures_by_name(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["pack", "--records", str(runs), "--out", "c", "--paper", "fcucr", "--table", "3", "--figure", "2bc,k",
                 "--datasets", "xing"]) == 0
    # Table 3 whole, FCUCR on TiSASRec, FedAvg on SASRec and GRU4Rec, and k = 20, which is FCUCR itself.
    assert capsys.readouterr().out.startswith("8 of the 17 combinations of these tables and figures have records\n"
                                              "c/index.json: 19 runs in 3 files")
    part = grid.read_parts(None, {"paper": "fcucr", "figures": ("lambda",), "datasets": ("xing",),
                                  "set": {"init": "server"}})
    specs = part[0].specs()
    assert len(specs) == 6 and specs[0].settings == (("lambda_tasd", 0.1), ("init", "server"))
    (tmp_path / "grid.yaml").write_text("paper: fcucr\nfigures: [early, 2bc]\ndatasets: [xing]\n")
    assert len(grid.read_parts(tmp_path / "grid.yaml", {})[0].specs()) == 18
    (tmp_path / "grid.yaml").write_text("paper: f3crec\nfigures: 3\ndatasets: [ml-100k]\n")
    assert len(grid.read_parts(tmp_path / "grid.yaml", {})[0].specs()) == 18
