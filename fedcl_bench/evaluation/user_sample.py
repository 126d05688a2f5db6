"""A sample of users, for what would otherwise take work in proportion to users x items.

Every user is in it or not by a number of its own, drawn from the run's seed, so nobody's place depends on the order of
users, on the others, on blocks or on methods: runs that are compared look at the same users.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import rng
from ..core.tuning import SIZES


def in_sample(seed: int, purpose: str, users: int, about: int, clients: int, device: torch.device) -> Tensor:
    """Whether each of the users 0, 1, ... is in a sample of a purpose, bool of shape (users,).

    Args:
        users: how many are asked about.
        about: the expected size of the sample; all users are in it if there are no more.
        clients: all users of the run, also those elsewhere.
    """
    if clients <= about:
        return torch.ones(users, dtype=torch.bool, device=device)
    key = rng.key(seed, purpose)
    chosen = torch.empty(users, dtype=torch.bool, device=device)
    for part in torch.arange(users, device=device).split(SIZES.normals):
        keys = rng.client_keys(key, part)
        chosen[part] = rng.uniform(rng.bits(keys, torch.zeros_like(keys))) < about / clients
    return chosen
