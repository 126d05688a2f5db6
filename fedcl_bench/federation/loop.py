"""The federated continual loop, top to bottom: steps, rounds, participants, local training, aggregation, evaluation."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import Tensor

from .. import contract
from ..backbone import Backbone, Tables
from ..data.stream import Step, Stream
from ..errors import RunFailed, UserError
from ..evaluation.drift import analyse
from ..evaluation.ranking import EvaluationSettings, UserScores, parse_metric
from ..method import DrawKey, Method, NoSettings
from ..model import Snapshot
from ..ops.memory import keep_freed_blocks
from ..parallel import workers
from ..sampling import LocalSettings
from ..settings import setting
from ..stats.clip_noise import LAPLACE, MECHANISMS, Protection
from . import kinds
from .growth import grow, reset_private
from .population import Together
from .protocols import Lists, SessionSteps
from .round import Trained, train_round
from .server import aggregate


@dataclass(frozen=True)
class FederationSettings:
    """What the server does (F3CRec, section 5.1 and its released code)."""

    rounds: int = setting(100, "most rounds per block", low=1)
    patience: int = setting(30, "rounds without a better validation metric before a block ends; 0: it never ends early",
                            low=0)
    evaluate_every: int = setting(1, "rounds from one validation to the next; a block's last round is always validated."
                                  " Patience still counts rounds, and a block ends early only in a validated one", low=1)
    best_round: str = setting("first", "of rounds with the same validation metric the first (F3CRec) or the latest "
                              "(PFedRec, GPFedRec) counts as the best", choices=("first", "latest"))
    client_ratio: float = setting(1.0, "share of the clients with data that take part in a round", above=0.0, high=1.0)
    upload_noise: float = setting(0.0, "scale of the noise on every uploaded number: b of Laplace noise, the standard "
                                  "deviation of Gaussian", low=0.0)
    upload_mechanism: str = setting(LAPLACE, "distribution of that noise, and with it the norm of upload_clip: L1 with "
                                    "laplace, L2 with gaussian", choices=MECHANISMS)
    upload_clip: float = setting(0.0, "a client's change of all public parameters in a round is scaled down to this "
                                 "norm; 0: never. With noise it bears a formal guarantee", low=0.0)
    weighting: str = setting("uniform", "all clients count alike in the mean, or by their training interactions",
                             choices=("uniform", "interactions"))
    reset_private: bool = setting(False, "clients with data in a block start it from untrained private parameters, as "
                                  "the released FedNCF and PFedRec code of F3CRec does")
    init_from: str = setting("last", "a block starts from the previous one's last round (released code) or its best "
                             "validation round", choices=("last", "best"))
    precision: str = setting("float32", "floating-point numbers of the training", choices=("float32", "float64"))
    init: str = setting("server", "all clients begin the first round with the server's random public parameters "
                        "(Algorithm 1 of FCUCR), or each with its own (FCUCR's released code)",
                        choices=("server", "per_client"))
    tested_round: str = setting("best", "the model tested is that of the best validation round, or of the last round",
                                choices=("best", "last"))

    @property
    def protection(self) -> Protection:
        """What clients do to their uploads."""
        return Protection(self.upload_clip, self.upload_noise, self.upload_mechanism)


def idle_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings without effect, and why, given the values of all settings."""
    idle = {}
    if not settings["upload_noise"] and not settings["upload_clip"]:
        idle["upload_mechanism"] = "without upload_noise or upload_clip"
    if settings["stream"] != "sessions" or settings["split_file"]:
        idle |= dict.fromkeys(("init", "tested_round"), "without stream=sessions")
    return idle


