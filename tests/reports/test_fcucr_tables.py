"""FCUCR's tables and figures from records over sessions: numbers, stars, what is drawn, and what is missing."""

import math
import re
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO

import numpy as np
import pandas as pd
import pytest
from fabricate import USERS, fabricate_sessions
from helpers import refused
from matplotlib.backends.backend_agg import FigureCanvasAgg
from scipy import stats
from synthetic import make_run
from test_figures import artists

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.experiments import grid
from fedcl_bench.experiments.papers import Key, Printed, fcucr
from fedcl_bench.records.published import write as write_packs
from fedcl_bench.records.store import load_runs, user_scores
from fedcl_bench.reports import draw as draw_module
from fedcl_bench.reports.frame import OverSeeds, user_histogram
from fedcl_bench.reports.render import markdown
from fedcl_bench.reports.selection import Source, matching
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


def test_star_is_against_the_same_backbone(built, runs, registry):
    """The paired t-test over users of FCUCR and FedAvg on SASRec; TiSASRec has no FedAvg, and no star although its
    FCUCR beats every other line."""
    mine, base = (user_scores(matching(loaded(runs), registry, of(row)), "all:hit@10") for row in ("fcucr", "ft"))
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
    some = [run for run in loaded(runs) if run.meta["backbone"] != "gru4rec" and run.seed < 2]
    write_packs(tmp_path, some, "pack", lambda run: False)
    whole, packed = (markdown(build("fcucr", fcucr.TABLES[2], Source(of, registry), ("xing",)))
                     for of in (some, loaded(tmp_path)))
    assert whole == packed
    (run, *_), (full, *_) = loaded(tmp_path), some
    assert np.allclose(run.analysis["value"], full.analysis["value"], atol=1e-6)
    assert list(run.analysis["kind"].unique()) == ["target_probability", "negative_probability"]


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


EARLY = {"ft": ((0.1, 0.4, 0.3, 0.2), (0.1, 0.2, 0.1)), "fcucr": ((0.1, 0.5, 0.45), (0.1, 0.5, 0.55))}  # per seed


@pytest.fixture(scope="module")
def drawn_runs(registry, tmp_path_factory):
    """XING, SASRec: early curves, FCUCR with and without transfer, k = 1, 20, 1000, noise 0 and .1; GRU4Rec: FCUCR."""
    folder = tmp_path_factory.mktemp("figures")

    def make(seed, hit, method="fcucr", backbone="sasrec", options=(), **more):
        fabricate_sessions(folder, registry, RunSpec(method, backbone, "xing", tuple(options)), seed, hit, **more)
    for method, curves in EARLY.items():
        for seed, early in enumerate(curves):
            make(seed, 0.2, method, options=[("early_session", True)], early=early)
    for seed in (0, 1):
        make(seed, 0.28 + 0.02 * seed, probability=0.6 + 0.1 * seed)
        make(seed, 0.2, options=[("without", "iupr")], probability=0.5)
        make(seed, 0.25, options=[("neighbours", 1)])
        make(seed, 0.26, options=[("neighbours", 1000)])
        make(seed, 0.24, options=[("prototype_noise", 0.1)])
    make(0, 0.25, backbone="gru4rec", probability=0.7)
    make(0, 0.2, "ft", "dmi-gnn", options=[("loss", "bce"), ("early_session", True)], early=(0.3, 0.4))
    return folder


@pytest.fixture(scope="module")
def drawn(drawn_runs, tmp_path_factory):
    """Calls the command and gives (figures by file name, output), once for the same words."""
    @cache
    def draw(*words):
        found = {}
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
            patch.setattr(draw_module, "save", lambda figure, path: found.__setitem__(path.stem, figure))
            assert main(["figures", "--paper", "fcucr", "--records", str(drawn_runs), "--format", "png", "--out",
                         str(tmp_path_factory.getbasetemp()), *words]) == 0
        return found, out.getvalue()
    return draw


