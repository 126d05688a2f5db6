"""VQ-Rec against plain loops in float64, its stages and what each trains, and what its settings change."""

from dataclasses import replace

import domain_oracle as oracle
import numpy as np
import pytest
import torch
from helpers import build, module_of

SMALL = {"dim": 4, "heads": 2, "inner_size": 5, "max_length": 6, "codes": 3, "centroids": 5}


def coded_world(uncoded=(), **options):
    codes = torch.randint(5, (oracle.N_ITEMS, 3), generator=torch.Generator().manual_seed(3))
    codes[list(uncoded)] = -1
    return replace(oracle.world(**options), codes=codes)


def make(registry, data=None, **options):
    torch.manual_seed(2)
    return build(registry, "backbone", "vqrec", **{**SMALL, **options}).module(data or coded_world())


def sinkhorn(raw, iterations, temperature):
    """Rows and then columns of exp(raw / temperature) made to add up to 1, in turns, by plain divisions."""
    likely = np.exp(np.log(np.exp(raw) + 1e-6) / temperature)
    for _ in range(iterations):
        likely = likely / likely.sum(1, keepdims=True)
        likely = likely / likely.sum(0, keepdims=True)
    return likely


def expected_scores(module, p, batch, table):
    codes = module.codes.tolist()
    vectors = [np.mean([table[part][code] for part, code in enumerate(of_item)], 0) if of_item[0] >= 0 else
               np.zeros(table.shape[2]) for of_item in codes]
    return np.array([[oracle.cosine(oracle.represent(history, vectors, p, "history", 2, 2), vector)
                      for vector in vectors] for history in oracle.each_history(batch)]) / 0.07


@pytest.mark.parametrize("uncoded", [(), (0, 10)], ids=["all", "two without codes"])
def test_scores_and_loss_are_those_of_plain_loops(registry, uncoded):
    module = oracle.spread(make(registry, coded_world(uncoded))).eval()
    p, (batch, targets) = oracle.arrays(module), oracle.samples()
    expected = expected_scores(module, p, batch, p["code_table"])
    np.testing.assert_allclose(module.scores(batch).detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    assert module.loss(batch, targets).item() == pytest.approx(oracle.cross_entropy(expected, targets), rel=1e-9)
    assert (expected[:, list(uncoded)] == 0).all()


@pytest.mark.parametrize("options", [{}, {"sinkhorn_iterations": 1, "permutation_temperature": 2.0}], ids=str)
def test_the_permutation_takes_each_values_likeliest_row(registry, options):
    module = oracle.spread(make(registry, **options)).eval()
    module.stage = "permutation"
    p, (batch, _) = oracle.arrays(module), oracle.samples()
    iterations = options.get("sinkhorn_iterations", 3)
    likely = [sinkhorn(raw, iterations, options.get("permutation_temperature", 0.7)) for raw in p["permutation"]]
    table = np.stack([rows[each.argmax(1)] for rows, each in zip(p["code_table"], likely)])
    assert not np.array_equal(table, p["code_table"])
    np.testing.assert_allclose(module.scores(batch).detach().numpy(), expected_scores(module, p, batch, table),
                               rtol=1e-9, atol=1e-9)


def test_gumbel_noise_is_gumbel(registry):
    """The largest of raw + noise is each entry as often as its share of the softmax says."""
    operator = module_of(registry, "backbone", "vqrec").gumbel_sinkhorn
    raw = torch.tensor([[0.0, 1.0, 2.0], [0.0] * 3, [0.0] * 3]).double().expand(20_000, 3, 3)
    torch.manual_seed(0)
    noisy = operator(raw, 0, 1.0, True)[:, 0].argmax(1)
    share = torch.bincount(noisy, minlength=3) / 20_000
    np.testing.assert_allclose(share, raw[0, 0].softmax(0), atol=0.02)


def test_what_the_permutation_is_trained_by(registry):
    """The released code rounds up by ``ceil``, which has no gradient; straight through it has that of the softmax."""
    batch, targets = oracle.samples()
    for how, moved in (("straight_through", True), ("released", False)):
        module = oracle.spread(make(registry, permutation_gradient=how))
        module.stage = "permutation"
        module.loss(batch, targets).backward()
        assert bool(module.permutation.grad.any()) is moved
        assert module.code_table.grad.any()


def test_stages_and_what_they_train(registry):
    def stages(**options):
        return [(stage.name, stage.rounds, stage.trained)
                for stage in build(registry, "backbone", "vqrec", **{**SMALL, **options}).stages()]

    assert stages() == [("permutation", 5, ("permutation",)), ("train", None, ("code_table", "history"))]
    assert stages(permutation_rounds=0) == [("train", None, ())]
    assert stages(frozen_encoder=True)[1] == ("train", None, ("code_table", "history.norm"))
    names = [name for name, _ in make(registry).named_parameters()]
    assert [name for name in names if name.startswith(("code_table", "history.norm"))] == [
        "code_table", "history.norm.weight", "history.norm.bias"]
    assert "permutation" not in dict(make(registry, permutation_rounds=0).named_parameters())


def test_the_permuted_table_is_fixed_once(registry):
    module = make(registry)
    before = module.code_table.detach().clone()
    module.enter_stage("permutation")
    assert torch.equal(module.code_table, before)
    with torch.no_grad():
        module.enter_stage("train")
    module.stage = "train"
    after = module.code_table.detach().clone()
    assert not torch.equal(after, before)
    for part in range(3):  # every vector is one of those before
        assert all((row == before[part]).all(1).any() for row in after[part])
    for _ in range(5):  # as pooled domains do, which have one table
        with torch.no_grad():
            module.enter_stage("train")
        assert torch.equal(module.code_table, after)
    assert module.code_table.requires_grad
    batch, targets = oracle.samples()
    module.train().loss(batch, targets).backward()
    assert module.permutation.grad is None and module.code_table.grad.any()
