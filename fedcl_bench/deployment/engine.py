"""The server of real clients: who has joined, the rounds with those who answer, and the record of the run."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..core import errors
from ..core.errors import UserError
from ..data.datasets import with_item_features
from ..data.files.recbole_files import SPLITS
from ..data.stream import Ragged, Step, Stream, starts_of
from ..experiments.cluster import versions
from ..experiments.partition import check_divisible, progress_part
from ..experiments.shards import parts_of
from ..federation.loop import run
from ..federation.parts import Federation, Progress
from ..federation.remote import Server, ServerClients
from ..federation.remote_silos import ServerSilos
from ..plugin.state import Snapshot
from ..rng import Tables
from ..runs.checkpoints import bytes_from_progress
from ..runs.config import RunConfig
from ..runs.runner import Engine
from .client import RunTerms
from .client_files import Published
from .domain_files import sessions_of_sizes, stream_of_domains
from .flower import VERSION, Letter, SuperLink, pause


class TooFewClients(Exception):
    """Fewer clients are left than a round needs."""


@dataclass
class Member:
    """A client that has joined."""

    node: int  # Flower's number of its connection
    identity: str  # what it shows to be the same client again
    names: Tensor  # the federation's numbers of its users, or of its domains, ascending
    sizes: Mapping[str, Any]  # see ``client.sizes``
    # Block and round of its states of the run that was announced last; None: it has not said.
    points: list[list[int]] | None = None
    request: tuple[str, Tables] | None = None  # what it asks; None: it is at work since ``asked``
    asked: float = 0.0
    active: bool = False  # it is in step with the others
    counted: bool = False  # its users are among those of the stream

    @property
    def number(self) -> int:
        return int(self.names[0])


class Federates:
    """The clients of a federation, as a server sees them; ``remote.Nodes`` of those that are active.

    Args:
        wanted: how many must have joined before a run begins. least: with how many a round goes on.
        timeout: seconds within which a client must answer.
        note: called with a line of text about who joins and who is lost.
        stop: asked while it waits; may raise.
    """

    def __init__(self, link: SuperLink, published: Published, wanted: int, least: int, timeout: float,
                 note: Callable[[str], None] = lambda text: None, stop: Callable[[], None] = lambda: None):
        self.link, self.published, self.wanted, self.least, self.timeout = link, published, wanted, least, timeout
        self.note, self.stop = note, stop
        self.members: dict[int, Member] = {}
        self.lost = 0
        # Names of what clients are sent of the server's state begin with one of these; "": all.
        self.public_state: tuple[str, ...] = ("",)
        self.others = True  # clients are not of this command
        self._asked: set[int] = set()  # connections that were asked to join
        self._counted: list[Member] = []  # of whom the steps are, also those that have left
        self._steps: tuple[Step, ...] = ()
        self._terms: Letter | None = None
        self._n_users = math.inf  # of the block: a client whose users all come in later ones waits for those
        self._heard = time.monotonic()

    def wait(self, count: int) -> None:
        """Wait until so many clients are there, and ready for the run that was announced; one of them with a user of
        the block."""
        def ready() -> list[Member]:
            return [member for member in self.members.values() if self._terms is None or member.points is not None]
        while len(here := ready()) < count or not any(member.number < self._n_users for member in here):
            self._poll()

    def stream(self, config: RunConfig) -> Stream:
        """The federation's stream without its interactions, once all clients have joined."""
        self.wait(self.wanted)
        self._counted = []
        stream = self._count(list(self.members.values()))
        return stream if stream.domains else with_item_features(stream, config.source, config.features)

    def _count(self, members: list[Member]) -> Stream:
        """The stream, with the sizes of these members' users from now on."""
        for member in members:
            member.counted = True
            self._counted = [each for each in self._counted
                             if not bool(torch.isin(each.names, member.names).any())] + [member]
        stream = stream_of(self.published, self._counted)
        self._steps = stream.steps
        return stream

    def known(self, stream: Stream) -> Stream:
        """A stream with the sizes of all who have taken part so far."""
        return stream if stream.domains or stream.steps is self._steps else replace(stream, steps=self._steps)

    def announce(self, config: RunConfig, item_features: Tensor | None = None) -> None:
        """Tell all clients of a run; those that join later are told then."""
        terms = RunTerms(*parts_of(config), config.name, config.hash, versions())
        features = {} if item_features is None else {"features": item_features.numpy()}
        self._terms, self.lost = Letter("announce", features, msgspec.json.encode(terms).decode()), 0
        self.restart()
        while any(member.points is None for member in self.members.values()):
            self._poll()

    @property
    def announced(self) -> bool:
        """Whether a run goes on: it needs no more than ``least`` clients, and a new one all."""
        return self._terms is not None

    def finish(self) -> None:
        """The run is over: clients write their models."""
        self._end("finish", "finished")
        self._terms = None

    def close(self) -> None:
        self.note, self.least = lambda text: None, 0  # clients leave, whatever they end with
        if self.members:
            self._end("end", "ended")
        self.link.close()

    def _end(self, kind: str, answer: str) -> None:
        """Tell all clients, and wait a while until they have answered."""
        for member in self.members.values():
            member.request, member.active = None, False
            self._send(member, Letter(kind))
        deadline = time.monotonic() + min(self.timeout, 30.0)
        while time.monotonic() < deadline and any(
                member.request is None or member.request[0] != answer for member in self.members.values()):
            self._poll()

    @property
    def active(self) -> dict[int, Member]:
        return {number: member for number, member in sorted(self.members.items()) if member.active}

    def admit(self, progress: Progress, users: int) -> list[int]:
        """Let those take part that have joined and have one of the first ``users`` users; who is new."""
        self._n_users = users
        self.wait(self.least)
        new = [member for _, member in sorted(self.members.items())
               if not member.active and member.points is not None and member.number < users]
        if joined := [member for member in new if not member.counted and not self.published.domains]:
            self._count(joined)
        for member in new:
            member.active, member.request = True, None
            self._send(member, Letter("begin", blob=self._state_for(member, progress)))
        return [member.number for member in new]

    def _state_for(self, member: Member, progress: Progress) -> bytes:
        """The server's progress for a client: all that is public, and untrained rows for its users."""
        if not progress.strategies:
            return b""
        def public(state: Tables) -> Tables:
            return {name: table for name, table in state.items() if name.startswith(self.public_state)}
        progress = replace(progress, server_state=public(progress.server_state),
                           best=replace(progress.best, server_state=public(progress.best.server_state)))
        return bytes_from_progress(progress_part(replace(progress, within=None), member.names, self.published.parts))

    def receive(self) -> dict[int, tuple[str, Tables]]:
        while True:
            active = self.active
            left = len(active) + sum(member.number >= self._n_users for member in self.members.values())
            if not active or left < self.least:
                raise TooFewClients(f"{left} of at least {self.least} clients are left")
            if all(member.request is not None for member in active.values()):
                return {number: member.request for number, member in active.items()}
            self._poll()

    def answer(self, answers: Mapping[int, Tables]) -> None:
        for number, tables in answers.items():
            if (member := self.members.get(number)) is not None and member.active:
                member.request = None
                self._send(member, Letter("answer", {name: table.numpy() for name, table in tables.items()}))

    def restart(self) -> None:
        """Nobody is active any more: who is still there begins again."""
        for member in self.members.values():
            member.active, member.points, member.request = False, None, None
            self._send(member, self._terms)

    def have(self, progress: Progress) -> bool:
        """Whether all who are there again have their part of it, once there are enough."""
        self.wait(self.least)
        return all([progress.step, progress.round] in member.points for member in self.members.values()
                   if member.points is not None)

    def _send(self, member: Member, letter: Letter) -> None:
        member.asked = time.monotonic()
        self.link.send(member.node, letter)

    def _poll(self) -> None:
        """Take in what has arrived; wait a moment if nothing has."""
        there = self.link.nodes()
        self._asked &= there  # who comes back is asked again
        for node in there - self._asked:
            self._asked.add(node)
            self.link.send(node, Letter("join", text=self.published.text()))
        replies = self.link.replies()
        for node, letter in replies:
            if node not in there:  # said before it left
                self._take(node, letter)
        for member in [member for member in self.members.values() if member.node not in there]:
            self._lose(member, "has left")
        for node, letter in replies:
            if node in there:
                self._take(node, letter)
        self.stop()
        if replies:
            self._heard = time.monotonic()
        else:
            pause(self._heard)
        for member in list(self.members.values()):
            asked = member.request is None if member.active else self._terms is not None and member.points is None
            if asked and time.monotonic() - member.asked > self.timeout:
                self._lose(member, f"has not answered for {self.timeout:g} s")

    def _take(self, node: int, letter: Letter) -> None:
        member = next((each for each in self.members.values() if each.node == node), None)
        if letter.kind == "joined":
            self._joined(node, letter)
        elif letter.kind == "error":
            self._failed(member, *json.loads(letter.text))
        elif letter.kind == "lost":
            self._asked.discard(node)
            if member is not None:
                self._lose(member, "has left")
        elif member is None:  # too late; it may come again
            if letter.kind != "ended":
                self.link.send(node, Letter("join", text=self.published.text()))
        elif letter.kind == "ready":
            member.points = json.loads(letter.text)
        else:
            if not all(np.isfinite(table).all() for name, table in letter.tables.items() if name.startswith("change/")):
                self.note(f"{self.called(member.number)} has sent numbers that are not finite")
            member.request = letter.kind, {name: torch.from_numpy(table.copy())
                                           for name, table in letter.tables.items()}

    def _joined(self, node: int, letter: Letter) -> None:
        said = json.loads(letter.text)
        names, identity = torch.tensor(said["users"]), said["identity"]
        for other in list(self.members.values()):
            if other.identity == identity:
                self._lose(other, "has come again")
            elif bool((here := torch.isin(names, other.names)).any()):
                whom = self._name(int(names[here][0]))
                self.note(f"another client with {whom} is turned away")
                self.link.send(node, Letter("refuse", text=f"{whom} is at another client that has joined"))
                return
        member = Member(node, identity, names, letter.tables)
        self.members[member.number] = member
        what = f"{'domain' if self.published.domains else 'user'}{'s' * (len(names) > 1)}"
        self.note(f"a client with {len(names)} {what} has joined: {len(self.members)} are there")
        if self._terms is not None:
            self._send(member, self._terms)

    def _failed(self, member: Member | None, known: str, text: str) -> None:
        """A client has ended with an error, which it tells its own user. The others go on if they are enough."""
        if member is None:
            self.note(f"a client could not join: {text.splitlines()[0]}")
        elif len(self.members) > self.least:
            self._lose(member, f"cannot go on: {text.splitlines()[0 if known else -1]}")
        else:
            del self.members[member.number]
            raise getattr(errors, known, UserError)(f"{self.called(member.number)}: {text}")

    def _lose(self, member: Member, why: str) -> None:
        self.lost += member.active
        self.note(f"{self.called(member.number)} {why}")
        del self.members[member.number]

    def called(self, number: int) -> str:
        return f"the client with {self._name(number)}"

    def _name(self, number: int) -> str:
        if self.published.domains:
            return f"domain '{self.published.domains[number][0]}'"
        return f"user '{self.published.users[number]}'"


