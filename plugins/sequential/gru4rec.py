"""GRU4Rec: gated recurrent units over a client's session, with RecBole's layers, at every position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcl_bench import SequentialBackbone, SequentialSettings, linear_start, setting, xavier
from fedcl_bench.toolbox.functional import linear, shared
from fedcl_bench.toolbox.layers import apply_linear


@dataclass(frozen=True)
class GRU4RecSettings(SequentialSettings):
    # FCUCR says nothing of the state's length. As long as the items' vectors, the dense part has the size of SASRec's;
    # RecBole's 128 belongs to vectors of 64.
    hidden_size: int = setting(0, "length of the recurrent state; 0: that of dim", low=0)
    layers: int = setting(1, "recurrent layers", low=1)


class Recurrence(torch.autograd.Function):
    """h_l = (1 - z) n + z h_(l-1) with n = tanh(x_n + r W_n h_(l-1)), one weight matrix per client. The order of gates
    and the place of r are those of torch.nn.GRU without biases, which takes one matrix for all. Plain autograd over the
    positions takes twice as long, most of it adding up the gradient of the weights position by position; here it is one
    product at the end."""

    @staticmethod
    def forward(ctx, gates: Tensor, weight: Tensor) -> Tensor:
        """States at all positions, (C, L, h), from zero. ``gates``: what the inputs add to r, z and n, (C, L, 3h);
        ``weight``: of the state, (C, 3h, h), or (3h, h) if all clients have the same."""
        count, length, h = gates.shape[0], gates.shape[1], weight.shape[-1]
        gates = gates.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # r and z are written over it
        states = gates.new_zeros(length + 1, count, h)
        new, inner = gates.new_empty(2, length, count, h)
        transposed = weight.transpose(-2, -1)
        for l in range(length):
            of_state = _times(states[l], transposed)
            rz = gates[l, :, :2 * h].add_(of_state[:, :2 * h]).sigmoid_()
            inner[l] = of_state[:, 2 * h:]
            torch.addcmul(gates[l, :, 2 * h:], rz[:, :h], inner[l], out=new[l]).tanh_()
            torch.lerp(new[l], states[l], rz[:, h:], out=states[l + 1])
        ctx.save_for_backward(weight, states, gates[..., :2 * h], new, inner)
        return states[1:].transpose(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        weight, states, rz, new, inner = ctx.saved_tensors
        r, z = rz.split(weight.shape[-1], dim=2)
        length, count, h = new.shape
        of_new = (1.0 - z) * (1.0 - new * new)
        # How h_l changes with r's, z's and n's part of W h_(l-1), then times the gradient of h_l.
        change = torch.stack([of_new * inner * r * (1.0 - r), (states[:-1] - new) * z * (1.0 - z), of_new * r], 2)
        total = torch.empty_like(new)
        later = torch.zeros_like(new[0])
        for l in reversed(range(length)):
            torch.add(grad[:, l], later, out=total[l])
            change[l] *= total[l].unsqueeze(1)
            if l:
                back = _times(change[l].view(count, 3 * h), weight)
                later = torch.addcmul(back, total[l], z[l])
        change = change.flatten(2)
        of_weight = (change.flatten(0, 1).T @ states[:-1].flatten(0, 1) if weight.dim() == 2 else
                     torch.bmm(change.permute(1, 2, 0), states[:-1].transpose(0, 1)))
        change = change.unflatten(2, (3, h))
        of_gates = torch.cat([change[:, :, :2].flatten(2), of_new * total], 2)
        return of_gates.transpose(0, 1), of_weight


def _times(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Each client's vector (C, n) times its matrix (C, n, m), or one for all (n, m): (C, m)."""
    return vectors @ matrices if matrices.dim() == 2 else torch.bmm(vectors.unsqueeze(1), matrices).squeeze(1)


class GRU4Rec(SequentialBackbone):
    """Dropout on the items, recurrent layers without biases, a linear layer to the items' length. The state starts at
    zero, and zero inputs leave it there, so padding before a sequence changes nothing after it."""

    name = "gru4rec"
    numbers = 1
    title = "gated recurrent units over the session, all parameters public"
    reference = ("Tan, Xu & Liu, Improved Recurrent Neural Networks for Session-based Recommendations, DLRS 2016, as "
                 "in RecBole 1.2.0, with the start of FCUCR's released code (WWW 2026)")
    Settings = GRU4RecSettings
    pads = False

    def dense_starts(self):
        d, h = self.settings.dim, self.settings.hidden_size or self.settings.dim
        starts = {}
        for k in range(self.settings.layers):
            starts |= {f"{k}.input.weight": xavier(3 * h, h if k else d), f"{k}.state.weight": xavier(3 * h, h)}
        return {**starts, **linear_start("out", h, d)}

    def encode(self, clients, inputs, sequence, dropout):
        x = dropout(inputs, self.settings.dropout)
        for k in range(self.settings.layers):
            gates = linear(x, clients[f"{k}.input.weight"])
            weight, of_all = clients[f"{k}.state.weight"], shared(clients[f"{k}.state.weight"])
            x = Recurrence.apply(gates, weight if of_all is None else of_all)
        return apply_linear(clients, "out", x)
