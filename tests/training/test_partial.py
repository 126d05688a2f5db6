"""Whole item tables trained by the rows that clients look up, against all rows trained; test_oracle.py checks the
mathematics client by client."""

import pytest
import torch
from helpers import build, grown, module_of, same_tables, strategy_of, train_round, training

from fedcl_bench.training.strategies import Strategy
from fedcl_bench.training.lazy_decay import LazyDecayTrainer
from fedcl_bench.training.chunk_trainer import Slots
from fedcl_bench.rng import DrawKey
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.training.sampling import Needs, make_chunks
from fedcl_bench.plugin.local_settings import LocalSettings

FT = Method(NoSettings())
COMMON, PERSONAL = "item_commonality.weight", "item_personality.weight"
BACKBONES = {"fedrap": dict(lr=0.1, lr_items=5.0, dim=4, l2=1e-3, mu=0.05),
             "fedrap-l2": dict(lr=0.1, lr_items=5.0, dim=4, l2=1e-3, mu=0.05, sparsity="l2"),
             "gpfedrec": dict(lr=0.01, lr_eta=20.0, dim=4, hidden=(5,))}
LOCAL = {"whole": LocalSettings(), "batches": LocalSettings(batch_size=64, local_epochs=2),
         "early": LocalSettings(local_epochs=4, tolerance=0.05)}


@pytest.fixture(scope="module")
def step(ml100k):
    return ml100k.steps[0]


def make(registry, case):
    return build(registry, "backbone", case.split("-")[0], **BACKBONES[case])


def start(backbone, step):
    """Where a round begins; what the server served differs from what it broadcasts."""
    model = grown(backbone, step)
    generator = torch.Generator().manual_seed(1)
    for table in model.personalised.values():
        table += 0.1 * torch.randn(table.shape, generator=generator, dtype=torch.float64)
    return model


def slow(backbone):
    """The same backbone with all rows trained."""
    other = type(backbone)(backbone.settings)
    other.rest_follows = False
    return other


@pytest.mark.parametrize("case, local, weighted", [
    ("fedrap", "early", True), ("fedrap-l2", "batches", True), ("gpfedrec", "whole", False)])
def test_a_round_equals_whole_tables(registry, step, case, local, weighted):
    backbone, settings = make(registry, case), LOCAL[local]
    model, users = start(backbone, step), torch.arange(0, step.n_users, 25)
    assert strategy_of(backbone, FT, model, settings) is Strategy.LAZY_DECAY
    assert strategy_of(slow(backbone), FT, model, settings) is Strategy.WHOLE
    chunks = make_chunks(step, users, settings, 8,
                         Needs(whole_tables=training(backbone, FT, model, settings).holds_whole))
    weights = step.train.lengths.double() if weighted else None
    (found, loss, _), (expected, same_loss, _) = (train_round(chunks, model, one, FT, settings, 0, 0, 1, weights)
                                                  for one in (backbone, slow(backbone)))
    assert loss == pytest.approx(same_loss, rel=1e-12)
    same_tables(found, expected, 1e-12)
    for kind in (found.public, found.private):
        assert all(not torch.equal(table, {**model.public, **model.private}[name]) for name, table in kind.items())


def test_rows_nobody_looks_up_shrink_by_weight_decay(registry, step):
    """Six local batches at rates 5 * .97^2 * .95^b: each row of D that a client leaves alone is multiplied by
    prod (1 - rate * l2)."""
    backbone, settings = make(registry, "fedrap"), LocalSettings(local_epochs=6)
    model, user = start(backbone, step), int(step.train.lengths.argmin())
    chunk, = make_chunks(step, torch.tensor([user]), settings, 8)
    after, _, _ = train_round([chunk], model, backbone, FT, settings, 0, 0, 2)
    trainer = LazyDecayTrainer(chunk, model, training(backbone, FT, model, settings), DrawKey(0, 0, 2))
    alone = torch.ones(step.n_items, dtype=torch.bool).index_fill_(0, trainer.slots.items[0], False)
    factor = 1.0
    for batch in range(6):
        factor *= 1.0 - 5.0 * 0.97 ** 2 * 0.95 ** batch * 1e-3
    for before, now in ((model.private[PERSONAL][user], after.private[PERSONAL][user]),
                        (model.public[COMMON], after.public[COMMON])):
        torch.testing.assert_close(now[alone], before[alone] * factor, atol=0.0, rtol=1e-14)
        assert not torch.allclose(now[~alone], before[~alone] * factor, rtol=1e-6)
    others = torch.arange(step.n_users) != user
    assert torch.equal(after.private[PERSONAL][others], model.private[PERSONAL][others])


def test_a_step_by_hand_gives_way_to_what_a_subclass_means(registry, step):
    """A FedRAP whose logits are twice as large is trained by autograd, and differs; one that only repeats ``score`` is
    too, and does not."""
    backbone, settings = make(registry, "fedrap"), LocalSettings(batch_size=128, local_epochs=2)
    cls = type(backbone)

    class Same(cls):
        def score(self, clients, rows):
            return super().score(clients, rows)

    class Twice(cls):
        def score(self, clients, rows):
            return 2.0 * super().score(clients, rows)

    model, users = start(backbone, step), torch.arange(0, step.n_users, 60)
    chunks = make_chunks(step, users, settings, 8)
    by_hand, same, twice = (train_round(chunks, model, one, FT, settings, 0, 0, 1)[0].private["score.weight"]
                            for one in (backbone, Same(backbone.settings), Twice(backbone.settings)))
    torch.testing.assert_close(same, by_hand, atol=1e-13, rtol=1e-12)
    assert float((twice - by_hand)[users].abs().max()) > 1e-4


def test_slots_of_distinct_items():
    """Two clients of seven items: the second looks up fewer, and holds its first other item too."""
    samples = torch.tensor([[5, 2, 0, 5, 6], [3, 3, 4, 4, 3]])  # two positives and three negatives
    slots = Slots.distinct(samples, 2, torch.tensor([[6], [1]]), 7)
    assert slots.items.tolist() == [[0, 2, 5, 6], [1, 3, 4, 0]]
    assert slots.positive.tolist() == [[False, True, True, False], [False, True, False, False]]
    assert slots.sample.tolist() == [[2, 1, 0, 2, 3], [1, 1, 2, 2, 1]] and slots.replay.tolist() == [[3], [0]]
    assert slots.cells(torch.tensor([1, 0]), 7).tolist() == [7, 9, 12, 13, 1, 3, 4, 0]


def test_gpfedrec_products_are_those_of_all_pairs(registry, monkeypatch):
    """Blocks of 3 of 8 clients, 5 of 14 columns."""
    module = module_of(registry, "backbone", "gpfedrec")
    monkeypatch.setattr(module, "CLIENTS", 3)
    monkeypatch.setattr(module, "COLUMNS", 5)
    rows = torch.arange(8 * 14, dtype=torch.float64).view(8, 14) % 11 - 4.0
    graph = torch.arange(64, dtype=torch.float64).view(8, 8) % 5
    assert torch.equal(module._products(rows), rows @ rows.T) and torch.equal(module._mixed(graph, rows), graph @ rows)
