"""What a client trains on in a round: chunks of similar clients, and their negatives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Callable

import torch
from torch import Tensor

from .. import rng
from ..core.errors import UserError
from ..plugin.local_settings import LocalSettings, OwnSamples
from ..kernels import ops
from ..core.tuning import SIZES

if TYPE_CHECKING:
    from ..data.stream import Ragged, Step, TrainingStep


@dataclass(frozen=True)
class Chunk:
    """Clients trained together; all take the same number of local batches, unless ``inner``: then clients with fewer
    may sit out the others' last ones of each local epoch."""

    users: Tensor  # int64 ids, shape (C,)
    positives: Tensor  # training items, shape (C, P), short lists padded with their first item
    count: Tensor  # true number of positives, shape (C,)
    batches: int  # local batches per epoch, of the client with most
    others: "Others"  # for drawing negatives, see ``Others``
    inner: bool = False  # trained without copies of item rows (see ``training/factored.py``)
    dense: bool = False  # trained so, on the scores of all items
    ratings: Tensor | None = None  # of the positives, (C, P), for a backbone that predicts them

    def materialise(self) -> "Chunk":
        """Itself; see ``LaterChunk``."""
        return self


@dataclass(frozen=True)
class LaterChunk:
    """A chunk that is made when it is looked at, by ``now()``, and not kept; ``make`` is given its clients."""

    users: Tensor
    batches: int
    make: Callable[[Tensor], Chunk]

    def materialise(self) -> Chunk:
        return self.make(self.users)


@dataclass(frozen=True)
class Needs:
    """What clients need in training, which says how many of them come together."""

    pairwise: bool = False  # a sample is a pair of a positive and a negative (see ``Backbone``)
    whole_tables: bool = False  # clients hold all item rows (see ``Backbone``)
    # Of a backbone with a loss of its own; only clients with equally many positives come together then, unless these
    # are a set.
    sampler: OwnSamples | None = None
    inner: bool = False  # clients can be trained without copies of item rows, and are where that is less work
    samples_only: bool = False  # and nothing looks at other logits than the samples' (see ``training/factored.py``)
    fused: bool = False  # and their whole round is one call (see ``training/factored.py``)
    even: bool = False  # clients of a chunk have equally many local batches, each of which moves all item rows
    unnumbered: bool = False  # nothing in a local batch depends on how many a client had before it in the round
    chunk_elements: int = SIZES.chunk_elements  # target size of a chunk's stacked rows; a single client may exceed it


def make_chunks(step: Step | TrainingStep, users: Tensor, settings: LocalSettings, row_width: int,
                needs: Needs = Needs(), positives: Ragged | None = None) -> list[Chunk | LaterChunk]:
    """Group clients of similar size so that padding stays small and memory bounded. ``users``: the round's
    participants; each has at least one training item; ``row_width``: numbers per item row over all public and personal
    tables; ``positives``: what is trained on in this round, if not all of ``step.train``; no item of that is a
    negative."""
    train = positives or step.train
    if settings.repeated_positives == "once" and positives is None:  # the items of sessions stay as they are
        train = train.distinct()
    count, order = torch.sort(train.lengths[users], descending=True, stable=True)
    users = users[order]
    clients = _Sorted(count.cpu(), _batches(count, settings, needs), step.n_items, settings, row_width, needs,
                      needs.inner and ops.serve(users))
    keep = int(clients.sizes.sum()) <= SIZES.kept_positives
    chunks, start = [], 0
    while start < len(users):
        end, rows = clients.cut(start)
        batches = int(clients.batches[start])
        chunk = LaterChunk(users[start:end], batches, partial(
            _chunk, step, train, settings, batches=batches, inner=rows is not Rows.COPIES, dense=rows is Rows.ALL))
        chunks.append(chunk.materialise() if keep else chunk)
        start = end
    return chunks


