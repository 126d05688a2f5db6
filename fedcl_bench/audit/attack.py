"""What a server learns from one client's uploads: which items the client trained on.

The attacks use what the server has: the parameters it sent, the client's uploads, the settings of the run. Nothing of
them is learned, so they are a lower bound of what leaks.

- *size*: items are ranked by how much their rows changed (F3CRec, section 5.6): a client changes the rows of its
  training items and of its sampled negatives, so it hides its items among the negatives at best.
- *direction*: with a factorisation, the rows of a client's positives are pushed along its private vector and those of
  its negatives against it, so all changes lie on one line. They are projected on the direction in which they vary most;
  which of its ends is the positives' is clear where there are more negatives: the one of fewer items.

Both are made on one upload, and on the *sum* of all that the client has sent in the block so far: its items
recur from round to round, the noise does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from .. import rng
from ..plugin.backbone import Backbone
from ..training.chunk_trainer import own_start_key
from ..training.trained import Trained
from ..rng import DrawKey, Tables
from ..plugin.state import Snapshot
from ..stats.clip_noise import Protection, upload_key

OF_UPLOAD = ("size_auc", "size_precision", "size_auc_touched", "direction_auc", "direction_precision")
SUM = "sum_"  # prefix of the same metrics of summed uploads
METRICS = (*OF_UPLOAD, *(SUM + name for name in OF_UPLOAD))
_NUMBERS_AT_ONCE = 1 << 21  # of changes: bounds the memory of noise on rows that clients leave alone


def auc(scores: np.ndarray, positive: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Of each row of scores (C, items), the share of (positive, other) pairs of which the positive has the higher
    score, (C,); equal ones count half. Only the items ``among`` them count; nan where a row has no such pair."""
    positive = positive & among
    ranks = rankdata(np.where(among, scores, -np.inf), axis=1)
    here, out = positive.sum(1), (~among).sum(1)
    others = among.sum(1) - here
    above = (ranks * positive).sum(1) - here * (here + 1) / 2 - here * out
    with np.errstate(invalid="ignore"):
        return above / (here * others)


