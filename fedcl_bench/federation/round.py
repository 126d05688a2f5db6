"""One round: local training of all participants, and the mean of what they upload."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .. import contract, draws
from ..backbone import Backbone
from ..client.at_rest import PartialTrainer, is_partial
from ..client.base import (ChunkTrainer, Slots, own_start_key, row_penalties,
                           writable)
from ..client.factored import InnerTrainer, Outer
from ..client.fused import RoundTrainer, plan_of
from ..client.lists import ListTrainer
from ..client.optim import make_optimiser
from ..client.out_of_memory import AnyChunk, can_run_out, in_halves
from ..client.sessions import SessionChunk, SessionTrainer
from ..draws import DrawKey, Tables
from ..method import Method
from ..model import Snapshot
from ..ops import kernels
from ..ops.memory import empty_like
from ..parallel import in_order
from ..sampling import Chunk, LaterChunk, LocalSettings
from ..stats.clip_noise import OPEN, Protection

_AT_ONCE = 1 << 19  # numbers of a table
_SHORT = 1 << 18  # samples of a round


def _shift(public: Tables, method: Method, backbone: Backbone, settings: LocalSettings, batches: int,
           round_: int) -> Tables:
    """How far a penalty that acts on every row takes the rows that a client does not touch.

    Such a row sees only the penalty's gradient, so after the same number of local batches it has moved alike at every
    client: trained here once, by the local optimiser, for the whole table.
    """
    penalties = row_penalties(method, public)
    tables = {name: public[name].clone()[None] for name in penalties}
    n_items = len(next(iter(public.values())))
    items = torch.arange(n_items, device=next(iter(public.values())).device)[None]
    optimiser = make_optimiser(settings)
    for batch in range(batches * settings.local_epochs):
        for table in tables.values():
            table.requires_grad_()
        loss = sum(penalties[name](table, items).sum() for name, table in tables.items())
        gradients = torch.autograd.grad(loss, list(tables.values()))
        with torch.no_grad():
            rates = backbone.learning_rates(n_items, round_, batch)
            for name, update in optimiser.updates(writable(dict(zip(tables, gradients))), rates).items():
                tables[name] += update
        for table in tables.values():
            table.requires_grad_(False)
    return {name: table[0] - public[name] for name, table in tables.items()}


def _rows(moved: Tensor | Outer) -> Tensor:
    """What clients added to item rows, (C, slots, ...)."""
    return moved.rows() if isinstance(moved, Outer) else moved


def _of_all_items(moved: Tensor | Outer) -> bool:
    """Whether it has a row per item, though clients did not hold whole tables."""
    return isinstance(moved, Outer) and moved.items is None


def _local_tables(trainer: ChunkTrainer, shifts: Tables) -> Tables:
    """Each client's own trained copy of the public tables, each (C, items, ...)."""
    if isinstance(trainer, PartialTrainer):
        return trainer.kept
    if trainer.backbone.whole_tables:
        return {name: trainer.model.public[name] + trainer.moved[name] for name in trainer.rows}
    result = {}
    for name, table in trainer.model.public.items():
        moved = _rows(trainer.moved[name])
        if _of_all_items(trainer.moved[name]):
            result[name] = moved + table
            continue
        start = table + shifts[name] if name in shifts else table
        own = start.expand(len(trainer.users), *table.shape).clone()
        index = trainer.slots.items.view(*trainer.slots.items.shape, *[1] * (table.dim() - 1))
        result[name] = own.scatter_add_(1, index.expand_as(moved), moved)
    return result


def _untouched_start(backbone: Backbone, seed: int, name: str, weight: Tensor) -> Tensor:
    """What the item rows that clients drew themselves, and did not look up, add to the sum of uploads.

    The sum of independent N(0, std^2) rows with weights w is N(0, std^2 sum w^2): one draw per row instead of one per
    row and client, with exactly the same law.

    Args:
        weight: sum of the squared weights of the clients that did not look up each item, shape (items,).

    Returns:
        float64 of shape (items, ...).
    """
    items = torch.arange(len(weight), device=weight.device)
    rest = backbone.item_starts(len(weight))[name].draw(
        draws.row_keys(own_start_key(seed, name + " elsewhere"), items))
    return rest * weight.clamp(min=0.0).sqrt().view(-1, *[1] * (rest.dim() - 1))


