"""Random operators inside foreign code, drawn from keyed streams instead of the global generator.

Within ``Keyed`` the random operators that RecBole's models call take their numbers from ``rng``, keyed by the client
and counted in the order of calls. So a client's dropout does not depend on which clients it is trained with, on
threads, or on anything drawn before. It works on one client as well as inside ``torch.func.vmap`` over clients, because
operators are replaced before they are batched. What is not replaced here still moves a global generator; the probe of
models (``tools/probe_recbole.py``) refuses those that do.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import rng

_RARE = "max_norm", "scale_grad_by_freq", "sparse"  # of embeddings
_NEW = {torch.zeros, torch.ones, torch.full, torch.empty, torch.zeros_like, torch.ones_like, torch.full_like,
        torch.empty_like, torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full, torch.Tensor.new_empty}


class Keyed(TorchFunctionMode):
    """Replaces random operators, and makes code written for one client fit for many at once.

    - Random operators draw from the streams of ``key``; the k-th call has a stream of its own.
    - New tensors belong to the client, so that inside vmap they can be written to in place.
    - With float64, what foreign code asks for in single precision is made in double precision.
    - ``torch.sigmoid`` is remembered, so that ``logits`` can take back a last one.
    - ``torch.gru`` is written out in operators that vmap knows.

    The key is an int64 tensor without dimensions, inside vmap that of each client; parameters have the ``dtype``.
    """

    def __init__(self, key: Tensor, dtype: torch.dtype):
        super().__init__()
        self.key, self.dtype, self.calls, self.elements = key, dtype, 0, 0  # numbers that operators made so far
        self._before_sigmoid: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the tensor itself keeps the id taken

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0].double()
            args, kwargs = [_wide(value) for value in args], {name: _wide(value) for name, value in kwargs.items()}
        if func in _REPLACED:
            return _REPLACED[func](self, *args, **kwargs)
        if func is F.embedding and not any(args[3:]) and not any(kwargs.get(name) for name in _RARE):
            return _embedding(self, *args[:3], **kwargs)
        if func is torch.gru and not isinstance(args[2], Tensor):  # of padded, not packed sequences
            return _gru(self, *args)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.elements += result.numel()
            if self.dtype == torch.float64 and result.dtype == torch.float32:
                whole = args and isinstance(args[0], Tensor) and args[0].dtype == torch.int64  # as powers of lengths
                result = func(args[0].double(), *args[1:], **kwargs) if whole else result.double()
            if func in _NEW:
                zero = torch.zeros_like(self.key, dtype=result.dtype)
                result = result | zero if result.dtype == torch.bool else result + zero
            if func in _SIGMOID:
                self._before_sigmoid[id(result)] = result, args[0]
            elif func in _SHAPES and isinstance(args[0], Tensor) and id(args[0]) in self._before_sigmoid:
                logits = self._before_sigmoid[id(args[0])][1]
                self._before_sigmoid[id(result)] = result, func(logits, *args[1:], **kwargs)
        return result

    def logits(self, scores: Tensor) -> Tensor:
        """What a last ``torch.sigmoid`` made ``scores`` from; the scores themselves if there was none."""
        return self._before_sigmoid[id(scores)][1] if id(scores) in self._before_sigmoid else scores

    def bits(self, shape: tuple[int, ...]) -> Tensor:
        """The next call's 64-bit patterns."""
        count = math.prod(shape)
        stream = rng.bits(self.key, torch.tensor(self.calls, device=self.key.device))
        self.calls += 1
        return rng.bits(stream, torch.arange(count, device=self.key.device)).view(shape)

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        values = rng.uniform(self.bits(shape)).to(dtype or self.dtype)
        return values.clamp(max=1.0 - torch.finfo(values.dtype).eps / 2)  # single precision may round up to 1

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal (Box-Muller)."""
        radius = torch.sqrt(-2.0 * torch.log(rng.uniform(self.bits(shape))))
        return (radius * torch.cos(2.0 * math.pi * rng.uniform(self.bits(shape)))).to(dtype or self.dtype)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _dropout(mode: Keyed, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return input
    if p >= 1.0:
        return input * 0.0
    return input * (mode.uniform(input.shape) >= p).to(input.dtype) / (1.0 - p)


def _gumbel_softmax(mode: Keyed, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10,
                    dim: int = -1) -> Tensor:
    noise = -torch.log(-torch.log(mode.uniform(logits.shape, torch.float64)))
    return torch.softmax((logits + noise.to(logits.dtype)) / tau, dim)


def _fill_normal(mode: Keyed, self: Tensor, mean: float = 0.0, std: float = 1.0, **ignored) -> Tensor:
    return self.copy_(mode.normal(self.shape, self.dtype) * std + mean)


_REPLACED: dict[Callable, Callable] = {
    F.dropout: _dropout, torch.dropout: _dropout, F.gumbel_softmax: _gumbel_softmax, torch.Tensor.normal_: _fill_normal,
    # Not random, but unknown to vmap, or wrong in it.
    torch.Tensor.data.__get__: lambda mode, self: self.detach(),
    torch.Tensor.scatter_: lambda mode, self, *args, **kwargs: self.copy_(self.scatter(*args, **kwargs)),
}
_SIGMOID = {torch.sigmoid, torch.Tensor.sigmoid}
_SHAPES = {torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.squeeze, torch.Tensor.flatten, torch.squeeze,
           torch.reshape, torch.flatten}


def _embedding(mode: Keyed, input: Tensor, weight: Tensor, padding_idx: int | None = None, **ignored) -> Tensor:
    """Inside vmap PyTorch forgets that a padding row has no gradient."""
    rows = F.embedding(input, weight)
    return rows if padding_idx is None else torch.where((input == padding_idx).unsqueeze(-1), rows.detach(), rows)


def _gru(mode: Keyed, inputs: Tensor, state: Tensor, weights: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    """``torch.gru`` on padded input, one position after the other; vmap has no rule for the fused operator."""
    has_biases, layers, dropout, training, bidirectional, batch_first = rest  # in PyTorch's order
    if bidirectional:
        raise NotImplementedError("aten::gru with bidirectional=True")
    x = inputs if batch_first else inputs.transpose(0, 1)
    each = 4 if has_biases else 2
    last = []
    for layer in range(layers):
        x, h = _gru_layer(x, state[layer], *weights[layer * each:(layer + 1) * each])
        if layer + 1 < layers:
            x = _dropout(mode, x, dropout, training)
        last.append(h)
    return (x if batch_first else x.transpose(0, 1)), torch.stack(last)


def _gru_layer(x: Tensor, h: Tensor, w_input: Tensor, w_state: Tensor, *biases: Tensor) -> tuple[Tensor, Tensor]:
    """States at all positions, (batch, positions, n), and the last one.

    r, z, n = the thirds of W_i x + b_i and W_h h + b_h; h <- (1 - z) tanh(n_i + r n_h) + z h (PyTorch's documentation).
    """
    b_input, b_state = biases or (None, None)
    from_input, outputs = F.linear(x, w_input, b_input), []
    for position in range(x.shape[1]):
        i_reset, i_update, i_new = from_input[:, position].chunk(3, -1)
        h_reset, h_update, h_new = F.linear(h, w_state, b_state).chunk(3, -1)
        update = torch.sigmoid(i_update + h_update)
        new = torch.tanh(i_new + torch.sigmoid(i_reset + h_reset) * h_new)
        h = new + update * (h - new)
        outputs.append(h)
    return torch.stack(outputs, 1), h
