"""The federated and continual constraints as tests: who must not know what.

Each property runs the same thing in two worlds that differ only in what somebody must not know, and compares what comes
out of that somebody's hands. Nothing is inferred from a plugin's source.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable

import torch
from torch import Tensor

from ..data.stream import Step
from ..draws import DrawKey, Tables
from ..federation.attendance import Attendance
from ..federation.parts import Federation, Progress
from ..federation.round import Work, train_clients
from ..federation.server import aggregate, mean
from ..federation.steps import begin_step, open_step
from ..model import Snapshot, score_users
from ..stats.clip_noise import OPEN
from .report import Inapplicable, Violated
from .trials import Pair, client_round, difference, tables_differ
from .worlds import with_other_data, with_steps


def _rounds_to_test(pair: Pair) -> list[Progress]:
    """States at which a round begins: the last step's first and second one."""
    last = len(pair.stream.steps) - 1
    second = next(p for p in pair.points if p.step == last and p.round == 1 and not p.trained)
    return [pair.after_step(last - 1), second]


def other_clients(pair: Pair) -> str:
    """(a) What other clients have does not change what a client uploads or learns in the same round."""
    for start in _rounds_to_test(pair):
        step = pair.stream.steps[start.step]
        users = Attendance().of(step, 0, 0).users
        world = client_round(pair.federation(), start)
        for half in (users[::2], users[1::2]):
            others = torch.ones(step.n_users, dtype=torch.bool).index_fill(0, half, False)
            stream = with_steps(pair.stream, {step.index: with_other_data(step, others)})
            mismatch = difference(world, client_round(pair.federation(stream), start), half)
            if mismatch:
                raise Violated(f"with other interactions of the other clients, {mismatch}: it depends on data that "
                               f"never left them")
            if start.round == 0:
                continue
            moved = replace(start, model=_elsewhere(start.model, others),
                            client_state=_of_others(start.client_state, others))
            mismatch = difference(world, client_round(pair.federation(), moved), half)
            if mismatch:
                raise Violated(f"with other private parameters and client_state of the other clients, {mismatch}: it "
                               f"depends on what never left them")
    return f"{len(users)} clients, half of them with other interactions, private parameters and state"


def _of_others(tables: Tables, others: Tensor) -> Tables:
    """Tables with one row per user, in which some users have rows of each other, and numbers 1.25 times as large."""
    result = {}
    for name, table in tables.items():
        rows = others.nonzero().flatten()
        rows = rows[rows < len(table)]
        values = table[rows.roll(1)]
        result[name] = table.index_copy(0, rows, values * 1.25 if table.is_floating_point() else values)
    return result


def _elsewhere(model: Snapshot, others: Tensor) -> Snapshot:
    """A model in which some clients have other private parameters, and remember other things."""
    return replace(model, private=_of_others(model.private, others), memory=_of_others(model.memory, others))


def uploads(pair: Pair) -> str:
    """(b) A client's upload has public parameters and declared statistics only, in their declared shapes.

    The engine refuses undeclared uploads, other shapes and private parameters; here their content is looked at.
    """
    names: dict[str, tuple[int, ...]] = {}
    for start in [Progress(), *_rounds_to_test(pair)]:
        f = pair.federation()
        sent = client_round(f, start)
        step = f.stream.steps[start.step]
        declared = f.acting_in(step).uploads(f.backbone, start.round)
        for name, shape in declared.items():
            names[name] = shape
            values = sent[f"upload {name}"]
            for row, user in zip(values, sent["user"].tolist()):
                trained = step.train.of(user).unique()
                if len(trained) < 3 or row.numel() < len(trained):
                    continue
                flat = row.double().flatten()
                if bool((flat == flat.round()).all()) and bool(torch.isin(trained.double(), flat).all()):
                    raise Violated(f"'{name}' of client {user} holds the ids of all its training items")
                marked = flat != 0
                if row.numel() == step.n_items and int(marked.sum()) == len(trained) and bool(marked[trained].all()):
                    raise Violated(f"'{name}' of client {user} marks exactly its training items")
    return f"public parameters{''.join(f', {name} {tuple(shape)}' for name, shape in names.items())}"


