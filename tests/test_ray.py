"""Grids and shards on a real Ray cluster of two nodes, one of which is killed; and what is wrong with the command."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedcl_bench import cluster as joining
from fedcl_bench.cli import main
from fedcl_bench.commands import run as run_command
from fedcl_bench.grid_view import View
from fedcl_bench.progress import Display
from fedcl_bench.records import Record
from test_grid import records
from test_resume import same_numbers

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
ROOT = Path(__file__).resolve().parents[1]
CELLS = ["--methods", "ft,kd", "--backbones", "fedmf", "--seeds", "2", "--set", "rounds=6"]
RUN = ["--method", "f3crec", "--backbone", "fedmf", "--set", "rounds=6", "--set", "precision=float64"]


@pytest.fixture(scope="module")
def nodes():
    """A cluster whose second node tests kill; they get it anew."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    yield cluster, lambda: cluster.add_node(**small)
    cluster.shutdown()


@pytest.fixture
def second(nodes):
    """(address of a cluster of two nodes, a function that kills the second as a power cut would)."""
    cluster, add = nodes
    node = add()
    alive = [True]

    def kill():
        if alive[0]:
            alive[0] = False
            cluster.remove_node(node, allow_graceful=False)
    yield cluster.address, kill
    kill()


def test_a_grid_loses_a_node(second, tmp_path, capsys, monkeypatch):
    """Both nodes are in a run when one dies: all runs end with the numbers of processes, and none is done twice."""
    address, kill = second
    killed = []

    def show(self, board):
        if not killed and board.count("finished") and len([r for r in board.running if r.at]) == 2:
            killed.append({o.task.config.name: o.took for o in board.outcomes})
            kill()
    monkeypatch.setattr(View, "show", show)
    assert main(["grid", *CELLS, "--ray", address, "--results", str(tmp_path / "ray"), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert killed and re.search("of the cluster was lost|of the cluster died", captured.err)
    assert found["counts"]["finished"] == 4
    assert captured.err.count(" finished: ") == 4
    monkeypatch.undo()
    for method in ("ft", "kd"):
        assert main(["--method", method, "--backbone", "fedmf", "--seeds", "2", "--set", "rounds=6", "--quiet",
                     "--results", str(tmp_path / "alone")]) == 0
    expected = records(tmp_path / "alone")
    for name, record in records(tmp_path / "ray").items():
        same_numbers(record, expected.pop(name))
    assert not expected and not list((tmp_path / "ray").glob(".ray-*"))


def test_a_sharded_run_loses_a_node(second, tmp_path, capsys, monkeypatch):
    """A node dies in block 1: the run goes back to block 0's end and ends with the numbers of one process."""
    address, kill = second
    places, update = [], Display.update

    def watched(self, stream, progress):
        places.append((progress.step, progress.round))
        if places[-1] == (1, 3):
            kill()
        update(self, stream, progress)
    monkeypatch.setattr(Display, "update", watched)
    assert main([*RUN, "--ray", address, "--shards", "2", "--results", str(tmp_path / "ray"), "--json"]) == 0
    captured = capsys.readouterr()
    assert re.search("cluster (was lost|died); starting the shards again", captured.err)
    assert places == [place for t in range(4) for place in (*((t, r) for r in range(1, 7)), (t + 1, 0))]
    found = json.loads(captured.out)
    monkeypatch.undo()
    assert main([*RUN, "--results", str(tmp_path / "alone"), "--json", "--quiet"]) == 0
    alone = json.loads(capsys.readouterr().out)
    for key in ("rounds", "best_round", "bytes", "settings", "hash", "privacy"):
        assert found[key] == alone[key], key
    one, other = Record(Path(found["record"])), Record(Path(alone["record"]))
    assert {path.name for path in one.folder.iterdir()} == {path.name for path in other.folder.iterdir()}
    for part in ("public", "private"):
        for name, table in getattr(other.model(), part).items():
            torch.testing.assert_close(getattr(one.model(), part)[name], table, rtol=0.0, atol=1e-9)
    users = one.users()
    assert users.drop(columns="value").equals(other.users().drop(columns="value"))
    assert (users["value"] - other.users()["value"]).abs().max() <= 1e-9
