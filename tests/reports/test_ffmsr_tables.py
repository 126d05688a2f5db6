"""FFMSR's tables: the printed numbers, and the runs behind them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from standing import FACTS, OPEN, judge
from helpers import lay_shop

import fedcl_bench as fb
from fedcl_bench.cli.main import main
from fedcl_bench.experiments.papers import Key, ffmsr
from fedcl_bench.experiments.papers import Printed
from fedcl_bench.reports.paper_figures import MAKERS, Job, Skip
from fedcl_bench.reports.tables import Source, build
from fedcl_bench.records.published import write as write_packs
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.records.store import load_runs

OFFICE, RETAIL = ffmsr.DATASETS


def test_printed_numbers_have_cells_and_repeat_each_other():
    printed = ffmsr.printed()
    for number, numbers in printed.items():
        assert {key for key in ffmsr.TABLES[number].keys() if key.column != "mean"} == set(numbers)
    for key, number in printed[4].items():
        others = [printed[3].get(key), printed[6].get(key), printed[7].get(key)]
        assert all(other is None or other == number for other in others)
    assert all(printed[3][key].value == number.value for key, number in printed[5].items() if key.row == "ft")


def test_mean_lengths_that_are_not_those_of_the_printed_counts():
    office, retail = (Key(dataset, "", "average_length", "", "D0") for dataset in (OFFICE, RETAIL))
    assert ffmsr.inconsistencies() == {(2, office): "the paper prints 7.84, and its counts give 7.83",
                                       (2, retail): "the paper prints 26.90, and its counts give 31.47"}
    (known,) = [known for known in FACTS["ffmsr"].known if known.holds(2, office._replace(row="users"))]
    assert round(684_837 / 87_346, 2) == 7.84 and "87,346 users" in known.text


def test_rows_stand_for_runs():
    spec = ffmsr.row_spec
    assert spec("ffmsr", "ffmsr", OFFICE) == RunSpec("ffmsr", "ffmsr", OFFICE)
    assert spec("ffmsr", "ffmsr", RETAIL) == RunSpec("ffmsr", "ffmsr", RETAIL, (("clusters", 90),))
    assert spec("without=gate", "ffmsr", OFFICE).settings == (("without", "gate"),)
    assert spec("clustering=kmeans++", "ffmsr", OFFICE).settings == (("clustering", "kmeans++"), ("centroid", "plain"))
    assert spec("clustering=birch", "ffmsr", RETAIL).settings == (("clustering", "birch"), ("clusters", 90))
    assert spec("text=pq", "ffmsr", RETAIL) == RunSpec("ft", "ffmsr", RETAIL, (("topology", "local"), ("text", "pq")))
    assert spec("ft", "unisrec", RETAIL) == RunSpec("ft", "unisrec", RETAIL, (("topology", "local"),))
    assert spec("ft", "ccdr", OFFICE) == RunSpec("ft", "ccdr", OFFICE, (("topology", "central"),))
    assert spec("semantics=true", "unisrec", OFFICE) == RunSpec("ffmsr", "unisrec", OFFICE, (
        ("semantics", True), ("text_layers", 3)))
    assert spec("semantics=true", "recbole:S3Rec", RETAIL) == RunSpec("ffmsr", "recbole:S3Rec", RETAIL, (
        ("semantics", True), ("clusters", 90)))
    assert spec("pfcr", "vqrec", RETAIL) == RunSpec("pfcr", "vqrec", RETAIL)


def test_every_row_of_ffmsr_is_a_setting_that_is_accepted(registry):
    for number in (4, 6, 7):
        for spec in ffmsr.TABLES[number].specs():
            fields = {**registry.get("method", spec.method).cls.Settings.__dataclass_fields__,
                      **registry.get("backbone", "ffmsr").cls.Settings.__dataclass_fields__}
            for name, value in spec.settings:
                choices = fields[name].metadata["choices"] if name in fields else ("local",)
                assert choices is None or value in choices


def test_a_table_that_cannot_be_built_says_why(capsys):
    assert main(["tables", "--paper", "ffmsr", "--table", "8"]) == 2
    assert "table 8 of ffmsr: it leaves out the users whom Office and Arts share" in capsys.readouterr().err
    assert 8 not in ffmsr.TABLES


@pytest.fixture(scope="module")
def pilots(registry, tmp_path_factory):
    """Runs of a pilot of two small shops under two topologies, and the source of their tables."""
    folder = tmp_path_factory.mktemp("pilots")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        lay_shop("books", 0, 15, 14)
        lay_shop("games", 1, 12, 11)
        small = {"rounds": 2, "dim": 4, "topk": [3], "valid_metric": "recall@3", "pilot_users": 10, "pilot_core": 1}
        for topology, seeds in (("local", 3), ("central", 2)):
            fb.run("ft", "sasrec", "books+games", seeds=seeds, topology=topology, progress=False, **small)
        yield Source(load_runs(folder / "results"), registry, None, tuple(small.items()), lambda dataset: {})


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
    for topology, seeds in (("local", 3), ("central", 2)):
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
    settings = {name: str(value).strip("[]") for name, value in pilots.assignments}
    job = Job(ffmsr, "ffmsr", pilots.registry, list(pilots.runs), Path("results"), None, settings, ["ft"], ["sasrec"],
              ["books+games"], "recall@3")
    ((name, figure),) = MAKERS["ffmsr"]["4"](job)
    assert name == "table4-books+games-recall3"
    title = " ".join(figure.legends[0].get_title().get_text().split())
    assert "pilot of 10 users of each domain" in title and "seeds 0, 1; 0-2" in title
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
