"""The federated continual loop, top to bottom: steps, rounds, participants, local training, aggregation, evaluation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, Iterator

import torch
from torch import Tensor

from . import draws
from .backbone import Backbone, Tables
from .errors import RunFailed, UserError
from .evaluation import EvaluationSettings, UserScores, parse_metric, rank_all
from .local import LocalSettings, make_chunks, train_round
from .memory import keep_freed_blocks
from .method import Method, NoSettings, Snapshot
from .parallel import workers
from .settings import setting
from .stream import Step, Stream


@dataclass(frozen=True)
class FederationSettings:
    """What the server does (F3CRec, section 5.1 and its released code)."""

    rounds: int = setting(100, "most rounds per block", low=1)
    patience: int = setting(30, "rounds without a better validation metric before a block ends", low=1)
    client_ratio: float = setting(1.0, "share of the clients with data that take part in a round", above=0.0, high=1.0)
    upload_noise: float = setting(0.0, "scale of Laplace noise on every uploaded number", low=0.0)
    init_from: str = setting("last", "a block starts from the previous one's last round (released code) or its best "
                             "validation round", choices=("last", "best"))
    precision: str = setting("float32", "floating-point numbers of the training", choices=("float32", "float64"))


@dataclass(frozen=True)
class Progress:
    """All a run carries from one round to the next: saving it and loading it back changes no number.

    Attributes:
        step, round: the step being trained and the rounds done in it.
        trained: whether the step's rounds are over and its tests are in ``tests``.
        model: tables after the last round; best: those of the best validation round.
        best_value, stale: best validation metric and rounds since it.
        client_state, server_state: the method's.
        curve: one row per round of every step so far.
        tests: (trained step, tested step, per-user scores).
    """

    step: int = 0
    round: int = 0
    trained: bool = False
    model: Snapshot = field(default_factory=lambda: Snapshot({}, {}))
    best: Snapshot = field(default_factory=lambda: Snapshot({}, {}))
    best_value: float = -1.0
    stale: int = 0
    client_state: dict[str, Tensor] = field(default_factory=dict)
    server_state: dict[str, Tensor] = field(default_factory=dict)
    curve: tuple[dict[str, Any], ...] = ()
    tests: tuple[tuple[int, int, UserScores], ...] = ()


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
            crowded = (step.train.lengths >= step.n_items).nonzero().flatten().tolist()
            for user in crowded:
                if len(step.train.of(user).unique()) == step.n_items:
                    raise UserError(f"block {step.index}: user {self.stream.user_tokens[user]} has interacted with "
                                    f"every item, so no negative can be drawn for this client.")
        self.method.check(self.stream)


def _grown(table: Tensor | None, rows: Tensor, like: torch.dtype, device: torch.device) -> Tensor:
    rows = rows.to(device, like)
    return rows if table is None else torch.cat([table, rows])


def grow(model: Snapshot, backbone: Backbone, seed: int, step: Step, dtype: torch.dtype,
         device: torch.device) -> Snapshot:
    """Append rows for the users and items that are new in ``step``."""
    new = backbone.new_rows(seed, range(step.old_users, step.n_users), range(step.old_items, step.n_items))
    public, private = ({name: _grown(old.get(name), rows, dtype, device) for name, rows in added.items()}
                       for old, added in zip((model.public, model.private), new))
    return Snapshot(public, private)


def participants(step: Step, ratio: float, seed: int, round_: int) -> Tensor:
    """Ids of the clients of a round, ascending: those with training data, or a random share of them."""
    users = (step.train.lengths > 0).nonzero().flatten()
    if ratio == 1.0:
        return users
    keys = draws.client_keys(draws.key(seed, "participants", step.index, round_), users)
    chosen = draws.sort_keys(draws.bits(keys, torch.zeros_like(users))).argsort()
    return users[chosen[:max(1, round(ratio * len(users)))]].sort().values


def _bytes(tables: Tables) -> int:
    return sum(table.numel() * table.element_size() for table in tables.values())


def run(federation: Federation, progress: Progress | None = None) -> Iterator[Progress]:
    """Run a federation, yielding the progress after every round and after every step.

    Call ``federation.check()`` first.

    Args:
        progress: continue from here; the numbers are those of an uninterrupted run.

    Raises:
        RunFailed: when the loss or a parameter is no longer finite.
    """
    keep_freed_blocks()
    with workers():
        yield from _steps(federation, progress or Progress())


def _steps(federation: Federation, progress: Progress) -> Iterator[Progress]:
    f, method, backbone, device = federation, federation.method, federation.backbone, federation.device
    dtype = getattr(torch, f.server.precision)
    method.client_state, method.server_state = dict(progress.client_state), dict(progress.server_state)
    nothing = Method(NoSettings())

    for step in f.stream.steps[progress.step:]:
        step = step.to(device)
        acting = method if step.index >= method.first_step else nothing
        chunks = None
        if progress.round == 0 and not progress.trained:
            start = progress.best if f.server.init_from == "best" else progress.model
            model = grow(start, backbone, f.seed, step, dtype, device)
            progress = replace(progress, model=model, best=model, best_value=-1.0, stale=0)

        while not progress.trained:
            # One round (F3CRec, Algorithm 1): broadcast, local training, upload, aggregation, validation.
            began = time.perf_counter()
            round_ = progress.round
            if chunks is None or f.server.client_ratio < 1.0:
                users = participants(step, f.server.client_ratio, f.seed, round_)
                row_width = sum(table[0].numel() for table in progress.model.public.values())
                chunks = make_chunks(step.train, users, f.local, step.n_items, row_width)
            public, private, loss = train_round(chunks, progress.model.public, progress.model.private, backbone,
                                                acting, f.local, f.seed, step.index, round_)
            if f.server.upload_noise > 0.0:
                for name, table in public.items():
                    public[name] = table + draws.mean_laplace(f.seed, step.index, round_, name, tuple(table.shape),
                                                              f.server.upload_noise, len(users)).to(table)
            upload = _bytes(public)
            public = acting.aggregate(public)
            model = Snapshot(public, private)
            trained_at = time.perf_counter()

            _require_finite(loss, model, backbone, step, round_)
            valid = rank_all(backbone, model, step.valid, [step.train],
                             [parse_metric(f.evaluation.valid_metric)[1]])
            value = round(valid.mean(f.evaluation.valid_metric), f.evaluation.valid_decimals)
            better = value > progress.best_value
            best = model if better else progress.best
            stale = 0 if better else progress.stale + 1
            last = stale >= f.server.patience or round_ + 1 >= f.server.rounds
            tests = test(f, step, best) if last else []
            extra = 0
            if round_ == 0 and acting.downloads_previous_model():
                extra = _bytes({name: table[:step.old_items] for name, table in public.items()})
            row = {"step": step.index, "round": round_, "participants": len(users), "loss": loss, "valid": value,
                   "bytes_up": upload, "bytes_down": upload + extra, "train_seconds": trained_at - began,
                   "evaluate_seconds": time.perf_counter() - trained_at}
            progress = replace(
                progress, round=round_ + 1, trained=last, model=model, best=best,
                best_value=max(value, progress.best_value), stale=stale, curve=(*progress.curve, row),
                tests=(*progress.tests, *tests),
                client_state=dict(method.client_state), server_state=dict(method.server_state))
            yield progress

        method.end_step(step, progress.best, backbone, (step.train.lengths > 0).nonzero().flatten())
        progress = replace(progress, step=step.index + 1, round=0, trained=False,
                           client_state=dict(method.client_state), server_state=dict(method.server_state))
        yield progress


def test(f: Federation, step: Step, model: Snapshot) -> list[tuple[int, int, UserScores]]:
    """Test a step's model on this and every earlier step (row R[t, .]).

    Candidates are all items accumulated up to the step just trained. Only that step's train and valid items are
    masked, also when an earlier step is tested (released code).
    """
    topk = {*f.evaluation.topk, parse_metric(f.evaluation.valid_metric)[1]}
    return [(step.index, earlier.index,
             rank_all(f.backbone, model, earlier.test.to(f.device), [step.train, step.valid], topk))
            for earlier in f.stream.steps[:step.index + 1]]


def _require_finite(loss: float, model: Snapshot, backbone: Backbone, step: Step, round_: int) -> None:
    tables = [torch.tensor(loss), *model.public.values(), *model.private.values()]
    if not all(bool(torch.isfinite(table).all()) for table in tables):
        rates = ", ".join(f"{name} {rate:g}" for name, rate in backbone.learning_rates(step.n_items).items())
        raise RunFailed(f"training diverged in block {step.index}, round {round_ + 1}: the loss ({loss:g}) or a "
                        f"parameter is not finite.\nlr={backbone.settings.lr:g} (learning rates: {rates}); "
                        f"try a smaller one with --set lr={backbone.settings.lr / 10:g}.")
