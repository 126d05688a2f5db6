"""The federated and continual constraints as tests: who must not know what.

Each property runs the same thing in two worlds that differ only in what somebody must not know, and compares what comes
out of that somebody's hands. Nothing is inferred from a plugin's source.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Collection, Iterator

import torch
from torch import Tensor

from ..audit.other_worlds import with_other_data, with_other_ends, with_steps
from ..data.stream import Step, Stream
from ..experiments.partition import progress_part, stream_part
from ..rng import DrawKey, Tables, global_client_ids
from ..evaluation.session_ranking import SessionTask, needs_session, session_scores
from ..federation.parts import Federation, Progress
from ..federation.aggregators import HeldUpdates
from ..federation.server import aggregate, mean, with_new_users
from ..plugin.method import Method
from ..plugin.state import Snapshot, score_users
from ..stats.clip_noise import OPEN
from .alterations import WAYS, altered, altered_model, parts_of
from .report import Inapplicable, Violated
from .sent import uploads
from .trials import (Pair, about_to_train, client_round, difference, finished, is_sequential, open_round,
                     rounds_to_test, runs_differ, tables_differ, trained_round)
from .worlds import with_item_features

# Declared uploads; what a method sees that looks at each client's; sums of what clients, so many, send in place of it.
Heard = tuple[Tables, HeldUpdates | None, tuple[Tables, int] | None]
# Hooks that run at clients, in their order.
_CLIENT_HOOKS = ("begin_step", "new_private", "begin_round", "before_training", "begin_local", "replayed_items",
                 "replayed_sessions", "represent", "local_loss", "soft_targets", "gradient_correction", "row_penalty",
                 "pull", "row_basis", "end_local", "receive", "rescore", "rescore_session", "end_step")
_OWN_ONLY = ("A client's hook may use its own rows only: index tables with the users it is given, and take no mean, "
             "sum, order or count over clients")


def _trained(pair: Pair) -> Progress:
    """The state after the rounds of the last step, which has not ended yet."""
    return next(p for p in pair.points if p.step == len(pair.stream.steps) - 1 and p.trained)


# (a)


def other_clients(pair: Pair) -> str:
    """(a) What other clients have does not change what a client uploads, learns, keeps after a step or ranks. The
    others have other interactions, private parameters and state: each one of them alone, and half of all at once."""
    _ranked_alone(pair)
    moments = [*((start, client_round) for start in rounds_to_test(pair)), (_trained(pair), _after_step)]
    for start, looks in moments:
        n_users = pair.stream.steps[start.step].n_users
        mine = looks(pair.federation(), start)
        for others, way in _groups(n_users):
            mismatch = _noticed(pair, start, looks, mine, others, way, parts_of(start))
            if mismatch:
                raise Violated(f"{_culprits(pair, start, looks, others, way)}: {mismatch}; it depends on what never "
                               f"left them. {_OWN_ONLY}")
    return (f"{len(mine['user'])} clients; others have other interactions, private parameters and state, one at a time "
            f"and half of them at once")


def _groups(n_users: int) -> Iterator[tuple[Tensor, str]]:
    """Clients that are altered together, and how: halves such that every pair is apart in one of them, and single
    ones."""
    user = torch.arange(n_users)
    for digit in range((n_users - 1).bit_length()):
        for half in (0, 1):
            for way in WAYS if digit == 0 else WAYS[(digit + half) % 2:][:1]:
                yield (user >> digit) % 2 == half, way
    for number in range(0, n_users, 4):
        yield user == number, "content"


def _noticed(pair: Pair, start: Progress, looks: Callable, mine: Tables, others: Tensor, way: str,
             parts: Collection[str], muted: str = "") -> str | None:
    """What differs at the clients when others have other ``parts``; None if nothing does."""
    try:
        theirs = looks(*_world(pair, start, others, way, parts, muted))
    except Exception:  # entries of any value need not fit each other, as rows of a client do
        if way == "rows" or muted:
            raise
        theirs = looks(*_world(pair, start, others, "rows", parts, muted))
    return difference(mine, theirs, (~others).nonzero().flatten())


def _world(pair: Pair, start: Progress, others: Tensor, way: str, parts: Collection[str],
           muted: str) -> tuple[Federation, Progress]:
    stream, start = altered(pair.stream, start, others, way, parts)
    return _muted(pair.federation(stream), muted), start


def _muted(f: Federation, hook: str) -> Federation:
    """A federation whose method does nothing in one of its hooks."""
    if hook:
        setattr(f.method, hook, getattr(Method, hook).__get__(f.method))
    return f


def _culprits(pair: Pair, start: Progress, looks: Callable, others: Tensor, way: str) -> str:
    """The hooks and the tables of other clients that a difference comes from, in words."""
    parts = parts_of(start)
    mine = looks(pair.federation(), start)
    read = [part for part in parts if _noticed(pair, start, looks, mine, others, way, [part])] or parts

    def differs(hook: str) -> bool:
        silent = looks(_muted(pair.federation(), hook), start)
        return bool(_noticed(pair, start, looks, silent, others, way, read, hook))

    return f"{_hooks(pair, differs)} with other {', '.join(read)} of other clients"


def _hooks(pair: Pair, differs: Callable[[str], bool]) -> str:
    """The method's hooks at clients without which two worlds are the same, or nothing runs; the backbone if all others
    do not matter."""
    needed = []
    for hook in _CLIENT_HOOKS:
        if getattr(pair.method_cls, hook) is getattr(Method, hook):
            continue
        try:
            matters = not differs(hook)
        except Exception:  # another hook builds on it
            matters = True
        if matters:
            needed.append(hook)
    return ", ".join(needed) or f"backbone '{pair.backbone}'"


def _after_step(f: Federation, start: Progress) -> dict[str, Tensor]:
    """What each client ranks by after a step's rounds, and keeps when the step ends."""
    return {**_scored(f, start), **_client_states(f, start)}


