"""Differentiable building blocks for backbones, in the memory order that is fast for stacked clients."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .ops import Pooling as Pooling


class _Dot(torch.autograd.Function):
    """Inner products of one vector with many rows per client. ``torch.bmm(rows, vectors)`` and its gradient run as one
    slow matrix-vector product per client; with the vector as the left factor, and the rows' gradient as a plain outer
    product, the same numbers take about a fifth of the time."""

    @staticmethod
    def forward(ctx, vectors: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, rows)
        return torch.bmm(vectors.unsqueeze(1), rows.transpose(1, 2)).squeeze(1)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        vectors, rows = ctx.saved_tensors
        to_vectors = torch.bmm(gradient.unsqueeze(1), rows).squeeze(1) if ctx.needs_input_grad[0] else None
        to_rows = gradient.unsqueeze(2) * vectors.unsqueeze(1) if ctx.needs_input_grad[1] else None
        return to_vectors, to_rows


def dot(vectors: Tensor, rows: Tensor) -> Tensor:
    """Inner product of each client's vector, shape (C, d), with its own rows, shape (C, n, d): shape (C, n)."""
    return _Dot.apply(vectors, rows)


class _Linear(torch.autograd.Function):
    """A linear layer per client whose weights' gradient lies in memory as the weights do, as fused optimisers need it;
    autograd's own is transposed and would have to be copied."""

    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor, bias: Tensor | None, constant: Tensor | None) -> Tensor:
        ctx.learned = inputs.shape[2]
        if constant is not None:
            inputs = torch.cat([inputs, constant], 2)
        ctx.save_for_backward(inputs, weight)
        if _one_for_all(weight) and (bias is None or _one_for_all(bias)):
            return torch.nn.functional.linear(inputs, weight[0], None if bias is None else bias[0])
        if bias is None:
            return torch.bmm(inputs, weight.transpose(1, 2))
        return torch.baddbmm(bias.unsqueeze(1), inputs, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx, gradient: Tensor):
        inputs, weight = ctx.saved_tensors
        needs_inputs, _, needs_bias, _ = ctx.needs_input_grad
        to_inputs = None
        if needs_inputs:
            to_inputs = torch.matmul(gradient, (weight[0] if _one_for_all(weight) else weight)[..., :ctx.learned])
        to_weight = torch.bmm(gradient.transpose(1, 2), inputs)
        return to_inputs, to_weight, gradient.sum(1) if needs_bias else None, None


def _one_for_all(parameter: Tensor) -> bool:
    """Whether it is one layer's, expanded to all clients: in an evaluation, and before clients train."""
    return parameter.stride(0) == 0


def shared(parameter: Tensor) -> Tensor | None:
    """What was expanded to all clients, or rows of it, so that its gradient need not be made for each; None if clients
    have their own."""
    whole = parameter._base
    if parameter.stride(0) or whole is None or whole.dim() != parameter.dim() - 1:
        return None
    if whole.requires_grad != parameter.requires_grad:  # the gradient is to be that of clients' copies
        return None
    first, between = divmod(parameter.storage_offset() - whole.storage_offset(), whole.stride(0) or 1)
    if between or parameter.stride()[1:] != whole.stride() or parameter.shape[2:] != whole.shape[1:]:
        return None
    return whole.narrow(0, first, parameter.shape[1])


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, constant: Tensor | None = None) -> Tensor:
    """Each client's own linear layer. ``inputs``: (C, n, inputs); ``weight``: (C, outputs, inputs); ``bias``: (C,
    outputs); ``constant``: the last of the inputs, (C, n, ...), if they have no gradient; ``inputs`` are then the
    others. Returns (C, n, outputs)."""
    of_all, bias_of_all = shared(weight), None if bias is None else shared(bias)
    if of_all is not None and (bias is None) == (bias_of_all is None):
        inputs = inputs if constant is None else torch.cat([inputs, constant], 2)
        return torch.nn.functional.linear(inputs, of_all, bias_of_all)
    return _Linear.apply(inputs, weight, bias, constant)


class _LayerNorm(torch.autograd.Function):
    """PyTorch's own takes half as long again on the short rows of a representation, without the clients' factors."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        mean = x.mean(2, keepdim=True)
        normed = x - mean
        scale = normed.square().mean(2, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, mean, scale, normed.mul_(scale), weight)
        return torch.addcmul(bias.unsqueeze(1), normed, weight.unsqueeze(1))

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, mean, scale, normed, weight = ctx.saved_tensors
        to_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            gradient * weight.unsqueeze(1), x, x.shape[2:], mean, scale, None, None, [True, False, False])
        return to_x, (gradient * normed).sum(1), gradient.sum(1), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Each client's own layer normalisation of the last dimension, differentiable once. ``x``: (C, n, d); ``weight``,
    ``bias``: (C, d)."""
    return _LayerNorm.apply(x, weight, bias, eps)


class _Attention(torch.autograd.Function):
    """A softmax in five passes over the scores and three over the gradient. On rows as short as a session PyTorch's own
    takes four times as long."""

    @staticmethod
    def forward(ctx, scores: Tensor, bias: Tensor, scale: float) -> Tensor:
        weights = torch.add(bias, scores, alpha=scale)
        weights.sub_(weights.amax(-1, keepdim=True)).exp_()
        weights.div_(weights.sum(-1, keepdim=True))
        ctx.save_for_backward(weights)
        ctx.scale = scale
        return weights

    @staticmethod
    def backward(ctx, gradient: Tensor):
        weights, = ctx.saved_tensors
        weighted = gradient * weights
        return weighted.addcmul_(weights, weighted.sum(-1, keepdim=True), value=-1.0).mul_(ctx.scale), None, None


