"""Local optimisers on stacked parameters.

Every client starts each round with a fresh optimiser. Both rules act on each entry alone, so one call on tensors that
stack many clients is every client's own optimiser. A row whose gradient is always zero does not move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .sampling import LocalSettings


class SGD:
    """Plain stochastic gradient descent without momentum."""

    @torch.no_grad()
    def updates(self, gradients: Mapping[str, Tensor], lr: Mapping[str, float]) -> dict[str, Tensor]:
        """What one step at these learning rates adds to each parameter. May reuse the gradients' memory."""
        return {name: gradient.mul_(-lr[name]) for name, gradient in gradients.items()}


class Adam:
    """Adam (Kingma & Ba, 2015) with PyTorch's defaults and formula."""

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8):
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.steps = 0
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def updates(self, gradients: Mapping[str, Tensor], lr: Mapping[str, float]) -> dict[str, Tensor]:
        """What one step at these learning rates adds to each parameter. May reuse the gradients' memory."""
        self.steps += 1
        correction1 = 1.0 - self.beta1 ** self.steps
        correction2 = 1.0 - self.beta2 ** self.steps
        result = {}
        for name, gradient in gradients.items():
            if name not in self.moments:
                self.moments[name] = torch.zeros_like(gradient), torch.zeros_like(gradient)
            first, second = self.moments[name]
            first.lerp_(gradient, 1.0 - self.beta1)
            second.mul_(self.beta2).addcmul_(gradient, gradient, value=1.0 - self.beta2)
            # The root of zero takes several times as long as of other numbers, and many rows see no gradient. The
            # smallest normal number has a root that vanishes beside eps.
            denominator = (second / correction2).clamp_(min=torch.finfo(second.dtype).tiny).sqrt_().add_(self.eps)
            result[name] = torch.div(first, denominator, out=gradient).mul_(-lr[name] / correction1)
        return result


OPTIMISERS = ("sgd", "adam")


def make_optimiser(settings: LocalSettings) -> SGD | Adam:
    """A fresh local optimiser."""
    return Adam(beta2=settings.adam_beta2) if settings.optimiser == "adam" else SGD()


def stacked_optimiser(parameters: Mapping[str, Tensor], lr: Mapping[str, float],
                      settings: LocalSettings) -> torch.optim.Optimizer:
    """PyTorch's fused local optimiser on parameters that stack many clients: one pass over the memory of each.

    Its formula is that of ``make_optimiser``, rounded elsewhere.
    """
    by_rate: dict[float, list[Tensor]] = {}
    for name, value in parameters.items():
        by_rate.setdefault(lr[name], []).append(value)
    groups = [{"params": values, "lr": rate} for rate, values in by_rate.items()]
    if settings.optimiser == "adam":
        return torch.optim.Adam(groups, betas=(0.9, settings.adam_beta2), fused=True)
    return torch.optim.SGD(groups, fused=True)