def _scored(f: Federation, start: Progress, alone: bool = False) -> dict[str, Tensor]:
    """What each client ranks by after a step's rounds, all of them together or each one alone."""
    f.method.client_state, f.method.server_state = dict(start.client_state), dict(start.server_state)
    step = f.stream.steps[start.step]
    users = torch.arange(step.n_users)
    return {"scores": torch.cat([_scores(f, step, start.best.model, some)
                                 for some in users.split(1 if alone else len(users))]), "user": users}


def _client_states(f: Federation, start: Progress) -> dict[str, Tensor]:
    f.method.client_state, f.method.server_state = dict(start.client_state), dict(start.server_state)
    step, model = f.stream.steps[start.step], start.best.model
    model = replace(model, private={name: table.clone() for name, table in model.private.items()})
    users = torch.arange(step.n_users)
    f.method.end_step(step.training, model, f.backbone, (step.train.lengths > 0).nonzero().flatten(),
                      DrawKey(f.seed, step.index))
    result = {f"private '{name}'": table for name, table in model.private.items()}  # which it could write to
    for name, table in f.method.client_state.items():
        rows = table.expand(len(users)) if table.dim() == 0 else table[:len(users)]
        result[f"client_state['{name}']"] = with_new_users(rows, len(users))
    return {**result, "user": users}


@torch.no_grad()
def _scores(f: Federation, step: Step, model: Snapshot, users: Tensor) -> Tensor:
    """What users rank all items by, (n, items); in sessions 0 for those without one to be tested on."""
    method = f.acting_in(step)
    if not needs_session(f.backbone, method, step):
        return method.rescore(users, score_users(f.backbone, model, users), model, f.backbone)
    task = SessionTask(step, "test", [1], None, DrawKey(f.seed, step.index))
    tested = step.sessions["test"].count[users] > 0
    result = torch.zeros(len(users), model.n_items, dtype=torch.float64)
    if bool(tested.any()):
        result[tested] = session_scores(f.backbone, method, model, task, users[tested]).double()
    return result


def _ranked_alone(pair: Pair) -> None:
    """A user's scores are the same alone and together with others: who is ranked together is chance."""
    start, f = _trained(pair), pair.federation()
    mismatch = difference(_scored(f, start), _scored(f, start, alone=True))
    if mismatch:
        raise Violated(f"{_ranking_hook(pair)}: {mismatch} between the client ranked alone and together with others; "
                       f"it depends on who is ranked together. {_OWN_ONLY}")


def _ranking_hook(pair: Pair) -> str:
    """What says by which scores clients rank."""
    hooks = ("represent",) if is_sequential(pair.backbone_cls) else ("rescore_session", "rescore")
    overridden = [hook for hook in hooks if getattr(pair.method_cls, hook) is not getattr(Method, hook)]
    return overridden[0] if overridden else f"backbone '{pair.backbone}'"


def client_numbers(pair: Pair) -> str:
    """(a) A client's number is no data: a run is the same when clients are numbered from the last to the first, those
    of each step by themselves, and draw what they drew before. The server may keep its rows in another order."""
    names = torch.cat([torch.arange(step.old_users, step.n_users).flip(0) for step in pair.stream.steps])
    f = pair.federation(stream_part(pair.stream, names))
    with global_client_ids(names):
        renumbered = progress_part(finished(f), names.argsort())
    if mismatch := runs_differ(*(replace(end, server_state={}) for end in (pair.points[-1], renumbered))):
        raise Violated(f"with clients numbered the other way round, {mismatch}. Use users' numbers as indices of their "
                       f"own rows, and `draw.clients` where a client draws")
    return f"{len(names)} clients, numbered the other way round, do the same"


