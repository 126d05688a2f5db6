"""Plugins that break one constraint each; ``check`` must catch every one of them by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedcl_bench.backbone import BackboneSettings
from fedcl_bench.functional import weighted_bce
from fedcl_bench.method import Method
from fedcl_bench.runs.registry import discover
from fedcl_bench.settings import setting

FedMF = discover().get("backbone", "fedmf").cls
FCUCR = discover().get("method", "fcucr").cls


class _Cheater(Method):
    title = "breaks a constraint"
    first_step = 0


class MeanOfNeighbours(_Cheater):
    """(a) pulls every client's private parameters to the mean of the clients trained beside it."""
    name = "mean-of-neighbours"

    def local_loss(self, batch):
        return sum((value - value.detach().mean(0)).flatten(1).square().sum(1) for value in batch.private.values())


class ReadsOthersState(_Cheater):
    """(a) replays what another client trained on."""
    name = "reads-others-state"

    def begin_round(self, step, round_, backbone):
        self._first = torch.stack([step.train.of(u)[0] if len(step.train.of(u)) else torch.tensor(0)
                                   for u in range(step.n_users)])

    def replayed_items(self, users, draw):
        return self._first[(users + 1) % len(self._first)][:, None]

    def local_loss(self, batch):
        scores = batch.replay_scores(torch.arange(len(batch.users)))
        return weighted_bce(scores, torch.ones_like(scores), torch.ones_like(scores))


class UploadsPrivate(_Cheater):
    """(b) declares a statistic and sends the private user vector as it."""
    name = "uploads-private"

    def uploads(self, backbone, round_):
        return {"statistic": (backbone.settings.dim,)}

    def end_local(self, local):
        local.upload("statistic", next(iter(local.private.values())))


class UploadsUndeclared(_Cheater):
    """(b) sends something that it does not declare."""
    name = "uploads-undeclared"

    def end_local(self, local):
        local.upload("norm", next(iter(local.private.values())).norm(dim=1))


class UploadsOtherShape(_Cheater):
    """(b) sends more than it declares."""
    name = "uploads-other-shape"

    def uploads(self, backbone, round_):
        return {"norm": ()}

    def end_local(self, local):
        local.upload("norm", next(iter(local.private.values())) * 2.0)


class UploadsInteractions(_Cheater):
    """(b) marks the client's training items in a declared upload."""
    name = "uploads-interactions"

    def begin_round(self, step, round_, backbone):
        self._step = step

    def uploads(self, backbone, round_):
        return {"mask": (self._step.n_items,)} if hasattr(self, "_step") else {}

    def end_local(self, local):
        mask = torch.zeros(len(local.users), self._step.n_items)
        row, item = self._step.train.select(local.users)
        mask[row, item] = 1.0
        local.upload("mask", mask)


class KnowsPopularity(_Cheater):
    """(c) the server weighs its rows by how often clients interact with them."""
    name = "knows-popularity"

    def begin_round(self, step, round_, backbone):
        self._count = torch.bincount(step.train.values, minlength=step.n_items)

    def aggregate(self, public):
        return {name: table * (1.0 + 0.01 * self._count.to(table).view(-1, *[1] * (table.dim() - 1)))
                for name, table in public.items()}


class CarriesPrivate(_Cheater):
    """(c) puts private parameters into the server's state after a step."""
    name = "carries-private"

    def end_step(self, step, model, backbone, trained, draw):
        self.server_state = {"mean": next(iter(model.private.values())).mean(0)}


class PassesPrivateAround(_Cheater):
    """(c) a client's hook leaves a private parameter where the server's hook finds it."""
    name = "passes-private-around"

    def begin_round(self, step, round_, backbone):
        self._left = torch.zeros(step.n_users, dtype=torch.float64)

    def local_loss(self, batch):
        self._left[batch.users] = next(iter(batch.private.values())).detach().flatten(1).mean(1)

    def aggregate(self, public):
        return {name: table + 0.01 * self._left.sum() for name, table in public.items()}


class RereadsThePast(_Cheater):
    """(d) keeps the stream and replays the block before."""
    name = "rereads-the-past"
    first_step = 1

    def check(self, stream):
        self._stream = stream

    def begin_step(self, step, model, backbone):
        self._previous = self._stream.steps[step.index - 1].train

    def replayed_items(self, users, draw):
        first = torch.zeros(len(users), 1, dtype=torch.int64)
        for row, user in enumerate(users.tolist()):
            if user < len(self._previous.lengths) and self._previous.lengths[user]:
                first[row] = self._previous.of(user)[0]
        return first

    def local_loss(self, batch):
        scores = batch.replay_scores(torch.arange(len(batch.users)))
        return weighted_bce(scores, torch.ones_like(scores), torch.ones_like(scores))


