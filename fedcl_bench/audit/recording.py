"""Clients whose run is written down event by event, and whose server hears, if told so, the clients of another world.

If server and clients may know only what they are sent, then in a world where the server hears the uploads of another
one, everybody whose own data are the same does in every round the same as there.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch
from torch import Tensor

from ..data.stream import Step
from ..evaluation.ranking import UserScores
from ..federation.client_sampling import Participants
from ..federation.cross_device import CrossDevice
from ..federation.parts import Best, Federation, Progress, Update
from ..federation.server import RoundSums
from ..plugin.metric import Metric, RankedLists
from ..plugin.state import Snapshot
from ..rng import DrawKey, Tables
from ..training.trained import Trained

WIDTH = 8  # numbers that are kept of each row


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
        heard: folder of the world whose events take the place of those of this one that ``hears`` names.
        since: from which step on each user's data are others; until: number of the last event.
    """

    def __init__(self, folder: Path, since: Tensor, heard: Path | None, hears: tuple[str, ...], until: int | None):
        self.folder, self.since, self.heard, self.hears, self.until = folder, since, heard, hears, until
        self.number, self.listed, self.metrics = -1, Listed(), 1
        self._event: dict[str, Any] = {}
        self._other: Mapping[str, Any] = {}

    def turn(self, where: str, step: int) -> None:
        """Begin an event."""
        self.write()
        self.number += 1
        if self.until is not None and self.number > self.until:
            raise Ended
        self._event = {"where": where, "same": (self.since > step).nonzero().flatten(), "exchanged": {}, "tables": {}}
        if self.heard is not None:
            self._other = torch.load(self.heard / f"{self.number}.pt", weights_only=True)["exchanged"]

    def write(self) -> None:
        if self._event:
            tables = {name: _joined(parts) if isinstance(parts, list) else parts
                      for name, parts in self._event["tables"].items()}
            torch.save({**self._event, "tables": tables}, self.folder / f"{self.number}.pt")
        self._event = {}

    def exchanged(self, name: str, own: Any) -> Any:
        """What the server hears."""
        if self.heard is not None and name.startswith(self.hears):
            return copy.deepcopy(self._other[name])
        self._event["exchanged"][name] = copy.deepcopy(own)
        return own

    def of_clients(self, kind: str, tables: Tables, users: Tensor | None = None) -> None:
        """Keep tables of rows of clients, of all of them or of some users."""
        for name, table in tables.items():
            rows = (torch.arange(len(table)) if users is None else users.cpu(), _sketch(table), table[:1].numel())
            self._event["tables"].setdefault(f"{kind} '{name}'", []).append(rows)

    def of_server(self, kind: str, tables: Tables, left_out: tuple[str, ...] = ()) -> None:
        """Keep other tables, but for those of some domains, by their prefixes."""
        self._event["tables"] |= {f"{kind} '{name}'": (None, _sketch(table), 0) for name, table in tables.items()
                                  if not name.rpartition(" of ")[2].startswith(left_out)}

    def observe(self, key: DrawKey, model: Snapshot, trained: Trained) -> None:
        """Keep what clients have made of a round."""
        for first in range(0, len(trained.users), 64):
            some = trained.of(slice(first, first + 64))
            self.of_clients("upload", some.changes(model), some.users)
        self.of_clients("local", {"loss": trained.loss}, trained.users)

    def lists(self, tests: list[tuple[int, int, UserScores]]) -> list[tuple[int, int, UserScores]]:
        """Keep the lists of tests; returns these as they are without."""
        lists, self.listed.lists = self.listed.lists[self.metrics - 1::self.metrics], []
        for (_, tested, scores), items in zip(tests, lists, strict=True):
            self._event["tables"][f"list of block {tested}"] = scores.users.cpu(), items.double().cpu(), 0
        return [(t, s, UserScores(scores.users, {name: values for name, values in scores.values.items()
                                                 if not name.startswith(f"{Listed.name}@")})) for t, s, scores in tests]


