"""A run's clients divided into parts: which are where, and streams and progress cut into parts and joined again.

A part numbers its clients from 0 without gaps, in the order of their ids. Of the clients that a block brings, a part
gets those of one interval, so its table rows are rows of the whole ones: those at ``names``, the clients' ids.

Where clients are domains, ``names`` are their numbers. All parts number them, users and items as the whole does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from ..data.stream import DomainPart, Ragged, Step, Stream
from ..rng import Tables
from ..core.errors import UserError
from ..federation.parts import Federation, Progress
from ..plugin.state import Snapshot
from ..training.silo_modules import merged

PER_USER = ("private", "local", "personalised", "client_context")  # parts of a snapshot
# What a row ends with where it is shorter than those of another part: RecBole's id of no item or no key; no item.
_PADDING = {"client_context": 0, "client_state": -1}


def check_divisible(federation: Federation, option: str = "--shards") -> None:
    """Raise UserError for a run whose clients cannot be elsewhere than their server; ``option``: that asks for it."""
    def refused(why: str) -> UserError:
        instead = " (`grid --ray` spreads whole runs)" if option == "--shards" else ""
        return UserError(f"{option}: the clients of a run are apart from its server; {why}.\n"
                         f"Leave {option} out{instead}.")
    method = federation.method
    if federation.topology == "central":
        raise refused("with topology=central there is one")
    if why := next((method.gives_up[each] for each in ("F1", "F4") if each in method.gives_up), ""):
        raise refused(f"method '{method.name}' has no server that does with what they send ({why})")
    if federation.attack is not None:
        raise refused(f"attack '{federation.attack.name}' has malicious clients, which see what many of them trained")
    if federation.device.type != "cpu":
        raise UserError(f"--device: found cuda, accepted: cpu with {option}.")


def divide(stream: Stream, parts: int, option: str = "--shards") -> list[Tensor]:
    """The ids of the clients of each part, int64, ascending; of domains their numbers.

    Of the clients that a block brings, each part gets an interval with about equally many interactions over the whole
    stream; ``option``: where the number is from. Raises UserError if there are more parts than clients. Of shards each
    must have somebody to train and to test in every block."""
    if stream.domains:
        if parts > (most := len(stream.domains)):
            raise UserError(f"{option}: found {parts}, accepted: at most the number of domains, {most}.")
        return list(torch.arange(len(stream.domains)).tensor_split(parts))
    last = stream.steps[-1].n_users
    if parts > (most := stream.steps[0].n_users):
        raise UserError(f"{option}: found {parts}, accepted: at most the number of users, {most} in block 0.")
    work = torch.ones(last, dtype=torch.int64)
    for step in stream.steps:
        work[:step.n_users] += step.train.lengths
    names: list[list[Tensor]] = [[] for _ in range(parts)]
    for step in stream.steps:
        new = work[step.old_users:step.n_users]
        part = (new.cumsum(0) - new) * parts // max(int(new.sum()), 1)
        if step.index == 0:  # nobody gets none, though some have most of the work
            order = torch.arange(len(part))
            part = torch.maximum((part - order).cummin(0).values + order, order - (len(part) - parts))
        for number in range(parts):
            names[number].append(step.old_users + (part == number).nonzero().flatten())
    result = [torch.cat(of_steps) for of_steps in names]
    for step in stream.steps if option == "--shards" else ():
        for ids in result:
            here = ids[ids < step.n_users]
            for split in ("train", "valid", "test"):
                if not bool((step.split(split).lengths[here] > 0).any()):
                    raise UserError(f"--shards: found {parts}; one of so many shards has no client with {split} data "
                                    f"in block {step.index}, use fewer.")
    return result


def stream_part(stream: Stream, names: Tensor) -> Stream:
    """The data of some clients: all items, and none of the other clients. Of other domains there are sizes alone."""
    if stream.domains:
        return _of_domains(stream, names)
    steps = []
    for step in stream.steps:
        users = names[names < step.n_users]
        splits = {name: step.split(name).part(users) for name in ("train", "valid", "test")}
        sessions = {name: every.part(every.numbers().part(users)) for name, every in step.sessions.items()}
        steps.append(Step(step.index, len(users), step.n_items, int((names < step.old_users).sum()), step.old_items,
                          step.interactions, **splits, sessions=sessions))
    return Stream(tuple(steps), stream.user_tokens[names.numpy()], stream.item_tokens,
                  item_features=stream.item_features)


def _of_domains(stream: Stream, numbers: Tensor) -> Stream:
    """The data of some domains, with the whole stream's numbers of users and items."""
    every = stream.user_tokens, stream.item_tokens
    here = [torch.zeros(len(tokens), dtype=torch.bool) for tokens in every]
    for number in numbers.tolist():
        for ours, ids in zip(here, (stream.domains[number].users, stream.domains[number].items)):
            ours[ids.start:ids.stop] = True

    def lists(of_all: Ragged) -> Ragged:
        return of_all.where(here[0][of_all.owners])
    steps = [replace(step, **{name: lists(step.split(name)) for name in ("train", "valid", "test")},
                     sessions={name: every.part(lists(every.numbers())) for name, every in step.sessions.items()})
             for step in stream.steps]
    tokens = (np.where(ours.numpy(), of_all, "") for ours, of_all in zip(here, every))
    features = (of_items[:len(of_items) if number in numbers else 0] for number, of_items in enumerate(stream.features))
    return Stream(tuple(steps), *tokens, domains=stream.domains, features=tuple(features))