def stream_of(published: Published, members: Iterable[Member]) -> Stream:
    """A stream of which only its sizes are known (see ``remote.sizes_of``); users who have not joined have nothing."""
    if published.domains:
        return stream_of_domains(published, [(member.names, member.sizes) for member in members])
    steps, old, members = [], (0, 0), list(members)
    rated = all(bool(member.sizes.get("rated")) for member in members)

    def lists(name: str, n_users: int, items: Sequence[Tensor] = ()) -> Ragged:
        """Lists of so many items of all users; which, if it is known, is told member by member."""
        owners = torch.cat([member.names[:len(member.sizes[name])].repeat_interleave(torch.tensor(member.sizes[name]))
                            for member in members])
        values = torch.cat(items)[owners.argsort(stable=True)] if items else torch.zeros_like(owners)
        return Ragged(starts_of(torch.bincount(owners, minlength=n_users)), values, values.double() if rated else None)
    for t, (n_users, n_items, interactions) in enumerate(published.steps):
        new = [torch.tensor(member.sizes[f"{t}/new"]) * old[1] for member in members
               ] if t and published.stream.stream == "blocks" else ()  # as ``sizes_of`` has them
        splits = {split: lists(f"{t}/{split}", n_users, new if split == "train" else ()) for split in SPLITS}
        sessions = {}
        for split in SPLITS if published.stream.stream == "sessions" else ():
            of_user = lists(f"{t}/{split}/sessions", n_users, [torch.tensor(member.sizes[f"{t}/{split}/lengths"])
                                                               for member in members])
            sessions[split] = sessions_of_sizes(of_user.lengths, of_user.values)
        steps.append(Step(t, n_users, n_items, *old, interactions, **splits, sessions=sessions))
        old = n_users, n_items
    return Stream(tuple(steps), *(np.array(ids, dtype=str) for ids in (published.users, published.items)))


