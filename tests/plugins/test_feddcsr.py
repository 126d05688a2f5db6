"""FedDCSR: its terms and settings against plain loops in float64, where gradients go, and what leaves a domain."""

import math

import numpy as np
import pytest
import torch
from domain_oracle import affine, attention, batch_of, histories_of, normalised
from helpers import build, module_of

from fedcl_bench.plugin.silo import DomainData

USERS = ([0, 1, 2, 1, 2], [3, 1, 2], [4], [2, 1, 5, 5, 0])
SMALL = dict(dim=4, heads=2, layers=2, max_length=5, anchor_rows=3, dropout=0.0)


def domain(users=USERS, n_items=7):
    return DomainData(len(users), n_items, None, histories_of(users))


BATCH, TARGETS = batch_of([0, 1], [3, 1, 2, 1], [4], [5, 2, 1]), torch.tensor([2, 6, 0, 5])


def make(registry, anchor=True, **settings):
    """A module in float64 with parameters that are not those of its start, and the server's representations."""
    torch.manual_seed(1)
    module = build(registry, "backbone", "feddcsr", **SMALL | settings).module(domain()).double()
    for value in module.parameters():
        torch.nn.init.normal_(value, std=0.4)
    if anchor:
        module.anchor.normal_()
    return module


# The oracle: one sample and one position at a time.

