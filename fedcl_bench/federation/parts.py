"""The parts of a run, all fixed before it starts, and the progress that it carries from round to round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Callable

import torch
from torch import Tensor

from ..plugin import checks
from ..plugin.attack import Attack
from ..plugin.backbone import Backbone
from ..data.stream import Step, Stream
from ..plugin.silo import DomainMethod, ModuleBackbone
from ..core.errors import Incompatible, UserError
from ..evaluation.metrics import DEFAULT, RATING_ERRORS, EvaluationSettings, parse_metric
from ..evaluation.ranking import UserScores, in_sample
from ..plugin.method import Method, NoSettings
from ..plugin.metric import Metric
from ..plugin.state import Snapshot
from ..plugin.local_settings import LocalSettings
from ..rng import Tables
from . import compatibility
from .client_sampling import Attendance
from .malicious import Malicious, targets_of
from .server import Population, RoundSums
from .settings import FederationSettings as FederationSettings

STAGE = "stage"  # of a round: the number of its stage, where a method has several


@dataclass(frozen=True)
class Best:
    """The round of a step whose model is tested."""

    model: Snapshot = field(default_factory=lambda: Snapshot({}, {}))  # its tables
    round: int = 0  # its number, from 0
    # The method's after it: what a method keeps from round to round belongs to that round's model.
    client_state: dict[str, Tensor] = field(default_factory=dict)
    server_state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PartialRound:
    """How far a round is whose clients hold many users, so that a run goes on from within it."""

    # As a ``Progress``'s, after the batches so far.
    model: Snapshot
    server_state: dict[str, Tensor]
    # Of each model that trains in the round, in their order: the number of its first domain, its batches so far, the
    # sum of their samples' losses, and the seconds that they took.
    epochs: tuple[tuple[int, int, float, float], ...] = ()


@dataclass(frozen=True)
class Update:
    """What a round has made before it is validated."""

    # Mean local loss, and time of training, of each unit that is validated and took part.
    loss: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    model: Snapshot = field(default_factory=lambda: Snapshot({}, {}))  # after the server has aggregated
    state: dict[str, Tensor] = field(default_factory=dict)  # what silos' optimisers remember
    moments: dict[str, Tensor] = field(default_factory=dict)  # what the server's optimiser remembers
    sent: dict[int, dict[str, int]] = field(default_factory=dict)  # bytes of each silo
    # Of the clients' changes, before the server has aggregated, whose training ``began`` then.
    sums: RoundSums | None = None
    began: float = 0.0
    # Of the method, of clients of one user.
    uploads: dict[str, Tensor] = field(default_factory=dict)
    answers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """All a run carries from one round to the next: saving it and loading it back changes no number."""

    # The step being trained and the rounds done in it.
    step: int = 0
    round: int = 0
    trained: bool = False  # whether the step's rounds are over and its tests are in ``tests``
    model: Snapshot = field(default_factory=lambda: Snapshot({}, {}))  # tables after the last round
    best: Best = field(default_factory=Best)  # the round that is tested
    previous: Snapshot = field(default_factory=lambda: Snapshot({}, {}))  # that one's tables in the step before
    # The method's state.
    client_state: dict[str, Tensor] = field(default_factory=dict)
    server_state: dict[str, Tensor] = field(default_factory=dict)
    # One row per round of every step so far; ``valid`` is nan where the round was not validated.
    curve: tuple[dict[str, Any], ...] = ()
    tests: tuple[tuple[int, int, UserScores], ...] = ()  # (trained step, tested step, per-user scores)
    # (step, kind, ids of users or items, values), see ``evaluation/drift.py``.
    analysis: tuple[tuple[int, str, Tensor, Tensor], ...] = ()
    strategies: tuple[str, ...] = ()  # how clients were trained in every step so far (see ``training/strategies.py``)
    # The names in ``client_state`` that the server has answered (see ``Method.end_round``).
    answered: tuple[str, ...] = ()
    # What the server's optimiser remembers from the step's rounds so far; of domains also ``sent/NAME``, what they were
    # sent last.
    server_moments: dict[str, Tensor] = field(default_factory=dict)
    attack_state: dict[str, Tensor] = field(default_factory=dict)  # what the malicious clients remember
    fraction_done: float = 0.0  # the share of the next round that is done; only shown, and not saved
    # Gives how far that round is, if clients hold many users; it looks at what is being trained, so it is asked before
    # the next progress is.
    within: Callable[[], PartialRound] | None = None

    @property
    def best_value(self) -> float:
        """The best validation metric of the step being trained; -1 before the first."""
        values = [row["valid"] for row in self.curve if row["step"] == self.step and not math.isnan(row["valid"])]
        return max(values, default=-1.0)

    def best_round(self, step: int, which: str) -> int:
        """The number, from 1, of a step's best validation round; of equal ones the ``first`` or the ``latest``."""
        stage = max(row.get(STAGE, 0) for row in self.curve)  # the last one's best is tested
        values = {row["round"] + 1: row["valid"] for row in self.curve if row["step"] == step
                  and row.get(STAGE, 0) == stage and not math.isnan(row["valid"])}
        best = [number for number, value in values.items() if value == max(values.values())]
        return best[0 if which == "first" else -1]


