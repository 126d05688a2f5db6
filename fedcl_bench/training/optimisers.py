"""Local optimisers on stacked parameters.

Every client starts each round with a fresh optimiser. Both rules act on each entry alone, so one call on tensors that
stack many clients is every client's own optimiser. A row whose gradient is always zero does not move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..plugin.local_settings import LocalSettings


BETA1 = 0.9  # of Adam, PyTorch's default


class LocalOptimiser:
    """SGD without momentum, or Adam (Kingma & Ba, 2015) with PyTorch's formula; the parameters ``by_sgd`` move by SGD
    whatever the setting is."""

    def __init__(self, settings: LocalSettings, by_sgd: Collection[str] = ()):
        self.beta1, self.beta2, self.eps, self.by_sgd = BETA1, settings.adam_beta2, settings.adam_eps, by_sgd
        self.sgd, self.steps = settings.optimiser == "sgd", 0
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def updates(self, gradients: Mapping[str, Tensor], lr: Mapping[str, float]) -> dict[str, Tensor]:
        """What one step at these learning rates adds to each parameter. May reuse the gradients' memory."""
        self.steps += 1
        correction1 = 1.0 - self.beta1 ** self.steps
        correction2 = 1.0 - self.beta2 ** self.steps
        result = {}
        for name, gradient in gradients.items():
            if self.sgd or name in self.by_sgd:
                result[name] = gradient.mul_(-lr[name])
                continue
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


def stacked_optimiser(parameters: Mapping[str, Tensor], lr: Mapping[str, float],
                      settings: LocalSettings) -> Callable[[Sequence[Tensor | None]], None]:
    """A local optimiser that takes its steps in place, on parameters that stack many clients: one pass over the memory
    of each. Its formula is that of ``LocalOptimiser``, rounded elsewhere. Returns its step, given the gradients of all
    parameters in their order."""
    values = list(parameters.values())
    ends = [_Ends(value, settings) for value in values]
    by_rate: dict[float, list[Tensor]] = {}
    for name, end in zip(parameters, ends):
        by_rate.setdefault(lr[name], []).extend(end.parts)
    groups = [{"params": parts, "lr": rate} for rate, parts in by_rate.items()]
    optimiser = (torch.optim.Adam(groups, betas=(BETA1, settings.adam_beta2), eps=settings.adam_eps,
                                  fused=True)
                 if settings.optimiser == "adam" else torch.optim.SGD(groups, fused=True))

    def step(gradients: Sequence[Tensor | None]) -> None:
        for value, end, gradient in zip(values, ends, gradients, strict=True):
            end.give(torch.zeros_like(value) if gradient is None else gradient.contiguous())
        optimiser.step()
        for end in ends:
            end.write_back()

    return step


_VECTOR = 16  # single-precision numbers in the widest registers


class _Ends:
    """A parameter as the optimiser sees it: all but its last few numbers, and these in a tensor of whole vectors.
    PyTorch's fused Adam rounds numbers that do not fill a vector otherwise. Which numbers these are depends on who else
    is in the chunk."""

    def __init__(self, value: Tensor, settings: LocalSettings):
        apart = settings.optimiser == "adam" and value.dtype == torch.float32 and value.device.type == "cpu"
        self.value, self.whole = value, value.numel() - value.numel() % (_VECTOR if apart else 1)
        self.parts = [value] if self.whole == value.numel() else [self._begin(value), self._end(value)]

    def _begin(self, tensor: Tensor) -> Tensor:
        return tensor.detach().view(-1)[:self.whole]

    def _end(self, tensor: Tensor) -> Tensor:
        end = tensor.detach().view(-1)[self.whole:]
        return torch.cat([end, end.new_zeros(_VECTOR - len(end))])

    def give(self, gradient: Tensor) -> None:
        """Hand the optimiser a gradient."""
        gradients = [gradient] if len(self.parts) == 1 else [self._begin(gradient), self._end(gradient)]
        for part, of_part in zip(self.parts, gradients):
            part.grad = of_part

    def write_back(self) -> None:
        """Put what the optimiser has made of the last numbers in their place."""
        if len(self.parts) > 1:
            self.value.view(-1)[self.whole:] = self.parts[1][:self.value.numel() - self.whole]
        for part in self.parts:
            part.grad = None
