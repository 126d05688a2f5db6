"""Figures: what is drawn equals the numbers, is readable in print, and says what is missing."""

import re
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from fabricate import fabricate, level
from helpers import output_of, refused
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from synthetic import SETTINGS, flat_runs, make_run

from fedcl_bench.reports import frame
from fedcl_bench.reports.draw import (COLUMN, PAGE, FigurePanel, SettingPanel, critical_difference_diagram, estimates,
                                      forgetting_maps, looks, round_curves, save, sensitivity, user_histograms,
                                      validation_curves)
from fedcl_bench.reports.frame import Curve, Histogram, OverSeeds, improvement, mean_matrix, variations
from fedcl_bench.reports.paper_figures import PROBABILITIES, seed_words
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.records.store import load_runs
from fedcl_bench.stats.significance import friedman

LABELS = {"ft": "FT", "reg": "Reg", "kd": "KD", "rlp2": "RLP2†", "spp": "SPP†", "f3crec": "F3CRec"}
LOOK = looks(LABELS)
QUICK = ["--set", "rounds=2", "--set", "k_core=60"]


def artists(figure, gid):
    return figure.findobj(lambda artist: artist.get_gid() == gid)


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def texts(figure):
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def improvements():
    rng = np.random.default_rng(0)
    names = list(LABELS)[1:]

    def panel(dataset, backbone):
        ours = {m: None if (m, backbone) == ("rlp2", "PFedRec") else OverSeeds(float(rng.normal(10, 9)), 2.0, 5)
                for m in names}
        return FigurePanel(f"{dataset}, {backbone}", "%", ours, 0.0, {m: float(rng.normal(10, 9)) for m in names})
    return [[panel(dataset, backbone) for backbone in ("FedMF", "FedNCF", "PFedRec")]
            for dataset in ("ML-100K", "ML-Latest-Small")]


def settings(missing=()):
    values = {"eps": [i / 1e5 for i in range(1, 10)], "lambda_kd": [10.0 ** i for i in range(-5, 1)],
              "beta": [i / 10 for i in range(11)]}
    return [SettingPanel(name, {v: None if v in missing else OverSeeds(0.1 + 0.001 * i, 0.002, 5)
                                for i, v in enumerate(some)}, some[3]) for name, some in values.items()]


def matrix(seed):
    r = np.random.default_rng(seed).uniform(0.05, 0.28, (4, 4))
    r[np.triu_indices(4, 1)] = np.nan
    return r


def curves(seed):
    rng = np.random.default_rng(seed)
    return [Curve(np.sort(rng.uniform(0.01, 0.12, n)), np.full(n, 0.002), n - 7, n - 12.4, 0.11)
            for n in (80, 50, 52, 60)]


def early():
    """Of three backbones; the last lacks a method."""
    return {f"TiSASRec, Retail{i}": {"ft": curves(i)[1], "f3crec": None if i == 2 else curves(i)[2]}
            for i in range(3)}


def histograms():
    found = Histogram(np.linspace(0.0, 1.0, 21), np.full(20, 0.05), OverSeeds(0.5, 0.011, 5))
    return [[(f"TiSASRec, line {i}", {} if i else dict.fromkeys(PROBABILITIES, found)) for i in range(2)]] * 2


READINGS = {"item_lr\nplain (paper)": -0.09, "inc_split\nrandom (paper)": 0.006,
            "refresh_lists\nall (paper)": -0.0041, "kd_reduction\nsum (Eq. 5 as printed)": 0.0,
            "init_from\nbest (the model tested)": None}


def changes():
    """With a change far larger than the others, and one without records."""
    def panel(name, default):
        return FigurePanel(f"default: {default:.4f}", name, {
            label: None if change is None else OverSeeds(default + change, 0.002 if i < 3 else 0.0, 5)
            for i, (label, change) in enumerate(READINGS.items())}, default, written=True)
    return [[panel("N@20", 0.1), panel("lead over FT", 0.004)]]


def domains():
    lines = {"local": OverSeeds(0.031, 0.002, 5), "pooled": None, "FFMSR": OverSeeds(0.04, 0.001, 5)}
    return [[FigurePanel(domain, "Recall@10", lines, 0.04) for domain in ("books", "games")]]


