"""The federated continual loop, top to bottom: steps, rounds, participants, local training, aggregation, evaluation."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from typing import Callable, Iterator

import torch

from .. import contract
from ..data.stream import Step
from ..draws import DrawKey, Tables
from ..errors import RunFailed
from ..evaluation.drift import analyse
from ..method import Method, NoSettings
from ..model import Snapshot
from ..ops.memory import keep_freed_blocks
from ..parallel import workers
from .growth import grow, reset_private
from .parts import Federation, Progress
from .protocols import Lists, SessionSteps
from .round import Trained, train_round
from .server import aggregate


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
