"""Training without a federation: one client holds all sessions, and a round is an epoch over their prefixes.

It is what session recommenders do in their own papers, so that backbones can be compared with released codes. Those
choose their epoch on the test sessions. Here it is chosen in validation, and the curve has both.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Iterator

import torch

from ..client.central import Epoch, SampleSet
from ..data.stream import Step
from ..draws import DrawKey
from ..evaluation.beyond import catalogue_of
from ..evaluation.central import Ranking, rank_samples
from ..evaluation.ranking import UserScores
from ..model import Snapshot
from .divergence import naming, require_finite
from .growth import grow
from .parts import Best, Federation, Progress
from .validation import is_due, judge

TOLD_EVERY = 1.0  # seconds between two signs of life within an epoch


def run(f: Federation, progress: Progress) -> Iterator[Progress]:
    """As ``loop.run``, for ``topology=central``.

    Within an epoch it yields the progress before it, with ``under_way`` set: it can be saved at any time, and an epoch
    that is interrupted is trained anew.
    """
    if progress.step:
        return
    step = f.stream.steps[0].to(f.device)
    progress = replace(progress, under_way=0.0)
    if not progress.model.public:
        model = grow(Snapshot({}, {}), f.backbone, f.seed, step, getattr(torch, f.server.precision), f.device)
        progress = replace(progress, model=model, best=Best(model), ways=("central",))
    samples = step.sessions["train"].prefixes()
    while not progress.trained:
        began = told = time.perf_counter()
        epoch = Epoch(f.backbone, f.local, progress.model, progress.server_state, DrawKey(f.seed, 0, progress.round))
        for share in epoch.batches([SampleSet(samples, memory=progress.model.memory)]):
            if time.perf_counter() - told > TOLD_EVERY:
                yield replace(progress, under_way=share)
                told = time.perf_counter()
        progress = _after(f, step, epoch, progress, time.perf_counter() - began)
        yield progress
    yield replace(progress, step=1, round=0, trained=False)


def _after(f: Federation, step: Step, epoch: Epoch, progress: Progress, seconds: float) -> Progress:
    """The progress after an epoch of so many seconds, validated and tested; after the last, with the best's test."""
    model, key, began = epoch.trained(), epoch.draw, time.perf_counter()
    require_finite(epoch.loss, model, f, step.n_items, key)
    valid, tested = judge(f, progress, None), None
    if is_due(f, key.round):
        metric, k = f.validation
        with naming(f, key):
            scores = rank_samples(f.backbone, model, step.sessions["valid"], Ranking([k], [metric]))
            valid, tested = judge(f, progress, scores.mean(f.evaluation.valid_metric)), _test(f, step, model)
    chosen = tested is not None and (valid.better or valid.equal or f.server.tested_round == "last")
    best = Best(model, key.round) if chosen else progress.best
    curve = {} if tested is None else {f"test_{name}": tested.mean(name) for name in tested.values}
    tests = ((0, 0, tested if chosen else _test(f, step, best.model)),) if valid.last else ()
    row = {"step": 0, "round": key.round, "participants": 1, "loss": epoch.loss, "valid": valid.value, "bytes_up": 0,
           "bytes_down": 0, "train_seconds": seconds, "evaluate_seconds": time.perf_counter() - began, **curve}
    return replace(progress, round=key.round + 1, trained=valid.last, model=model, server_state=epoch.state(),
                   best=best, best_value=valid.value if valid.better else progress.best_value, stale=valid.stale,
                   curve=(*progress.curve, row), tests=tests)


def _test(f: Federation, step: Step, model: Snapshot) -> UserScores:
    catalogue = None
    if any(metric.of_items for metric in f.metrics):
        catalogue = catalogue_of([step], model.item_vectors)
    return rank_samples(f.backbone, model, step.sessions["test"], Ranking(f.topk, f.metrics, catalogue))
