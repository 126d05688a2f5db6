"""Local training of whole item tables by the rows that a client looks up.

Weight decay, and the pull towards a table that the server made for a client, concern every row. Under SGD the rows that
are in none of a client's local batches need not be trained for it: with learning rates eta_k, decay l and pull p, such
a row q with served row r (0 without one; one of l and p is 0) ends at r + f (q - r), f = prod_k (1 - eta_k (l + p)). So
a client holds the rows of its samples, and one factor f for all others. This is the mathematics of ``list_trainer.py``
on whole tables.
"""

from __future__ import annotations

from typing import Mapping

import torch
from torch import Tensor

from ..plugin import checks
from ..rng import DrawKey, Tables
from ..plugin.state import Snapshot
from .sampling import Chunk
from .chunk_trainer import Slots
from .list_trainer import BatchScoring, ListTrainer
from .strategies import Training


class LazyDecayTrainer(ListTrainer):
    """``ListTrainer`` that holds the rows of the clients' samples. ``kept``: the clients' whole trained copies of the
    public tables, if they keep them, each (C, items, ...)."""

    all_rows = False

    def __init__(self, chunk: Chunk, model: Snapshot, training: Training, draw: DrawKey):
        super().__init__(chunk, model, training, draw)
        self.by_hand = training.by_hand
        self.covering, self.reads_end = self.by_hand, True
        tables = [*model.public, *self.personal]
        # F of every table, each (C,)
        self.decay = {name: torch.ones(len(self.users), dtype=torch.float64, device=self.users.device)
                     for name in tables}
        self.start = {name: value.clone() for name, value in self.clients.items() if name not in self.personal}
        # How far the rows that are not held begin from those served, each (C, items, ...), and squared, (C,).
        self.away = {name: model.public[name] - table[self.users] for name, table in model.personalised.items()}
        cells = self.slots.cells(torch.arange(len(self.users), device=self.users.device), self.n_items)
        for away in self.away.values():
            away.flatten(0, 1).index_fill_(0, cells, 0.0)
        self.squares = sum(torch.linalg.vector_norm(away.flatten(1), dim=1).double().square()
                           for away in self.away.values())

    def _layout(self, samples: Tensor, positives: int, replayed: Tensor | None, n_items: int) -> Slots:
        return Slots.distinct(samples, positives, replayed, n_items)

    def _served(self) -> Tables:
        return {name: self._rows_held(table) for name, table in self.model.personalised.items()}

    def _local_batch(self, view: BatchScoring, rates: Mapping[str, float], taking: Tensor | None, batch: int) -> Tensor:
        rest = next(iter(self.decay.values()))
        beyond = 0.5 * self.pull * self.squares * rest.square()  # what the pull on the other rows adds to the loss
        part = torch.ones_like(rest) if taking is None else taking.double()
        if self.by_hand:
            lr = {name: (rate * part).to(self.dtype) for name, rate in rates.items()}
            with torch.no_grad():
                loss = self.backbone.sgd_step(self.clients, self.rows, self._labels, view.weights, lr, self.draw.round)
            checks.check_tensor(self.backbone, "sgd_step", loss, tuple(rest.shape), "(C,): one number per client")
        else:
            loss = super()._local_batch(view, rates, taking, batch)
        for name, factor in self.decay.items():
            strength = self.backbone.weight_decay + (self.pull if name in self.away else 0.0)
            factor *= 1.0 - rates[name] * strength * part
        return loss + beyond

    @torch.no_grad()
    def _finish(self) -> None:
        """Make ``moved`` of what the parameters have become: of held rows, beyond what they would have moved at rest.
        """
        self.moved = {name: self.clients[name] - start for name, start in self.start.items()}
        begun = self._own_copies()
        for name, rows in self.rows.items():
            factor = self.decay[name].to(rows).view(-1, *[1] * (rows.dim() - 1))
            rest = begun[name].mul_(factor) if name not in self.personalised else torch.lerp(
                self.personalised[name], begun[name], factor)
            self.moved[name] = rows - rest
        self.kept = {}
        if self.backbone.keeps_local_tables:
            tables = self.tables_now()
            self.kept = {name: tables[name] for name in self.rows}

    def tables_now(self, clients: Tensor | None = None) -> Tables:
        """Whole public and personal tables as clients have them now, each (K, items, ...); ``clients``: their
        positions, (K,); None: all."""
        part = slice(None) if clients is None else clients
        items, result = self.slots.items[part], {}
        for name, held in {**self.rows, **self.own_rows}.items():
            rows = held[part]
            table = self.model.public[name] if name in self.rows else self.personal[name][self.users[part]]
            factor = self.decay[name][part].to(rows).view(-1, *[1] * (rows.dim() - 1))
            tables = table - (1.0 - factor) * self.away[name][part] if name in self.away else table * factor
            result[name] = tables.scatter_(1, items.view(*items.shape, *[1] * (rows.dim() - 2)).expand_as(rows), rows)
        return result
