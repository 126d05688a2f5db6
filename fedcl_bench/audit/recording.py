"""Clients whose run is written down event by event, and whose server hears, if told so, the clients of another world.

If server and clients may know only what they are sent, then in a world where the server hears the uploads of another
one, everybody whose own data are the same does in every round the same as there.
"""

from __future__ import annotations

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import Tensor

from ..data.stream import Step
from ..evaluation.ranking import UserScores
from ..federation.client_sampling import Participants
from ..federation.cross_device import CrossDevice
from ..federation.parts import Best, Federation, Progress, Update
from ..plugin.metric import Metric, RankedLists
from ..plugin.state import Snapshot
from ..rng import DrawKey, Tables
from ..training.trained import Trained

WIDTH = 8  # numbers that are kept of each row
_Clients: Any = object  # in place of the kind of clients that ``recorded`` puts below
_NOBODY = torch.zeros(0, dtype=torch.int64)


class Ended(Exception):
    """The last event that was asked for is over."""


class Listed(Metric):
    """Keeps the lists that it sees."""

    name, title, of_items = "listed", "the lists themselves", True

    def __init__(self):
        self.lists: list[Tensor] = []

    def values(self, lists: RankedLists) -> Tensor:
        self.lists.append(lists.items)
        return torch.zeros(len(lists.relevant), dtype=torch.float64)


