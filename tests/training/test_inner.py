"""Training without copies of item rows against training with them; its mathematics is checked in test_oracle.py."""

import pytest
import torch
from helpers import build, grown, same_tables, strategy_of, train_round

from fedcl_bench import ITEM, USER, Backbone, LocalSettings
from fedcl_bench.training.strategies import Strategy
from fedcl_bench.training.factored import Outer
from fedcl_bench.core.errors import PluginError
from fedcl_bench.kernels.functional import dot
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.training.sampling import Needs, make_chunks

FT = Method(NoSettings())


@pytest.fixture(scope="module")
def step(ml100k):
    return ml100k.steps[0]


def start(backbone, step):
    return grown(backbone, step)


@pytest.mark.parametrize("name", ["fedmf", "fedncf", "pfedrec"])
def test_whole_block_equals_row_copies(registry, step, name):
    """Clients with one to five local batches, some of which sit out the last ones of their chunk."""
    backbone, settings = build(registry, "backbone", name), LocalSettings()
    model, users = start(backbone, step), torch.arange(step.n_users)
    copies, inner = (make_chunks(step, users, settings, 32, Needs(inner=kind)) for kind in (False, True))
    assert not any(chunk.inner for chunk in copies) and all(chunk.inner for chunk in inner)
    assert any(int(chunk.count.min()) * 5 <= (chunk.batches - 1) * settings.batch_size for chunk in inner)
    (expected, loss, _), (found, same_loss, _) = (train_round(chunks, model, backbone, FT, settings, 0, 0, 1)
                                                  for chunks in (copies, inner))
    assert same_loss == pytest.approx(loss, abs=1e-12)
    same_tables(found, expected, 1e-12)
    assert not torch.equal(found.public[ITEM], model.public[ITEM])


def test_outer_products():
    """Two updates of two clients' tables of three items, d = 2."""
    steps = (torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
    vectors = (torch.tensor([[1.0, 2.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [5.0, 7.0]]))
    outer = Outer(torch.zeros(3, 2), None, torch.stack(steps, 2), torch.stack(vectors, 1))
    rows = torch.tensor([[[1.0, 2.0], [0.0, 1.0], [2.0, 4.0]], [[5.0, 7.0], [3.0, 0.0], [0.0, 0.0]]])
    assert torch.equal(outer.rows(), rows)
    for some, expected in ((outer, rows.sum(0)), (outer.scaled(torch.tensor([2.0, -1.0])), 2.0 * rows[0] - rows[1])):
        total = torch.ones(3, 2)
        some.add_to(total)
        assert torch.equal(total, 1.0 + expected)
    assert torch.equal(outer.scaled(torch.tensor([2.0, -1.0])).rows()[1], -rows[1])
    assert torch.equal(outer[1:].rows(), rows[1:])


def test_what_needs_row_copies(registry, step):
    fedmf, ncf = build(registry, "backbone", "fedmf"), build(registry, "backbone", "fedncf", hidden=(4,))

    class Scaled(type(fedmf)):
        def score(self, clients, rows):
            return 2.0 * dot(clients[USER], rows[ITEM])

    class Penalised(type(fedmf)):
        def regulariser(self, clients, rows, weights, served, round_):
            return rows[ITEM].square().sum((1, 2))

    cases = {"inner": (fedmf, True), "hidden": (ncf, False), "score": (Scaled(fedmf.settings), False),
             "regulariser": (Penalised(fedmf.settings), False)}
    for name, (backbone, expected) in cases.items():
        found = strategy_of(backbone, FT, start(backbone, step), LocalSettings())
        assert (found in (Strategy.FACTORED, Strategy.FUSED)) == expected, name


@pytest.mark.parametrize("factors,message", [
    (lambda user: (torch.cat([user, user], 1), None), r"factors returned .*\s*expected .* of shape \(8, 32\)"),
    (lambda user: (user, user.sum(1)), r"factors returned .*\s*expected .* of shape \(8, 1\)"),
    (lambda user: (user.detach(), None), "cut off from all parameters")])
def test_wrong_factors_are_told(registry, step, factors, message):
    """Before kernels read them as if they were right."""
    fedmf = build(registry, "backbone", "fedmf")

    class Wrong(type(fedmf)):
        def factors(self, clients):
            return factors(clients[USER])

    backbone, settings, users = Wrong(fedmf.settings), LocalSettings(), torch.arange(8)
    chunks = make_chunks(step, users, settings, 32, Needs(inner=True, samples_only=True))
    with pytest.raises(PluginError, match=message):
        train_round(chunks, start(backbone, step), backbone, FT, settings, 0, 0, 0)


def test_backbone_without_score_is_told():
    class Neither(Backbone):
        name = "neither"

    with pytest.raises(NotImplementedError, match="backbone 'neither' has neither score"):
        Neither(None).score({}, {ITEM: torch.zeros(1, 1, 1)})