def server_knows(pair: Pair) -> str:
    """(c) The server never sees interactions or private parameters.

    The same public parameters and uploads are given to the server's hooks in a second world, in which every client has
    other interactions, private parameters and client_state, and no client's hook has run.
    """
    for start in _rounds_to_test(pair):
        f = pair.federation()
        step, begun = _begun(f, start, f.stream.steps[start.step])
        opened, users = open_step(f, step, begun.model), _users(f, step, start)
        work = Work(replace(opened.training, protection=OPEN), opened.protocol.chunks(users, start.round, begun.model))
        sums = train_clients([work], begun.model, opened.key(start.round))
        sent, (model, _) = sums.uploads, mean(sums, begun.model, f.backbone, f.seed)
        model = aggregate(f.backbone, model, users, OPEN, opened.key(start.round))
        mine = _server_side(f, step, start, model, sent, _begun_state(pair, start))

        everybody = torch.ones(step.n_users, dtype=torch.bool)
        elsewhere = replace(start, client_state=_of_others(start.client_state, everybody),
                            model=_elsewhere(start.model, everybody),
                            best=replace(start.best, model=_elsewhere(start.best.model, everybody)))
        f = pair.federation(with_steps(pair.stream, {t.index: with_other_data(t)
                                                     for t in pair.stream.steps[:step.index + 1]}))
        other_step, _ = _begun(f, elsewhere, f.stream.steps[start.step])
        other = _server_side(f, other_step, start, _elsewhere(model, everybody), sent, dict(f.method.server_state))
        for hook, tables in mine.items():
            mismatch = tables_differ(tables, other[hook])
            if mismatch:
                raise Violated(f"{hook}: {mismatch} when clients' interactions, private parameters and state are "
                               f"others but everything they upload is the same: the server knows what it must not")
    return "aggregate, end_round and server_state follow from public parameters and declared uploads"


def _users(f: Federation, step: Step, start: Progress) -> Tensor:
    return f.server.attendance.of(step, f.seed, start.round).users


def _begun(f: Federation, start: Progress, step: Step) -> tuple[Step, Progress]:
    """A round whose local training is about to start."""
    f.method.client_state, f.method.server_state = dict(start.client_state), dict(start.server_state)
    if start.round == 0:
        start = begin_step(f, step, start)
    f.acting_in(step).begin_round(step, start.round, f.backbone)
    return step, start


def _begun_state(pair: Pair, start: Progress) -> Tables:
    """The server's state when local training is about to start."""
    f = pair.federation()
    _begun(f, start, f.stream.steps[start.step])
    return dict(f.method.server_state)


def _server_side(f: Federation, step: Step, start: Progress, model: Snapshot, sent: Tables,
                 begun: Tables) -> dict[str, Tables]:
    """What the server's hooks make of uploads and their mean, in their order; ``model`` has the clients' parameters."""
    acting, users = f.acting_in(step), _users(f, step, start)
    result = {"begin_step": begun, "aggregate": dict(acting.aggregate(dict(model.public)))}
    result["end_round's answers"] = dict(acting.end_round(start.round, users, dict(sent)))
    result["end_round"] = dict(f.method.server_state)
    f.method.end_step(step, replace(model, public=result["aggregate"]), f.backbone, users, DrawKey(f.seed, step.index))
    result["end_step"] = dict(f.method.server_state)
    return result


def past_data(pair: Pair) -> str:
    """(d) Training on a block does not change if the data of the blocks before it are replaced after they ended: only
    carried state counts."""
    if len(pair.stream.steps) < 2:
        raise Inapplicable("the stream has one step")
    for t in range(1, len(pair.stream.steps)):
        start = pair.after_step(t - 1)
        others = with_steps(pair.stream, {s.index: with_other_data(s) for s in pair.stream.steps[:t]})
        mismatch = difference(client_round(pair.federation(), start), client_round(pair.federation(others), start))
        if mismatch:
            raise Violated(f"with the data of the blocks before block {t} replaced, {mismatch}: training reads data of "
                           f"the past; carry what is needed in client_state")
    return f"blocks 1 to {len(pair.stream.steps) - 1} train alike after the past is replaced"


def evaluation_data(pair: Pair) -> str:
    """(e) Validation and test items, and the steps to come, change neither training nor the scores that are ranked."""
    for start in [Progress(), *_rounds_to_test(pair)]:
        step = pair.stream.steps[start.step]
        hidden = {s.index: with_other_data(s, splits=("valid", "test")) for s in pair.stream.steps[:step.index + 1]}
        hidden |= {s.index: with_other_data(s) for s in pair.stream.steps[step.index + 1:]}
        others = with_steps(pair.stream, hidden)
        mine, other = pair.federation(), pair.federation(others)
        mismatch = difference(client_round(mine, start), client_round(other, start))
        if mismatch:
            raise Violated(f"with other validation, test and future data, {mismatch}: training reads what it is to be "
                           f"tested on")
        if step.sessions or start.round == 0:
            continue
        everybody = torch.arange(start.model.n_users)
        scores = [f.method.rescore(everybody, score_users(f.backbone, start.model, everybody).detach(), start.model,
                                   f.backbone) for f in (mine, other)]
        mismatch = tables_differ({"scores": scores[0]}, {"scores": scores[1]})
        if mismatch:
            raise Violated(f"rescore: {mismatch} with other validation and test items: it reads what is to be found")
    return "training and scores are the same with other validation, test and future data"


OF_PAIRS: list[tuple[str, Callable[[Pair], str]]] = [
    ("(a) other clients' data", other_clients),
    ("(b) uploads", uploads),
    ("(c) the server's knowledge", server_knows),
    ("(d) past data", past_data),
    ("(e) evaluation data", evaluation_data),
]