class Tape:
    """Events of a run, each a file of a folder, by number.

    Args:
        since: from which step on each user's data are others.
        hears: beginnings of names of what the server hears as in another world; heard: folder of that one's events.
        until: number of the last event.
    """

    def __init__(self, folder: Path, since: Tensor, hears: tuple[str, ...], heard: Path, until: int):
        self.folder, self.since, self.hears, self.heard, self.until = folder, since, hears, heard, until
        self.number, self.listed = -1, Listed()
        self._event: dict[str, Any] = {}
        self._other: dict[str, Any] = {}

    def turn(self, where: str, step: int) -> None:
        """Begin an event."""
        self.write()
        self.number += 1
        if self.number > self.until:
            raise Ended
        self._event = {"where": where, "same": self.since > step, "exchanged": {}, "tables": {}}
        if self.hears:
            self._other = torch.load(self.heard / f"{self.number}.pt", weights_only=True)["exchanged"]

    def write(self) -> None:
        """End an event."""
        if self._event:
            self._event["tables"] = {name: _joined(*zip(*parts)) for name, parts in self._event["tables"].items()}
            torch.save(self._event, self.folder / f"{self.number}.pt")
        self._event = {}

    def exchanged(self, name: str, own: Any) -> Any:
        """What the server hears."""
        if name.startswith(self.hears):
            return self._other[name]
        self._event["exchanged"][name] = copy.deepcopy(own)
        return own

    def of_clients(self, kind: str, tables: Tables, users: Tensor | None = None) -> None:
        """Keep tables of rows of clients, of all of them or of some users."""
        for name, table in tables.items():
            rows = torch.arange(len(table)) if users is None else users.cpu(), _sketch(torch.atleast_1d(table))
            self._event["tables"].setdefault((f"{kind} '{name}'", *table.shape[1:]), []).append(rows)

    def of_server(self, kind: str, tables: Tables, left_out: tuple[str, ...] = ()) -> None:
        """Keep other tables, but for those of some domains, by their prefixes."""
        self.of_clients(kind, {name: table for name, table in tables.items()
                               if not name.rpartition(" of ")[2].startswith(left_out)}, _NOBODY)

    def observe(self, key: DrawKey, model: Snapshot, trained: Trained) -> None:
        """Keep what clients have made of a round."""
        for first in range(0, len(trained.users), 64):
            some = trained.of(slice(first, first + 64))
            self.of_clients("upload", some.changes(model), some.users)
        self.of_clients("local", {"loss": trained.loss}, trained.users)

    def lists(self, tests: list[tuple[int, int, UserScores]]) -> None:
        """Keep the longest lists of tests."""
        lists, self.listed.lists = self.listed.lists, []
        for number, (_, tested, scores) in enumerate(tests, 1):
            rows = scores.users.cpu(), lists[number * len(lists) // len(tests) - 1].double().cpu()
            self._event["tables"][(f"list of block {tested}",)] = [rows]


def _joined(users: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The ids of clients, ascending, and what is kept of their rows."""
    order = torch.cat(users).argsort()
    return (torch.cat(users)[order], torch.cat(rows)[order]) if len(order) else (_NOBODY, *rows[:1])


@cache
def _directions(width: int) -> Tensor:
    return torch.randn(width, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _sketch(table: Tensor) -> Tensor:
    """A few numbers of each row, which differ if the row does: (rows, at most WIDTH)."""
    flat = table.detach().cpu().reshape(len(table), math.prod(table.shape[1:]))
    return torch.cat([rows if rows.shape[1] <= WIDTH else rows @ _directions(rows.shape[1])
                      for part in flat.split(256) for rows in [part.double().nan_to_num(0.0, 1e9, -1e9)]])


class _Recorded(_Clients):
    """Clients of either kind with a tape."""

    tape: Tape

    def train(self, progress: Progress, stops: Any) -> Iterator[Progress]:
        self.tape.turn(f"block {self.step.index}, round {progress.round + 1}", self.step.index)
        return (yield from super().train(progress, stops))

    def aggregate(self, progress: Progress, update: Update) -> Update:
        update = super().aggregate(progress, update)
        self._keep(update.model, update.state)
        return update

    def _keep(self, model: Snapshot, state: Tables) -> None:
        method = self.federation.method
        for kind in ("private", "local", "client_context"):
            self.tape.of_clients(kind, getattr(model, kind))
        self.tape.of_clients("client_state", {name: rows for name, rows in method.client_state.items() if rows.dim()})
        for kind in ("public", "dense", "personalised"):
            self.tape.of_server(kind, getattr(model, kind), self._others())
        self.tape.of_server("server_state", {**method.server_state, **state}, self._others())

    def _others(self) -> tuple[str, ...]:
        """The prefixes of domains with other data."""
        return ()

    def validate(self, unit: int, model: Snapshot, round_: int) -> float:
        value = self.tape.exchanged(f"validation of {unit}", super().validate(unit, model, round_))
        self.tape.of_server("validation of", {f"block {unit}": torch.tensor(value)})
        return value

    def test(self, unit: int, best: Best) -> tuple[list, list]:
        result = super().test(unit, best)
        self.tape.lists(result[0])
        return result

    def end(self, progress: Progress) -> Progress:
        self.tape.turn(f"the end of block {self.step.index}", self.step.index)
        progress = super().end(progress)
        self._keep(progress.best.model, {})
        return progress


class _RecordedDevice(_Recorded):
    """Clients of one user each with a tape; ``group`` are those that the server hears of.

    Attributes:
        here: ids of those who take part.
    """

    here = _NOBODY

    @classmethod
    def open(cls, f: Federation, step: Step, progress: Progress, observe: Any = None) -> Any:
        return super().open(f, step, progress, cls.tape.observe)

    def _choose_participants(self, progress: Progress) -> None:
        super()._choose_participants(progress)
        self.here, self.group = self.group.users, Participants(*self.tape.exchanged("group", tuple(self.group)))

    def weights(self, round_: int) -> Tensor | None:
        return self.tape.exchanged("weights", super().weights(round_))

    def aggregate(self, progress: Progress, update: Update) -> Update:
        own = {"model", "private", *(() if self.federation.backbone.serves_tables else ("local",))}  # clients keep them
        vars(update.sums).update(self.tape.exchanged("sums", {name: value for name, value in vars(update.sums).items()
                                                              if name not in own}))
        return super().aggregate(progress, update)

    def _answer(self, round_: int, uploads: Tables) -> Tables:
        self.tape.of_clients("statistic", uploads, self.here)
        return super()._answer(round_, self.tape.exchanged("uploads", uploads))


class _RecordedSilo(_Recorded):
    """Domains with a tape."""

    @classmethod
    def open(cls, f: Federation, step: Step, progress: Progress, observe: Any = None) -> Any:
        clients, progress = super().open(f, step, progress, observe)
        method = clients.method
        method.aggregate = lambda uploads, weights, draw: type(method).aggregate(
            method, *cls.tape.exchanged("uploads", (list(uploads), weights)), draw)
        return clients, progress

    def _others(self) -> tuple[str, ...]:
        return tuple(domain.prefix for domain in self.domains
                     if domain.prefix and int(self.tape.since[domain.users.start]) <= self.step.index)


def recorded(kind: type, tape: Tape) -> type:
    """The kind of a run's clients, with a tape."""
    base = _RecordedDevice if issubclass(kind, CrossDevice) else _RecordedSilo
    return type(kind.__name__, (base, kind), {"tape": tape})
