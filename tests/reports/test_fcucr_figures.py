"""FCUCR's figures: what is drawn is what the records say, and what they lack is named."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from fabricate import USERS, fabricate_sessions
from matplotlib.backends.backend_agg import FigureCanvasAgg
from synthetic import make_run

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.experiments.papers import fcucr
from fedcl_bench.reports import draw as draw_module
from fedcl_bench.reports.frame import OverSeeds, user_histogram, validation_curves
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.records.store import load_runs

EARLY = {"ft": ((0.1, 0.4, 0.3, 0.2), (0.1, 0.2, 0.1)), "fcucr": ((0.1, 0.5, 0.45), (0.1, 0.5, 0.55))}  # per seed


def artists(figure, gid):
    return figure.findobj(lambda artist: artist.get_gid() == gid)


@pytest.fixture(scope="module")
def runs(registry, tmp_path_factory):
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


@pytest.fixture
def drawn(monkeypatch, runs, tmp_path, capsys):
    """Calls the command and gives (figures by file name, output)."""
    def draw(*arguments):
        found = {}
        monkeypatch.setattr(draw_module, "save", lambda figure, path: found.__setitem__(path.stem, figure))
        assert main(["figures", "--paper", "fcucr", "--records", str(runs), "--out", str(tmp_path), "--format", "png",
                     *arguments]) == 0
        return found, capsys.readouterr().out
    return draw


# From records to what is drawn

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
    (axes,) = found["early-xing-hit10"].axes
    assert [line.get_ydata() for line in axes.lines if line.get_gid() == "mean:ft"] == [pytest.approx([0.3, 0.4])]
    found, _ = drawn("--figure", "early", "--metric", "ndcg@10", "--backbones", "sasrec")
    (axes,) = found["early-xing-ndcg10"].axes
    assert [line for line in axes.lines if line.get_gid() == "mean:fcucr"][0].get_ydata() == pytest.approx(
        [0.05, 0.25, 0.25])


def test_histograms_are_those_of_the_records(drawn):
    found, out = drawn("--figure", "2bc")
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
    found, out = drawn("--figure", "k")
    (axes,) = found["k-xing-sasrec-hit10"].axes
    line = axes.containers[0].lines[0]
    assert list(line.get_xdata()) == [1, 5, 20, 100, 200, 1000] and axes.get_xscale() == "log"
    assert np.array(line.get_ydata(), float) == pytest.approx([0.25, np.nan, 0.29, np.nan, np.nan, 0.26], nan_ok=True)
    (chosen,) = artists(axes, "chosen")
    assert (chosen.get_xdata()[0], chosen.get_ydata()[0]) == (20, pytest.approx(0.29))
    assert "figure k: no records of fcucr on sasrec, xing with neighbours = 5, 100, 200: left empty" in out
    assert "grid --paper fcucr --figure k --datasets xing --seeds 5" in out


def test_noise_has_an_axis_of_epsilon(drawn):
    """sqrt(2 ln(1.25e5)) = 4.8448 over the standard deviation: 48.45 at .1 (the paper: 48.5), 8.07 at .6 (8.1)."""
    found, _ = drawn("--figure", "noise")
    axes, of_uploads = found["noise-xing-sasrec-hit10"].axes
    line = axes.containers[0].lines[0]
    assert list(line.get_xdata()) == list(fcucr.NOISE)
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


# From numbers to figures

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


def test_curves_of_another_column(runs):
    several = [run for run in load_runs(runs) if run.meta["settings"]["early_session"]
               and (run.meta["method"], run.meta["backbone"]) == ("ft", "sasrec")]
    (curve,) = validation_curves(several, "early_hit@10")
    assert curve.mean == pytest.approx([0.1, 0.3, 0.2, 0.2]) and curve.common == 3
    assert curve.deviation == pytest.approx([0.0, 0.2 / 2 ** 0.5, 0.2 / 2 ** 0.5, 0.0])


# Bad input

@pytest.mark.parametrize("arguments,parts", [
    (["--figure", "3"], ["unknown figure '3'", "early, k, lambda, noise, probability"]),
    (["--figure", "earli"], ["Did you mean 'early'"]),
    (["--datasets", "yoochoose"], ["unknown dataset 'yoochoose'", "retailrocket"]),
    (["--backbones", "sasrek"], ["Did you mean 'sasrec'"]),
    (["--metric", "hit@20", "--figure", "k"], ["has no hit@20"]),
    (["--metric", "all:hit@10", "--figure", "early"], ["early: not drawn", "no column early_all:hit@10"]),
    (["--datasets", "tmall", "--figure", "early"], ["early: not drawn: no records of its runs",
                                                    "--datasets tmall --seeds 5 --set early_session=True"]),
    (["--set", "init=server", "--figure", "probability"], ["--set init=server"]),
])
def test_bad_input(runs, capsys, tmp_path, arguments, parts):
    assert main(["figures", "--paper", "fcucr", "--records", str(runs), "--out", str(tmp_path / "out"),
                 *arguments]) == 2
    captured = capsys.readouterr()
    message = " ".join(captured.err.split())
    assert captured.out == "" and len(captured.err.splitlines()) <= 2
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()
