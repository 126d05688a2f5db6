"""Streams of sessions (FCUCR, WWW 2026): how a log becomes every client's sessions, and their statistics.

A client trains on one of its earlier sessions in each round; its last session is for testing, the one before it for
validation. In both the last item is to be found from those before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from ..core.errors import UserError
from .recbole_files import SPLITS, Interactions
from .stream import Ragged, Sessions, Step, Stream, StreamSettings, first_appearance

_SHORTEST = 2  # interactions of a session: one to predict from and one to predict
_TRAIN, _VALID, _TEST = range(3)


@dataclass(frozen=True)
class _Log:
    """Rows sorted by user, session and time: sessions of each user by their first time, ties in the order of the file.

    Attributes:
        row: position of each row in the file's order.
        start: rows of session ``s`` are ``start[s]:start[s + 1]``; (sessions + 1,).
        user: of each session.
    """

    row: np.ndarray
    start: np.ndarray
    user: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.start)

    @property
    def session(self) -> np.ndarray:
        """The session of each row."""
        return np.repeat(np.arange(len(self.user)), self.lengths)

    def keep(self, rows: np.ndarray) -> "_Log":
        """The log of the chosen rows; sessions without any are gone."""
        return _log(self.row[rows], self.session[rows], np.repeat(self.user, self.lengths)[rows])


def _log(row: np.ndarray, session: np.ndarray, user: np.ndarray) -> _Log:
    """A log from the session and user of each of its rows, sorted."""
    first = np.flatnonzero(np.diff(session, prepend=-1))
    return _Log(row, np.append(first, len(row)), user[first])


def build_sessions(data: Interactions, settings: StreamSettings, name: str) -> Stream:
    """One step of sessions.

    Sessions are cut where a user was inactive for more than ``session_gap`` minutes (times are in seconds), or are the
    rows of one user with one value of the session column. Too short sessions are left out, then users with too few.
    A user's last session is test and the one before it valid, or the split column says; there, sessions of one
    interaction and users without training session are left out. Interactions of valid and test sessions whose item is
    in no training session of anybody are left out, then such sessions of fewer than 2 interactions. Users and items are
    numbered by their first training interaction, in time order; rows of equal time keep the order of the file.

    With ``topology=central`` all sessions are one client's, whoever trains, and the most recent training sessions
    validate where the data names no others; their items are known, and all their prefixes are to be continued.

    Args:
        name: what messages call the data.

    Raises:
        UserError: if sessions of one user overlap, a session has several splits, a user has several sessions to
            validate or test on or has them before others it trains on, or no session to train, validate or test on
            is left.
    """
    log, central = _cut(data, settings, name), settings.topology == "central"
    if settings.session_split == "column":
        split = _split_by_column(log, data, name)
        log, split = _choose(log, split, log.lengths >= _SHORTEST)
        trains = np.bincount(log.user[split == _TRAIN], minlength=len(data.user_tokens)) > 0
        if not central:
            log, split = _choose(log, split, trains[log.user])
        if not trains.any():
            raise UserError(f"{name}: no user has a training session of at least {_SHORTEST} interactions.")
        unfiltered = {}
    else:
        log = _choose(log, log.user, log.lengths >= settings.min_session_length)[0]
        enough = np.bincount(log.user, minlength=len(data.user_tokens)) >= settings.min_sessions
        log = _choose(log, log.user, enough[log.user])[0]
        if not len(log.user):
            raise UserError(f"{name}: no user has {settings.min_sessions} sessions of at least "
                            f"{settings.min_session_length} interactions; lower them with --set min_sessions=N "
                            f"(3 or more) and --set min_session_length=N (2 or more).")
        remaining = np.cumsum(np.bincount(log.user))[log.user] - 1 - np.arange(len(log.user))
        split = np.maximum(_TEST - remaining, _TRAIN)
        unfiltered = _counts(len(np.unique(log.user)), len(np.unique(data.item[log.row])), len(log.user), len(log.row))
    known = (_TRAIN,)
    if central:
        log, split, known = _held_out(log, split, data, settings)
        data, log = _of_one_client(data, log)
    log, split = _without_unseen(log, split, data.item, known)
    for s in (_TRAIN, _VALID, _TEST):
        if not (split == s).any():
            raise UserError(f"{name}: no {SPLITS[s]} session has {_SHORTEST} interactions with items that anybody "
                            f"trains on, beside {int((split == _TRAIN).sum())} training sessions.")
    stream = _number(log, split, data, unfiltered, known)
    return stream if known == (_TRAIN,) else _with_prefixes(stream)


def _held_out(log: _Log, split: np.ndarray, data: Interactions, settings: StreamSettings
              ) -> tuple[_Log, np.ndarray, tuple[int, ...]]:
    """The most recent training sessions, the last of them to validate with if there are no others for that; and the
    splits whose items are known."""
    train = np.flatnonzero(split == _TRAIN)
    train = train[np.argsort(data.time[log.row[log.start[train]]], kind="stable")]
    chosen = split != _TRAIN
    chosen[train[len(train) - max(1, round(settings.train_share * len(train))):]] = True
    given = bool((split == _VALID).any())
    if not given:
        kept = train[chosen[train]]
        split = split.copy()
        split[kept[len(kept) - round(settings.valid_share * len(kept)):]] = _VALID
    return *_choose(log, split, chosen), (_TRAIN,) if given else (_TRAIN, _VALID)


def _of_one_client(data: Interactions, log: _Log) -> tuple[Interactions, _Log]:
    """The same sessions, all of one user."""
    return (replace(data, user=np.zeros_like(data.user), user_tokens=np.array(["all"])),
            replace(log, user=np.zeros_like(log.user)))


def _with_prefixes(stream: Stream) -> Stream:
    """The stream with all prefixes of its validation sessions, as the published test sessions are."""
    step, = stream.steps
    valid = step.sessions["valid"].prefixes().written_out()
    targets = Ragged(valid.of_user, valid.items[valid.start[1:] - 1])
    return replace(stream, steps=(replace(step, valid=targets, sessions={**step.sessions, "valid": valid}),))


def _cut(data: Interactions, settings: StreamSettings, name: str) -> _Log:
    """All rows as sessions."""
    row = np.lexsort((data.time, data.user))  # stable
    user, time = data.user[row], data.time[row]
    same_user = np.diff(user, prepend=-1) == 0
    if settings.session_from == "gap":
        pause = np.diff(time, prepend=time[0])
        return _log(row, np.cumsum(~same_user | (pause > 60.0 * settings.session_gap)), user)
    of_file, _ = pd.factorize(data.session)
    session, _ = first_appearance(user * len(user) + of_file[row])  # sessions by user, then by first time
    order = np.argsort(session, kind="stable")
    row, session, user = row[order], session[order], user[order]
    back = np.flatnonzero((np.diff(data.time[row], prepend=-np.inf) < 0) & (np.diff(user, prepend=-1) == 0))
    if len(back):
        later, earlier = row[back[0]], row[back[0] - 1]
        raise UserError(f"{name}: sessions '{data.session[earlier]}' and '{data.session[later]}' of user "
                        f"'{data.user_tokens[data.user[later]]}' overlap in time, so neither comes first; correct the "
                        f"file, or cut sessions at inactivity with --set session_from=gap.")
    return _log(row, session, user)


def _split_by_column(log: _Log, data: Interactions, name: str) -> np.ndarray:
    """The split of each session, from the file's split column."""
    split = data.split[log.row]
    lowest, highest = (extreme.reduceat(split, log.start[:-1]) for extreme in (np.minimum, np.maximum))

    def user(session: int) -> str:
        return f"user '{data.user_tokens[log.user[session]]}'"

    mixed = np.flatnonzero(lowest != highest)
    if len(mixed):
        s = int(mixed[0])
        which = f"session '{data.session[log.row[log.start[s]]]}'" if data.session is not None else "a session"
        raise UserError(f"{name}: {which} of {user(s)} is in {SPLITS[lowest[s]]} and in {SPLITS[highest[s]]}; the "
                        f"split column must have one value per session.")
    for s in (_VALID, _TEST):
        several = np.flatnonzero(np.bincount(log.user[lowest == s]) > 1)
        if len(several):
            of_user = int(np.argmax(log.user == several[0]))
            raise UserError(f"{name}: {user(of_user)} has several {SPLITS[s]} sessions; the split column may name at "
                            f"most one per user.")
    back = np.flatnonzero((np.diff(lowest.astype(np.int64)) < 0) & (np.diff(log.user) == 0))
    if len(back):
        s = int(back[0])
        raise UserError(f"{name}: {user(s)} has a {SPLITS[lowest[s]]} session before a {SPLITS[lowest[s + 1]]} "
                        f"session; in time order, those to train on come first, then valid, then test.")
    return lowest