@dataclass(frozen=True)
class Progress:
    """All a run carries from one round to the next: saving it and loading it back changes no number.

    Attributes:
        step, round: the step being trained and the rounds done in it.
        trained: whether the step's rounds are over and its tests are in ``tests``.
        model: tables after the last round; best: those of the round that is tested; previous: ``best`` of the step
            before.
        best_value, stale: best validation metric and rounds since it.
        client_state, server_state: the method's.
        curve: one row per round of every step so far; ``valid`` is nan where the round was not validated.
        tests: (trained step, tested step, per-user scores).
        analysis: (step, kind, ids of users or items, values), see ``analysis.py``.
        best_at, best_client_state, best_server_state: the round of ``best``, and the method's state after it: what a
            method keeps from round to round belongs to that round's model.
    """

    step: int = 0
    round: int = 0
    trained: bool = False
    model: Snapshot = field(default_factory=lambda: Snapshot({}, {}))
    best: Snapshot = field(default_factory=lambda: Snapshot({}, {}))
    previous: Snapshot = field(default_factory=lambda: Snapshot({}, {}))
    best_value: float = -1.0
    stale: int = 0
    client_state: dict[str, Tensor] = field(default_factory=dict)
    server_state: dict[str, Tensor] = field(default_factory=dict)
    curve: tuple[dict[str, Any], ...] = ()
    tests: tuple[tuple[int, int, UserScores], ...] = ()
    analysis: tuple[tuple[int, str, Tensor, Tensor], ...] = ()
    best_at: int = 0
    best_client_state: dict[str, Tensor] = field(default_factory=dict)
    best_server_state: dict[str, Tensor] = field(default_factory=dict)

    def best_round(self, step: int, which: str) -> int:
        """The number, from 1, of a step's best validation round; of equal ones the ``first`` or the ``latest``."""
        values = {row["round"] + 1: row["valid"] for row in self.curve if row["step"] == step
                  and not math.isnan(row["valid"])}
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
    together: Together = Together()

    def check(self) -> None:
        """Raise UserError if a setting does not fit the data."""
        name, k = parse_metric(self.evaluation.valid_metric)
        for step in self.stream.steps:
            if max(k, *self.evaluation.topk) > step.n_items:
                raise UserError(f"setting 'topk'/'valid_metric': found {max(k, *self.evaluation.topk)}, accepted: at "
                                f"most the number of items, {step.n_items} in block {step.index}.")
            for split in ("valid", "test"):
                if len(step.split(split).values) == 0:
                    raise UserError(f"block {step.index} has no {split} interaction: every user has fewer than 3 rows "
                                    f"in it; use fewer blocks (--set blocks=N).")
            self._check_negatives(step)
        ranked = self.evaluation.sampled_candidates
        if self.evaluation.candidates == "sampled" and max(k, *self.evaluation.topk) > ranked:
            raise UserError(f"setting 'topk'/'valid_metric': found {max(k, *self.evaluation.topk)}, accepted: at most "
                            f"sampled_candidates, {ranked}; the item to find would always be among so many.")
        self.check_kinds()
        self._check_protection()
        contract.check_declaration(self.backbone)
        self.method.check(self.stream)

    def check_kinds(self) -> None:
        """Raise UserError unless backbone, method and stream go together; see ``kinds.py``."""
        kinds.check(self.backbone, self.method, bool(self.stream.steps[0].sessions), self.local, self.server.init)

    def _check_protection(self) -> None:
        """What clients do to their uploads must go with what the server makes of them."""
        noise, clip = self.server.upload_noise > 0.0, self.server.upload_clip > 0.0
        if noise and self.server.weighting != "uniform":
            raise UserError("setting 'upload_noise': found a scale above 0 with weighting=interactions, accepted: "
                            "noise with weighting=uniform.")
        if not clip:
            return
        clipped = f"setting 'upload_clip': found {self.server.upload_clip:g} with"
        if self.server.weighting != "uniform":
            raise UserError(f"{clipped} weighting=interactions, whose weights would give the clients' numbers of "
                            f"interactions away; accepted: weighting=uniform.")
        if self.server.init == "per_client":
            raise UserError(f"{clipped} init=per_client, whose first uploads are whole tables and not changes of the "
                            f"server's; accepted: --set init=server.")
        if self.backbone.serves_tables:
            raise UserError(f"{clipped} the backbone '{self.backbone.name}', whose clients send whole tables and not "
                            f"changes of the server's; accepted: 0, or a backbone whose server averages.")

    def _check_negatives(self, step: Step) -> None:
        """Every client must have enough items to draw negatives from."""
        needed = self.local.negatives if self.local.negative_draw == "distinct" else 1
        kinds = ("train", "valid", "test") if self.local.negative_pool == "untouched" else ("train",)
        lengths = sum(step.split(kind).lengths for kind in kinds)
        for user in (lengths > step.n_items - needed).nonzero().flatten().tolist():
            left = step.n_items - len(torch.cat([step.split(kind).of(user) for kind in kinds]).unique())
            if left < needed and step.train.lengths[user] > 0:
                raise UserError(f"block {step.index}: user {self.stream.user_tokens[user]} has interacted with all but "
                                f"{left} of the {step.n_items} items, and {needed} must be left to draw "
                                f"negatives from.")


