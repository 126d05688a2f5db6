"""Plugins that break one constraint each; ``check`` must catch every one of them by name."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace

import torch

from fedcl_bench import (BackboneSettings, Method, Pull, SequentialBackbone, SessionBackbone, SessionVectors,
                         SoftTargets, setting, zeros)
from fedcl_bench.kernels.functional import weighted_bce
from fedcl_bench.runs.registry import discover

FedMF = discover().get("backbone", "fedmf").cls


class _Named:
    """A plugin that is called as its class: ``ThrowsDice`` is throws-dice."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls.name = re.sub("(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


class _Cheater(_Named, Method):
    title = "breaks a constraint"
    first_step = 0


class _Rehearses(_Cheater):
    """Trains on the items that it replays."""

    def local_loss(self, batch):
        scores = batch.replay_scores(torch.arange(len(batch.users)))
        return weighted_bce(scores, torch.ones_like(scores), torch.ones_like(scores))


class _FindsTheStream(_Cheater):
    """Hooks see what trains; of the rest it takes hold where it is called."""

    def check(self, step):
        self._stream = sys._getframe(1).f_locals["self"].stream


class MeanOfNeighbours(_Cheater):
    """(a) pulls every client's private parameters to the mean of the clients trained beside it."""

    def local_loss(self, batch):
        return sum((value - value.detach().mean(0)).flatten(1).square().sum(1) for value in batch.private.values())


class _SendsSums(_Cheater):
    """Clients send the sum of their changes as one table."""

    def sums(self, backbone, n_items):
        return {"sum": (n_items, backbone.settings.dim)}

    def end_local(self, local):
        (rows, items), = local.changes.values()
        local.add("sum", rows, items)

    def aggregate_sums(self, sums, count, public, draw):
        return {name: sums["sum"] / count for name in public}


class KnowsWhoAddsToSums(_SendsSums):
    """(c) divides a sum by what each client is to keep for itself."""

    def end_local(self, local):
        super().end_local(local)
        self.client_state["loss"] = local.loss

    def aggregate_sums(self, sums, count, public, draw):
        return {name: sums["sum"] / self.client_state["loss"].sum() for name in public}


class AddsForOthers(_SendsSums):
    """(a) adds the mean over the clients trained beside it to a sum."""

    def end_local(self, local):
        (rows, items), = local.changes.values()
        local.add("sum", rows + 1e-3 * local.loss.mean().to(rows), items)


class ReceivesTogether(_SendsSums):
    """(a) pulls private parameters to their mean over clients once there is an answer."""

    def receive(self, private, sums, count, draw):
        return {name: rows - 0.1 * (rows - rows.mean(0)) for name, rows in private.items()}


class ReadsOthersState(_Rehearses):
    """(a) replays what another client trained on."""

    def begin_round(self, step, round_, backbone):
        self._first = torch.stack([step.train.of(u)[0] if len(step.train.of(u)) else torch.tensor(0)
                                   for u in range(step.n_users)])

    def replayed_items(self, users, draw):
        return self._first[(users + 1) % len(self._first)][:, None]


class WeighsByNumber(_Cheater):
    """(a) pulls a client's private parameters to 0, the more so the later it has come."""

    def local_loss(self, batch):
        return batch.users * sum(value.flatten(1).square().sum(1) for value in batch.private.values())


_popular = {}


class CountsOnce(_Cheater):
    """(c) counts what is popular once for each block, in a dictionary of the module, as a cache would."""

    def begin_round(self, step, round_, backbone):
        if step.index not in _popular:
            _popular[step.index] = torch.bincount(step.train.values, minlength=step.n_items)
        self._counts = _popular[step.index]

    def aggregate(self, public):
        return {name: table * (1.0 + 0.01 * self._counts.to(table)[:, None]) for name, table in public.items()}


class KnowsInLayers(_Cheater):
    """(c) the server scales the layers by how many items clients have."""

    def begin_round(self, step, round_, backbone):
        self._mean = float(step.train.lengths.double().mean())

    def aggregate_dense(self, dense):
        return {name: value * (1.0 + 1e-3 * self._mean) for name, value in dense.items()}


class KnowsTheLongest(_Cheater):
    """(c) the server knows how many items the client with the most has."""
    gives_up = {"F7": "scales each"}

    def begin_round(self, step, round_, backbone):
        self._longest = int(step.train.lengths.max())

    def aggregate_updates(self, updates):
        return updates.weighted_sum((1.0 + 1e-3 * self._longest) * updates.weights / updates.weights.sum())


class TrustsTheFirst(_Cheater):
    """weighs updates by the place at which they come, and so by how clients are trained together."""
    gives_up = {"F7": "by their place"}

    def aggregate_updates(self, updates):
        places = torch.cat([positions for positions, _ in updates.chunks()])
        return updates.weighted_sum(1.0 / (1.0 + places.argsort()) / len(places))


class WeighsByLists(_Cheater):
    """(c) weighs a client's update by how many items it has, which it has not sent."""
    gives_up = {"F7": "by lists"}

    def begin_round(self, step, round_, backbone):
        self._lengths = step.train.lengths

    def aggregate_updates(self, updates):
        return updates.weighted_sum(self._lengths[updates.users] / self._lengths.sum())


class UploadsPrivate(_Cheater):
    """(b) declares a statistic and sends the private user vector as it."""

    def uploads(self, backbone, round_):
        return {"statistic": (backbone.settings.dim,)}

    def end_local(self, local):
        local.upload("statistic", next(iter(local.private.values())))


class UploadsUndeclared(_Cheater):
    """(b) sends something that it does not declare."""

    def end_local(self, local):
        local.upload("norm", next(iter(local.private.values())).norm(dim=1))


class UploadsOtherShape(_Cheater):
    """(b) sends more than it declares."""

    def uploads(self, backbone, round_):
        return {"norm": ()}

    def end_local(self, local):
        local.upload("norm", next(iter(local.private.values())) * 2.0)


class UploadsInteractions(_Cheater):
    """(b) marks the client's training items in a declared upload."""

    def begin_round(self, step, round_, backbone):
        self._step = step

    def uploads(self, backbone, round_):
        return {"mask": (self._step.n_items,)} if hasattr(self, "_step") else {}

    def end_local(self, local):
        mask = torch.zeros(len(local.users), self._step.n_items)
        row, item = self._step.train.select(local.users)
        mask[row, item] = 1.0
        local.upload("mask", mask)


class UploadsIds(UploadsInteractions):
    """(b) sends the ids of the client's training items, as shares of their number and with zeros behind."""

    def end_local(self, local):
        ids = torch.zeros(len(local.users), self._step.n_items)
        for row, user in enumerate(local.users.tolist()):
            items = self._step.train.of(user)
            ids[row, :len(items)] = items / self._step.n_items
        local.upload("mask", ids)


class CarriesPrivate(_Cheater):
    """(c) puts private parameters into the server's state after a step."""

    def end_step(self, step, model, backbone, trained, draw):
        self.server_state = {"mean": next(iter(model.private.values())).mean(0)}


class PassesPrivateAround(_Cheater):
    """(c) a client's hook leaves a private parameter where the server's hook finds it."""

    def begin_round(self, step, round_, backbone):
        self._left = torch.zeros(step.n_users, dtype=torch.float64)

    def local_loss(self, batch):
        self._left[batch.users] = next(iter(batch.private.values())).detach().double().flatten(1).mean(1)

    def aggregate(self, public):
        return {name: table + 0.01 * self._left.sum() for name, table in public.items()}


class RereadsThePast(_FindsTheStream, _Rehearses):
    """(d) finds the stream and replays the block before."""
    first_step = 1

    def begin_step(self, step, model, backbone):
        self._previous = self._stream.steps[step.index - 1].train

    def replayed_items(self, users, draw):
        first = torch.zeros(len(users), 1, dtype=torch.int64)
        for row, user in enumerate(users.tolist()):
            if user < len(self._previous.lengths) and self._previous.lengths[user]:
                first[row] = self._previous.of(user)[0]
        return first


class TrainsOnTest(RereadsThePast):
    """(e) replays what it is to be tested on."""
    first_step = 0

    def begin_step(self, step, model, backbone):
        pass

    def begin_round(self, step, round_, backbone):
        self._previous = self._stream.steps[step.index].test


class RanksTestFirst(_FindsTheStream):
    """(e) looks the items to be found up when it scores."""

    def rescore(self, users, scores, model, backbone):
        step = next(step for step in self._stream.steps if step.n_items == model.n_items)
        scores = scores.clone()
        scores[step.test.select(users)] += 100.0
        return scores


# What only altered content, step ends and rankings show.

class _Remembers(_Cheater):
    """Every client remembers items of its latest block: (users, 4), whole numbers."""

    def end_step(self, step, model, backbone, trained, draw):
        memory = torch.zeros(step.n_users, 4, dtype=torch.int64)
        for user in trained.tolist():
            items = step.train.of(user)
            memory[user] = items[torch.arange(4) % len(items)]
        self.client_state = {"memory": memory}

    def common(self, n):
        """The n items that are most common in all memories."""
        memory = self.client_state.get("memory", torch.zeros(1, n, dtype=torch.int64))
        return torch.bincount(memory.flatten(), minlength=n).argsort(descending=True, stable=True)[:n]


class CountsMemories(_Remembers):
    """(c) the server adds how often an item is in the clients' memories, whole numbers."""

    def aggregate(self, public):
        if "memory" not in self.client_state:
            return public
        return {name: table + 0.01 * torch.bincount(self.client_state["memory"].flatten(), minlength=len(table)).view(
            -1, *[1] * (table.dim() - 1)) for name, table in public.items()}


class DistilsCommon(_Remembers):
    """(a) a client distils the items that are most common in all memories."""

    def soft_targets(self):
        if not self.client_state:
            return None
        users = len(next(iter(self.client_state.values())))
        return SoftTargets(self.common(3).expand(users, 3), torch.ones(users, 3, dtype=torch.float64), 1.0)


class DistilsWithoutAList(_Cheater):
    def soft_targets(self):
        return SoftTargets(torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 1), 1.0)


