"""Groups of users and items in tables, on the page to look at and in Python, from the records' own numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from fabricate import fabricate, level
from synthetic import run_of
from test_report import Tree, rows_of

import fedcl_bench as fb
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.evaluation.beyond_accuracy import GROUPS
from fedcl_bench.reports import dashboard
from fedcl_bench.reports.any_table import Layout, build_any
from fedcl_bench.reports.html import report
from fedcl_bench.reports.selection import Source
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.records.store import load_runs
from fedcl_bench.reports.selection import matching

SMALL = (("rounds", 2), ("k_core", 50))
TINY = {"stream": "sessions", "min_session_length": 5, "min_sessions": 4, "rounds": 1, "progress": False}


@pytest.fixture(scope="module")
def runs(records_of_two_rounds):
    return load_runs(records_of_two_rounds / "results")


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """A results folder with FT on FedMF over sessions of ML-100K, two seeds."""
    folder = tmp_path_factory.mktemp("sessions")
    fb.run("ft", "fedmf", seeds=2, results=folder, **TINY)
    return folder


def source_of(runs, registry, settings=SMALL):
    return Source(runs, registry, None, settings)


def means(runs, group, metric):
    """By hand: each seed's mean over blocks 1-3 that have somebody."""
    blocks = [run.meta["groups"][group][metric][1:] for run in runs]
    return [np.mean([value for value in of_run if value is not None]) for of_run in blocks]


def test_a_table_has_the_means_of_the_groups(runs, registry):
    layout = Layout(columns=("dataset",), backbones=("fedmf",), methods=("ft", "f3crec"), metrics=("ndcg@20",),
                    by=("new-users", "worst-decile"))
    built = build_any(layout, source_of(runs, registry))
    assert built.heads == ("ml-100k ndcg@20 new-users", "ml-100k ndcg@20 worst-decile")
    for method in ("ft", "f3crec"):
        mine = matching(runs, registry, RunSpec(method, "fedmf", "ml-100k", SMALL))
        for group in layout.by:
            cell, = [c for c in built.cells() if c.key.row == method and c.key.metric == f"ndcg@20 {group}"]
            expected = means(mine, group, "ndcg@20")
            assert cell.mean == pytest.approx(np.mean(expected)) and cell.std == pytest.approx(np.std(expected, ddof=1))
            assert cell.users == tuple(n for n in mine[0].meta["groups"][group]["users"][1:] if n)
    new = mine[0].meta["groups"]["new-users"]["users"]
    assert f"Test users of ml-100k, new-users: {', '.join(map(str, new[1:]))}." in built.tested
    assert f"new-users: {GROUPS['new-users']}." in built.notes


def test_blocks_and_groups_of_items(runs, registry):
    """Items have recall alone, which is also what they have where nothing is asked for; nobody is old in block 0."""
    layout = Layout(columns=("block",), backbones=("fedmf",), methods=("ft",), by=("rare-items", "old-users"))
    built = build_any(layout, source_of(runs, registry))
    assert {cell.key.metric for cell in built.cells()} == {"recall@20 rare-items", "ndcg@20 old-users"}
    first, = [c for c in built.cells() if c.key.column == "block0" and c.key.metric.endswith("old-users")]
    assert first.mean is None and first.missing == "nobody is in old-users in block 0"
    with pytest.raises(UserError, match="--by rare-items: found metric 'ndcg@20', accepted: .* recall@20"):
        build_any(replace(layout, metrics=("ndcg@20",)), source_of(runs, registry))


def test_what_cannot_be_is_said(runs, registry, tmp_path):
    layout = Layout(backbones=("fedmf",), methods=("ft", "kd"), by=("new-users",))
    for wrong, message in ((replace(layout, by=("newusers",)), "Did you mean 'new-users'"),
                           (replace(layout, against="ft"), "tests are over all users")):
        with pytest.raises(UserError, match=message):
            build_any(wrong, source_of(runs, registry))
    old = [run_of({k: v for k, v in run.meta.items() if k != "groups"}, run.path, run.load) for run in runs]
    with pytest.raises(UserError, match="none of the .* records has groups; they are of an older version"):
        build_any(layout, source_of(old, registry))
    mixed = [a if a.meta["method"] == "ft" else b for a, b in zip(runs, old)]
    built = build_any(layout, source_of(mixed, registry))
    assert [bool(cell.missing) for cell in built.cells()] == [False, True]
    assert any("its record has no groups; it is of an older version" in text for text in built.missing)


