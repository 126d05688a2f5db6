"""The oracle: federated rounds as the papers write them, one client at a time, on full tables.

It deep-copies a RecBole model per client, trains it with torch.optim on samples listed in Python, and averages whole
tables. It shares no code with the engine; even the random numbers are an implementation of its own, on Python integers.
"""

from __future__ import annotations

import copy
import hashlib
import math

import torch
from recbole.model.general_recommender import BPR

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def stream(seed, purpose, *counters):
    """The i-th number of the stream named by seed, purpose and counters, as a function of i."""
    state = mix((seed + GAMMA) & MASK)
    for c in (int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little"), *counters):
        state = mix((state + GAMMA * ((c + 1) & MASK)) & MASK)
    return lambda i: mix((state + GAMMA * (i + 1)) & MASK)


class Sizes:
    def __init__(self, users, items):
        self.sizes = {"user_id": users, "item_id": items}

    def num(self, field):
        return self.sizes[field]


def recbole_bpr(users, items, dim, dtype):
    config = {"USER_ID_FIELD": "user_id", "ITEM_ID_FIELD": "item_id", "NEG_PREFIX": "neg_", "device": "cpu",
              "embedding_size": dim}
    return BPR(config, Sizes(users, items)).to(dtype)


def scores(model, items):
    """Logits of one client's model for a list of items, by RecBole's own predict."""
    return model.predict({"user_id": torch.zeros(len(items), dtype=torch.long),
                          "item_id": torch.as_tensor(items, dtype=torch.long)})


class Round:
    """Everything that fixes one round: see ``tests/test_oracle.py`` for the values."""

    def __init__(self, *, seed, step, round, lr, item_lr, optimiser, batch_size, epochs, negatives):
        self.seed, self.step, self.round = seed, step, round
        self.lr, self.item_lr, self.optimiser = lr, item_lr, optimiser
        self.batch_size, self.epochs, self.negatives = batch_size, epochs, negatives

    def samples(self, user, positives, n_items):
        others = sorted(set(range(n_items)) - set(positives))
        number = stream(self.seed, "negatives", self.step, self.round, user)
        drawn = [others[((number(j) >> 32) * len(others)) >> 32] for j in range(self.negatives * len(positives))]
        return list(positives) + drawn, [1.0] * len(positives) + [0.0] * len(drawn)

    def client(self, user, positives, server, vector, added_loss):
        """Train one client; returns its model."""
        model = copy.deepcopy(server)
        with torch.no_grad():
            model.user_embedding.weight[0] = vector
        items, labels = self.samples(user, positives, model.n_items)
        labels = torch.tensor(labels, dtype=vector.dtype)
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[self.optimiser]
        optimiser = kind([{"params": model.user_embedding.parameters(), "lr": self.lr},
                          {"params": model.item_embedding.parameters(), "lr": self.item_lr}])
        batch = 0
        for epoch in range(self.epochs):
            number = stream(self.seed, "shuffle", self.step, self.round, epoch, user)
            order = sorted(range(len(items)), key=lambda i: number(i) >> 1)
            for start in range(0, len(items), self.batch_size):
                some = order[start:start + self.batch_size]
                loss = torch.nn.BCEWithLogitsLoss()(scores(model, [items[i] for i in some]), labels[some])
                loss = loss + added_loss(self, user, model, batch)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                batch += 1
        return model

    def run(self, train, private, public, added_loss):
        """One round of the clients in ``train`` (user to positives): (mean item table, new private table)."""
        server = recbole_bpr(1, len(public), public.shape[1], public.dtype)
        with torch.no_grad():
            server.item_embedding.weight.copy_(public)
        uploads, private = [], private.clone()
        for user, positives in train.items():
            model = self.client(user, positives, server, private[user], added_loss)
            uploads.append(model.item_embedding.weight.detach().clone())
            private[user] = model.user_embedding.weight[0].detach()
        return torch.stack(uploads).mean(0), private


def nothing(round, user, model, batch):
    return 0.0


def reg(old_private, old_public, weight, reduction):
    def added(round, user, model, batch):
        mse = torch.nn.MSELoss(reduction=reduction)
        loss = mse(model.item_embedding.weight[:len(old_public)], old_public)
        if user < len(old_private):
            loss = loss + mse(model.user_embedding.weight[0], old_private[user])
        return weight * loss
    return added


def distillation(old_private, old_public, weight, n, eps=None):
    """KD, or F3CRec's adaptive replay if ``eps`` is given."""
    def added(round, user, model, batch):
        if user >= len(old_private):
            return 0.0
        teacher = old_private[user] @ old_public.T
        top = teacher.argsort(descending=True)[:n].tolist()
        if eps is not None:
            with torch.no_grad():
                now = scores(model, range(model.n_items))
            shift = sum(abs(1 + int((now > now[item]).sum()) - k) for k, item in enumerate(top, start=1))
            size = math.floor(math.exp(-eps * shift) * n)
            if size == 0:
                return 0.0
            number = stream(round.seed, "replay", round.step, round.round, batch, user)
            top = [top[k] for k in sorted(range(n), key=lambda k: number(k) >> 1)[:size]]
        target = torch.sigmoid(teacher[top])
        return weight * torch.nn.BCEWithLogitsLoss()(scores(model, top), target)
    return added


def temporal_mean(mean, previous, beta):
    """F3CRec's server, item by item."""
    result = mean.clone()
    for i in range(len(previous)):
        phi = float(((previous[i] - mean[i]) ** 2).sum()) / math.sqrt(mean.shape[1])
        gamma = beta / (1 + phi)
        result[i] = (1 - gamma) * mean[i] + gamma * previous[i]
    return result