def _clip_factors(moved: Tables, shift: Tables, rest: Mapping[str, tuple[Tensor, Tensor]], slots: Slots,
                  names: Iterable[str], protection: Protection) -> Tensor:
    """By what each client multiplies its change of the public parameters to stay within the norm, (C,).

    What moves rows that a client does not touch counts too: it depends on its data through its local batches.

    Args:
        rest: by table, what its rows are at rest as a share of what the server sent, (C,), less 1, and the table.
    """
    sizes = torch.zeros(len(slots.items), dtype=torch.float64, device=slots.items.device)
    for name in names:
        change = _rows(moved[name])
        if name in shift:
            change = change + _at_slots(shift[name], slots)
            each = protection.sizes(shift[name])
            elsewhere = torch.ones(len(slots.items), len(each), dtype=each.dtype, device=each.device)
            sizes += elsewhere.scatter_(1, slots.items, 0.0) @ each
        if name in rest:
            share, table = rest[name]
            change = change + _at_slots(table, slots) * _beside(share, change).to(change)
            each = protection.sizes(table)
            elsewhere = torch.ones(len(slots.items), len(each), dtype=each.dtype, device=each.device)
            sizes += (elsewhere.scatter_(1, slots.items, 0.0) @ each) * protection.sizes(share)
        sizes += protection.sizes(change)
    return protection.factors(sizes)


def _at_slots(table: Tensor, slots: Slots) -> Tensor:
    """Rows of a table at each client's slots, 0 where a slot is not its item's first: (C, slots, ...)."""
    rows = table.index_select(0, slots.items.reshape(-1)).view(*slots.items.shape, *table.shape[1:])
    return rows * _beside(slots.first_copy, rows)


def _beside(factors: Tensor, values: Tensor) -> Tensor:
    """Factors of the first dimensions, in a shape that multiplies ``values``."""
    return factors.view(*factors.shape, *[1] * (values.dim() - factors.dim()))


@dataclass(frozen=True)
class Trained:
    """What local training made of the C clients of a chunk.

    Attributes:
        users: ids, shape (C,).
        slots: the item rows they held.
        moved: what they added to the parameters: item rows by slot, each (C, slots, ...), others (C, ...); beyond
            ``shift``. A table whose rows were not held has an ``Outer`` (see ``inner.py``).
        shift: how far rows that a client does not touch have moved alike for all (see ``_shift``).
        factors: by what clipping has multiplied each client's change of public parameters, shape (C,): that in
            ``moved`` already, ``shift`` not. None: nothing is clipped.
        private: private parameters that are not in ``moved``, as they are after training, each (C, ...).
        kept: their own trained copies of the public item tables, if they keep them, each (C, items, ...).
        loss: each client's mean loss, shape (C,).
        uploads: what the method uploaded, each (C, ...).
        rest: with whole tables of which clients held only a part (see ``partial.py``), by what a client's other rows
            were multiplied, each (C,); ``moved`` is beyond that.
        held: what has become of the rows that clients held of such personal tables, each (C, slots, ...).
    """

    users: Tensor
    slots: Slots
    moved: dict[str, Tensor | Outer]
    shift: Tables
    factors: Tensor | None
    private: Tables
    kept: Tables
    loss: Tensor
    uploads: Tables
    rest: Tables
    held: Tables

    def changes(self, model: Snapshot, backbone: Backbone) -> Tables:
        """By how much each client's upload differs from what the server sent: public item tables, each (C, items, ...),
        and dense public parameters, each (C, ...). With ``init=per_client`` it is the whole upload in round 0."""
        result = {name: self.moved[name] for name in model.dense}
        for name, table in model.public.items():
            rows, items = _rows(self.moved[name]), self.slots.items
            if name in self.rest and name in self.kept:
                result[name] = self.kept[name] - table
                continue
            if _of_all_items(self.moved[name]) or (backbone.whole_tables and name not in self.rest):
                result[name] = rows
                continue
            change = self.shift.get(name, torch.zeros_like(table)).expand(len(items), *table.shape).clone()
            if name in self.rest:
                change += table * _beside(self.rest[name] - 1.0, change).to(change)
            if self.factors is not None:
                change *= _beside(self.factors.to(change), change)
            index = items.view(*items.shape, *[1] * (table.dim() - 1)).expand_as(rows)
            result[name] = change.scatter_add_(1, index, rows)
        return result


