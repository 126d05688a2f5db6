"""Local training without copies of item rows, for backbones whose logits are inner products (``Backbone.factors``).

The gradient of a logit v . q_i + b with respect to q_i is v, so under SGD a client's rows are the server's plus
multiples of the vectors it has had: after K updates row i is q_i + sum_k a_ki v_k. A client thus holds K numbers per
item instead of d; its logits of all items are one matrix product with the server's table, plus sum_k a_ki (v_k . v);
and what C clients add to the table is one matrix product per update too. This is the mathematics of ``local.py``, summed
in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import kernels
from .backbone import Backbone, Tables
from .local import ListTrainer
from .method import Method
from .model import Snapshot
from .optim import SGD, make_optimiser
from .sampling import LocalSettings
from .trainer import row_penalties


@dataclass(frozen=True)
class Outer:
    """What C clients added to their copies of an item table: the sum of outer products of ``steps`` and ``vectors``.

    Attributes:
        table: what the server sent, (items, d).
        items: the items that they have steps for, (C, slots), each at most once with a step; None: all of them, in
            order.
        steps: one per update, each (C, slots).
        vectors: one per update, each (C, d).
    """

    table: Tensor
    items: Tensor | None
    steps: tuple[Tensor, ...] = ()
    vectors: tuple[Tensor, ...] = ()

    def __getitem__(self, part: slice | Tensor) -> "Outer":
        """Of some clients."""
        return Outer(self.table, None if self.items is None else self.items[part],
                     tuple(step[part] for step in self.steps), tuple(v[part] for v in self.vectors))

    def scaled(self, factors: Tensor) -> "Outer":
        """Each client's times its factor, (C,)."""
        return replace(self, vectors=tuple(v * factors.to(v)[:, None] for v in self.vectors))

    def add_to(self, total: Tensor) -> None:
        """Add the sum over clients to a table of shape (items, d)."""
        for step, vector in zip(self.steps, self.vectors):
            if self.items is None:
                total.addmm_(step.T, vector)
            else:
                kernels.add_products(total, self.items, step, vector)

    def rows(self) -> Tensor:
        """Of each client, (C, slots, d)."""
        return torch.stack(self.steps, 2) @ torch.stack(self.vectors, 1)


class _Logits(torch.autograd.Function):
    """vectors @ table.T + constants + sum_k steps_k (past_k . vectors), whose gradient with respect to ``own``, which
    stands for what the client will have added to each logit's row, is that of the logits themselves."""

    @staticmethod
    def forward(ctx, vectors: Tensor, constants: Tensor | None, own: Tensor, outer: Outer) -> Tensor:
        ctx.outer = outer
        if outer.items is not None:
            logits = kernels.row_products(outer.table, outer.items, vectors, constants)
        elif constants is None:
            logits = vectors @ outer.table.T
        else:
            logits = torch.addmm(constants, vectors, outer.table.T)
        for step, past in zip(outer.steps, outer.vectors):
            logits.addcmul_(step, (past * vectors).sum(1, keepdim=True))
        return logits

    @staticmethod
    def backward(ctx, gradient: Tensor):
        to_vectors, to_constants, outer = None, None, ctx.outer
        if ctx.needs_input_grad[0]:
            to_vectors = (gradient @ outer.table if outer.items is None else
                          kernels.row_sums(outer.table, outer.items, gradient))
            for step, past in zip(outer.steps, outer.vectors):
                to_vectors.addcmul_((gradient * step).sum(1, keepdim=True), past)
        if ctx.needs_input_grad[1]:
            to_constants = gradient.sum(1, keepdim=True)
        return to_vectors, to_constants, gradient if ctx.needs_input_grad[2] else None, None


class InnerTrainer(ListTrainer):
    """``ListTrainer`` whose item rows are not held; ``rows`` has one number per client and slot in their place, whose
    gradient is the logit's. ``moved`` holds an ``Outer`` for the table."""

    def _own_copies(self) -> Tables:
        (self.name, table), = self.model.public.items()
        self.outer = Outer(table, None if self.whole else self.slots.items.contiguous())
        return {self.name: table.new_zeros(()).expand(self.slots.items.shape)}

    def _score(self, clients: Tables, rows: Tables) -> Tensor:
        vectors, constants = self.backbone.factors(clients)
        self.vectors = vectors.detach().clone()  # the update changes parameters in place
        return _Logits.apply(vectors, constants, rows[self.name], self.outer)

    def _move(self, name: str, value: Tensor | None, update: Tensor) -> None:
        if name != self.name:
            super()._move(name, value, update)
            return
        self.outer = replace(self.outer, steps=(*self.outer.steps, update),
                             vectors=(*self.outer.vectors, self.vectors))
        self.moved[name] = update  # tells whether anything moved, until the round ends

    def train(self) -> Tensor:
        loss = super().train()
        self.moved[self.name] = self.outer
        return loss


def is_inner(backbone: Backbone, method: Method, model: Snapshot, settings: LocalSettings) -> bool:
    """Whether clients can be trained so: logits are inner products with the one public item table, nothing else reads
    item rows, and updates are multiples of gradients."""
    one = torch.zeros(1, dtype=torch.int64, device=next(model.tables()).device)
    return (len(model.public) == 1 and backbone.factors(model.clients(one)) is not None
            and defined_by(backbone, "factors", over="score") and type(backbone).regulariser is Backbone.regulariser
            and not backbone.whole_tables and isinstance(make_optimiser(settings), SGD)
            and backbone.weight_decay == 0.0 and not row_penalties(method, model.public))


def defined_by(backbone: Backbone, hook: str, over: str) -> bool:
    """Whether the class with the last word on ``hook`` is that on the hook ``over`` too, or one derived from it: a
    subclass that redefines only the latter means something else."""
    owner = {name: next(cls for cls in type(backbone).__mro__ if name in vars(cls)) for name in (hook, over)}
    return issubclass(owner[hook], owner[over])
