"""New users and items that arrive after a step's training, and what ranks for and by them.

New users (``fold_in``) have no data in an earlier step and take no part in the step's rounds. When a model is validated
or tested, each of them receives it and makes its private parameters of its first interactions, while the public ones
stay as they are: a model folds in a user whom it was not trained on (Sarwar et al., ICIS 2002, for matrix
factorisation).

New items (``cold_items``) are in no earlier step, and no client trains on them or draws them as negatives in the step's
rounds. When a model is validated or tested, their rows of the public tables are made, while all else stays as it is: of
the rows of items with similar texts (content-based cold start, Schein et al., SIGIR 2002), of those of popular items,
by the method, or by more rounds of which the server keeps these rows alone.

From the next step on they are users and items like all others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .. import rng
from ..training.strategies import Training, choose_strategy
from ..data.stream import Step
from ..rng import DrawKey, Tables
from ..plugin import checks
from ..plugin.method import Method, NoSettings
from ..plugin.state import Snapshot
from ..training.sampling import padded
from .parameter_growth import initial_private
from .parts import Federation, bytes_of
from .protocols import list_chunks, without_new_items
from .round import Work, train_clients
from .settings import truncated_for_new_users


class ColdStart:
    """The new users of a step, numbered from 0; ``step``: as its clients know it (``FederationSettings.as_known``),
    ``model``: with rows for all its users."""

    def __init__(self, f: Federation, step: Step, model: Snapshot):
        self.federation, self.old, users = f, step.old_users, range(step.old_users, step.n_users)
        here = torch.arange(users.start, users.stop, device=step.train.values.device)
        parts = {name: step.split(name).part(here) for name in ("train", "valid", "test")}
        self.step = replace(step, n_users=len(users), old_users=0, **parts)  # with their data alone
        if f.server.cold_items != "none":
            self.step = without_new_items(self.step)
        # How many have training data, wherever they are.
        self.count = int(f.population.all_reduce({"count": (self.step.train.lengths > 0).sum()[None]})["count"])
        self.start = initial_private(model, f.backbone, f.seed, users)  # of the backbone, each (new users, ...)
        self.training = fine_tuning(f, step, model, "public")

    def with_arrivals(self, model: Snapshot) -> Snapshot:
        """A model after the new users have received it and made their private parameters."""
        new = self._received(model)
        users = (self.step.train.lengths > 0).nonzero().flatten()
        make = {"fold_in": self._folded_in, "mean": self._means}.get(self.federation.server.cold_start)
        private = make(new, users) if make is not None and new.private and len(users) else new.private

        def joined(tables: Tables, rows: Tables) -> Tables:
            return {name: torch.cat([table[:self.old], rows[name]]) for name, table in tables.items()}
        return replace(model, private=joined(model.private, private), local=joined(model.local, new.local),
                       personalised=joined(model.personalised, new.personalised))

    def _received(self, model: Snapshot) -> Snapshot:
        """The new users alone, with the server's tables in place of those of their own."""
        def copies(tables: Tables) -> Tables:
            return {name: model.public[name].expand(self.step.n_users, *model.public[name].shape) for name in tables}

        def rows(tables: Tables) -> Tables:
            return {name: table[self.old:] for name, table in tables.items()}
        private = {**rows(model.private), **{name: table.clone() for name, table in self.start.items()}}
        return Snapshot(model.public, private, model.dense, copies(model.local), copies(model.personalised),
                        rows(model.client_context))

    def _folded_in(self, new: Snapshot, users: Tensor) -> Tables:
        """Private parameters after the rounds of local training that each of ``users`` does alone."""
        f, first = self.federation, torch.arange(self.step.n_users, device=users.device) + self.old
        work = Work(self.training, list_chunks(self.step, users, new, self.training))
        with rng.global_client_ids(rng.names(first)):
            for round_ in range(f.server.fold_in_rounds):
                sums = train_clients([work], new, DrawKey(f.seed, self.step.index, round_))
                new = replace(new, private={**new.private, **sums.private})
        return new.private

    def _means(self, new: Snapshot, users: Tensor) -> Tables:
        """Private parameters with the mean of the public vectors of their items as vector of each of ``users``."""
        (vector, _), (items,) = self.federation.backbone.factor_names, new.public.values()
        counts, listed, table = self.step.train.counts(users), padded(self.step.train, users), new.private[vector]
        share = (torch.arange(listed.shape[1], device=users.device) < counts[:, None]) / counts[:, None]
        means = (items.flatten(1)[listed] * share.to(items)[..., None]).sum(1)
        return {**new.private, vector: table.index_copy(0, users, means.view(len(users), *table.shape[1:]))}


