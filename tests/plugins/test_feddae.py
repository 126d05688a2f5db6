"""FedDAE: a round equals a loop over clients that each train an ordinary module on a dense vector of zeros and ones."""

import math
from dataclasses import replace

import oracle
import pytest
import torch
from helpers import build, federation_of, grown, one_step, strategy_of, train_round, training
from torch import nn

from fedcl_bench import LocalSettings, UserError, score_users
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.protocols import list_chunks
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.runs.config import make_config
from fedcl_bench.testing.worlds import ragged
from fedcl_bench.training.strategies import Strategy

SEED, STEP, ITEMS = 3, 0, 9
LISTS = [[2, 0, 2, 5], [], [7], [1, 2, 3, 4, 8, 3], [6, 5]]  # an item twice, a client without any


class Watching(Method):
    """Adds nothing, and looks at how clients train."""

    name = "watching"

    def local_loss(self, batch):
        return 0.0 * batch.loss


class Client(nn.Module):
    """One client as in the paper, in the layout of PyTorch's linear layers."""

    def __init__(self, s, items):
        super().__init__()
        self.s = s
        sizes = [items, *s.hidden, 2 * s.dim]
        self.own, self.shared = (nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])) for _ in range(2))
        sizes = [s.dim, *s.hidden[::-1], items]
        self.decoder = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.gate = nn.ModuleList([nn.Linear(items, s.dim), nn.Linear(s.dim, 2)])
        self.draw = None  # (round, batch, user)

    def number(self, name):
        draw = oracle.stream(SEED, name, STEP, *self.draw)
        return lambda i: ((draw(i) >> 11) + 0.5) * 2.0 ** -53

    def drop(self, name, x):
        if self.draw is None:
            return x
        u = self.number(name)
        return x * torch.tensor([u(i) >= self.s.dropout for i in range(len(x))]) / (1.0 - self.s.dropout)

    def normal(self, name, d):
        u = self.number(name) if self.draw else None
        return torch.tensor([math.sqrt(-2 * math.log(u(2 * i))) * math.cos(2 * math.pi * u(2 * i + 1)) if u else 0.0
                             for i in range(d)], dtype=torch.float64)

    def encode(self, name, x):
        h = self.drop(name, x / x.norm())
        for k, layer in enumerate(getattr(self, name)):
            h = layer(torch.tanh(h) if k else h)
        mean, logvar = h[:self.s.dim], h[self.s.dim:]
        return mean, logvar.exp(), mean + (logvar / 2).exp() * self.normal(f"{name} z", self.s.dim)

    def forward(self, x):
        """Logits, mean and variance."""
        w1, w2 = torch.softmax(self.gate[1](self.drop("gate", torch.relu(self.gate[0](x)))), 0)
        (mean1, var1, z1), (mean2, var2, z2) = self.encode("own", x), self.encode("shared", x)
        h = w1 * z1 + w2 * z2
        for k, layer in enumerate(self.decoder):
            h = layer(torch.tanh(h) if k else h)
        return h, w1 * mean1 + w2 * mean2, w1 ** 2 * var1 + w2 ** 2 * var2

    def places(self):
        """Each parameter of the engine, as (the parameter here, whether it has a row per item)."""
        found = {}
        for part in ("own", "shared", "gate"):
            first, *others = getattr(self, part)
            found |= {f"{part}.items": (first.weight, True), f"{part}.bias": (first.bias, False)}
            for k, layer in enumerate(others):
                found |= {f"{part}.{k}.weight": (layer.weight, False), f"{part}.{k}.bias": (layer.bias, False)}
        *hidden, last = self.decoder
        for k, layer in enumerate(hidden):
            found |= {f"decoder.{k}.weight": (layer.weight, False), f"decoder.{k}.bias": (layer.bias, False)}
        return found, last

    def load(self, tables):
        places, last = self.places()
        with torch.no_grad():
            for name, (parameter, rows) in places.items():
                parameter.copy_(tables[name].T if rows else tables[name])
            last.weight.copy_(tables["decoder.items"][:, :-1])
            last.bias.copy_(tables["decoder.items"][:, -1])
        return self

    def tables(self):
        places, last = self.places()
        return {"decoder.items": torch.cat([last.weight, last.bias[:, None]], 1).detach(),
                **{name: (value.T if rows else value).detach() for name, (value, rows) in places.items()}}


def of_client(model, user):
    return {**model.public, **model.dense, **{name: table[user] for name, table in model.private.items()}}


def vector(items):
    return torch.zeros(ITEMS, dtype=torch.float64).index_fill_(0, torch.tensor(items), 1.0)


