"""FFMSR's tables, as pilots of small shops fill them, and their figures."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.express
import pytest
from standing import OPEN, judge
from helpers import lay_shop, output_of

import fedcl_bench as fb
from fedcl_bench.experiments.papers import Key, ffmsr
from fedcl_bench.experiments.papers import Printed
from fedcl_bench.reports.cells import DASH
from fedcl_bench.reports.dashboard import gather, leaderboard
from fedcl_bench.reports.frame import seed_averages
from fedcl_bench.reports.html import _curves, _matrices
from fedcl_bench.reports.paper_figures import MAKERS, FigureJob, Skip
from fedcl_bench.reports.selection import Source
from fedcl_bench.reports.tables import build
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.records.store import load_runs

@pytest.fixture(scope="module")
def pilots(registry, tmp_path_factory):
    """Runs of a pilot of two small shops under two topologies, and the source of their tables."""
    folder = tmp_path_factory.mktemp("pilots")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        lay_shop("books", 0, 15, 14)
        lay_shop("games", 1, 12, 11)
        small = {"rounds": 2, "dim": 4, "topk": [3], "valid_metric": "recall@3", "pilot_users": 10, "pilot_core": 1}
        for topology, seeds in (("local", 2), ("central", 1)):
            fb.run("ft", "sasrec", "books+games", seeds=seeds, topology=topology, progress=False, **small)
        yield Source(load_runs(folder / "results"), registry, None, tuple(small.items()))


def table_of_pilots(number, rows=("topology=local", "topology=central", "topology=federated")):
    """A table of FFMSR with the pilots' runs in it."""
    def spec(row, backbone, dataset):
        return RunSpec("ft", "sasrec", dataset, (tuple(row.split("=")),))
    table = ffmsr.TABLES[number]
    return replace(table, datasets=("books+games",), backbones=("sasrec",), rows=rows, only=(), metrics=("recall@3",),
                   row_spec=spec, lead=None, baseline=rows[0] if table.baseline else None)


def test_a_table_of_pilots_has_domains_and_their_mean_but_no_printed_number(pilots, monkeypatch):
    key = Key("books+games", "sasrec", "topology=local", "recall@3", "D0")
    absent = key._replace(row="topology=federated")
    numbers = {**ffmsr.printed(), 4: {key: Printed(".5"), absent: Printed(".25")}}
    monkeypatch.setattr(ffmsr, "printed", lambda: numbers)
    built = build("ffmsr", table_of_pilots(4), pilots)
    cells = {cell.key: cell for cell in built.cells()}
    assert all(cell.printed is None for cell in cells.values())
    for topology, seeds in (("local", 2), ("central", 1)):
        runs = [run for run in pilots.runs if run.meta["settings"]["topology"] == topology]
        per_domain = np.array([run.meta["metrics"]["recall@3"]["per_block"] for run in runs])
        row = [cells[key._replace(row=f"topology={topology}", column=name)] for name in ("D0", "D1", "mean")]
        assert [cell.mean for cell in row] == pytest.approx([*per_domain.mean(0), per_domain.mean()])
        assert all(len(cell.seeds) == seeds for cell in row)
    assert cells[absent].mean is None and "no record" in cells[absent].missing
    tested = cells[key._replace(row="topology=central", column="mean")]
    assert tested.p is not None and tested.users == (10, 10)
    assert ("Of pilots with 10 users of each domain; comparable with no numbers of all users. So the paper's are not "
            "shown.") in built.notes
    assert "Test users of books+games: 10 (first domain), 10 (second domain)." in built.tested
    judged = judge("ffmsr", table_of_pilots(4), built.cells(), pilots)
    assert set(judged) == {key, absent} and {of.standing.kind for of in judged.values()} == {OPEN}
    assert "a pilot alone, of 10 users" in judged[key].standing.reason
    assert "no record" in judged[absent].standing.reason
    assert judged[key].cell.mean is None and judged[key].cell.printed.text == ".5"


def test_lines_across_backbones_are_tested_by_every_metric(pilots):
    """As in Table 3: against the paper's own method, which stands alone on its backbone."""
    def spec(row, backbone, dataset):
        return RunSpec("ft", "sasrec", dataset, (("topology", {"ffmsr": "local"}.get(row, "central")),))
    table = replace(table_of_pilots(4), number=3, rows=("ft", "ffmsr"), backbones=("sasrec", "ffmsr"), baseline=None,
                    only=(("sasrec", "ft"), ("ffmsr", "ffmsr")), row_spec=spec, metrics=("recall@3", "ndcg@3"),
                    stub=("dataset", "backbone", "row"),
                    lead=replace(ffmsr.TABLES[3].lead, metric="recall@3"))
    notes = build("ffmsr", table, pilots).notes
    (across,) = [note for note in notes if "against lines on other backbones" in note]
    assert re.search(r"on sasrec: recall@3 [01]\.\d+, ndcg@3 [01]\.\d+\.$", across)
    assert not any("not tested" in note for note in notes)


