"""How clients are trained: the decision for every shipped pair that matters, and that a user sees it."""

import json

import pytest
import torch
from helpers import build, grown, one_step, ragged, strategy_of

from fedcl_bench.cli.main import main
from fedcl_bench.training.strategies import Strategy, choose_strategy, meaning_of
from fedcl_bench.kernels import ops
from fedcl_bench.plugin.local_settings import LocalSettings

STEP = one_step(ragged([0, 1], [2], [1, 3]), 6)


def model_of(backbone):
    return grown(backbone, STEP, dtype=torch.float32)


@pytest.mark.parametrize("method, backbone, settings, strategy", [
    ("ft", "fedmf", {}, "FUSED"), ("ft", "pfedrec", {}, "FUSED"), ("rlp2", "fedmf", {}, "FUSED"),
    ("f3crec", "fedmf", {}, "FACTORED"), ("ft", "fedncf", {}, "FACTORED"), ("kd", "pfedrec", {}, "FACTORED"),
    ("ft", "fedmf", {"tolerance": 0.1}, "FACTORED"), ("ft", "fedmf", {"negative_draw": "distinct"}, "FACTORED"),
    ("reg", "fedmf", {}, "ROWS"), ("ft", "fedmf", {"optimiser": "adam"}, "ROWS"), ("ft", "biasmf", {}, "ROWS"),
    ("ft", "fedrap", {}, "LAZY_DECAY"), ("ft", "gpfedrec", {}, "LAZY_DECAY"), ("kd", "fedrap", {}, "WHOLE"),
    ("ft", "fedrap", {"optimiser": "adam"}, "WHOLE")])
def test_the_strategy_of_a_pair(registry, monkeypatch, method, backbone, settings, strategy):
    monkeypatch.setattr(ops, "why_not", lambda: None)
    backbone, method = build(registry, "backbone", backbone), build(registry, "method", method)
    assert strategy_of(backbone, method, model_of(backbone), LocalSettings(**settings)) is Strategy[strategy]


def test_without_kernels_and_on_sessions(registry, monkeypatch):
    fedmf, ft = build(registry, "backbone", "fedmf"), build(registry, "method", "ft")
    arguments = fedmf, ft, model_of(fedmf), LocalSettings()
    assert choose_strategy(*arguments, sessions=True) is Strategy.ROWS
    sasrec = build(registry, "backbone", "sasrec")
    assert choose_strategy(sasrec, ft, model_of(sasrec), LocalSettings(), True) is Strategy.SESSIONS
    monkeypatch.setattr(ops, "why_not", lambda: "switched off")
    assert choose_strategy(*arguments, sessions=False) is Strategy.FACTORED


def test_a_user_sees_it(tmp_path, capsys):
    assert main(["--method", "kd", "--backbone", "fedmf", "-v", "--json", "--results", str(tmp_path), "--set",
                 "rounds=1", "--set", "blocks=2", "--set", "k_core=60"]) == 0
    out, err = capsys.readouterr()
    strategies = json.loads(out)["environment"]["strategies"]
    assert len(strategies) == 2 and strategies[1] == "factored"
    for block, name in enumerate(strategies):
        assert f"block {block}: clients are trained '{name}' ({meaning_of(name)})" in err
