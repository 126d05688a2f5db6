"""FFMSR's fusion and filters in RecBole's recommenders (its Table 5), against RecBole's own model that is given e + t
as its table and the filtered histories by explicit transforms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import by_domain
from test_recbole_domains import (WIDTH, configured, federation_of, made_up, module_of, shops, some_batch,  # noqa: F401
                                  without_dropout)
from torch.nn.utils import parametrize

from fedcl_bench.data.datasets import load_stream
from fedcl_bench.core.errors import UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.recbole.domain_networks import PRETRAIN
from fedcl_bench.runs.runner import execute

MODELS = ["FDSA", "S3Rec"]


def pair(registry, name):
    """RecBole's model and the same with FFMSR's parts, whose other parameters are equal, in float64."""
    data = made_up()
    plain, whole = (module_of(registry, name, data, model=without_dropout(name), precision="float64", **more).double()
                    for more in ({}, {"semantics": True, "adapter_dropout": 0.0}))
    with torch.no_grad():
        for value in whole.parameters():
            value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
        whole.clusters.centroids.copy_(torch.randn(whole.clusters.centroids.shape,
                                                   generator=torch.Generator().manual_seed(3)))
        own = dict(whole.recommender.named_parameters())
        for parameter, value in plain.named_parameters():
            value.copy_(own[parameter])
    return data, plain.eval(), whole.eval()


def filtered(whole, items):
    """f~ of histories by transforms in NumPy, padded with zeros to the filter's length."""
    vectors = whole.clusters().detach().numpy()
    weight = torch.view_as_complex(whole.clusters.filter.weight).detach().numpy()
    result = np.zeros((*items.shape, vectors.shape[1]))
    for row, history in enumerate(items.tolist()):
        x = np.zeros((WIDTH, vectors.shape[1]))
        for place, item in enumerate(history):
            if 0 <= item < len(vectors):
                x[place] = vectors[item]
        y = np.fft.irfft(np.fft.rfft(x, axis=0) * weight, n=WIDTH, axis=0)
        result[row] = y[:items.shape[1]]
    return torch.from_numpy(result)


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_recboles_with_texts_in_the_table_and_clusters_in_the_history(registry, shops, name):  # noqa: F811
    data, plain, whole = pair(registry, name)
    batch, _ = some_batch(data)
    before = plain.scores(batch)
    e = plain.model.item_embedding.parametrizations.weight
    texts = whole.texts(e.original0)
    looked_up = []

    def with_clusters(_, numbers, rows):
        looked_up.append(numbers[0])
        return rows + filtered(whole, numbers[0] - 1)
    with torch.no_grad():
        e.original0.add_(texts)
    plain.model.item_embedding.register_forward_hook(with_clusters)
    torch.testing.assert_close(whole.scores(batch), plain.scores(batch), rtol=1e-9, atol=1e-9)
    assert len(looked_up) == 1 and not torch.allclose(before, plain.scores(batch), atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_only_lookups_of_a_history_have_clusters(registry, shops, name):  # noqa: F811
    """Those of targets and of negatives, as in S3Rec's pre-training, have none."""
    data, _, whole = pair(registry, name)
    table, seen, lookup = whole.recommender.model.item_embedding, [], whole._with_clusters
    with whole._called(), parametrize.cached():
        numbers = torch.tensor([[1, 2, 3]])
        torch.testing.assert_close(table(numbers), table.weight[numbers])
        rows, history = table.weight[numbers], table(numbers)
        whole._history = numbers
        torch.testing.assert_close(table(numbers) - rows, filtered(whole, numbers - 1))
        whole._history = None
        assert torch.equal(history, rows)
    if name == "S3Rec":
        table._forward_hooks.clear()
        table.register_forward_hook(lambda *args: seen.append(args[1][0] is whole._history) or lookup(*args))
        whole.train().stage = PRETRAIN
        whole.loss(*some_batch(data))
        assert sum(seen) == 4 and len(seen) == 6  # a history and three segments; items and negatives


@pytest.mark.parametrize("name", ["S3Rec", pytest.param("FDSA", marks=pytest.mark.long)])
def test_it_runs_under_ffmsr_and_not_without_the_parts(registry, shops, tmp_path, name):  # noqa: F811
    config = configured(registry, name, "ffmsr", topology="federated", semantics=True, federated_rounds=2, clusters=4)
    f = federation_of(config)
    config.check(f)
    *_, last = run(f)
    centroids = torch.cat(by_domain(last.model.public)["clusters.centroids"])
    assert len(centroids) == 26 and len(centroids.unique(dim=0)) == 4  # of both domains' items together
    result = execute(config, lambda: load_stream(config.source, config.stream, config.features), tmp_path / "results")
    assert result["privacy"]["uploaded"] == ["semantics"] and min(result["rounds"]) == 4
    with pytest.raises(UserError, match=f"exchanges semantics, which 'recbole:{name}' has none of with these"):
        config = configured(registry, name, "ffmsr", topology="federated")
        config.check(federation_of(config))
    assert configured(registry, name).inactive["fusion_layers"] == "without semantics"
    assert "fusion_layers" not in configured(registry, name, semantics=True).inactive