@dataclass
class FederatesServer(Server):
    """``remote.Server`` of real clients, of whom some come and go."""

    clients_leave = True

    nodes: Federates

    def called(self, node: int) -> str:
        return self.nodes.called(node)

    def admit(self, progress: Progress, stream: Stream, late: bool = False) -> Stream:
        new = self.nodes.admit(progress, stream.steps[progress.step].n_users)
        self.names = {number: member.names for number, member in self.nodes.members.items()}
        self.late |= {number: 0 for number in new} if late else {}
        return self.nodes.known(stream)


class FlowerEngine(Engine):
    """Runs a federation on its clients; an engine of ``runner.execute``."""

    save_every = 0.0  # clients keep the states of the last rounds alone
    keeps_all = False

    def __init__(self, config: RunConfig, federates: Callable[[], Federates]):
        self._config, self._federates = config, federates  # nobody has joined before the run needs them

    def check(self, federation: Federation) -> None:
        """Raise UserError for a run that cannot be on real clients."""
        check_divisible(federation, "--engine")
        if federation.cross_silo:
            self._check_domains(federation)
        if federation.server.upload_noise:
            raise UserError("setting 'upload_noise': found noise with --engine flower, accepted: 0; the noise of all "
                            "uploads is drawn at once, which no client on its own can do.")
        if federation.method.noise_drawn_at_once:
            raise UserError(f"--engine: method '{federation.method.name}' draws the noise of all uploads at once, "
                            f"which no client on its own can do; accepted: settings without its noise.")

    def _check_domains(self, federation: Federation) -> None:
        there = {number for member in self._federates().members.values() for number in member.names.tolist()}
        if missing := [part.name for number, part in enumerate(federation.stream.domains) if number not in there]:
            raise UserError(f"--clients: found {self._federates().wanted}, and no client has the domain "
                            f"{' or '.join(missing)}; accepted: as many as have all domains together.")
        if self._federates().least < self._federates().wanted:
            raise UserError(f"--min-clients: found {self._federates().least}, accepted: {self._federates().wanted}, as "
                            f"every domain takes part in every round.")
        if getattr(federation.backbone, "needs_features", False) and not self._config.features:
            raise UserError(f"--engine: backbone '{federation.backbone.name}' reads items' texts; accepted: --engine "
                            f"flower, which starts the clients of domains here.")

    def run(self, federation: Federation, progress: Progress | None) -> Iterator[Progress]:
        """As ``Engine.run``, each progress once every client has kept its part: those that are killed before begin at
        the one yielded last, and so do all."""
        federates = self._federates()
        uploads = federation.method.uploads(federation.backbone, 0) or federation.method.uploads(federation.backbone, 1)
        # What is made of single clients' uploads is not sent but for what is broadcast.
        federates.public_state = tuple(federation.method.broadcasts) if uploads else ("",)
        federates.announce(self._config, federation.stream.item_features)
        if progress and not federates.others and not all(member.points for member in federates.members.values()):
            raise UserError("the states of the clients that began this run are not here; run it again with --rerun.")
        kept, latest = progress or Progress(), None
        kind = ServerSilos if federation.cross_silo else ServerClients
        while True:
            try:
                server = FederatesServer(federates, {})
                for later in run(replace(federation, population=server), latest or kept, kind=kind):
                    if latest is not None:
                        yield (kept := latest)
                    latest = later
                break
            except TooFewClients as error:
                federates.note(f"{error}; the round begins again once there are enough")
                federates.restart()
                if latest is not None and not federates.have(latest):
                    latest = None
        if latest is not None:
            yield latest
        federates.finish()

    def for_record(self, progress: Progress) -> Progress:
        """Without rows of users, which are theirs."""
        def public(model: Snapshot) -> Snapshot:
            return Snapshot(model.public, {}, model.dense)
        return replace(progress, client_state={}, best=replace(progress.best, model=public(progress.best.model),
                                                               client_state={}))

    def known(self, stream: Stream) -> Stream:
        return self._federates().known(stream)

    @property
    def about(self) -> dict[str, Any]:
        return {"engine": f"flower {VERSION}", "clients": self._federates().wanted,
                "clients_lost": self._federates().lost}