def _others_rows(table: Tensor, users: int) -> Tensor:
    """A table like this with the rows of those who are not among so many users; the others are to be written."""
    result = empty_like(table)
    return result if users == len(table) else result.copy_(table)


def _multiply(table: Tensor, users: Tensor, factors: Tensor, result: Tensor) -> None:
    """Write some users' rows (items, ...) of a table, each times its factor, into another of the same shape."""
    factors = factors.to(table)
    if table.device.type == "cpu":  # one user after the other: a single pass over memory
        for user, factor in zip(users.tolist(), factors):
            torch.mul(table[user], factor, out=result[user])
    else:
        own = table.index_select(0, users)
        result.index_copy_(0, users, own.mul_(_beside(factors, own)))


def trainer_of(chunks: Sequence[AnyChunk], model: Snapshot, backbone: Backbone, method: Method,
               settings: LocalSettings, place: DrawKey, own_start: bool = False, protection: Protection = OPEN,
               watched: bool = True) -> Callable[[AnyChunk], Trained]:
    """The function that trains the clients of one of a round's chunks; arguments as for ``train_round``.

    Args:
        watched: whether somebody looks at their samples.
    """
    shifts: dict[int, Tables] = {}
    partial = is_partial(backbone, method, model, settings)
    plan = plan_of(backbone, method, model, settings, place, max((chunk.batches for chunk in chunks), default=0))
    if row_penalties(method, model.public) and not backbone.whole_tables:
        shifts = {batches: _shift(model.public, method, backbone, settings, batches, place.round)
                  for batches in {chunk.batches for chunk in chunks}}

    def train(chunk: AnyChunk) -> Trained:
        if isinstance(chunk, LaterChunk):
            chunk = chunk.now()
        if isinstance(chunk, SessionChunk):
            trainer = SessionTrainer(chunk, model, backbone, method, settings, place, own_start, protection)
        elif chunk.inner and not chunk.dense and plan is not None:
            trainer = RoundTrainer(chunk, model, backbone, method, settings, place, plan, watched)
        else:
            kind = InnerTrainer if chunk.inner else PartialTrainer if partial else ListTrainer
            trainer = kind(chunk, model, backbone, method, settings, place, protection)
        loss = trainer.train()
        moved, shift = trainer.moved, shifts.get(chunk.batches, {})
        for name, table in shift.items():
            # Rows the client did not touch moved by `shift` too, alike for all; its own copies count from there.
            moved[name] = moved[name] - _at_slots(table, trainer.slots)
        kept = _local_tables(trainer, shift) if backbone.keeps_local_tables else {}
        rest, held = {}, {}
        if isinstance(trainer, PartialTrainer):
            rest, held = trainer.rest, {name: trainer.private[name] for name in trainer.personal}
        factors = None
        if protection.clip > 0.0:
            names = [*model.public, *model.dense]
            resting = {name: (rest[name] - 1.0, model.public[name]) for name in model.public if name in rest}
            factors = _clip_factors(moved, shift, resting, trainer.slots, names, protection)
            for name in names:
                value = moved[name]
                moved[name] = (value.scaled(factors) if isinstance(value, Outer) else
                               value * _beside(factors.to(value), value))
        contract.check_sent(method, trainer.declared, trainer.uploads)
        return Trained(chunk.users, trainer.slots, moved, shift, factors, trainer.replaced, kept, loss, trainer.uploads,
                       rest, held)

    return train