def grid_test(methods):
    rng = np.random.default_rng(4)
    return friedman(np.linspace(0.1, 0.3, methods) + rng.normal(0, 0.03, (12, methods)))


EVERY = {
    "improvements": lambda: estimates(improvements(), LOOK, "N@20, improvement over FT in percent, ± std over seeds"),
    "one panel": lambda: estimates([improvements()[0][:1]], LOOK, "N@20, improvement over FT"),
    "uneven panels": lambda: estimates([improvements()[0][:2], improvements()[1][:1]], LOOK, "N@20"),
    "domains": lambda: estimates(domains(), {"FFMSR": looks({"f": "FFMSR"})["f"]}, "Table 4, books+games"),
    "sensitivity": lambda: sensitivity(settings((0.1, 0.5)), LOOK["f3crec"], "N@20",
                                       "F3CRec on FedMF, ML-Latest-Small"),
    "two maps": lambda: forgetting_maps({"ft": matrix(0), "f3crec": None}, LOOK, "N@20", "FedMF, ML-100K"),
    "seven maps": lambda: forgetting_maps({f"m{i}": matrix(i) for i in range(7)},
                                          looks({f"m{i}": f"M{i}" for i in range(7)}), "N@20",
                                          "PFedRec, ML-Latest-Small, mean over seeds 0-4"),
    "curves": lambda: validation_curves({m: None if m == "spp" else curves(i) for i, m in enumerate(LABELS)}, LOOK,
                                        "N@20", "FedMF, ML-Latest-Small, mean ± std over seeds 0-4; marker: mean best "
                                        "round"),
    "one curve": lambda: validation_curves({"ft": curves(0)[:1]}, LOOK, "N@20", "TiSASRec, RetailRocket, mean ± std "
                                           "over seeds 0-4; marker: mean best round"),
    "six curves of one block": lambda: validation_curves(
        {m: curves(i)[:1] for i, m in enumerate(LABELS)}, LOOK, "N@20",
        "TiSASRec, RetailRocket, mean ± std over seeds 0-4 (RLP2: 0-2)"),
    "curves and a missing one": lambda: validation_curves({"ft": curves(0), "kd": None}, LOOK, "N@20",
                                                          "FedMF, ML-100K"),
    "early curves": lambda: round_curves(early(), LOOK, "NDCG@10, first session", "mean ± std over seeds"),
    "many early curves": lambda: round_curves(
        {f"TiSASRec, RetailRocket{i}": {m: curves(i)[0] for m in list(LABELS)[:4]} for i in range(2)}, LOOK, "NDCG@10",
        "title"),
    "histograms": lambda: user_histograms(histograms(), PROBABILITIES, "predicted probability of the items"),
    "noise": lambda: sensitivity([SettingPanel("prototype_noise", {i / 10: OverSeeds(0.2, 0.01, 5) if i else None
                                                                   for i in range(7)}, 0.1,
                                               {i / 10: "48.4" for i in range(7)}, "ε at δ = 10⁻⁵")],
                                 LOOK["f3crec"], "NDCG@10", "FCUCR on TiSASRec, RetailRocket"),
    "changes": lambda: estimates(changes(), {}, "F3CRec on FedMF, ML-Latest-Small: one setting changed"),
    "ranks": lambda: critical_difference_diagram(list(LABELS.values()), grid_test(6),
                                                 "N@20 on 4 datasets × 3 backbones"),
    "ten ranks": lambda: critical_difference_diagram([f"method {i}" for i in range(10)], grid_test(10), "N@20"),
}


once = cache(lambda name: EVERY[name]())