class Oracle:
    """The loss of one batch, given the noise in the order in which it is drawn."""

    def __init__(self, module, noise=(), shuffled=()):
        self.s, self.noise, self.shuffled = module.s, [each.numpy() for each in noise], list(shuffled)
        self.p = {name: value.detach().numpy() for name, value in module.named_parameters()}
        self.anchor, self.step = module.anchor.numpy().copy(), int(module.batches)

    def window(self, history):
        padding = [-1] * (self.s.max_length - len(history))
        return [*padding, *history] if self.s.padding == "before" else [*history, *padding]

    def vectors(self, part):
        raw = self.p[f"{part}.items"]
        steps = [raw]
        for bias in self.p[f"{part}.graph_biases"]:
            after = np.zeros_like(raw)
            for item in range(len(raw)):
                followers = [b for user in USERS for a, b in zip(user, user[1:]) if a == item]
                after[item] = sum((steps[-1][b] for b in followers), 0 * raw[0]) / max(len(followers), 1)
            steps.append(after + bias)
        total = sum(steps)
        return total if self.s.item_vectors == "once" else total / len(steps) + raw

    def attention(self, name, x, real):
        d, x = self.s.dim, x * real[:, None]
        for k in range(self.s.layers):
            p = {key[len(name) + 1:]: value for key, value in self.p.items() if key.startswith(name + ".")}
            weight, bias = p[f"inputs.{k}.weight"], p[f"inputs.{k}.bias"]
            asked = np.stack([normalised(row, p, f"query_norms.{k}", 1e-8) for row in x])
            mixed = attention(*(rows @ weight[i * d:(i + 1) * d].T + bias[i * d:(i + 1) * d]
                                for i, rows in enumerate((asked, x, x))), self.s.heads)
            out = np.stack(mixed) @ p[f"outputs.{k}.weight"].T + p[f"outputs.{k}.bias"]
            x = np.stack([normalised(row, p, f"norms.{k}", 1e-8) for row in asked + out])
            inner = np.maximum(x @ p[f"inner.{k}.weight"].T + p[f"inner.{k}.bias"], 0)
            x = (x + inner @ p[f"outer.{k}.weight"].T + p[f"outer.{k}.bias"]) * real[:, None]
        return np.stack([normalised(row, self.p, f"{name}.norm", 1e-8) for row in x])

    def encode(self, part, vectors, windows, noise=None):
        """Means, log-variances and draws, (B, L, d) each.

        Args:
            noise: of every item, without padding.
        """
        means, logs = [], []
        for window in windows:
            x = np.stack([normalised(vectors[max(item, 0)] * math.sqrt(self.s.dim) + self.p[f"{part}.positions"][i],
                                     self.p, f"{part}.norm") for i, item in enumerate(window)])
            real = np.array([item >= 0 for item in window], dtype=float)
            means.append(self.attention(f"{part}.encoder.mean", x, real))
            logs.append(self.attention(f"{part}.encoder.log_variance", x, real))
        mean, log = np.stack(means), np.stack(logs)
        places = [(i, j) for i, window in enumerate(windows) for j, item in enumerate(window) if item >= 0]
        drawn = mean.copy()
        for (i, j), values in zip(places, () if noise is None else noise):
            drawn[i, j] += np.exp(log[i, j] / 2) * values
        return mean, log, drawn

    def logits(self, z):
        return z @ self.p["output.weight"].T + self.p["output.bias"]

    def last(self, window):
        return max(i for i, item in enumerate(window) if item >= 0)

    def mean(self, histories, windows, value):
        """Of value(sample, position) where the next item is predicted."""
        if self.s.predicts == "last":
            return np.mean([value(i, self.last(window)) for i, window in enumerate(windows)])
        values = [value(i, j) for i, window in enumerate(windows) for j, item in enumerate(window) if item >= 0]
        return sum(values) / (len(windows) * self.s.max_length if self.s.averaged_over == "all" else len(values))

    def prediction(self, histories, targets, windows, z):
        def value(i, j):
            first = min(p for p, item in enumerate(windows[i]) if item >= 0)
            target = [*histories[i][1:], targets[i]][j - first]
            logits = self.logits(z[i, j])
            return np.log(np.exp(logits).sum()) - logits[target]
        return self.mean(histories, windows, value)

    def divergence(self, histories, windows, mean, log):
        return self.mean(histories, windows, lambda i, j: 0.5 * sum(
            math.exp(v) + m * m - 1 - v for m, v in zip(mean[i, j], log[i, j])))

    def discriminator(self, z, anchor):
        x = np.concatenate([z.ravel(), anchor.ravel()])
        for k in (0, 2):
            x = np.maximum(affine(x, self.p, f"discriminator.layers.{k}"), 0)
        return 1 / (1 + math.exp(-affine(x, self.p, "discriminator.layers.4")[0]))

    def similarity(self, windows, shared, negative):
        terms = []
        for i, window in enumerate(windows):
            mask = np.array([item >= 0 for item in window], dtype=float)[:, None]
            anchor = self.anchor[i % self.s.anchor_rows] * mask
            terms.append(max(0.0, self.s.margin - self.discriminator(shared[i] * mask, anchor)
                             + self.discriminator(negative[i] * mask, anchor)))
        return np.mean(terms)

    def contrast(self, first, second):
        terms, views = [], [*first, *second]
        for i, vector in enumerate(views):
            other = (i + len(first)) % len(views)
            cosines = [vector @ each / np.linalg.norm(vector) / np.linalg.norm(each) / self.s.temperature
                       for each in views]
            terms.append(math.log(sum(math.exp(c) for j, c in enumerate(cosines) if j != i)) - cosines[other])
        return np.mean(terms)

    def loss(self, histories, targets):
        s, noise = self.s, iter(self.noise)
        windows = [self.window(history) for history in histories]
        of_items = self.vectors("exclusive")
        mean_s, log_s, z_s = self.encode("shared", self.vectors("shared"), windows, next(noise))
        mean_e, log_e, z_e = self.encode("exclusive", of_items, windows, next(noise))
        weight = min(s.kl_cap, self.step / s.kl_batches)
        loss = self.prediction(histories, targets, windows, z_s + z_e)
        loss += weight * (self.divergence(histories, windows, mean_s, log_s)
                          + self.divergence(histories, windows, mean_e, log_e))
        if s.similarity_weight and self.anchor.any():
            negative = self.encode("exclusive", of_items, windows, next(noise))[2] if s.negative == "again" else z_e
            loss += s.similarity_weight * self.similarity(windows, z_s, negative)
        loss += s.exclusive_weight * self.prediction(histories, targets, windows, z_e)
        if s.contrast_weight:
            mixed = iter(self.shuffled)
            others = [self.window([next(mixed) for _ in history]) for history in histories]
            views = self.encode("exclusive", of_items, others, next(noise))[2]
            places = [self.last(window) for window in windows]
            loss += s.contrast_weight * self.contrast(*([z[i, j] for i, j in enumerate(places)] for z in (z_e, views)))
        return loss


SETTINGS = [{}, {"padding": "after", "heads": 1, "temperature": 0.5}, {"predicts": "all", "margin": 0.9},
            {"predicts": "all", "averaged_over": "items", "kl_batches": 50},
            {"predicts": "all", "padding": "after", "layers": 1},
            {"item_vectors": "once", "kl_cap": 0.001, "exclusive_weight": 0.3},
            {"graph_layers": 2, "negative": "same", "anchor_rows": 4},
            {"similarity_weight": 0.0}, {"contrast_weight": 0.0}]


