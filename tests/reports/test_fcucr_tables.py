"""FCUCR's tables from records over sessions: numbers, stars, and what is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fabricate import USERS, fabricate_sessions
from scipy import stats

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.experiments import papers
from fedcl_bench.experiments.papers import Key, Printed, fcucr
from fedcl_bench.reports.render import csv_text, latex, markdown
from fedcl_bench.reports.tables import Source, build
from fedcl_bench.records.published import write as write_packs
from fedcl_bench.runs.specs import RunSpec, Tuned, expected_settings
from fedcl_bench.records.store import load_runs, user_scores

SEQUENTIAL = ("gru4rec", "sasrec", "tisasrec")


def source(folder, registry, assignments=(), statistics=None, tuned=None) -> Source:
    return Source(load_runs(folder), registry, Tuned.of(tuned, folder), tuple(assignments), statistics)


def table(number, folder, registry, assignments=(), **only):
    return build("fcucr", fcucr.TABLES[number], source(folder, registry, assignments), **only)


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


# The definitions

def test_every_printed_number_has_a_cell():
    for number, definition in fcucr.TABLES.items():
        keys = set(definition.keys())
        printed = set(fcucr.printed()[number])
        assert printed <= keys
        extra = {key for key in keys - printed if key.metric in ("hit@10", "ndcg@10") and key.row != "without=both"}
        assert not extra, number


def test_printed_numbers_do_not_contradict_each_other():
    """FCUCR on SASRec stands in Tables 2-5, its seconds in Tables 4 and 5; the paper prints the same numbers."""
    printed = fcucr.printed()
    for dataset in fcucr.DATASETS:
        for metric in ("hit@10", "ndcg@10"):
            key = Key(dataset, "sasrec", "fcucr", metric, "value")
            assert len({printed[number][key].text for number in (2, 3, 4, 5)}) == 1
        key = Key(dataset, "sasrec", "fcucr", "round_seconds", "value")
        assert printed[4][key] == printed[5][key]
    assert fcucr.inconsistencies() == {}


def test_specs(registry):
    two = papers.specs("fcucr", [2], datasets=["xing"])
    assert two == [RunSpec("ft", b, "xing") for b in ("pfedrec", "fedrap", "gpfedrec")] + [
        RunSpec("ft", b, "xing", loss) for b in ("dmi-gnn", "hearint", "miasrec") for loss in ((), (("loss", "bce"),))
    ] + [
        RunSpec(m, b, "xing") for b in SEQUENTIAL for m in ("ft", "fcucr")]
    assert papers.specs("fcucr", [4], datasets=["tmall"])[0] == RunSpec("fcucr", "sasrec", "tmall", (("window", 1),))
    assert len(papers.specs("fcucr", range(1, 6), datasets=["xing"])) == 15 + 3 + 4 + 4
    assert papers.figure_specs("fcucr", ["2a"]) == papers.figure_specs("fcucr", ["early"])
    assert papers.figure_specs("fcucr", ["2b"]) == papers.figure_specs("fcucr", ["2c", "2bc", "probability"])
    counts = {name: len(papers.figure_specs("fcucr", [name], datasets=["xing"])) for name in fcucr.FIGURES}
    assert counts == {"early": 6, "probability": 6, "k": 6, "lambda": 6, "noise": 7}
    for spec in [*papers.specs("fcucr", range(1, 6)), *papers.figure_specs("fcucr", fcucr.FIGURES)]:
        settings = expected_settings(registry, spec)  # every setting exists
        assert settings["stream"] == "sessions" and settings["init"] == (
            "server" if spec.backbone in fcucr.STATIC else "per_client")


def test_unknown_names():
    for arguments, expected in ((("fcucr", [6]), "unknown table of fcucr '6'"),
                                (("fcrcr", [2]), "Did you mean 'fcucr'"),
                                (("fcucr", [3], None, ["gru4rec"]), "unknown backbone")):
        with pytest.raises(UserError, match=expected):
            papers.specs(*arguments)
    with pytest.raises(UserError, match="unknown figure of fcucr '3'.*\n?.*2a"):
        papers.figure_specs("fcucr", ["3"])


# The tables

@pytest.fixture(scope="module")
def built(runs, registry):
    """Table 2 on XING."""
    return table(2, runs, registry, datasets=["xing"])


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
    mine, base = (user_scores([run for run in load_runs(runs) if run.meta["method"] == method
                               and run.meta["backbone"] == "sasrec" and run.meta["settings"]["init"] == "per_client"
                               and run.meta["settings"].get("without", "none") == "none"
                               and run.meta["settings"].get("window", 0) == 0
                               and run.meta["settings"].get("transfer_interval", 1) == 1], "all:hit@10")
                  for method in ("fcucr", "ft"))
    assert len(mine) == USERS
    assert cell(built, "fcucr", "all:hit@10").p == pytest.approx(stats.ttest_rel(mine, base).pvalue, rel=1e-6)
    assert {c.key[1:4] for c in built.cells() if c.star} == {
        ("sasrec", "fcucr", m) for m in fcucr.TABLES[2].metrics if m != "upload_mib"}
    assert any(note.startswith("p of FCUCR on SASRec, XING: HR@10 < 0.0001; NDCG@10 < 0.0001; HR@10, all items < "
                               "0.0001")
               for note in built.notes)
    assert any(note.startswith("TiSASRec, XING: not tested; no baseline has a record") for note in built.notes)


def test_the_best_line_is_tested_against_those_on_other_backbones(built, runs):
    """FCUCR is best on TiSASRec, .28, of one seed, which PFedRec, .19, has too. A line of no FCUCR gets no star."""
    mine, base = (user_scores([run for run in load_runs(runs) if run.meta["backbone"] == backbone], "ndcg@10")
                  for backbone in ("tisasrec", "pfedrec"))
    tested = cell(built, "ft", "ndcg@10", backbone="pfedrec")
    assert tested.p == pytest.approx(stats.ttest_rel(mine, base).pvalue, rel=1e-6) and not tested.star
    assert cell(built, "ft").p is None and cell(built, "ft", "upload_mib", backbone="pfedrec").p is None
    assert [note for note in built.notes if note.startswith("p of FCUCR on TiSASRec, its best line by HR@10 on XING, "
                                                            "against lines on other backbones")]


def test_no_star_for_the_worse(runs, registry):
    built = table(2, runs, registry, [("init", "server")], datasets=["xing"])
    assert cell(built, "fcucr").mean == pytest.approx(0.15) and cell(built, "ft").mean == pytest.approx(0.16)
    assert cell(built, "fcucr").p < 1e-4 and not any(c.star for c in built.cells())
    assert cell(built, "ft", backbone="pfedrec").mean == pytest.approx(0.19)  # starts from the server's in any case


def test_missing_is_named(built, runs, registry):
    assert ("missing: ft on fedrap, gpfedrec, tisasrec, xing: no record; run: run_bench.py grid --paper fcucr "
            "--table 2 --datasets xing --backbones fedrap,gpfedrec,tisasrec --methods ft --seeds 3") in built.missing
    assert all(c.missing for c in built.cells() if c.mean is None)
    assert all(cell(built, row, backbone="hearint").printed.text == "0.1387" for row in ("ft", "loss=bce"))
    only = table(2, runs, registry, datasets=["xing"], backbones=["sasrec"])
    assert len(only.cells()) == 10 and not only.missing
    assert table(3, runs, registry, datasets=["xing"], backbones=["gru4rec"]) is None


def test_ablation(runs, registry):
    built = table(3, runs, registry, datasets=["xing"])
    assert {row: cell(built, row).mean for row in fcucr.TABLES[3].rows} == pytest.approx(
        {"fcucr": 0.26, "without=tasd": 0.25, "without=iupr": 0.24, "without=both": 0.23})
    assert [cell(built, row).rank for row in fcucr.TABLES[3].rows] == [1, 2, 0, 0]
    assert cell(built, "without=both").printed is None and cell(built, "without=tasd").printed.text == "0.2731"


def test_windows_intervals_and_seconds(runs, registry):
    """A round's seconds are training and evaluation; the paper's 1h8min is 4080."""
    four, five = table(4, runs, registry), table(5, runs, registry)
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


def test_statistics(registry, tmp_path):
    def known(dataset):
        if dataset != "xing":
            raise UserError(f"dataset '{dataset}': no file.")
        return {"users": [877], "items": [24390], "sessions": [5982], "average_length": [14.03]}
    built = build("fcucr", fcucr.TABLES[1], Source([], registry, None, (), known))
    text = markdown(built)
    assert "| dataset | Users | Items | Sessions | Averaged Length |" in text
    assert "| XING | 877 (877) | 24,390 (29,366) | 5,982 (6,165) | 14.03 (15.10) |" in text
    assert "missing: statistics of tmall: dataset 'tmall': no file." in built.missing


def test_records_with_blocks_or_without_full_ranking(registry, tmp_path):
    fabricate_sessions(tmp_path, registry, of("ft"), 0, 0.2)
    (run,) = load_runs(tmp_path)
    del run.meta["metrics"]["all:hit@10"]
    run.meta["metrics"]["ndcg@10"]["per_block"] = [0.1] * 4
    built = build("fcucr", fcucr.TABLES[2], Source([run], registry, None, (), None), ["xing"], ["sasrec"])
    assert cell(built, "ft").mean == pytest.approx(0.2)
    assert cell(built, "ft", "all:hit@10").missing == "its record has no all:hit@10"
    assert cell(built, "ft", "ndcg@10").missing == "its record has 4 blocks, the table is of runs without blocks"


def test_compact_records_give_the_same_tables(runs, registry, tmp_path):
    write_packs(tmp_path, load_runs(runs), "pack", lambda run: False)
    for number in (2, 3, 4, 5):
        assert markdown(table(number, tmp_path, registry)) == markdown(table(number, runs, registry))
    (run, *_), (full, *_) = load_runs(tmp_path), load_runs(runs)
    assert np.allclose(run.analysis["value"], full.analysis["value"], atol=1e-6)
    assert list(run.analysis["kind"].unique()) == ["target_probability"]


def test_latex_and_csv(built):
    text = latex(built)
    assert text.count(r"\begin{table*}") == 1 and r" &  & FCUCR & \underline{0.2600}$^{*}${\tiny$\pm$0.0100}" in text
    assert len(csv_text(built).splitlines()) == 1 + 15 * 5


# The commands

def test_tables_command(runs, registry, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["tables", "--paper", "fcucr", "--records", str(runs), "--datasets", "xing"]
    assert main([*options, "--table", "2,3", "--format", "csv", "--out", "t"]) == 0
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["table2.csv", "table3.csv"]
    capsys.readouterr()
    assert main([*options, "--table", "4", "5", "--set", "init=per_client"]) == 0
    assert capsys.readouterr().out.count("**FCUCR (Zhang et al., WWW 2026), Table") == 2
    for arguments, expected in ((["--table", "6"], "unknown table of fcucr '6'"), (["--table", "2,x"], "found 'x'"),
                                (["--table", "2", "--backbones", "fedmf"], "unknown backbone"),
                                (["--table", "2", "--set", "init=client"], "one of server, per_client")):
        assert main([*options, *arguments]) == 2
        assert expected in capsys.readouterr().err


def test_pack_and_grid_take_figures_by_name(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["pack", "--results", str(runs), "--out", "c", "--paper", "fcucr", "--table", "3", "--figure", "2bc,k",
                 "--datasets", "xing"]) == 0
    # Table 3 whole, FCUCR on TiSASRec, and k = 20, which is FCUCR itself.
    assert capsys.readouterr().out.startswith("6 of the 14 combinations of these tables and figures have records\n"
                                              "c/index.json: 13 runs in 2 files")
    from fedcl_bench.experiments import grid
    part = grid.read_parts(None, {"paper": "fcucr", "figures": ("lambda",), "datasets": ("xing",),
                                  "set": {"init": "server"}})
    specs = part[0].specs()
    assert len(specs) == 6 and specs[0].settings == (("lambda_tasd", 0.1), ("init", "server"))
    (tmp_path / "grid.yaml").write_text("paper: fcucr\nfigures: [early, 2bc]\ndatasets: [xing]\n")
    assert len(grid.read_parts(tmp_path / "grid.yaml", {})[0].specs()) == 12
    (tmp_path / "grid.yaml").write_text("paper: f3crec\nfigures: 3\ndatasets: [ml-100k]\n")
    assert len(grid.read_parts(tmp_path / "grid.yaml", {})[0].specs()) == 18