@dataclass(frozen=True)
class Federation:
    """One run's parts, all fixed before it starts."""

    stream: Stream
    backbone: Backbone
    method: Method
    local: LocalSettings
    server: FederationSettings
    evaluation: EvaluationSettings
    seed: int
    device: torch.device = torch.device("cpu")
    population: Population = Population()
    metrics: tuple[Metric, ...] = DEFAULT  # of its tests; the one that validates is among them
    # Of a stream of sessions, ``central`` if one client holds all; of domains as the setting says (see
    # ``cross_silo.py``).
    topology: str = "federated"
    # Told of every test, (trained unit, tested unit, scores), which then has ranked lists; None: nobody.
    on_test: Callable[[int, int, UserScores], None] | None = None
    attack: Attack | None = None  # of malicious clients; None: all are honest

    def __post_init__(self):
        if isinstance(self.method, DomainMethod) and isinstance(self.backbone, ModuleBackbone):
            self.method.backbone = self.backbone
        for plugin in (self.method, self.backbone) if self.stream.item_features is not None else ():
            if plugin.needs_features:
                plugin.features = self.stream.item_features.to(self.device)
        if self.explicit:  # no negatives are drawn
            object.__setattr__(self, "local", replace(self.local, negatives=0))

    @property
    def explicit(self) -> bool:
        """Whether ratings are predicted."""
        return not isinstance(self.backbone, ModuleBackbone) and self.backbone.explicit

    @property
    def cross_silo(self) -> bool:
        """Whether clients hold many users each: they are domains, or one holds all sessions."""
        return self.topology == "central" or bool(self.stream.domains)

    @property
    def validation(self) -> tuple[Metric, int]:
        """The metric that chooses the best round, and its list length."""
        name, k = parse_metric(self.evaluation.valid_metric)
        return next(metric for metric in self.metrics if metric.name == name), k

    @property
    def topk(self) -> list[int]:
        """List lengths of tests, ascending: those asked for, and that of the validation."""
        return sorted({*self.evaluation.topk, parse_metric(self.evaluation.valid_metric)[1]} - {0})

    def evaluated(self, step: Step) -> Tensor | None:
        """Whether each of a step's users is validated and tested, bool; None: all are."""
        return self._in_sample("evaluated users", step, self.evaluation.evaluate_users)

    def drift_sample(self, step: Step) -> Tensor | None:
        """Whether each of a step's users is one by whom changes of ranks are measured, bool; None: nobody is."""
        return self._in_sample("users of drift", step, self.evaluation.drift_users)

    def _in_sample(self, purpose: str, step: Step, about: int) -> Tensor | None:
        clients = self.population.clients(self.stream)
        return in_sample(self.seed, purpose, step.n_users, about, clients, self.device) if about else None

    def acting_in(self, step: Step) -> Method:
        """The method, or one that does nothing in the steps before it acts."""
        return self.method if step.index >= self.first_step else Method(NoSettings())

    def as_trained_on(self, step: Step) -> Step:
        """A step as its clients train on it: as they know it, and with all earlier interactions before those of the
        step, if the method trains on ``history``."""
        step = self.server.as_known(step)
        for earlier in reversed(self.stream.steps[:step.index]) if self.acting_in(step).history else ():
            step = replace(step, train=earlier.train.to(step.train.values.device).before(step.train))
        return step

    @property
    def first_step(self) -> int:
        in_sessions = self.method.acts_in_sessions and bool(self.stream.steps[0].sessions)
        return 0 if in_sessions else self.method.first_step

    @property
    def targets(self) -> Tensor:
        """The items that the attack promotes."""
        return targets_of(self.attack, self.stream.steps[0], self.seed).to(self.device)

    def malicious_in(self, step: Step) -> Malicious | None:
        """The malicious clients of a step as its clients know it; None if there are none."""
        if self.attack is None:
            return None
        malicious = Malicious(self.attack, step, self.server, self.seed, self.targets)
        return malicious if malicious.count else None

    def backbone_in(self, step: int) -> Backbone:
        """The backbone as the clients of a step (its number) train it: with ``lr_later``, if there is one, from step 1
        on. Backbones read their learning rates from their settings."""
        if step == 0 or not self.local.lr_later:
            return self.backbone
        later = type(self.backbone)(replace(self.backbone.settings, lr=self.local.lr_later))
        later.features = self.backbone.features
        return later

    def check(self) -> None:
        """Raise UserError if a setting does not fit the data."""
        longest, settings = self.topk[-1], "setting 'topk'/'valid_metric'"
        for unit, step in enumerate(self.stream.units()):
            where = self.stream.name_of(unit)
            if longest > step.n_items:
                raise UserError(f"{settings}: found {longest}, accepted: at most the number of items, {step.n_items} "
                                f"in {where}.")
            for split in ("valid", "test"):
                if len(step.split(split).values) == 0:
                    raise UserError(f"{where} has no {split} interaction{self._why_none(step)}.")
                self._check_sample(step, split, where)
            if not self.cross_silo and not self.explicit:
                self._check_negatives(step)
        ranked = self.evaluation.sampled_candidates
        if self.evaluation.candidates == "sampled" and longest > ranked:
            raise UserError(f"{settings}: found {longest}, accepted: at most sampled_candidates, {ranked}; the item to "
                            f"find would always be among so many.")
        compatibility.check(self.backbone, self.method, compatibility.StreamKind.of(self.stream), self.topology,
                            self.local, self.server)
        self._check_ratings()
        self._check_cold_items()
        self._check_arrivals()
        self._check_protection()
        self._check_attack()
        self._check_aggregator()
        self._check_server_optimiser()
        if not isinstance(self.backbone, ModuleBackbone):
            checks.check_declaration(self.backbone)
        self.method.check(self.stream.steps[0].training)

    def _why_none(self, step: Step) -> str:
        if int(sum(step.split(name).lengths for name in ("train", "valid", "test")).max()) > 2:
            return "; accepted: a split file that has some in every block"
        return ": every user has fewer than 3 rows in it" + ("; use fewer blocks (--set blocks=N)"
                                                              if len(self.stream.steps) > 1 else "")

    def _check_sample(self, step: Step, split: str, where: str) -> None:
        """Somebody who is evaluated must have something to find."""
        if self.cross_silo or (sample := self.evaluated(step)) is None:
            return
        having = step.split(split).lengths.to(sample.device) > 0
        if not bool((sample & having).any()):
            about = self.evaluation.evaluate_users
            raise UserError(f"setting 'evaluate_users': found {about}, accepted: 0, or more: of "
                            f"the {int(having.sum()):,} users with a {split} item in {where} the sample of seed "
                            f"{self.seed} has none.")

    def _check_ratings(self) -> None:
        """Ratings must be there if they are predicted, and their errors are of nothing else."""
        name = self.backbone.name
        if self.evaluation.valid_metric in RATING_ERRORS and not self.explicit:
            raise UserError(f"setting 'valid_metric': found {self.evaluation.valid_metric}, accepted: NAME@K with "
                            f"'{name}', which predicts no ratings with these settings; biasmf does with --set "
                            f"loss=squared_error.")
        if self.explicit and any(step.train.ratings is None for step in self.stream.steps):
            raise UserError(f"backbone '{name}' predicts ratings with these settings, and the stream has none; "
                            f"accepted: data with ratings (column rating in the table of every real client).")
        if self.explicit:
            compatibility.check_ratings(name, type(self.method))

    def _check_cold_items(self) -> None:
        """New items that arrive after a block's training need rows that nobody else changes."""
        cold, server = self.server.cold_items, self.server
        found = f"setting 'cold_items': found {cold}"
        if cold != "none" and not compatibility.has_shared_rows(self.backbone):
            raise Incompatible(f"{found}, accepted: none with '{self.backbone.name}', whose clients train all item "
                               f"rows or have some of their own.", "backbone", compatibility.has_shared_rows)
        if cold == "fold_in" and self.method.overrides("sums"):
            raise UserError(f"{found}, accepted: none, untrained, similar or popularity with method "
                            f"'{self.method.name}', whose clients send no changes of item rows.")
        if cold == "method" and not self.method.overrides("new_item_rows"):
            raise Incompatible(f"{found}, accepted: none, untrained, similar, popularity or fold_in with method "
                               f"'{self.method.name}', which makes no rows.", "method",
                               lambda cls: cls.new_item_rows is not Method.new_item_rows)
        if cold == "similar" and not self.stream.features:
            raise UserError(f"{found}, and the stream has no texts of items.")
        if cold == "fold_in" and (server.upload_noise or server.upload_clip or server.single_updates):
            raise UserError(f"{found} with upload_noise or upload_clip or an aggregator, which do not protect what "
                            f"fits new items; accepted: none, untrained, similar or popularity.")

    def _check_arrivals(self) -> None:
        """Somebody must be left to train in every block."""
        server = self.server
        for step in self.stream.steps[1:] if server.fold_in or server.cold_items != "none" else ():
            if server.fold_in and not len(Attendance(known_only=True).able(step)):
                raise UserError(f"setting 'fold_in': found {server.fold_in}, accepted: 0 with this stream; all users "
                                f"with training data in block {step.index} are new, so nobody is left to train.")
            if self.acting_in(step).trains != "nobody" and not len(server.attendance.able(self.as_trained_on(step))):
                raise UserError(f"setting 'cold_items': found {server.cold_items}, accepted: none with this stream; "
                                f"all items that those who train in block {step.index} have are new in it, so nobody "
                                f"is left to train.")

    def _check_protection(self) -> None:
        """What clients do to their uploads must go with what the server makes of them."""
        for name in ("upload_noise", "upload_clip"):
            if (found := getattr(self.server, name)) and self.method.overrides("sums"):
                raise UserError(f"setting '{name}': found {found:g}, accepted: 0 with method '{self.method.name}', "
                                f"whose clients send something else than their changes of public parameters.")
        if not self.server.upload_clip:
            return
        clipped = f"setting 'upload_clip': found {self.server.upload_clip:g} with"
        for each in self.server.disclosures:
            raise UserError(f"{clipped} {each.name}={each.value}, but {each.learns}, so that no guarantee holds; "
                            f"accepted: {each.accepted}, or no upload_clip.")
        if self.server.init == "per_client":
            raise UserError(f"{clipped} init=per_client, whose first uploads are whole tables and not changes of the "
                            f"server's; accepted: --set init=server.")
        if self.backbone.serves_tables:
            raise UserError(f"{clipped} the backbone '{self.backbone.name}', whose clients send whole tables and not "
                            f"changes of the server's; accepted: 0, or a backbone whose server averages.")

    def _check_aggregator(self) -> None:
        """An aggregator of single changes needs a server that has the mean to replace, and enough clients."""
        aggregator, what = self.server.single_updates, f"aggregator={self.server.aggregator}"
        if aggregator is None or self.cross_silo:
            return
        if self.method.overrides("aggregate_updates"):
            raise UserError(f"setting 'aggregator': found {self.server.aggregator}, accepted: mean with method "
                            f"'{self.method.name}', which aggregates single updates itself.")
        if self.method.overrides("sums"):
            raise UserError(f"setting 'aggregator': found {self.server.aggregator}, accepted: mean with method "
                            f"'{self.method.name}', whose server sees sums over clients alone.")
        compatibility.check_single_updates(self.backbone, what, self.server.init)
        for step in self.stream.steps if self.server.aggregator == "krum" else ():
            if self.acting_in(step).trains == "clients":
                aggregator.check(self._fewest_participants(step))

    def _fewest_participants(self, step: Step) -> int:
        """How many clients take part in a round of a step at least, the malicious ones among them."""
        attendance, step = self.server.attendance, self.as_trained_on(step)
        malicious, rounds = self.malicious_in(step), range(1 if attendance.complete else self.server.rounds)
        groups = (attendance.of(step, self.seed, round_) for round_ in rounds)
        return min((malicious.join(group, round_) if malicious else group).count
                   for round_, group in zip(rounds, groups))

    def _check_attack(self) -> None:
        """An attack's malicious clients must be fewer than honest ones and send what those send."""
        attack, share = self.attack, self.server.malicious
        if attack is None:
            return
        what = f"attack '{attack.name}'"
        if self.cross_silo or any(step.sessions for step in self.stream.steps):
            raise UserError(f"setting 'attack': found {attack.name}, accepted: none with sessions or domains; "
                            f"malicious clients go with stream=blocks and static.")
        if self.method.topology == "local":
            raise UserError(f"setting 'attack': found {attack.name}, accepted: none with method '{self.method.name}', "
                            f"whose clients upload nothing.")
        if share > (0.5 if attack.among_users else 1.0):
            most = "0.5 of all clients" if attack.among_users else "1, as many as the honest ones"
            raise UserError(f"setting 'malicious': found {share:g}, accepted: at most {most}; there would be more "
                            f"malicious clients than honest ones.")
        compatibility.check_single_updates(self.backbone, what, self.server.init)
        attack.check(self.stream.steps[0], self.backbone)
        neutral = {"upload_clip": 0.0, "upload_noise": 0.0, "cold_items": "none",
                   **({} if attack.among_users else {"weighting": "uniform"})}  # others have no interactions to count
        for name, accepted in neutral.items():
            if (value := getattr(self.server, name)) != accepted:
                raise UserError(f"setting '{name}': found {value}, accepted: {accepted} with {what}, whose malicious "
                                f"clients keep to no rule of honest ones.")
        if self.method.overrides("sums") or any(self.method.uploads(self.backbone, round_) for round_ in (0, 1)):
            raise UserError(f"{what}: found method '{self.method.name}', accepted: methods whose clients send changes "
                            f"of public parameters alone; what malicious ones would send besides is not defined.")

    def _check_server_optimiser(self) -> None:
        """A server's optimiser needs one mean of what all were sent."""
        found = f"setting 'server_optimiser': found {self.server.server_optimiser}, accepted: none"
        if self.server.optimiser is None or self.topology != "federated":
            return
        if self.cross_silo:
            if not compatibility.is_plain_mean(self.backbone, self.method):
                raise UserError(f"{found} with '{self.method.name}' on '{self.backbone.name}', whose domains do not "
                                f"all receive one mean of their uploads in one stage of rounds.")
            if len(self.stream.steps) > 1:
                raise UserError(f"{found} with domains in blocks, which begin a block with models of their own, so "
                                f"that their mean change has no beginning; or --set domain_blocks=1.")
        elif self.server.init == "per_client":
            raise UserError(f"{found} with init=per_client, whose first uploads are no changes of the server's tables; "
                            f"or --set init=server.")
        elif self.backbone.overrides("serve"):
            raise Incompatible(f"{found} with '{self.backbone.name}', whose server does more than a mean.", "backbone",
                               lambda cls: cls.serve is Backbone.serve)
        elif not any(table.numel() for table in (*self.backbone.new_rows(self.seed, range(0), range(1))[0].values(),
                                                 *self.backbone.new_dense(self.seed).values())):
            raise UserError(f"{found} with method '{self.method.name}', whose clients share no parameters.")

    def _check_negatives(self, step: Step) -> None:
        """Every client must have enough items to draw negatives from, among those that its block trains on."""
        step = self.as_trained_on(step)
        n_items = step.old_items if step.index and self.server.cold_items != "none" else step.n_items
        needed = max(self.local.distinct, 1)
        kinds = ("train", "valid", "test") if self.local.negative_pool == "untouched" else ("train",)
        lengths = sum(step.split(kind).lengths for kind in kinds)
        for user in (lengths > n_items - needed).nonzero().flatten().tolist():
            had = torch.cat([step.split(kind).of(user) for kind in kinds]).unique()
            left = n_items - int((had < n_items).sum())
            if left < needed and step.train.lengths[user] > 0:
                known = f"all but {left} of the {n_items}" if left else f"all {n_items}"
                raise UserError(f"block {step.index}: user {self.stream.user_tokens[user]} has interacted with {known} "
                                f"items, and {needed} must be left to draw negatives from.")


def bytes_of(*kinds: Tables) -> int:
    return sum(table.numel() * table.element_size() for tables in kinds for table in tables.values())


def numbers_at_once(f: Federation) -> int:
    """The numbers that clients compute together in a local batch, about, from settings and data alone. Of clients of
    one user: their samples of a block in a local epoch, each with a vector. Of clients of many users: a batch of
    histories, each position with a vector."""
    dim = getattr(f.backbone.settings, "dim", 32)
    if f.cross_silo:
        longest = getattr(f.backbone.settings, "max_length", 1)
        histories = max((len(step.train.values) for step in f.stream.steps), default=0)
        return min(f.local.batch_size, histories) * longest * dim
    samples = max((len(step.train.values) for step in f.stream.steps), default=0) * (1 + f.local.negatives)
    return samples * dim
