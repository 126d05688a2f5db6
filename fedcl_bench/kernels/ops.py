"""Compiled inner loops for the processor (``kernels.c``), and PyTorch's own operations where there are none.

They are built when the package is installed (see ``library.py``). Without them, on a GPU, or with
``FEDCL_BENCH_KERNELS=0`` the callers do the same in PyTorch: integers to the bit, other numbers up to rounding.

What they gain is the processor time of a whole job without one of them over that with it, where it gains most
(``benchmarks/strategies.py``): ``group`` 2.0 and ``negatives`` 1.4 (FedNCF), ``ranks`` 1.3 (FedMF), ``nearest`` 1.3
(RLP2), ``all_ranks`` 1.25, ``mixed`` 1.2 (XING). ``weighted_bce`` gains 1.17 (F3CRec on FedNCF) and decides numbers.
The others make the strategies of ``training/strategies.py``, which says what those gain.

Whatever a kernel looks up by number is checked before. Without memory every function raises MemoryError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from .library import REALS, call, why_not


def serve(tensor: Tensor) -> bool:
    """Whether there are kernels for tensors like this one."""
    return tensor.device.type == "cpu" and why_not() is None


def _real(name: str, tensor: Tensor) -> str:
    """The function for numbers of a tensor's type."""
    return f"{name}_{REALS[tensor.dtype]}"


def _within(what: str, numbers: Tensor | int, end: int, start: int = 0) -> None:
    """Raise ValueError unless all numbers are from ``start`` to before ``end``."""
    if isinstance(numbers, Tensor) and not numbers.numel():
        return
    low, high = map(int, torch.aminmax(numbers)) if isinstance(numbers, Tensor) else (numbers, numbers)
    if low < start or high >= end:
        raise ValueError(f"kernels: {what} are {low} to {high}, expected {start} to {end - 1}")


def mixed(numbers: Tensor) -> None:
    """``rng.mix`` of every number, in its place; int64 of any shape."""
    call("mixed", numbers, numbers.numel())


def negatives(keys: Tensor, drawn: Tensor, others: Tensor, gaps: Tensor, positives: Tensor, distinct: int,
              result: Tensor) -> None:
    """The first ``drawn`` draws from each client's other items, then its first positive. ``keys``: of the clients'
    streams, shape (C,); ``drawn``: how many each needs, shape (C,); ``others``, ``gaps``: ``count`` and ``gaps`` of
    ``sampling.Others``; ``positives``: shape (C, P); ``distinct``: so many draws after the other are all different, or
    0; ``result``: int64 of shape (C, n), written to; its rows may lie apart."""
    call("negatives", keys, drawn, others, gaps.contiguous(), gaps.shape[1], positives, positives.shape[1],
         *result.shape, distinct, result, result.stride(0))


def group(keys: Tensor, head: int, head_count: Tensor | None, tail_count: Tensor, slots: Tensor | None, n: int,
          size: int) -> Tensor:
    """Each client's samples, or their slots, by local batch: the b-th of ``size`` is that of the b-th smallest keys.
    ``keys``: of the clients' streams, shape (C,); the key of a client's i-th sample is the stream's i-th number;
    ``head``, ``head_count``: in how many columns positives lie, and how many of these are a client's, (C,); None: none;
    ``tail_count``: how many of the columns after that are a client's, (C,); ``slots``: of the samples, int64 of shape
    (C, n); None: their columns. Returns int32 of shape (C, n), padded with -1; within a local batch, in the order of
    samples."""
    result = torch.empty(len(keys), n, dtype=torch.int32)
    call("group", keys, head, head_count, tail_count, None if slots is None else slots.contiguous(), len(keys), n, size,
         result)
    return result