def test_early_curves_are_those_of_the_records(drawn):
    """Mean over the seeds that still train; after the third round only one of FedAvg's two does."""
    found, out = drawn("--figure", "2a", "--backbones", "sasrec")
    (axes,) = found["early-xing-hit10"].axes
    lines = {line.get_gid(): line for line in axes.lines}
    assert lines["mean:ft"].get_ydata() == pytest.approx([0.1, 0.3, 0.2])
    assert lines["tail:ft"].get_ydata() == pytest.approx([0.2, 0.2]) and list(lines["tail:ft"].get_xdata()) == [3, 4]
    assert lines["mean:fcucr"].get_ydata() == pytest.approx([0.1, 0.5, 0.5])
    (band,) = [band.get_paths()[0].get_extents() for band in axes.collections
               if band.get_paths()[0].get_extents().y1 < 0.5]
    assert (band.y0, band.y1) == pytest.approx((0.2 - 0.2 / 2 ** 0.5, 0.3 + 0.2 / 2 ** 0.5))
    title = found["early-xing-hit10"].legends[0].get_title().get_text()
    assert title.startswith("HR@10, first session") and "left empty" not in out
    found, _ = drawn("--figure", "2a", "--backbones", "dmi-gnn")  # a baseline, with one negative
    (line,) = artists(found["early-xing-hit10"], "mean:ft")
    assert line.get_ydata() == pytest.approx([0.3, 0.4])
    found, _ = drawn("--figure", "early", "--metric", "ndcg@10", "--backbones", "sasrec")
    (line,) = artists(found["early-xing-ndcg10"], "mean:fcucr")
    assert line.get_ydata() == pytest.approx([0.05, 0.25, 0.25])


def test_histograms_are_those_of_the_records(drawn):
    found, out = drawn()
    gru, *_, sasrec, without, alone = found["probability-xing"].axes
    values = [0.6 + 0.1 * seed + np.linspace(-0.1, 0.1, USERS) for seed in (0, 1)]
    for kind, of_seeds in (("target", values), ("negative", [1.0 - v for v in values])):
        (share,) = artists(sasrec, f"share:{kind}_probability")
        expected = np.mean([np.histogram(v, np.linspace(0.0, 1.0, 21))[0] / USERS for v in of_seeds], axis=0)
        shares, edges, _ = share.get_data()
        assert shares == pytest.approx(expected) and edges == pytest.approx(np.linspace(0.0, 1.0, 21))
    (mean,) = artists(sasrec, "mean:target_probability")
    assert mean.get_xdata() == pytest.approx([0.65, 0.65])
    labels = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (sasrec, without, alone, gru)]
    assert labels == [["target: 0.650 ± 0.071", "sampled item: 0.350 ± 0.071"],
                      ["target: 0.500 ± 0.000", "sampled item: 0.500 ± 0.000"], ["no record"],
                      ["target: 0.700", "sampled item: 0.300"]]
    assert [axes.get_title() for axes in (without, alone)] == ["SASRec, w/o IUPR", "SASRec, FedAvg"]
    assert "no records of w/o IUPR, ft on gru4rec, xing: left empty" in out
    assert "grid --methods fcucr --backbones gru4rec --datasets xing --seeds 5 --set without=iupr" in out


def test_sensitivity_to_k(drawn):
    found, out = drawn()
    (axes,) = found["k-xing-sasrec-hit10"].axes
    line = axes.containers[0].lines[0]
    assert list(line.get_xdata()) == [1, 5, 20, 100, 200, 1000] and axes.get_xscale() == "log"
    assert np.array(line.get_ydata(), float) == pytest.approx([0.25, np.nan, 0.29, np.nan, np.nan, 0.26], nan_ok=True)
    (chosen,), (missing,) = artists(axes, "chosen"), artists(axes, "missing")
    assert list(missing.get_xdata()) == [5, 100, 200]  # where the line has gaps
    assert (chosen.get_xdata()[0], chosen.get_ydata()[0]) == (20, pytest.approx(0.29))
    assert "figure k: no records of fcucr on sasrec, xing with neighbours = 5, 100, 200: left empty" in out
    assert "grid --paper fcucr --figure k --datasets xing --seeds 5" in out


