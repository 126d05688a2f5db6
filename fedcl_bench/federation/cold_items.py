"""New items that arrive after a step's training (``cold_items``), and what they are ranked by.

No earlier step has them, and no client trains on them or draws them as negatives in the step's rounds. When a model is
validated or tested, their rows of the public tables are made, while all else stays as it is: of the rows of items with
similar texts (content-based cold start, Schein et al., SIGIR 2002), of those of popular items, by the method, or by
more rounds of which the server keeps these rows alone. From the next step on they are items like all others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..data.stream import Step
from ..plugin import checks
from ..plugin.state import Snapshot
from ..rng import DrawKey, Tables
from .cold_start import fine_tuning
from .parts import Federation, bytes_of
from .protocols import list_chunks
from .round import Work, train_clients


class ColdItems:
    """The new items of a step.

    Args:
        step: with all its interactions. model: with rows for all its items.

    Attributes:
        users: who is there for it, and has any interactions.
        count: how many these are, wherever they are, as the server knows it.
        start: the rows that the backbone gives the new items, each (new items, ...).
        training: FT's, with private and dense parameters frozen.
    """

    def __init__(self, f: Federation, step: Step, model: Snapshot):
        self.federation, self.step = f, step
        there = (step.train.lengths[:step.old_users if f.server.fold_in else step.n_users] > 0).nonzero().flatten()
        self.users, self.count = there if f.population.clients_here else there[:0], len(there)
        rows = f.backbone.new_rows(f.seed, range(0), range(step.old_items, step.n_items))[0]
        self.start = {name: of_items.to(model.public[name]) for name, of_items in rows.items()}
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
        """With ``popularity``, in how many training interactions up to the step each known item is."""
        f, old = self.federation, self.step.old_items
        if f.server.cold_items != "popularity":
            return {}
        earlier = [part.train.values.to(f.device) for part in f.stream.steps[:self.step.index + 1]]
        return {"counts": torch.bincount(torch.cat(earlier), minlength=self.step.n_items)[:old]}

    def _changes(self, model: Snapshot, work: list[Work], round_: int) -> Tables:
        """What clients send of a round on all items: their changes of the new rows, added up, and of their weights."""
        f, step = self.federation, self.step
        weights = None if f.server.weighting == "uniform" else step.train.lengths.to(model.item_vectors)
        sums = train_clients(work, model, DrawKey(f.seed, step.index, round_), weights)
        changes = {f"change/{name}": sums.change[name][step.old_items:] for name in model.public}
        return {**changes, "weight": sums.tables()["numbers"][2]}

    def new_rows(self, model: Snapshot, sums: Tables) -> Tables:
        """What the server makes of sums over all clients: the rows of the new items, by table.

        Args:
            model: whose rows they are.
            sums: of their ``counts``, or of their ``change/NAME`` and ``weight``.
        """
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