def losses(registry, monkeypatch, **settings):
    """The module's loss and the oracle's of the same noise."""
    module = make(registry, **settings)
    module.batches += 40
    noise, views, draw = [], [], torch.randn_like
    plugin = module_of(registry, "backbone", "feddcsr")
    shuffle = plugin.Items.shuffled
    monkeypatch.setattr(torch, "randn_like", lambda x: noise.append(draw(x)) or noise[-1])
    monkeypatch.setattr(plugin.Items, "shuffled", lambda items: views.append(shuffle(items)) or views[-1])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    loss = module.loss(BATCH, TARGETS)
    monkeypatch.undo()
    module.load_state_dict(before)
    histories = [row[row >= 0].tolist() for row in BATCH.items]
    oracle = Oracle(module, noise, views[0].numbers.tolist() if views else ())
    return float(loss.detach()), oracle.loss(histories, TARGETS.tolist())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_loss_is_the_sum_of_its_terms(registry, monkeypatch, settings):
    loss, expected = losses(registry, monkeypatch, **settings)
    assert loss == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("padding", ["before", "after"])
def test_items_are_ranked_by_the_means_alone_and_by_what_comes_before(registry, padding):
    module = make(registry, padding=padding).eval()
    scores = module.scores(BATCH)
    oracle = Oracle(module)
    for row, items in zip(scores, BATCH.items):
        window = oracle.window([item for item in items.tolist() if item >= 0])
        means = [oracle.encode(part, oracle.vectors(part), [window])[0][0] for part in ("shared", "exclusive")]
        assert row.detach().numpy() == pytest.approx(oracle.logits(sum(means)[oracle.last(window)]), rel=1e-10)
    narrow = module.scores(batch_of([0, 1]))
    assert torch.equal(narrow[0], scores[0]) or torch.allclose(narrow[0], scores[0], rtol=1e-12)


def gradients(registry, **settings):
    """Names of parameters with a gradient that is not zero."""
    module = make(registry, **settings)
    module.batches += 40
    module.loss(BATCH, TARGETS).backward()
    assert not module.anchor.requires_grad and not module.sent.requires_grad
    return {name for name, value in module.named_parameters() if value.grad is not None and value.grad.any()}


def test_every_parameter_is_trained_and_each_term_reaches_its_part(registry):
    names = {name for name, _ in make(registry, dim=8).named_parameters()}
    assert gradients(registry, dim=8, margin=2.0) == names
    assert gradients(registry, dim=8, similarity_weight=0.0) == {n for n in names if not n.startswith("discriminator")}


def test_the_servers_representations_stay_or_are_eroded(registry):
    for anchor, expected in (("kept", False), ("eroded", True)):
        module = make(registry, anchor=True)
        module.s = build(registry, "backbone", "feddcsr", **SMALL, anchor=anchor).settings
        before = module.anchor.clone()
        module.loss(BATCH, TARGETS)
        mask = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).unsqueeze(2)
        assert torch.equal(module.anchor, before * mask if expected else before)


def test_a_domain_sends_its_shared_encoder_and_representations_alone(registry):
    method = build(registry, "method", "feddcsr")
    module = make(registry)
    module.loss(BATCH, TARGETS)
    with torch.no_grad():
        sent = method.upload(module, None)
    encoder = {name for name, _ in module.named_parameters() if name.startswith("shared.encoder.")}
    assert set(sent) == encoder | {"anchor"} and len(encoder) == 2 * (2 * 12 + 2)
    assert sent["anchor"].shape == (3, 5, 4)
    real = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)
    assert torch.equal(sent["anchor"].abs().sum(2) > 0, real)
    other = build(registry, "backbone", "feddcsr", **SMALL).module(domain([[0, 1]] * 9, 2)).double()
    other.loss(batch_of([0], [1]), torch.tensor([1, 0]))
    shapes = [{name: value.shape for name, value in each.items()} for each in (sent, method.upload(other, None))]
    assert shapes[0] == shapes[1]  # whatever the numbers of users, items and samples
    received = method.aggregate([sent, method.upload(other, None)], torch.tensor([0.75, 0.25]).double(), None)
    assert torch.allclose(received[0]["anchor"], 0.75 * sent["anchor"] + 0.25 * other.sent)
    assert set(received[1]) <= set(other.state_dict())
