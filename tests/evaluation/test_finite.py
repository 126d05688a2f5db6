"""Scores that are not finite end a run as failed, naming who made them; parameters about to be are warned of."""

from dataclasses import replace

import pytest
import torch

from fedcl_bench.data.datasets import load_stream
from fedcl_bench.core.errors import RunFailed
from fedcl_bench.federation.loop import run
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.runs import runner
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.runner import Watch, execute

SMALL = {"k_core": 80, "rounds": 1, "dim": 8}


class Spoiling(Method):
    """Sets one user's score of one item."""

    name, first_step = "spoiling", 0

    def __init__(self, value):
        super().__init__(NoSettings())
        self.value = value

    def rescore(self, users, scores, model, backbone):
        scores = scores.clone()
        scores[users == 3, 5] = self.value
        return scores


class SpoilingSessions(Spoiling):
    rescore = Method.rescore

    def represent(self, encoding):
        if encoding.purpose == "train":
            return encoding.features
        return torch.where(encoding.users[:, None, None] == 3, self.value, encoding.features)


def federation(registry, backbone="fedmf", method=None, **settings):
    config = make_config(registry, "ft", backbone, "ml-100k", overrides=[("test", {**SMALL, **settings})])
    f = config.federation(load_stream(config.source, config.stream))
    return f if method is None else replace(f, method=method)


@pytest.mark.parametrize("value, settings", [(torch.nan, {}), (torch.inf, {"candidates": "sampled"}),
                                             (-torch.inf, {"stream": "sessions", "k_core": 0})])
def test_a_method_that_makes_such_scores_is_named(registry, value, settings):
    """One of many scores is enough, also if it would have been ranked last."""
    with pytest.raises(RunFailed, match=rf"^block 0, round 1: method 'spoiling': rescore returned {value} as a score "
                                        r"for 1 of \d+ users ranked together \(user 3 first\)"):
        next(run(federation(registry, method=Spoiling(value), **settings)))


def test_a_method_of_sequential_backbones_is_named(registry):
    f = federation(registry, "sasrec", SpoilingSessions(torch.nan), stream="sessions", k_core=0)
    with pytest.raises(RunFailed, match="method 'spoiling': represent returned nan .* 1 of"):
        next(run(f))


@pytest.mark.parametrize("method, settings", [
    (Spoiling(0.0), {}), (None, {"stream": "sessions", "k_core": 0}),
    (None, {"candidates": "sampled", "sampled_candidates": 1, "topk": [2], "valid_metric": "ndcg@2"})])
def test_a_backbone_is_named_also_under_a_method_that_rescores(registry, monkeypatch, method, settings):
    f = federation(registry, method=method, **settings)
    factors = type(f.backbone).factors
    monkeypatch.setattr(type(f.backbone), "factors", lambda self, clients: (
        factors(self, clients)[0] * (1.0 if torch.is_grad_enabled() else 3e38) * 10, None))
    with pytest.raises(RunFailed, match="backbone 'fedmf': score returned -?(inf|nan)"):
        next(run(f))


def test_a_run_whose_parameters_grow_out_of_bounds_is_warned_of(registry, ml100k, tmp_path, monkeypatch):
    """Once per block, with the number; the run goes on."""
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", {"rounds": 1, "blocks": 1})])
    stream, said = replace(ml100k, steps=ml100k.steps[:1]), []
    execute(config, lambda: stream, tmp_path / "usual", Watch(warn=said.append))
    assert said == []
    monkeypatch.setattr(runner, "LARGE", 1e-3)
    done = execute(config, lambda: stream, tmp_path / "large", Watch(warn=said.append))
    assert done["status"] == "finished" and len(said) == 1
    assert said[0].startswith("block 0: a parameter has grown to ") and "lr" in said[0]
