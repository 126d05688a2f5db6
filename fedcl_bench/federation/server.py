"""The server: whom it asks, how uploads are clipped, added up, averaged and made noisy, and what it answers.

Chunks of clients are added in their own order, whichever thread trained them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Mapping

import torch
from torch import Tensor

from ..core.parallel import in_order
from ..plugin import checks
from ..plugin.backbone import Backbone
from ..training.trained import Change, Trained, at_slots
from ..training.unseen_rows import start_elsewhere
from ..data.stream import Step, Stream
from ..rng import DrawKey, Tables
from ..evaluation.ranking import UserScores
from ..plugin.method import Method
from ..plugin.state import Snapshot, in_pieces, with_trailing_dims
from ..stats.clip_noise import Protection, upload_key
from .aggregators import Aggregator, HeldUpdates
from .client_sampling import Attendance, Participants


class Population:
    """All clients of a run, which are here; ``remote.py`` has those of which some or all are elsewhere."""

    clients_here = True

    def clients(self, stream: Stream) -> int:
        """All of the run, given the stream of those here."""
        return stream.steps[-1].n_users

    def all_reduce(self, here: Tables) -> Tables:
        """Tables added up over all clients, given the sums over the clients here, whose memory it may reuse."""
        return here

    def participants(self, step: Step, attendance: Attendance, seed: int, round_: int) -> Participants:
        return attendance.of(step, seed, round_)

    def mean(self, here: UserScores, metric: str) -> float:
        """The mean of a metric over all users, given those of the users here."""
        return here.mean(metric)

    def answer_queries(self, method: Method, queries: Tensor, users: Tensor) -> Tensor:
        """The server's answers to what users here ask in an evaluation (see ``Method.answer_queries``)."""
        return method.answer_queries(queries, users)

    def new_rows(self, make: Callable[[Tables], Tables], here: Tables) -> Tables:
        """The rows of a step's new items, which the server makes of sums over all clients, given those here."""
        return make(here)


class RoundSums:
    """Sums and tables of a round, filled by ``add``.

    Args:
        model: what the server sent.
        users: how many clients will be added.
        weights: weight of every user in the mean, shape (users,); None: all alike.
        own_start: clients drew the public parameters that they began with.
        keeps: whether each client's changes are kept instead of their sum.
        shapes: of what clients send in place of changes (see ``Method.sums``).

    Attributes:
        change: of the public parameters, item tables and dense ones, summed over clients; or what they send instead.
        private: those private parameters that are others now, of all users; local: the same of clients' own copies.
        uploads: what the method uploaded, each (N, ...) in ascending order of users.
        held: the chunks' clients, if they are kept.
    """

    def __init__(self, model: Snapshot, users: int, weights: Tensor | None, own_start: bool,
                 keeps: bool, shapes: Mapping[str, tuple[int, ...]]):
        self.held: list[Trained] | None = [] if keeps else None
        self.model, self.users, self.weights, self.own_start = model, users, weights, own_start
        like = next(iter(model.public.values()))
        device = like.device
        self.change = ({name: like.new_zeros(shape) for name, shape in shapes.items()} or
                       {name: torch.zeros_like(table, memory_format=torch.contiguous_format)
                        for name, table in model.sent.items()})
        self.private: Tables = {}
        self.local = {name: _others_rows(table, users) for name, table in model.local.items()}
        # Of the weights that touched each item.
        self._squares = torch.zeros(model.n_items if own_start else 0, dtype=torch.float64, device=device)
        self._losses = [torch.zeros(0, dtype=torch.float64, device=device)]
        self._uploads: dict[str, list[Tensor]] = {}
        self._order = [torch.zeros(0, dtype=torch.int64, device=device)]

    def add(self, trained: Trained) -> None:
        self._losses.append(trained.loss)
        self._order.append(trained.users)
        if self.held is not None:
            self.held.append(replace(trained, private={}, local={}, uploads={}))  # what the server needs
        weights = None if self.weights is None else self.weights[trained.users]
        for name, change in trained.public.items() if self.held is None else ():
            change.add_to(self.change[name], self.model.public.get(name, self.model.dense.get(name)), weights)
        for name, change in trained.private.items():
            self._set_private(name, change, trained.users)
        for name, tables in trained.local.items():
            self.local[name][trained.users] = tables
        for name, values in trained.uploads.items():
            self._uploads.setdefault(name, []).append(values)
        if self.own_start:
            items = trained.slots.items
            weights = torch.ones(len(items), device=items.device) if weights is None else weights
            touched = trained.slots.first_copy * weights.to(self._squares)[:, None].square()
            self._squares.index_add_(0, items.reshape(-1), touched.reshape(-1))

    def _set_private(self, name: str, change: Change, users: Tensor) -> None:
        """Put what clients made of a private parameter of theirs among those of all users."""
        before = self.model.private[name]
        if name not in self.private:
            self.private[name] = (_others_rows(before, self.users) if change.replaces else
                                  before.clone(memory_format=torch.contiguous_format))
        after = self.private[name]
        if change.decay is not None:
            rows = before.index_select(0, users)
            after.index_copy_(0, users, rows.mul_(with_trailing_dims(change.decay.to(rows), rows)))
        if not change.replaces and change.items is None:
            after.index_add_(0, users, change.rows)
        elif change.items is None:
            after.index_copy_(0, users, change.rows)
        else:
            cells = (users[:, None] * after.shape[1] + change.items).reshape(-1)
            (after.flatten(0, 1).index_copy_ if change.replaces else after.flatten(0, 1).index_add_)(
                0, cells, change.rows.flatten(0, 1))

    @property
    def losses(self) -> Tensor:
        return torch.cat(self._losses)

    @property
    def uploads(self) -> Tables:
        if not self._uploads:
            return {}
        order = torch.cat(self._order).argsort()
        return {name: torch.cat(parts)[order] for name, parts in self._uploads.items()}

    def tables(self) -> Tables:
        """The sums, by name; float64 but for those of parameters, ``change/NAME``. ``numbers``, (3,): of losses, of
        clients and of their weights; where clients drew their starts also ``squares`` of the weights that touched each
        item, (items,), and ``square`` of all."""
        count = sum(map(len, self._order))
        numbers = torch.full((3,), count, dtype=torch.float64, device=self._squares.device)
        numbers[0] = self.losses.sum()
        weights = None if self.weights is None else self.weights[torch.cat(self._order)]
        if weights is not None:
            numbers[2] = weights.sum()
        tables = {**{f"change/{name}": table for name, table in self.change.items()}, "numbers": numbers}
        if self.own_start:
            square = numbers[1].clone() if weights is None else weights.double().square().sum()
            tables |= {"squares": self._squares, "square": square}
        return tables

    @property
    def loss(self) -> float:
        """The mean local loss."""
        numbers = self.tables()["numbers"]
        return float(numbers[0] / numbers[1])


