"""A run that is written down event by event, and whose server hears, if told so, the clients of another world.

If server and clients may know only what they are sent, then in a world where the server hears the uploads of another
one, everybody whose own data are the same does in every round the same as there.
"""

from __future__ import annotations

import copy
import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Sequence

import torch
from torch import Tensor

from ..data.stream import DomainPart, Step
from ..evaluation.ranking import UserScores
from ..federation.client_sampling import Participants
from ..federation.cross_device import CrossDevice
from ..federation.parts import Best, Federation, Progress, Update
from ..plugin.metric import Metric, RankedLists
from ..plugin.state import Snapshot
from ..rng import DrawKey, Tables
from ..training.chunk_trainer import Slots
from ..training.factored import Outer
from ..training.trained import Change, Trained

WIDTH = 8  # numbers that are kept of each row
_Clients: Any = object  # in place of the kind of clients that ``recorded`` puts below
_NOBODY = torch.zeros(0, dtype=torch.int64)


class Listed(Metric):
    """Keeps the lists that it sees."""

    name, title, of_items = "listed", "the lists themselves", True

    def __init__(self):
        self.lists: list[Tensor] = []

    def values(self, lists: RankedLists) -> Tensor:
        self.lists.append(lists.items)
        return torch.zeros(len(lists.relevant), dtype=torch.float64)


class Tape:
    """Events of a run, rounds and ends of blocks, each a file of a folder, by number.

    From the step ``since`` on each user's data are others. Of names that begin as those in ``hears`` the server hears
    what the other world has whose events are in ``heard``.
    """

    def __init__(self, folder: Path, since: Tensor, domains: Sequence[DomainPart], hears: tuple[str, ...], heard: Path):
        self.folder, self.since, self.domains, self.hears, self.heard = folder, since, domains, hears, heard
        self.number, self.listed = 0, Listed()
        self._exchanged: dict[str, Any] = {}
        self._tables: dict[tuple, list[tuple[Tensor, Tensor]]] = {}

    def exchanged(self, name: str, own: Any) -> Any:
        """What the server hears."""
        if name.startswith(self.hears):
            return loaded(self.heard / f"{self.number}.pt")["exchanged"][name]
        self._exchanged[name] = copy.deepcopy(own)
        return own

    def of_clients(self, kind: str, tables: Tables, users: Tensor | None = None) -> None:
        """Keep tables of rows of clients, of all of them or of some users."""
        for name, table in tables.items():
            rows = torch.arange(len(table)) if users is None else users.cpu(), _sketch(torch.atleast_1d(table))
            self._tables.setdefault((f"{kind} '{name}'", *table.shape[1:]), []).append(rows)

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
            self._tables[(f"list of block {tested}",)] = [rows]

    def end(self, progress: Progress) -> None:
        """End an event with what the run carries on; of parameters of domains with other data nobody knows."""
        step, p = progress.step - (progress.round == 0), progress
        model, where = (p.model, f"block {step}, round {p.round}") if p.round else (
            p.best.model, f"the end of block {step}")
        for kind in ("private", "local", "client_context"):
            self.of_clients(kind, getattr(model, kind))
        self.of_clients("client_state", {name: table for name, table in p.client_state.items() if table.dim()})
        others = tuple(f"{part.name}/" for part in self.domains if int(self.since[part.users.start]) <= step)
        for kind, tables in (("public", model.public), ("dense", model.dense), ("personalised", model.personalised),
                             ("server_state", p.server_state)):
            self.of_clients(kind, {name: table for name, table in tables.items()
                                   if not name.rpartition(" of ")[2].startswith(others)}, _NOBODY)
        order = sorted(self._tables, key=lambda name: name[0].startswith(("validation", "list")))  # these come last
        torch.save({"where": where, "same": self.since > step, "exchanged": self._exchanged,
                    "tables": {name: _joined(*zip(*self._tables[name])) for name in order}},
                   self.folder / f"{self.number}.pt")
        self.number, self._exchanged, self._tables = self.number + 1, {}, {}


@lru_cache(2)
def loaded(event: Path) -> dict[str, Any]:
    """What is kept of an event."""
    with torch.serialization.safe_globals([Trained, Change, Slots, Outer]):
        return torch.load(event, weights_only=True)


def _joined(users: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The ids of clients, ascending, and what is kept of their rows."""
    order = torch.cat(users).argsort()
    return (torch.cat(users)[order], torch.cat(rows)[order]) if len(order) else (_NOBODY, rows[0])


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

    def validate(self, unit: int, model: Snapshot, round_: int) -> float:
        value = self.tape.exchanged(f"validation of {unit}", super().validate(unit, model, round_))
        self.tape.of_clients("validation of", {f"block {unit}": torch.tensor(value)}, _NOBODY)
        return value

    def test(self, unit: int, best: Best) -> tuple[list, list]:
        result = super().test(unit, best)
        self.tape.lists(result[0])
        return result


class _RecordedDevice(_Recorded):
    """Clients of one user each; ``group`` are those that the server hears of, ``here`` the ids of those who take part.
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
        if update.sums is None:  # no client has trained
            return super().aggregate(progress, update)
        own = {"model", "private", *(() if self.federation.backbone.serves_tables else ("local",))}  # clients keep them
        vars(update.sums).update(self.tape.exchanged("sums", {name: value for name, value in vars(update.sums).items()
                                                              if name not in own}))
        return super().aggregate(progress, update)

    def _answer(self, round_: int, uploads: Tables) -> Tables:
        self.tape.of_clients("statistic", uploads, self.here)
        return super()._answer(round_, self.tape.exchanged("uploads", uploads))


class _RecordedSilo(_Recorded):
    """Domains, or one client that holds all."""

    @classmethod
    def open(cls, f: Federation, step: Step, progress: Progress, observe: Any = None) -> Any:
        clients, progress = super().open(f, step, progress, observe)
        method = clients.method
        method.aggregate = lambda uploads, weights, draw: type(method).aggregate(
            method, *cls.tape.exchanged("uploads", (list(uploads), weights)), draw)
        return clients, progress


def recorded(kind: type, tape: Tape) -> type:
    """The kind of a run's clients, with a tape."""
    base = _RecordedDevice if issubclass(kind, CrossDevice) else _RecordedSilo
    return type(kind.__name__, (base, kind), {"tape": tape})
