"""The federated continual loop, as the papers' algorithms have it (F3CRec, Algorithm 1; FCUCR, Algorithm 1).

Each step of time is begun, trained round by round and ended; a method's training may have stages. In a round clients
train, the server averages what they upload, and the model is validated; when training ends the best model is tested.
Clients have one user each (``cross_device.py``), or many (``cross_silo.py``): the loop asks both the same.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Iterator, Mapping

from ..core.tuning import quick_optimisers
from ..kernels.memory import give_back_freed_blocks, keep_freed_blocks
from .cross_device import CrossDevice, Observer
from .cross_silo import CrossSilo
from .early_stopping import EarlyStopping, locate_errors
from .parts import Best, Federation, Progress, Update


def run(federation: Federation, progress: Progress | None = None, observe: Observer | None = None,
        kind: type[CrossDevice] | type[CrossSilo] | None = None) -> Iterator[Progress]:
    """Run a federation, yielding the progress after every round and after every step.

    Call ``federation.check()`` first. Within a round whose clients hold many users it yields the progress before it,
    with ``fraction_done`` and ``within`` set. Raises RunFailed when the loss, a parameter or a score to rank by is no
    longer finite.

    Args:
        progress: continue from here; the numbers are those of an uninterrupted run.
        observe: called in every round with its key, what the server sent, and every chunk's clients after training.
        kind: of the clients, a class made from theirs; None: theirs.
    """
    keep_freed_blocks()
    quick_optimisers()
    kind, progress = kind or clients_of(federation), progress or Progress()
    with kind.threads():
        for step in federation.stream.steps[progress.step:]:
            clients, progress = kind.open(federation, step, progress, observe)
            give_back_freed_blocks()  # what tables were made of, and smaller ones of the step before
            for stage in range(len(clients.stages)):
                stops = clients.early_stopping(stage, progress)
                progress = clients.enter(stage, progress)
                while not clients.ended(stops):
                    progress = yield from one_round(clients, stops, progress)
                    yield progress
            progress = clients.end(progress)
            yield progress


def clients_of(f: Federation) -> type[CrossDevice] | type[CrossSilo]:
    return CrossSilo if f.cross_silo else CrossDevice


def one_round(clients: CrossDevice | CrossSilo, stops: Mapping[int, EarlyStopping], progress: Progress
              ) -> Iterator[Progress]:
    """One round (F3CRec, Algorithm 1); returns the progress after it. ``stops``: of each unit that is validated by
    itself; they take in the round."""
    # 1. Clients train.
    update = yield from clients.train(progress, stops)

    # 2. The server averages what they upload, and answers.
    update, began = clients.aggregate(progress, update), time.perf_counter()

    # 3. In a round that is validated, users and items that arrive after the step's training get their parameters, which
    # no round is trained with.
    due = {unit: stops[unit].due for unit in update.loss}
    arrived = replace(update, model=clients.with_arrivals(update.model)) if any(due.values()) else update

    # 4. The model is validated, and tested by those whose training ends with this round.
    best, rows, tests, analysis = progress.best, [], [], []
    for unit, validated in due.items():
        best, row = _validated(clients, unit, stops[unit], arrived, progress.round, best, began)
        rows.append({**row, "round": sum(each["step"] == unit for each in progress.curve)})
        began = time.perf_counter()
    ended = clients.ended(stops)
    for unit in due:
        if clients.last_stage and stops[unit].ended and (ended or not clients.together):
            with locate_errors(clients.federation, clients.key(unit, progress.round)):
                found, of_lists = clients.test(unit, best)
            for test in found if clients.federation.on_test is not None else ():
                clients.federation.on_test(*test)
            tests += [(trained, tested, replace(scores, lists=None)) for trained, tested, scores in found]
            analysis += of_lists
    shifts = clients.analyse(progress, arrived.model, best, ended)
    return replace(progress, round=progress.round + 1, trained=clients.last_stage and ended,
                   model=(arrived if ended else update).model, best=best, fraction_done=0.0, within=None,
                   curve=(*progress.curve, *rows),
                   tests=tuple(sorted((*progress.tests, *tests), key=lambda test: test[0])),
                   analysis=(*progress.analysis, *shifts, *analysis), **clients.state(update))


def _validated(clients: CrossDevice | CrossSilo, unit: int, stop: EarlyStopping, update: Update, round_: int,
               best: Best, began: float) -> tuple[Best, dict[str, Any]]:
    """The best round after a unit has been validated, if that is due, and the unit's row of the curve."""
    model, loss, due = update.model, update.loss[unit], stop.due
    clients.require_finite(unit, loss, model, round_)
    with locate_errors(clients.federation, clients.key(unit, round_)):
        chosen = stop.observe(clients.validate(unit, model, round_) if due else None)
        best = clients.best(unit, model, round_, best) if chosen else best
        more = clients.more(unit, model, round_, due)
    return best, {"step": unit, "round": round_, **clients.participation(), "loss": loss, "valid": stop.value,
                  **clients.sent(unit, update, round_, stop.ended), "train_seconds": update.seconds[unit],
                  "evaluate_seconds": time.perf_counter() - began, **more}