def _choose(log: _Log, of_session: np.ndarray, sessions: np.ndarray) -> tuple[_Log, np.ndarray]:
    """The log of the sessions where ``sessions`` is True, and what ``of_session`` has of them."""
    return log.keep(np.repeat(sessions, log.lengths)), of_session[sessions]


def _without_unseen(log: _Log, split: np.ndarray, item: np.ndarray, known: tuple[int, ...]) -> tuple[_Log, np.ndarray]:
    """Leave out items that are in no session of the splits ``known``, then sessions that are too short."""
    train = np.repeat(np.isin(split, known), log.lengths)
    seen = np.zeros(item.max() + 1, dtype=bool)
    seen[item[log.row[train]]] = True
    left_in = seen[item[log.row]]
    left = np.add.reduceat(left_in.astype(np.int64), log.start[:-1])
    enough = left >= _SHORTEST  # training sessions lose nothing and are long enough
    return log.keep(left_in & np.repeat(enough, log.lengths)), split[enough]


def _number(log: _Log, split: np.ndarray, data: Interactions, unfiltered: dict[str, float], known: tuple[int, ...]
            ) -> Stream:
    """The stream of a log with the split of each of its sessions; all items are in the splits ``known``."""
    of_row = np.repeat(split, log.lengths)
    train = np.sort(log.row[np.isin(of_row, known)])
    train = train[np.argsort(data.time[train], kind="stable")]
    ids, tokens = [], []
    for old, token in ((data.user, data.user_tokens), (data.item, data.item_tokens)):
        _, first = first_appearance(old[train])
        ids.append(np.full(len(token), -1))
        ids[-1][first] = np.arange(len(first))
        tokens.append(token[first])
    user, item = ids[0][log.user], ids[1]
    n_users, n_items = (len(token) for token in tokens)
    sessions = {}
    for s, name in enumerate(SPLITS):
        chosen = np.flatnonzero(split == s)
        chosen = chosen[np.argsort(user[chosen], kind="stable")]
        lengths = log.lengths[chosen]
        start = np.concatenate([[0], np.cumsum(lengths)])
        row = log.row[np.repeat(log.start[chosen] - start[:-1], lengths) + np.arange(start[-1])]
        of_user = np.concatenate([[0], np.cumsum(np.bincount(user[chosen], minlength=n_users))])
        sessions[name] = Sessions(*map(torch.from_numpy, (of_user, start, item[data.item[row]], data.time[row])))
    train_items = Ragged(sessions["train"].start[sessions["train"].of_user], sessions["train"].items)
    targets = [Ragged(last.of_user, last.items[last.start[1:] - 1]) for last in (sessions["valid"], sessions["test"])]
    step = Step(0, n_users, n_items, 0, 0, len(log.row), train_items, *targets, sessions)
    return Stream((step,), *tokens, unfiltered)


def _counts(users: int, items: int, sessions: int, rows: int) -> dict[str, float]:
    return {"users": users, "items": items, "sessions": sessions, "average_length": round(rows / sessions, 2)}


def statistics(stream: Stream) -> dict[str, list[float]]:
    """The columns of FCUCR's Table 1, then the rows and sessions of each split, each as a list of one value.

    Where the stream knows them, the former stand once more, as ``unfiltered_...``, as they are before items that nobody
    trains on are left out: so does the paper count.
    """
    step, = stream.steps
    sizes = {name: (len(split.items), len(split.lengths)) for name, split in step.sessions.items()}
    rows, sessions = (sum(size[i] for size in sizes.values()) for i in range(2))
    columns = {**_counts(step.n_users, step.n_items, sessions, rows),
               **{f"unfiltered_{name}": value for name, value in stream.unfiltered.items()}}
    for name, size in sizes.items():
        columns |= {f"{name}_rows": size[0], f"{name}_sessions": size[1]}
    return {name: [value] for name, value in columns.items()}
