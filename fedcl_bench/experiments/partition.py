"""A run's clients divided into parts: which are where, and streams and progress cut into parts and joined again.

A part numbers its clients from 0 without gaps, in the order of their ids. Of the clients that a block brings, a part
gets those of one interval, so its table rows are rows of the whole ones: those at ``names``, the clients' ids.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Sequence

import torch
from torch import Tensor

from ..data.stream import Step, Stream
from ..rng import Tables
from ..core.errors import UserError
from ..evaluation import beyond_accuracy, drift
from ..evaluation.ranking import UserScores
from ..federation.parts import Best, Federation, Progress
from ..plugin.state import Snapshot

_PER_USER = ("private", "local", "personalised", "client_context")  # parts of a snapshot
# What a row ends with where it is shorter than those of another part: RecBole's id of no item or no key; no item.
_PADDING = {"client_context": 0, "client_state": -1}


def check_divisible(federation: Federation) -> None:
    """Raise UserError for a backbone or method whose server looks at more of its clients than sums."""
    backbone, method = federation.backbone, federation.method
    spread = "--shards: the clients of a run are spread over workers and send sums;"
    if federation.cross_silo:
        one = "a domain is one client, whose training is not divided" if federation.stream.domains else \
            "with topology=central there is one"
        raise UserError(f"{spread} {one}.\nLeave --shards out (`grid --ray` spreads whole runs).")
    if backbone.overrides("serve") or backbone.serves_tables:
        raise UserError(f"{spread} the server of backbone '{backbone.name}' needs every client's item table.\n"
                        f"Leave --shards out (`grid --ray` spreads whole runs), or use another backbone.")
    if method.trains == "server" or method.overrides("trained_backbone"):
        raise UserError(f"{spread} method '{method.name}' has no server that adds these up.\nLeave --shards out "
                        f"(`grid --ray` spreads whole runs).")
    if method.uploads(backbone, 0) or method.uploads(backbone, 1) or method.overrides("aggregate_updates"):
        raise UserError(f"{spread} the server of method '{method.name}' needs what each client uploads.\n"
                        f"Leave --shards out (`grid --ray` spreads whole runs), or use another method.")
    if federation.server.upload_noise and federation.server.weighting != "uniform":
        raise UserError(f"{spread} noise on a weighted mean needs all their weights.\n"
                        f"Leave --shards out (`grid --ray` spreads whole runs), or use weighting=uniform.")
    if federation.server.cold_items != "none":
        raise UserError(f"{spread} cold_items={federation.server.cold_items} looks at all of them.\nLeave --shards out "
                        f"(`grid --ray` spreads whole runs).")
    if federation.device.type != "cpu":
        raise UserError("--device: found cuda, accepted: cpu with --shards.")


def check(federation: Federation, parts: int) -> None:
    """Raise UserError if a run's clients cannot be divided into so many parts."""
    check_divisible(federation)
    divide(federation.stream, parts)


def divide(stream: Stream, parts: int) -> list[Tensor]:
    """The ids of the clients of each part, int64, ascending.

    Of the clients that a block brings, each part gets an interval with about equally many interactions over the whole
    stream.

    Raises:
        UserError: if there are more parts than clients, or a part has nobody to train or to test in some block.
    """
    last = stream.steps[-1].n_users
    if parts > (most := stream.steps[0].n_users):
        raise UserError(f"--shards: found {parts}, accepted: at most the number of clients, {most} in block 0.")
    work = torch.ones(last, dtype=torch.int64)
    for step in stream.steps:
        work[:step.n_users] += step.train.lengths
    names: list[list[Tensor]] = [[] for _ in range(parts)]
    for step in stream.steps:
        new = work[step.old_users:step.n_users]
        part = (new.cumsum(0) - new) * parts // max(int(new.sum()), 1)
        for number in range(parts):
            names[number].append(step.old_users + (part == number).nonzero().flatten())
    result = [torch.cat(of_steps) for of_steps in names]
    for step in stream.steps:
        for ids in result:
            here = ids[ids < step.n_users]
            for split in ("train", "valid", "test"):
                if not bool((step.split(split).lengths[here] > 0).any()):
                    raise UserError(f"--shards: found {parts}; one of so many shards has no client with {split} data "
                                    f"in block {step.index}, use fewer.")
    return result


