"""FFMSR's tables, as pilots of small shops fill them, and their figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from standing import OPEN, judge
from helpers import lay_shop

import fedcl_bench as fb
from fedcl_bench.experiments.papers import Key, ffmsr
from fedcl_bench.experiments.papers import Printed
from fedcl_bench.reports.paper_figures import MAKERS, FigureJob, Skip
from fedcl_bench.reports.selection import Source
from fedcl_bench.reports.tables import build
from fedcl_bench.records.published import write as write_packs
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


def test_packed_runs_are_tested_as_full_ones(pilots, tmp_path):
    """On the metrics of the paper's tables, of which Recall is in no other paper's."""
    write_packs(tmp_path, pilots.runs, "pack", lambda run: False)
    table = replace(table_of_pilots(4), metrics=("recall@3", "ndcg@3"))
    full, packed = ({cell.key: cell for cell in build("ffmsr", table, replace(pilots, runs=runs)).cells()}
                    for runs in (pilots.runs, load_runs(tmp_path)))
    tested = [key for key, cell in full.items() if cell.p is not None]
    assert {key.metric for key in tested} == {"recall@3", "ndcg@3"}
    assert [packed[key].p for key in tested] == pytest.approx([full[key].p for key in tested], rel=1e-4)


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
    ((name, figure),) = MAKERS["ffmsr"]["4"](job)
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
    monkeypatch.setitem(ffmsr.TABLES, 4, table_of_pilots(4, rows=("topology=federated",)))
    with pytest.raises(Skip, match="--paper ffmsr --table 4 --datasets books"):
        list(MAKERS["ffmsr"]["4"](job))
