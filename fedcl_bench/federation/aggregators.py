"""What a server makes of clients' changes besides adding their mean, and how it sees each.

A server optimiser takes the mean for a gradient: FedAvgM (Hsu et al., 2019), FedOpt (Reddi et al., ICLR 2021). A robust
aggregator sees each client's change (``HeldUpdates``) and stands in place of the mean.

Clients change the item rows that they look up, most rows at a few of them. *Median* and *trimmed mean* of a number are
over the clients that changed its row, times their share, so that a row moves as far as under the mean; over all
clients, the median of nearly every row would be no change. Where something moves all rows of all clients, as Reg's
penalty, weight decay or noise on uploads, they are over all clients: the server cannot tell who looked a row up. *Krum*
and *norm bound* look at whole changes, in which a row that a client did not send counts as 0, as in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ..core.errors import UserError
from ..core.parallel import in_order
from ..core.tuning import SIZES
from ..plugin import checks
from ..plugin.method import Method
from ..plugin.state import Snapshot, in_pieces
from ..plugin.views import ClientUpdates
from ..rng import DrawKey, Tables
from ..stats.clip_noise import Protection, upload_key
from ..training.trained import Change, Trained


class HeldUpdates(ClientUpdates):
    """``views.ClientUpdates`` of a round's chunks.

    Args:
        held: what clients have made of their public parameters, chunk by chunk.
        model: what the server sent.
        weights: of every user in the mean, (users,); None: all alike.
        uploads: what clients sent besides, each (N, ...).
        protection: its noise is on every number. key: of the round.
    """

    def __init__(self, held: list[Trained], model: Snapshot, weights: Tensor | None, uploads: Tables, method: Method,
                 protection: Protection, key: DrawKey):
        self._held, self.sent, self._method = held, model.sent, method
        self._tables = set(model.public)
        self._protection, self.draw, self.uploads = protection, key, uploads
        self.users = torch.cat([trained.users for trained in held]).sort().values
        self.weights = (torch.ones(len(self.users), dtype=torch.float64, device=self.users.device) if weights is None
                        else weights[self.users].double())

    def chunks(self) -> Iterator[tuple[Tensor, Tables]]:
        numbers = sum(sent.numel() for sent in self.sent.values())
        for trained in self._held:
            for part in in_pieces(torch.arange(len(trained.users), device=self.users.device), numbers):
                users = trained.users[part]
                yield torch.searchsorted(self.users, users), {
                    name: self._noisy(name, users, trained.public[name].of(part).against(sent))
                    for name, sent in self.sent.items()}

    def norms(self) -> Tensor:
        squares = torch.zeros(len(self.users), dtype=torch.float64, device=self.users.device)
        for positions, public in self._changes(sparse=lambda change: change.sparse):
            squares[positions] += sum(change.added.double().flatten(1).square().sum(1) for change in public.values())
        return squares.sqrt()

    def products(self) -> Tensor:
        blocks = (self._block(name, part).double() for name in self.sent for part in self._parts(name))
        return sum(block @ block.T for block in blocks)

    def weighted_sum(self, factors: Tensor) -> Tables:
        checks.check_tensor(self._method, "weighted_sum", factors, (len(self.users),), "(N,): a factor per participant")
        total = {name: torch.zeros_like(sent, memory_format=torch.contiguous_format)
                 for name, sent in self.sent.items()}
        for positions, public in self._changes():
            for name, change in public.items():
                change.add_to(total[name], self.sent[name], factors[positions].to(total[name]))
        return total

    def coordinatewise(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tables:
        def of(name: str, part: slice) -> Tensor:
            block = self._block(name, part)
            result = function(block, self._looked_up(block, self.sent[name][part]) if name in self._tables else
                              torch.ones((), dtype=torch.bool, device=block.device).expand_as(block))
            checks.check_tensor(self._method, "coordinatewise", result, tuple(block.shape[1:]), "(n,): one per number")
            return result
        return {name: torch.cat(list(in_order(partial(of, name), self._parts(name), sent.device))).view_as(sent)
                for name, sent in self.sent.items()}

    def _noisy(self, name: str, users: Tensor, change: Tensor) -> Tensor:
        key = self.draw
        return self._protection.noisy(upload_key(key.seed, name, key.step, key.round), users, change)

    def _changes(self, sparse: Callable[[Change], bool] = lambda change: True) -> Iterator[tuple[Tensor, dict]]:
        """What ``chunks`` gives as ``Change``s: as they are held, if all are ``sparse`` and without noise."""
        if self._protection.noise == 0.0 and all(sparse(c) for trained in self._held for c in trained.public.values()):
            yield from ((torch.searchsorted(self.users, each.users), each.public) for each in self._held)
        else:
            for positions, tables in self.chunks():
                yield positions, {name: Change(table) for name, table in tables.items()}

    def _looked_up(self, block: Tensor, rows: Tensor) -> Tensor:
        """Whether each client has changed the row that a number is of, (N, n)."""
        changed = block.T.view(len(rows), -1, len(block)) != 0.0
        return changed.any(1, keepdim=True).expand_as(changed).reshape(block.T.shape).T

    def _parts(self, name: str) -> list[slice]:
        """Rows of a parameter whose changes at all clients are looked at together."""
        sent = self.sent[name]
        rows = len(sent) if sent.dim() else 1
        at_once = max(1, SIZES.compared // max(1, len(self.users) * sent.numel() // max(1, rows)))
        return [slice(start, start + at_once) for start in range(0, rows, at_once)]

    def _block(self, name: str, part: slice) -> Tensor:
        """All clients' changes of some rows of a parameter, (N, n)."""
        sent = self.sent[name]
        before = sent[part] if sent.dim() else sent
        block = before.new_empty(before.numel(), len(self.users)).T  # those of a number lie together, as for a sort
        for positions, public in self._changes():
            change = public[name].within(part) if sent.dim() else public[name]
            block[positions] = change.against(before).reshape(len(positions), -1)
        return block


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


