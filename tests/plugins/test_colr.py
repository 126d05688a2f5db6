"""CoLR: A trained by torch.optim beside the table is what the engine trains along a basis; bytes, settings, limits."""

from types import SimpleNamespace

import oracle
import pytest
import torch
from helpers import ITEM, USER, assert_same, build, federation, finish, same_clients, train_round

from fedcl_bench import LocalSettings, Snapshot, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.rng import DrawKey
from fedcl_bench.testing.worlds import growing_stream
from fedcl_bench.training.sampling import Needs, make_chunks

LR, D, R = 0.3, 6, 2


class LowRank(oracle.Client):
    """FedMF on Q + A B; A is the one public parameter, and its gradient is scaled as in the released code."""

    def __init__(self, settings, items):
        super().__init__(settings)
        self.user_embedding, self.item_factor = torch.nn.Embedding(1, D), torch.nn.Embedding(items, R)

    def forward(self, items):
        items = torch.as_tensor(items, dtype=torch.long)
        rows = self.settings.table[items] + self.item_factor(items) @ self.settings.basis
        return rows @ self.user_embedding.weight[0]

    def rate(self, name, n_items, round, batch):
        return LR * (n_items * self.settings.scale if "item" in name else 1)


@pytest.mark.parametrize("optimiser, basis, factor_lr, mean", [
    ("sgd", "orthonormal", "scaled", "senders"), ("sgd", "gaussian", "plain", "participants"),
    ("adam", "gaussian", "plain", "senders")])
def test_a_round_equals_the_oracle(registry, monkeypatch, optimiser, basis, factor_lr, mean):
    step, backbone = growing_stream().steps[0], build(registry, "backbone", "fedmf", lr=LR, dim=D)
    method = build(registry, "method", "colr", rank=R, basis=basis, factor_lr=factor_lr, mean=mean)
    local = LocalSettings(batch_size=8, local_epochs=2, optimiser=optimiser)
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(step.n_items, D, generator=generator, dtype=torch.float64)
    model = Snapshot({ITEM: table}, {USER: torch.randn(step.n_users, D, generator=generator, dtype=torch.float64)})
    users = (step.train.lengths > 0).nonzero().flatten()
    after, *_ = train_round(make_chunks(step, users, local, 16, Needs(False, False)), model, backbone, method, local,
                            3, 0, 4)

    scale = (R / D) ** 0.5 if factor_lr == "scaled" else 1.0
    b = method.row_basis(ITEM, D, DrawKey(3, 0, 4)) / scale ** 0.5
    monkeypatch.setitem(oracle.MODELS, "colr", LowRank)
    plain = oracle.Round(seed=3, step=0, round=4, backbone="colr", negatives=4, optimiser=optimiser, epochs=2,
                         batch_size=8, settings=SimpleNamespace(table=table, basis=b, scale=scale))
    zeros = Snapshot({"item_factor.weight": torch.zeros(step.n_items, R, dtype=torch.float64)},
                     {"user_embedding.weight": model.private[USER]})
    lists = {int(user): step.train.of(int(user)).tolist() for user in users}
    average, uploads, private = plain.run(lists, zeros, oracle.nothing)
    factor = average["item_factor.weight"]
    if mean == "senders":
        sent = torch.stack([upload["item_factor.weight"] for upload in uploads.values()])
        factor = sent.sum(0) / (sent != 0).any(2).sum(0).clamp(min=1)[:, None]
    torch.testing.assert_close(after.public[ITEM], table + factor @ b, atol=1e-9, rtol=1e-9)
    assert float((factor @ b).abs().max()) > 1e-3
    same_clients(after.private, private)


def test_directions(registry):
    """(1): orthonormal times sqrt(d/r), so that B'B is the identity in the mean; new in every round."""
    method = build(registry, "method", "colr", rank=2, factor_lr="plain")
    bases = [method.row_basis(ITEM, 6, DrawKey(0, 0, round_)) for round_ in range(400)]
    torch.testing.assert_close(bases[0] @ bases[0].T, 3.0 * torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(sum(b.T @ b for b in bases) / 400, torch.eye(6, dtype=torch.float64), atol=0.15, rtol=0)
    assert not torch.allclose(bases[0], bases[1])


def parts(registry, method, **settings):
    return federation(registry, growing_stream(), build(registry, "method", method, **settings),
                      build(registry, "backbone", "fedmf", lr=0.05, dim=4), 0, 2,
                      LocalSettings(batch_size=8), precision="float64")


def test_of_full_rank_it_is_fedavg(registry):
    """With r = d the directions are a rotation, which leaves gradients as they are."""
    assert_same(finish(parts(registry, "colr", rank=4)), finish(parts(registry, "ft")), 1e-12)


def test_bytes_are_those_of_factors_and_counts(registry):
    ft, plain, counts = (next(run(parts(registry, *each, **settings))).curve[0] for each, settings in (
        (["ft"], {}), (["colr"], {"rank": 1}), (["colr"], {"rank": 1, "mean": "senders"})))
    assert ft["bytes_up"] == 4 * plain["bytes_up"] == 2 * counts["bytes_up"]
    assert ft["bytes_down"] == plain["bytes_down"] == counts["bytes_down"]


def test_what_does_not_go_together(registry):
    with pytest.raises(UserError, match="'rank': found 5, accepted: at most the numbers of a row of 'item_embed.*4"):
        parts(registry, "colr", rank=5).check()
    with pytest.raises(UserError, match="'upload_clip': found 1, accepted: 0 with method 'colr'"):
        federation(registry, growing_stream(), build(registry, "method", "colr"), upload_clip=1.0).check()
    with pytest.raises(UserError, match="clients of 'gpfedrec' keep or send theirs"):
        federation(registry, growing_stream(), build(registry, "method", "colr"),
                   build(registry, "backbone", "gpfedrec", hidden=())).check()