@pytest.mark.parametrize("name", EVERY)
def test_readable_in_print(name, monkeypatch):
    """Width of one or two columns, no text below 7 points, none cut off, none on top of another."""
    figure = once(name)
    assert figure.get_size_inches()[0] in (COLUMN, PAGE)
    drawn, draw_text = [], Text.draw
    canvas = FigureCanvasAgg(figure)
    # What is really drawn: an axis also has labels of ticks that are out of sight.
    monkeypatch.setattr(Text, "draw", lambda text, renderer: (drawn.append(text), draw_text(text, renderer)))
    canvas.draw()
    page = figure.bbox
    boxes = []
    for text in (text for text in dict.fromkeys(drawn) if text.get_visible() and text.get_text().strip()):
        assert text.get_fontsize() >= 7, text
        box = text.get_window_extent()
        assert (page.x0 - 0.5 <= box.x0 and box.x1 <= page.x1 + 0.5 and page.y0 - 0.5 <= box.y0
                and box.y1 <= page.y1 + 0.5), f"cut off: {text.get_text()!r}"
        boxes.append((text.get_text(), box.padded(-0.5)))
    for i, (one, a) in enumerate(boxes):
        for other, b in boxes[:i]:
            assert not a.overlaps(b), f"{one!r} lies on {other!r}"


@pytest.mark.parametrize("name, kind", [("one panel", "png"), ("ranks", "svg"), ("two maps", "pdf")])
def test_same_numbers_same_bytes(tmp_path, name, kind):
    """Whatever the user's matplotlibrc says, which stays as it is."""
    save(EVERY[name](), tmp_path / f"a.{kind}")
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "axes.facecolor": "red"}):
        save(EVERY[name](), tmp_path / f"b.{kind}")
        assert matplotlib.rcParams["font.size"] == 20
    content = (tmp_path / f"a.{kind}").read_bytes()
    assert content == (tmp_path / f"b.{kind}").read_bytes() and len(content) > 2000
    assert not re.search(rb"CreationDate|<dc:date>|Software|20[0-9]{2}-[0-9]{2}-[0-9]{2}", content)
    assert content.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[kind])


def test_dollar_signs_are_no_formulas(tmp_path):
    """In legends and titles, which may hold a user's words."""
    name = "$\\frac{ and $x^$"
    save(validation_curves({"ft": curves(0)[:1]}, looks({"ft": name}), "N@20", f"of {name}"), tmp_path / "a.svg")
    save(sensitivity(settings()[:1], looks({"ft": name})["ft"], "N@20", f"{name}, of 1"), tmp_path / "b.png")
    assert f">of {name}<" in (tmp_path / "a.svg").read_text() or f"of {name} -->" in (tmp_path / "a.svg").read_text()


def test_estimates_are_the_numbers():
    rows, figure = improvements(), once("improvements")
    for axes, panel in zip(figure.axes, (panel for row in rows for panel in row)):
        assert axes.get_title() == panel.title and axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top
        drawn = {line.get_gid(): line for line in axes.lines}
        for y, (method, ours) in enumerate(panel.ours.items()):
            assert (f"missing:{method}" in drawn) == (ours is None) == (f"ours:{method}" not in drawn)
            if ours:
                assert drawn[f"ours:{method}"].get_xydata().tolist() == [[ours.mean, y]]
            paper = drawn[f"paper:{method}"]
            assert paper.get_xydata().tolist() == [[panel.paper[method], y]]
            assert paper.get_markerfacecolor() == "none"
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [LABELS[m] for m in list(LABELS)[1:]]
    segments = [bars.lines[2][0].get_segments()[0] for bars in figure.axes[0].containers]
    assert [s[1][0] - s[0][0] for s in segments] == pytest.approx([4.0] * 5)


def test_changes_are_the_numbers():
    """From the default's value; the one far longer than the others is cut, and says how long it is."""
    figure = estimates(changes(), {}, "title")
    for axes, default in zip(figure.axes, (0.1, 0.004)):
        drawn = {line.get_gid(): line for line in axes.lines}
        names = list(READINGS)
        for name in names[1:4]:
            assert drawn[f"ours:{name}"].get_xdata() == pytest.approx([default + READINGS[name]])
        assert f"ours:{names[0]}" not in drawn and axes.get_xlim()[1] < default + 0.03
        written = {t.get_gid(): t.get_text() for t in texts(figure) if t.axes is axes and t.get_gid()}
        assert written == {f"change:{name}": text for name, text in zip(names, (
            "-0.0900 ◂", "+0.0060", "-0.0041", "+0.0000"))}
        assert f"missing:{names[4]}" in drawn
    assert len(artists(figure, "zero")) == 1
    together = estimates([[FigurePanel("", "N@20", {"a": OverSeeds(0.19, 0.0, 1), "b": OverSeeds(0.02, 0.0, 1)}, 0.1,
                                       written=True)]], {}, "title")
    assert {line.get_gid() for line in together.axes[0].lines} >= {"ours:a", "ours:b"}  # neither is cut


