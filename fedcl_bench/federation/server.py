"""The server: who takes part in a round, and what becomes of the uploads before the method sees their mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterable, Mapping

import torch
from torch import Tensor

from .. import draws
from ..backbone import Backbone
from ..data.stream import Step, Stream
from ..draws import Tables
from ..model import Snapshot, in_pieces
from ..stats.clip_noise import Protection, upload_key


def participants(step: Step, ratio: float, seed: int, round_: int) -> Tensor:
    """Ids of the clients of a round, ascending: those with training data, or a random share of them."""
    users = (step.train.lengths > 0).nonzero().flatten()
    if ratio == 1.0:
        return users
    keys = draws.client_keys(draws.key(seed, "participants", step.index, round_), users)
    chosen = draws.sort_keys(draws.bits(keys, torch.zeros_like(users))).argsort()
    return users[chosen[:max(1, round(ratio * len(users)))]].sort().values


def most_rounds(stream: Stream, curve: Iterable[Mapping[str, Any]], ratio: float, seed: int) -> int:
    """The most rounds that a client took part in, given a run's rows, one per round."""
    taken = torch.zeros(stream.steps[-1].n_users, dtype=torch.int64)
    for row in curve:
        taken[participants(stream.steps[row["step"]], ratio, seed, row["round"])] += 1
    return int(taken.max())


def aggregate(backbone: Backbone, model: Snapshot, users: Tensor, protection: Protection, seed: int, step: int,
              round_: int, uploads: int | None = None) -> Snapshot:
    """Upload noise, and the backbone's own server if it has one, on the mean of the uploads of ``users``.

    Args:
        model: after local training; with local tables if the backbone keeps them.
        protection: its noise is on every uploaded number, of item rows that a client left alone too: which ones it
            changed must not show.
        uploads: how many there are, if not only those of ``users``.
    """
    if backbone.keeps_local_tables:
        everybody = len(users) == model.n_users  # then nothing need be copied, and users are in their order
        tables = {name: table if everybody and protection.noise == 0.0 else table[users]
                  for name, table in model.local.items()}
        if protection.noise > 0.0:
            for name, table in tables.items():
                key = upload_key(seed, name, step, round_)
                for some in in_pieces(torch.arange(len(users), device=users.device), table[0].numel()):
                    table[some] = protection.noisy(key, users[some], table[some])
        if (answer := backbone.serve(tables)) is not None:
            public, served = answer
            return replace(model, public=public, served={
                name: table if everybody else model.served[name].index_copy(0, users, table)
                for name, table in served.items()})
    if protection.noise > 0.0:
        count = uploads or len(users)

        def noisy(tables: Tables) -> Tables:
            return {name: table + protection.mean_noise(seed, step, round_, name, tuple(table.shape),
                                                        count).to(table) for name, table in tables.items()}
        model = replace(model, public=noisy(model.public), dense=noisy(model.dense))
    return model