def precision(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Of each row, the share of positives among its n+ highest scores, n+ being its number of positives, (C,).

    Where scores are equal at the end of that list, any order of theirs is as likely.
    """
    count = positive.sum(1)
    last = np.take_along_axis(-np.sort(-scores, axis=1), count[:, None] - 1, 1)
    above, equal = scores > last, scores == last
    left = count - above.sum(1)
    return ((above & positive).sum(1) + left * (equal & positive).sum(1) / equal.sum(1)) / count


def along_direction(changes: Tensor) -> Tensor:
    """Changes, float64 (C, items, d), along the direction in which they vary most, with positives high: (C, items).

    The negatives' end has the larger part of a vote, in which an item has the weight of its change, but at most the
    mean weight: neither many rows that hardly changed nor a few that changed much decide it.
    """
    direction = torch.linalg.eigh(changes.transpose(1, 2) @ changes).eigenvectors[:, :, -1:]
    along = (changes @ direction).squeeze(2)
    most = along.abs().mean(1, keepdim=True)
    vote = torch.minimum(torch.maximum(along, -most), most).sum(1, keepdim=True)
    return torch.where(vote > 0.0, -along, along)


@dataclass(frozen=True)
class Roles:
    """What each item was to each client in a round, bool of shape (C, items)."""

    positive: Tensor  # the client trained on it
    touched: Tensor  # that, or it was a sampled negative or replayed

    @staticmethod
    def of(trained: Trained, n_items: int) -> "Roles":
        slots = trained.slots
        zeros = torch.zeros(len(slots.items), n_items, dtype=torch.int32, device=slots.items.device)
        positive = zeros.scatter_add(1, slots.items, slots.positive.expand_as(slots.items).int())
        looked_up = slots.items.gather(1, torch.cat([slots.sample, slots.replay], 1))
        touched = zeros.scatter_add(1, looked_up, torch.ones_like(looked_up, dtype=torch.int32))
        return Roles(positive > 0, touched > 0)


class Sums:
    """The sums of what some clients, ``users`` in ascending order, have uploaded so far."""

    def __init__(self, users: Tensor):
        self.users = users
        self._changes = self._positive = self._touched = torch.zeros(0)

    def add(self, users: Tensor, changes: Tensor, roles: Roles) -> tuple[Tensor, Roles]:
        """Add an upload (c, items, d) of some of the clients; returns their sums, and what the items ever were."""
        if not len(self._changes):
            self._changes = torch.zeros(len(self.users), *changes.shape[1:])
            self._positive, self._touched = torch.zeros(2, *self._changes.shape[:2], dtype=torch.bool)
        rows = torch.searchsorted(self.users, users.cpu())
        self._changes[rows] += changes.cpu().float()
        self._positive[rows] |= roles.positive.cpu()
        self._touched[rows] |= roles.touched.cpu()
        return self._changes[rows].double(), Roles(self._positive[rows], self._touched[rows])


@dataclass(frozen=True)
class Uploads:
    """What a chunk's clients upload in a round."""

    key: DrawKey
    model: Snapshot  # what the server sent
    trained: Trained
    backbone: Backbone
    protection: Protection
    own_start: bool = False  # the clients began with parameters of their own; then they upload these, not changes

    def item_changes(self) -> Iterator[tuple[Trained, Tables]]:
        """By how much each client's upload differs from what the server sent, noise included: some of the clients at a
        time, and of those every public item table, (c, items, ...).

        Each client's noise is drawn for itself, with the law (and for a backbone whose server looks at each upload, the
        values) of the noise in the run, which draws that on the mean of all uploads.
        """
        key, model = self.key, self.model
        numbers = sum(table.numel() for table in model.public.values())
        size = max(1, _NUMBERS_AT_ONCE // numbers)
        for start in range(0, len(self.trained.users), size):
            piece = self.trained.of(slice(start, start + size))
            every = piece.changes(model)
            changes = {name: every[name] for name in model.public}
            if self.own_start:
                changes = self._from_own_start(piece, changes)
            yield piece, {name: self.protection.noisy(upload_key(key.seed, name, key.step, key.round), piece.users,
                                                      change) for name, change in changes.items()}

    def _from_own_start(self, piece: Trained, changes: Tables) -> Tables:
        """Changes of the rows that clients hold, and their own first values of all others."""
        n_items, device = self.model.n_items, piece.users.device
        held = torch.zeros(len(piece.users), n_items, dtype=torch.bool, device=device)
        held.scatter_(1, piece.slots.items, True)
        whole = {}
        for name, begin in self.backbone.item_starts(n_items).items():
            keys = rng.client_keys(own_start_key(self.key.seed, name), piece.users)
            change, items = changes[name], torch.arange(n_items, device=device)
            first = begin.draw(rng.bits(keys[:, None], items).flatten()).to(change).view_as(change)
            whole[name] = torch.where(held.view(*held.shape, *[1] * (first.dim() - 2)), change, first)
        return {**changes, **whole}


@torch.no_grad()
def attack(uploads: Uploads, sums: Sums, add_only: bool = False) -> dict[str, np.ndarray]:
    """Attack the uploads of a chunk's clients, after adding them to the ``sums`` of these clients' earlier ones;
    ``add_only`` does nothing else.

    Returns ``user``, ``items``, ``positives``, ``touched`` (numbers of items) and every one of ``METRICS``, each (C,).
    """
    n_items = uploads.model.n_items
    results: dict[str, list[np.ndarray]] = {}
    for piece, changes in uploads.item_changes():
        roles = Roles.of(piece, n_items)
        flat = torch.cat([change.reshape(*change.shape[:2], -1) for change in changes.values()], 2).double()
        of_sum = sums.add(piece.users, flat, roles)
        if add_only:
            continue
        values = {"user": piece.users, "items": torch.full_like(piece.users, n_items),
                  "positives": roles.positive.sum(1), "touched": roles.touched.sum(1)}
        values = {**{name: each.cpu().numpy() for name, each in values.items()}, **_metrics(flat, roles),
                  **{SUM + name: each for name, each in _metrics(*of_sum).items()}}
        for name, each in values.items():
            results.setdefault(name, []).append(each)
    return {name: np.concatenate(parts) for name, parts in results.items()}


def _metrics(changes: Tensor, roles: Roles) -> dict[str, np.ndarray]:
    """``OF_UPLOAD`` of changes (C, items, d), each (C,)."""
    positive, touched = roles.positive.cpu().numpy(), roles.touched.cpu().numpy()
    size, along = changes.norm(dim=2).cpu().numpy(), along_direction(changes).cpu().numpy()
    everything = np.ones_like(positive)
    return {"size_auc": auc(size, positive, everything), "size_precision": precision(size, positive),
            "size_auc_touched": auc(size, positive, touched), "direction_auc": auc(along, positive, everything),
            "direction_precision": precision(along, positive)}
