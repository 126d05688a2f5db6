"""Clients of one user each, in one step of the stream: what is decided once per step, and what they do in a round."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..plugin import checks
from ..training.strategies import Strategy, Training, choose_strategy
from ..training.trained import Trained
from ..data.stream import Step
from ..evaluation.drift import Drift
from ..rng import DrawKey, Tables
from ..core.parallel import workers
from ..plugin.state import Snapshot
from . import server
from .client_sampling import Participants
from .cold_start import cold_items_of, cold_start_of, ranks_by
from .early_stopping import EarlyStopping, require_finite
from .parameter_growth import grow, reset_private
from .parts import Best, Federation, Progress, Update, bytes_of
from .protocols import Lists, SessionSteps
from .round import Work, train_clients, upload_first

Observer = Callable[[DrawKey, Snapshot, Trained], None]


class CrossDevice:
    """A step's clients and what is decided once for all its rounds; they are validated as one, the step's number.
    ``model`` has rows for all users and items of the step.

    Attributes:
        step, earlier: it as its clients know it and the one before, on the run's device; None before the first.
        protocol: what they train on and how a model is tested.
        same_group: whether they are the same in every round, with the same work.
        cold_start, cold_items: its new users, and its new items, if they arrive after its training.
        observe: called in every round with its key, what the server sent, and every chunk's clients after training.
        group, work: who takes part in the round, and what those here train on, by how they train: stragglers do fewer
            epochs.
    """

    threads, stages, last_stage, together = workers, ("train",), True, True

    def __init__(self, f: Federation, step: Step, model: Snapshot):
        step = step.to(f.device)
        self.federation, self.step, self.attendance = f, f.as_trained_on(step), f.server.attendance
        self.earlier = f.stream.steps[step.index - 1].to(f.device) if step.index > 0 else None
        self.training = training_of(f, step, model)
        self.method = self.training.method
        self.protocol = self._protocol(step)
        self.same_group = (self.attendance.complete and self.attendance.punctual(f.local.local_epochs)
                           and f.population.clients_here and not self.protocol.changes_every_round)
        self.cold_start, self.cold_items = cold_start_of(f, self.step, model), cold_items_of(f, step, model)
        self.observe: Observer | None = None
        self.malicious = f.malicious_in(self.step)
        self.group: Participants | None = None
        self.work: Sequence[Work] = ()
        self.answered: tuple[str, ...] = ()

    def _protocol(self, step: Step) -> Any:
        """What its participants train on, and how a model is tested, in a step with all its interactions."""
        f = self.federation
        return SessionSteps(f, step, self.training) if step.sessions else Lists(
            f, step, self.step, self.training, ranks_by(f, step, self.method))

    @classmethod
    def open(cls, f: Federation, step: Step, progress: Progress, observe: Observer | None = None
             ) -> tuple["CrossDevice", Progress]:
        """The clients of a step, and the progress with what they begin it from."""
        f.method.client_state, f.method.server_state = dict(progress.client_state), dict(progress.server_state)
        if f.attack is not None:
            f.attack.state = dict(progress.attack_state)
        if progress.round == 0 and not progress.trained:
            progress = begin_step(f, step.to(f.device), progress)
        opened = cls(f, step, progress.model)
        opened.observe, opened.answered = observe, progress.answered
        return opened, progress

    @staticmethod
    def untrained(f: Federation, step: Step) -> Snapshot:
        """The shapes of all tables in a step."""
        return grow(Snapshot({}, {}), f.backbone, f.seed, replace(step, old_users=0, old_items=0),
                    getattr(torch, f.server.precision), torch.device("meta"))

    def early_stopping(self, stage: int, progress: Progress) -> dict[int, EarlyStopping]:
        """Of the step, after its rounds so far."""
        f, rows = self.federation, (row for row in progress.curve if row["step"] == self.step.index)
        if self.method.trains == "nobody":
            f = replace(f, server=replace(f.server, rounds=1))
        return {self.step.index: EarlyStopping.replay(f, rows)}

    def enter(self, stage: int, progress: Progress) -> Progress:
        return progress

    def ended(self, stops: Mapping[int, EarlyStopping]) -> bool:
        return all(stop.ended for stop in stops.values())

    def train(self, progress: Progress, stops: Mapping[int, EarlyStopping]) -> Iterator[Progress]:
        yield from ()  # a round is short
        began, key = time.perf_counter(), self.key(self.step.index, progress.round)
        if self.method.trains != "clients":
            return self._without_clients(progress.model, key, began)
        if self.group is None or not self.same_group:
            self._choose_participants(progress)
        self.method.begin_round(self.step.training, key.round, self.federation.backbone)
        uploads, answers = self._upload_first(progress.model, key) if self.method.uploads_first else ({}, {})
        sums = self._sums(progress.model, key)
        return Update(sums=sums, began=began, uploads=uploads or sums.uploads, answers=answers)

    def _upload_first(self, model: Snapshot, key: DrawKey) -> tuple[Tables, Tables]:
        """What participants upload before they train, and the server's answers."""
        uploads = upload_first(self.work, model, key)
        return uploads, self._answer(key.round, uploads)

    def _sums(self, model: Snapshot, key: DrawKey) -> server.RoundSums:
        observe = self.observe and partial(self.observe, key, model)
        return train_clients(self.work, model, key, self.weights(key.round), observe, self.malicious)

    def _without_clients(self, model: Snapshot, key: DrawKey, began: float) -> Update:
        """A round in which the server trains, or nobody."""
        step, backbone, loss = self._without_arrivals.training, self.federation.backbone, 0.0
        self.group = Participants(self.step.train.values[:0], 0, 0)
        self.method.begin_round(step, key.round, backbone)
        if self.method.trains == "server":
            model, loss = self.method.central_round(step, model, backbone, key)
        return Update({step.index: loss}, {step.index: time.perf_counter() - began}, model)

    @cached_property
    def _without_arrivals(self) -> Step:
        """The step without the users and items that arrive after its training."""
        if self.step.index == 0:
            return self.step
        known = self.protocol.known
        return replace(known, train=known.train.where(torch.isin(known.train.owners, self.attendance.able(known))))

    def aggregate(self, progress: Progress, update: Update) -> Update:
        """The server averages what they upload, with its noise, lets the method aggregate, and answers."""
        if update.sums is None:
            return update
        f, method, sums = self.federation, self.method, update.sums
        key, users = self.key(self.step.index, progress.round), self.group.users
        protection, begun = self.training.protection, progress.model
        if declared := self.sums:
            model = server.aggregate_sums(sums, begun, method, key, self.group.count)
        elif sums.held is None:
            model = server.mean(sums, begun, f.backbone, f.seed)
            model = server.aggregate(f.backbone, model, users, protection, key, self._by_weight(key.round))
        else:
            model = server.aggregate_updates(sums, begun, method, protection, key, update.uploads,
                                             f.server.single_updates)
        model, moments = self._optimised(begun, model, progress.server_moments if key.round else {})
        model = replace(model, public=self._by_method(model.public))
        if model.dense:
            model = replace(model, dense=checks.checked_tables(
                method, "aggregate_dense", method.aggregate_dense(model.dense), model.dense))
        if declared and method.overrides("receive"):
            model = self._receive(model, sums.change, self.group.count, key)
        answers = update.answers if method.uploads_first else self._answer(key.round, update.uploads)
        unit = self.step.index
        return Update({unit: sums.loss}, {unit: time.perf_counter() - update.began}, model, answers=answers,
                      uploads=update.uploads, moments=moments)

    def _optimised(self, begun: Snapshot, model: Snapshot, moments: Tables) -> tuple[Snapshot, Tables]:
        """The model after the step of the server's optimiser, if there is one, and what that remembers. It begins anew
        with every block: its clients' losses are another objective, which starts from another model."""
        if (optimiser := self.federation.server.optimiser) is None:
            return model, {}
        after, moments = optimiser.step(begun.sent, model.sent, moments)
        return model.with_sent(after), moments

    @property
    def sums(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what participants send in place of changes."""
        return self.method.sums(self.federation.backbone, self.step.n_items)

    def _receive(self, model: Snapshot, sums: Tables, count: int, key: DrawKey) -> Snapshot:
        return server.receive(self.method, model, self.group.users, sums, count, key)

    def _by_method(self, public: Tables) -> Tables:
        """What the method makes of the mean; items that arrive after the step's training are not there for it."""
        known = len(next(iter(public.values()))) if self.cold_items is None else self.step.old_items
        mean = {name: table[:known] for name, table in public.items()}
        made = checks.checked_tables(self.method, "aggregate", self.method.aggregate(mean), mean)
        return made if self.cold_items is None else {name: torch.cat([table, public[name][known:]])
                                                     for name, table in made.items()}

    def _by_weight(self, round_: int) -> dict[float, int]:
        """How many of the round's participants have each weight in the mean."""
        weights = self.weights(round_)
        if weights is None or not self.federation.server.upload_noise:
            return {1.0: self.group.count}
        values, counts = weights[self.group.users].unique(return_counts=True)
        return dict(zip(values.tolist(), counts.tolist()))

    def _answer(self, round_: int, uploads: Tables) -> Tables:
        return self._delivered(server.answers(self.method, round_, self.group.users, uploads))

    def _delivered(self, answers: Tables) -> Tables:
        """The server's answers, once the participants here keep them."""
        server.keep(self.method, answers, self.group.users, self.step.n_users)
        self.answered = tuple(dict.fromkeys((*self.answered, *answers)))
        return answers

    def with_arrivals(self, model: Snapshot) -> Snapshot:
        """A model once items that arrive after the step's training have their rows, and users who do have made their
        private parameters."""
        model = model if self.cold_items is None else self.cold_items.with_arrivals(model)
        return model if self.cold_start is None else self.cold_start.with_arrivals(model)

    def require_finite(self, unit: int, loss: float, model: Snapshot, round_: int) -> None:
        require_finite(loss, model, self.federation, self.step.n_items, self.key(unit, round_))

    def validate(self, unit: int, model: Snapshot, round_: int) -> float:
        f = self.federation
        return f.population.mean(self.protocol.validate(model, round_), f.evaluation.valid_metric)

    def best(self, unit: int, model: Snapshot, round_: int, best: Best) -> Best:
        """This round as the best so far, with the method's state after it."""
        return Best(model, round_, dict(self.federation.method.client_state),
                    dict(self.federation.method.server_state))

    def test(self, unit: int, best: Best) -> tuple[list, list]:
        """Row R[t, .] of the step's best model, under the method's state of that round; and what is analysed with
        it."""
        method = self.federation.method
        state = dict(method.client_state), dict(method.server_state)
        method.client_state, method.server_state = dict(best.client_state), dict(best.server_state)
        result = self.protocol.test(best.model, best.round)
        method.client_state, method.server_state = state
        return result

    def participation(self) -> dict[str, int]:
        dropped = {"dropped": self.group.dropped} if self.attendance.dropout else {}
        return {"participants": self.group.count, **dropped}

    def sent(self, unit: int, update: Update, round_: int, last: bool) -> dict[str, int]:
        """Bytes that each participant sends and receives in a round; and, where new users or items arrive after a
        step's ``last`` round, what clients send and receive for them, all together."""
        model = update.model
        shared = bytes_of(model.sent)
        broadcast = bytes_of(self.method.broadcast)
        sent, answered = (bytes_of({name: values[:1] for name, values in extra.items()})
                          for extra in (update.uploads, update.answers))
        down = shared + broadcast + answered + bytes_of({name: table[0] for name, table in model.personalised.items()})
        if round_ == 0 and self.method.downloads_previous_model():
            down += bytes_of({name: table[:self.step.old_items] for name, table in model.public.items()})
        new = self.cold_start.count if last and self.cold_start is not None else 0
        arrived = {"bytes_down_new": new * shared} if self.federation.server.fold_in else {}
        if self.federation.server.cold_items == "fold_in":
            fitted = self.cold_items.sent if last and self.cold_items is not None else 0
            arrived = {"bytes_up_new": fitted, "bytes_down_new": new * shared + fitted}
        if self.method.trains != "clients":
            return {"bytes_up": 0, "bytes_down": 0, **arrived}
        if shapes := self.sums:
            summed = sum(math.prod(shape) for shape in shapes.values()) * model.item_vectors.element_size()
            down += summed if self.method.overrides("receive") else 0
            return {"bytes_up": summed + sent, "bytes_down": down, **arrived}
        return {"bytes_up": shared + sent, "bytes_down": down, **arrived}

    def more(self, unit: int, model: Snapshot, round_: int, validated: bool) -> dict[str, float]:
        return {**self.federation.backbone.diagnostics(model.public),
                **(self.protocol.extra(model, round_) if validated else {})}

    def analyse(self, progress: Progress, model: Snapshot, best: Best, ended: bool) -> list:
        """How the step has moved users and items, after its first and its last round."""
        f = self.federation
        if self.earlier is None or progress.round and not ended:
            return []
        drift = Drift(f.backbone, self.step, self.earlier, progress.previous, f.drift_sample(self.step))
        rows = [] if progress.round else drift.of_users(model)
        return rows + drift.of_items(best.model, f.population.all_reduce) if ended else rows

    def state(self, update: Update) -> dict[str, Any]:
        """What the run carries besides the model: the method's state, what of it are the server's answers, and what the
        server's optimiser and malicious clients remember."""
        attack = self.federation.attack
        return {**self._of_method(), "server_moments": update.moments,
                "attack_state": {} if attack is None else dict(attack.state)}

    def _of_method(self) -> dict[str, Any]:
        method = self.federation.method
        checks.check_state(method)
        return {"client_state": dict(method.client_state), "server_state": dict(method.server_state),
                "answered": self.answered}

    def end(self, progress: Progress) -> Progress:
        """The progress after the step, with whose best model the method makes its memories for the next one. With
        ``init_from=best`` the method goes on from its state of that round, too."""
        f, step = self.federation, self.step
        if f.server.init_from == "best":
            f.method.client_state = dict(progress.best.client_state)
            f.method.server_state = dict(progress.best.server_state)
        trained = (step.train.lengths > 0).nonzero().flatten()
        f.method.end_step(step.training, progress.best.model, f.backbone, trained, self.key(step.index, 0))
        best = progress.best.model  # while the next step begins no table is held that it does not need
        from_best = f.server.init_from == "best" or f.method.trains == "nobody"
        return replace(progress, step=step.index + 1, round=0, trained=False, previous=best,
                       model=best if from_best else progress.model, **self._of_method())

    def key(self, unit: int, round_: int) -> DrawKey:
        return DrawKey(self.federation.seed, unit, round_)

    def _choose_participants(self, progress: Progress) -> None:
        f = self.federation
        self.group = f.population.participants(self.step, self.attendance, f.seed, progress.round)
        if self.malicious is not None:
            self.group = self.malicious.join(self.group, progress.round)
        self.work = [Work(training, self.protocol.chunks(alike, progress.round, progress.model) if len(alike) else [])
                     for training, alike in self._by_epochs(self.group.users, progress.round)]

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
        if server.weighting == "uniform" or self.sums:
            return None
        return self.protocol.lengths(round_).to(getattr(torch, server.precision))


def begin_step(f: Federation, step: Step, progress: Progress) -> Progress:
    """Begin a step: rows for its new users and items, and the method's preparations."""
    method, step = f.acting_in(step), f.as_trained_on(step)
    start = Snapshot({}, {}) if method.restarts else progress.model
    new = replace(step, old_users=0, old_items=0) if method.restarts else step
    model = grow(start, f.backbone, f.seed, new, getattr(torch, f.server.precision), f.device, method)
    method.client_state |= {name: server.with_new_users(method.client_state[name], step.n_users)
                            for name in progress.answered if name in method.client_state}
    if step.index == f.first_step:
        method.server_state = {**method.server_state, **method.new_server_state(f.seed, model.public)}
    if step.index > 0:
        method.begin_step(step.training, model, f.backbone)
        if f.server.reset_private and method.trains != "nobody":
            model = reset_private(model, f.backbone, f.seed, (step.train.lengths > 0).nonzero().flatten())
    strategy = Strategy.CENTRAL if method.trains == "server" else training_of(f, step, model).strategy
    return replace(progress, model=model, best=replace(progress.best, model=model), previous=progress.best.model,
                   strategies=(*progress.strategies, strategy.recorded))


def most_rounds(f: Federation, curve: Iterable[Mapping[str, Any]]) -> int:
    """The most rounds that a client took part in, given a run's rows, one per round."""
    steps = [f.as_trained_on(step) for step in f.stream.steps]  # data of earlier ones too may let a client take part
    taken = torch.zeros(steps[-1].n_users, dtype=torch.int64)
    for row in curve:
        if f.acting_in(steps[row["step"]]).trains == "nobody":
            continue
        taken[f.server.attendance.of(steps[row["step"]], f.seed, row["round"]).users] += 1
    return int(taken.max())


def training_of(f: Federation, step: Step, model: Snapshot) -> Training:
    """How a step's clients are trained; ``model`` as for ``choose_strategy``."""
    method, backbone = f.acting_in(step), f.backbone_in(step.index)
    strategy = choose_strategy(backbone, method, model, f.local, sessions=bool(step.sessions))
    return Training(backbone, method, f.local, strategy, f.server.protection, f.server.init == "per_client",
                    epochs=f.local.local_epochs, keeps=f.server.single_updates is not None)
