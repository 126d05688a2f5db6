"""A real client: one or several users with their own table of interactions, and their private parameters on this disk.

It keeps its state after every round. What leaves it are the messages that ``federation/remote.py`` declares.
"""

from __future__ import annotations

import fcntl
import json
import secrets
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Callable, Iterator

import msgspec
import numpy as np
import pandas as pd
import torch

from ..core.errors import UserError, unknown
from ..core.files import read_json, write_atomically
from ..core.text import hash_of
from ..data.stream import Stream
from ..evaluation.session_ranking import needs_session
from ..experiments.cluster import other_versions
from ..experiments.partition import PER_USER
from ..experiments.shards import Request, RunParts, Shard, ShardTask
from ..federation.parts import Federation, Progress
from ..plugin.state import Snapshot, score_users
from ..rng import Tables
from ..runs.checkpoints import load_progress, progress_from_bytes, read_model, save_progress, write_model
from .client_files import ClientData, Published, read_client, read_table
from .domain_files import domain_sizes, read_domains
from .flower import Letter, answer_messages

KEPT = 4  # states of the last rounds and block ends: a server that is killed may lack the last three
KEPT_RUN = "run.json"
FEATURES = "features.npy"


@dataclass(frozen=True)
class RunTerms(RunParts):
    """A run as the server announces it."""

    name: str
    hash: str
    versions: str

    def task(self, data: ClientData, plugins: tuple[Path, ...], progress: Progress | None) -> ShardTask:
        parts = {each.name: getattr(self, each.name) for each in fields(RunParts)}
        for kind in ("method", "backbone"):  # whose settings are from JSON, in which tuples are lists
            name, numbers, values = parts[kind]
            parts[kind] = name, numbers, {setting: tuple(value) if isinstance(value, list) else value
                                          for setting, value in values.items()}
        return ShardTask(**parts, plugins=plugins, versions=self.versions, stream=data.stream, names=data.names,
                         clients=data.clients, progress=progress)


@dataclass(frozen=True)
class Ended:
    """What a client keeps of a run beside its model."""

    run: RunTerms
    published: Published


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from a client's folder; raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")
    except OSError as error:
        raise UserError(f"--folder {folder}: cannot be written ({error.strerror}).") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"--folder {folder}: another client is at work there; give each its own.") from None
        yield


