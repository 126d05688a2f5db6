"""The federated continual loop, as the papers' algorithms have it (F3CRec, Algorithm 1; FCUCR, Algorithm 1).

Each step of the stream is begun, trained round by round and ended. In a round clients train, the server averages what
they upload, and the model is validated; after a step's last round its best model is tested.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Callable, Iterator

from ..plugin import checks
from ..training.trained import Trained
from ..rng import DrawKey, Tables
from ..evaluation.drift import analyse
from ..plugin.state import Snapshot
from ..kernels.memory import keep_freed_blocks
from ..core.parallel import workers
from . import central, server, silos
from .divergence import naming, require_finite
from .early_stopping import EarlyStopping
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
    if federation.central:  # its batches are large enough for PyTorch's own threads
        yield from central.run(federation, progress or Progress())
        return
    if federation.stream.domains:
        yield from silos.run(federation, progress or Progress())
        return
    with workers():
        yield from _steps(federation, progress or Progress(), observe)


def _steps(f: Federation, progress: Progress, observe: Observer | None) -> Iterator[Progress]:
    f.method.client_state, f.method.server_state = dict(progress.client_state), dict(progress.server_state)
    for step in f.stream.steps[progress.step:]:
        if progress.round == 0 and not progress.trained:
            progress = begin_step(f, step.to(f.device), progress)
        opened, group = open_step(f, step, progress.model), None
        stop = EarlyStopping.replay(f, (row for row in progress.curve if row["step"] == step.index))
        while not progress.trained:
            group = opened.group(progress, group)
            progress = one_round(opened, group, stop, progress, observe)
            yield progress
        progress = end_step(opened, progress)
        yield progress


def one_round(opened: OpenStep, group: Group, stop: EarlyStopping, progress: Progress, observe: Observer | None
              ) -> Progress:
    """One round (F3CRec, Algorithm 1)."""
    f, method, key, began = opened.federation, opened.method, opened.key(progress.round), time.perf_counter()

    # 1. Clients train.
    weights = opened.weights(key.round)
    method.begin_round(opened.step, key.round, f.backbone)
    sums = train_clients(group.work, progress.model, key, weights, observe and partial(observe, key, progress.model))

    # 2. The server averages what they upload, with its noise, lets the method aggregate, and answers.
    model, loss = server.mean(sums, progress.model, f.backbone, f.seed, f.population.sum)
    model = server.aggregate(f.backbone, model, group.users, opened.training.protection, key, group.count)
    model = replace(model, public=checks.checked_aggregate(method, model.public))
    uploads = sums.uploads
    answers = server.answer(method, key.round, group.users, uploads, opened.step.n_users)
    trained = time.perf_counter()

    # 3. In a round that is validated, users who arrive after the step's training make their private parameters.
    due = stop.due
    model = opened.cold_start.arrived(model) if due and opened.cold_start is not None else model
    require_finite(loss, model, f, opened.step.n_items, key)

    # 4. The model is validated, and tested if this is the step's last round.
    with naming(f, key):
        chosen = stop.observe(validate(opened, model, key.round) if due else None)
        now = Best(model, key.round, dict(f.method.client_state), dict(f.method.server_state))
        best = now if chosen else progress.best
        tests, probabilities = test(opened, best) if stop.ended else ([], [])
    first, final = model if key.round == 0 else None, best.model if stop.ended else None
    shifts = analyse(f.backbone, opened.step, opened.earlier, progress.previous, first, final, f.population.sum) \
        if key.round == 0 or stop.ended else []
    row = {"step": key.step, "round": key.round, "participants": group.count, **group.failures, "loss": loss,
           "valid": stop.value, **_bytes_sent(opened, model, uploads, answers, key.round, stop.ended),
           "train_seconds": trained - began, "evaluate_seconds": time.perf_counter() - trained,
           **f.backbone.diagnostics(model.public),
           **(opened.protocol.extra(model, key.round) if due else {})}
    return replace(progress, round=key.round + 1, trained=stop.ended, model=model, best=best,
                   client_state=now.client_state, server_state=now.server_state,
                   curve=(*progress.curve, row), tests=(*progress.tests, *tests),
                   analysis=(*progress.analysis, *shifts, *probabilities))


def validate(opened: OpenStep, model: Snapshot, round_: int) -> float:
    """The validation metric of a round's model."""
    f = opened.federation
    return f.population.mean(opened.protocol.validate(model, round_), f.evaluation.valid_metric)


def test(opened: OpenStep, best: Best) -> tuple[list, list]:
    """Row R[t, .] of the step's best model, under the method's state of that round; and what is analysed with it."""
    method = opened.federation.method
    state = dict(method.client_state), dict(method.server_state)
    method.client_state, method.server_state = dict(best.client_state), dict(best.server_state)
    result = opened.protocol.test(best.model, best.round)
    method.client_state, method.server_state = state
    return result


def _bytes_sent(opened: OpenStep, model: Snapshot, uploads: Tables, answers: Tables, round_: int, last: bool
                ) -> dict[str, int]:
    """Bytes that each participant sends and receives in a round; and, where new users arrive after a step's ``last``
    round, what they receive, all of them together."""
    shared = _bytes(model.public, model.dense)
    sent, answered = (_bytes({name: values[0] for name, values in extra.items()}) for extra in (uploads, answers))
    down = shared + answered + _bytes({name: table[0] for name, table in model.served.items()})
    if round_ == 0 and opened.method.downloads_previous_model():
        down += _bytes({name: table[:opened.step.old_items] for name, table in model.public.items()})
    new = opened.cold_start.count if last and opened.cold_start is not None else 0
    arrived = {"bytes_down_new": new * shared} if opened.federation.server.fold_in else {}
    return {"bytes_up": shared + sent, "bytes_down": down, **arrived}


def _bytes(*kinds: Tables) -> int:
    return sum(table.numel() * table.element_size() for tables in kinds for table in tables.values())
