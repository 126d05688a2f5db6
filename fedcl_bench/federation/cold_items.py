"""New items that arrive after a step's training (``cold_items``), and what they are ranked by.

No earlier step has them, and no client trains on them or draws them as negatives in the step's rounds. When a model is
validated or tested, their rows of the public tables are made, while all else stays as it is: of the rows of items with
similar texts (content-based cold start, Schein et al., SIGIR 2002), of those of popular items, by the method, or by
more rounds of which the server keeps these rows alone. From the next step on they are items like all others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data.stream import Step
from ..plugin import checks
from ..plugin.method import Method, NoSettings
from ..plugin.state import Snapshot
from ..rng import DrawKey, Tables
from ..training.strategies import Training, choose_strategy
from . import server
from .parts import Federation
from .protocols import list_chunks
from .round import Work, train_clients


@dataclass(frozen=True)
class ColdItems:
    """The new items of a step.

    Attributes:
        step: with its training interactions with new items. users: who is there for it, and has any interactions.
        start: the rows that the backbone gives the new items, each (new items, ...).
        weights: of the known items' rows in the row of each new one, (new items, known items); None: rows are fitted,
            or left at the start.
        training: FT's, with private and dense parameters frozen.
    """

    federation: Federation
    step: Step
    users: Tensor
    start: Tables
    weights: Tensor | None
    training: Training

    def arrived(self, model: Snapshot) -> Snapshot:
        """A model after the new items have got their rows."""
        if self.federation.server.cold_items == "method":
            return self._with(model, self._of_method(model))
        if self.weights is not None:
            return self._with(model, {name: (self.weights.to(table) @ table[:self.step.old_items].flatten(1)).view_as(
                table[self.step.old_items:]) for name, table in model.public.items()})
        model = self._with(model, self.start)
        return self._fitted(model) if self.federation.server.cold_items == "fold_in" else model

    def _of_method(self, model: Snapshot) -> Tables:
        """The rows that the method's server makes."""
        method, old = self.federation.acting_in(self.step), self.step.old_items
        made = method.new_item_rows(range(old, self.step.n_items), {name: table[:old] for name, table in
                                                                    model.public.items()})
        return checks.checked_tables(method, "new_item_rows", made, self.start)

    def _with(self, model: Snapshot, rows: Tables) -> Snapshot:
        return replace(model, public={name: torch.cat([table[:self.step.old_items], rows[name]])
                                      for name, table in model.public.items()})

    def _fitted(self, model: Snapshot) -> Snapshot:
        """The model after rounds on all items, of which the new rows are kept."""
        f, step, old = self.federation, self.step, self.step.old_items
        work = [Work(self.training, list_chunks(step, self.users, model, self.training))]
        weights = None if f.server.weighting == "uniform" else step.train.lengths.to(model.item_vectors)
        for round_ in range(f.server.fold_in_rounds):
            sums = train_clients(work, model, DrawKey(f.seed, step.index, round_), weights)
            after, _ = server.mean(sums, model, f.backbone, f.seed)
            model = self._with(model, {name: table[old:] for name, table in after.public.items()})
        return model


def cold_items_of(f: Federation, step: Step, model: Snapshot) -> ColdItems | None:
    """The new items of a step if they arrive after its training.

    Args:
        step: with all its interactions.
        model: with rows for all its items.
    """
    if f.server.cold_items == "none" or step.index == 0 or step.n_items == step.old_items:
        return None
    items = range(step.old_items, step.n_items)
    rows = f.backbone.new_rows(f.seed, range(0), items)[0]
    start = {name: of_items.to(model.public[name]) for name, of_items in rows.items()}
    there = step.old_users if f.server.fold_in else step.n_users
    users = (step.train.lengths[:there] > 0).nonzero().flatten()
    method = Method(NoSettings())
    training = Training(f.backbone_in(step.index), method, f.local,
                        choose_strategy(f.backbone, method, model, f.local, sessions=False), frozen="private")
    return ColdItems(f, step, users, start, _weights(f, step), training)


def _weights(f: Federation, step: Step) -> Tensor | None:
    """``ColdItems.weights``: the mean of the items with the most similar texts, by the cosine, or of all known items in
    proportion to their training interactions up to the step. An item without a text has the mean of all known ones."""
    old, device = step.old_items, step.train.values.device
    if f.server.cold_items == "popularity":
        earlier = [part.train.values.to(device) for part in f.stream.steps[:step.index + 1]]
        counts = torch.bincount(torch.cat(earlier), minlength=step.n_items)[:old].double()
        return (counts / counts.sum()).expand(step.n_items - old, old)
    if f.server.cold_items != "similar":
        return None
    vectors = f.stream.features[0].to(device)[:step.n_items].double()
    cosines = vectors[old:] @ vectors[:old].T
    k = min(f.server.similar_items, old)
    weights = torch.zeros_like(cosines).scatter_(1, cosines.topk(k, dim=1).indices, 1.0 / k)
    return torch.where(vectors[old:].any(1, keepdim=True), weights, 1.0 / old)
