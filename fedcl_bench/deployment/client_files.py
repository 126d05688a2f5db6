"""Data of real clients: one table of interactions at each client, and what the server publishes of a federation.

The server publishes the items in their order, who may take part, and when blocks end; it has no interaction. A client's
table has a row per interaction, with the columns ``user`` and ``item`` and either ``timestamp`` (blocks and splits are
then made as in a simulation), or ``block`` and ``split`` (``train``, ``valid``, ``test``), and for streams of sessions
``session``. Rows stand in time order.

Where clients are domains (``domain_files.py``), the server publishes their names and sizes alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Callable, Sequence

import msgspec
import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..core.errors import UserError
from ..core.files import write_atomically
from ..data.datasets import split_rows
from ..data.files.recbole_files import SPLITS
from ..data.files.times import by_unit, refuse_several
from ..data.settings import StreamSettings
from ..data.source import DatasetSource, load_config
from ..data.stream import DomainPart, Ragged, Sessions, Step, Stream, split_of_rows, starts_of

FEDERATION, TABLE = "federation.json", "interactions.csv"


@dataclass(frozen=True)
class Published:
    """What the server says of the data, the same to all clients."""

    # Name, and what stands for the data in the hashes of runs.
    dataset: str
    fingerprint: str
    stream: StreamSettings  # settings of blocks and splits
    # Publishers' ids in the order of the server's numbers.
    items: list[str]
    users: list[str]
    # Of each block the users and items that are there by its end, and its interactions over all clients.
    steps: list[tuple[int, int, int]]
    until: list[float]  # the last time of each block but the last; empty if tables have the column ``block``
    # Of a stream of domains name, users, items, and interactions of each block; ``items`` and ``users`` are empty then.
    domains: list[tuple[str, int, int, list[int]]] = field(default_factory=list)

    @staticmethod
    def of(source: DatasetSource, settings: StreamSettings, stream: Stream) -> "Published":
        """What a server publishes of a stream that it could simulate."""
        steps = [(step.n_users, step.n_items, step.interactions) for step in stream.steps]
        if stream.domains:
            return Published(source.name, source.fingerprint, settings, [], [], steps, [], [
                (part.name, len(part.users), len(part.items), list(part.interactions)) for part in stream.domains])
        until: list[float] = []
        if settings.stream == "blocks" and not settings.split_file:
            rows, block = split_rows(source, settings)
            until = [float(rows.time[block == t].max()) for t in range(len(stream.steps) - 1)]
        return Published(source.name, source.fingerprint, settings, stream.item_tokens.astype(str).tolist(),
                         stream.user_tokens.astype(str).tolist(), steps, until)

    @property
    def parts(self) -> tuple[DomainPart, ...]:
        """The domains with the ids of their users and items."""
        users, items = (list(itertools.accumulate((each[place] for each in self.domains), initial=0))
                        for place in (1, 2))
        return tuple(DomainPart(name, range(users[n], users[n + 1]), range(items[n], items[n + 1]), tuple(interactions))
                     for n, (name, _, _, interactions) in enumerate(self.domains))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of blocks and splits that are not the defaults."""
        default = StreamSettings()
        return {each.name: value for each in fields(default)
                if (value := getattr(self.stream, each.name)) != getattr(default, each.name)}

    def source(self, folder: Path, settings: StreamSettings) -> DatasetSource:
        """What stands for the data in a run, in the server's folder; raises UserError for settings that clients have
        not been dealt for."""
        if settings != self.stream:
            name = next(each.name for each in fields(settings)
                        if getattr(settings, each.name) != getattr(self.stream, each.name))
            raise UserError(f"setting '{name}': found {getattr(settings, name)}, accepted: "
                            f"{getattr(self.stream, name)}, as the federation's data are cut.")
        return DatasetSource(self.dataset, load_config(self.dataset), _in(folder), self.fingerprint)

    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def read(text: str | bytes, where: str) -> "Published":
        """Raises UserError if it is none."""
        try:
            return msgspec.json.decode(text, type=Published)
        except msgspec.MsgspecError as error:
            raise UserError(f"{where}: is no description of a federation ({error}).\nMake one with `fedcl-bench data "
                            f"deal DATASET --clients N --out DIR`.") from None


def read_published(folder: Path) -> Published:
    """What ``deal`` wrote for the server; raises UserError."""
    path = _in(folder)
    try:
        return Published.read(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); accepted: a folder with {FEDERATION}, as "
                        f"`fedcl-bench data deal` makes it.") from None


def _in(folder: Path) -> Path:
    return folder / FEDERATION if folder.is_dir() else folder