def cold_start_of(f: Federation, step: Step, model: Snapshot) -> ColdStart | None:
    """The new users of a step if they arrive after its training; arguments as of ``ColdStart``."""
    return None if f.server.fold_in == 0 or step.index == 0 else ColdStart(f, step, model)


def fine_tuning(f: Federation, step: Step, model: Snapshot, frozen: str) -> Training:
    """How FT trains in a step without sessions, with ``frozen`` parameters."""
    method = Method(NoSettings())
    strategy = choose_strategy(f.backbone, method, model, f.local, sessions=False)
    return Training(f.backbone_in(step.index), method, f.local, strategy, frozen=frozen, epochs=f.local.local_epochs)


def notes(f: Federation) -> list[str]:
    if not f.server.fold_in or f.server.cold_start != "fold_in":
        return []
    if f.backbone.new_rows(f.seed, range(1), range(0))[1] or f.backbone.new_personal(f.seed, range(1)):
        return []
    return [f"fold_in: '{f.backbone.name}' has no private parameters to fit; new users are ranked by what they "
            f"remember of their first interactions."]


class PopularItems(Method):
    """Ranks for some users by how often items were trained on; for all others as ``method`` does."""

    name = "popularity"

    def __init__(self, method: Method, counts: Tensor, users: Tensor):
        super().__init__(NoSettings())
        self.method, self.counts, self.users = method, counts, users

    def rescore(self, users, scores, model, backbone):
        scores = self.method.rescore(users, scores, model, backbone)
        return torch.where(self.users[users][:, None], self.counts.to(scores), scores)


def ranks_by(f: Federation, step: Step, method: Method) -> Method:
    """The method as it ranks in a step's tests: with ``cold_start=popularity`` not for users who have never trained.
    These are the new users of the step, and those of earlier ones who have had no training data since. An item counts
    as often as it is among the training interactions that clients know, up to this step."""
    if f.server.fold_in == 0 or f.server.cold_start != "popularity" or step.index == 0:
        return method
    device = step.train.values.device
    counts = torch.zeros(step.n_items, dtype=torch.int64, device=device)
    strangers = torch.zeros(step.n_users, dtype=torch.bool, device=device)
    for part in f.stream.steps[:step.index + 1]:
        part = part.to(device)
        known = truncated_for_new_users(part, f.server.fold_in) if part.index < step.index else f.server.as_known(part)
        counts += torch.bincount(known.train.values, minlength=step.n_items)
        if f.acting_in(part).trains != "nobody":
            strangers[:part.n_users] &= f.as_trained_on(part).train.lengths == 0
        if part.index > 0:
            strangers[part.old_users:part.n_users] = True
    return PopularItems(method, f.population.all_reduce({"counts": counts})["counts"], strangers)


