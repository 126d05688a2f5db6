"""A step of the stream as the loop opens and closes it, with all that is decided once per step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..training.strategies import Training, choose_way
from ..data.stream import Step
from ..rng import DrawKey
from ..plugin.method import Method
from ..plugin.state import Snapshot
from .client_sampling import Attendance
from .cold_start import ColdStart, cold_start_of, ranks_by, shown
from .parameter_growth import grow, reset_private
from .parts import Federation, Progress
from .protocols import Lists, SessionSteps, protocol_of
from .round import Work


@dataclass(frozen=True)
class Group:
    """Who takes part in a round.

    Attributes:
        users: ids of the participants that are here, ascending; count: of all participants.
        dropped: how many others failed after their training; None where none can.
        work: what those here train on, by how they train: stragglers do fewer epochs.
    """

    users: Tensor
    count: int
    dropped: int | None
    work: list[Work]

    @property
    def failures(self) -> dict[str, int]:
        """For the curve of a run whose clients can fail."""
        return {} if self.dropped is None else {"dropped": self.dropped}


@dataclass(frozen=True)
class OpenStep:
    """A step and what is decided once for all its rounds.

    Attributes:
        step, earlier: it as its clients know it and the one before, on the run's device; None before the first.
        method: the one that acts in it.
        training: how its clients are trained.
        protocol: what they train on and how a model is tested.
        attendance: which clients take part.
        same_group: whether they are the same in every round, with the same work.
        cold_start: its new users, if they arrive after its training.
    """

    federation: Federation
    step: Step
    earlier: Step | None
    method: Method
    training: Training
    protocol: Lists | SessionSteps
    attendance: Attendance
    same_group: bool
    cold_start: ColdStart | None

    def key(self, round_: int) -> DrawKey:
        return DrawKey(self.federation.seed, self.step.index, round_)

    def group(self, progress: Progress, before: Group | None) -> Group:
        """The participants of the next round; ``before``: of the round before, None in the first."""
        if before is not None and self.same_group:
            return before
        f = self.federation
        users, count, dropped = f.population.participants(self.step, self.attendance, f.seed, progress.round)
        work = [Work(training, self.protocol.chunks(alike, progress.round, progress.model) if len(alike) else [])
                for training, alike in self._by_epochs(users, progress.round)]
        return Group(users, count, dropped if self.attendance.dropout else None, work)

    def _by_epochs(self, users: Tensor, round_: int) -> list[tuple[Training, Tensor]]:
        """The participants here by how many local epochs they do; at least one entry."""
        f = self.federation
        if self.attendance.punctual(f.local.local_epochs) or not len(users):
            return [(self.training, users)]
        epochs = self.attendance.epochs(users, f.local.local_epochs, f.seed, self.step.index, round_)
        return [(replace(self.training, settings=replace(f.local, local_epochs=number)), users[epochs == number])
                for number in epochs.unique().tolist()]

    def weights(self, round_: int) -> Tensor | None:
        """Weight of every user in the mean, shape (users,); None: all alike."""
        server = self.federation.server
        if server.weighting == "uniform":
            return None
        return self.protocol.lengths(round_).to(getattr(torch, server.precision))


def begin_step(f: Federation, step: Step, progress: Progress) -> Progress:
    """Begin a step: rows for its new users and items, and the method's preparations."""
    method, step = f.acting_in(step), shown(step, f.server.fold_in)
    start = progress.best.model if f.server.init_from == "best" else progress.model
    model = grow(start, f.backbone, f.seed, step, getattr(torch, f.server.precision), f.device, method)
    if step.index > 0:
        method.begin_step(step, model, f.backbone)
        if f.server.reset_private:
            model = reset_private(model, f.backbone, f.seed, (step.train.lengths > 0).nonzero().flatten())
    way = training_of(f, step, model).way.name
    return replace(progress, model=model, best=replace(progress.best, model=model), previous=progress.best.model,
                   ways=(*progress.ways, way))


def training_of(f: Federation, step: Step, model: Snapshot) -> Training:
    """How a step's clients are trained; ``model`` as for ``choose_way``."""
    method, backbone = f.acting_in(step), f.backbone_in(step.index)
    way = choose_way(backbone, method, model, f.local, sessions=bool(step.sessions))
    return Training(backbone, method, f.local, way, f.server.protection, f.server.init == "per_client")


def open_step(f: Federation, step: Step, model: Snapshot) -> OpenStep:
    """A step with rows for all its users and items in ``model``."""
    step = step.to(f.device)
    earlier = f.stream.steps[step.index - 1].to(f.device) if step.index > 0 else None
    training, known = training_of(f, step, model), shown(step, f.server.fold_in)
    protocol = protocol_of(f, step, training, ranks_by(f, step, training.method))
    attendance = f.server.attendance
    same_group = (attendance.complete and attendance.punctual(f.local.local_epochs)
                  and not protocol.changes_every_round)
    return OpenStep(f, known, earlier, training.method, training, protocol, attendance, same_group,
                    cold_start_of(f, known, model))


def end_step(opened: OpenStep, progress: Progress) -> Progress:
    """End a step, with the model of its best round: the method's memories for the next one."""
    f, step = opened.federation, opened.step
    trained = (step.train.lengths > 0).nonzero().flatten()
    f.method.end_step(step, progress.best.model, f.backbone, trained, opened.key(0))
    return replace(progress, step=step.index + 1, round=0, trained=False, client_state=dict(f.method.client_state),
                   server_state=dict(f.method.server_state))