def _add_rows(table: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add rows (n, ...) to those of a table at ``places``, (n,), in its place."""
    if kernels.serve(table) and rows.dtype == table.dtype in kernels.REALS:
        kernels.add_rows(table, places, rows)
    else:
        table.index_add_(0, places, rows)


def _mean(change: Tensor, whole: Tensor, table: Tensor) -> Tensor:
    """What the server sent plus the mean change, in the sum's memory; in pieces that threads take in turns."""
    if not (kernels.serve(change) and table.is_contiguous()):
        return change.div_(whole).add_(table)
    if change.numel() <= _AT_ONCE:
        kernels.mean(change, table, float(whole))
        return change
    pieces = zip(change.view(-1).split(_AT_ONCE), table.view(-1).split(_AT_ONCE))
    list(in_order(lambda piece: kernels.mean(*piece, float(whole)), list(pieces), change.device))
    return change


def _is_short(chunks: Sequence[AnyChunk], method: Method, settings: LocalSettings) -> bool:
    """Whether threads would only wait for each other: a method's own loss on little data is many short operations,
    which Python calls one at a time."""
    if type(method).local_loss is Method.local_loss or not all(isinstance(c, Chunk) and c.inner for c in chunks):
        return False
    return sum(chunk.positives.numel() for chunk in chunks) * (1 + settings.negatives) < _SHORT


@dataclass(frozen=True)
class _Sums:
    """What the clients of a round add up to.

    Attributes:
        change: of the public parameters.
        private: those private parameters that are others now, and ``local`` tables, of all users.
        losses: each client's, float64, in the order of ``users``, ids of shape (N,).
        squares: of the weights that touched each item, if clients draw their own starts.
        uploads: what the method uploaded, each (N, ...).
    """

    change: Tables
    private: Tables
    local: Tables
    losses: Tensor
    squares: Tensor
    uploads: Tables


def _everybody(chunks: Sequence[AnyChunk], device: torch.device) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *(chunk.users for chunk in chunks)])


def _trained_in_order(chunks: Sequence[AnyChunk], model: Snapshot, backbone: Backbone, method: Method,
                      settings: LocalSettings, place: DrawKey, weights: Tensor | None, own_start: bool,
                      protection: Protection, observe: Callable[[Trained], None] | None) -> _Sums:
    """Of chunks that are trained on several threads and added up in their own order."""
    device = next(iter(model.public.values())).device
    train = trainer_of(chunks, model, backbone, method, settings, place, own_start, protection,
                       observe is not None)
    if can_run_out(device):
        trained_in_order = chain.from_iterable(in_halves(train, chunk, method) for chunk in chunks)
    elif _is_short(chunks, method, settings):
        trained_in_order = map(train, chunks)
    else:
        trained_in_order = in_order(train, chunks, device)

    count = sum(len(chunk.users) for chunk in chunks)
    change = {name: empty_like(table).zero_() for name, table in {**model.public, **model.dense}.items()}
    partial = is_partial(backbone, method, model, settings)
    own_tables = set(backbone.new_personal(0, range(0)))
    private = {name: _others_rows(table, count) for name, table in model.private.items()
               if partial and name in own_tables}
    local = {name: _others_rows(table, count) for name, table in model.local.items()}
    personal = set() if backbone.whole_tables else own_tables
    losses = [torch.zeros(0, dtype=torch.float64, device=device)]
    # Of the weights that touched each item.
    squares = torch.zeros(model.n_items if own_start else 0, dtype=torch.float64, device=device)
    uploads: dict[str, list[Tensor]] = {}
    for trained in trained_in_order:
        if observe is not None:
            observe(trained)
        losses.append(trained.loss)
        users, items = trained.users, trained.slots.items
        share = trained.factors if weights is None else weights[users]
        share = len(users) if share is None else share.sum()
        for name, shift in trained.shift.items():
            change[name] += shift * share
        for name, rest in trained.rest.items():
            if name in own_tables:
                _multiply(model.private[name], users, rest, private[name])
                rows = trained.held[name].flatten(0, 1)
                private[name].flatten(0, 1).index_copy_(0, trained.slots.cells(users, model.n_items), rows)
            elif name not in trained.kept:
                counts = (rest - 1.0) * (1.0 if weights is None else weights[users])
                counts = counts if trained.factors is None else counts * trained.factors
                change[name] += model.public[name] * counts.sum().to(change[name])
        for name, rows in trained.moved.items():
            if name in trained.rest and name in trained.kept:
                sent = trained.kept[name]
                if weights is not None:
                    sent = sent * _beside(weights[users], sent)
                change[name] += sent.sum(0) - model.public[name] * share
                continue
            if isinstance(rows, Outer):
                (rows if weights is None else rows.scaled(weights[users])).add_to(change[name])
                continue
            if weights is not None and name in change:
                rows = rows * _beside(weights[users], rows)
            if name in model.private and name not in private:
                private[name] = empty_like(model.private[name]).copy_(model.private[name])
            if name in personal:
                private[name].index_put_((users[:, None], items), rows, accumulate=True)
            elif name in private:
                _add_rows(private[name], users, rows)
            elif name in model.dense or (backbone.whole_tables and not partial):
                change[name] += rows.sum(0)
            else:
                change[name].index_add_(0, items.reshape(-1), rows.flatten(0, 1))
        for name, values in trained.private.items():
            if name not in private:
                private[name] = _others_rows(model.private[name], count)
            private[name].index_copy_(0, users, values)
        for name, tables in trained.kept.items():
            local[name][users] = tables
        for name, values in trained.uploads.items():
            uploads.setdefault(name, []).append(values)
        if own_start:
            own = torch.ones(len(items), device=device) if weights is None else weights[users]
            first = trained.slots.first_copy
            squares.index_add_(0, items.reshape(-1), (first * own.to(squares)[:, None].square()).reshape(-1))
    order = _everybody(chunks, device).argsort() if uploads else None
    return _Sums(change, private, local, torch.cat(losses), squares,
                 {name: torch.cat(parts)[order] for name, parts in uploads.items()})