def _rows(tables: Tables, names: Tensor) -> Tables:
    return {name: table[names[names < len(table)]] for name, table in tables.items()}


def progress_part(progress: Progress, names: Tensor, domains: Sequence[DomainPart] = ()) -> Progress:
    """What a run carries of some clients, without the tests and analysis of what is behind it; ``domains``: of the
    run's stream."""
    if domains:
        return _progress_of_domains(progress, names.tolist(), domains)

    def cut(model: Snapshot) -> Snapshot:
        return replace(model, **{kind: _rows(getattr(model, kind), names) for kind in PER_USER})
    best = replace(progress.best, model=cut(progress.best.model),
                   client_state=_rows(progress.best.client_state, names))
    return replace(progress, model=cut(progress.model), best=best, previous=cut(progress.previous),
                   client_state=_rows(progress.client_state, names), server_moments={}, tests=(), analysis=())


def _progress_of_domains(progress: Progress, numbers: Sequence[int], domains: Sequence[DomainPart]) -> Progress:
    prefixes = tuple(f"{domains[number].name}/" for number in numbers)

    def tables(of_all: Tables) -> Tables:
        return {name: table for name, table in of_all.items() if name.startswith(prefixes)}

    def cut(model: Snapshot) -> Snapshot:
        return replace(model, public=tables(model.public), dense=tables(model.dense))

    def state(of_all: Tables) -> Tables:  # what optimisers remember: "exp_avg of domain/parameter"
        return {name: table for name, table in of_all.items() if name.partition(" of ")[2].startswith(prefixes)}
    within = progress.within and progress.within()
    part = within and replace(within, model=cut(within.model), server_state=state(within.server_state), epochs=tuple(
        epoch for epoch in within.epochs if epoch[0] in numbers))
    return replace(progress, model=cut(progress.model), best=replace(progress.best, model=cut(progress.best.model)),
                   server_state=state(progress.server_state), server_moments={}, within=part and (lambda: part),
                   tests=(), analysis=(),
                   curve=tuple(row for row in progress.curve if row["step"] % len(domains) in numbers))


def _joined_rows(tables: Sequence[Tables], names: Sequence[Tensor], kind: str) -> Tables:
    """Tables with a row per client of each part, as one with a row per client."""
    result = {}
    for name in tables[0]:
        parts = [part[name] for part in tables]
        rows = [ids[:len(part)] for ids, part in zip(names, parts)]
        if len({part.shape[1:] for part in parts}) > 1:  # rows as long as a part's longest list
            parts = [_widened(name, part, max(part.shape[1] for part in parts), kind) for part in parts]
        whole = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
        for ids, part in zip(rows, parts):
            whole[ids] = part
        result[name] = whole
    return result


def _widened(name: str, table: Tensor, width: int, kind: str) -> Tensor:
    if table.is_floating_point() or kind not in _PADDING:
        raise UserError(f"--shards: rows of '{name}' differ in size between clients; leave --shards out.")
    wider = table.new_full((len(table), width, *table.shape[2:]), _PADDING[kind])
    wider[:, :table.shape[1]] = table
    return wider


def with_rows_of(progress: Progress, parts: Sequence[Progress], names: Sequence[Tensor]) -> Progress:
    """A server's progress with what belongs to single clients, each part's from the same point of the run; ``names``:
    ids of each part's clients."""
    if "domains" in progress.strategies:  # their parameters, and what their optimisers remember
        state = {name: table for part in parts for name, table in part.server_state.items()}
        best = replace(progress.best, model=merged(part.best.model for part in parts))
        return replace(progress, model=merged(part.model for part in parts), best=best, server_state=state)

    def joined(model: Snapshot, models: Sequence[Snapshot]) -> Snapshot:
        return replace(model, **{kind: _joined_rows([getattr(each, kind) for each in models], names, kind)
                                 for kind in PER_USER})

    best = replace(progress.best, model=joined(progress.best.model, [part.best.model for part in parts]),
                   client_state=_joined_rows([part.best.client_state for part in parts], names, "client_state"))
    return replace(progress, model=joined(progress.model, [part.model for part in parts]), best=best,
                   previous=joined(progress.previous, [part.previous for part in parts]),
                   client_state=_joined_rows([part.client_state for part in parts], names, "client_state"))