def _others_rows(table: Tensor, users: int) -> Tensor:
    """A table like this with the rows of those who are not among so many users; the others are to be written."""
    like = torch.empty_like if users == len(table) else torch.clone
    return like(table, memory_format=torch.contiguous_format)


def clip(trained: Trained, model: Snapshot, protection: Protection) -> Trained:
    """The clients of a chunk with their changes of public parameters scaled down to the norm that is allowed. What
    moves rows that a client does not touch counts too: it depends on its data through its local batches."""
    if not protection.clip > 0.0:
        return trained
    sizes, public = torch.zeros(len(trained.users), dtype=torch.float64, device=trained.users.device), {}
    for name, change in trained.public.items():
        sent = model.public.get(name, model.dense.get(name))
        if change.replaces:
            change = Change(change.rows - sent)
        public[name], rows = change, change.added
        if change.shift is not None:
            rows = rows + at_slots(change.shift, trained.slots)
            sizes += _elsewhere(trained, protection.sizes(change.shift))
        if change.decay is not None:
            share = change.decay - 1.0
            rows = rows + at_slots(sent, trained.slots) * with_trailing_dims(share, rows).to(rows)
            sizes += _elsewhere(trained, protection.sizes(sent)) * protection.sizes(share)
        sizes += protection.sizes(rows)
    factors = protection.factors(sizes)
    return replace(trained, public={name: change.scaled(factors) for name, change in public.items()})


def _elsewhere(trained: Trained, sizes: Tensor) -> Tensor:
    """Sums of a table's sizes by row, (items,), over the rows that each client does not hold, (C,)."""
    items = trained.slots.items
    untouched = torch.ones(len(items), len(sizes), dtype=sizes.dtype, device=sizes.device)
    return untouched.scatter_(1, items, 0.0) @ sizes


def mean(sums: RoundSums, model: Snapshot, backbone: Backbone, seed: int) -> Snapshot:
    """The model after a round by FedAvg: what the server sent, ``model``, plus the clients' mean change (McMahan et
    al., AISTATS 2017), in the memory of ``sums``."""
    tables, change = sums.tables(), sums.change
    whole = tables["numbers"][2]
    if sums.own_start:  # nothing of the server's own start is left
        rest = float(tables["square"]) - tables["squares"]
        for name in model.public:
            change[name] += start_elsewhere(backbone, seed, name, rest).to(change[name])
        return _after(sums, model, {name: table / whole for name, table in change.items()})
    return _after(sums, model, {name: change[name].div_(whole).add_(table) for name, table in model.sent.items()})