def test_on_the_command_line(records_of_two_rounds, capsys, monkeypatch):
    monkeypatch.chdir(records_of_two_rounds)
    words = ["tables", "--rows", "method", "--columns", "dataset", "--backbones", "fedmf", "--set", "rounds=2", "--set",
             "k_core=50"]
    assert main([*words, "--metrics", "ndcg@20", "--by", "new-users", "--by", "least-active"]) == 0
    shown = capsys.readouterr().out
    assert "ml-100k ndcg@20 new-users | ml-100k ndcg@20 least-active" in shown
    assert "**ndcg@20 new-users, ndcg@20 least-active on ml-100k, fedmf**" in shown  # the backbone once
    assert main([*words, "--by", "new-users", "--format", "text"]) == 0
    assert re.search(r"^Test users of ml-100k, new-users: \d+, \d+, \d+\.$", capsys.readouterr().out, re.MULTILINE)
    assert main([*words, "--by", "popular-items", "--format", "csv"]) == 0
    assert "recall@20 popular-items" in capsys.readouterr().out
    assert main([*words, "--by", "popular-item"]) == 2
    assert "Did you mean 'popular-items'" in capsys.readouterr().err


def test_on_the_page(runs, registry):
    content = report(runs, registry, "t")
    tree = Tree(content)
    cells = dashboard.gather(runs, registry)
    for i, cell in enumerate(cells):
        rows = rows_of(tree, f"groups-{i}")
        heads = list(rows[0])
        assert [head.partition(":")[0] for head in heads] == ["method", *GROUPS]
        for variant, row in zip(cell.variants, rows, strict=True):
            for (_, full), group in zip(list(row.values())[1:], GROUPS):
                metric = "recall@20" if group.endswith("items") else "ndcg@20"
                assert float(full) == pytest.approx(np.mean(means(variant.runs, group, metric)))
        users = cells[0].variants[0].meta["groups"]["new-users"]["users"]
        assert f"new-users: ndcg@20 ({sum(users[1:])} users)" in heads


def test_in_python(records_of_two_rounds, tmp_path, registry):
    results = fb.load(records_of_two_rounds / "results", "ft", "fedmf")
    frame = results.groups
    assert list(frame) == ["seed", "block", "group", "metric", "mean", "users"]
    row, = frame.query("seed == 1 and block == 2 and group == 'new-users' and metric == 'recall@20'").itertuples()
    recorded = results.runs[1].meta["groups"]["new-users"]
    assert (row.mean, row.users) == (recorded["recall@20"][2], recorded["users"][2])
    assert np.isnan(frame.query("block == 0 and group == 'old-users'")["mean"]).all()
    folder = fabricate(tmp_path, registry, RunSpec("ft", "fedmf", "ml-100k"), 0, level(0.1))
    with pytest.raises(UserError, match="groups: the record .* has none, as it is of an older version"):
        fb.load(folder).groups


# Streams of sessions, in which nobody is new or old


def test_tables_and_page_of_sessions(sessions, registry):
    runs = load_runs(sessions)
    settings = tuple((name, value) for name, value in TINY.items() if name != "progress")
    built = build_any(Layout(metrics=("hit@10",), by=("most-active", "new-users")), source_of(runs, registry, settings))
    active, new = built.cells()
    recorded = [run.meta["groups"]["most-active"] for run in runs]
    assert active.mean == pytest.approx(np.mean([r["hit@10"][0] for r in recorded]))
    assert active.users == (recorded[0]["users"][0],)
    assert new.mean is None and new.missing == "nobody is in new-users, as the stream has a single step"
    tree = Tree(report(runs, registry, "t"))
    assert [head.partition(":")[0] for head in list(rows_of(tree, "groups-0")[0])[1:]] == [
        "least-active", "most-active", "worst-decile", "popular-items", "rare-items"]  # others have nobody
