"""Training without a federation: one client holds all sessions, and a round is an epoch over their prefixes.

It is what session recommenders do in their own papers, so that backbones can be compared with released codes. Those
choose their epoch on the test sessions. Here it is chosen in validation, and the curve has both.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Iterator

import torch

from ..training.silo_samples import Epoch, SampleSet
from ..training.mini_batches import Point
from ..data.stream import Step
from ..rng import DrawKey
from ..evaluation.beyond_accuracy import catalogue_of
from ..evaluation.sample_ranking import Ranking, rank_samples
from ..evaluation.ranking import UserScores
from ..plugin.state import Snapshot
from ..core.tuning import SIZES
from .divergence import naming, require_finite
from .early_stopping import EarlyStopping
from .parameter_growth import grow
from .parts import Best, Federation, Progress, Within


def run(f: Federation, progress: Progress) -> Iterator[Progress]:
    """As ``loop.run``, for ``topology=central``.

    Within an epoch it yields the progress before it, with ``under_way`` and ``within`` set.
    """
    if progress.step:
        return
    step = f.stream.steps[0].to(f.device)
    if not progress.model.public:
        model = grow(Snapshot({}, {}), f.backbone, f.seed, step, getattr(torch, f.server.precision), f.device)
        progress = replace(progress, model=model, best=Best(model), ways=("central",))
    samples = step.sessions["train"].prefixes()
    while not progress.trained:
        told = time.perf_counter()
        epoch = _epoch(f, progress)
        progress = replace(progress, under_way=0.0, within=None)
        for share in epoch.batches([SampleSet(samples, memory=progress.model.memory)], progress.model):
            if time.perf_counter() - told > SIZES.told_every:
                yield replace(progress, under_way=share, within=partial(_within, f, step, epoch))
                told = time.perf_counter()
        progress = _after(f, step, epoch, progress)
        yield progress
    yield replace(progress, step=1, round=0, trained=False)


def _epoch(f: Federation, progress: Progress) -> Epoch:
    """The next epoch, or the one that the run was stopped in."""
    model, point = progress.model, Point(progress.server_state)
    if progress.within:
        within = progress.within()
        model, point = within.model, Point(within.server_state, *within.epochs[0][1:])
    return Epoch(f.backbone, f.local, model, point, DrawKey(f.seed, 0, progress.round))


def _within(f: Federation, step: Step, epoch: Epoch) -> Within:
    """How far an epoch is; the tables are copies.

    Raises:
        RunFailed: if training has diverged.
    """
    point, model = epoch.point(), epoch.trained()
    require_finite(point.loss, model, f, step.n_items, epoch.draw)
    public, dense = ({name: value.clone() for name, value in kind.items()} for kind in (model.public, model.dense))
    state = {name: value.clone() for name, value in point.state.items()}
    return Within(replace(model, public=public, dense=dense), state, ((0, point.batches, point.loss, point.seconds),))


def _after(f: Federation, step: Step, epoch: Epoch, progress: Progress) -> Progress:
    """The progress after an epoch, validated and tested; after the last, with the best's test."""
    model, key, began = epoch.trained(), epoch.draw, time.perf_counter()
    require_finite(epoch.loss, model, f, step.n_items, key)
    stop, value, tested = EarlyStopping.replay(f, progress.curve), None, None
    if stop.due:
        metric, k = f.validation
        with naming(f, key):
            scores = rank_samples(f.backbone, model, step.sessions["valid"], Ranking([k], [metric]))
            value, tested = scores.mean(f.evaluation.valid_metric), _test(f, step, model)
    chosen = stop.observe(value)
    best = Best(model, key.round) if chosen else progress.best
    curve = {} if tested is None else {f"test_{name}": tested.mean(name) for name in tested.values}
    tests = ((0, 0, tested if chosen else _test(f, step, best.model)),) if stop.ended else ()
    row = {"step": 0, "round": key.round, "participants": 1, "loss": epoch.loss, "valid": stop.value, "bytes_up": 0,
           "bytes_down": 0, "train_seconds": epoch.seconds, "evaluate_seconds": time.perf_counter() - began, **curve}
    return replace(progress, round=key.round + 1, trained=stop.ended, model=model, server_state=epoch.state(),
                   best=best, curve=(*progress.curve, row), tests=tests)


def _test(f: Federation, step: Step, model: Snapshot) -> UserScores:
    catalogue = None
    if any(metric.of_items for metric in f.metrics):
        catalogue = catalogue_of([step], model.item_vectors)
    return rank_samples(f.backbone, model, step.sessions["test"], Ranking(f.topk, f.metrics, catalogue))
