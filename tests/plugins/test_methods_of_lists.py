"""CanonFedRec, FedCIA, CoLR and SCAFFOLD: rounds are those of one client at a time; bytes, settings, limits."""

from types import SimpleNamespace

import oracle
import pytest
import torch
from helpers import ITEM, USER, assert_same, build, federation, finish, module_of, same_clients, train_round

from fedcl_bench import LocalSettings, Snapshot, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.rng import DrawKey, mean_laplace
from fedcl_bench.testing.worlds import growing_stream
from fedcl_bench.training.sampling import Needs, make_chunks

LOCAL = LocalSettings(batch_size=8)
BACKBONES = {"fedmf": {"lr": 0.05, "dim": 4, "init_std": 0.3}, "fedncf": {"lr": 0.01, "lr_eta": 1.0, "dim": 4},
             "pfedrec": {"lr": 0.02, "lr_eta": 1.0, "dim": 4}, "ncf": {"lr": 0.05, "dim": 4, "hidden": (6,)}}


def parts(registry, method, backbone="fedmf", settings=(), local=LOCAL, of_backbone=(), **server):
    stream, method = growing_stream(14, 30), build(registry, "method", method, **dict(settings))
    inner = build(registry, "backbone", backbone, **{**BACKBONES.get(backbone, {}), **dict(of_backbone)})
    return federation(registry, stream, method, method.trained_backbone(inner, stream.steps[-1].n_users), 3, 2,
                      local, precision="float64", **server)


def first_row(*given, **settings):
    """What the first round says of itself."""
    return next(run(parts(*given, **settings))).curve[0]


@pytest.mark.parametrize("method, backbone, more, said", [
    ("canonfedrec", "fedncf", {}, "'canonfedrec' turns item vectors that scores are inner products with, of whi"),
    ("fedcia", "fedrap", {}, "'fedcia' compares items by inner products of their rows, which 'fedrap' has"),
    ("colr", "fedmf", {"settings": {"rank": 5}},
     "'rank': found 5, accepted: at most the numbers of a row of 'item_embed.*4"),
    ("colr", "fedmf", {"upload_clip": 1.0}, "'upload_clip': found 1, accepted: 0 with method 'colr'"),
    ("colr", "gpfedrec", {"of_backbone": {"hidden": ()}}, "clients of 'gpfedrec' keep or send theirs"),
    ("scaffold", "fedmf", {"local": LocalSettings("adam")},
     "'optimiser': found adam, accepted: sgd with method 'scaffold'")])
def test_what_does_not_go_together(registry, method, backbone, more, said):
    with pytest.raises(UserError, match=said):
        parts(registry, method, backbone, **more).check()


# CanonFedRec


@pytest.mark.parametrize("backbone, optimiser, batch, settings", [
    ("fedmf", "adam", 8, {"spread_floor": 0.1, "uniformity_weight": 0.5}),
    ("fedmf", "adam", 3, {"spread_floor": 1.0}),  # with local batches without a positive
    ("pfedrec", "sgd", 100, {"spread_floor": 1.0, "anchor_share": 0.7, "sphere_step": 1.5}),
    ("fedmf", "sgd", 8, {"client_loss": "backbone"})])
def test_canonfedrecs_rounds_equal_the_oracle(registry, backbone, optimiser, batch, settings):
    f = parts(registry, "canonfedrec", backbone, settings, LocalSettings(optimiser, batch_size=batch),
              {"item_lr": "plain"} if backbone == "fedmf" else {}, weighting="interactions")
    f.check()
    seen, spread, s = [], None, f.method.settings
    for progress in run(f, observe=lambda key, model, trained: seen.append((key, model))):
        if not seen:
            continue
        key, sent = seen[0]
        train = f.stream.steps[key.step].train
        lists = {user: train.of(user).tolist() for user in (train.lengths > 0).nonzero().flatten().tolist()}
        kind = oracle.OnTheSphere if s.client_loss == "alignment" else oracle.Round
        plain = kind(seed=3, step=key.step, round=key.round, backbone=backbone, settings=f.backbone.settings,
                     optimiser=optimiser, batch_size=batch, epochs=1, negatives=4)
        plain.spread, plain.method = spread, s
        _, uploads, private = plain.run(lists, sent, oracle.nothing)
        drawn = {}
        for user in lists:
            number = oracle.stream(3, "canonfedrec anchors", key.step, key.round, user)
            drawn[user] = sorted(range(sent.n_items), key=lambda item: number(item) >> 1)
        table, spread = oracle.on_the_sphere(sent.public[ITEM], {user: each[ITEM] for user, each in uploads.items()},
                                             {user: len(items) for user, items in lists.items()}, drawn, s)
        torch.testing.assert_close(progress.model.public[ITEM], table, atol=1e-9, rtol=1e-9)
        same_clients(progress.model.private, private)
        if s.client_loss == "alignment":
            torch.testing.assert_close(f.method.server_state[f"spread of {ITEM}"], spread, atol=1e-9, rtol=1e-9)
            row = progress.curve[-1]
            assert row["bytes_down"] - row["bytes_up"] == 8 * sent.n_items
        seen.clear()
        if (key.step, key.round) == (1, 0):
            return


