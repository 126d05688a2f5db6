"""What evaluating a step holds in memory, in bytes, estimated before the run starts."""

from __future__ import annotations

from ..client.footprint import StepLoad
from ..data.stream import Step
from ..sequential import SequentialBackbone
from ..sizes import SIZES
from .metrics import OF_EVERY_RUN
from .ranking import EvaluationSettings, is_product, users_at_once
from .sessions import scores_per_item


def candidates(step: Step, settings: EvaluationSettings) -> int:
    """Every user's sampled items, for validation and test."""
    if settings.candidates != "sampled":
        return 0
    return 8 * step.n_users * settings.sampled_candidates * 2


def scores(load: StepLoad) -> int:
    """Scores of one piece of users per thread, with what a backbone makes of rows where they are no product."""
    backbone, step = load.backbone, load.step
    product = is_product(backbone, load.model)
    users = SIZES.session_users if step.sessions else users_at_once(step.n_items, product)
    vectors = scores_per_item(backbone) - 1 if step.sessions else 0
    if not (product or isinstance(backbone, SequentialBackbone)):
        copied = load.row - (load.personal if load.device.type == "cpu" else 0)  # see Snapshot.clients
        vectors = copied + sum(getattr(backbone.settings, "hidden", ()))
    return load.threads * load.number * min(users, step.n_users) * step.n_items * (3 + vectors)


def metrics(step: Step, settings: EvaluationSettings) -> int:
    """What is kept of every user's list: of the validation, and of the tests of every step so far."""
    lengths = 1 + len(settings.topk)
    tests = (step.index + 1) * (step.index + 2) // 2
    return 8 * step.n_users * (len(OF_EVERY_RUN) + len(settings.extra_metrics)) * lengths * (1 + tests)
