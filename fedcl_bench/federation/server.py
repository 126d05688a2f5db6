"""The server: whom it asks, how uploads are clipped, averaged and made noisy, and what it answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..plugin import checks
from ..plugin.backbone import Backbone
from ..training.trained import Change, Trained, at_slots, beside
from ..training.unseen_rows import start_elsewhere
from ..data.stream import Step, Stream
from ..rng import DrawKey, Tables
from ..evaluation.drift import Add
from ..evaluation.ranking import UserScores
from ..plugin.method import Method
from ..plugin.state import Snapshot, in_pieces
from ..stats.clip_noise import Protection, upload_key
from .client_sampling import Attendance, Participants
from .sums import RoundSums


class Population:
    """All clients of a run, which are here. ``experiments/shards.py`` has those that are spread over workers.

    Attributes:
        all_reduce: adds up tables over all clients, given the sums over the clients here; None: they are all of them.
            May reuse the memory of what it is given.
    """

    all_reduce: Callable[[Tables], Tables] | None = None

    def participants(self, step: Step, attendance: Attendance, seed: int, round_: int) -> Participants:
        """The clients of a round."""
        return attendance.of(step, seed, round_)

    def mean(self, here: UserScores, metric: str) -> float:
        """The mean of a metric over all users, given those of the users here."""
        return here.mean(metric)


def most_rounds(stream: Stream, curve: Iterable[Mapping[str, Any]], attendance: Attendance, seed: int) -> int:
    """The most rounds that a client took part in, given a run's rows, one per round."""
    taken = torch.zeros(stream.steps[-1].n_users, dtype=torch.int64)
    for row in curve:
        taken[attendance.of(stream.steps[row["step"]], seed, row["round"]).users] += 1
    return int(taken.max())


def clip(trained: Trained, model: Snapshot, protection: Protection) -> Trained:
    """The clients of a chunk with their changes of public parameters scaled down to the norm that is allowed.

    What moves rows that a client does not touch counts too: it depends on its data through its local batches.
    """
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
            rows = rows + at_slots(sent, trained.slots) * beside(share, rows).to(rows)
            sizes += _elsewhere(trained, protection.sizes(sent)) * protection.sizes(share)
        sizes += protection.sizes(rows)
    factors = protection.factors(sizes)
    return replace(trained, public={name: change.scaled(factors) for name, change in public.items()})


def _elsewhere(trained: Trained, sizes: Tensor) -> Tensor:
    """Sums of a table's sizes by row, (items,), over the rows that each client does not hold, (C,)."""
    items = trained.slots.items
    untouched = torch.ones(len(items), len(sizes), dtype=sizes.dtype, device=sizes.device)
    return untouched.scatter_(1, items, 0.0) @ sizes


def mean(sums: RoundSums, model: Snapshot, backbone: Backbone, seed: int, add: Add | None = None
         ) -> tuple[Snapshot, float]:
    """The mean of FedAvg: what the server sent plus the clients' mean change (McMahan et al., AISTATS 2017).

    Args:
        sums: of the clients here. Their memory is used.
        model: what the server sent.
        add: adds up over clients that are elsewhere.

    Returns:
        (the model after the round; the mean local loss).
    """
    totals = sums.totals(add)
    private = {name: sums.private.get(name, table) for name, table in model.private.items()}
    whole = totals.numbers[2]
    if sums.own_start:  # nothing of the server's own start is left
        for name in model.public:
            rest = float(totals.square) - totals.squares
            totals.change[name] += start_elsewhere(backbone, seed, name, rest).to(totals.change[name])
        public, dense = ({name: totals.change[name] / whole for name in kind} for kind in (model.public, model.dense))
        return Snapshot(public, private, dense, client_context=model.client_context), totals.loss
    public, dense = ({name: _mean(totals.change[name], whole, table) for name, table in kind.items()}
                     for kind in (model.public, model.dense))
    return Snapshot(public, private, dense, sums.local, model.personalised, model.client_context), totals.loss


def _mean(change: Tensor, whole: Tensor, table: Tensor) -> Tensor:
    """What the server sent plus the mean change, in the sum's memory."""
    return change.div_(whole).add_(table)


def aggregate(backbone: Backbone, model: Snapshot, users: Tensor, protection: Protection, key: DrawKey,
              uploads: int | None = None) -> Snapshot:
    """Upload noise, and the backbone's own server if it has one, on the mean of the uploads of ``users``.

    Args:
        model: after local training; with local tables if the backbone keeps them.
        protection: its noise is on every uploaded number, of item rows that a client left alone too: which ones it
            changed must not show.
        uploads: how many there are, if not only those of ``users``.
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

    def noisy(tables: Tables) -> Tables:
        return {name: table + protection.mean_noise(key.seed, key.step, key.round, name, tuple(table.shape),
                                                    uploads or len(users)).to(table)
                for name, table in tables.items()}
    return replace(model, public=noisy(model.public), dense=noisy(model.dense))


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


def answer(method: Method, round_: int, users: Tensor, uploads: Tables, n_users: int) -> Tables:
    """What the server answers the participants, each (N, ...); they keep it in ``client_state``."""
    answers = checks.checked_answers(method, method.end_round(round_, users, uploads), len(users))
    for name, rows in answers.items():
        kept = method.client_state.get(name)
        kept = rows.new_zeros(n_users, *rows.shape[1:]) if kept is None else kept
        method.client_state[name] = kept.index_copy(0, users, rows)
    return answers