def attention(scores: Tensor, masked: Tensor, scale: float) -> Tensor:
    """Softmax over the last dimension of ``scale`` times the scores (..., n), without the masked ones. ``scores``: the
    only differentiable argument; ``masked``: what has no part in it, bool, of a shape that fits the scores; not all of
    a row."""
    return _Attention.apply(scores, torch.zeros_like(masked, dtype=scores.dtype).masked_fill_(masked, -torch.inf),
                            scale)


def target_logits(outputs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a session's targets and of one negative for each, both (C, L). ``outputs``: what they are inner
    products with, (C, L, d); ``rows``: of the session's L + 1 items, of which all but the first are targets, and of the
    L negatives, (C, 2 L + 1, d)."""
    length = outputs.shape[1]
    return (outputs * rows[:, 1:length + 1]).sum(2), (outputs * rows[:, length + 1:]).sum(2)


def _known_full(mask: Tensor) -> bool:
    """Whether all of a mask is True, as far as it takes no waiting to know."""
    return mask.device.type == "cpu" and bool(mask.all())


def cosine_pool(vectors: Tensor, mask: Tensor, best: float, each: Tensor, rows: Tensor) -> Tensor:
    """``best`` times the largest plus ``each`` times the sum of an item's products with a client's vectors: (C, n).
    ``vectors``: (C, M, d), zero where they are not to be summed; ``mask``: which of them the largest is taken of, bool
    of shape (C, M); ``each``: (C,); not differentiable; ``rows``: of items, (C, n, d), or (n, d) if they are the same
    for all clients; they are divided by their lengths."""
    total = torch.cat([vectors, vectors.sum(1, keepdim=True) * each[:, None, None]], 1)
    length = torch.linalg.vector_norm(rows, dim=-1).clamp(min=1e-12)
    products = (total @ rows.transpose(-1, -2)) / length.unsqueeze(-2)
    of_each, mean = products[:, :-1], products[:, -1]
    if not _known_full(mask):
        of_each = of_each.masked_fill(~mask.unsqueeze(2), -torch.inf)
    return torch.add(mean, of_each.max(1).values, alpha=best)


class _PlusConstant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores: Tensor, constants: Tensor) -> Tensor:
        return scores + constants

    @staticmethod
    def backward(ctx, gradient: Tensor):
        total = gradient.sum(1, keepdim=True)
        noise = 16 * torch.finfo(gradient.dtype).eps * gradient.abs().sum(1, keepdim=True)
        return gradient, total.masked_fill(total.abs() <= noise, 0.0)


def plus_constant(scores: Tensor, constants: Tensor) -> Tensor:
    """Add one number, shape (C, 1), to all of a client's scores, shape (C, n). Under a pairwise loss such a constant
    cancels and its gradient is 0. Adam would turn what rounding leaves of it into steps of full size, so a gradient
    that is 0 but for rounding is returned as 0."""
    return _PlusConstant.apply(scores, constants)


class _CompiledBCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        loss, slopes = ops.weighted_bce(scores, targets, weights)
        ctx.save_for_backward(slopes, scores, targets, weights)
        return loss

    @staticmethod
    def backward(ctx, gradient: Tensor):
        slopes, scores, targets, weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the slopes are differentiated, too
            slopes = (torch.sigmoid(scores) - targets) * weights
        return slopes * gradient.unsqueeze(1), None, None


def weighted_bce(scores: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of binary cross-entropies on logits, per client, in fewer passes than PyTorch's own. ``scores``:
    logits, shape (C, n); the only differentiable argument; ``targets``: probabilities, shape (C, n); ``weights``: shape
    (C, n). Returns shape (C,)."""
    if scores.dtype == torch.float32 and ops.serve(scores):
        return _CompiledBCE.apply(scores, targets, weights)
    # softplus(s) - s y; the threshold is where log(1 + e^s) equals s in double precision too.
    loss = torch.nn.functional.softplus(scores, threshold=40.0) - scores * targets
    return (loss * weights).sum(1)


def all_ranks(scores: Tensor) -> Tensor:
    """1-based rank of every item, equal scores by their item's number: whole numbers of shape (n, items)."""
    if ops.serve(scores) and scores.dtype in ops.REALS:
        return ops.all_ranks(scores)
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(1, scores.shape[1] + 1, dtype=torch.int32, device=scores.device)
    return torch.empty_like(order, dtype=torch.int32).scatter_(1, order, rank.expand_as(order))


@torch.no_grad()
def nearest_entries(queries: Tensor, keys: Tensor, filled: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Of each query the k nearest keys of its client, the nearest first, of equal ones the first. ``queries``: (C,
    items, d); ``keys``: (C, entries, d); ``filled``: which keys there are, bool of shape (C, entries); ``k``: at most
    the number of entries. Returns squared distances, infinite where a client has fewer keys, and the keys' numbers:
    each (C, k, items); not differentiable."""
    products = torch.baddbmm(keys.square().sum(2, keepdim=True), keys, queries.transpose(1, 2), alpha=-2.0)
    different = queries[:1] if queries.stride(0) == 0 else queries  # where all clients have the same, one of them
    lengths = different.square().sum(2).expand(len(queries), -1)
    if ops.serve(products) and products.dtype in ops.REALS:  # a third to two thirds less time for all of RLP2
        return ops.nearest(products, lengths, filled, k)
    # Entries before items: a minimum over the middle dimension runs along memory.
    distance = products.add_(lengths.unsqueeze(1)).clamp_(min=0.0).masked_fill_(~filled.unsqueeze(2), torch.inf)
    distances, entries = [], []
    for _ in range(k):
        nearest, entry = distance.min(dim=1, keepdim=True)
        distance.scatter_(1, entry, torch.inf)
        distances.append(nearest)
        entries.append(entry)
    return torch.cat(distances, 1), torch.cat(entries, 1)
