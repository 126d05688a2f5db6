"""What clients do to their uploads before they send them: clip the change of public parameters, and add noise.

What this guarantees is in ``accounting.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

import torch
from torch import Tensor

from .. import rng

LAPLACE = "laplace"
# A change that is clipped ends this share below the norm allowed, so that no rounding of its entries lifts it above.
_MARGIN = 1e-6


@dataclass(frozen=True)
class Protection:
    """Clipping and noise of uploads."""

    # The largest norm of a client's whole change of all public parameters in a round: L1 with Laplace noise, L2 with
    # Gaussian noise; 0: not clipped.
    clip: float = 0.0
    noise: float = 0.0  # scale on every uploaded number: b of Laplace, the standard deviation of Gaussian; 0: none
    mechanism: str = LAPLACE  # or ``gaussian``

    def sizes(self, values: Tensor) -> Tensor:
        """What adds up to a norm: sums of absolute values (L1) or squares (L2) over all but the first dimension."""
        each = values.abs() if self.mechanism == LAPLACE else values.square()
        return each.reshape(len(each), -1).sum(1, dtype=torch.float64)

    def factors(self, sizes: Tensor) -> Tensor:
        """By what clients multiply their changes, (C,), given the ``sizes`` of all they changed: 1 or less."""
        norms = sizes if self.mechanism == LAPLACE else sizes.sqrt()
        return torch.where(norms > self.clip, self.clip / norms * (1.0 - _MARGIN), 1.0)

    def noisy(self, key: int, users: Tensor, value: Tensor) -> Tensor:
        """What clients send as ``value`` (C, ...): with noise on every number, keyed by client."""
        if self.noise == 0.0:
            return value
        draw = rng.laplace if self.mechanism == LAPLACE else rng.gaussian
        return value + draw(key, users, tuple(value.shape[1:]), self.noise).to(value)

    def mean_noise(self, key: rng.DrawKey, name: str, shape: tuple[int, ...], by_weight: Mapping[float, int]) -> Tensor:
        """The noise on the weighted mean of clients' tables, float64, without drawing each client's: of clients of one
        weight the sum has a law that is drawn at once; ``by_weight``: how many clients have each weight."""
        draw = rng.mean_laplace if self.mechanism == LAPLACE else rng.mean_gaussian
        whole = sum(weight * count for weight, count in by_weight.items())
        return sum((weight * count / whole) * draw(
            key.seed, key.step, key.round, name if len(by_weight) == 1 else f"{name} of weight {weight:g}", shape,
            self.noise, count) for weight, count in by_weight.items())


OPEN = Protection()  # neither clipping nor noise


def upload_key(seed: int, name: str, step: int, round_: int) -> int:
    """Names the random numbers of each client's own noise on something that it uploads."""
    return rng.key(seed, f"upload noise of {name}", step, round_)
