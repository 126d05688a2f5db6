"""How clients are trained: the decision for every shipped pair that matters, and that a user sees it."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import build, one_step, ragged, way_of

from fedcl_bench.cli.main import main
from fedcl_bench.training.strategies import MEANING, choose_way
from fedcl_bench.federation.parameter_growth import grow
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.kernels import ops
from fedcl_bench.plugin.local_settings import LocalSettings

STEP = one_step(ragged([0, 1], [2], [1, 3]), 6)


def model_of(backbone):
    return grow(Snapshot({}, {}), backbone, 0, STEP, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("method, backbone, settings, way", [
    ("ft", "fedmf", {}, "fused"), ("ft", "pfedrec", {}, "fused"), ("rlp2", "fedmf", {}, "fused"),
    ("f3crec", "fedmf", {}, "factored"), ("ft", "fedncf", {}, "factored"), ("kd", "pfedrec", {}, "factored"),
    ("ft", "fedmf", {"tolerance": 0.1}, "factored"), ("ft", "fedmf", {"negative_draw": "distinct"}, "factored"),
    ("reg", "fedmf", {}, "rows"), ("ft", "fedmf", {"optimiser": "adam"}, "rows"), ("ft", "biasmf", {}, "rows"),
    ("ft", "fedrap", {}, "at rest"), ("ft", "gpfedrec", {}, "at rest"), ("kd", "fedrap", {}, "whole"),
    ("ft", "fedrap", {"optimiser": "adam"}, "whole")])
def test_the_way_of_a_pair(registry, monkeypatch, method, backbone, settings, way):
    monkeypatch.setattr(ops, "why_not", lambda: None)
    backbone, method = build(registry, "backbone", backbone), build(registry, "method", method)
    assert way_of(backbone, method, model_of(backbone), LocalSettings(**settings)).name == way and way in MEANING


def test_without_kernels_and_on_sessions(registry, monkeypatch):
    fedmf, ft = build(registry, "backbone", "fedmf"), build(registry, "method", "ft")
    arguments = fedmf, ft, model_of(fedmf), LocalSettings()
    assert choose_way(*arguments, sessions=True).name == "rows"
    sasrec = build(registry, "backbone", "sasrec")
    assert choose_way(sasrec, ft, model_of(fedmf), LocalSettings(), True).name == "sessions"
    monkeypatch.setattr(ops, "why_not", lambda: "switched off")
    assert choose_way(*arguments, sessions=False).name == "factored"


def test_a_user_sees_it(tmp_path, capsys):
    assert main(["--method", "kd", "--backbone", "fedmf", "-v", "--json", "--results", str(tmp_path), "--set",
                 "rounds=1", "--set", "blocks=2", "--set", "k_core=60"]) == 0
    out, err = capsys.readouterr()
    ways = json.loads(out)["environment"]["ways"]
    assert len(ways) == 2 and ways[1] == "factored"
    for block, way in enumerate(ways):
        assert f"block {block}: clients are trained '{way}' ({MEANING[way]})" in err
