"""(b) What clients send, read for what it says of their items and private parameters.

Gradients depend on both, which ``audit`` measures. Looked for here is what can be read off exactly: ids that are
listed, items that are marked, and a number that is an id or an entry of a private parameter times a factor plus an
offset that all clients share. What a plugin's author disguises is not found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..federation.parts import Federation, Progress
from ..rng import Tables
from .report import Violated
from .trials import Pair, client_round, rounds_to_test

_EXACT = 1e-9  # of 1 - |correlation| over clients, for what is the same but for rounding
_CLIENTS = 8  # with fewer, correlations may be high by chance
_WIDE = 1000  # numbers per client; no private vector has more


def uploads(pair: Pair) -> str:
    """(b) A client's upload has public parameters and declared statistics only, in their declared shapes. The engine
    refuses undeclared uploads, other shapes and private parameters; here their content is looked at."""
    names: dict[str, tuple[int, ...]] = {}
    sums: dict[str, tuple[int, ...]] = {}
    for start in [Progress(), *rounds_to_test(pair)]:
        f = pair.federation()
        sent = client_round(f, start)
        step = f.stream.steps[start.step]
        declared = f.acting_in(step).uploads(f.backbone, start.round)
        names.update(declared)
        sums.update(f.acting_in(step).sums(f.backbone, step.n_items))
        for name in [name for name in sent if name.startswith("upload ")]:
            short = name.removeprefix("upload ")
            values = sent[name].double()
            if short in declared:
                _read(f, step.index, short, values, sent["user"])
            own = {**_of_items(f, start, sent), **_of_private(f, start, sent, tables=short in declared)}
            if said := _numbers_say(_columns(values), own):
                raise Violated(f"end_local: upload '{short}' has a number that is {said}, times a factor and plus an "
                               f"offset that all clients share. Send what does not say it")
    shared = "in place of public parameters, seen as sums over clients: " + ", ".join(
        f"{name} {tuple(shape)}" for name, shape in sums.items()) if sums else "public parameters"
    return f"{shared}{''.join(f', {name} {tuple(shape)}' for name, shape in names.items())}"


def _read(f: Federation, step: int, name: str, values: Tensor, users: Tensor) -> None:
    """Raise Violated if a declared upload lists or marks a client's items of a step so far."""
    n_items = f.stream.steps[step].n_items
    for past in f.stream.steps[:step + 1]:
        lists = [past.train.of(user).unique() if user < past.n_users else past.train.values[:0]
                 for user in users.tolist()]
        for row, user, items in zip(values, users.tolist(), lists):
            if len(items) > 2 and (how := _tells(row, items, n_items)):
                raise Violated(f"end_local: upload '{name}' of client {user} {how} its training items of step "
                               f"{past.index}. Send what does not say which items they are")


def _tells(row: Tensor, items: Tensor, n_items: int) -> str:
    """How an upload (...) says which ``items`` a client has; empty if it does not."""
    flat, every = row.flatten(), torch.arange(n_items)
    for name, ids in (("ids", every), ("ids, counted from 1,", every + 1),
                      ("ids, divided by their number,", every / n_items)):
        there = (ids[:, None] - flat).abs().amin(1) <= 1e-6 if flat.numel() >= len(items) else torch.zeros(n_items) > 0
        if bool(there[items].all()) and not bool(there.all()):  # an order of all items has every id
            return f"holds the {name} of all"
    if row.dim() and len(row) == n_items:
        of_item = row.view(n_items, -1)
        rest = torch.ones(n_items, dtype=torch.bool).index_fill(0, items, False)
        if len(items) < n_items and bool(((of_item[items].amin(0) > of_item[rest].amax(0))
                                          | (of_item[items].amax(0) < of_item[rest].amin(0))).any()):
            return "marks exactly"
    return ""


def _columns(values: Tensor) -> Tensor:
    return values.flatten(1) if values.dim() > 1 else values[:, None]


def _of_items(f: Federation, start: Progress, sent: Tables) -> Tables:
    """What each client knows of its items, (clients, 1), by the words for it."""
    lists = [f.stream.steps[start.step].train.of(user) for user in sent["user"].tolist()]
    kinds = {"first": lambda items: items[0], "last": lambda items: items[-1], "lowest": torch.min,
             "highest": torch.max}
    return {f"the id of its {kind} training item": torch.tensor(
        [[float(of(items)) if len(items) else -1.0] for items in lists], dtype=torch.float64)
        for kind, of in kinds.items()}


def _of_private(f: Federation, start: Progress, sent: Tables, tables: bool) -> Tables:
    """Each client's private parameters before and after the round, (clients, numbers), by the words for an entry;
    ``tables``: also those with a row per item, which may have the gradient of a public table, as FedRAP's."""
    result, users = {}, sent["user"]
    personal = () if tables else f.backbone.new_personal(f.seed, range(0))
    for name, table in start.model.private.items():
        before, change = table[users[users < len(table)]].double(), sent[f"private {name}"]
        if name not in personal and before.shape == change.shape and before[0].numel() <= _WIDE:
            result[f"an entry of private '{name}'"] = torch.cat([before.flatten(1), (before + change).flatten(1)], 1)
    return result


def _numbers_say(values: Tensor, own: Tables) -> str:
    """What of the clients' own a column of numbers (clients, numbers) says; empty if none does."""
    if len(values) < _CLIENTS:
        return ""
    return next((what for what, mine in own.items()
                 if bool(((_standard(values).T @ _standard(mine)).abs() > 1.0 - _EXACT).any())), "")


def _standard(columns: Tensor) -> Tensor:
    """Columns of mean 0 and length 1; those with fewer than four values, as steps of Adam's first batch, are 0."""
    centred, ordered = columns - columns.mean(0), columns.sort(0).values
    several = (ordered.diff(dim=0) > 1e-3 * (ordered[-1] - ordered[0])).sum(0) >= 3
    return torch.where(several, centred / centred.norm(dim=0).clamp(min=1e-300), 0.0)
