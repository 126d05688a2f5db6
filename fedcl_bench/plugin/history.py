"""What an autoencoder of histories is: a backbone that makes a vector of all items that a client has, and of that
logits of all items.

A client's input is the set of its training items, an item that it has several times counted once. It is read as sums of
item rows alone, as the first layer of an encoder reads a vector of zeros and ones; the logits are inner products of the
vector and the rows of one public table, the last layer of a decoder. So a client that trains by SGD needs copies of the
rows of its own items only, and of the last layer a number per item (``training/factored.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, ClassVar

import torch
from torch import Tensor

from .. import rng
from ..data.stream import TrainingStep
from ..rng import DrawKey, Tables
from .backbone import Backbone, OwnBatch
from .local_settings import LocalSettings, OwnSamples

HISTORY = "history"
Pool = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class History:
    """The items of C clients."""

    users: Tensor  # ids, (C,)
    items: Tensor  # int64 (C, n)
    real: Tensor  # bool (C, n): False at padding, and where an item comes again
    # Key of a local batch's random numbers; None in an evaluation, where nothing is dropped or drawn.
    draw: DrawKey | None = None

    @staticmethod
    def of(users: Tensor, items: Tensor, valid: Tensor, draw: DrawKey | None = None) -> "History":
        """That of lists (C, n) in which an item may come several times."""
        order = items.masked_fill(~valid, -1).sort(dim=1, stable=True)
        again = torch.zeros_like(valid)
        again[:, 1:] = order.values[:, 1:] == order.values[:, :-1]
        return History(users, items, valid & ~torch.zeros_like(again).scatter_(1, order.indices, again), draw)

    @property
    def size(self) -> Tensor:
        """How many items each client has, at least 1, (C, 1)."""
        return self.real.sum(1, keepdim=True).clamp(min=1)

    def dropout_factors(self, name: str, share: float, like: Tensor) -> Tensor:
        """Factors of the items, (C, n), under a dropout of this name and share: 0 or 1 / (1 - share)."""
        real = self.real.to(like)
        if self.draw is None or share == 0.0:
            return real
        draws = rng.uniform(rng.bits(self.draw.clients(name, self.users)[:, None], self.items))
        return real * (draws >= share) / (1.0 - share)

    def dropped(self, name: str, share: float, values: Tensor) -> Tensor:
        """``values`` (C, d) under such a dropout of their entries."""
        if self.draw is None or share == 0.0:
            return values
        index = torch.arange(values.shape[1], device=values.device)
        draws = rng.uniform(rng.bits(self.draw.clients(name, self.users)[:, None], index))
        return values * (draws >= share) / (1.0 - share)

    def normal(self, name: str, like: Tensor) -> Tensor:
        """Standard normal numbers of this name, (C, d) as ``like``; zeros in an evaluation."""
        if self.draw is None:
            return torch.zeros_like(like)
        index = torch.arange(like.shape[1], device=like.device)
        return rng.normals(self.draw.clients(name, self.users)[:, None], index).to(like)


class HistoryBackbone(Backbone):
    """Base class of autoencoders; subclasses implement ``represent``, ``new_rows`` and ``learning_rates``."""

    output: ClassVar[str]  # the public table, (items, d), whose rows the logits are inner products with
    whole_tables = True
    ignored = {name: "with a backbone that trains on whole histories, against all items" for name in
               ("batch_size", "negatives", "negative_pool", "negative_draw", "repeated_positives")}

    def represent(self, clients: Tables, pool: Pool, history: History) -> tuple[Tensor, Tensor | None]:
        """What each client's history comes to. ``clients``: private parameters and own copies of dense public ones,
        each (C, ...). ``pool``: given the name of a public table other than ``output``, or of a personal one, whose
        rows are vectors, and factors of the items, (C, n): the sum of the client's rows times their factors, (C,
        width). Factors are 0 where ``history.real`` is False. ``history``: its items. Returns the vectors (C, d) that
        logits are inner products with; and what else belongs to the loss, (C,), or None."""
        raise NotImplementedError(f"backbone '{self.name}' has no represent()")

    def history_loss(self, scores: Tensor, positive: Tensor) -> Tensor:
        """Each client's loss, (C,), of logits of all items and whether they are its own, both (C, items): the negative
        log-likelihood of the multinomial distribution (Liang et al., WWW 2018)."""
        return -(torch.log_softmax(scores, 1) * positive).sum(1)

    def own_samples(self, settings: LocalSettings) -> OwnSamples:
        return OwnSamples(torch.ones_like, 1, (0, 8), as_set=True)

    def own_loss(self, clients: Tables, rows: Tables, batch: OwnBatch) -> Tensor:
        history = History.of(batch.users, batch.positives, torch.ones_like(batch.positives, dtype=torch.bool),
                             batch.draw)
        vectors, term = self.represent(clients, _pool({**clients, **rows}, history), history)
        scores = torch.bmm(vectors.unsqueeze(1), rows[self.output].transpose(1, 2)).squeeze(1)
        return self.loss_of(scores, history, term)

    def loss_of(self, scores: Tensor, history: History, term: Tensor | None) -> Tensor:
        """The whole loss of each client, (C,)."""
        positive = torch.zeros_like(scores).scatter_add_(1, history.items, history.real.to(scores))
        loss = self.history_loss(scores, positive)
        return loss if term is None else loss + term

    def remember(self, step: TrainingStep, memory: Tables) -> Tables:
        """Which items each client trained on in its latest block with any, 1 or 0, (users, items)."""
        lists = step.train
        known = memory.get(HISTORY, torch.zeros(0, 0, dtype=torch.int8, device=lists.values.device))
        table = torch.zeros(step.n_users, step.n_items, dtype=torch.int8, device=lists.values.device)
        table[:known.shape[0], :known.shape[1]] = known
        users = (lists.lengths > 0).nonzero().flatten()
        table[users] = 0
        row, item = lists.select(users)
        table[users[row], item] = 1
        return {HISTORY: table}

    def _evaluated(self, clients: Tables, tables: Tables, n_items: int) -> Tensor:
        """The clients' vectors, (C, d), without random numbers; an earlier model may know fewer items than they."""
        real = clients[HISTORY][:, :n_items] > 0
        users, items = (torch.arange(size, device=real.device) for size in real.shape)
        history = History(users, items.expand_as(real), real)
        return self.represent(clients, _pool({**clients, **tables}, history), history)[0]

    def score(self, clients: Tables, rows: Tables) -> Tensor:
        vectors = self._evaluated(clients, rows, rows[self.output].shape[1])
        return torch.bmm(vectors.unsqueeze(1), rows[self.output].transpose(1, 2)).squeeze(1)

    def score_all(self, clients: Tables, public: Tables) -> Tensor:
        return self._evaluated(clients, public, len(public[self.output])) @ public[self.output].T


def _pool(tables: Tables, history: History) -> Pool:
    """``represent``'s, of tables with all items' rows: each client's, (C, items, ...), or one for all, (items, ...)."""
    client, place = history.real.nonzero(as_tuple=True)
    item = history.items[client, place]

    def pool(name: str, factors: Tensor) -> Tensor:
        table = tables[name]
        rows = table[item] if table.dim() == 2 else table[client, item]
        result = rows.new_zeros(len(history.users), rows.shape[1])
        return result.index_add(0, client, rows * factors[client, place, None])

    return pool
