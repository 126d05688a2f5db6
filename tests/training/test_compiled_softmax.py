"""Clients' own item tables in compiled passes equal PyTorch's scores, gradients and Adam."""

from __future__ import annotations

import pytest
import torch
from helpers import build, grown, train_round

from fedcl_bench import Dropout, LocalSettings
from fedcl_bench.training import strategies
from fedcl_bench.training.session_trainer import make_session_chunks
from fedcl_bench.training.strategies import Strategy, choose_strategy
from fedcl_bench.kernels.functional import Pooling, cosine_pool
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.kernels import ops
from fedcl_bench.testing.worlds import session_log, session_stream

pytestmark = pytest.mark.skipif(ops.why_not() is not None, reason="no compiled kernels")
C, ITEMS = 3, 203
TOLERANCES = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 1e-3, "atol": 1e-5}}


class Theirs:
    """The same with PyTorch's operations on the tables of all clients at once."""

    def __init__(self, table: torch.Tensor, rate: float):
        self.table = table.clone().requires_grad_()
        self.adam = torch.optim.Adam([self.table], lr=rate, betas=(0.9, 0.98), eps=1e-4)

    def step(self, pooling: Pooling, dropout: Dropout, share: float, held: torch.Tensor, of_rows: torch.Tensor):
        """(scores, gradients of the vectors); the loss is the cross-entropy of the first held item, and ``of_rows``."""
        factors = dropout.of_rows(torch.arange(ITEMS), self.table.shape[2], share, self.table.dtype)
        scores = cosine_pool(*pooling, self.table if factors is None else self.table * factors)
        rows = self.table.gather(1, held.unsqueeze(2).expand_as(of_rows))
        loss = torch.nn.functional.cross_entropy(9.0 * scores, held[:, 0], reduction="sum") + (rows * of_rows).sum()
        self.table.grad, of_vectors = torch.autograd.grad(loss, [self.table, pooling.vectors])
        self.adam.step()
        return scores.detach(), of_vectors


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("count, d, share, best", [(5, 20, 0.1, 0.9), (19, 22, 0.5, 0.3), (1, 16, 0.0, 1.0)])
def test_steps(dtype, own, count, d, share, best):
    generator = torch.Generator().manual_seed(count)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    table = randn(C, ITEMS, d) if own else randn(ITEMS, d).expand(C, -1, -1)
    before, rate = table.clone(), 0.05
    ours, theirs = ops.CosineTables(table, rate, (0.9, 0.98), 1e-4), Theirs(table, rate)
    for number in range(3):
        mask = torch.rand(C, count, generator=generator) < 0.7
        mask[:, 0] = True
        vectors = (randn(C, count, d) * mask.unsqueeze(2)).requires_grad_()
        pooling = Pooling(vectors, mask, best, (1.0 - best) * torch.rand(C, generator=generator, dtype=dtype))
        held, of_rows = torch.randint(0, ITEMS, (C, 30), generator=generator), 0.1 * randn(C, 30, d)
        dropout = Dropout(torch.randint(-1 << 60, 1 << 60, (C,), generator=generator))
        ours.score(pooling._replace(each=pooling.each.double()), dropout.keys, share)  # taken in the tables' precision
        loss = torch.nn.functional.cross_entropy(9.0 * ours.scores, held[:, 0], reduction="sum")
        of_scores, = torch.autograd.grad(loss, [ours.scores])
        of_vectors = ours.step(of_scores, held)
        ours.step_held(of_rows)
        scores, wanted = theirs.step(pooling, dropout, share, held, of_rows)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(ours.scores.detach(), scores, **tolerance)
        torch.testing.assert_close(of_vectors, wanted, **tolerance)
        torch.testing.assert_close(ours.table, theirs.table.detach(), **tolerance)
        assert torch.equal(table, before), "what the clients began with is the server's"


def test_slopes_too_small_to_matter_leave_rows_where_they_are():
    table, vectors = torch.randn(1, ITEMS, 8), torch.randn(1, 2, 8)
    ours = ops.CosineTables(table, 0.1, (0.9, 0.999), 1e-8)
    ours.score(Pooling(vectors, torch.ones(1, 2, dtype=torch.bool), 1.0, torch.zeros(1)), None, 0.0)
    slopes = torch.full((1, ITEMS), 1e-25)
    slopes[0, 7] = 0.5
    ours.step(slopes, torch.zeros(1, 1, dtype=torch.int64))
    ours.step_held(torch.zeros(1, 1, 8))
    assert (ours.table != table).any(2).flatten().nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("name, own_start", [("miasrec", True), ("dmi-gnn", False)])
def test_a_round_equals_one_without_kernels(registry, monkeypatch, name, own_start):
    backbone = build(registry, "backbone", name, dim=12, max_length=6, lr=0.02)
    step = session_stream(session_log(40), 40).steps[0]
    settings, method = LocalSettings("adam", local_epochs=3), Method(NoSettings())
    model = grown(backbone, step, 5)
    clipped = type("Clipped", (type(backbone),), {"gradient_norm": 0.05})(backbone.settings)  # over all parameters
    assert choose_strategy(clipped, method, model, settings, sessions=True) is Strategy.SESSIONS
    results = []
    for there in (True, False):
        if not there:
            monkeypatch.setattr(strategies, "_compiles_softmax", lambda *_: False)
        chunks = make_session_chunks(step, torch.arange(step.n_users), 3)
        results.append(train_round(chunks, model, backbone, method, settings, 5, 0, 0, own_start=own_start))
    (ours, our_loss, _), (theirs, their_loss, _) = results
    assert our_loss == pytest.approx(their_loss, rel=1e-9)
    for key, value in {**theirs.public, **theirs.dense}.items():
        torch.testing.assert_close({**ours.public, **ours.dense}[key], value, rtol=1e-6, atol=1e-7)
