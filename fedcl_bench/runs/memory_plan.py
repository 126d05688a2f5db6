"""What a run will hold in memory at its peak, estimated before it starts, and whether that is there.

The parts of ``plan`` are what a round and its evaluation hold at the same time, beyond the process and the stream,
which are there already:

- tables: the parameters of all clients and the server, as they were before the round, after it, and in the best round;
  from the second step on also those of the step before, whose memory the allocator does not give back for larger
  tables. Tables with a row per user and item (personal ones, clients' own copies, those the server makes for each) are
  nearly all of it where there are some;
- making tables: initial rows are drawn in double precision;
- lists: each client's positives and what its negatives are drawn from, as chunks keep them;
- training: chunks of ``CHUNK_ELEMENTS`` numbers, or of one client that holds more, one per thread, and trained ones
  that wait to be added up;
- uploads: where the server looks at each, all of them and what it makes of them;
- evaluation: scores of all items for some users, one piece per thread, and the metrics of every user.

Checkpoints are written without a copy. The numbers of hidden layers in training are not known beforehand; what a
backbone makes of a row is taken to be ``_ACTIVATIONS`` times as long as the row.

Measured growth of the process in MiB (2 threads) and, in brackets, the plan: FedRAP on ML-100K 768 to 894 (968); with
four rounds per block GPFedRec on ML-100K 1,361 (2,027), SASRec on XING 427 (648), PFedRec on XING 122 (175); PFedRec on
ML-100K's first block with clients' own tables and d 64 895 to 1,008 (1,172). How chunks of several threads overlap, and
what the allocator keeps, differ from run to run. ``tests/runs/test_memory_plan.py`` holds two runs of one block to
30 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

import torch

from .. import sampling
from ..client.base import SLOT_TABLE
from ..client.sessions import CHUNK_CLIENTS
from ..client.ways import Way, choose_way
from ..data.stream import Step
from ..draws import Tables
from ..errors import UserError
from ..evaluation.ranking import METRICS, is_product, users_at_once
from ..evaluation.sessions import USERS_AT_ONCE
from ..federation.parts import Federation
from ..model import Snapshot
from ..ops import kernels
from ..ops.memory import available
from ..sequential import SequentialBackbone

_DRAWN = 2  # arrays of 8 bytes that live while normal numbers are drawn and scaled
_ACTIVATIONS = 8
_SESSION_ACTIVATIONS = 48  # vectors per position and layer that a sequential backbone keeps for its gradient
_PROCESS = 40 << 20  # what PyTorch and the allocator take for each thread when work begins


@dataclass(frozen=True)
class Plan:
    """Bytes at the peak of a run by what they are for (see the module)."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Widths:
    """Numbers that a run holds per item, per user, per user and item (all tables of each kind together), and besides.

    Attributes:
        public, private, dense: parameters.
        personal: rows of personal item tables.
        local, served: tables with a row per user and item that clients keep, or that the server makes for each.
        drawn: private ones that differ between users from the start.
        product: the scores of all items are one matrix product with a table that all users share.
        way: how clients are trained.
    """

    public: int
    private: int
    dense: int
    personal: int
    local: int
    served: int
    drawn: int
    product: bool
    way: Way

    @staticmethod
    def of(f: Federation, step: Step) -> "_Widths":
        """Of a federation's tables in a step, from those of one user and one item."""
        backbone, one, acting = f.backbone, range(1), f.acting_in(step)
        public, private = backbone.new_rows(f.seed, range(2), one)
        drawn = {name: rows for name, rows in private.items() if not torch.equal(rows[0], rows[1])}
        private = {name: rows[:1] for name, rows in private.items()}
        private |= acting.new_private(f.seed, one, backbone)
        dense = backbone.new_dense(f.seed)
        row, model = _numbers(public), Snapshot(public, private, dense)
        return _Widths(row, _numbers(private), _numbers(dense), _numbers(backbone.new_personal(f.seed, one)),
                       row if backbone.keeps_local_tables else 0, row if backbone.serves_tables else 0,
                       _numbers(drawn) // 2, is_product(backbone, model),
                       choose_way(backbone, acting, model, f.local, bool(step.sessions)))

    @property
    def row(self) -> int:
        """Numbers per item that one client holds in training."""
        return self.public + self.personal

    def tables(self, users: int, items: int) -> int:
        """Numbers in all tables."""
        return (items * self.public + users * self.private + self.dense
                + users * items * (self.personal + self.local + self.served))