class ColdItems:
    """The new items of a step; ``step``: with all its interactions, ``model``: with rows for all its items."""

    def __init__(self, f: Federation, step: Step, model: Snapshot):
        self.federation, self.step = f, step
        there = (step.train.lengths[:step.old_users if f.server.fold_in else step.n_users] > 0).nonzero().flatten()
        # Who is there for it here and has any interactions, and how many there are as the server knows it.
        self.users, self.count = there if f.population.clients_here else there[:0], len(there)
        rows = f.backbone.new_rows(f.seed, range(0), range(step.old_items, step.n_items))[0]
        self.start = {name: of_items.to(model.public[name]) for name, of_items in rows.items()}  # (new items, ...)
        self.training = fine_tuning(f, step, model, "private")

    def with_arrivals(self, model: Snapshot) -> Snapshot:
        """A model after the new items have got their rows."""
        f, model = self.federation, self._with(model, self.start)
        if f.server.cold_items == "untrained":
            return model
        if f.server.cold_items != "fold_in":
            return self._with(model, f.population.new_rows(partial(self.new_rows, model), self._counts()))
        chunks = list_chunks(self.step, self.users, model, self.training) if len(self.users) else []
        for round_ in range(f.server.fold_in_rounds):
            here = self._changes(model, [Work(self.training, chunks)], round_)
            model = self._with(model, f.population.new_rows(partial(self.new_rows, model), here))
        return model

    @property
    def sent(self) -> int:
        """Bytes that all clients together send in the rounds that fit the new items: their rows, and no others. They
        receive as many: what of the model stays as it is they have."""
        return self.federation.server.fold_in_rounds * self.count * bytes_of(self.start)

    def _of_method(self, model: Snapshot) -> Tables:
        method, old = self.federation.acting_in(self.step), self.step.old_items
        made = method.new_item_rows(range(old, self.step.n_items), {name: table[:old] for name, table in
                                                                    model.public.items()})
        return checks.checked_tables(method, "new_item_rows", made, self.start)

    def _with(self, model: Snapshot, rows: Tables) -> Snapshot:
        return replace(model, public={name: torch.cat([table[:self.step.old_items], rows[name]])
                                      for name, table in model.public.items()})

    def _counts(self) -> Tables:
        """With ``popularity``, in how many training interactions that clients know, up to the step, each known item is.
        """
        f, old = self.federation, self.step.old_items
        if f.server.cold_items != "popularity":
            return {}
        known = [truncated_for_new_users(part, f.server.fold_in) for part in f.stream.steps[:self.step.index + 1]]
        trained_on = torch.cat([part.train.values.to(f.device) for part in known])
        return {"counts": torch.bincount(trained_on, minlength=self.step.n_items)[:old]}

    def _changes(self, model: Snapshot, work: list[Work], round_: int) -> Tables:
        """What clients send of a round on all items: their changes of the new rows, added up, and of their weights."""
        f, step = self.federation, self.step
        weights = None if f.server.weighting == "uniform" else step.train.lengths.to(model.item_vectors)
        sums = train_clients(work, model, DrawKey(f.seed, step.index, round_), weights)
        changes = {f"change/{name}": sums.change[name][step.old_items:] for name in model.public}
        return {**changes, "weight": sums.tables()["numbers"][2]}

    def new_rows(self, model: Snapshot, sums: Tables) -> Tables:
        """What the server makes of sums over all clients: the rows of the new items, by table. ``model``: whose rows
        they are; ``sums``: of their ``counts``, or of their ``change/NAME`` and ``weight``."""
        f, old = self.federation, self.step.old_items
        if f.server.cold_items == "method":
            return self._of_method(model)
        if f.server.cold_items == "fold_in":  # the mean of FedAvg
            return {name: (sums[f"change/{name}"] / sums["weight"]).add_(table[old:])
                    for name, table in model.public.items()}
        if f.server.cold_items == "popularity":
            counts = sums["counts"].double()
            weights = (counts / counts.sum()).expand(self.step.n_items - old, old)
        else:
            weights = _similar(f, self.step)
        return {name: (weights.to(table) @ table[:old].flatten(1)).view_as(table[old:])
                for name, table in model.public.items()}


def cold_items_of(f: Federation, step: Step, model: Snapshot) -> ColdItems | None:
    """The new items of a step if they arrive after its training; arguments as of ``ColdItems``."""
    none = f.server.cold_items == "none" or step.index == 0 or step.n_items == step.old_items
    return None if none else ColdItems(f, step, model)


def _similar(f: Federation, step: Step) -> Tensor:
    """Weights of the known items' rows in the row of each new one, (new items, known items): the mean of those with
    the most similar texts, by the cosine. An item without a text has the mean of all known ones."""
    old = step.old_items
    vectors = f.stream.features[0].to(f.device)[:step.n_items].double()
    cosines = vectors[old:] @ vectors[:old].T
    k = min(f.server.similar_items, old)
    weights = torch.zeros_like(cosines).scatter_(1, cosines.topk(k, dim=1).indices, 1.0 / k)
    return torch.where(vectors[old:].any(1, keepdim=True), weights, 1.0 / old)