def test_a_figure_shows_the_cells_of_its_table(pilots, monkeypatch):
    monkeypatch.setitem(ffmsr.TABLES, 4, table_of_pilots(4))
    job = FigureJob(ffmsr, "ffmsr", pilots, Path("results"), ["ft"], ["sasrec"], ["books+games"], "recall@3")
    ((name, figure),) = MAKERS["ffmsr"]["table4"](job)
    assert name == "table4-books+games-recall3"
    title = " ".join(figure.legends[0].get_title().get_text().split())
    assert "pilot of 10 users of each domain" in title and "seeds 0; 0, 1" in title
    cells = {cell.key: cell for cell in build("ffmsr", table_of_pilots(4), pilots).cells()}
    for axes, column in zip(figure.axes, ("D0", "D1")):
        drawn = {artist.get_gid(): artist for artist in axes.get_children() if artist.get_gid()}
        assert axes.get_title() == {"D0": "books", "D1": "games"}[column]
        for row in ("topology=local", "topology=central"):
            expected = cells[Key("books+games", "sasrec", row, "recall@3", column)].mean
            assert drawn[f"ours:{row}"].get_xdata() == pytest.approx([expected])
        assert "missing:topology=federated" in drawn
    with pytest.raises(Skip, match="found the metric mrr@3, accepted: recall@3"):
        list(MAKERS["ffmsr"]["table4"](replace(job, metric="mrr@3")))
    monkeypatch.setitem(ffmsr.TABLES, 4, table_of_pilots(4, rows=("topology=federated",)))
    with pytest.raises(Skip, match="--paper ffmsr --table 4 --datasets books"):
        list(MAKERS["ffmsr"]["table4"](job))


@pytest.fixture(scope="module")
def varied(registry, tmp_path_factory):
    """FFMSR on two small shops with one of its settings another, and the job of its figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("varied"))
        lay_shop("books", 0, 15, 14, texts=True)
        lay_shop("games", 1, 12, 11, texts=True)
        small = {"rounds": 1, "dim": 4, "topk": [3], "valid_metric": "recall@3", "encoder": "tfidf", "text_dim": 8,
                 "pilot_users": 10, "pilot_core": 1}
        for setting in ({}, {"clusters": 3}, {"text_layers": 1}, {"federated_rounds": 1}):
            fb.run("ffmsr", "ffmsr", "books+games", seeds=2 if "clusters" in setting else 1, progress=False,
                   **{**small, **setting})
        source = Source(load_runs(Path("results")), registry, None, tuple(small.items()))
        yield FigureJob(ffmsr, "ffmsr", source, Path("results"), ["ffmsr"], ["unisrec", "ffmsr"], ["books+games"],
                        "recall@3")


@pytest.mark.parametrize("number, name, values, chosen", [
    ("5", "clusters", [3, 120], 120), ("6", "text_layers", [1, 3], 3), ("7", "federated_rounds", [1, 5], 5)])
def test_a_setting_is_varied_in_a_panel_of_each_domain(varied, number, name, values, chosen):
    """Without a value for text_layers three layers are taken of a language model, so that stands at 3."""
    ((file, figure),) = MAKERS["ffmsr"][number](varied)
    assert file == f"figure{number}-books+games-ffmsr-recall3" and len(figure.axes) == 2
    assert "FFMSR, books+games, pilot of 10 users of each domain" in figure.legends[0].get_title().get_text()
    for axes, (block, domain) in zip(figure.axes, enumerate(("books", "games"))):
        line, marked = axes.containers[0].lines[0], next(a for a in axes.lines if a.get_gid() == "chosen")
        expected = [seed_averages(with_only(varied, name, value), "recall@3", [block]).mean() for value in values]
        assert axes.get_title() == domain and list(marked.get_xdata()) == [chosen]
        assert list(line.get_xdata()) == values and line.get_ydata() == pytest.approx(expected)


def test_rounds_of_stages_are_counted_and_shown(varied, registry, capsys):
    for cell in gather(varied.source.runs, registry):
        assert {row["forgetting"] for row in leaderboard(cell)} == {DASH}  # no later step has forgotten one
        assert _matrices(plotly.express, cell) is None
        drawn = {trace.name: list(trace.x) for trace in _curves(plotly.express, cell, {}).data}
        for variant in cell.variants:
            first = variant.meta["settings"]["federated_rounds"]
            assert variant.meta["stages"] == {"pretrain": [first] * 2, "finetune": [1, 1]}
            assert variant.meta["rounds"] == [first + 1] * 2
            assert [drawn[f"{variant.title}, {stage}"] for stage in ("pretrain", "finetune")] == [
                list(range(1, first + 1)), [first + 1]]
    sets = [word for name, value in varied.source.assignments for word in
            ("--set", f"{name}={3 if name == 'topk' else value}")]
    printed = output_of(capsys, "--method", "ffmsr", "--backbone", "ffmsr", "--dataset", "books+games", *sets)
    rows = [line.split()[-2:] for line in printed.splitlines() if "rounds" in line]
    assert rows[:3] == [["6", "6"], ["5", "5"], ["1", "1"]] and "from its record" in printed


def with_only(job, name, value):
    """The runs in which no other setting of the figures is another; three layers are those without a value."""
    value = 0 if name == "text_layers" and value == 3 else value
    wanted = {"clusters": 120, "text_layers": 0, "federated_rounds": 5, name: value}
    return [run for run in job.source.runs if wanted.items() <= run.meta["settings"].items()]


def test_runs_that_a_figure_lacks_are_named(varied):
    job = replace(varied, datasets=["online-retail-ffmsr+amazon-pantry"])
    with pytest.raises(Skip, match="--paper ffmsr --figure 6 --datasets online-retail-ffmsr"):
        list(MAKERS["ffmsr"]["6"](job))