class TrainsOnTest(RereadsThePast):
    """(e) replays what it is to be tested on."""
    name = "trains-on-test"
    first_step = 0

    def begin_step(self, step, model, backbone):
        pass

    def begin_round(self, step, round_, backbone):
        self._previous = step.test


class RanksTestFirst(_Cheater):
    """(e) looks the items to be found up when it scores."""
    name = "ranks-test-first"

    def check(self, stream):
        self._stream = stream

    def rescore(self, users, scores, model, backbone):
        step = next(step for step in self._stream.steps if step.n_items == model.n_items)
        scores = scores.clone()
        scores[step.test.select(users)] += 100.0
        return scores


class Forgets(_Cheater):
    """Keeps a count outside its declared state."""
    name = "forgets"

    def __init__(self, settings):
        super().__init__(settings)

    def begin_round(self, step, round_, backbone):
        self.rounds_seen = getattr(self, "rounds_seen", 0) + 1

    def aggregate(self, public):
        return {name: table * (1.0 + 0.01 * self.rounds_seen) for name, table in public.items()}


class KeepsInTheClass(_Cheater):
    """Keeps a count in the class, which new objects in the same process still see."""
    name = "keeps-in-the-class"
    count = 0

    def begin_round(self, step, round_, backbone):
        type(self).count = 3

    def aggregate(self, public):
        return {name: table * (1.0 + 0.01 * self.count) for name, table in public.items()}

    def begin_step(self, step, model, backbone):
        self.server_state = {"count": torch.tensor([float(self.count)])}


class ThrowsDice(_Cheater):
    """Draws from torch's global generator."""
    name = "throws-dice"

    def aggregate(self, public):
        return {name: table + 0.01 * torch.randn_like(table) for name, table in public.items()}


@dataclass(frozen=True)
class UnreadSettings:
    used: float = setting(0.9, "factor", above=0.0, high=1.0)
    unused: float = setting(0.5, "nobody reads this", low=0.0, high=1.0)


class IgnoresASetting(_Cheater):
    name = "ignores-a-setting"
    Settings = UnreadSettings

    def aggregate(self, public):
        return {name: table * self.settings.used for name, table in public.items()}


@dataclass(frozen=True)
class UnhelpfulSettings:
    strength: float = 0.5


class NoHelp(_Cheater):
    name = "no-help"
    Settings = UnhelpfulSettings


class WrongShape(_Cheater):
    name = "wrong-shape"

    def local_loss(self, batch):
        return next(iter(batch.private.values())).square().sum()


class DropsATable(_Cheater):
    name = "drops-a-table"

    def aggregate(self, public):
        return {}


# Backbones.

class UnknownRate(FedMF):
    name = "unknown-rate"

    def learning_rates(self, n_items, round_=0, batch=0):
        return {**super().learning_rates(n_items), "bias.weight": 0.1}


class UserTableIsPublic(FedMF):
    """(b) declares the users' vectors as public."""
    name = "user-table-is-public"

    def new_rows(self, seed, users, items):
        public, private = super().new_rows(seed, users, items)
        return {**public, **private}, {"unused": torch.zeros(len(users), 1, dtype=torch.float64)}


class NoGradient(FedMF):
    name = "no-gradient"

    def score(self, clients, rows):
        return super().score(clients, rows).detach()


class LeavesAClientOut(FedMF):
    """The first client of a group gets constant logits."""
    name = "leaves-a-client-out"

    def score(self, clients, rows):
        scores = super().score(clients, rows)
        alive = torch.ones(len(scores), 1, dtype=scores.dtype).index_fill(0, torch.tensor([0]), 0.0)
        return scores * alive


class StartsByPosition(FedMF):
    """A row's start depends on when the table grew."""
    name = "starts-by-position"

    def new_rows(self, seed, users, items):
        public, private = super().new_rows(seed, users, items)
        return {name: table + len(items) for name, table in public.items()}, private


@dataclass(frozen=True)
class OverflowSettings(BackboneSettings):
    dim: int = setting(4, "length of vectors", low=1)
    init_std: float = setting(0.01, "start", low=0.0)
    item_lr: str = setting("plain", "rates", choices=("times_items", "plain"))


class Overflows(FedMF):
    name = "overflows"
    Settings = OverflowSettings

    def loss(self, scores, labels, weights):
        p = torch.sigmoid(scores)
        return -((labels * p.log() + (1.0 - labels) * (1.0 - p).log()) * weights).sum(1)


class UnusedParameter(FedMF):
    name = "unused-parameter"

    def new_dense(self, seed):
        return {"bias": torch.ones(1, dtype=torch.float64)}

    def learning_rates(self, n_items, round_=0, batch=0):
        return {**super().learning_rates(n_items), "bias": 0.1}
