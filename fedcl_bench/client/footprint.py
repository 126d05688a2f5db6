"""What clients of a step hold in memory while they train, in bytes, estimated before the run starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import sampling
from ..model import StepSizes
from ..ops import kernels
from ..sampling import LocalSettings
from ..sequential import SequentialBackbone
from ..sizes import SIZES
from .sessions import clients_at_once
from .ways import Way

_ACTIVATIONS = 8
_TABLES_ON_THE_WAY = 3  # item tables that a loss over all items keeps for its gradient, or makes of it
_MORE_ACTIVATIONS = 12  # vectors that it keeps for each row of other items
_SESSION_ACTIVATIONS = 48  # vectors per position and layer that a sequential backbone keeps for its gradient


@dataclass(frozen=True)
class StepLoad(StepSizes):
    """What decides how much memory a step needs.

    Attributes:
        way: how clients are trained.
        threads: that train and evaluate at the same time.
    """

    local: LocalSettings
    way: Way
    threads: int
    device: torch.device

    @property
    def row(self) -> int:
        """Numbers per item that one client holds in training."""
        return self.public + self.personal


def lists(load: StepLoad) -> int:
    """Each client's positives, and the items that its negatives are drawn from, as chunks keep them."""
    step, local = load.step, load.local
    train, sequential = len(step.train.values), isinstance(load.backbone, SequentialBackbone)
    pairs = step.n_users * step.n_items
    positives = 8 * train if train <= SIZES.kept_positives else 0
    pools = positives // 2
    listed = (pairs <= SIZES.listed_others if sequential else
              sampling.lists_others(step.n_users, step.n_items, local, load.device))
    if listed:
        at_once = clients_at_once(load.backbone, step.n_items) if sequential else (
            SIZES.chunk_elements * step.n_users // (load.row * (1 + local.negatives) * max(train, 1)))
        pools = 4 * pairs + 17 * min(at_once, step.n_users) * step.n_items  # listing those of a chunk
    return positives + 32 * step.n_users + pools


def training(load: StepLoad) -> int:
    """Chunks of ``SIZES.chunk_elements`` numbers, or of one client that holds more, one per thread, and trained ones
    that wait to be added up.

    What a backbone makes of an item's row is not known beforehand; it is taken to be ``_ACTIVATIONS`` times as long as
    the row.
    """
    if isinstance(load.backbone, SequentialBackbone):
        return _session_chunks(load)
    if load.way.factored and load.backbone.keeps_local_tables:
        return _outer_products(load)
    return _row_chunks(load)


def _rows_of_client(load: StepLoad) -> int:
    """Item rows of the client that holds most."""
    if load.backbone.whole_tables:
        return load.step.n_items
    return int(load.step.train.lengths.max()) * (1 + load.local.negatives)


def _outer_products(load: StepLoad) -> int:
    """Chunks of changes held as outer products, and written out as tables at the end: those of all users that share a
    chunk."""
    step, threads = load.step, load.threads
    row, rows = load.number * load.row, max(SIZES.chunk_elements // SIZES.factored_width, _rows_of_client(load))
    if load.device.type == "cpu" and kernels.why_not() is None:  # by rows looked up, then by all items
        usual = max(1, int(step.train.lengths.double().mean()) * (1 + load.local.negatives))
        clients = -(-rows // usual)
        if load.way.fused:
            clients = min(clients, -(-step.n_users // SIZES.chunks_of_calls))
        clients = min((threads + _waiting(threads)) * clients, step.n_users)
        return (threads * rows + clients * step.n_items) * row
    waiting = min(_waiting(threads) * rows, max(step.n_users * step.n_items - threads * rows, 0))
    return (threads * 3 * rows + waiting) * row


def _row_chunks(load: StepLoad) -> int:
    """Chunks of item rows that clients look up."""
    backbone, local = load.backbone, load.local
    row, rows = load.number * load.row, max(SIZES.chunk_elements // load.row, _rows_of_client(load))
    # Rows, what they moved by and gradients; Adam's moments; the server's tables.
    held = 3 + 2 * (local.optimiser == "adam") + backbone.serves_tables
    made = _ACTIVATIONS if backbone.overrides("regulariser") else _ACTIVATIONS // 2
    chunk = rows * (row * (held + made) + 96)
    if (samples := backbone.own_samples(local)) is not None:
        chunk += load.number * SIZES.own_loss_factor * max(SIZES.chunk_elements,
                                                           sum(samples.elements) * load.step.n_items)
    waiting = rows * (row * (2 if backbone.keeps_local_tables else 1) + 32)
    return load.threads * chunk + _waiting(load.threads) * waiting


def _session_chunks(load: StepLoad) -> int:
    """Chunks of clients that train on sessions."""
    settings, step, threads = load.backbone.settings, load.step, load.threads
    length, dim = settings.max_length, settings.dim
    clients = min(clients_at_once(load.backbone, step.n_items), step.n_users)
    more = load.backbone.n_more_items
    rows, made = (3 * length + more) * load.public, more * dim * _MORE_ACTIVATIONS
    if load.backbone.whole_tables:
        rows = step.n_items * load.public
        made += _TABLES_ON_THE_WAY * rows + 4 * step.n_items * load.backbone.n_vectors
    parameters = (load.private + load.dense + rows) * 5 + made  # value, gradient, moments, moved
    chunk = load.number * clients * (parameters + encoded(load.backbone))
    waiting = load.number * clients * (load.dense + rows)
    local_rows = 16 * min(SIZES.slot_table, clients * step.n_items)
    return threads * (chunk + local_rows) + _waiting(threads) * waiting


def encoded(backbone: SequentialBackbone, longest: int | None = None) -> int:
    """Numbers that a sequential backbone keeps of a sequence for its gradient.

    Args:
        longest: items of the longest sequence there is, for backbones that are not given padding.
    """
    settings = backbone.settings
    length = settings.max_length if longest is None or backbone.pads else min(settings.max_length, longest)
    return length * (settings.dim + length) * _SESSION_ACTIVATIONS * getattr(settings, "layers", 1)


def _waiting(threads: int) -> int:
    """Trained chunks that wait to be added up, or are (see ``parallel.in_order``)."""
    return threads + 1 if threads > 1 else 0
