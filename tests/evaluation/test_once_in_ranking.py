"""What all batches of a ranking need is made once, and never kept longer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fedcl_bench.training.silo_modules import histories
from fedcl_bench.toolbox.transformer import MoEAdapter
from fedcl_bench.plugin.silo import DomainModule, once_in_ranking
from fedcl_bench.evaluation.sample_ranking import Ranking, rank_by_module
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.runs.registry import discover
from fedcl_bench.core.tuning import SIZES
from fedcl_bench.testing.trials import Pair


class Shelf(DomainModule):
    """Counts how often its vectors are made."""

    def __init__(self):
        super().__init__()
        self.items, self.made = nn.Parameter(torch.ones(3, 2)), 0

    @once_in_ranking
    def vectors(self):
        self.made += 1
        return 2.0 * self.items


class Doubled(nn.Module):
    made = 0

    def forward(self, table):
        Doubled.made += 1
        return 2.0 * table


def test_once_for_a_ranking_and_anew_for_the_next():
    shop = DomainModule()
    shop.shelves, shop.table = nn.ModuleList([Shelf(), Shelf()]), nn.Linear(2, 2)
    parametrize.register_parametrization(shop.table, "weight", Doubled())
    first, second = shop.shelves
    Doubled.made = 0
    with shop.ranking(), torch.no_grad():
        assert all(torch.equal(first.vectors(), torch.full((3, 2), 2.0)) for _ in range(3))
        assert shop.table.weight is shop.table.weight
    assert (first.made, second.made, Doubled.made) == (1, 0, 1)
    with torch.no_grad():
        first.items += 1.0
    assert torch.equal(first.vectors(), torch.full((3, 2), 4.0)) and first.vectors() is not first.vectors()
    made = first.made
    with pytest.raises(KeyError), shop.ranking():
        raise KeyError(first.vectors())
    first.vectors(), first.vectors()
    assert first.made == made + 3 and Shelf.vectors.__name__ == "vectors"
    assert not [name for name in vars(first) if "ranking" in name]


@pytest.mark.parametrize("method, backbone, costly, settings", [
    ("ffmsr", "ffmsr", "adapter", {}), ("ft", "vqrec", "embedding_bag", {}), ("ft", "ccdr", "sparse", {}),
    ("ffmsr", "recbole:FDSA", "adapter", {"semantics": True})])
def test_ranks_are_those_of_each_batch_alone(monkeypatch, method, backbone, costly, settings):
    """After items have changed too; and what costs most is done once for all batches."""
    f = Pair(discover(), method, backbone, "domains", settings).federation()
    domain = CrossSilo(f).domains[0]
    module, sessions, done = domain.module.eval(), domain.step.sessions["test"], []

    def counted(name, operation):
        def call(*args, **options):
            done.append(name)
            return operation(*args, **options)
        return call

    monkeypatch.setattr(MoEAdapter, "forward", counted("adapter", MoEAdapter.forward))
    monkeypatch.setattr(torch.sparse, "mm", counted("sparse", torch.sparse.mm))
    monkeypatch.setattr(nn.functional, "embedding_bag", counted("embedding_bag", nn.functional.embedding_bag))
    for _ in range(2):
        with torch.no_grad():
            for value in module.parameters():
                value += 0.1 * torch.randn_like(value)
            everybody = torch.arange(len(sessions.lengths))
            batch, wanted = histories(sessions, everybody, f.backbone.settings.max_length, fixed=True)
            scores = module.scores(batch)
        ranks = (scores >= scores.gather(1, wanted[:, None])).sum(1)
        expected = (1.0 / ranks).where(ranks <= 5, 0.0)
        counts = []
        for at_once in (len(wanted), 2):
            done.clear()
            monkeypatch.setattr(SIZES, "central_ranked", at_once)
            metric, = (each for each in f.metrics if each.name == "mrr")
            scored = rank_by_module(f.backbone, module, domain.step, "test", Ranking([5], [metric]))
            torch.testing.assert_close(scored.values["mrr@5"][scored.users.argsort()], expected.double())
            counts.append(done.count(costly))
        assert len(wanted) > 4 and counts[0] == counts[1] > 0
