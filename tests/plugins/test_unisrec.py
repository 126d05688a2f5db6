"""UniSRec against plain loops in float64, where its gradients go, and what its settings change."""

import domain_oracle as oracle
import numpy as np
import pytest
import torch
from helpers import build

from fedcl_bench import Histories, UserError
from fedcl_bench.core.settings import inactive

SMALL = {"dim": 4, "heads": 2, "inner_size": 5, "max_length": 6, "experts": 3}
STILL = {"dropout": 0.0, "attention_dropout": 0.0, "adapter_dropout": 0.0}


def make(registry, data=None, **options):
    torch.manual_seed(2)
    backbone = build(registry, "backbone", "unisrec", **{**SMALL, **options})
    return backbone.module(data or oracle.world())


def adapted(text, p):
    """The mixture of whitening experts of one text."""
    shares = oracle.softmax(text @ p["adapter.gate"])
    return sum(share * (text - p["adapter.bias"][k]) @ p["adapter.weight"][k] for k, share in enumerate(shares))


@pytest.mark.parametrize("options", [{}, {"ids": False}, {"temperature": 0.5, "layers": 1, "heads": 1}], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
def test_scores_and_loss_are_those_of_plain_loops(registry, options, layers):
    data = oracle.world(layers=layers)
    module = oracle.spread(make(registry, data, **options)).eval()
    p, (batch, targets) = oracle.arrays(module), oracle.samples()
    texts = data.features.mean(1).double().numpy()
    vectors = [adapted(text, p) + (p["items"][item] if "items" in p else 0) for item, text in enumerate(texts)]
    layers, heads = options.get("layers", 2), options.get("heads", 2)
    expected = np.array([[oracle.cosine(oracle.represent(history, vectors, p, "history", layers, heads), vector)
                          for vector in vectors] for history in oracle.each_history(batch)])
    expected /= options.get("temperature", 0.07)
    np.testing.assert_allclose(module.scores(batch).detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    assert module.loss(batch, targets).item() == pytest.approx(oracle.cross_entropy(expected, targets), rel=1e-9)


def test_with_ffmsrs_parts_it_scores_by_fused_texts_and_filtered_clusters(registry):
    """Of padded histories; transforms by NumPy. Without what the server sends, clusters are those of zeros."""
    module = make(registry, oracle.world(layers=3), semantics=True, **STILL)
    module.clusters.centroids.copy_(torch.randn(module.clusters.centroids.shape))
    oracle.spread(module).eval()
    batch, targets = oracle.samples()
    vectors = module.texts(module.items) + module.items
    clusters, weight = (value.detach().numpy() for value in (
        module.clusters(), torch.view_as_complex(module.clusters.filter.weight)))
    x = torch.zeros(*batch.items.shape, SMALL["dim"], dtype=torch.float64)
    for row, history in enumerate(oracle.each_history(batch)):
        padded = np.zeros((SMALL["max_length"], SMALL["dim"]))
        padded[:len(history)] = clusters[history]
        filtered = np.fft.irfft(np.fft.rfft(padded, axis=0) * weight, n=len(padded), axis=0)
        x[row, :len(history)] = vectors[history].detach() + torch.from_numpy(filtered[:len(history)])
    h = module.history(x, batch.lengths)
    expected = torch.nn.functional.cosine_similarity(h[:, None], vectors[None], dim=2) / 0.07
    torch.testing.assert_close(module.scores(batch), expected, rtol=1e-9, atol=1e-9)
    module.train().loss(batch, targets).backward()
    assert [name for name, value in module.named_parameters() if value.grad is None] == []
    torch.testing.assert_close(module.eval().semantics(), module.texts.mixed(module.items))


def test_ffmsrs_parts_need_rows_of_items(registry):
    with pytest.raises(UserError, match="setting 'ids': found false, accepted: true with semantics=true"):
        make(registry, ids=False, semantics=True)
    backbones = [build(registry, "backbone", "unisrec", semantics=value) for value in (False, True)]
    assert [backbone.exchanges for backbone in backbones] == [frozenset(), frozenset({"semantics"})]
    without = [set(inactive([backbone.settings])) for backbone in backbones]
    assert {"layer_adapters", "fusion_layers"} <= without[0] and "experts" not in without[0]
    assert "adapter_draws" in without[1] and "fusion_layers" not in without[1]


def test_adapting_every_click_changes_draws_and_nothing_else(registry):
    """Without dropout and gate noise both ways are equal; with them clicks of one item differ, or do not."""
    batch, targets = oracle.samples()
    losses = []
    for draws in ("click", "item"):
        module = oracle.spread(make(registry, adapter_draws=draws, **STILL)).train()
        with torch.no_grad():
            module.adapter.noise.fill_(-1e4)  # a deviation of .01, and no gate to move
            module.adapter.gate.zero_()
            module.adapter.weight.copy_(module.adapter.weight[:1].expand_as(module.adapter.weight))
            module.adapter.bias.copy_(module.adapter.bias[:1].expand_as(module.adapter.bias))
        losses.append(module.loss(batch, targets).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    same = torch.zeros(1, 4, dtype=torch.int64)
    for draws, alike in (("click", False), ("item", True)):
        module = make(registry, adapter_draws=draws, adapter_dropout=0.5).train()
        seen = []
        module.history.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        module.represent(Histories(same, torch.tensor([4]), torch.tensor([0])), module.vectors())
        assert torch.equal(seen[0][0, 0], seen[0][0, 1]) is alike
