"""The federated continual loop, as the papers' algorithms have it (F3CRec, Algorithm 1; FCUCR, Algorithm 1).

Each step of the stream is begun, trained round by round and ended. In a round clients train, the server averages what
they upload, and the model is validated; after a step's last round its best model is tested.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Callable, Iterator

import torch

from .. import contract
from ..client.trained import Trained
from ..draws import DrawKey, Tables
from ..errors import RunFailed
from ..evaluation.drift import analyse
from ..model import Snapshot
from ..ops.memory import keep_freed_blocks
from ..parallel import workers
from . import server
from .parts import Best, Federation, Progress
from .round import train_clients
from .steps import Group, OpenStep, begin_step, end_step, open_step

Observer = Callable[[DrawKey, Snapshot, Trained], None]


def run(federation: Federation, progress: Progress | None = None, observe: Observer | None = None
        ) -> Iterator[Progress]:
    """Run a federation, yielding the progress after every round and after every step.

    Call ``federation.check()`` first.

    Args:
        progress: continue from here; the numbers are those of an uninterrupted run.
        observe: called in every round with its key, what the server sent, and every chunk's clients after training.

    Raises:
        RunFailed: when the loss, a parameter or a score to rank by is no longer finite.
    """
    keep_freed_blocks()
    with workers():
        yield from _steps(federation, progress or Progress(), observe)


def _steps(f: Federation, progress: Progress, observe: Observer | None) -> Iterator[Progress]:
    f.method.client_state, f.method.server_state = dict(progress.client_state), dict(progress.server_state)
    for step in f.stream.steps[progress.step:]:
        if progress.round == 0 and not progress.trained:
            progress = begin_step(f, step.to(f.device), progress)
        opened, group = open_step(f, step, progress.model), None
        while not progress.trained:
            group = opened.group(progress, group)
            progress = one_round(opened, group, progress, observe)
            yield progress
        progress = end_step(opened, progress)
        yield progress


def one_round(opened: OpenStep, group: Group, progress: Progress, observe: Observer | None) -> Progress:
    """One round (F3CRec, Algorithm 1)."""
    f, method, key, began = opened.federation, opened.method, opened.key(progress.round), time.perf_counter()

    # 1. Clients train.
    weights = opened.weights(key.round)
    method.begin_round(opened.step, key.round, f.backbone)
    sums = train_clients(group.work, progress.model, key, weights, observe and partial(observe, key, progress.model))

    # 2. The server averages what they upload, with its noise, lets the method aggregate, and answers.
    model, loss = server.mean(sums, progress.model, f.backbone, f.seed, f.population.sum)
    model = server.aggregate(f.backbone, model, group.users, opened.training.protection, key, group.count)
    model = replace(model, public=contract.checked_aggregate(method, model.public))
    uploads = sums.uploads
    answers = server.answer(method, key.round, group.users, uploads, opened.step.n_users)
    trained = time.perf_counter()
    require_finite(loss, model, f, opened.step.n_items, key)

    # 3. The model is validated, and tested if this is the step's last round.
    with naming(key):
        valid = validate(opened, model, progress)
        now = Best(model, key.round, dict(f.method.client_state), dict(f.method.server_state))
        best = now if valid.better or valid.equal or f.server.tested_round == "last" else progress.best
        tests, probabilities = test(opened, best) if valid.last else ([], [])
    first, final = model if key.round == 0 else None, best.model if valid.last else None
    shifts = analyse(f.backbone, opened.step, opened.earlier, progress.previous, first, final, f.population.sum) \
        if key.round == 0 or valid.last else []
    row = {"step": key.step, "round": key.round, "participants": group.count, **group.failures, "loss": loss,
           "valid": valid.value, **_bytes_sent(opened, model, uploads, answers, key.round),
           "train_seconds": trained - began, "evaluate_seconds": time.perf_counter() - trained,
           **f.backbone.diagnostics(model.public),
           **(opened.protocol.extra(model, key.round) if valid.done else {})}
    return replace(progress, round=key.round + 1, trained=valid.last, model=model, best=best,
                   best_value=valid.value if valid.better else progress.best_value, stale=valid.stale,
                   client_state=now.client_state, server_state=now.server_state,
                   curve=(*progress.curve, row), tests=(*progress.tests, *tests),
                   analysis=(*progress.analysis, *shifts, *probabilities))


@dataclass(frozen=True)
class Validation:
    """What validation says of a round.

    Attributes:
        value: of the metric, nan if the round is not validated.
        better, equal: than the best before; equal only where the latest of equals counts as the best.
        stale: rounds since a better one. last: the step ends with this round.
    """

    value: float
    better: bool
    equal: bool
    stale: int
    last: bool

    @property
    def done(self) -> bool:
        return not math.isnan(self.value)


def validate(opened: OpenStep, model: Snapshot, progress: Progress) -> Validation:
    """Validate the model of a round, if it is its turn, and decide whether the step ends."""
    f, rounds, value = opened.federation, progress.round + 1, math.nan  # neither better nor equal
    out_of_rounds = rounds >= f.server.rounds
    due = out_of_rounds or rounds % f.server.evaluate_every == 0
    if due:
        scores = opened.protocol.validate(model, progress.round)
        value = round(f.population.mean(scores, f.evaluation.valid_metric), f.evaluation.valid_decimals)
    better = value > progress.best_value
    equal = value == progress.best_value and f.server.best_round == "latest"
    stale = 0 if better else progress.stale + 1
    return Validation(value, better, equal, stale, out_of_rounds or (due and 0 < f.server.patience <= stale))


def test(opened: OpenStep, best: Best) -> tuple[list, list]:
    """Row R[t, .] of the step's best model, under the method's state of that round; and what is analysed with it."""
    method = opened.federation.method
    state = dict(method.client_state), dict(method.server_state)
    method.client_state, method.server_state = dict(best.client_state), dict(best.server_state)
    result = opened.protocol.test(best.model, best.round)
    method.client_state, method.server_state = state
    return result


@contextmanager
def naming(key: DrawKey) -> Iterator[None]:
    """Put block and round before what a failure in the ranking says."""
    try:
        yield
    except RunFailed as error:
        raise RunFailed(f"block {key.step}, round {key.round + 1}: {error}") from None


def _bytes_sent(opened: OpenStep, model: Snapshot, uploads: Tables, answers: Tables, round_: int) -> dict[str, int]:
    """Bytes that each participant sends and receives in a round."""
    shared = _bytes(model.public, model.dense)
    sent, answered = (_bytes({name: values[0] for name, values in extra.items()}) for extra in (uploads, answers))
    down = shared + answered + _bytes({name: table[0] for name, table in model.served.items()})
    if round_ == 0 and opened.method.downloads_previous_model():
        down += _bytes({name: table[:opened.step.old_items] for name, table in model.public.items()})
    return {"bytes_up": shared + sent, "bytes_down": down}


def _bytes(*kinds: Tables) -> int:
    return sum(table.numel() * table.element_size() for tables in kinds for table in tables.values())


def require_finite(loss: float, model: Snapshot, f: Federation, n_items: int, key: DrawKey) -> None:
    """Raise RunFailed if the loss or any parameter is not finite."""
    extremes = (torch.stack(torch.aminmax(table)) for table in model.tables() if table.numel())  # nan if one is nan
    if not (math.isfinite(loss) and all(bool(torch.isfinite(ends).all()) for ends in extremes)):
        lr = f.backbone.settings.lr
        rates = ", ".join(f"{name} {rate:g}" for name, rate in f.backbone.learning_rates(n_items, key.round).items())
        raise RunFailed(f"training diverged in block {key.step}, round {key.round + 1}: the loss ({loss:g}) or a "
                        f"parameter is not finite.\nlr={lr:g} (learning rates: {rates}); "
                        f"try a smaller one with --set lr={lr / 10:g}.")


def largest(model: Snapshot) -> float:
    """The largest absolute value of any parameter; 0 if there is none."""
    return max((float(torch.stack(torch.aminmax(table)).abs().max()) for table in model.tables() if table.numel()),
               default=0.0)