def test_maps_are_the_numbers():
    r = matrix(3)
    figure = forgetting_maps({"ft": r, "kd": None}, LOOK, "N@20", "title")
    for t in range(4):
        for s in range(4):
            found = artists(figure, f"R:ft:{t},{s}")
            assert [a.get_text() for a in found] == ([f"{r[t, s]:.3f}"[1:]] if s <= t else [])
            assert all(a.get_position() == (s, t) for a in found)
    assert np.array_equal(figure.axes[0].images[0].get_array().filled(np.nan), r, equal_nan=True)
    assert legend_of(figure) == ["no record: KD"]


def test_many_curves_have_a_panel_each():
    """Five on one axis tangle: one strong curve a panel, the others grey behind it, and the panel says whose it is."""
    every = {method: curves(i) for i, method in enumerate(LABELS) if method != "spp"}
    panels = [axes for axes in once("curves").axes if axes.get_visible()]
    assert len(panels) == 5 * 4
    for row, (method, several) in zip(np.reshape(panels, (5, 4)), every.items()):
        assert [axes.get_title() for axes in row] == [f"{LOOK[method].label}\nblock {block}" for block in range(4)]
        for axes, curve in zip(row, several):
            lines = {line.get_gid(): line for line in axes.lines}
            assert [gid for gid in lines if gid.startswith("mean:")] == [f"mean:{method}"]
            assert len([gid for gid in lines if gid.startswith("background:")]) == 4
            mean, tail, best = (lines[f"{kind}:{method}"] for kind in ("mean", "tail", "best"))
            assert np.array_equal(mean.get_ydata(), curve.mean[:curve.common]) and mean.get_xdata()[0] == 1
            assert np.array_equal(tail.get_ydata(), curve.mean[curve.common - 1:])
            assert tail.get_xdata()[-1] == len(curve.mean) and mean.get_color() == LOOK[method].color
            assert (best.get_xdata()[0], best.get_ydata()[0]) == (curve.best_round, curve.best_value)
    assert len([axes for axes in once("six curves of one block").axes if axes.get_visible()]) == 6


def test_missing_runs_and_seeds_of_each_method_are_named():
    assert legend_of(once("curves and a missing one")) == ["FT", "no record: KD"]
    assert legend_of(once("early curves")) == ["FT", "F3CRec", "no record: F3CRec on TiSASRec, Retail2"]
    assert legend_of(once("improvements")) == ["the paper", "no record"]
    ft, kd, rlp2 = (flat_runs(method, dict.fromkeys(seeds, 0.1)) for method, seeds in (
        ("ft", (0, 1, 2)), ("kd", (0, 1, 2)), ("rlp2", (0,))))
    assert seed_words({"ft": ft, "kd": kd, "spp": []}, str) == "seeds 0-2"
    assert seed_words({"ft": ft, "kd": kd, "rlp2": rlp2, "spp": rlp2}, str.upper) == "seeds 0-2 (RLP2, SPP: 0)"