def stream_part(stream: Stream, names: Tensor) -> Stream:
    """The data of some clients: all items, and none of the other clients."""
    steps = []
    for step in stream.steps:
        users = names[names < step.n_users]
        splits = {name: step.split(name).part(users) for name in ("train", "valid", "test")}
        sessions = {name: every.part(every.numbers().part(users)) for name, every in step.sessions.items()}
        steps.append(Step(step.index, len(users), step.n_items, int((names < step.old_users).sum()), step.old_items,
                          step.interactions, **splits, sessions=sessions))
    return Stream(tuple(steps), stream.user_tokens[names.numpy()], stream.item_tokens)


def _rows(tables: Tables, names: Tensor) -> Tables:
    return {name: table[names[names < len(table)]] for name, table in tables.items()}


def progress_part(progress: Progress, names: Tensor) -> Progress:
    """What a run carries of some clients, without the tests and analysis of what is behind it."""
    def cut(model: Snapshot) -> Snapshot:
        return replace(model, **{kind: _rows(getattr(model, kind), names) for kind in _PER_USER})
    best = replace(progress.best, model=cut(progress.best.model),
                   client_state=_rows(progress.best.client_state, names))
    return replace(progress, model=cut(progress.model), best=best, previous=cut(progress.previous),
                   client_state=_rows(progress.client_state, names), tests=(), analysis=())


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


def whole_progress(parts: Sequence[Progress], names: Sequence[Tensor], behind: Progress) -> Progress:
    """The inverse of ``progress_part``.

    Args:
        parts: each from the same point of the run.
        names: ids of each part's clients.
        behind: what the parts began with; its tests and analysis come first.
    """
    def joined(models: Sequence[Snapshot]) -> Snapshot:
        return replace(models[0], **{kind: _joined_rows([getattr(model, kind) for model in models], names, kind)
                                     for kind in _PER_USER})

    def by_user(kinds: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """(users, values, ...) of each part as one, users ascending."""
        users = torch.cat([ids[users] for ids, (users, *_) in zip(names, kinds)])
        order = users.argsort()
        return users[order], *(torch.cat(values)[order] for values in list(zip(*kinds))[1:])

    tests, analysis = [], []
    for of_parts in zip(*(part.tests for part in parts)):
        t, s, first = of_parts[0]
        users, *values = by_user([(scores.users, *scores.values.values()) for _, _, scores in of_parts])
        tests.append((t, s, UserScores(users, dict(zip(first.values, values)))))
    for of_parts in zip(*(part.analysis for part in parts)):
        t, kind, ids, values = of_parts[0]
        if kind in (*drift.PER_USER, *beyond_accuracy.PER_USER):
            ids, values = by_user([row[2:] for row in of_parts])
        analysis.append((t, kind, ids, values))
    best = replace(parts[0].best, model=joined([part.best.model for part in parts]), client_state=_joined_rows(
        [part.best.client_state for part in parts], names, "client_state"))
    return replace(parts[0], model=joined([part.model for part in parts]), best=best,
                   previous=joined([part.previous for part in parts]),
                   client_state=_joined_rows([part.client_state for part in parts], names, "client_state"),
                   tests=(*behind.tests, *tests), analysis=(*behind.analysis, *analysis))


def outline(progress: Progress) -> Progress:
    """Progress without tables, tests and analysis: what displays look at."""
    empty = {f.name: type(getattr(progress, f.name))() for f in fields(Progress)
             if isinstance(getattr(progress, f.name), dict)}
    nothing = Snapshot({}, {})
    return replace(progress, model=nothing, best=Best(round=progress.best.round), previous=nothing, tests=(),
                   analysis=(), **empty)
