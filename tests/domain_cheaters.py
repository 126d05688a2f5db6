"""Plugins of domains that break one constraint each; ``check`` must catch every one of them by name."""

from __future__ import annotations

import torch
from torch import nn

from fedcl_bench.plugin.silo import DomainMethod, DomainModule, ModuleBackbone, Stage


class _Mean(DomainModule):
    rows = ("items.weight",)

    def __init__(self, data, settings):
        super().__init__()
        self.items = nn.Embedding(data.n_items, settings.dim)
        self.mix = nn.Linear(settings.dim, settings.dim)
        self.data = data

    def scores(self, batch):
        rows = self.items(batch.items.clamp(min=0)) * batch.real.unsqueeze(2)
        return self.mix(rows.sum(1) / batch.lengths.unsqueeze(1)) @ self.items.weight.T


class Mean(ModuleBackbone):
    """Breaks nothing."""
    name, title = "mean-of-items", "mean of a history's items"
    exchanges = frozenset({"means"})
    network = _Mean

    def module(self, data):
        return self.network(data, self.settings)


class FedAvg(DomainMethod):
    """Breaks nothing: what the engine does with ft."""
    name, title = "averages", "averages what has no item rows"


class _NoRows(_Mean):
    rows = ()


class ForgetsRows(Mean):
    name, network = "forgets-rows", _NoRows


class MakesNothing(Mean):
    name = "makes-nothing"

    def module(self, data):
        super().module(data)


class AnswersOne(FedAvg):
    name = "answers-one"

    def aggregate(self, uploads, weights, draw):
        return super().aggregate(uploads, weights, draw)[:1]


class OneStage(FedAvg):
    name = "one-stage"

    def stages(self):
        return Stage("train")


class WritesForUsers(FedAvg):
    name = "writes-for-users"

    def local_loss(self, batch):
        return 0.1 * batch.loss


class _Remembers(_Mean):
    seen: list = []

    def loss(self, batch, targets):
        self.seen.append(float(self.data.histories[0].double().mean()))
        return super().loss(batch, targets) * (1.0 + 0.01 * sum(self.seen[-40:]))


class KeepsInTheClass(Mean):
    """(a) scales the loss by what a class remembers of all domains."""
    name, network = "keeps-in-the-class", _Remembers


class _Counts(_Mean):
    def __init__(self, data, settings):
        super().__init__(data, settings)
        self.batches = 0

    def loss(self, batch, targets):
        self.batches += 1
        return super().loss(batch, targets) / self.batches


class CountsBatches(Mean):
    """keeps a number from batch to batch that no checkpoint has."""
    name, network = "counts-batches", _Counts


class _Idle(_Mean):
    def __init__(self, data, settings):
        super().__init__(data, settings)
        self.idle = nn.Parameter(torch.ones(3))


class NeverTrains(Mean):
    """has a parameter that no loss reaches."""
    name, network = "never-trains", _Idle


class _WrongRows(_Mean):
    rows = ("items.weight", "mix.bias")


class MisnamesRows(Mean):
    """calls a parameter a table of items that is none."""
    name, network = "misnames-rows", _WrongRows


class _AllOfSome(_Mean):
    def scores(self, batch):
        return super().scores(batch)[:, :-1]


class LeavesAnItemOut(Mean):
    """scores all items but one."""
    name, network = "leaves-an-item-out", _AllOfSome


class _SendsMore(FedAvg):
    """Sends what ``more`` makes beside an honest matrix."""
    sent = ("mix.weight", "more")

    def upload(self, module, draw):
        return {"mix.weight": module.mix.weight, "more": self.more(module, module.data.histories[1].diff().double())}

    def aggregate(self, uploads, weights, draw):
        return super().aggregate([{"mix.weight": upload["mix.weight"]} for upload in uploads], weights, draw)


class UploadsUsers(_SendsMore):
    """(b) sends how long each user's history is."""
    name = "uploads-users"

    def more(self, module, lengths):
        return lengths


class UploadsPadded(_SendsMore):
    """(b) sends something of each user in a vector of the same size everywhere."""
    name = "uploads-padded"

    def more(self, module, lengths):
        return nn.functional.pad(lengths.sqrt(), (0, 99 - len(lengths)))


class RenamesAmongOthers(_SendsMore):
    """(b) sends its table of items between other numbers."""
    name = "renames-among-others"

    def more(self, module, lengths):
        return torch.cat([lengths.new_ones(1), module.items.weight.flatten(), lengths.new_zeros(1)])


class UploadsSteps(_SendsMore):
    """(b) sends how its table of items has changed since its last upload."""
    name = "uploads-steps"

    def more(self, module, lengths):
        now, before = module.items.weight.clone(), getattr(module, "before", module.items.weight)
        module.before = now
        return now - before


class ChangesAfterFourCalls(FedAvg):
    """(c) the server answers otherwise from its fourth call on."""
    name, calls = "changes-after-four-calls", 0

    def aggregate(self, uploads, weights, draw):
        self.calls += 1
        return super().aggregate(uploads, weights if self.calls < 4 else 0.9 * weights, draw)


class TellsTheServer(FedAvg):
    """(c) a domain leaves the mean of its items to the server, which forgets it after it has used it."""
    name, told = "tells-the-server", 0.0

    def upload(self, module, draw):
        self.told = self.told + module.items.weight.mean()
        return super().upload(module, draw)

    def aggregate(self, uploads, weights, draw):
        told, self.told = self.told, 0.0
        return [{name: value + told for name, value in made.items()}
                for made in super().aggregate(uploads, weights, draw)]


class TrainsItemsOfOthers(FedAvg):
    """(a) a domain's upload hangs on what another one's module left in the method."""
    name = "passes-around"

    def upload(self, module, draw):
        self.last = getattr(self, "last", []) + [module.items.weight.mean()]
        return {name: value + sum(self.last[-3:]) for name, value in super().upload(module, draw).items()}