# (c)


def server_knows(pair: Pair) -> str:
    """(c) The server never sees interactions or private parameters. The same public parameters and uploads are given to
    the server's hooks in a second world, in which every client has other interactions, private parameters and
    client_state, and no client's hook has run."""
    for start in rounds_to_test(pair):
        f = pair.federation()
        opened, begun, groups = open_round(f, start)
        key, sent, sums = trained_round(opened, begun, groups)
        step, users = opened.step, _users(f, opened.step, start)
        if opened.sums:
            model = replace(begun.model, private={**begun.model.private, **sums.private})
            heard = sent, None, (sums.change, len(users))
        elif sums.held is None:
            model = mean(sums, begun.model, f.backbone, f.seed)
            heard = sent, None, None
        else:
            model = replace(begun.model, private={**begun.model.private, **sums.private}, local=sums.local)
            heard = sent, HeldUpdates(sums.held, begun.model, None, sent, opened.method, OPEN, key), None
        model = aggregate(f.backbone, model, users, OPEN, key)
        mine = _server_side(f, step, start, model, heard, _begun_state(pair, start))
        for others, way in _all_and_single(step.n_users):
            mismatch = _server_noticed(pair, start, model, heard, mine, others, way, parts_of(start))
            if mismatch:
                raise Violated(f"{mismatch} {_not_sent(pair, start, model, heard, mine, others, way)} but everything "
                               f"they upload is the same: the server knows what it must not. Use public parameters, "
                               f"server_state and what uploads() declares")
    _rankings_stay(pair)
    return "what the server makes and keeps follows from public parameters and declared uploads"


def _rankings_stay(pair: Pair) -> None:
    """What clients rank by, which they do at home, leaves nothing at the server."""
    start, f = _trained(pair), pair.federation()
    before = {name: table.clone() for name, table in start.server_state.items()}
    _scored(f, start)
    mismatch = tables_differ(before, f.method.server_state, 0.0)
    if mismatch:
        raise Violated(f"{_ranking_hook(pair)}: server_state {mismatch} after clients were ranked, which they do by "
                       f"themselves. Write server_state in the server's hooks only")


def _all_and_single(n_users: int) -> Iterator[tuple[Tensor, str]]:
    """All clients altered in every way, and some of them alone."""
    user = torch.arange(n_users)
    for way in WAYS:
        yield user >= 0, way
    for number in range(0, n_users, 5):
        yield user == number, "content"


def _server_noticed(pair: Pair, start: Progress, model: Snapshot, heard: Heard, mine: dict[str, Tables],
                    others: Tensor, way: str, parts: Collection[str]) -> str | None:
    """Which hook of the server makes something else when clients have other ``parts``; None if none does. ``model``:
    after the clients' training; ``heard``: what they uploaded besides; ``mine``: what the server makes of them as they
    are."""
    def theirs(way: str) -> dict[str, Tables]:
        stream, elsewhere = altered(pair.stream, start, others, way, parts, past=True)
        f = pair.federation(stream)
        step, begun = about_to_train(f, elsewhere)
        return _server_side(f, step, start, altered_model(model, others, way, parts), heard,
                            _server_tables(f, begun))

    try:
        other = theirs(way)
    except Exception:  # as in (a)
        other = theirs("rows")
    for hook, tables in mine.items():
        mismatch = tables_differ(tables, other[hook])
        if mismatch:
            return f"{hook}: {mismatch}"
    return None


def _not_sent(pair: Pair, start: Progress, *worlds) -> str:
    """What the server's hooks read that clients did not send, in words."""
    if _server_noticed(pair, start, *worlds, []):
        return "when no client's hook has run before it (one left something behind),"
    read = [part for part in parts_of(start) if _server_noticed(pair, start, *worlds, [part])]
    return f"when clients have other {', '.join(read or parts_of(start))}"


def _users(f: Federation, step: Step, start: Progress) -> Tensor:
    return f.server.attendance.of(step, f.seed, start.round).users


def _begun_state(pair: Pair, start: Progress) -> Tables:
    """The server's tables when local training is about to start."""
    f = pair.federation()
    return _server_tables(f, about_to_train(f, start)[1])


def _server_tables(f: Federation, begun: Progress) -> Tables:
    return {**f.method.server_state, **begun.model.sent}