def table_of(stream: Stream, numbers: Tensor) -> pd.DataFrame:
    """The interactions of some users, by their numbers, with blocks and splits, and sessions if there are."""
    parts = []
    for step in stream.steps:
        users = numbers[numbers < step.n_users]
        for split in SPLITS:
            parts.append(_session_rows(step, split, users) if step.sessions else _list_rows(step, split, users))
    frame = pd.concat(parts, ignore_index=True)
    return frame.assign(user=stream.user_tokens[frame["user"]], item=stream.item_tokens[frame["item"]])


def _list_rows(step: Step, split: str, users: Tensor) -> pd.DataFrame:
    lists = step.split(split).part(users)
    ratings = {} if lists.ratings is None else {"rating": lists.ratings.numpy()}
    return pd.DataFrame({"user": users[lists.owners].numpy(), "item": lists.values.numpy(), "block": step.index,
                         "split": split, **ratings})


def _session_rows(step: Step, split: str, users: Tensor) -> pd.DataFrame:
    every = step.sessions[split]
    part = every.part(every.numbers().part(users))
    owner = users.repeat_interleave(part.count).repeat_interleave(part.lengths)
    return pd.DataFrame({"user": owner.numpy(), "item": part.items.numpy(), "timestamp": part.times.numpy(),
                         "block": step.index, "split": split,
                         "session": torch.arange(len(part.lengths)).repeat_interleave(part.lengths).numpy()})


def deal(published: Published, stream: Stream, names: Sequence[Tensor], out: Path,
         table: Callable[[Stream, Tensor], pd.DataFrame] = table_of) -> list[Path]:
    """Write the server's folder and one folder per client; returns the clients' tables. ``table``: of some clients, by
    their numbers. Raises UserError if the folder holds more clients, whose users are dealt to others now."""
    tables = []
    wanted = {f"client-{number}" for number in range(1, len(names) + 1)}
    if others := sorted(path.name for path in out.glob("client-*") if path.name not in wanted):
        raise UserError(f"--out {out}: holds {others[0]} of a deal among more clients; remove the folder, or write "
                        f"elsewhere.")
    try:
        server = out / "server"
        server.mkdir(parents=True, exist_ok=True)
        write_atomically(server / FEDERATION, published.text().encode())
        for number, users in enumerate(names, 1):
            folder = out / f"client-{number}"
            folder.mkdir(exist_ok=True)
            write_atomically(folder / TABLE, table(stream, users).to_csv(index=False).encode())
            tables.append(folder / TABLE)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror}).") from None
    return tables


@dataclass(frozen=True)
class ClientData:
    """What a client has."""

    stream: Stream  # its part of the federation's stream
    names: Tensor  # the server's numbers of its users, ascending
    clients: int  # of the whole federation
    unknown: int  # interactions left out, as the server does not know their items


def read_client(path: Path, published: Published) -> ClientData:
    """A client's table as its part of the stream. Raises UserError for a file that is none, a missing column, and a
    user, block or split that the federation does not have."""
    frame = read_table(path)
    sessions = published.stream.stream == "sessions"
    cut_by_time = not sessions and not published.stream.split_file
    user = pd.Index(published.users).get_indexer(frame["user"])
    if (user < 0).any():
        raise UserError(f"{path}: user '{frame['user'][user < 0].iloc[0]}' does not take part in the federation; its "
                        f"users are in the server's {FEDERATION}.")
    item = pd.Index(published.items).get_indexer(frame["item"])
    names, user = np.unique(user, return_inverse=True)
    frame = frame.assign(user=user, item=item)[item >= 0]
    wanted = {"block", "split", *(("session", "timestamp") if sessions else ())}
    if "split" not in frame and "timestamp" in frame and cut_by_time:
        refuse_several(by_unit(np.asarray(published.until), by_unit(frame["timestamp"].to_numpy(float), {})),
                       f"{path}, column timestamp, beside the federation's blocks")
        frame = _blocks_and_splits(frame, names, published)
    elif not wanted <= set(frame):
        raise UserError(f"{path}: found the columns {', '.join(frame)}, accepted: user, item and "
                        f"{'timestamp, or user, item, ' * cut_by_time}block and split"
                        f"{', with session and timestamp' if sessions else ''}.")
    if not set(frame["split"]) <= set(SPLITS):
        wrong = next(split for split in frame["split"] if split not in SPLITS)
        raise UserError(f"{path}, column split: found '{wrong}', accepted: {', '.join(SPLITS)}.")
    if not frame["block"].isin(range(len(published.steps))).all():
        raise UserError(f"{path}, column block: accepted: 0 to {len(published.steps) - 1}.")
    if sessions:  # of one item there is nothing to predict it from
        frame = frame[frame.groupby(["block", "split", "user", "session"])["item"].transform("size") > 1]
        if frame.loc[frame["split"] == "train", "user"].nunique() < len(names):
            raise UserError(f"{path}: accepted: of each user a session to train on, of 2 interactions or more with "
                            f"items that the server knows.")
    _require_arrived(path, frame.assign(user=names[frame["user"]]), published)
    steps, old = [], (0, 0)
    for t, (n_users, n_items, interactions) in enumerate(published.steps):
        here = int(np.searchsorted(names, n_users))
        rows = {split: frame[(frame["block"] == t) & (frame["split"] == split)] for split in SPLITS}
        size = here, n_items
        steps.append(Step.of_sessions(t, size, old, interactions, {
            split: _sessions(part, here) for split, part in rows.items()}) if sessions else
            Step(t, *size, *old, interactions, *(_lists(part, here) for part in rows.values())))
        old = size
    tokens = np.array(published.users, dtype=str)[names]
    return ClientData(Stream(tuple(steps), tokens, np.array(published.items, dtype=str)), torch.tensor(names),
                      len(published.users), int((item < 0).sum()))