class DistilsInSessions(DistilsWithoutAList):
    needs_sequential, acts_in_sessions = True, True


class CountsFlags(_Cheater):
    """(c) the server counts flags of the clients."""

    def end_step(self, step, model, backbone, trained, draw):
        self.client_state = {"active": step.train.lengths > step.train.lengths.double().mean()}

    def aggregate(self, public):
        share = self.client_state["active"].double().mean() if self.client_state else 0.0
        return {name: table * (1.0 + 0.01 * share) for name, table in public.items()}


class CountsMarks(_Cheater):
    """(c) the server counts marks that clients keep as 0.0 and 1.0: the same however these are swapped and scaled."""

    def end_step(self, step, model, backbone, trained, draw):
        self.client_state = {"seen": torch.zeros(step.n_users, step.n_items, dtype=torch.float64)}
        row, item = step.train.select(torch.arange(step.n_users))
        self.client_state["seen"][row, item] = 1.0

    def aggregate(self, public):
        seen = (self.client_state["seen"] > 0).sum(0) if self.client_state else torch.zeros(1)
        return {name: table + 0.01 * torch.nn.functional.pad(seen, (0, len(table) - len(seen))).view(
            -1, *[1] * (table.dim() - 1)) for name, table in public.items()}


class ReadsTheServer(_Cheater):
    """Clients read what the server keeps and does not send."""

    def aggregate(self, public):
        self.server_state = {name: table * 0.5 for name, table in public.items()}
        return public

    def row_penalty(self, name):
        kept = self.server_state.get(name)
        return None if kept is None else lambda rows, items: 1e-3 * (rows - kept[items]).square().flatten(2).sum(2)

    def begin_step(self, step, model, backbone):
        self.server_state = dict(model.public)


