"""Local optimisers on stacked parameters.

Every client starts each round with a fresh optimiser. Both rules act on each entry alone, so one call on tensors that
stack many clients is every client's own optimiser. A row whose gradient is always zero does not move.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..ops import kernels

if TYPE_CHECKING:
    from ..sampling import LocalSettings


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


def make_optimiser(settings: LocalSettings) -> SGD | Adam:
    """A fresh local optimiser."""
    return Adam(beta2=settings.adam_beta2) if settings.optimiser == "adam" else SGD()


def stacked_optimiser(parameters: Mapping[str, Tensor], lr: Mapping[str, float],
                      settings: LocalSettings) -> Callable[[Sequence[Tensor | None], bool], None]:
    """A local optimiser that takes its steps in place, on parameters that stack many clients: one pass over the memory
    of each.

    Its formula is that of ``make_optimiser``, rounded elsewhere.

    Returns:
        Its step, given the gradients of all parameters in their order, and whether it is the last.
    """
    values = list(parameters.values())
    if settings.optimiser == "adam" and all(kernels.serve(value) and value.dtype == torch.float32 for value in values):
        return _compiled_adam(values, [lr[name] for name in parameters], settings.adam_beta2)
    by_rate: dict[float, list[Tensor]] = {}
    for name, value in parameters.items():
        by_rate.setdefault(lr[name], []).append(value)
    groups = [{"params": values, "lr": rate} for rate, values in by_rate.items()]
    optimiser = (torch.optim.Adam(groups, betas=(0.9, settings.adam_beta2), fused=True)
                 if settings.optimiser == "adam" else torch.optim.SGD(groups, fused=True))

    def step(gradients: Sequence[Tensor | None], last: bool) -> None:
        for value, gradient in zip(values, gradients, strict=True):
            value.grad = torch.zeros_like(value) if gradient is None else gradient.contiguous()
        optimiser.step()
        for value in values:
            value.grad = None

    return step


def _compiled_adam(values: Sequence[Tensor], rates: Sequence[float],
                   beta2: float) -> Callable[[Sequence[Tensor | None], bool], None]:
    moments = [[torch.empty_like(value) for value in values] for _ in range(2)]
    numbers = count(1)

    def step(gradients: Sequence[Tensor | None], last: bool) -> None:
        gradients = [torch.zeros_like(value) if gradient is None else gradient.contiguous()
                     for value, gradient in zip(values, gradients, strict=True)]
        kernels.adam(values, gradients, *moments, (0.9, beta2), 1e-8, rates, next(numbers), last)

    return step