def read_table(path: Path) -> pd.DataFrame:
    """A client's table as it is; raises UserError for a file that is none."""
    try:
        with open(path, encoding="utf-8") as file:
            separator = "\t" if "\t" in file.readline() else ","
        frame = pd.read_csv(path, sep=separator, dtype=dict.fromkeys(("domain", "user", "item"), str),
                            float_precision="round_trip", keep_default_na=False, na_values=[""])  # an id may be NA
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
    except ValueError as error:  # pandas' errors of form, and of encoding
        raise UserError(f"{path}: is no table ({error}).") from None
    if missing := [name for name in ("user", "item") if name not in frame]:
        raise UserError(f"{path}: no column {' and no column '.join(missing)}; found: {', '.join(frame)}.")
    ids = [name for name in ("domain", "user", "item", "session") if name in frame]
    if frame.empty or frame[ids].isna().any(axis=None):
        raise UserError(f"{path}: accepted: at least one row, and in each a value in {', '.join(ids)}.")
    for name, unit in (("timestamp", ", in the unit of the federation's data"), ("rating", "")):
        finite = np.isfinite(pd.to_numeric(frame.get(name, default=pd.Series(0.0)), errors="coerce").to_numpy(float))
        if not finite.all():
            row = int(finite.argmin())
            raise UserError(f"{path}, row {row + 1} below the header: column {name} is '{frame[name][row]}', accepted: "
                            f"a number{unit}.")
    return frame


def _require_arrived(path: Path, frame: pd.DataFrame, published: Published) -> None:
    """Raise UserError for a user or an item that the federation has in later blocks alone: the others' tables have no
    row of it yet."""
    for place, (column, ids) in enumerate((("user", published.users), ("item", published.items))):
        first = np.searchsorted([step[place] for step in published.steps], frame[column], side="right")
        if (early := (frame["block"] < first).to_numpy()).any():
            row = int(early.argmax())
            raise UserError(f"{path}: {column} '{ids[frame[column].iloc[row]]}' is in block "
                            f"{frame['block'].iloc[row]}, accepted: from block {first[row]} on, where the federation "
                            f"first has it.")


def _blocks_and_splits(frame: pd.DataFrame, names: np.ndarray, published: Published) -> pd.DataFrame:
    """A table with times, with the blocks and splits of a simulation."""
    settings = published.stream
    frame = frame.sort_values("timestamp", kind="stable")
    frame["block"] = np.searchsorted(published.until, frame["timestamp"], side="left")
    split = np.empty(len(frame), dtype=np.int8)
    if settings.stream == "static":
        later = frame.groupby("user").cumcount(ascending=False).to_numpy()
        count = frame.groupby("user")["item"].transform("size").to_numpy()
        split[:] = np.where((count < 3) | (later > 1), 0, 2 - later)
    else:
        for t in frame["block"].unique():
            rows = (frame["block"] == t).to_numpy()
            how = settings.base_split if t == 0 else settings.inc_split
            split[rows] = split_of_rows(names[frame["user"][rows]], how, settings.split_seed, int(t))
    return frame.assign(split=np.array(SPLITS)[split])


def _lists(rows: pd.DataFrame, users: int) -> Ragged:
    rows = rows.sort_values("user", kind="stable")
    lengths = torch.from_numpy(np.bincount(rows["user"], minlength=users))
    ratings = torch.tensor(rows["rating"].to_numpy(float)) if "rating" in rows else None
    return Ragged(starts_of(lengths), torch.tensor(rows["item"].to_numpy(np.int64)), ratings)


def _sessions(rows: pd.DataFrame, users: int) -> Sessions:
    rows = rows.sort_values(["user", "timestamp"], kind="stable")
    each = rows.groupby(["user", "session"], sort=False)
    rows = rows.iloc[each.ngroup().argsort(kind="stable")]  # sessions one after the other
    return Sessions.laid_out(each["user"].first().to_numpy(), each.size().to_numpy(), rows["item"].to_numpy(np.int64),
                             rows["timestamp"].to_numpy(float), users)