def weighted_bce(scores: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """As ``functional.weighted_bce``, in single precision: (losses of shape (C,), their slopes of shape (C, n))."""
    loss, slopes = scores.new_empty(len(scores)), torch.empty_like(scores, memory_format=torch.contiguous_format)
    call("weighted_bce", scores.contiguous(), targets.contiguous(), weights.contiguous(), *scores.shape, loss, slopes)
    return loss, slopes


def row_products(table: Tensor, items: Tensor, vectors: Tensor, constants: Tensor | None) -> Tensor:
    """Inner products of each client's vector, (C, d), with rows ``items`` (C, n) of a table, plus constants (C, 1)."""
    result = table.new_empty(items.shape)
    _within("row_products: items", items, len(table))
    call(_real("row_products", table), table, items, vectors.contiguous(),
         None if constants is None else constants.contiguous(), *items.shape, table.shape[1], result)
    return result


def nearest(products: Tensor, lengths: Tensor, filled: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As ``functional.nearest_entries``. ``products``: of each entry and item ``|key|^2 - 2 key . query``, (C, entries,
    items). ``lengths``: ``|query|^2``, (C, items)."""
    clients, n, items = products.shape
    _within("nearest: numbers of entries", k, n + 1, start=1)
    distances, entries = products.new_empty(clients, k, items), torch.empty(clients, k, items, dtype=torch.int64)
    call(_real("nearest", products), products.contiguous(), lengths.contiguous(), filled.contiguous(), clients, n,
         items, k, distances, entries)
    return distances, entries


def row_sums(table: Tensor, items: Tensor, factors: Tensor) -> Tensor:
    """Sums of rows ``items`` (C, n) of a table, times ``factors`` (C, n): shape (C, d)."""
    result = table.new_empty(len(items), table.shape[1])
    _within("row_sums: items", items, len(table))
    call(_real("row_sums", table), table, items, factors.contiguous(), *items.shape, table.shape[1], result)
    return result


def add_outer(table: Tensor, items: Tensor | None, held: Tensor | None, steps: Tensor, vectors: Tensor) -> None:
    """Add clients' steps times vectors to rows of a table, client by client. ``table``: (items, d); ``items``: of each
    client's slots, (C, slots); None: all, in order; ``held``: how many of them, the first, have steps that are not 0,
    (C,); None: any may; ``steps``, ``vectors``: of each update, (C, slots, updates) and (C, updates, d)."""
    clients, slots, updates = steps.shape
    _within("add_outer: items", slots - 1 if items is None else items, len(table))
    call(_real("add_outer", table), table, items, held, steps, vectors.contiguous(), updates, clients, slots,
         table.shape[1])


class MovedRows(NamedTuple):
    """Clients' item rows, which updates have moved."""

    table: Tensor  # the rows before, (items, d)
    items: Tensor | None  # of each client's slots, (C, slots); None: all, in order
    # The first ``done`` updates have moved a client's rows, by steps (C, slots, updates) times vectors (C, updates, d).
    steps: Tensor
    vectors: Tensor
    done: int


class InnerSamples(NamedTuple):
    """The samples of a local batch."""

    # Slots by local batch (see ``group``), and the columns of this one
    order: Tensor
    start: int
    end: int
    share: Tensor  # a sample's weight, (C, 1)
    positive: Tensor  # whether a slot's item is a positive, (slots,) or (C, slots)


def inner_batch(rows: MovedRows, vectors: Tensor, constants: Tensor | None, samples: InnerSamples,
                needed: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Cross-entropy of a local batch whose logits are inner products, and its gradients. ``rows``: the gradients of the
    slots' logits are written to the next step, if they are needed; ``vectors``, ``constants``: a logit is the client's
    vector (C, d) times the item's row, plus its constant (C, 1); ``needed``: whether gradients of vectors, of constants
    and of rows are. Returns losses (C,); gradients of the vectors (C, d) and of the constants (C, 1)."""
    table, items, steps, past, done = rows
    order, start, end, share, positive = samples
    (clients, slots, updates), d = steps.shape, table.shape[1]
    to_vectors, to_constants, to_rows = needed
    n, loss = order.shape[1], vectors.new_empty(clients)
    made = (vectors.new_empty(clients, d) if to_vectors else None,
            vectors.new_empty(clients, 1) if to_constants else None)
    _within("inner_batch: items", slots - 1 if items is None else items, len(table))
    call(_real("inner_batch", table), table, items, slots, vectors, constants, steps, past, updates, done, int(to_rows),
         order, start, min(end, n), share, positive, slots if positive.dim() == 2 else 0, clients, n, d, loss, *made)
    return loss, *made


class InnerPulls(NamedTuple):
    """What parameters are kept near (``Method.pull``)."""

    # Of rows of the first ``known`` items, what is left of a client's updates before that of each local batch
    kept: Sequence[float] = ()
    known: int = 0
    # What vectors and constants of the first N users are kept near, (N, d) and (N, 1), and the weights of both; or None
    vectors: Tensor | None = None
    constants: Tensor | None = None
    weights: tuple[float, float] = (0.0, 0.0)


class InnerLists(NamedTuple):
    """Lists whose scores the first n users train to probabilities (``Method.soft_targets``)."""

    items: Tensor | None = None  # (n, N); None: there are no lists
    targets: Tensor | None = None  # (n, N)
    weights: Tensor | None = None  # (n,)
    chosen: Tensor | None = None  # which items take part, (n, N); None: all
    mean: bool = True  # over those that do, or the sum
    eps: float = 0.0  # of the adaptive replay memory
    keys: Sequence[int] = ()  # by which that draws in each update, without the client
    # Item rows as columns, padded to a multiple of ``BLOCK``, (d, items), by which it ranks; None: it draws nothing
    columns: Tensor | None = None


BLOCK = 64  # of kernels.c


@dataclass(frozen=True)
class InnerTask:
    """What clients do in a round whose logits are inner products, plus a constant: draw negatives, deal samples out to
    local batches, and train on each."""

    tables: Tensor  # item rows, (1, items, d), or in each of a client's local batches, (batches, items, d)
    # Of all users, (users, d) and (users, 1) or None
    vectors: Tensor
    constants: Tensor | None
    each: int  # negatives per positive
    distinct: int  # the same where these are all different, or 0
    # Keys of negatives, and of the order of samples in each epoch, without the client
    draws: int
    shuffles: Sequence[int]
    size: int  # samples in a local batch
    # What takes its step one after the other in a local batch: 1 vectors and constants, 2 rows, 3 all.
    turns: Sequence[int]
    # Factors of the gradients of vectors, constants and rows in each local batch, one batch after the other: of as many
    # as the client with most has, or more.
    rates: Sequence[float]
    pulls: InnerPulls = InnerPulls()
    lists: InnerLists = InnerLists()

    def updates(self, batches: int) -> int:
        """How many updates of rows so many local batches per epoch are."""
        return len(self.shuffles) * batches * sum(turn >= 2 for turn in self.turns)


class InnerClients(NamedTuple):
    """The C clients of an ``InnerTask``."""

    users: Tensor  # their ids, (C,)
    # Of each client, (C, P), and how many are its own, (C,)
    positives: Tensor
    count: Tensor
    names: Tensor  # the numbers by which they draw, (C,)
    # ``count`` and ``gaps`` of ``sampling.Others``
    others: Tensor
    gaps: Tensor
    batches: int  # local batches per epoch of the client with most


@dataclass(frozen=True)
class InnerRound:
    """What ``inner_round`` has made of C clients."""

    items: Tensor  # of ``chunk_trainer.Slots``, (C, slots)
    # Of ``Slots`` too, the second called ``replay`` there; None: not asked for
    sample: Tensor | None
    replayed: Tensor | None
    positive: Tensor | None
    held: Tensor  # how many items each looks up, (C,)
    # What updates added to the rows at the slots, as in ``factored.Outer``: a step, of shape (C, slots, updates), times
    # a vector, of shape (C, updates, d), each.
    steps: Tensor
    vectors: Tensor
    moved: tuple[Tensor, Tensor | None]  # what was added to the vectors (C, d) and constants (C, 1), if there are any
    loss: Tensor  # float64 of shape (C,): the mean over a client's local batches


def inner_round(task: InnerTask, clients: InnerClients, samples: bool) -> InnerRound:
    """Train some clients. ``samples``: whether ``sample``, ``replayed`` and ``positive`` are asked for."""
    users, positives, count, names, others, gaps, batches = clients
    table, updates, pulls, lists = task.tables, task.updates(batches), task.pulls, task.lists
    (number, width), (n_tables, n_items, d) = positives.shape, table.shape
    n, constants = width * (1 + task.each), None if task.constants is None else task.constants.view(-1, 1)
    listing, listed = (0, 0) if lists.items is None else lists.items.shape
    slots = n + listed
    result = InnerRound(
        positives.new_empty(number, slots), positives.new_empty(number, n) if samples else None,
        positives.new_empty(number, listed) if samples else None,
        torch.empty(number, slots, dtype=torch.bool) if samples else None, torch.empty_like(count),
        table.new_empty(number, slots, updates), table.new_empty(number, updates, d),
        (table.new_empty(number, d), None if constants is None else table.new_empty(number, 1)),
        torch.empty(number, dtype=torch.float64))
    shuffles, keys = (torch.tensor([key - (key >> 63 << 64) for key in unsigned], dtype=torch.int64)
                      for unsigned in (task.shuffles, lists.keys))  # the same bits, signed
    kept, near = table.new_tensor(pulls.kept) if pulls.kept else None, (pulls.vectors, pulls.constants)
    n_near = next((len(each) for each in near if each is not None), 0)
    call(_real("inner_round", table), table, n_tables, kept, pulls.known, *near, n_near,
         table.new_tensor(pulls.weights), *lists[:4], listing, listed, int(lists.mean), lists.eps, keys, lists.columns,
         0 if lists.columns is None else lists.columns.shape[1], task.vectors.flatten(1), constants,
         table.new_tensor(task.rates), shuffles, torch.tensor(task.turns, dtype=torch.uint8), task.draws, n_items, d,
         task.each, task.distinct, len(shuffles), task.size, len(task.turns), users, positives, count,
         names, others, gaps, number, width, gaps.shape[1], batches, updates, result.items, result.held, result.sample,
         result.replayed, result.positive, result.steps, result.vectors, *result.moved, result.loss)
    return result


class Pooling(NamedTuple):
    """What ``functional.cosine_pool`` is given besides the rows."""

    vectors: Tensor
    mask: Tensor
    best: float
    each: Tensor


class CosineTables:
    """Item tables of C clients under a loss of pooled cosine scores of all items: scored, and moved by Adam. The
    gradient of a row is a sum of itself and of few vectors, so it is made where the row takes its step, in one pass
    over tables and moments. ``table``: what they begin with, (C, items, d), which is not written to: until the first
    step all clients may look at one; ``rate``, ``betas``, ``eps``: Adam's."""

    def __init__(self, table: Tensor, rate: float, betas: tuple[float, float], eps: float):
        self.rate, self.betas, self.eps, self.steps = rate, betas, eps, 0
        self._now, self._clients, self._moments = table if table.is_contiguous() else table[:1], len(table), None

    @property
    def table(self) -> Tensor:
        """As it is now, (C, items, d)."""
        return self._now.expand(self._clients, -1, -1)

    @property
    def _apart(self) -> int:
        """How many numbers lie between the tables of two clients."""
        return 0 if len(self._now) == 1 else self._now[0].numel()

    def score(self, pooling: Pooling, keys: Tensor | None, share: float) -> None:
        """Score all items by ``vectors`` (C, M, d), into ``scores`` (C, items), a leaf of the loss's graph. A ``share``
        of the numbers of rows is dropped by streams with ``keys``, (C,); None: none is."""
        (clients, count, d), items, lanes = pooling.vectors.shape, self._now.shape[1], 16
        if clients != self._clients:
            raise ValueError(f"kernels: found vectors of {clients} clients, expected {self._clients}")
        self.vectors, vectors = pooling.vectors, pooling.vectors.detach().contiguous()
        across = vectors.new_zeros(clients, d, -(-count // lanes) * lanes)
        across[:, :, :count] = vectors.transpose(1, 2)
        threshold = 0 if keys is None else round(share * 65536)  # a number is dropped if 16 random bits are below it
        keys = torch.zeros(clients, dtype=torch.int64) if keys is None else keys
        each = pooling.each.to(vectors).contiguous()
        self._task = keys, threshold, vectors, pooling.best, each
        scores, self._lengths = self._now.new_empty(2, clients, items)
        self._where = torch.empty(clients, items, dtype=torch.int32)
        call(_real("cosine_scores", self._now), self._now, self._apart, keys, threshold, across,
             pooling.mask.contiguous(), pooling.best, each, clients, items, d, count, across.shape[2], scores,
             self._lengths, self._where)
        self.scores = scores.detach().requires_grad_()

    @torch.no_grad()
    def step(self, of_scores: Tensor, held: Tensor) -> Tensor:
        """Move all rows but those of held items, (C, n), some of which may be equal, given gradients of the scores,
        kept as ``of_scores``; to be followed by ``step_held``. Returns the gradients of the vectors, (C, M, d)."""
        self.of_scores, self.steps = of_scores, self.steps + 1
        beta1, beta2 = self.betas
        root = (1.0 - beta2 ** self.steps) ** -0.5
        rule = (1.0 - beta1, beta2, 1.0 - beta2, self.rate / (1.0 - beta1 ** self.steps), root, self.eps)
        self._before, self._fresh = (self._now, self._apart), self._moments is None
        if self._moments is None:
            self._now, *self._moments = self._now.new_empty(3, *of_scores.shape, self._now.shape[2])
        self._rest = torch.tensor(rule, dtype=torch.float64), of_scores.contiguous(), held.contiguous()
        result = torch.empty_like(self._task[2])
        self._adam(None, result)
        return result

    @torch.no_grad()
    def step_held(self, of_held: Tensor) -> None:
        """Move the rows of held items, given their gradients besides those of scores, (C, n, d), of equal items to be
        added up."""
        self._adam(of_held.contiguous(), None)

    def _adam(self, of_held: Tensor | None, of_vectors: Tensor | None) -> None:
        (keys, threshold, vectors, best, each), (rule, of_scores, held) = self._task, self._rest
        (clients, count, d), items = vectors.shape, self._now.shape[1]
        _within("cosine_adam: items", held, items)
        call(_real("cosine_adam", self._now), *self._before, self._now, *self._moments, int(self._fresh), rule, keys,
             threshold, vectors, best, each, of_scores, self.scores, self._lengths, self._where, held, of_held, clients,
             items, d, count, held.shape[1], of_vectors)


# Columns in a group, and the number of columns from which the larger size is the faster.
_SMALL_GROUPS, _LARGE_GROUPS, _MANY_COLUMNS = 8, 32, 2048
_LOW = (1 << 31) - 1


def highest(scores: Tensor, k: int) -> Tensor:
    """Columns of the k highest scores in each row, highest first, of equal ones the first: int64, (n, min(k, columns)).
    What is no number counts as higher than any. The k highest are in the k groups of neighbouring columns with the
    highest maxima (of equal ones the first), so only those are looked at closely; the maxima are one pass over the
    scores, several times as fast as ``torch.topk``."""
    columns = scores.shape[1]
    size = _SMALL_GROUPS if columns < _MANY_COLUMNS else _LARGE_GROUPS
    while size * size * k < columns:
        size *= 2
    groups = columns // size
    if groups < 2 * k:
        return _first(scores, torch.arange(columns, device=scores.device), k)
    maxima = scores[:, :groups * size].unflatten(1, (groups, size)).amax(2)
    chosen = _first(maxima, torch.arange(groups, device=scores.device), k)
    column = (chosen[:, :, None] * size + torch.arange(size, device=scores.device)).flatten(1)
    rest = torch.arange(groups * size, columns, device=scores.device).expand(len(scores), -1)
    column = torch.cat([column, rest], 1)
    return _first(scores.gather(1, column), column, k)


def _first(scores: Tensor, number: Tensor, k: int) -> Tensor:
    """The numbers of the k highest scores in each row, highest first, of equal ones the smallest number first.
    ``number``: whole numbers below 2^31 that differ within a row, of the scores' shape (n, m) or (m,)."""
    k = min(k, scores.shape[1])
    if scores.dtype == torch.float64:  # too long for the keys below
        number, order = number.expand_as(scores).sort(1)
        best = scores.gather(1, order).sort(dim=1, descending=True, stable=True).indices[:, :k]
        return number.gather(1, best)
    bits = (scores.float() + 0.0).masked_fill_(scores.isnan(), torch.nan).view(torch.int32)  # neither -0 nor -nan
    ascending = bits.bitwise_xor_((bits >> 31) & _LOW)  # as whole numbers in the order of the scores
    key = (ascending.long() << 32) | (_LOW - number)
    return _LOW - (key.topk(k, 1).values & _LOW)


def all_ranks(scores: Tensor) -> Tensor:
    """1-based rank of every column in each row of scores (n, m), of equal ones the first column first: int32, (n, m).
    In single or double precision; what is no number ranks first."""
    result = torch.empty(scores.shape, dtype=torch.int32)
    call(_real("all_ranks", scores), scores.contiguous(), *scores.shape, result)
    return result


def ranks(scores: Tensor, rows: Tensor, items: Tensor, first_before: bool = False) -> Tensor:
    """1-based ranks of items, each in a row of the scores: 1 + how many of the row score higher. ``scores``: (n,
    items), in single or double precision; ``rows``, ``items``: int64 of shape (P,); ``first_before``: of equal scores
    the first column comes first, as in ``highest``. Returns int64 of shape (P,)."""
    result = torch.empty_like(items, memory_format=torch.contiguous_format)
    _within("ranks: rows", rows, len(scores))
    _within("ranks: items", items, scores.shape[1])
    call(_real("ranks", scores), scores.contiguous(), rows.contiguous(), items.contiguous(), scores.shape[1],
         len(items), int(first_before), result)
    return result