@dataclass(frozen=True)
class ServerOptimiser:
    """Takes the clients' mean change, after clipping and noise, for a pseudo-gradient.

    Δ_t is the mean of (what a client uploads) - x_t, and x_{t+1} what the server answers:

    - momentum (FedAvgM; Reddi et al. name it so too): m_t = β1 m_{t-1} + Δ_t,  x_{t+1} = x_t + η m_t
    - adam, yogi, adagrad (Reddi et al., Algorithm 2): m_t = β1 m_{t-1} + (1 - β1) Δ_t,
      x_{t+1} = x_t + η m_t / (√v_t + τ), without a correction of bias, with m_{-1} = 0, v_{-1} = τ² and

          adagrad  v_t = v_{t-1} + Δ_t²
          yogi     v_t = v_{t-1} - (1 - β2) Δ_t² sign(v_{t-1} - Δ_t²)
          adam     v_t = β2 v_{t-1} + (1 - β2) Δ_t²

    Which it is says the setting ``server_optimiser``, η ``server_optimiser_lr``, β1 ``server_momentum``, β2
    ``server_beta2`` and τ ``server_epsilon``.
    """

    settings: Any  # FederationSettings, which make it

    @property
    def tables(self) -> int:
        """How many it remembers for each public one."""
        return 1 if self.settings.server_optimiser == "momentum" else 2

    def step(self, sent: Tables, mean: Tables, moments: Tables) -> tuple[Tables, Tables]:
        """What the server answers, and what it remembers. ``sent``: x_t; ``mean``: of the uploads, the same names;
        ``moments``: from the round before, by ``m/NAME`` and ``v/NAME``; empty before the first."""
        after, kept, s = {}, {}, self.settings
        momentum = s.server_optimiser == "momentum"
        for name, value in mean.items():
            delta = value - sent[name]
            m = moments.get(f"m/{name}", torch.zeros_like(delta)) * s.server_momentum
            kept[f"m/{name}"] = m = m + delta * (1.0 if momentum else 1.0 - s.server_momentum)
            if momentum:
                after[name] = sent[name] + s.server_optimiser_lr * m
                continue
            v = moments.get(f"v/{name}", torch.full_like(delta, s.server_epsilon ** 2))
            kept[f"v/{name}"] = v = self._second(v, delta.square())
            after[name] = sent[name] + s.server_optimiser_lr * m / (v.sqrt() + s.server_epsilon)
        return after, kept

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        """v_t, given v_{t-1} and Δ_t²."""
        kind, beta2 = self.settings.server_optimiser, self.settings.server_beta2
        if kind == "adagrad":
            return v + square
        if kind == "yogi":
            return v - (1.0 - beta2) * square * torch.sign(v - square)
        return beta2 * v + (1.0 - beta2) * square
