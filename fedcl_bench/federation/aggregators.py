"""Robust aggregators: what a server that sees each client's change makes of them, in place of the mean.

Clients change the item rows that they look up, most rows at a few of them. *Median* and *trimmed mean* of a number are
over the clients that sent its row, times their share, so that a row moves as far as under the mean; over all clients,
the median of nearly every row would be no change. *Krum* and *norm bound* look at whole changes, in which a row that a
client did not send counts as 0, as in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import UserError
from ..plugin.views import ClientUpdates
from ..rng import Tables


@dataclass(frozen=True)
class Aggregator:
    """An aggregator of single changes; N clients take part.

    - ``median``: coordinate-wise median (Yin et al., ICML 2018, Definition 1).
    - ``trimmed_mean``: the same without the largest and the smallest share β of each number (Definition 2).
    - ``krum``: the mean of the m changes with the least sums of squared distances to their N - f - 2 nearest others
      (Blanchard et al., NeurIPS 2017, Krum with m = 1, else Multi-Krum); of equal ones that of the smaller id.
    - ``norm_bound``: the mean of changes scaled by min(1, M / ||d||) (Sun et al., 2019). They fix M, as ``upload_clip``
      does at the clients; here it follows the training, as a multiple of the round's median norm.

    The settings ``aggregator``, ``trimmed_share`` (β), ``krum_malicious`` (f), ``krum_selected`` (m) and ``norm_bound``
    (that multiple) say which it is.
    """

    settings: Any  # FederationSettings, which make it

    def __call__(self, updates: ClientUpdates) -> Tables:
        """The change of every public parameter."""
        kind = self.settings.aggregator
        if kind in ("median", "trimmed_mean"):
            return updates.coordinatewise(_median if kind == "median" else self._trimmed_mean)
        if kind == "krum":
            return updates.weighted_sum(self._chosen(updates.products()))
        norms = updates.norms()
        bounded = (self.settings.norm_bound * norms.median() / norms.clamp(min=1e-30)).clamp(max=1.0)
        return updates.weighted_sum(bounded * updates.weights / updates.weights.sum())

    def check(self, participants: int) -> None:
        """Raise UserError if so few clients take part that Krum guarantees nothing."""
        malicious = self.settings.krum_malicious
        if participants <= 2 * malicious + 2:
            raise UserError(f"setting 'krum_malicious': found {malicious}, accepted: less than (N - 2) / 2 of the "
                            f"N clients that take part in a round, which are {participants} in one.")
        if self.settings.krum_selected > participants - malicious:
            raise UserError(f"setting 'krum_selected': found {self.settings.krum_selected}, accepted: at most "
                            f"{participants - malicious}, the {participants} that take part in a round without "
                            f"krum_malicious.")

    def _trimmed_mean(self, changes: Tensor, sent: Tensor) -> Tensor:
        count = sent.sum(0)
        cut = (self.settings.trimmed_share * count + 1e-9).long()  # of .29 * 100 it is 29
        place = torch.arange(len(changes), device=changes.device)[:, None]
        kept = _ordered(changes, sent).where((place >= cut) & (place < count - cut), 0.0).sum(0)
        return kept / (count - 2 * cut).clamp(min=1) * count / len(changes)

    def _chosen(self, products: Tensor) -> Tensor:
        """A factor per client, given the inner products of all pairs of changes."""
        self.check(len(products))
        squares = products.diagonal()
        distances = (squares[:, None] + squares - 2.0 * products).clamp(min=0.0).fill_diagonal_(inf)
        nearest = distances.topk(len(products) - self.settings.krum_malicious - 2, largest=False).values.sum(1)
        selected = self.settings.krum_selected
        return torch.zeros_like(squares).index_fill(0, nearest.argsort(stable=True)[:selected], 1.0 / selected)


def _median(changes: Tensor, sent: Tensor) -> Tensor:
    count, ordered = sent.sum(0), _ordered(changes, sent)
    below, above = (ordered.gather(0, place[None])[0] for place in
                    ((count - 1).clamp(min=0) // 2, (count // 2).clamp(max=len(changes) - 1)))
    return below.lerp(above, 0.5).where(count > 0, 0.0) * count / len(changes)


def _ordered(changes: Tensor, sent: Tensor) -> Tensor:
    """The changes of each number that were sent, ascending, and infinity for the others. NumPy sorts values without
    their places, several times as fast."""
    changes = changes.where(sent, inf)
    return torch.from_numpy(np.sort(changes.T.numpy())).T if changes.device.type == "cpu" else changes.sort(0).values