class WritesInPlace(_Cheater):
    """The server's running mean is one tensor, which the best round's model is made of."""

    def aggregate(self, public):
        for name, table in public.items():
            if len(self.server_state.get(name, ())) == len(table):
                self.server_state[name].lerp_(table, 0.5)
            else:
                self.server_state = {**self.server_state, name: table.clone()}
        return {name: self.server_state[name] for name in public}


class Misspells(_Cheater):
    """Nobody calls its hook."""

    def local_los(self, batch):
        return batch.loss


class _Uploads(_Cheater):
    def uploads(self, backbone, round_):
        return {"loss": ()}

    def end_local(self, local):
        local.upload("loss", local.loss)


class DeclaresANumber(_Uploads):
    def uploads(self, backbone, round_):
        return {"loss": 1}


class UploadsAFloat(_Uploads):
    def end_local(self, local):
        local.upload("loss", 0.5)


class AnswersMoreAndMore(_Uploads):
    def end_round(self, round_, users, uploads):
        return {"more": torch.ones(len(users), 1 + round_)}


class CountsRounds(_Cheater):
    def aggregate(self, public):
        self.server_state = {"rounds": self.server_state.get("rounds", 0) + 1}
        return public


class KeepsOneNumber(_Cheater):
    def end_step(self, step, model, backbone, trained, draw):
        self.client_state = {"step": torch.tensor(step.index)}