def test_noise_has_an_axis_of_epsilon(drawn):
    """sqrt(2 ln(1.25e5)) = 4.8448 over the standard deviation: 48.45 at .1 (the paper: 48.5), 8.07 at .6 (8.1)."""
    found, _ = drawn()
    axes, of_uploads = found["noise-xing-sasrec-hit10"].axes
    line = axes.containers[0].lines[0]
    assert list(line.get_xdata()) == list(fcucr.NOISE) and axes.get_xscale() == "linear"
    assert np.array(line.get_ydata(), float)[:2] == pytest.approx([0.29, 0.24])
    (above,) = axes.child_axes
    FigureCanvasAgg(found["noise-xing-sasrec-hit10"]).draw()
    assert [text.get_text() for text in above.get_xticklabels()] == ["∞", "48.4", "24.2", "16.1", "12.1", "9.7", "8.1"]
    assert above.get_xlabel() == "ε at δ = 10⁻⁵"
    (claim,) = artists(axes, "claim")  # Appendix D.2
    assert list(claim.get_xdata()) == [0.0, 0.3] and list(claim.get_ydata()) == pytest.approx([0.95 * 0.29] * 2)
    values = of_uploads.containers[0].lines[0].get_xdata()  # Laplace noise: std = b sqrt(2)
    assert np.array(values) * math.sqrt(2) == pytest.approx(fcucr.NOISE, abs=1e-4)


def test_everything_that_the_records_allow(drawn):
    found, out = drawn()
    assert set(found) == {"early-xing-hit10", "probability-xing", "k-xing-sasrec-hit10", "noise-xing-sasrec-hit10",
                          "curves-xing-sasrec", "curves-xing-gru4rec"}
    assert "lambda: not drawn: no runs of fcucr in which only lambda_tasd is another." in out
    assert "Make the paper's with: run_bench.py grid --paper fcucr --figure lambda --datasets xing" in out


def test_histogram_of_users():
    def run(seed, values):
        made = make_run("fcucr", seed, {0: {0: 0.1}})
        frame = {"kind": ["target_probability"] * len(values), "value": values}
        return replace(made, load=lambda name: pd.DataFrame(frame))
    found = user_histogram([run(0, [0.1, 0.2, 0.9, 1.5]), run(1, [0.6, 0.7, 0.8, 0.9])], "target_probability",
                           np.array([0.0, 0.5, 1.0]))
    assert found.share.tolist() == [0.25, 0.75]
    assert found.mean == OverSeeds(pytest.approx(0.7125), pytest.approx(np.std([0.675, 0.75], ddof=1)), 2)
    with pytest.raises(UserError, match="fcucr on fedmf, ml-100k, seed 0: its record in .* has no other"):
        user_histogram([run(0, [0.1])], "other", np.array([0.0, 1.0]))


@pytest.mark.parametrize("arguments,parts", [
    (["--figure", "3"], ["unknown figure '3'", "early, k, lambda, noise, probability"]),
    (["--backbones", "sasrek"], ["Did you mean 'sasrec'"]),
    (["--metric", "hit@20", "--figure", "k"], ["has no hit@20"]),
    (["--metric", "all:hit@10", "--figure", "early"], ["early: not drawn", "no column early_all:hit@10"]),
    (["--datasets", "tmall", "--figure", "early"], ["early: not drawn: no records of its runs",
                                                    "--datasets tmall --seeds 5 --set early_session=True"]),
    (["--set", "init=server", "--figure", "probability"], ["--set init=server"]),
])
def test_bad_input(drawn_runs, capsys, tmp_path, arguments, parts):
    message = refused(capsys, "figures", "--paper", "fcucr", "--records", drawn_runs, "--out", tmp_path / "out",
                      *arguments)
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()
