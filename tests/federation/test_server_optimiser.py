"""Server optimisers: equal to the papers' recursions number by number, anew in every block, resumed to the bit."""

import oracle
import pytest
import torch
from helpers import build, federation, federation_of

from fedcl_bench import LocalSettings, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Progress
from fedcl_bench.runs.checkpoints import load_progress, save_progress
from fedcl_bench.runs.config import make_config
from fedcl_bench.testing.worlds import growing_stream

SETTINGS = {"server_optimiser_lr": 0.05, "server_momentum": 0.6, "server_beta2": 0.7, "server_epsilon": 0.01}


def parts(registry, method="ft", backbone="ncf", rounds=2, **server):
    of_backbone = {"hidden": (5,)} if backbone in ("ncf", "gpfedrec") else {}
    return federation(registry, growing_stream(blocks=2), build(registry, "method", method),
                      build(registry, "backbone", backbone, dim=4, lr=0.2, **of_backbone), 0, rounds,
                      LocalSettings(batch_size=16), precision="float64", **server)


def public(model):
    return {**model.public, **model.dense}


@pytest.mark.parametrize("method, kind, more", [
    ("ft", "momentum", {}), ("ft", "adam", {"upload_clip": 0.05}), ("f3crec", "yogi", {}),
    ("ft", "adagrad", {"upload_noise": 0.01, "client_ratio": 0.5})])
def test_rounds_equal_oracle(registry, method, kind, more):
    """Each round's mean is that of the same round without an optimiser, before the method aggregates."""
    f, sent, memory = parts(registry, method, server_optimiser=kind, **SETTINGS, **more), {}, {}
    points = list(run(f, observe=lambda key, model, trained: sent.update({(key.step, key.round): model})))
    compared = 0
    for before, after in zip([Progress(), *points], points):
        if after.step != before.step:
            memory = {}  # a block ends
            continue
        plain = parts(registry, method, **more)
        plain.method.__class__ = type("Plain", (type(plain.method),), {"aggregate": lambda self, public: public})
        mean, begun = public(next(run(plain, before)).model), sent[before.step, before.round]
        expected = {name: oracle.server_step(kind, *SETTINGS.values(), public(begun)[name], value,
                                             memory.setdefault(name, {})) for name, value in mean.items()}
        if method != "ft" and before.step:
            acting = f.acting_in(f.stream.steps[1])
            acting.server_state = after.server_state
            expected |= acting.aggregate({name: expected[name] for name in begun.public})
        for name, value in expected.items():
            torch.testing.assert_close(public(after.model)[name], value, atol=1e-9, rtol=1e-9)
            compared += float((value - mean[name]).abs().max()) > 1e-6
    assert compared > 10


def test_a_checkpoint_has_what_it_remembers(registry, tmp_path):
    f = parts(registry, server_optimiser="yogi", **SETTINGS)
    points = list(run(f))
    for point in points[:-1]:
        save_progress(tmp_path / "point", point, 0.0)
        *_, last = run(f, load_progress(tmp_path / "point", "cpu")[0])
        assert all(torch.equal(table, public(points[-1].model)[name]) for name, table in public(last.model).items())


def test_what_does_not_go_with_it(registry, shops):
    with pytest.raises(UserError, match="'server_optimiser': found adam, accepted: none with 'gpfedrec', whose server"):
        parts(registry, backbone="gpfedrec", server_optimiser="adam").check()
    with pytest.raises(UserError, match="accepted: none with method 'fedcia', whose clients share no parameters"):
        federation_of(make_config(registry, "fedcia", "fedmf", "ml-100k", overrides=[
            ("test", {"server_optimiser": "adam", "k_core": 80})]))
    with pytest.raises(UserError, match="'server_optimiser'.*has no effect with the method popularity, as no client"):
        make_config(registry, "popularity", "none", "ml-100k", overrides=[("test", {"server_optimiser": "adam"})])
    with pytest.raises(UserError, match="found adam, accepted: none with domains in blocks"):
        config = make_config(registry, "ft", "sasrec", "books+games", overrides=[
            ("test", {"server_optimiser": "adam", "domain_blocks": 2, "dim": 4, "topk": [3],
                      "valid_metric": "mrr@3"})])
        federation_of(config).check()
