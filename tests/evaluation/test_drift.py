"""The analysis of blocks: ranks of all items by kernels and without, and how much they change."""

from __future__ import annotations

import pytest
import torch

from fedcl_bench.evaluation import drift
from fedcl_bench.evaluation.drift import item_rank_change
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.kernels import ops


class Given:
    """Scores are the private table ``scores``."""

    scores_local_tables = False

    def score_all(self, clients, public):
        return clients["scores"]


def ranks_by_definition(scores):
    """A stable sort of each row, highest first."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(1, scores.shape[1] + 1).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [1, 2, 319, 5000])
@pytest.mark.parametrize("compiled", [True, False])
def test_all_ranks_are_those_of_a_stable_sort(columns, dtype, compiled, monkeypatch):
    """Many different numbers; few, so that nearly all are equal to others; and all that are special."""
    if compiled and ops.why_not():
        pytest.skip(ops.why_not())
    if not compiled:
        monkeypatch.setattr(ops, "why_not", lambda: "switched off")
    ranks = ops.all_ranks if compiled else drift._ranks
    generator = torch.Generator().manual_seed(columns)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45], dtype=dtype)
    for values in (special, torch.arange(-3.0, 4.0, dtype=dtype), torch.randn(10 ** 5, generator=generator).to(dtype),
                   10.0 ** torch.arange(-30, 30, dtype=dtype)):
        scores = values[torch.randint(len(values), (4, columns), generator=generator)]
        assert torch.equal(ranks(scores).long(), ranks_by_definition(scores))
        assert torch.equal(ranks(scores[:, ::2]).long(), ranks_by_definition(scores[:, ::2]))


@pytest.mark.parametrize("compiled", [True, False])
def test_rank_change_is_its_definition_to_the_bit(compiled, monkeypatch):
    """Over several pieces of users; items new since are not ranked, and users are those asked for."""
    if not compiled:
        monkeypatch.setattr(ops, "why_not", lambda: "switched off")
    monkeypatch.setattr(drift, "in_pieces", lambda users, n_items: iter(users.split(30)))
    generator, users = torch.Generator().manual_seed(0), torch.arange(0, 200, 2)
    before, now = torch.randn(200, 600, generator=generator), torch.randn(200, 610, generator=generator)
    models = [Snapshot({"items": torch.zeros(scores.shape[1], 1)}, {"scores": scores}) for scores in (before, now)]
    expected = torch.zeros(600, dtype=torch.float64)
    for piece in users.split(30):
        a, b = (ranks_by_definition(scores[piece][:, :600]).double() for scores in (before, now))
        expected += ((a - b).abs() / a).sum(0)
    assert torch.equal(item_rank_change(Given(), *models, users), expected / 100)
    assert item_rank_change(Given(), *models, users[:0]).isnan().all()
