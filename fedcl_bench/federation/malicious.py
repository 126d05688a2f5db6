"""Malicious clients in a step: who they are, what they see, and their uploads among the honest ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Iterator

import torch
from torch import Tensor

from .. import rng
from ..core.errors import PluginError, UserError
from ..data.stream import Ragged, Step
from ..plugin.attack import Attack, Seen
from ..plugin.state import Snapshot
from ..rng import DrawKey
from ..training.chunk_trainer import Slots
from ..training.trained import Change, Trained
from .client_sampling import Participants

if TYPE_CHECKING:
    from .parts import Federation


def targets_of(attack: Attack, first: Step, seed: int) -> Tensor:
    """The items that an attack promotes, ascending: drawn among those of the first step, for the whole run."""
    keys = rng.row_keys(rng.key(seed, "target items"), torch.arange(first.n_items))
    return _order(keys)[:attack.targets].sort().values


def _order(keys: Tensor) -> Tensor:
    """A random order of what these keys are of."""
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


def malicious_count(attack: Attack | None, share: float, honest: int) -> int:
    """How many clients are malicious, given how many users have data in a step."""
    return int(share * honest + 1e-9) if attack is not None else 0


def acting(f: Federation, step: Step) -> Attack | None:
    """The attack, if it has malicious clients in a step."""
    blocks = f.server.attack_blocks
    return f.attack if f.server.malicious > 0.0 and (blocks == 0 or step.index < blocks) else None


@dataclass
class Malicious:
    """The malicious clients of a step.

    Attributes:
        users: of those among the users, ids, ascending; none of clients that are added.
        count: how many there are.
        active: the numbers of those that take part in the round.
    """

    attack: Attack
    f: Federation
    step: Step
    users: Tensor
    count: int
    targets: Tensor
    known: Ragged
    active: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    _taken: list[Trained] = field(default_factory=list)

    @classmethod
    def of(cls, f: Federation, step: Step) -> "Malicious | None":
        """Those of a step as its clients know it; None if there are none."""
        attack = acting(f, step)
        users = f.server.attendance.able(step)
        count = malicious_count(attack, f.server.malicious, len(users))
        if attack is None or not count:
            return None
        if attack.among_users:
            keys = rng.client_keys(rng.key(f.seed, "malicious"), users)
            users = users[_order(keys)[:count]].sort().values
        return cls(attack, f, step, users if attack.among_users else users[:0], count,
                   targets_of(attack, f.stream.steps[0], f.seed).to(users.device), known_to(attack, step, f.seed))

    def join(self, group: Participants, round_: int) -> Participants:
        """A round's participants with the malicious ones; of those that are added the share that the server asks."""
        if self.attack.among_users:
            self.active = group.users[torch.isin(group.users, self.users)]
            return group
        everyone = torch.arange(self.count, device=group.users.device)
        keys = rng.row_keys(rng.key(self.f.seed, "malicious participants", self.step.index, round_), everyone)
        self.active = _order(keys)[:round(self.f.server.client_ratio * self.count)].sort().values
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

    def uploads(self, model: Snapshot, key: DrawKey, losses: Tensor) -> Iterator[Trained]:
        """What the round's malicious clients upload.

        Args:
            model: what the server sent.
            losses: of the honest clients; added ones, which have none, count with their mean.
        """
        taken, self._taken = self._taken, []
        if not len(self.active):
            return
        changes = {}
        if taken:
            order = torch.cat([part.users for part in taken]).argsort()
            each = [part.changes(model) for part in taken]
            changes = {name: torch.cat([part[name] for part in each])[order] for name in each[0]}
        rates = self.f.backbone_in(self.step.index).learning_rates(model.n_items, key.round)
        sent = self.attack.upload(Seen(self.active, model.public, model.dense, rates, self.targets, self.known,
                                       changes, key))
        public = {name: Change(value, items) for name, (value, items) in sent.items()}
        self._check(public, model)
        if not self.attack.among_users:
            yield self._added(public, model, losses)
        for part in taken:
            places = torch.searchsorted(self.active, part.users)
            yield replace(part, public={**part.public, **{name: each.of(places) for name, each in public.items()}})

    def _added(self, public: dict[str, Change], model: Snapshot, losses: Tensor) -> Trained:
        """The uploads of clients that are no users, with ids behind those of all users."""
        count = len(self.active)
        for name, table in {**model.public, **model.dense}.items():
            if name not in public:
                public[name] = Change(table.new_zeros(count, *table.shape))
        return Trained(self.active + self.step.n_users, Slots(self.active.new_zeros(count, 0)), public, {}, {},
                       losses.mean().expand(count), {})

    def _check(self, public: dict[str, Change], model: Snapshot) -> None:
        """Raise PluginError unless uploads have the form of the parameters that the server sent."""
        tables = {**model.public, **model.dense}
        for name, change in public.items():
            table = tables.get(name)
            shape = () if table is None else table.shape if change.items is None else table.shape[1:]
            lead = (len(self.active),) if change.items is None else tuple(change.items.shape)
            if table is None or tuple(change.rows.shape) != (*lead, *shape) or change.rows.dtype != table.dtype:
                raise PluginError(f"attack '{self.attack.name}': upload() gave {change.rows.dtype} of shape "
                                  f"{tuple(change.rows.shape)} as '{name}', expected a change of what the server sent"
                                  f"{'' if table is None else f', {table.dtype} of shape {(*lead, *shape)}'}.")


def check(f: Federation) -> None:
    """Raise UserError unless a run's attack goes with its other parts."""
    from . import compatibility

    attack, share = f.attack, f.server.malicious
    if attack is None:
        return
    what = f"attack '{attack.name}'"
    if f.cross_silo or any(step.sessions for step in f.stream.steps):
        raise UserError(f"setting 'attack': found {attack.name}, accepted: none with sessions or domains; malicious "
                        f"clients are among those that train on lists of items (stream=blocks or static).")
    if share > 1.0 or attack.among_users and share > 0.5:
        most = "0.5 of all clients" if attack.among_users else "1, as many as the honest ones"
        raise UserError(f"setting 'malicious': found {share:g}, accepted: at most {most}; there would be more "
                        f"malicious clients than honest ones.")
    compatibility.check_single_updates(f.backbone, what, f.server.init)
    attack.check(f.stream.steps[0], f.backbone)
    neutral = {"upload_clip": 0.0, "upload_noise": 0.0, "cold_items": "none",
               **({} if attack.among_users else {"weighting": "uniform"})}  # others have no interactions to count
    for name, accepted in neutral.items():
        if (value := getattr(f.server, name)) != accepted:
            raise UserError(f"setting '{name}': found {value}, accepted: {accepted} with {what}, whose malicious "
                            f"clients keep to no rule of honest ones.")
    if f.method.overrides("sums") or f.method.uploads(f.backbone, 0) or f.method.uploads(f.backbone, 1):
        raise UserError(f"{what}: found method '{f.method.name}', accepted: methods whose clients send changes of "
                        f"public parameters alone; what malicious ones would send besides is not defined.")