def _batches(count: Tensor, settings: LocalSettings, needs: Needs) -> Tensor:
    """Local batches per epoch of clients with so many positives."""
    if needs.sampler is not None:
        return -(-needs.sampler.of(count) // needs.sampler.per_batch)
    return -(-count * _samples(settings, needs) // settings.batch_size)


def _samples(settings: LocalSettings, needs: Needs) -> int:
    """Samples of a positive: its pairs, or itself and its negatives."""
    return settings.negatives if needs.pairwise else 1 + settings.negatives


@dataclass(frozen=True)
class _Sorted:
    """Clients by descending size, to be cut into chunks."""

    sizes: Tensor  # positives of each, on the processor
    batches: Tensor  # its local batches per epoch
    n_items: int
    settings: LocalSettings
    row_width: int
    needs: Needs
    compiled: bool  # they can be trained without copies of item rows, by kernels

    @property
    def per_positive(self) -> int:
        """Item rows that a positive brings along, its own among them."""
        sampler = self.needs.sampler
        return 1 if sampler is not None and sampler.as_set else 1 + self.settings.negatives

    @cached_property
    def ascending(self) -> Tensor:
        """Negative sizes, to search in."""
        return -self.sizes

    @cached_property
    def samples(self) -> Tensor:
        """Samples of the clients up to each, itself included."""
        return self.sizes.cumsum(0) * self.per_positive

    @cached_property
    def even(self) -> int:
        """Samples of a chunk whose round is one call, so that there are neither many nor uneven ones."""
        return max(SIZES.least_of_calls, -(-int(self.samples[-1]) // SIZES.chunks_of_calls))

    def cut(self, start: int) -> tuple[int, "Rows"]:
        """Where the chunk that begins with client ``start`` ends, and what its clients hold."""
        rows = self._kind(start)
        width = self._width(start, rows)
        smallest = self._smallest(start, rows)
        alike = int(torch.searchsorted(self.ascending, -smallest, right=True))  # sizes descend
        end = min(self._limit(start, width), self._even_end(start, rows), alike)
        padding = (self.sizes[start] - self.sizes[start:end]) * self.per_positive * width
        if rows is Rows.ALL:  # sitting out a local batch costs what taking part does
            padding += (self.batches[start] - self.batches[start:end]).cpu() * self.n_items * SIZES.dense_cost
        # Stop where padding would cost more than a new chunk.
        return start + int(torch.searchsorted(padding.cumsum(0), SIZES.padding_elements, right=True)), rows

    def _rows(self, start: int) -> int:
        """Item rows that client ``start`` holds."""
        return self.n_items if self.needs.whole_tables else int(self.sizes[start]) * self.per_positive

    def _kind(self, start: int) -> "Rows":
        """What is least work for client ``start``. Kernels read the rows of samples in place, if a round's updates are
        few enough to be kept apart. Where somebody looks at the logits of other items too, scores of all items are one
        matrix product, and less work as long as items are not many times the client's rows."""
        if not self.needs.inner:
            return Rows.COPIES
        rows, batches, updates = self._rows(start), int(self.batches[start]), self._updates(start)
        in_place = self.compiled and updates <= SIZES.most_updates
        if in_place and self.needs.samples_only:
            return Rows.SAMPLES
        if in_place and batches <= SIZES.weighted_batches:
            return Rows.ALL if self.n_items <= SIZES.dense_items_compiled * rows else Rows.SAMPLES
        return Rows.ALL if self.n_items * updates <= SIZES.dense_items * rows else Rows.COPIES

    def _updates(self, start: int) -> int:
        """Local batches of client ``start`` in a round."""
        return int(self.batches[start]) * self.settings.local_epochs

    def _width(self, start: int, rows: "Rows") -> int:
        """Numbers that a sample of client ``start`` counts as: those of its row, or by how many updates are kept."""
        if rows is Rows.COPIES:
            return self.row_width
        kept = self._updates(start) // SIZES.updates_per_number if rows is Rows.SAMPLES else 0
        return max(SIZES.factored_width, kept)

    def _limit(self, start: int, width: int) -> int:
        """Where the memory of a chunk that begins with client ``start`` ends; one client always fits."""
        limit = start + max(1, self.needs.chunk_elements // (self._rows(start) * width))
        if (sampler := self.needs.sampler) is None:
            return limit
        alone, per_item = sampler.elements
        samples = max(1, min(sampler.per_batch, int(sampler.of(self.sizes[start]))))
        made = (alone + per_item * self.n_items) * samples  # numbers on the way to a client's own loss
        return min(limit, start + max(1, SIZES.own_loss_factor * self.needs.chunk_elements // made))

    def _even_end(self, start: int, rows: "Rows") -> int:
        """Where a chunk whose round is one call has its even share of the samples."""
        if not self.needs.fused or self.needs.even or rows is not Rows.SAMPLES:
            return len(self.sizes)
        before = int(self.samples[start - 1]) if start else 0
        return start + 1 + int(torch.searchsorted(self.samples[start:], before + self.even))

    def _smallest(self, start: int, rows: "Rows") -> int:
        """The least positives of a client that can be in a chunk with client ``start``: as many local batches, unless
        clients may sit some out."""
        if (sampler := self.needs.sampler) is not None:
            return 1 if sampler.as_set else int(self.sizes[start])
        may_sit_out = not self.needs.even and (
            rows is Rows.ALL or rows is Rows.SAMPLES and self.needs.samples_only)
        if may_sit_out and (self.settings.local_epochs == 1 or self.needs.unnumbered):
            return 1
        fewer_batches = (int(self.batches[start]) - 1) * self.settings.batch_size
        return fewer_batches // _samples(self.settings, self.needs) + 1


class Rows(Enum):
    """Which item rows clients of a chunk hold: copies of those that they look up, or, trained without copies (see
    ``factored.py``), a number per update for those of their samples, or for all."""

    COPIES, SAMPLES, ALL = range(3)


def _chunk(step: Step | TrainingStep, train: Ragged, settings: LocalSettings, members: Tensor, **layout) -> Chunk:
    """A chunk of clients; arguments beside those of ``make_chunks``: what they train on, their ids, and other fields of
    ``Chunk``."""
    matrix = padded(train, members)
    no_negatives = [matrix] if train is step.train else [padded(step.train, members)]
    if settings.negative_pool == "untouched":
        no_negatives += [padded(step.split(name), members, matrix[:, :1]) for name in ("valid", "test")]
    others = Others.of(torch.cat(no_negatives, 1), step.n_items)
    fewest, needed = int(others.count.min()), max(settings.distinct, 1)
    if settings.negatives and fewest < needed:
        user = int(members[others.count.flatten().argmin()])
        known = f"all but {fewest} of the {step.n_items}" if fewest else f"all {step.n_items}"
        raise UserError(f"block {step.index}: client {user} (counted from 0) has {known} items known, and {needed} "
                        f"must be left to draw negatives from.\nTake a dataset with more items, or a lower k_core, "
                        f"which leaves out items that few users have.")
    ratings = None if train.ratings is None else padded(train.rated, members)
    return Chunk(members, matrix, train.counts(members), others=others, ratings=ratings, **layout)


def padded(lists: Ragged, users: Tensor, fill: Tensor | None = None) -> Tensor:
    """Lists as a matrix (C, longest), short ones padded with ``fill`` (C, 1) or their own first item."""
    n = lists.counts(users)
    row, item = lists.select(users)
    column = torch.arange(len(row), device=row.device) - (torch.cumsum(n, 0) - n)[row]
    if fill is None:
        fill = lists.values[lists.indptr[users]][:, None]
    matrix = fill.repeat(1, int(n.max()))
    matrix[row, column] = item
    return matrix


@dataclass(frozen=True)
class Others:
    """The items that are no positives of each client, in ascending order: what negatives are drawn from. They are
    counted between the sorted positives."""

    count: Tensor  # how many there are, shape (C, 1)
    # For the j-th of the client's distinct positives in ascending order, how many other items precede it, int32 of
    # shape (C, P), padded with a number above all items.
    gaps: Tensor

    @staticmethod
    def of(positives: Tensor, n_items: int) -> "Others":
        """Of padded lists of positives, shape (C, P); an item may stand in a list several times."""
        above = torch.iinfo(torch.int64).max
        ascending = positives.sort(dim=1).values
        repeated = torch.zeros_like(ascending, dtype=torch.bool)
        repeated[:, 1:] = ascending[:, 1:] == ascending[:, :-1]
        distinct = ascending.masked_fill(repeated, above).sort(1).values if bool(repeated.any()) else ascending
        rank = torch.arange(distinct.shape[1], device=positives.device)
        return Others(n_items - (~repeated).sum(1, keepdim=True),
                      torch.where(distinct < above, distinct - rank, torch.iinfo(torch.int32).max).int())

    def at(self, r: Tensor) -> Tensor:
        """The items at positions ``r`` (int64, shape (C, n)) of each client's list."""
        return r + torch.searchsorted(self.gaps, r.int(), right=True)


def draw_negatives(chunk: Chunk, settings: LocalSettings, seed: int, step: int, round_: int,
                   result: Tensor | None = None) -> Tensor:
    """Negatives of one round: uniform over ``chunk.others``. ``result``: what they are written to. Returns int64 of
    shape (C, P * negatives); client c's own are the first ``negatives * count[c]``, those of its first positive first;
    the rest are that positive."""
    keys = rng.client_keys(rng.key(seed, "negatives", step, round_), chunk.users)
    n, needed, others = chunk.positives.shape[1] * settings.negatives, chunk.count * settings.negatives, chunk.others
    if result is None:
        result = chunk.positives.new_empty(len(keys), n)
    if ops.serve(keys):
        ops.negatives(keys, needed, others.count, others.gaps, chunk.positives, settings.distinct, result)
        return result
    slot = torch.arange(n, device=keys.device)
    pattern = rng.bits(keys[:, None], slot)
    position = (_distinct(pattern.view(len(keys), -1, settings.distinct), others.count) if settings.distinct else
                rng.integers(pattern, others.count))
    return result.copy_(torch.where(slot < needed[:, None], others.at(position), chunk.positives[:, :1]))


def _distinct(pattern: Tensor, count: Tensor) -> Tensor:
    """Without replacement: the j-th of a positive counts positions that the ones before it have left. ``pattern``:
    random bits, shape (C, P, negatives); ``count``: how many positions there are, shape (C, 1). Returns shape (C, P *
    negatives)."""
    taken = torch.empty(*pattern.shape[:2], 0, dtype=torch.int64, device=pattern.device)
    columns = []
    for j in range(pattern.shape[2]):
        position = rng.integers(pattern[:, :, j], (count - j).clamp(min=1))
        for i in range(j):
            position += position >= taken[:, :, i]
        columns.append(position)
        taken = torch.cat([taken, position[:, :, None]], 2).sort(2).values
    return torch.stack(columns, 2).flatten(1)