class PenalisesNumbers(_Cheater):
    def row_penalty(self, name):
        return lambda rows, items: rows.square()


class PullsToANumber(_Cheater):
    def pull(self, name, private):
        return Pull(0.1, 0.5)


class PullsToNothing(_Cheater):
    """A private parameter, which the server did not send."""

    def pull(self, name, private):
        return Pull(0.1) if private else None


class PullsToTheServer(ReadsTheServer):
    row_penalty = _Cheater.row_penalty

    def pull(self, name, private):
        return Pull(2e-3, self.server_state[name]) if name in self.server_state else None


class CutOff(_Cheater):
    """Its term is a number to every parameter."""

    def local_loss(self, batch):
        return 0.5 * batch.loss.detach()


class CountsInteractions(_Cheater):
    """(c) the server learns how much its clients interact."""

    def begin_round(self, step, round_, backbone):
        self._count = len(step.train.values)

    def aggregate(self, public):
        return {name: table * (1.0 + 1e-4 * self._count) for name, table in public.items()}


class CountsOthers(_Cheater):
    """(a) a client's loss weighs its share in all clients' interactions."""

    def begin_round(self, step, round_, backbone):
        self._share = step.train.lengths / len(step.train.values)

    def local_loss(self, batch):
        value = next(iter(batch.private.values()))
        return self._share[batch.users] * value.flatten(1).square().sum(1)


class HashesOthers(_Remembers):
    """(a) a client's loss weighs a hash of all memories."""

    def local_loss(self, batch):
        value = next(iter(batch.private.values()))
        memory = self.client_state.get("memory", torch.zeros(1, 1, dtype=torch.int64))
        return (memory * 31).sum() % 97 / 97.0 * value.flatten(1).square().sum(1)


class CentreAtTheStart(_Cheater):
    """(a) before a step every client gets the mean of all clients' private parameters."""

    def begin_step(self, step, model, backbone):
        private = next(iter(model.private.values()))
        self.client_state = {"centre": private.mean(0).expand_as(private).clone()}

    def local_loss(self, batch):
        if not self.client_state:
            return None
        value = next(iter(batch.private.values()))
        return (value - self.client_state["centre"][batch.users]).flatten(1).square().sum(1)


class CentreAtTheEnd(CentreAtTheStart):
    """(a) the same after a step."""

    def begin_step(self, step, model, backbone):
        rows = self.client_state["centre"]
        new = rows.new_zeros(step.n_users - len(rows), *rows.shape[1:])
        self.client_state = {"centre": torch.cat([rows, new])}

    def end_step(self, step, model, backbone, trained, draw):
        super().begin_step(step, model, backbone)


class AveragesAtTheEnd(_Cheater):
    """(a) when a step ends every client's private parameters become the mean, in place."""

    def end_step(self, step, model, backbone, trained, draw):
        for table in model.private.values():
            table.copy_(table.mean(0).expand_as(table).clone())


class LearnsFromRankings(_Cheater):
    """(c) the server keeps how clients rank."""

    def rescore(self, users, scores, model, backbone):
        self.server_state["popular"] = scores.mean(0)
        return scores


class WritesIntoTheModel(_Cheater):
    """(c) before a step the server's table gets the popularity of items, without a hook of the server."""

    def begin_step(self, step, model, backbone):
        private = next(iter(model.private.values()))
        for table in model.public.values():
            table.add_(0.01 * private.mean())


class RanksTogether(_Cheater):
    """(a) scores are centred over the users that are ranked together."""

    def rescore(self, users, scores, model, backbone):
        return scores - scores.mean(0)


class RanksByOthers(_Remembers):
    """(a) a user's ranking prefers what is common in all memories."""

    def rescore(self, users, scores, model, backbone):
        scores = scores.clone()
        scores[:, self.common(3)] += 1.0
        return scores


class KeepsTestItems(_FindsTheStream, _Remembers):
    """(e) a client remembers what it is tested on after every later block."""

    def end_step(self, step, model, backbone, trained, draw):
        test = self._stream.steps[step.index].test
        super().end_step(replace(step, train=test), model, backbone, (test.lengths > 0).nonzero().flatten(), draw)


