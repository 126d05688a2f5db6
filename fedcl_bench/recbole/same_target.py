"""FEARec's second view of a sample: another sample of the domain with the same target.

RecBole draws such samples until one has another history, which never ends where all have the same. Here one of those
that differ is drawn at once, each as likely, and RecBole's loss is handed the drawn ones in its order.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from .models import LENGTH, SEQUENCE

_HASHED = 40  # bits of a history's hash; the target's number stands before them
_AT_ONCE = 1 << 16  # histories that are hashed together


class SameTarget:
    """The samples of a domain by target and history, given its ``histories`` as ``DomainData`` has them, of each of
    which the last ``width`` items are read."""

    def __init__(self, histories: tuple[Tensor, Tensor], width: int):
        self.items, bounds = histories
        self.width = width
        index = torch.arange(len(self.items), device=bounds.device)
        self.first = bounds[:-1].repeat_interleave(bounds.diff())
        samples = index[index > self.first]
        generator = torch.Generator().manual_seed(0)
        self.factors = torch.randint(1 << 62, (width,), generator=generator).to(bounds.device) | 1
        keys = torch.cat([self._keys(self.histories(part)[0], self.items[part]) for part in samples.split(_AT_ONCE)])
        self.keys, order = keys.sort()
        self.samples = samples[order]

    def histories(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """RecBole's ids of what comes before the interactions ``samples``, (n, width), and how many these are, (n,)."""
        lengths = (samples - self.first[samples]).clamp(max=self.width)
        column = torch.arange(self.width, device=samples.device)
        index = (samples - lengths)[:, None] + column
        return (self.items[index.clamp(max=len(self.items) - 1)] + 1) * (column < lengths[:, None]), lengths

    def _keys(self, histories: Tensor, targets: Tensor) -> Tensor:
        hashed = (histories * self.factors[:histories.shape[1]]).sum(1) >> (63 - _HASHED)
        return (targets << _HASHED) | (hashed & ((1 << _HASHED) - 1))

    def draw(self, histories: Tensor, targets: Tensor) -> Tensor:
        """An interaction with the same target and another history for each of B samples, (B,); where there is none, one
        with the same history. The histories are RecBole's ids, (B, L), the targets items from 0 that are among the
        domain's samples with these."""
        keys = self._keys(histories, targets)
        first, end = torch.searchsorted(self.keys, torch.stack([targets, targets + 1]) << _HASHED)
        same, same_end = torch.searchsorted(self.keys, keys), torch.searchsorted(self.keys, keys, right=True)
        others = (end - first) - (same_end - same)
        chosen = first + (torch.rand(len(targets), device=targets.device) * others).long().clamp(max=others - 1)
        chosen = torch.where(chosen >= same, chosen + same_end - same, chosen)
        return self.samples[torch.where(others > 0, chosen, same)]


def hand_over(model: nn.Module, histories: Tensor, lengths: Tensor) -> None:
    """Let RecBole's FEARec find these histories, of RecBole's ids (B, L), as the other samples, one after the other."""
    numbers = itertools.count()

    class InTurn:
        def __getitem__(self, target: int) -> list[int]:
            return [next(numbers)]

    model.same_item_index = InTurn()
    model.dataset = SimpleNamespace(inter_feat={SEQUENCE: histories.cpu(), LENGTH: lengths.cpu()})