def trained(s, model, user, items, optimiser, epochs, round_):
    """A client's tables after its round."""
    client, x = Client(s, ITEMS).double().load(of_client(model, user)), vector(items)
    private = [p for part in ("own", "gate") for p in getattr(client, part).parameters()
               if s.restore == "paper"]
    still = [*client.gate.parameters()] if s.restore == "released" else []
    public = [p for p in client.parameters() if all(p is not other for other in (*private, *still))]
    by = [torch.optim.SGD(public, lr=s.lr_public)]
    if private:
        by.append({"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimiser](private, lr=s.lr))
    for epoch in range(epochs):
        client.draw = round_, epoch, user
        scores, mean, variance = client(x)
        growth = {"product": float(round_ == 0), "tanh": math.tanh(round_ / 10), "constant": 1.0}[s.kl_schedule]
        kl = 0.5 * (mean ** 2 + variance - 1 - torch.log(variance)).sum()
        client.zero_grad()
        (-(torch.log_softmax(scores, 0) * x).sum() + s.kl_weight * growth * kl).backward()
        for each in by:
            each.step()
    return client.tables()


@pytest.mark.parametrize("case, method, strategy", [
    (dict(optimiser="adam", epochs=1), Method, Strategy.HISTORIES),
    (dict(optimiser="sgd", epochs=3, hidden=(6, 5), kl_schedule="tanh"), Method, Strategy.HISTORIES),
    (dict(optimiser="adam", epochs=2, restore="released", hidden=(6,)), Method, Strategy.HISTORIES),
    (dict(optimiser="adam", epochs=2, round_=0), Watching, Strategy.WHOLE),
    (dict(optimiser="sgd", epochs=2, restore="released", kl_schedule="constant"), Watching, Strategy.WHOLE)])
def test_a_round_equals_a_loop_over_clients(registry, case, method, strategy):
    settings = {"optimiser": "adam", "epochs": 1, "round_": 4, "hidden": (), "restore": "paper",
                "kl_schedule": "product", **case}
    optimiser, epochs, round_ = (settings.pop(name) for name in ("optimiser", "epochs", "round_"))
    backbone = build(registry, "backbone", "feddae", lr=0.05, lr_public=0.3, dim=4, dropout=0.4, kl_weight=0.7,
                     **settings)
    step, method = one_step(ragged(*LISTS), ITEMS), method(NoSettings())
    generator = torch.Generator().manual_seed(1)
    start = grown(backbone, step, SEED)
    start = replace(start, **{kind: {name: table + 0.3 * torch.randn(table.shape, generator=generator).double()
                                     for name, table in getattr(start, kind).items()}
                              for kind in ("public", "private", "dense")})
    local = LocalSettings(optimiser=optimiser, local_epochs=epochs)
    assert strategy_of(backbone, method, start, local) is strategy
    users = [user for user, items in enumerate(LISTS) if items]
    chunks = list_chunks(step, torch.tensor(users), start, training(backbone, method, start, local))
    assert any(len(chunk.users) > 1 for chunk in chunks)  # of different lengths
    after, _, _ = train_round(chunks, start, backbone, method, local, SEED, STEP, round_)

    found = {user: trained(backbone.settings, start, user, LISTS[user], optimiser, epochs, round_) for user in users}
    moved = set()
    for name, table in {**start.public, **start.dense}.items():
        mean = sum(tables[name] for tables in found.values()) / len(found)
        ours = {**after.public, **after.dense}[name]
        torch.testing.assert_close(ours, mean, atol=1e-9, rtol=1e-9)
        moved |= {name} if float((ours - table).abs().max()) > 1e-3 else set()
    for name, table in start.private.items():
        for user in range(len(LISTS)):
            torch.testing.assert_close(after.private[name][user], found[user][name] if user in found else table[user],
                                       atol=1e-9, rtol=1e-9)
        moved |= {name} if float((after.private[name] - table).abs().max()) > 1e-3 else set()
    still = {name for name in {**start.public, **start.dense} if name.startswith("gate")}
    assert moved == {*start.public, *start.private, *start.dense} - still and bool(still) == (
        settings["restore"] == "released")
    with torch.no_grad():
        scores = score_users(backbone, after, torch.tensor(users))
        for user, ours in zip(users, scores):
            client = Client(backbone.settings, ITEMS).double().load(of_client(after, user))
            torch.testing.assert_close(ours, client(vector(LISTS[user]))[0], atol=1e-9, rtol=1e-9)


def configured(registry, **settings):
    return make_config(registry, "ft", "feddae", "ml-100k", overrides=[("test", {"k_core": 70, "rounds": 1,
                                                                                 **settings})])


@pytest.mark.parametrize("restore, encoders", [("paper", 1), ("released", 2)])
def test_clients_send_public_parameters(registry, restore, encoders):
    f = federation_of(configured(registry, restore=restore, dim=4, hidden=(6,)))
    progress = next(run(f))
    items = progress.model.n_items
    decoder = items * 7 + (4 * 6 + 6)
    encoder = items * 6 + 6 + (6 * 8 + 8)
    gate = (items * 4 + 4 + (4 * 2 + 2)) * (restore == "released")
    sent = 4 * (decoder + encoders * encoder + gate)
    assert progress.curve[0]["bytes_up"] == progress.curve[0]["bytes_down"] == sent  # of a client


def test_settings_that_do_not_fit_are_refused(registry):
    assert configured(registry).settings["server_optimiser"] == "adam"
    assert "server_optimiser" not in configured(registry, server_optimiser="none").settings  # back to the default
    for settings, message in (({"negatives": 2}, "'negatives' .* no effect with a backbone that trains on whole"),
                              ({"dropout": 1.0}, "'dropout'.*found 1.0, accepted: .* below 1"),
                              ({"restore": "code"}, "'restore'.*found 'code', accepted: one of paper, released"),
                              ({"stream": "sessions"}, "'feddae' trains on blocks or the static stream")):
        with pytest.raises(UserError, match=message):
            federation_of(configured(registry, **settings))