@pytest.mark.parametrize("dtype, exact", [(torch.float64, 1e-8), (torch.float32, 1e-3)])
def test_sums_of_tangents(registry, dtype, exact):
    """On the circle, where an angle is all of a tangent; near the sphere's other side they stay finite."""
    made = module_of(registry, "method", "canonfedrec").Tangents
    angles = torch.tensor([[0.0, 1e-3, 1.0, 3.1], [0.5, -2.0, 1e-5, -3.0]], dtype=dtype)
    base = torch.tensor([[1.0, 0.0]], dtype=dtype).expand(4, 2)
    weights = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.5, 0.0, 7.0, 1.0]], dtype=torch.float64)
    tangents = made(base, 2.0 * torch.stack([angles.cos(), angles.sin()], 2))
    expected = torch.stack([torch.zeros(4, dtype=torch.float64), (weights * angles).sum(0)], 1)
    torch.testing.assert_close(tangents.sum(weights), expected, atol=exact, rtol=0.0)
    torch.testing.assert_close(tangents.angles, angles.abs().double(), atol=exact, rtol=0.0)
    far = made(base[:1], -base[:1, None].expand(3, 1, 2).clone()).sum(torch.ones(3, 1, dtype=torch.float64))
    assert far.isfinite().all() and float(far.norm()) < 10.0


# FedCIA


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_round_of_fedcia_equals_autograd(registry, noise):
    """A round is local training of one's own, and steps that autograd and SGD take one client at a time."""
    like = {"of_backbone": {"lr": 0.5}}
    alone = next(run(parts(registry, "alone", settings={"own_rate": 2.0}, **like)))  # trains alike, from the same start
    f = parts(registry, "fedcia", settings={"own_rate": 2.0, "align_steps": 3, "align_lr": 0.02, "align_decay": 0.1,
                                            "similarity_noise": noise}, **like)
    found, tables = next(run(f)), alone.model.private[ITEM]
    users = f.stream.steps[0].train.lengths.nonzero().flatten().tolist()
    mean = sum(tables[user] @ tables[user].T for user in users) / len(users)
    if noise:
        mean = mean + mean_laplace(3, 0, 0, "similarity", tuple(mean.shape), noise, len(users))
    moved = 0.0
    for user, start in enumerate(tables):
        table = torch.nn.Parameter(start.clone())
        optimiser = torch.optim.SGD([table], lr=0.02, weight_decay=0.1)
        for _ in range(3 if user in users else 0):
            optimiser.zero_grad()
            torch.norm(table @ table.T - mean, p=2).backward()
            optimiser.step()
        torch.testing.assert_close(found.model.private[ITEM][user], table.detach(), atol=1e-9, rtol=1e-9)
        moved = max(moved, float((table.detach() - start).abs().max()))
    assert moved > 1e-3
    torch.testing.assert_close(found.model.private[USER], alone.model.private[USER])
    assert found.curve[0]["bytes_up"] == found.curve[0]["bytes_down"] == 8 * len(tables[0]) ** 2


# CoLR: A trained by torch.optim beside the table is what the engine trains along a basis.

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
def test_a_round_of_colr_equals_the_oracle(registry, monkeypatch, optimiser, basis, factor_lr, mean):
    step, backbone = growing_stream(14, 30).steps[0], build(registry, "backbone", "fedmf", lr=LR, dim=D)
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


def test_of_full_rank_it_is_fedavg(registry):
    """With r = d the directions are a rotation, which leaves gradients as they are."""
    assert_same(finish(parts(registry, "colr", settings={"rank": 4})), finish(parts(registry, "ft")), 1e-12)


# SCAFFOLD: Algorithm 1 on whole tables.


@pytest.mark.parametrize("backbone, ratio", [("fedmf", 0.5), ("fedncf", 1.0), ("pfedrec", 0.7), ("ncf", 0.7)])
def test_scaffolds_rounds_equal_the_oracle(registry, backbone, ratio):
    f = parts(registry, "scaffold", backbone, local=LocalSettings(batch_size=8, local_epochs=2), client_ratio=ratio)
    seen, controls = [], None
    for progress in run(f, observe=lambda key, model, trained: seen.append((key, model, trained.users))):
        if not seen:
            continue
        key, sent, _ = seen[0]
        train = f.stream.steps[key.step].train
        users = sorted(torch.cat([users for *_, users in seen]).tolist())
        controls = oracle.Controls() if key.round == 0 else controls  # anew in every block
        plain = oracle.Round(seed=3, step=key.step, round=key.round, backbone=backbone, settings=f.backbone.settings,
                             optimiser="sgd", batch_size=8, epochs=2, negatives=4)
        public, private = controls.run(plain, {user: train.of(user).tolist() for user in users}, sent)
        for name, expected in public.items():
            found = {**progress.model.public, **progress.model.dense}[name]
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
            torch.testing.assert_close(f.method.server_state[f"control of {name}"], controls.server[name], atol=1e-9,
                                       rtol=1e-9)
        same_clients(progress.model.private, private)
        seen.clear()
        if (key.step, key.round) == (1, 0):
            break
    assert max(float(table.abs().max()) for table in controls.server.values()) > 1e-4


def test_bytes(registry):
    """CoLR's are of factors, and counts of senders; SCAFFOLD's controls go up and down, with a number of its own."""
    ft, plain, counts, controls = (first_row(registry, method, settings=settings) for method, settings in (
        ("ft", {}), ("colr", {"rank": 1}), ("colr", {"rank": 1, "mean": "senders"}), ("scaffold", {})))
    assert ft["bytes_up"] == 4 * plain["bytes_up"] == 2 * counts["bytes_up"]
    assert ft["bytes_down"] == plain["bytes_down"] == counts["bytes_down"]
    assert controls["bytes_up"] == 2 * ft["bytes_up"] + 16 and controls["bytes_down"] == 2 * ft["bytes_down"]