def _numbers(tables: Tables) -> int:
    return sum(table.numel() for table in tables.values())


def plan(f: Federation, threads: int) -> Plan:
    """What a run needs at its peak, in the step that needs most.

    Args:
        threads: that train and evaluate at the same time (``--threads``).
    """
    threads = threads if f.device.type == "cpu" else 1
    return max((_of_step(f, step, threads) for step in f.stream.steps), key=lambda plan: plan.total)


def _of_step(f: Federation, step: Step, threads: int) -> Plan:
    number = 8 if f.server.precision == "float64" else 4
    widths = _Widths.of(f, step)
    tables = number * widths.tables(step.n_users, step.n_items)
    before = number * widths.tables(step.old_users, step.old_items)
    # Initial rows are drawn before there are other snapshots of the step, and before any training.
    new_users, new_items = step.n_users - step.old_users, step.n_items - step.old_items
    making = max(8 * (_DRAWN * max(new_items * widths.public, new_users * widths.drawn) + new_users * widths.private)
                 - 2 * tables, 0)
    lists = _lists(f, step, widths)
    working = {"training": _sessions(f, step, widths, threads, number)
               if isinstance(f.backbone, SequentialBackbone) else _training(f, step, widths, threads, number),
               "uploads": _uploads(f, step, widths, number),
               "evaluation": _evaluation(f, step, widths, threads, number)}
    most = max(working, key=working.get)
    parts = {"tables": 3 * (tables + before), "making tables": making, "lists": lists, most: working[most],
             "metrics": _metrics(f, step), "process": _PROCESS * threads}
    return Plan(parts)