class Client:
    """Answers the server's messages.

    Args:
        table: of interactions. folder: of the client's states and models.
        say: called with a line of text for people.

    Attributes:
        over: the federation has ended, or cannot go on with it; failed: why.
    """

    def __init__(self, table: Path, folder: Path, plugins: tuple[Path, ...] = (), threads: int = 1,
                 say: Callable[[str], None] = lambda text: None):
        self._table, self._folder, self._plugins, self._threads, self.say = table, folder, plugins, threads, say
        self._data: ClientData | None = None
        self._whose = ""  # stands for the users here, or the domains, in names of states
        self._run: RunTerms | None = None
        self._shard: Shard | None = None
        self.over, self.failed = False, ""

    def read(self) -> None:
        """Read the table, so that what is wrong with it is said before the server is asked."""
        read_table(self._table)

    def answer(self, letter: Letter) -> Letter:
        try:
            if letter.kind == "join":
                return self._join(letter.text)
            if letter.kind == "announce":
                return self._announced(letter)
            if letter.kind == "begin":
                return self._sent(self._begin(letter.blob))
            if letter.kind == "answer":
                return self._sent(self._shard.exchange(letter.tables))
            if letter.kind == "finish":
                return self._finish()
            self.over = True
            self.failed = letter.text
            return Letter("ended")
        except (UserError, OSError) as error:  # no space, perhaps
            return self._sent(("error", ("UserError", str(error))))

    def _sent(self, request: Request) -> Letter:
        kind, content = request
        if kind != "error":
            return Letter(kind, content)
        self.over, self.failed = True, content[1]
        return Letter("error", text=json.dumps(content))

    def _join(self, text: str) -> Letter:
        """Say who is here: users, and of each how many interactions."""
        self._published = Published.read(text, "the server's message")
        self._data = _read(self._table, self._published)
        if self._data.unknown:
            self.say(f"{self._data.unknown} interactions are left out: the server does not know their items")
        names = self._data.names.tolist()
        self._whose = hash_of([(self._published.domains or self._published.users)[number] for number in names], 4)
        who = {"users": names, "identity": f"{self._identity()}-{self._whose}"}
        said = domain_sizes(self._data.stream, self._data.names) if self._published.domains else \
            sizes(self._data.stream)
        return Letter("joined", said, json.dumps(who))

    def _identity(self) -> str:
        """What this client shows to be itself when it comes again."""
        path = self._folder / "identity"
        if not path.is_file():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, secrets.token_hex(16).encode())
        return path.read_text()

    def _announced(self, letter: Letter) -> Letter:
        """Take in a run, and features of items; say of which rounds its states are here."""
        run = msgspec.json.decode(letter.text, type=RunTerms)
        features = torch.tensor(letter.tables["features"]) if letter.tables else None
        self._data = replace(self._data, stream=replace(self._data.stream, item_features=features))
        if wrong := other_versions(run.versions):
            raise UserError(wrong)
        if self._shard is not None:
            self._shard.end()
        self._run, self._shard = run, None
        run.task(self._data, self._plugins, None).federation()  # are its plugins here?
        self.say(f"run {run.name}")
        return Letter("ready", text=json.dumps([list(point) for point in self._points()]))

    def _begin(self, blob: bytes) -> Request:
        """Begin at the start (no blob), at the round that it names, or with what the server has of another one."""
        progress, begun = None, (0, 0)
        if blob:
            public = progress_from_bytes(blob, Path("the server's message"))
            progress, begun = self._own(public), (public.step, public.round)
            self.say(f"from block {progress.step}, round {progress.round}")
        for point in self._points():
            if point > begun:  # they would be taken for the last ones while these rounds are trained again
                self._state(point).unlink(missing_ok=True)
        self._shard = Shard(self._threads, self._keep)
        return self._shard.begin(self._run.task(self._data, self._plugins, progress))

    def _own(self, public: Progress) -> Progress:
        """A server's progress with the rows of the users here: of the same round, or of the last one that they were
        in; in a later block than that with what the method begins it with."""
        point = public.step, public.round
        points = [each for each in self._points() if each <= point]
        if self._published.domains and point not in points:
            raise UserError(f"the server goes on from block {point[0]}, round {point[1]}, and this client has no state "
                            f"of it; run again with --rerun at the server.")
        if not points and self._points():
            raise UserError(f"the server goes on from block {point[0]}, round {point[1]}, and this client's states are "
                            f"of later rounds; run again with --rerun at the server.")
        progress = public
        if points:
            own, _ = load_progress(self._state(points[-1]), "cpu", None, self._run.hash)
            progress = own if points[-1] == point else with_rows(public, own)
        if public.step and public.round and (not points or points[-1][0] < public.step):
            progress = begun_late(self._run.task(self._data, self._plugins, None).federation(), progress)
        return progress

    def _keep(self, progress: Progress) -> None:
        save_progress(self._state((progress.step, progress.round)), replace(progress, tests=(), analysis=()), 0.0,
                      self._run.hash)
        for point in self._points()[:-KEPT]:
            self._state(point).unlink(missing_ok=True)
        if progress.round == 0:
            self.say(f"block {progress.step - 1} is trained")

    def _state(self, point: tuple[int, int]) -> Path:
        return self._folder / f"{self._run.name}.{self._whose}-{point[0]:03}-{point[1]:05}.state"

    def _points(self) -> list[tuple[int, int]]:
        """Block and round of every state of these users here, ascending."""
        ends = (path.name.split(".")[-2].split("-")
                for path in self._folder.glob(f"{self._run.name}.{self._whose}-*.state"))
        return sorted((int(block), int(round_)) for _, block, round_ in ends)

    def _finish(self) -> Letter:
        """Write the model of the run's last block, with which the users here are recommended to."""
        if not self._points():
            self.say("the run has ended before a round with the users here: there is no model for them")
            return Letter("finished")
        federation = self._run.task(self._data, self._plugins, None).federation()
        progress, _ = load_progress(self._state(self._points()[-1]), "cpu", None, self._run.hash)
        folder = self._folder / "runs" / self._run.name
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder, progress, federation)
        if (features := self._data.stream.item_features) is not None:
            np.save(folder / FEATURES, features.numpy())
        write_atomically(folder / KEPT_RUN, msgspec.json.encode(Ended(self._run, self._published)))
        self.say(f"model: {folder}")
        return Letter("finished")


def take_part(client: Client, server: str, patience: float) -> None:
    """Answer the messages of the server at HOST:PORT until the federation has ended; ``patience``: seconds for which a
    server that has gone is waited for. Raises UserError if the table is none, the server cannot be reached, or the
    client cannot take part."""
    client.read()
    while not client.over:
        try:
            answer_messages(server, client.answer, lambda: client.over, patience)
        except ConnectionError:
            client.say("the server has gone; waiting for it")
    if client.failed:
        raise UserError(client.failed)


def _read(table: Path, published: Published) -> ClientData:
    return read_domains(table, published) if published.domains else read_client(table, published)


