"""The uploads of single clients, for methods whose server looks at each (``Method.aggregate_updates``)."""

from __future__ import annotations

from functools import partial
from typing import Callable, Iterator

import torch
from torch import Tensor

from ..core.parallel import in_order
from ..core.tuning import SIZES
from ..plugin import checks, views
from ..plugin.method import Method
from ..plugin.state import Snapshot, in_pieces
from ..rng import DrawKey, Tables
from ..stats.clip_noise import Protection, upload_key
from ..training.trained import Change, Trained


class HeldUpdates(views.ClientUpdates):
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