def test_looks_are_stable_distinct_and_as_strong_as_the_papers():
    """By contrast with white (WCAG's formula); and no colour of a paper's method is used again."""
    def contrast(color):
        parts = np.array([int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return 1.05 / (float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05)
    own = looks({**LABELS, **{f"own{i}": f"own {i}" for i in range(6)}})
    colors = [look.color for name, look in own.items() if name not in LABELS]
    assert len({*colors, *(look.color for look in LOOK.values())}) == 12
    assert min(map(contrast, colors)) >= contrast(LOOK["f3crec"].color)
    more = looks({**LABELS, "another": "another", "zeta": "zeta"})
    assert all(more[name] == LOOK[name] for name in LABELS)
    assert len({(look.color, look.marker) for look in more.values()}) == len(more)
    many = looks({f"m{i:02}": f"m{i}" for i in range(30)})
    assert len({(look.color, look.marker) for look in many.values()}) == 30
    for feature in ("marker", "line"):  # without colour
        assert len({str(getattr(LOOK[m], feature)) for m in list(LABELS)[1:]}) == 5
    assert LOOK["f3crec"].color == "#D55E00" and LOOK["rlp2"].label == "RLP2†"


def test_rank_diagram_is_the_test():
    test = grid_test(6)
    figure = critical_difference_diagram(list(LABELS.values()), test, "title")
    for label, rank in zip(LABELS.values(), test.ranks):
        line, = artists(figure, f"rank:{label}")
        assert line.get_xdata()[0] == rank
        assert any(label in t.get_text() and f"{rank:.2f}" in t.get_text() for t in texts(figure))
    cd, = artists(figure, "cd")
    assert np.ptp(cd.get_xdata()) == pytest.approx(test.critical_difference)
    assert test.groups
    for row, group in enumerate(test.groups):
        left, right = artists(figure, f"group:{row}")[0].get_xdata()
        assert [i for i in range(6) if left <= test.ranks[i] <= right] == sorted(group)
    assert f"χ²(5) = {test.chi2:.2f}" in " ".join(t.get_text() for t in texts(figure))


def test_improvement_and_matrix_are_those_of_the_means():
    ft, kd = flat_runs("ft", {0: 0.1, 1: 0.2, 5: 9.0}), flat_runs("kd", {0: 0.15, 1: 0.2, 7: 9.0})
    found = improvement(kd, ft, "ndcg@20")
    assert found.mean == pytest.approx(100 * (0.175 / 0.15 - 1)) and found.n == 2
    assert found.deviation == pytest.approx(np.std([50.0, 0.0], ddof=1))
    assert improvement(kd[:1], ft, "ndcg@20") == OverSeeds(pytest.approx(50.0), 0.0, 1)
    assert improvement(kd, [], "ndcg@20") is None and improvement(kd[2:], ft, "ndcg@20") is None
    assert improvement(kd, flat_runs("ft", {0: 0.0}), "ndcg@20") is None  # no percentage of nothing
    matrix = mean_matrix(flat_runs("ft", {0: 0.1, 1: 0.3}), "ndcg@20")
    assert np.diag(matrix) == pytest.approx([0.2] * 4) and np.isnan(matrix[0, 1])
    assert matrix[2, 0] == pytest.approx(0.05)


def test_curves_of_runs_that_stop_at_different_rounds():
    values = {0: {0: 0.5}}
    runs = [make_run("ft", 0, values, valid=[[0.1, 0.3, 0.2]]),
            make_run("ft", 1, values, valid=[[0.3, 0.1, 0.2, 0.5, 0.4]])]
    curve, = frame.validation_curves(runs)
    assert curve.mean == pytest.approx([0.2, 0.2, 0.2, 0.5, 0.4]) and curve.common == 3
    assert curve.deviation == pytest.approx([0.2 / 2 ** 0.5, 0.2 / 2 ** 0.5, 0.0, 0.0, 0.0])
    assert (curve.best_round, curve.best_value) == (pytest.approx(3.0), pytest.approx(0.4))
    nan = float("nan")  # where rounds are not validated the last value stays; there is none before the first
    run = make_run("ft", 0, values, valid=[[nan, 0.3, nan, nan, 0.4]])
    assert frame.validation_curves([run])[0].mean == pytest.approx([nan, 0.3, 0.3, 0.3, 0.4], nan_ok=True)


def test_variations_change_one_setting_only():
    spec = RunSpec("f3crec", "fedmf", "ml-100k")
    runs = [run for options in ({}, {"eps": 0.001}, {"eps": 0.001, "beta": 0.1}, {"beta": 0.5}, {"split_seed": 2},
                                {"eps": 0.002, "method": "kd"}, {"eps": 0.003, "backbone": "fedncf"})
            for run in flat_runs(**{"method": "f3crec", "averages": {0: 0.1}, **options})]
    base = {**SETTINGS}
    assert variations(runs, base, spec, ("eps", "lambda_kd", "beta")) == {
        "eps": [0.001, 0.006], "lambda_kd": [0.1], "beta": [0.5, 0.9]}


def test_command_draws_what_there_is(at_records, drawn, capsys, tmp_path):
    methods = ["--methods", "ft,kd,f3crec"]
    out = output_of(capsys, "figures", *QUICK, *methods, "--out", tmp_path / "new", "--format", "svg")
    stems = {"figure3-ndcg20", "figure4-ml-100k-fedmf-ndcg20", "cd-ndcg20"} | {
        f"{kind}-ml-100k-{backbone}{metric}" for backbone in ("fedmf", "fedncf")
        for kind, metric in (("forgetting", "-ndcg20"), ("curves", ""))}
    assert drawn.keys() == {f"{stem}.svg" for stem in stems}
    assert all(str(tmp_path / "new" / name) in out for name in drawn)
    assert "eps = 0.002, 0.003" in out and "left empty" in out
    assert "grid --paper f3crec --figure 4 --datasets ml-100k --seeds 5 --set rounds=2" in out


def test_numbers_of_the_command_come_from_the_records(at_records, drawn, tmp_path, capsys):
    out = output_of(capsys, "figures", *QUICK, "--figure", "3", "--methods", "ft,kd,reg", "--backbones", "fedmf",
                    "--format", "png", "--out", tmp_path)
    assert "no records of reg on fedmf, ml-100k: left empty" in out and "grid --methods reg --backbones fedmf" in out
    runs = {method: [run for run in load_runs(Path("results")) if run.meta["method"] == method
                     and run.meta["backbone"] == "fedmf"] for method in ("ft", "kd")}
    (figure,) = drawn.values()
    ours, = artists(figure, "ours:kd")
    assert ours.get_xdata()[0] == pytest.approx(improvement(runs["kd"], runs["ft"], "ndcg@20").mean)
    assert not artists(figure, "ours:reg") and len(artists(figure, "missing:reg")) == 1
    printed, = artists(figure, "paper:reg")
    assert printed.get_xdata()[0] == 11.49  # Table 2, ML-100K, FedMF, Reg, N@20, Improv.


def test_records_without_the_paper_s_metric_are_drawn_by_their_own(registry, drawn, tmp_path, capsys):
    fabricate(tmp_path, registry, RunSpec("ft", "fedmf", "ml-100k"), 0, level(0.1))  # without FCUCR's hit@10
    command = ("figures", "--paper", "fcucr", "--figure", "curves", "--records", tmp_path, "--out", tmp_path / "new")
    assert "curves-ml-100k-fedmf" in output_of(capsys, *command, "--methods", "ft", "--format", "svg")
    assert "has no hit@10" in refused(capsys, *command, "--methods", "ft", "--metric", "hit@10")


@pytest.mark.parametrize("arguments,parts", [
    (["--figure", "5"], ["unknown figure '5'", "cd, curves, forgetting"]),
    (["--format", "jpg"], ["unknown format 'jpg'", "pdf, png, svg"]),
    (["--datasets", "ml-1m"], ["unknown dataset 'ml-1m'", "ml-100k"]),
    ([], ["no records in results of ft", "grid --methods ft"]),  # these runs have rounds=2
    ([*QUICK, "--datasets", "lastfm-2k"], ["no records in results", "grid --methods", "lastfm-2k"]),
    ([*QUICK, "--figure", "cd", "--methods", "ft,kd"], ["cd: not drawn", "3 methods; found 2 and 2"]),
    ([*QUICK, "--figure", "3", "--methods", "kd,f3crec"], ["figure 3: not drawn: needs ft"]),
    ([*QUICK, "--figure", "4", "--backbones", "fedncf"], ["figure 4: not drawn", "eps, lambda_kd, beta"]),
    (["--paper", "fcucr", "--figure", "early", "--methods", "ft"], ["early: not drawn", "stream=blocks"]),
    (["--paper", "ffmsr", "--figure", "table4"], ["table4: not drawn", "--table 4 --datasets amazon-office+"]),
])
def test_bad_input(at_records, capsys, tmp_path, arguments, parts):
    message = refused(capsys, "figures", "--out", tmp_path / "out", *arguments)
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(at_records, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(capsys, "figures", *QUICK, "--figure", "3", "--methods", "ft,kd", "--out",
                                          tmp_path / "file")
