"""What clients train on in a step: less than all of its interactions, where some come later."""

from __future__ import annotations

from dataclasses import replace

from ..data.stream import Step
from .settings import FederationSettings


def as_known(step: Step, server: FederationSettings) -> Step:
    """A step as its clients know it in its rounds: of new users their first interactions alone (``fold_in``), and none
    with new items where these arrive later (``cold_items``)."""
    step = truncated_for_new_users(step, server.fold_in)
    if server.cold_items == "none" or step.index == 0:
        return step
    return replace(step, train=step.train.where(step.train.values < step.old_items))


def truncated_for_new_users(step: Step, fold_in: int) -> Step:
    """A step as its clients know it: of a new user the first ``fold_in`` training interactions; 0: all."""
    if fold_in == 0 or step.index == 0:
        return step
    limits = step.train.lengths.clone()
    limits[step.old_users:].clamp_(max=fold_in)
    return replace(step, train=step.train.at_most(limits))