def _joined(parts: list[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, Tensor, int]:
    """The ids of clients, ascending, what is kept of their rows, and how many numbers each row has."""
    (*users,), (*rows,), (width, *_) = zip(*parts)
    order = torch.cat(users).argsort()
    return torch.cat(users)[order], torch.cat(rows)[order], width


@cache
def _directions(width: int) -> Tensor:
    return torch.randn(width, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _sketch(table: Tensor) -> Tensor:
    """A few numbers of each row, which differ if the row does: (rows, at most WIDTH)."""
    flat = table.detach().cpu().reshape(len(table) if table.dim() else 1, -1)
    return torch.cat([rows if rows.shape[1] <= WIDTH else rows @ _directions(rows.shape[1])
                      for part in flat.split(256) for rows in [part.double().nan_to_num(0.0, 1e9, -1e9)]])


class _Recorded:
    """Clients of either kind with a tape."""

    tape: Tape
    federation: Federation
    step: Step

    def train(self, progress: Progress, stops: Any) -> Iterator[Progress]:
        self.tape.turn(f"block {self.step.index}, round {progress.round + 1}", self.step.index)
        return (yield from super().train(progress, stops))  # type: ignore[misc]

    def aggregate(self, progress: Progress, update: Update) -> Update:
        with self._heard(update.sums):
            update = super().aggregate(progress, update)  # type: ignore[misc]
        self._keep(update.model, update.state)
        return update

    @contextmanager
    def _heard(self, sums: RoundSums | None) -> Iterator[None]:
        yield

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
        value = self.tape.exchanged(f"validation of {unit}", super().validate(unit, model, round_))  # type: ignore[misc]
        self.tape.of_server("validation of", {f"block {unit}": torch.tensor(value)})
        return value

    def test(self, unit: int, best: Best) -> tuple[list, list]:
        tests, analysis = super().test(unit, best)  # type: ignore[misc]
        return self.tape.lists(tests), analysis

    def end(self, progress: Progress) -> Progress:
        self.tape.turn(f"the end of block {self.step.index}", self.step.index)
        progress = super().end(progress)  # type: ignore[misc]
        self._keep(progress.best.model, {})
        return progress


class _RecordedDevice(_Recorded):
    """Clients of one user each with a tape.

    Attributes:
        trained: while the server hears of others, who has taken part here.
    """

    trained: Participants | None = None

    @classmethod
    def open(cls, f: Federation, step: Step, progress: Progress, observe: Any = None) -> Any:
        return super().open(f, step, progress, cls.tape.observe)  # type: ignore[misc]

    def weights(self, round_: int) -> Tensor | None:
        return self.tape.exchanged("weights", super().weights(round_))  # type: ignore[misc]

    @contextmanager
    def _heard(self, sums: RoundSums | None) -> Iterator[None]:
        """A round's participants and sums as the server hears of them. What each client keeps is none of it."""
        assert sums is not None
        own = {"model", "private", *(() if self.federation.backbone.serves_tables else ("local",))}
        vars(sums).update(self.tape.exchanged("sums", {name: value for name, value in vars(sums).items()
                                                       if name not in own}))
        self.trained, self.group = self.group, Participants(*self.tape.exchanged("group", tuple(self.group)))
        yield
        self.trained, self.group = None, self.trained

    def _answer(self, round_: int, uploads: Tables) -> Tables:
        self.tape.of_clients("statistic", uploads, (self.trained or self.group).users)
        before, self.group = self.group, Participants(*self.tape.exchanged("answered", tuple(self.group)))
        answers = super()._answer(round_, self.tape.exchanged("uploads", uploads))  # type: ignore[misc]
        self.group = before
        return answers


class _RecordedSilo(_Recorded):
    """Domains with a tape."""

    @contextmanager
    def _heard(self, sums: RoundSums | None) -> Iterator[None]:
        aggregate = self.method.aggregate

        def heard(uploads: Any, weights: Tensor, draw: DrawKey) -> Any:
            return aggregate(*self.tape.exchanged("uploads", (list(uploads), weights)), draw)
        self.method.aggregate = heard
        yield
        del self.method.aggregate

    def _others(self) -> tuple[str, ...]:
        return tuple(domain.prefix for domain in self.domains
                     if domain.prefix and int(self.tape.since[domain.users.start]) <= self.step.index)


def recorded(kind: type, tape: Tape) -> type:
    """The kind of a run's clients, with a tape."""
    base = _RecordedDevice if issubclass(kind, CrossDevice) else _RecordedSilo
    return type(kind.__name__, (base, kind), {"tape": tape})
