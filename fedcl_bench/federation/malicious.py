"""Malicious clients in a step: who they are, what they see, and their uploads among the honest ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterator, Mapping

import torch
from torch import Tensor

from .. import rng
from ..core.errors import PluginError
from ..data.stream import Ragged, Step
from ..plugin import checks
from ..plugin.attack import Attack, Seen
from ..plugin.state import Snapshot
from ..rng import DrawKey
from ..training.chunk_trainer import Slots
from ..training.trained import Change, Trained
from .client_sampling import Participants
from .settings import FederationSettings


def targets_of(attack: Attack, first: Step, seed: int) -> Tensor:
    """The items that an attack promotes, ascending: drawn among those of the first step, for the whole run."""
    keys = rng.row_keys(rng.key(seed, "target items"), torch.arange(first.n_items))
    return _order(keys)[:attack.targets].sort().values


def _order(keys: Tensor) -> Tensor:
    return rng.sort_keys(rng.bits(keys, torch.zeros_like(keys))).argsort()


def known_to(attack: Attack, step: Step, seed: int) -> Ragged:
    """The training interactions of a step that an attacker knows: of each user as many as its share comes to, rounded
    up, in the order of the data."""
    train = replace(step.train, ratings=None)
    place = torch.arange(len(train.values), device=train.values.device) - train.indptr[train.owners]
    keys = rng.client_keys(rng.key(seed, "known interactions", step.index), train.owners)
    luck, owners = rng.uniform(rng.bits(keys, place)), train.owners
    order = torch.empty_like(place)
    by_user = luck.argsort(stable=True)
    by_user = by_user[owners[by_user].argsort(stable=True)]
    order[by_user] = place  # as many places as each user has, in the order of luck
    return train.where(order < (train.lengths.double() * attack.known_share - 1e-9).ceil()[owners])


class Malicious:
    """The malicious clients of a step as its clients know it."""

    def __init__(self, attack: Attack, step: Step, server: FederationSettings, seed: int, targets: Tensor):
        self.attack, self.step, self.server, self.seed, self.targets = attack, step, server, seed, targets
        users = server.attendance.able(step)
        self.count = 0 if 0 < server.attack_blocks <= step.index else int(server.malicious * len(users) + 1e-9)
        among = self.count if attack.among_users else 0
        order = _order(rng.client_keys(rng.key(seed, "malicious"), users))
        # Ids of those among the users, ascending; none of clients that are added.
        self.users, self.known = users[order[:among]].sort().values, known_to(attack, step, seed)
        self.active = torch.zeros(0, dtype=torch.int64)  # the numbers of those that take part in the round
        self._taken: list[Trained] = []

    def join(self, group: Participants, round_: int) -> Participants:
        """A round's participants with the malicious ones; of those that are added the share that the server asks."""
        if self.attack.among_users:
            self.active = group.users[torch.isin(group.users, self.users)]
            return group
        everyone = torch.arange(self.count, device=group.users.device)
        keys = rng.row_keys(rng.key(self.seed, "malicious participants", self.step.index, round_), everyone)
        self.active = _order(keys)[:round(self.server.client_ratio * self.count)].sort().values
        return group._replace(count=group.count + len(self.active))

    def honest(self, trained: Trained) -> Iterator[Trained]:
        """The honest clients of a chunk; the others' training is kept for ``uploads``."""
        bad = torch.isin(trained.users, self.active) if self.attack.among_users else None
        if bad is None or not bool(bad.any()):
            yield trained
            return
        self._taken.append(trained.of(bad.nonzero().flatten()))
        if not bool(bad.all()):
            yield trained.of((~bad).nonzero().flatten())

    def uploads(self, model: Snapshot, key: DrawKey, rates: Mapping[str, float], losses: Tensor) -> Iterator[Trained]:
        """What the round's malicious clients upload, given what the server sent, and the learning rates, by parameter,
        and losses of honest ones. Clients that are added, which have no loss, count with their mean."""
        taken, self._taken = self._taken, []
        if not len(self.active):
            return
        changes = {}
        if taken:
            order = torch.cat([part.users for part in taken]).argsort()
            each = [part.changes(model) for part in taken]
            changes = {name: torch.cat([part[name] for part in each])[order] for name in each[0]}
        sent = self.attack.upload(Seen(self.active, model.public, model.dense, rates, self.targets, self.known,
                                       changes, key))
        public = self._checked(sent, model)
        if not self.attack.among_users:
            yield self._added(public, model, losses)
        for part in taken:
            places = torch.searchsorted(self.active, part.users)
            yield replace(part, public={**part.public, **{name: each.of(places) for name, each in public.items()}})

    def _added(self, public: dict[str, Change], model: Snapshot, losses: Tensor) -> Trained:
        """The uploads of clients that are no users, with ids behind those of all users."""
        count = len(self.active)
        for name, table in model.sent.items():
            if name not in public:
                public[name] = Change(table.new_zeros(count, *table.shape))
        return Trained(self.active + self.step.n_users, Slots(self.active.new_zeros(count, 0)), public, {}, {},
                       losses.mean().expand(count), {})

    def _checked(self, sent: Any, model: Snapshot) -> dict[str, Change]:
        """Uploads; raises PluginError unless they have the form of the parameters that the server sent."""
        upload, tables, public = f"attack '{self.attack.name}': upload()", model.sent, {}
        if not isinstance(sent, Mapping) or not all(isinstance(pair, tuple) and len(pair) == 2
                                                    and isinstance(pair[0], Tensor) for pair in sent.values()):
            raise PluginError(f"{upload} returned {type(sent).__name__} {str(sent)[:80]},\nexpected a dictionary of "
                              f"pairs by parameter: (change, items), or (change, None) for all items or a layer.")
        for name, (rows, items) in sent.items():
            table = tables.get(name)
            if items is not None:
                known = len(model.public[name]) if name in model.public else 0  # a layer has none
                checks.check_items(self.attack, f"upload's items of '{name}'", items, len(self.active), known, 0)
                if bool((items.sort(1).values.diff(dim=1) == 0).any()):
                    raise PluginError(f"{upload} lists an item of '{name}' twice for one client,\nexpected each once.")
            shape = () if table is None else table.shape if items is None else table.shape[1:]
            lead = (len(self.active),) if items is None else tuple(items.shape)
            if table is None or tuple(rows.shape) != (*lead, *shape) or rows.dtype != table.dtype:
                raise PluginError(f"{upload} gave {rows.dtype} of shape {tuple(rows.shape)} as '{name}', expected a "
                                  f"change of what the server sent"
                                  f"{'' if table is None else f', {table.dtype} of shape {(*lead, *shape)}'}.")
            public[name] = Change(rows, items)
        return public