def _bytes(*kinds: Tables) -> int:
    return sum(table.numel() * table.element_size() for tables in kinds for table in tables.values())


Observer = Callable[[DrawKey, Snapshot, Trained], None]


def run(federation: Federation, progress: Progress | None = None, observe: Observer | None = None
        ) -> Iterator[Progress]:
    """Run a federation, yielding the progress after every round and after every step.

    Call ``federation.check()`` first.

    Args:
        progress: continue from here; the numbers are those of an uninterrupted run.
        observe: called in every round with its key, what the server sent, and every chunk's clients after training.

    Raises:
        RunFailed: when the loss or a parameter is no longer finite.
    """
    keep_freed_blocks()
    with workers():
        yield from _steps(federation, progress or Progress(), observe)


def acting_in(f: Federation, step: Step) -> Method:
    """The method, or one that does nothing in the steps before it acts."""
    return f.method if step.index >= f.method.first_step else Method(NoSettings())


def protocol_of(f: Federation, step: Step, acting: Method) -> Lists | SessionSteps:
    """What the step's participants train on, and how a model is tested."""
    return (SessionSteps if step.sessions else Lists)(f, step, acting)


def open_step(f: Federation, step: Step, acting: Method, progress: Progress) -> Progress:
    """Begin a step: rows for its new users and items, and the method's preparations."""
    start = progress.best if f.server.init_from == "best" else progress.model
    model = grow(start, f.backbone, f.seed, step, getattr(torch, f.server.precision), f.device, acting)
    if step.index > 0:
        acting.begin_step(step, model, f.backbone)
        if f.server.reset_private:
            model = reset_private(model, f.backbone, f.seed, (step.train.lengths > 0).nonzero().flatten())
    return replace(progress, model=model, best=model, previous=progress.best, best_value=-1.0, stale=0)