class KeepsThePast(RereadsThePast):
    """(d) when a block ends, a client keeps what it had in the block before."""

    begin_step = Method.begin_step
    replayed_items = Method.replayed_items
    local_loss = Method.local_loss

    def end_step(self, step, model, backbone, trained, draw):
        train = self._stream.steps[max(step.index - 1, 0)].train
        items = [train.of(u)[:1] if u < len(train.lengths) and train.lengths[u] else torch.tensor([0])
                 for u in range(step.n_users)]
        self.client_state = {"before": torch.cat(items)}


class MarksTheRest(UploadsInteractions):
    """(b) marks all items but the client's own, by other numbers."""

    def end_local(self, local):
        mask = torch.arange(1.0, 1.0 + self._step.n_items).repeat(len(local.users), 1)
        row, item = self._step.train.select(local.users)
        mask[row, item] = -0.5
        local.upload("mask", mask)


class UploadsThePast(UploadsInteractions):
    """(b) marks what the client had in the block before."""

    def begin_step(self, step, model, backbone):
        self.client_state = {"had": self.client_state["had"]}

    def end_step(self, step, model, backbone, trained, draw):
        self.client_state = {"had": torch.zeros(step.n_users, 60)}
        self.client_state["had"][step.train.select(torch.arange(step.n_users))] = 1.0

    def end_local(self, local):
        had = self.client_state.get("had", torch.zeros(1, 60))
        rows = had[local.users.clamp(max=len(had) - 1)] * (local.users < len(had))[:, None]
        local.upload("mask", rows[:, :self._step.n_items])


class UploadsScaled(_Cheater):
    """(b) sends one entry of the private vector, as another number."""

    def uploads(self, backbone, round_):
        return {"number": ()}

    def end_local(self, local):
        local.upload("number", 7.0 - 3.0 * local.private["user_embedding.weight"][:, 2].double())


class AddsDoubles(_Cheater):
    """Its numbers are float64 whatever the run's precision."""

    def aggregate(self, public):
        return {name: torch.addmm(table, table, torch.zeros(table.shape[1], table.shape[1], dtype=torch.float64))
                for name, table in public.items()}


class TakesRoots(_SendsSums):
    """Breaks nothing: a private step by the root of a sum of squares."""

    def sums(self, backbone, n_items):
        return {**super().sums(backbone, n_items), "squares": (backbone.settings.dim,)}

    def end_local(self, local):
        super().end_local(local)
        (rows, _), = local.changes.values()
        local.add("squares", rows.square().sum(1))

    def receive(self, private, sums, count, draw):
        return {name: rows * (1.0 - 1e-3 * (sums["squares"] / count).sqrt()) for name, rows in private.items()}


# The same on sessions, with a sequential backbone.

class _OnSessions(_FindsTheStream):
    needs_sequential = True


class EncodesTogether(_OnSessions):
    """(a) in an evaluation, representations are centred over the clients that are ranked together."""

    def represent(self, encoding):
        if encoding.purpose == "train":
            return encoding.features
        return encoding.features - encoding.features.mean(0)


class SharesOfSessions(_OnSessions):
    """(a) a client's representations move by its share in all clients' interactions."""

    def represent(self, encoding):
        train = self._stream.steps[-1].train
        share = train.lengths[encoding.users].to(encoding.features) / len(train.values)
        return encoding.features * (1.0 + share[:, None, None])


class CountsSessions(_OnSessions):
    """(c) the server's table gets how long the sessions of the round before were, whole numbers at clients."""

    def begin_round(self, step, round_, backbone):
        last = self.client_state.get("last", torch.zeros(step.n_users, dtype=torch.int64))
        self.client_state = {"last": last.clone(), "before": last}

    def end_local(self, local):
        self.client_state["last"][local.users] = local.sequence.real.sum(1)

    def aggregate(self, public):
        return {name: table * (1.0 + 1e-3 * self.client_state["before"].sum()) for name, table in public.items()}


class SeesTheTarget(_OnSessions):
    """(e) representations in a test move by the item to find."""

    def represent(self, encoding):
        if encoding.purpose != "test":
            return encoding.features
        target = torch.stack([self._stream.steps[-1].test.of(user)[0] for user in encoding.users.tolist()])
        return encoding.features * (1.0 + 0.01 * target.to(encoding.features)[:, None, None])


