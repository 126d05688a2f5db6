"""Proxies of the past: moving averages of the models that steps started from, some of whose top items are replayed
(CCD's continual update of the student; Lee et al., KDD 2024). Shared by SPP and CCD."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import rng
from ..core.settings import setting
from ..kernels.functional import all_ranks
from ..plugin.backbone import Backbone
from ..plugin.method import Method
from ..plugin.state import Snapshot, in_pieces, rows_of

PROXIES = ("stability", "plasticity")
CANDIDATES = ("items", "labels", "weights")  # what is kept of a proxy's top items, each (users, A)


@dataclass(frozen=True)
class ProxySettings:
    """Settings of a method that replays what proxies rank high."""

    lambda_replay: float = setting(0.01, "weight of the replay loss in a block's first round (CCD: 0.5, summed)",
                                   low=0.0, search=(0.001, 0.01, 0.1))
    anneal: float = setting(10.0, "the weight falls as exp(-round / anneal)", above=0.0)
    stability: float = setting(0.9, "s_w: weight of its past in the stability proxy", low=0.0, high=1.0,
                               search=(0.9, 1.0))
    plasticity: float = setting(0.1, "p_w: weight of its past in the plasticity proxy", low=0.0, high=1.0,
                                search=(0.0, 0.1))
    stable_items: int = setting(3, "n_S: items replayed from the stability proxy", low=0, search=(1, 3, 5))
    plastic_items: int = setting(3, "n_P: items replayed from the plasticity proxy, from the second later block on",
                                 low=0, search=(0, 1, 3, 5))
    proxy_top: int = setting(50, "A: only a proxy's top A items are replayed", low=1, search=(50, 100))
    rank_eps: float = setting(1e-4, "eps: how much more often an item is replayed that the model ranks lower than the "
                              "proxy", low=0.0)


def moved_average(old: Tensor, new: Tensor, weight: float) -> Tensor:
    """The update of a proxy, X <- weight X + (1 - weight) W, on the rows (and columns) that ``old`` has; the rest is
    ``new``. The weight is s_w for the stability proxy, p_w for the plasticity proxy."""
    result = new.clone()
    known = tuple(slice(0, n) for n in old.shape)
    result[known] = weight * old + (1.0 - weight) * new[known]
    return result


def public_scores(backbone: Backbone, model: Snapshot, users: Tensor) -> Tensor:
    """Logits of all items under the public tables, (n, items), even where clients rank by their own: proxies are of
    those."""
    return backbone.score_all(model.clients(users), model.public)


class ProxyReplay(Method):
    """Keeps a stability and a plasticity proxy, of private parameters in ``client_state`` and of public ones in
    ``server_state``, and draws what every user replays of them. Subclasses add the loss.
    """

    settings: ProxySettings

    @property
    def off(self) -> bool:
        return self.settings.lambda_replay == 0.0 or not (self.settings.stable_items or self.settings.plastic_items)

    def begin_step(self, step, model, backbone):
        if self.off:
            return
        first = "stability:" + next(iter(model.public)) not in self.server_state
        personal = set(backbone.new_personal(0, range(0)))
        old = Snapshot({name: table[:step.old_items] for name, table in model.public.items()},
                       {name: table[:step.old_users, :step.old_items] if name in personal
                        else table[:step.old_users] for name, table in model.private.items()}, model.dense,
                       client_context={name: table[:step.old_users] for name, table in model.client_context.items()})
        for proxy, weight in zip(PROXIES, (self.settings.stability, self.settings.plasticity)):
            for state, tables in ((self.server_state, {**old.public, **old.dense}), (self.client_state, old.private)):
                for name, table in tables.items():
                    key = f"{proxy}:{name}"
                    state[key] = moved_average(state[key], table, weight) if key in state else table.clone()
        self._list_candidates(step, old, backbone, first)

    @torch.no_grad()
    def _list_candidates(self, step, model: Snapshot, backbone, first: bool) -> None:
        """Each old user's top A items of each proxy, their labels and the logarithms of their drawing weights."""
        users = torch.arange(model.n_users, device=step.train.values.device)
        for proxy in PROXIES:
            if proxy == "plasticity" and first:  # equal to the other one until now
                for part in CANDIDATES:
                    self.client_state.pop(f"{proxy} {part}", None)
                continue
            state_of = {"public": self.server_state, "dense": self.server_state, "private": self.client_state}
            teacher = replace(model, **{kind: {name: state[f"{proxy}:{name}"] for name in getattr(model, kind)}
                                        for kind, state in state_of.items()})
            pieces = [self._candidates(step, model, teacher, backbone, piece)
                      for piece in in_pieces(users, model.n_items)]
            for part, values in zip(CANDIDATES, zip(*pieces)):
                self.client_state[f"{proxy} {part}"] = torch.cat(values)

    def _candidates(self, step, model: Snapshot, teacher: Snapshot, backbone, users: Tensor) -> tuple[Tensor, ...]:
        """A proxy's ``CANDIDATES`` for replay by some users, each (n, A): its top items that they have not seen, its
        probabilities of those, and eps (rank_model - rank_proxy)."""
        seen = torch.zeros(len(users), step.n_items + 1, dtype=torch.bool, device=users.device)
        seen[step.train.select(users)] = True
        seen.scatter_(1, self.client_state["trained on"][users] % (step.n_items + 1), True)
        seen = seen[:, :model.n_items]
        theirs = public_scores(backbone, teacher, users)
        mine = public_scores(backbone, model, users).masked_fill(seen, -torch.inf)
        top, items = theirs.masked_fill(seen, -torch.inf).topk(min(self.settings.proxy_top, model.n_items), dim=1)
        gap = all_ranks(mine).gather(1, items) - torch.arange(1, items.shape[1] + 1, device=users.device)
        weights = (self.settings.rank_eps * gap).to(theirs.dtype)
        return items, torch.sigmoid(theirs.gather(1, items)), weights.masked_fill(top == -torch.inf, -torch.inf)

    def drawn(self, users: Tensor, draw) -> tuple[Tensor, Tensor, Tensor] | None:
        """(items, labels, weights) replayed by each client in a round, each (C, n); new users have weight 0."""
        drawn = []
        for proxy, n in zip(PROXIES, (self.settings.stable_items, self.settings.plastic_items)):
            if n == 0 or f"{proxy} items" not in self.client_state:
                continue
            known = users < len(self.client_state[f"{proxy} items"])
            items, labels, weights = (rows_of(self.client_state[f"{proxy} {part}"], users) for part in CANDIDATES)
            # Without replacement with these weights: the n largest of log-weight + Gumbel noise (Gumbel top-n).
            keys = replace(draw, batch=0).clients("replay from " + proxy, users)[:, None]
            uniform = rng.uniform(rng.bits(keys, torch.arange(items.shape[1], device=users.device)))
            order = (weights - torch.log(-torch.log(uniform))).topk(min(n, items.shape[1]), dim=1).indices
            valid = (weights.gather(1, order) > -torch.inf) & known[:, None]
            drawn.append((items.gather(1, order), labels.gather(1, order), valid))
        if not drawn:
            return None
        items, labels, valid = (torch.cat(parts, 1) for parts in zip(*drawn))
        # Of an item drawn twice the larger label counts; of equal ones the first.
        same = (items.unsqueeze(2) == items.unsqueeze(1)) & valid.unsqueeze(1)
        number = torch.arange(items.shape[1], device=items.device)
        beaten = same & ((labels.unsqueeze(1) > labels.unsqueeze(2)) |
                         ((labels.unsqueeze(1) == labels.unsqueeze(2)) & (number < number[:, None])))
        return items, labels, (valid & ~beaten.any(2)).to(labels.dtype)

    def end_step(self, step, model, backbone, trained, draw):
        if self.off:
            return
        # What each client trained on, for the next block; -1, the last column there, stands for nothing.
        train, user = step.train, step.train.owners
        trained_on = train.values.new_full((step.n_users, int(train.lengths.max())), -1)
        trained_on[user, torch.arange(len(user), device=user.device) - train.indptr[user]] = train.values
        self.client_state["trained on"] = trained_on
