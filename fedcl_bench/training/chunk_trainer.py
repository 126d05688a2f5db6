"""Local training of many clients at once, whatever they train on.

Clients are a batch dimension. In a round a client changes only the item rows it looks up, so each client gets its own
copy of just those rows; the rows of C clients are stacked to (C, slots, d). They are disjoint, so the gradient of the
summed losses is every client's own gradient, for any number of local batches and epochs. An item that a client draws
twice must be one row: its *canonical* slot is the first one that holds it, and the others are never read.

Backbones whose loss concerns every row (``Backbone.whole_tables``) get all items as slots instead, in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Callable

import torch
from torch import Tensor

from .. import rng
from ..plugin import checks, views
from ..rng import DrawKey, Tables
from ..plugin.method import Method, Pull
from ..plugin.state import Snapshot, rows_of, with_trailing_dims
from ..core.errors import PluginError
from ..core.tuning import SIZES
from ..stats.clip_noise import upload_key
from .strategies import Training


@dataclass(frozen=True)
class Slots:
    """Which item rows the clients of a chunk hold, and where their samples find them. Where nobody looks at them (see
    ``FusedTrainer``) there are only the items; the rest is None."""

    items: Tensor  # item of each slot, shape (C, slots)
    positive: Tensor | None = None  # whether a slot's item is a positive, bool of shape (slots,) or (C, slots)
    sample: Tensor | None = None  # canonical slot of each sample's item: positives, then negatives, shape (C, samples)
    replay: Tensor | None = None  # canonical slots of the method's replayed items, shape (C, n)
    first_copy: Tensor | None = None  # whether a slot is the canonical one of its item, shape (C, slots)

    def of(self, part: slice | Tensor) -> "Slots":
        """Those of some clients."""
        if self.positive is None:
            return Slots(self.items[part])
        positive = self.positive[part] if self.positive.dim() == 2 else self.positive
        return Slots(self.items[part], positive, self.sample[part], self.replay[part], self.first_copy[part])

    def cells(self, clients: Tensor, n_items: int) -> Tensor:
        """Where the slots lie in a table with a row per client and item, end to end; ``clients``: their rows, (C,)."""
        return (clients[:, None] * n_items + self.items).reshape(-1)

    @staticmethod
    def touched(samples: Tensor, positives: int, replayed: Tensor | None, n_items: int) -> "Slots":
        """A slot for every sample and replayed item; so many ``positives`` come first in ``samples``, (C, n)."""
        items = samples if replayed is None else torch.cat([samples, replayed], 1)
        canonical, first_copy = first_slots(items, n_items)
        return Slots(items, torch.arange(items.shape[1], device=items.device) < positives,
                     canonical[:, :samples.shape[1]], canonical[:, samples.shape[1]:], first_copy)

    @staticmethod
    def distinct(samples: Tensor, positives: int, replayed: Tensor | None, n_items: int) -> "Slots":
        """A slot for every item that a client looks up, once, in order; clients with fewer hold some of the others too,
        which are in no sample."""
        looked_up = samples if replayed is None else torch.cat([samples, replayed], 1)
        mask = torch.zeros(len(samples), n_items, dtype=torch.bool, device=samples.device)
        number = mask.scatter_(1, looked_up, True).cumsum(1)  # of the items looked up, from 1
        held = number[:, -1:]
        item = torch.arange(n_items, device=samples.device)
        slot = torch.where(mask, number - 1, held + item - number)
        # On a GPU as many slots as may be needed, rather than waiting for the number.
        most = int(held.max()) if held.device.type == "cpu" else min(n_items, looked_up.shape[1])
        items = torch.empty_like(slot).scatter_(1, slot, item.expand_as(slot))[:, :most].contiguous()
        positive = torch.zeros_like(mask).scatter_(1, samples[:, :positives], True).gather(1, items)
        slots, n = slot.gather(1, looked_up), samples.shape[1]
        return Slots(items, positive, slots[:, :n], slots[:, n:], torch.ones_like(positive))

    @staticmethod
    def whole(samples: Tensor, positives: int, replayed: Tensor | None, n_items: int) -> "Slots":
        """A slot for every item, in order."""
        items = torch.arange(n_items, device=samples.device).expand(len(samples), n_items)
        positive = torch.zeros(items.shape, dtype=torch.bool, device=items.device)
        positive.scatter_(1, samples[:, :positives], True)
        return Slots(items, positive, samples, replayed if replayed is not None else items[:, :0],
                     torch.ones_like(positive))


def first_slots(items: Tensor, n_items: int) -> tuple[Tensor, Tensor]:
    """For each slot of ``items`` (C, slots) the first one of the client that holds the same item, and whether it is
    that one."""
    slot = torch.arange(items.shape[1], device=items.device)
    if len(items) * n_items <= SIZES.slot_table:
        first = torch.full((len(items), n_items), len(slot), device=items.device)
        first.scatter_reduce_(1, items, slot.expand_as(items), "amin")
        canonical = first.gather(1, items)
        return canonical, canonical == slot
    bits = items.shape[1].bit_length()
    key = items.bitwise_left_shift(bits).bitwise_or_(slot).sort(1).values  # by item, of one item by slot
    held = key.bitwise_and((1 << bits) - 1)
    begins = torch.zeros_like(key)  # where the run of its item begins
    begins[:, 1:] = slot[1:].where((key[:, 1:] >> bits) != (key[:, :-1] >> bits), 0)
    canonical = torch.empty_like(key).scatter_(1, held, held.gather(1, begins.cummax(1).values))
    return canonical, canonical == slot


class TrainerView(views.Local):
    """``views.Local`` of a trainer's clients."""

    def __init__(self, trainer: "ChunkTrainer", draw: DrawKey):
        self._trainer = trainer
        self.kept = trainer.kept_by_hooks
        self.users, self.private, self.dense, self.draw = trainer.users, trainer.private, trainer.dense, draw

    def known(self, n_users: int) -> Tensor:
        positions = self._trainer.known
        if n_users not in positions:
            positions[n_users] = (self.users < n_users).nonzero().flatten()
        return positions[n_users]

    @property
    def moved(self) -> Tables:
        trainer = self._trainer.seeing("moved")
        with torch.enable_grad():
            first = trainer.slots.first_copy
            rows = {name: (value - trainer.begun[name]) * first.view(*first.shape, *[1] * (value.dim() - 2))
                    for name, value in trainer.rows.items()}
            return {**rows, **{name: value - trainer.begun[name] for name, value in trainer.dense.items()}}

    @property
    def changes(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        trainer, result = self._trainer, {}
        for name in trainer.model.sent:
            moved = trainer.coordinates[name] if name in trainer.coordinates else trainer.added_to(name)
            result[name] = moved, None if trainer.all_rows or name in trainer.model.dense else trainer.slots.items
        return result

    @property
    def step_sizes(self) -> Tables:
        return self._trainer.step_sizes

    @torch.no_grad()
    def add(self, name: str, value: Tensor | tuple[Tensor, Tensor], items: Tensor | None = None) -> None:
        trainer = self._trainer
        checks.check_sum(trainer.method, trainer.summed, name, value, items, len(self.users))
        trainer.added[name] = tuple(part.to(trainer.dtype) for part in value) if isinstance(value, tuple) \
            else value.to(trainer.dtype), items

    @torch.no_grad()
    def upload(self, name: str, value: Tensor) -> None:
        trainer, draw = self._trainer, self.draw
        checks.check_upload(trainer.method, trainer.declared, name, value, len(self.users), trainer.private)
        if value.is_floating_point():
            key = upload_key(draw.seed, name, draw.step, draw.round)
            value = trainer.protection.noisy(key, self.users, value)
        trainer.uploads[name] = value


class ChunkTrainer:
    """Local training of one chunk of clients: their item rows and other parameters. Subclasses train them: on lists of
    items (``list_trainer.py``) or on sessions (``session_trainer.py``). ``users``: ids of the C clients, shape (C,);
    ``slots``: the item rows they hold; ``model``: what the server sent; ``draw``: key of the round's random numbers;
    ``batches``: local batches per epoch."""

    def __init__(self, users: Tensor, slots: Slots, model: Snapshot, training: Training, draw: DrawKey,
                 batches: int = 1):
        backbone, method = training.backbone, training.method
        self.users, self.slots, self.model, self.backbone, self.method = users, slots, model, backbone, method
        self.settings, self.draw, self.batches, self.n_items = training.settings, draw, batches, model.n_items
        # The clients draw their public parameters themselves instead of ``model``'s (``init=per_client``).
        self.starts_alone = training.own_start and draw.round == 0
        self.personal = {name: model.private[name] for name in backbone.new_personal(0, range(0))}
        self.rows = self._own_copies()
        self.private = {name: table.index_select(0, users) for name, table in model.private.items()
                        if name not in self.personal or self.all_rows}
        if not self.all_rows:  # of personal tables, a client touches the same rows
            self.private |= {name: self._rows_held(table) for name, table in self.personal.items()}
        self.dense = {name: value.expand(len(users), *value.shape) for name, value in model.dense.items()}
        self.client_context = {name: table.index_select(0, users) for name, table in model.client_context.items()}
        self.dtype = next(iter(self.rows.values())).dtype
        self.moved: Tables = {}  # what training added to the parameters; these parameters too where clients start alone
        # Private parameters after training, of those that are not in ``moved``, each (C, ...)
        self.replaced: Tables = {}
        self.uploads: Tables = {}  # what the method uploaded, each (C, ...)
        self.kept_by_hooks: Tables = {}
        self.known: dict[int, Tensor] = {}
        self.protection = training.protection
        self.declared = method.uploads(backbone, draw.round)
        # What training added to A of tables with a basis (``Method.row_basis``), each (C, slots, r)
        self.coordinates: Tables = {}
        # Sums of the learning rates of the local batches done, by parameter, each (C,); if a hook may ask.
        self.step_sizes: Tables = {}
        self.summed = method.sums(backbone, self.n_items)  # the shapes of what the method sends in place of changes
        self.added: dict[str, tuple[Tensor | tuple[Tensor, Tensor], Tensor | None]] = {}  # that, and the rows it is of
        if self.starts_alone:
            self._start_alone()
        self.pulls = pulls_of(method, model.public | model.dense) | pulls_of(method, model.private, private=True)
        # The public parameters as training begins, as ``rows`` and ``dense``; if the method looks at movement.
        sent = any(pull.to is None for pull in self.pulls.values())
        self.begun = self._begun() if method.sees_rows or sent else {}
        self.clients = {**self.private, **self.dense}
        self.personalised = self._served()

    def _begun(self) -> Tables:
        """The public parameters that training begins with, which may be one for all clients."""
        if self.starts_alone:
            return {name: value.clone() for name, value in (self.rows | self.dense).items()}
        return {**(self.model.public if self.all_rows else self._own_copies()), **self.model.dense}

    def seeing(self, what: str) -> "ChunkTrainer":
        """Itself, if the method may look at ``what`` of clients' copies of item rows."""
        if not self.method.sees_rows:
            raise PluginError(f"method '{self.method.name}': local_loss reads batch.{what}, for which clients must "
                              f"hold copies of their item rows; expected sees_rows = True in the class.")
        return self

    @property
    def all_rows(self) -> bool:
        """Whether every client holds all item rows, in order."""
        return self.backbone.whole_tables

    def _served(self) -> Tables:
        """The tables that the server made for the clients, each (C, items, ...)."""
        return {name: table[self.users] for name, table in self.model.personalised.items()}

    def _rows_held(self, tables: Tensor) -> Tensor:
        """Of tables with a row per user and item, the rows that the clients hold, (C, slots, ...)."""
        cells = self.slots.cells(self.users, self.n_items)
        return tables.flatten(0, 1).index_select(0, cells).view(*self.slots.items.shape, *tables.shape[2:])

    def part_dense(self) -> None:
        """Give each client its own copy of the dense public parameters; until then all look at the server's."""
        for name, value in self.dense.items():
            self.dense[name] = self.clients[name] = value.detach().clone(memory_format=torch.contiguous_format)

    def _own_copies(self) -> Tables:
        """The clients' own copies of the item rows they hold, each (C, slots, ...)."""
        items, public = self.slots.items, self.model.public
        if self.all_rows:
            return {name: table.expand(len(items), *table.shape).clone() for name, table in public.items()}
        flat = items.reshape(-1)
        return {name: table.index_select(0, flat).view(*items.shape, *table.shape[1:])
                for name, table in public.items()}

    def _start_alone(self) -> None:
        """Replace what the server sent by each client's own random start."""
        for name, start in self.backbone.item_starts(self.n_items).items():
            keys = rng.client_keys(own_start_key(self.draw.seed, name), self.users)
            of_rows = rng.bits(keys[:, None], self.slots.items).flatten()
            rows = self.rows[name].new_empty(len(of_rows), *start.shape)
            size = max(1, SIZES.normals // math.prod(start.shape))
            for part, part_keys in zip(rows.split(size), of_rows.split(size)):
                part.copy_(start.draw(part_keys))
            self.rows[name] = self.moved[name] = rows.view(*self.slots.items.shape, *start.shape)
        for name, start in self.backbone.dense_starts().items():
            keys = rng.client_keys(own_start_key(self.draw.seed, name), self.users)
            self.dense[name] = start.draw(keys).to(self.dtype)
            self.moved[name] = self.dense[name]

    @property
    def own_rows(self) -> Tables:
        """The rows of personal tables that lie at the slots; none where clients hold all rows."""
        return {} if self.all_rows else {name: self.private[name] for name in self.personal}

    def added_to(self, name: str) -> Tensor:
        """What training added to a public parameter, once it has ended: (C, ...), of item tables (C, slots, ...)."""
        return self.moved[name]

    def gather(self, slots: Tensor, tables: Tables | None = None) -> Tables:
        """Rows at ``slots`` (C, n) of every client, each (C, n, ...); of ``rows``, or of others laid out alike."""
        clients, width = self.slots.items.shape
        flat = (slots + torch.arange(clients, device=slots.device)[:, None] * width).reshape(-1)
        return {name: rows.flatten(0, 1).index_select(0, flat).view(*slots.shape, *rows.shape[2:])
                for name, rows in (self.rows if tables is None else tables).items()}

    def _distance_from_pull(self, name: str, value: Tensor) -> Tensor:
        """By how much a parameter, as it is now, differs from what it is kept near; 0 where it is free."""
        to = self.pulls[name].to
        if to is None:
            return value - self.begun[name]
        if name in self.dense:
            return value - to
        if name in self.rows or name in self.personal:
            items = self.slots.items
            place = items.clamp(max=(to.shape[1] if name in self.personal else len(to)) - 1)
            near = to[self.users.clamp(max=len(to) - 1)[:, None], place] if name in self.personal else to[place]
            there = self.slots.first_copy & (items == place)
        else:
            near, there = rows_of(to, self.users), torch.ones_like(self.users, dtype=torch.bool)
        if name in self.private:
            there = there & with_trailing_dims(self.users < len(to), there)
        return (value - near) * with_trailing_dims(there, value)

    def _with_pulls(self, gradients: Tables, parameters: Tables) -> Tables:
        """Gradients that the method's pulls have been added to."""
        pulled = {name: gradients[name] + self.pulls[name].weight * self._distance_from_pull(name, parameters[name])
                  for name in gradients.keys() & self.pulls.keys()}
        return {**gradients, **pulled}

    def _penalty(self) -> Tensor | float:
        """The method's penalties on all rows, as far as the clients hold them, shape (C,)."""
        return sum((penalty(self.rows[name], self.slots.items) * self.slots.first_copy).sum(1)
                   for name, penalty in self.penalties.items())


def writable(gradients: Tables) -> Tables:
    """Gradients that may be overwritten one by one. Autograd may return one tensor for several parameters, as for the
    terms of a sum, or one number for a whole row."""
    result, taken = {}, set()
    for name, gradient in gradients.items():
        memory = gradient.untyped_storage().data_ptr()
        shared = memory in taken or 0 in gradient.stride()
        result[name] = gradient.clone(memory_format=torch.contiguous_format) if shared else gradient
        taken.add(memory)
    return result


def row_penalties(method: Method, public: Tables) -> dict:
    """The method's penalties on all rows, by table."""
    def checked(penalty: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def of_rows(rows: Tensor, items: Tensor) -> Tensor:
            result = penalty(rows, items)
            checks.check_tensor(method, "row_penalty", result, tuple(items.shape), "(C, n): a penalty per row")
            return result
        return of_rows
    penalties = {name: method.row_penalty(name) for name in public}
    return {name: checked(penalty) for name, penalty in penalties.items() if penalty is not None}


def pulls_of(method: Method, parameters: Tables, private: bool = False) -> dict[str, Pull]:
    """What the method keeps parameters near, by name."""
    pulls = {name: method.pull(name, private) for name in parameters}
    for name, pull in pulls.items():
        if pull is not None:
            checks.check_pull(method, name, pull, parameters[name], private)
    return {name: pull if pull.to is None else replace(pull, to=pull.to.to(parameters[name]))
            for name, pull in pulls.items() if pull is not None}


def row_bases(method: Method, public: Tables, draw: DrawKey) -> Tables:
    """What changes of rows are made of, by table, where the method says it."""
    bases = {name: method.row_basis(name, rows.shape[-1], draw) for name, rows in public.items() if rows.dim() == 3}
    for name, basis in bases.items():
        if basis is not None:
            checks.check_tensor(method, "row_basis", basis, (*basis.shape[:1], public[name].shape[-1]), "(r, width)")
    return {name: basis.to(public[name]) for name, basis in bases.items() if basis is not None}


def own_start_key(seed: int, name: str) -> int:
    """Names the random numbers of the clients' own starts of a public parameter."""
    return rng.key(seed, f"client start {name}")