def train_round(chunks: Sequence[AnyChunk], model: Snapshot, backbone: Backbone, method: Method,
                settings: LocalSettings, seed: int, step: int, round_: int, weights: Tensor | None = None,
                own_start: bool = False, protection: Protection = OPEN,
                observe: Callable[[Trained], None] | None = None,
                add: Callable[[Tables], Tables] | None = None) -> tuple[Snapshot, float, Tables]:
    """Local training of all participants and the mean of what they upload.

    Chunks are trained on several threads and added up in their own order, so the numbers do not depend on how many.

    Args:
        chunks: the participants.
        model: at the start of the round; not modified.
        weights: weight of every user in the mean, shape (users,); None: all alike.
        own_start: every client draws the public parameters it begins with itself (``init=per_client``).
        protection: changes are clipped, and its noise is on what a method uploads; that on parameters is added to their
            mean later (see ``server.aggregate``).
        observe: called with every chunk's clients after their training.
        add: adds what the clients add up to and what those elsewhere do: sums of changes, losses, weights and numbers.
            None: there are none elsewhere.

    Returns:
        (public parameters averaged over the participants, private ones after the round, local tables if the backbone
        keeps them; mean local loss; what the method uploaded, each (N, ...) in ascending order of users).
    """
    place = DrawKey(seed, step, round_)
    found = _trained_in_order(chunks, model, backbone, method, settings, place, weights, own_start, protection, observe)
    device, count = next(iter(model.public.values())).device, sum(len(chunk.users) for chunk in chunks)
    private = {name: found.private.get(name, table) for name, table in model.private.items()}
    own = None if weights is None else weights[_everybody(chunks, device)]
    totals = torch.full((3,), count, dtype=torch.float64, device=device)  # losses, clients, weights
    totals[0] = found.losses.sum()
    if own is not None:
        totals[2] = own.sum()
    sums = {**found.change, " totals": totals}
    if own_start:
        sums |= {" squares": found.squares, " all squares": totals[1].clone() if own is None else own.double().square().sum()}
    sums = sums if add is None else add(sums)
    change = {name: sums[name] for name in found.change}
    all_losses, clients, whole = sums[" totals"].unbind()
    loss = float(all_losses / clients)
    if own_start:  # nothing of the server's own start is left
        for name in model.public:
            rest = float(sums[" all squares"]) - sums[" squares"]
            change[name] += _untouched_start(backbone, seed, name, rest).to(change[name])
        return Snapshot({name: change[name] / whole for name in model.public}, private,
                        {name: change[name] / whole for name in model.dense}), loss, found.uploads
    public, dense = ({name: _mean(change[name], whole, table) for name, table in kind.items()}
                     for kind in (model.public, model.dense))
    return Snapshot(public, private, dense, found.local, model.served, model.memory), loss, found.uploads