class Forgets(_Cheater):
    """Keeps a count outside its declared state."""

    def begin_round(self, step, round_, backbone):
        self.rounds_seen = getattr(self, "rounds_seen", 0) + 1

    def aggregate(self, public):
        return {name: table * (1.0 + 0.01 * self.rounds_seen) for name, table in public.items()}


class KeepsInTheClass(_Cheater):
    """Keeps something of each step in the class, which new objects in the same process still see; a process that is
    started within a step does not need it."""
    kept = {}

    def end_step(self, step, model, backbone, trained, draw):
        self.kept[step.index] = 3.0

    def begin_step(self, step, model, backbone):
        self.server_state = {"before": torch.tensor([self.kept.get(step.index - 1, 0.0)])}

    def aggregate(self, public):
        before = self.server_state.get("before", torch.zeros(1)).item()
        return {name: table * (1.0 + 0.01 * before) for name, table in public.items()}


class ThrowsDice(_Cheater):
    """Draws from torch's global generator."""

    def aggregate(self, public):
        return {name: table + 0.01 * torch.randn_like(table) for name, table in public.items()}


@dataclass(frozen=True)
class UnreadSettings:
    used: float = setting(0.9, "factor", above=0.0, high=1.0)
    unused: float = setting(0.5, "nobody reads this", low=0.0, high=1.0)


class IgnoresASetting(_Cheater):
    Settings = UnreadSettings

    def aggregate(self, public):
        return {name: table * self.settings.used for name, table in public.items()}


@dataclass(frozen=True)
class UnhelpfulSettings:
    strength: float = 0.5


class NoHelp(_Cheater):
    Settings = UnhelpfulSettings


class WrongShape(_Cheater):
    def local_loss(self, batch):
        return next(iter(batch.private.values())).square().sum()


class DropsATable(_Cheater):
    def aggregate(self, public):
        return {}


# Backbones.

class UnknownRate(_Named, FedMF):
    def learning_rates(self, n_items, round_=0, batch=0):
        return {**super().learning_rates(n_items), "bias.weight": 0.1}


class UserTableIsPublic(_Named, FedMF):
    """(b) declares the users' vectors as public."""

    def new_rows(self, seed, users, items):
        public, private = super().new_rows(seed, users, items)
        return {**public, **private}, {"unused": torch.zeros(len(users), 1, dtype=torch.float64)}


class NoGradient(_Named, FedMF):
    def score(self, clients, rows):
        return super().score(clients, rows).detach()


class LeavesAClientOut(_Named, FedMF):
    """The first client of a group gets constant logits."""

    def score(self, clients, rows):
        scores = super().score(clients, rows)
        alive = torch.ones(len(scores), 1, dtype=scores.dtype).index_fill(0, torch.tensor([0]), 0.0)
        return scores * alive


class StartsByPosition(_Named, FedMF):
    """A row's start depends on when the table grew."""

    def new_rows(self, seed, users, items):
        public, private = super().new_rows(seed, users, items)
        return {name: table + len(items) for name, table in public.items()}, private


@dataclass(frozen=True)
class OverflowSettings(BackboneSettings):
    dim: int = setting(4, "length of vectors", low=1)
    init_std: float = setting(0.01, "start", low=0.0)
    item_lr: str = setting("plain", "rates", choices=("times_items", "plain"))


class Overflows(_Named, FedMF):
    Settings = OverflowSettings

    def loss(self, scores, labels, weights):
        p = torch.sigmoid(scores)
        return -((labels * p.log() + (1.0 - labels) * (1.0 - p).log()) * weights).sum(1)


class WeighsPadding(_Named, FedMF):
    """A mean over all slots instead of the weighted sum, whose weights are 0 at padding."""

    def loss(self, scores, labels, weights):
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="none").mean(1)


class ForgetsTheMask(_Cheater):
    """A mean over all scores, of which some are of padding."""

    def local_loss(self, batch):
        return 0.1 * batch.scores.square().mean(1)


class SumsOverClients(_Named, FedMF):
    """A client's loss has those of the others in it."""

    def loss(self, scores, labels, weights):
        each = super().loss(scores, labels, weights)
        return each + each.mean()


