"""Streams of sessions (FCUCR, WWW 2026): how a log becomes every client's sessions, and their statistics.

A client trains on one of its earlier sessions in each round; its last session is for testing, the one before it for
validation. In both the last item is to be found from those before it.

A log is a frame with a row per interaction: ``row`` (in the file), ``user``, ``item``, ``time``, ``session`` and
``split`` (numbers), sorted by user, session and time: sessions of each user by their first time, ties in the order of
the file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import UserError
from ..files import times
from ..files.recbole_files import SPLITS, Interactions
from ..settings import StreamSettings
from ..stream import Sessions, Step, Stream

if TYPE_CHECKING:
    import pandas as pd

_SHORTEST = 2  # interactions of a session: one to predict from and one to predict
_TRAIN, _VALID, _TEST = range(3)


def build_sessions(data: Interactions, settings: StreamSettings, name: str) -> Stream:
    """One step of sessions.

    Sessions are cut where a user was inactive for more than ``session_gap`` minutes (times are in seconds), or are the
    rows of one user with one value of the session column. Too short sessions are left out, then users with too few.
    A user's last session is test and the one before it valid, or the split column says; there, sessions of one
    interaction and users without training session are left out. Interactions of valid and test sessions whose item is
    in no training session of anybody are left out, then such sessions of fewer than 2 interactions. Users and items are
    numbered by their first training interaction, in time order; rows of equal time keep the order of the file.

    With ``topology=central`` all sessions are one client's, whoever trains, and the most recent training sessions
    validate where the data names no others; their items are known, and all their prefixes are to be continued. Items
    and test sessions do not depend on the share of the sessions that train: items of others alone are the last ones.
    Raises UserError if sessions are cut and times are not in seconds, sessions of one user overlap, a session has
    several splits, a user has several sessions to validate or test on or has them before others it trains on, or no
    session to train, validate or test on is left.
    """
    log, central, unfiltered = _cut(data, settings, name), settings.topology == "central", {}
    if settings.session_split == "column":
        _check_splits(log, data, name, central)
        log = _of_length(log, _SHORTEST)
        train = log["split"] == _TRAIN
        if not train.any():
            raise UserError(f"{name}: no user has a training session of at least {_SHORTEST} interactions.")
        if not central:
            log = log[log["user"].isin(log["user"][train])]
    else:
        log = _of_length(log, settings.min_session_length)
        sessions = log.drop_duplicates("session").set_index("session")
        later = sessions.groupby("user").cumcount(ascending=False)
        enough = sessions.groupby("user")["row"].transform("size") >= settings.min_sessions
        log = log.assign(split=np.maximum(_TEST - later, _TRAIN)[log["session"]].to_numpy())
        log = log[enough[log["session"]].to_numpy()]
        if log.empty:
            lower = [f"--set {name_}=N ({low} or more)" for name_, low in (
                ("min_sessions", 3), ("min_session_length", _SHORTEST)) if getattr(settings, name_) > low]
            cure = f"go lower with {' and '.join(lower)}" if lower else "take another stream, as --set stream=static"
            shorter = ", or --set session_gap=MINUTES for more sessions" * (settings.session_from == "gap")
            raise UserError(f"{name}: no user has {settings.min_sessions} sessions of at least "
                            f"{settings.min_session_length} interactions; {cure}{shorter}.")
        unfiltered = _counts(*(log[column].nunique() for column in ("user", "item", "session")), len(log))
    known, items = [_TRAIN], _first_seen(log, [_TRAIN], "item")
    if central:
        data = replace(data, user_tokens=np.array(["all"]))
        if not (log["split"] == _VALID).any():
            known = [_TRAIN, _VALID]
        elif settings.valid_share != StreamSettings.valid_share:
            raise UserError(f"setting 'valid_share': has no effect on {name} with session_split="
                            f"{settings.session_split}, which says which sessions validate; leave it out.")
        log = _held_out(log.assign(user=0), settings)
    log = log[log["item"].isin(items)]
    log = _of_length(log, _SHORTEST)  # training sessions have lost nothing
    for s, split in enumerate(SPLITS):
        if not (log["split"] == s).any():
            raise UserError(f"{name}: no {split} session has {_SHORTEST} interactions with items that anybody "
                            f"trains on, beside {log['session'][log['split'] == _TRAIN].nunique()} training sessions.")
    return _number(log, data, unfiltered, known, items)


def _first_seen(log: pd.DataFrame, splits: list[int], column: str) -> np.ndarray:
    """The different users or items of some splits in the order of time, ties in the order of the file."""
    return log[log["split"].isin(splits)].sort_values(["time", "row"])[column].unique()


def _of_length(log: pd.DataFrame, shortest: int) -> pd.DataFrame:
    """The log without its shorter sessions."""
    return log[log.groupby("session")["row"].transform("size") >= shortest]


def _held_out(log: pd.DataFrame, settings: StreamSettings) -> pd.DataFrame:
    """The log with the most recent of its training sessions, the last of which validate if no others do."""
    train = log[log["split"] == _TRAIN].drop_duplicates("session").sort_values("time", kind="stable")["session"]
    kept = train[len(train) - max(1, round(settings.train_share * len(train))):]
    valid = kept[len(kept) - round(settings.valid_share * len(kept)):]
    given = (log["split"] == _VALID).any()
    log = log[(log["split"] != _TRAIN) | log["session"].isin(kept)]
    return log if given else log.assign(split=log["split"].mask(log["session"].isin(valid), _VALID))


def _cut(data: Interactions, settings: StreamSettings, name: str) -> pd.DataFrame:
    """All rows as a log."""
    import pandas as pd

    row = np.lexsort((data.time, data.user))  # stable
    log = pd.DataFrame({"row": row, "user": data.user[row], "item": data.item[row], "time": data.time[row]})
    log = log.astype({"user": np.int64, "item": np.int64})
    if data.split is not None:
        log["split"] = data.split[row]
    if settings.session_from == "gap":
        times.require_seconds(data.time, name)
        pause = log.groupby("user")["time"].diff()
        return log.assign(session=(~(pause <= 60.0 * settings.session_gap)).cumsum())
    of_file, _ = pd.factorize(data.session)
    log["session"], _ = pd.factorize(log["user"] * len(log) + of_file[row])  # sessions by user, then by first time
    log = log.sort_values("session", kind="stable", ignore_index=True)
    back = np.flatnonzero(log.groupby("user")["time"].diff() < 0)
    if len(back):
        earlier, later = log["row"][back[0] - 1], log["row"][back[0]]
        raise UserError(f"{name}: sessions '{data.session[earlier]}' and '{data.session[later]}' of user "
                        f"'{data.user_tokens[data.user[later]]}' overlap in time, so neither comes first; correct the "
                        f"file, or cut sessions at inactivity with --set session_from=gap.")
    return log


def _check_splits(log: pd.DataFrame, data: Interactions, name: str, central: bool) -> None:
    """Raise UserError unless each session has one split, and each user, but where one party has all, at most one to
    validate and to test, in time order."""
    sessions = log.groupby("session").agg(row=("row", "first"), user=("user", "first"), lowest=("split", "min"),
                                          highest=("split", "max"))

    def user(session: pd.Series) -> str:
        return f"user '{data.user_tokens[session['user']]}'"

    for _, session in sessions[sessions["lowest"] != sessions["highest"]].iterrows():
        which = f"session '{data.session[session['row']]}'" if data.session is not None else "a session"
        raise UserError(f"{name}: {which} of {user(session)} is in {SPLITS[session['lowest']]} and in "
                        f"{SPLITS[session['highest']]}; the split column must have one value per session.")
    held_out = sessions[sessions["lowest"] != _TRAIN]
    for _, session in held_out[held_out.duplicated(["user", "lowest"]) & (not central)].iterrows():
        raise UserError(f"{name}: {user(session)} has several {SPLITS[session['lowest']]} sessions; the split column "
                        f"may name at most one per user.")
    after = sessions.groupby("user")["lowest"].shift(-1)
    for number, session in sessions[after < sessions["lowest"]].iterrows():
        raise UserError(f"{name}: {user(session)} has a {SPLITS[session['lowest']]} session before a "
                        f"{SPLITS[int(after[number])]} session; in time order, those to train on come first, then "
                        f"valid, then test.")


def _number(log: pd.DataFrame, data: Interactions, unfiltered: dict[str, float], known: list[int],
            catalogue: np.ndarray) -> Stream:
    """The stream of a log, numbered by the splits ``known``; other items of the ``catalogue`` come last."""
    import pandas as pd

    old = [_first_seen(log, known, column) for column in ("user", "item")]
    old[1] = pd.unique(np.concatenate([old[1], catalogue]))
    users, items = (pd.Index(numbers) for numbers in old)
    log = log.assign(user=users.get_indexer(log["user"]), item=items.get_indexer(log["item"]))
    log = log.sort_values("user", kind="stable")
    sessions = {}
    for s, split in enumerate(SPLITS):
        rows = log[log["split"] == s]
        lengths = rows.groupby("session", sort=False).size().to_numpy()
        sessions[split] = Sessions.laid_out(rows.drop_duplicates("session")["user"].to_numpy(), lengths,
                                            rows["item"].to_numpy(), rows["time"].to_numpy(), len(users))
    if _VALID in known:  # all prefixes of its sessions, as the published test sessions are
        sessions["valid"] = sessions["valid"].prefixes().written_out()
    step = Step.of_sessions(0, (len(users), len(items)), (0, 0), len(log), sessions)
    return Stream((step,), data.user_tokens[old[0]], data.item_tokens[old[1]], unfiltered)


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