def _server_side(f: Federation, step: Step, start: Progress, model: Snapshot, heard: Heard,
                 begun: Tables) -> dict[str, Tables]:
    """What the server's hooks make of uploads and their mean, in their order; ``model`` has the clients' parameters."""
    acting, users, (sent, updates, sums) = f.acting_in(step), _users(f, step, start), heard
    change, hook = {}, "aggregate_updates" if sums is None else "aggregate_sums"
    if updates is not None:
        change = dict(acting.aggregate_updates(updates))
    elif sums is not None:
        key = DrawKey(f.seed, step.index, start.round)
        change = dict(acting.aggregate_sums(*sums, model.sent, key))
    public = dict(acting.aggregate({name: table + change.get(name, 0.0) for name, table in model.public.items()}))
    dense = {name: table + change.get(name, 0.0) for name, table in model.dense.items()}
    dense = dict(acting.aggregate_dense(dense)) if dense else {}
    result = {"begin_step": begun, hook: change, "aggregate": public, "aggregate_dense": dense}
    result["end_round's answers"] = dict(acting.end_round(start.round, users, dict(sent)))
    result["end_round"] = dict(f.method.server_state)
    model = replace(model, public={name: table.clone() for name, table in public.items()},
                    dense={name: table.clone() for name, table in dense.items()})
    f.method.end_step(step.training, model, f.backbone, users, DrawKey(f.seed, step.index))
    result["end_step"] = dict(f.method.server_state)
    result["end_step's model"] = model.sent  # which it could write to
    return result


# (d) and (e)


def past_data(pair: Pair) -> str:
    """(d) Training on a block, what is kept at its end and rankings do not change if the data of the blocks before it
    are replaced after they ended: only carried state counts."""
    if len(pair.stream.steps) < 2:
        raise Inapplicable("the stream has one step")
    last = len(pair.stream.steps) - 1
    moments = [(pair.after_step(t - 1), client_round) for t in range(1, last + 1)]
    for start, looks in [*moments, (_trained(pair), _after_step)]:
        others = with_steps(pair.stream, {s.index: with_other_data(s)
                                          for s in pair.stream.steps[:start.step]})
        mismatch, hooks = _compared(pair, others, start, looks)
        if mismatch:
            raise Violated(f"{hooks}: with the data of the blocks before block {start.step} replaced, {mismatch}: "
                           f"{_WHAT[looks]} reads data of the past; carry what is needed in client_state")
    return f"blocks 1 to {last} train, end and rank alike after the past is replaced"


_WHAT = {client_round: "training", _after_step: "a step's end or a ranking", _scored: "a ranking",
         _client_states: "end_step"}


def _compared(pair: Pair, stream: Stream, start: Progress, looks: Callable) -> tuple[str | None, str]:
    """What clients do otherwise with the data of another stream, and the hooks that make it so; None if nothing."""
    def mismatch(hook: str = "") -> str | None:
        return difference(*(looks(_muted(pair.federation(data), hook), start) for data in (pair.stream, stream)))

    unmuted = mismatch()
    return unmuted, _hooks(pair, lambda hook: bool(mismatch(hook))) if unmuted else ""


def evaluation_data(pair: Pair) -> str:
    """(e) Validation and test items, and the steps to come, change neither training nor what is kept after a step nor
    the scores that are ranked."""
    ended = _trained(pair)
    begun = [pair.after_step(t - 1) for t in range(len(pair.stream.steps) - 1)]
    moments = [(start, client_round) for start in [*begun, *rounds_to_test(pair)]]
    for start, looks in [*moments, (ended, _client_states), (ended, _scored)]:
        ends = bool(pair.stream.steps[0].sessions) and looks is _scored  # items before the last one are known then
        hidden = {s.index: with_other_ends(s) if ends else
                  with_other_data(s, splits=("valid", "test")) for s in pair.stream.steps[:start.step + 1]}
        hidden |= {s.index: with_other_data(s) for s in pair.stream.steps[start.step + 1:]}
        others = with_steps(pair.stream, hidden)
        if pair.needs_features:  # of items that nobody has yet
            others = with_item_features(others, pair.stream.steps[start.step].n_items, seed=5)
        mismatch, hooks = _compared(pair, others, start, looks)
        if mismatch:
            raise Violated(f"{hooks}: with other validation, test and future data, {mismatch}: {_WHAT[looks]} reads "
                           f"what it is to be tested on; use step.train only")
    return "training, kept state and scores are the same with other validation, test and future data"


OF_PAIRS: list[tuple[str, Callable[[Pair], str]]] = [
    ("(a) other clients' data", other_clients),
    ("(a) clients' numbers", client_numbers),
    ("(b) uploads", uploads),
    ("(c) the server's knowledge", server_knows),
    ("(d) past data", past_data),
    ("(e) evaluation data", evaluation_data),
]