def _steps(federation: Federation, progress: Progress, observe: Observer | None) -> Iterator[Progress]:
    f, method, backbone, device = federation, federation.method, federation.backbone, federation.device
    dtype = getattr(torch, f.server.precision)
    method.client_state, method.server_state = dict(progress.client_state), dict(progress.server_state)

    for step in f.stream.steps[progress.step:]:
        step = step.to(device)
        earlier = f.stream.steps[step.index - 1].to(device) if step.index > 0 else None
        trained = (step.train.lengths > 0).nonzero().flatten()
        acting = acting_in(f, step)
        protocol = protocol_of(f, step, acting)
        chunks = None
        if progress.round == 0 and not progress.trained:
            progress = open_step(f, step, acting, progress)

        while not progress.trained:
            # One round (F3CRec, Algorithm 1): broadcast, local training, upload, aggregation, validation.
            began = time.perf_counter()
            round_ = progress.round
            if chunks is None or f.server.client_ratio < 1.0 or protocol.changes_every_round:
                users, uploading = f.together.participants(step, f.server.client_ratio, f.seed, round_)
                chunks = protocol.chunks(users, round_, progress.model) if len(users) else []
            weights = protocol.lengths(round_).to(dtype) if f.server.weighting == "interactions" else None
            acting.begin_round(step, round_, backbone)
            model, loss, uploads = train_round(
                chunks, progress.model, backbone, acting, f.local, f.seed, step.index, round_, weights,
                round_ == 0 and f.server.init == "per_client", f.server.protection,
                observe and partial(observe, DrawKey(f.seed, step.index, round_), progress.model),
                None if f.together.everybody else f.together.sum)
            model = aggregate(backbone, model, users, f.server.protection, f.seed, step.index, round_, uploading)
            uploaded = _bytes(model.public, model.dense)
            model = replace(model, public=contract.checked_aggregate(acting, model.public))
            received = contract.checked_answers(acting, acting.end_round(round_, users, uploads), len(users))
            for name, rows in received.items():
                old = method.client_state.get(name)
                old = rows.new_zeros(step.n_users, *rows.shape[1:]) if old is None else old
                method.client_state[name] = old.index_copy(0, users, rows)
            trained_at = time.perf_counter()

            require_finite(loss, model, f, step, round_)
            out_of_rounds = round_ + 1 >= f.server.rounds
            validates = out_of_rounds or (round_ + 1) % f.server.evaluate_every == 0
            value = math.nan  # neither better nor equal
            if validates:
                valid = protocol.validate(model, round_)
                value = round(f.together.mean(valid, f.evaluation.valid_metric), f.evaluation.valid_decimals)
            better = value > progress.best_value
            equal = value == progress.best_value and f.server.best_round == "latest"
            stale = 0 if better else progress.stale + 1
            last = out_of_rounds or (validates and 0 < f.server.patience <= stale)
            state = dict(method.client_state), dict(method.server_state)
            best = model, round_, *state
            if not (better or equal or f.server.tested_round == "last"):
                best = progress.best, progress.best_at, progress.best_client_state, progress.best_server_state
            tests, found = [], []
            if last:
                method.client_state, method.server_state = map(dict, best[2:])
                tests, found = protocol.test(*best[:2])
                method.client_state, method.server_state = map(dict, state)
            shifts = analyse(backbone, step, earlier, progress.previous, model if round_ == 0 else None,
                             best[0] if last else None, f.together.sum)
            sent, answered = (_bytes({name: values[0] for name, values in extra.items()})
                              for extra in (uploads, received))
            downloaded = uploaded + answered + _bytes({name: table[0] for name, table in model.served.items()})
            if round_ == 0 and acting.downloads_previous_model():
                downloaded += _bytes({name: table[:step.old_items] for name, table in model.public.items()})
            row = {"step": step.index, "round": round_, "participants": uploading, "loss": loss, "valid": value,
                   "bytes_up": uploaded + sent, "bytes_down": downloaded, "train_seconds": trained_at - began,
                   "evaluate_seconds": time.perf_counter() - trained_at, **backbone.diagnostics(model.public),
                   **(protocol.extra(model, round_) if validates else {})}
            progress = replace(
                progress, round=round_ + 1, trained=last, model=model, best=best[0], best_at=best[1],
                best_client_state=best[2], best_server_state=best[3],
                best_value=value if better else progress.best_value,
                stale=stale, curve=(*progress.curve, row), tests=(*progress.tests, *tests),
                analysis=(*progress.analysis, *shifts, *found), client_state=state[0], server_state=state[1])
            yield progress

        method.end_step(step, progress.best, backbone, trained, DrawKey(f.seed, step.index))
        progress = replace(progress, step=step.index + 1, round=0, trained=False,
                           client_state=dict(method.client_state), server_state=dict(method.server_state))
        yield progress


def require_finite(loss: float, model: Snapshot, f: Federation, step: Step, round_: int) -> None:
    """Raise RunFailed if the loss or any parameter is not finite."""
    extremes = (torch.stack(torch.aminmax(table)) for table in model.tables() if table.numel())  # nan if one is nan
    if not (math.isfinite(loss) and all(bool(torch.isfinite(ends).all()) for ends in extremes)):
        lr = f.backbone.settings.lr
        rates = ", ".join(f"{name} {rate:g}" for name, rate in f.backbone.learning_rates(step.n_items, round_).items())
        raise RunFailed(f"training diverged in block {step.index}, round {round_ + 1}: the loss ({loss:g}) or a "
                        f"parameter is not finite.\nlr={lr:g} (learning rates: {rates}); "
                        f"try a smaller one with --set lr={lr / 10:g}.")