def aggregate_updates(sums: RoundSums, model: Snapshot, method: Method, protection: Protection, key: DrawKey,
                      uploads: Tables, aggregator: Aggregator | None = None) -> Snapshot:
    """As ``mean``: what an aggregator, or else the method, makes of single clients' uploads, on which their noise is;
    ``uploads``: what they sent besides public parameters."""
    updates, sent = HeldUpdates(sums.held, model, sums.weights, uploads, method, protection, key), model.sent
    change = (aggregator or method.aggregate_updates)(updates)
    change = checks.checked_tables(method, "aggregate_updates", change, sent)
    return _after(sums, model, {name: table + change[name] for name, table in sent.items()})


def aggregate_sums(sums: RoundSums, model: Snapshot, method: Method, key: DrawKey, count: int) -> Snapshot:
    """As ``mean``: what the method makes of the sums that clients, so many, send in place of changes (see
    ``Method.sums``)."""
    change, sent = method.aggregate_sums(sums.change, count, model.sent, key), model.sent
    change = checks.checked_tables(method, "aggregate_sums", change, sent)
    return _after(sums, model, {name: table + change[name] for name, table in sent.items()})


def _after(sums: RoundSums, model: Snapshot, public: Tables) -> Snapshot:
    """The model with all public parameters as the server has made them, and what clients have made of their own."""
    return replace(model.with_sent(public), private={**model.private, **sums.private}, local=sums.local)


def receive(method: Method, model: Snapshot, users: Tensor, sums: Tables, count: int, key: DrawKey) -> Snapshot:
    """The model once ``users`` have made of the sums what they make of them, some of them after the other."""
    private, numbers = dict(model.private), sum(table[:1].numel() for table in model.private.values())
    parts = list(in_pieces(users, numbers))

    def received(part: Tensor) -> Tables:
        return method.receive({name: table[part] for name, table in model.private.items()}, sums, count, key)
    for part, made in zip(parts, in_order(received, parts, users.device)):
        for name, rows in made.items():
            if private[name] is model.private[name]:
                private[name] = model.private[name].clone()
            private[name].index_copy_(0, part, rows)
    return replace(model, private=private)


def aggregate(backbone: Backbone, model: Snapshot, users: Tensor, protection: Protection, key: DrawKey,
              by_weight: Mapping[float, int] | None = None) -> Snapshot:
    """Upload noise, and the backbone's own server if it has one, on the mean of the uploads of ``users``.

    Args:
        model: after local training; with local tables if the backbone keeps them.
        protection: its noise is on every uploaded number, of item rows that a client left alone too: which ones it
            changed must not show.
        by_weight: how many of the run's participants have each weight in the mean; None: those of ``users`` are all, of
            one weight.
    """
    if backbone.keeps_local_tables:
        tables = _uploaded_tables(model, users, protection, key)
        if (answer := backbone.serve(tables)) is not None:
            public, served = answer
            return replace(model, public=public, personalised={
                name: table if len(users) == model.n_users else model.personalised[name].index_copy(0, users, table)
                for name, table in served.items()})
    if protection.noise == 0.0:
        return model
    by_weight = by_weight or {1.0: len(users)}
    return model.with_sent({name: table + protection.mean_noise(key, name, tuple(table.shape), by_weight).to(table)
                            for name, table in model.sent.items()})


def _uploaded_tables(model: Snapshot, users: Tensor, protection: Protection, key: DrawKey) -> Tables:
    """The whole item tables that clients send, each (N, items, ...), with noise."""
    if protection.noise == 0.0 and len(users) == model.n_users:  # users are in their order, nothing need be copied
        return dict(model.local)
    tables = {name: table[users] for name, table in model.local.items()}
    if protection.noise > 0.0:
        for name, table in tables.items():
            noise = upload_key(key.seed, name, key.step, key.round)
            for rows in in_pieces(torch.arange(len(users), device=users.device), table[0].numel()):
                table[rows] = protection.noisy(noise, users[rows], table[rows])
    return tables


def answers(method: Method, round_: int, users: Tensor, uploads: Tables) -> Tables:
    """What the server answers the participants, each (N, ...)."""
    return checks.checked_answers(method, method.end_round(round_, users, uploads), len(users))


def keep(method: Method, answers: Tables, users: Tensor, n_users: int) -> None:
    for name, rows in answers.items():
        checks.check_answer(method, name, rows, method.client_state.get(name))
        kept = with_new_users(method.client_state.get(name, rows[:0]), n_users)
        method.client_state[name] = kept.index_copy(0, users, rows)


def with_new_users(rows: Tensor, n_users: int) -> Tensor:
    """Rows of clients, (users, ...), with rows of zeros for those who are not among them yet."""
    return torch.cat([rows, rows.new_zeros(n_users - len(rows), *rows.shape[1:])])