def sizes(stream: Stream) -> dict[str, np.ndarray]:
    """How many interactions each user has in every block and split, which of those it trains on are with new items,
    and how long its sessions are; and whether there are ratings."""
    tables = {"rated": np.array(all(step.train.ratings is not None for step in stream.steps))}
    for step in stream.steps:
        for split in ("train", "valid", "test"):
            tables[f"{step.index}/{split}"] = step.split(split).lengths.numpy()
        if step.index and not stream.domains and not step.sessions:
            tables[f"{step.index}/new"] = (step.train.values >= step.old_items).numpy()
        for split, sessions in step.sessions.items():
            tables[f"{step.index}/{split}/sessions"] = sessions.count.numpy()
            tables[f"{step.index}/{split}/lengths"] = sessions.lengths.numpy()
    return tables


def with_rows(public: Progress, own: Progress) -> Progress:
    """A server's progress with rows of users from an earlier round; what has grown since starts as untrained."""
    def model(of_server: Snapshot, of_client: Snapshot) -> Snapshot:
        return replace(of_server, **{kind: _rows(getattr(of_server, kind), getattr(of_client, kind))
                                     for kind in PER_USER})
    best = replace(public.best, model=model(public.best.model, own.best.model), client_state=own.best.client_state)
    return replace(public, model=model(public.model, own.model), best=best, client_state=own.client_state,
                   previous=model(public.previous, own.previous),
                   server_state={**own.server_state, **public.server_state})


def begun_late(f: Federation, progress: Progress) -> Progress:
    """A progress within a block, of users who were not there at its start: once the method has begun it for them."""
    step = f.as_trained_on(f.stream.steps[progress.step])
    method = f.acting_in(step)
    method.client_state, method.server_state = dict(progress.client_state), dict(progress.server_state)
    method.begin_step(step.training, progress.model, f.backbone)
    return replace(progress, client_state=dict(method.client_state),
                   server_state={**method.server_state, **progress.server_state})


def _rows(tables: Tables, own: Tables) -> Tables:
    result = {}
    for name, table in {**own, **tables}.items():
        if name in own and name in tables:
            table = table.clone()
            part = tuple(slice(0, size) for size in own[name].shape[:2])
            table[part] = own[name]
        result[name] = table
    return result


@dataclass(frozen=True)
class Kept:
    """A run that has ended, at a client: its terms, data and model."""

    run: RunTerms
    data: ClientData
    plugins: tuple[Path, ...]
    folder: Path

    @staticmethod
    def latest(folder: Path, table: Path, plugins: tuple[Path, ...]) -> "Kept":
        """The run that ended last; raises UserError if there is none."""
        if not (files := sorted(folder.glob(f"runs/*/{KEPT_RUN}"), key=lambda path: path.stat().st_mtime)):
            raise UserError(f"--folder {folder}: no run has ended here; take part in one with --server HOST:PORT.")
        said = msgspec.convert(read_json(files[-1], Ended, "Take part in a run again."), Ended)
        data, features = _read(table, said.published), files[-1].with_name(FEATURES)
        if features.is_file():
            data = replace(data, stream=replace(data.stream, item_features=torch.from_numpy(np.load(features))))
        return Kept(said.run, data, plugins, files[-1].parent)

    def recommend(self, user: str, k: int) -> pd.DataFrame:
        """The columns rank, item and score: the best of the items that a user has not had; raises UserError."""
        if self.data.stream.domains:
            raise UserError("--recommend: found a model of a domain, accepted: one of blocks or a static stream.")
        rows = np.flatnonzero(self.data.stream.user_tokens == user)
        if not len(rows):
            raise unknown("user", user, self.data.stream.user_tokens.tolist())
        federation = self.run.task(self.data, self.plugins, None).federation()
        saved, users = read_model(self.folder), torch.tensor(rows)
        if saved.user_ids != self.data.stream.user_tokens.tolist():
            raise UserError(f"--data: found other users than those of the model in {self.folder}, accepted: the table "
                            f"with which they took part.")
        step, method = self.data.stream.steps[-1], federation.acting_in(self.data.stream.steps[-1])
        method.client_state, method.server_state = dict(saved.client_state), dict(saved.server_state)
        if needs_session(federation.backbone, method, step):
            raise UserError("--recommend: found a model of sessions, accepted: one of blocks or a static stream.")
        with torch.no_grad():
            scores = method.rescore(users, score_users(federation.backbone, saved.tables, users), saved.tables,
                                    federation.backbone)[0].double()
        for each in self.data.stream.steps:
            for split in ("train", "valid", "test") if rows[0] < each.n_users else ():
                scores[each.split(split).of(int(rows[0]))] = -torch.inf
        best = scores.argsort(descending=True, stable=True)[:k]
        best = best[torch.isfinite(scores[best])].numpy()
        return pd.DataFrame({"rank": np.arange(1, len(best) + 1), "item": self.data.stream.item_tokens[best],
                             "score": scores.numpy()[best]})