class ScoresTogether(_Named, FedMF):
    """(a) scores are centred over the users that are ranked together."""

    def score_all(self, clients, public):
        scores = super().score_all(clients, public)
        return scores - scores.mean(0)


class RemembersCommon(_Named, FedMF):
    """(a) every client remembers how common items are among all clients."""

    def remember(self, step, memory):
        common = torch.bincount(step.train.values, minlength=step.n_items).double()
        return {"common": common[:3].expand(step.n_users, 3).clone()}


class DrawsRows(_Cheater):
    """Rows of new items are drawn from the global generator."""

    def new_item_rows(self, items, public):
        return {name: torch.rand(len(items), *table.shape[1:], dtype=table.dtype) for name, table in public.items()}


class RanksOtherwise(_Named, FedMF):
    """All items are ranked by other scores than those that are trained."""

    def score_all(self, clients, public):
        return super().score_all(clients, public) + next(iter(public.values())).norm(dim=1)


class OneNumberARow(_Named, FedMF):
    def new_rows(self, seed, users, items):
        public, private = super().new_rows(seed, users, items)
        return {**public, "bias": torch.zeros(len(items), dtype=torch.float64)}, private


class OneNumber(_Named, FedMF):
    def new_dense(self, seed):
        return {"bias": torch.zeros((), dtype=torch.float64)}


class UnusedParameter(_Named, FedMF):
    def new_dense(self, seed):
        return {"bias": torch.ones(1, dtype=torch.float64)}

    def learning_rates(self, n_items, round_=0, batch=0):
        return {**super().learning_rates(n_items), "bias": 0.1}


# Sequential backbones.


class _MeanUpTo(_Named, SequentialBackbone):
    """Each position is the mean of the items up to it."""

    title = "the mean of the items up to a position"
    pads = False

    def dense_starts(self):
        return {"bias": zeros(self.settings.dim)}

    def encode(self, clients, inputs, sequence, dropout):
        return inputs.cumsum(1) / self.counts(sequence.real)[..., None] + clients["bias"].unsqueeze(1)

    def counts(self, real):
        return real.cumsum(1).clamp(min=1)


class CountsPaddingToo(_MeanUpTo):
    def counts(self, real):
        return torch.ones_like(real, dtype=torch.int64).cumsum(1)


class SeesTheNext(_MeanUpTo):
    """Adds the mean of the whole session, the item to predict among it."""

    def encode(self, clients, inputs, sequence, dropout):
        own = super().encode(clients, inputs, sequence, dropout)
        return own + 0.1 * inputs.mean(1, keepdim=True)


# Backbones of whole sessions.


class _MeanOfItems(_Named, SessionBackbone):
    """The session is the mean of its item rows."""

    title = "the mean of a session's item rows"
    n_vectors = 1

    def dense_starts(self):
        return {"bias": zeros(self.settings.dim)}

    def session_vectors(self, clients, inputs, sequence, dropout):
        total = inputs.sum(1, keepdim=True) / self.count(sequence.real)[:, None, None]
        return SessionVectors(total + clients["bias"].unsqueeze(1), torch.ones_like(sequence.real[:, :1]))

    def count(self, real):
        return real.sum(1)

    def session_scores(self, vectors, mask, rows):
        return (vectors @ rows.transpose(-1, -2)).squeeze(1)


class CountsPadding(_MeanOfItems):
    def count(self, real):
        return torch.full_like(real[:, 0], real.shape[1], dtype=torch.int64)


class ScoresItemsTogether(_MeanOfItems):
    def session_scores(self, vectors, mask, rows):
        scores = super().session_scores(vectors, mask, rows)
        return scores - scores.mean(1, keepdim=True)


class KnowsWhatOthersClick(_MeanOfItems):
    """Adds how often an item is clicked by anybody to the vector of a session."""

    def remember(self, step, memory):
        counts = torch.bincount(step.train.values, minlength=step.n_items)
        return {"counts": counts.expand(step.n_users, -1)}

    def session_vectors(self, clients, inputs, sequence, dropout):
        session = super().session_vectors(clients, inputs, sequence, dropout)
        clicked = clients["counts"].gather(1, sequence.items[:, -1:]).unsqueeze(2)
        return replace(session, vectors=session.vectors + 0.1 * clicked)


class NeverReadsAParameter(_MeanOfItems):
    def dense_starts(self):
        return {**super().dense_starts(), "idle": zeros(3)}