def _lists(f: Federation, step: Step, widths: _Widths) -> int:
    """Positives of all chunks, and the items that negatives are drawn from."""
    train, sequential = len(step.train.values), isinstance(f.backbone, SequentialBackbone)
    every = step.n_users * step.n_items
    kept = 8 * train if train <= sampling.KEPT_POSITIVES else 0
    others = kept // 2
    if every <= sampling.LISTED_OTHERS if sequential else sampling.lists_others(step.n_users, step.n_items, f.local,
                                                                              f.device):
        together = CHUNK_CLIENTS if sequential else (
            sampling.CHUNK_ELEMENTS * step.n_users // (widths.row * (1 + f.local.negatives) * max(train, 1)))
        others = 4 * every + 17 * min(together, step.n_users) * step.n_items  # listing those of a chunk
    candidates = 0
    if f.evaluation.candidates == "sampled":
        candidates = 8 * step.n_users * f.evaluation.sampled_candidates * 2
    return kept + 32 * step.n_users + others + candidates


def _training(f: Federation, step: Step, widths: _Widths, threads: int, number: int) -> int:
    """Chunks of lists."""
    backbone, local = f.backbone, f.local
    per_client = step.n_items if backbone.whole_tables else int(step.train.lengths.max()) * (1 + local.negatives)
    if widths.way.factored and backbone.keeps_local_tables:
        # Held as outer products, and written out as tables at the end: those of all users that share a chunk.
        row, rows = number * widths.row, max(sampling.CHUNK_ELEMENTS // sampling.INNER_WIDTH, per_client)
        if f.device.type == "cpu" and kernels.why_not() is None:  # by rows looked up, then by all items
            usual = max(1, int(step.train.lengths.double().mean()) * (1 + local.negatives))
            each = -(-rows // usual)
            if widths.way.fused:
                each = min(each, -(-step.n_users // sampling.CHUNKS_OF_CALLS))
            clients = min((threads + _waiting(threads)) * each, step.n_users)
            return (threads * rows + clients * step.n_items) * row
        waiting = min(_waiting(threads) * rows, max(step.n_users * step.n_items - threads * rows, 0))
        return (threads * 3 * rows + waiting) * row
    rows = max(sampling.CHUNK_ELEMENTS // widths.row, per_client)
    # Own rows, what they moved by and gradients; Adam's moments; the server's tables.
    held = 3 + 2 * (local.optimiser == "adam") + backbone.serves_tables
    made = _ACTIVATIONS if backbone.overrides("regulariser") else _ACTIVATIONS // 2
    chunk = rows * (number * widths.row * (held + made) + 96)
    if (own := backbone.own_samples(local)) is not None:
        chunk += number * sampling.OWN_ELEMENTS * max(sampling.CHUNK_ELEMENTS, sum(own.elements) * step.n_items)
    waiting = rows * (number * widths.row * (2 if backbone.keeps_local_tables else 1) + 32)
    return threads * chunk + _waiting(threads) * waiting


def _waiting(threads: int) -> int:
    """Trained chunks that wait to be added up, or are (see ``parallel.in_order``)."""
    return threads + 1 if threads > 1 else 0


def _sessions(f: Federation, step: Step, widths: _Widths, threads: int, number: int) -> int:
    """Chunks of sessions."""
    settings = f.backbone.settings
    length, dim, clients = settings.max_length, settings.dim, min(CHUNK_CLIENTS, step.n_users)
    layers = getattr(settings, "layers", 1)
    parameters = (widths.private + widths.dense + 3 * length * widths.public) * 5  # value, gradient, moments, moved
    activations = length * (dim + length) * _SESSION_ACTIVATIONS * layers
    chunk = number * clients * (parameters + activations)
    waiting = number * clients * (widths.dense + 3 * length * widths.public)
    slots = 16 * min(SLOT_TABLE, clients * step.n_items)
    return threads * (chunk + slots) + _waiting(threads) * waiting


def _uploads(f: Federation, step: Step, widths: _Widths, number: int) -> int:
    """Every participant's item tables, and the tables that the server makes of them (twice on the way)."""
    if not f.backbone.keeps_local_tables:
        return 0
    return number * step.n_users * step.n_items * widths.public * (3 if f.backbone.serves_tables else 1)


def _evaluation(f: Federation, step: Step, widths: _Widths, threads: int, number: int) -> int:
    """Scores of one piece of users per thread, with what a backbone makes of rows where they are no product."""
    users = users_at_once(step.n_items, widths.product)
    if step.sessions:
        users = min(USERS_AT_ONCE, step.n_users)
    vectors = 0
    if not (widths.product or isinstance(f.backbone, SequentialBackbone)):
        copied = widths.row - (widths.personal if f.device.type == "cpu" else 0)  # see Snapshot.clients
        vectors = copied + sum(getattr(f.backbone.settings, "hidden", ()))
    return threads * number * min(users, step.n_users) * step.n_items * (3 + vectors)


def _metrics(f: Federation, step: Step) -> int:
    """What is kept of every user's list: of the validation, and of the tests of every step so far."""
    lengths = 1 + len(f.evaluation.topk)
    tests = (step.index + 1) * (step.index + 2) // 2
    return 8 * step.n_users * len(METRICS) * lengths * (1 + tests)


def require(f: Federation, threads: int) -> None:
    """Raise UserError if a run needs more memory than there is; does nothing where that is not known."""
    found = available(f.device)
    if found is None:
        return
    needed = plan(f, threads)
    if needed.total <= found.bytes:
        return
    fewer = [f"--threads 1, which needs {_gib(plan(f, 1).total)} and changes no number"] if (
        threads > 1 and f.device.type == "cpu" and plan(f, 1).total <= found.bytes) else []
    raise UserError(f"not enough memory: {_gib(found.bytes)} are left ({found.limit}). {advice(f, threads, fewer)}")


def advice(f: Federation, threads: int, first: Iterable[str] = ()) -> str:
    """How much a run needs, for what, and what makes it need less; ``first`` stands before the general ways."""
    needed = plan(f, threads)
    part, most = max(needed.parts.items(), key=lambda item: item[1])
    step, settings = f.stream.steps[-1], f.backbone.settings
    helps = [*first, *([f"a smaller --set dim=N (now {settings.dim})"] if hasattr(settings, "dim") else []),
             *(["--set precision=float32"] if f.server.precision == "float64" else []),
             *(["--device cpu"] if f.device.type == "cuda" else []), "a larger machine", "fewer users and items"]
    return (f"This run needs about {_gib(needed.total)} beyond its data, {_gib(most)} of it for {part} "
            f"({step.n_users:,} users, {step.n_items:,} items).\nWhat helps: {', '.join(helps)}.")


def _gib(number: float) -> str:
    return f"{number / (1 << 30):.2f} GiB"
