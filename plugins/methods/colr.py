"""CoLR: clients train and send one low-rank factor of their item update, all along the same random directions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedcl_bench import Method, UserError, rng, setting
from fedcl_bench.toolbox.layers import public_shapes


@dataclass(frozen=True)
class CoLRSettings:
    rank: int = setting(4, "r: numbers that a client sends per item row, at most d", low=1, search=(1, 2, 4, 8, 16))
    basis: str = setting("orthonormal", "rows of B: orthonormal times sqrt(d/r), or N(0, 1/r)",
                         choices=("orthonormal", "gaussian"))
    factor_lr: str = setting("scaled", "learning rate of A: the rows' times sqrt(r/d), with Adam times (r/d)^(1/4), "
                             "or the rows'", choices=("scaled", "plain"))
    mean: str = setting("participants", "the server divides the sum of A by the number of participants, or each row by "
                        "the number of those who changed it, which they send too", choices=("participants", "senders"))


class CoLR(Method):
    """Every client's update of an item table Q (items, d) has rank r, along directions that all share in a round:

        (1)  B_t drawn anew by the server in round t, (r, d); clients draw the same from its seed
        (2)  min over p_u, A_u of L_u(p_u, Q_t + A_u B_t) by local training from A_u = 0, (items, r)
        (3)  Q_{t+1} = Q_t + (sum_u A_u / N) B_t, since sum_u (A_u B_t) = (sum_u A_u) B_t
        (4)  or Q_{t+1},i = Q_t,i + (sum_u A_u,i / n_i) B_t, n_i = number of clients with A_u,i != 0 (mean=senders)

    The server needs the sums alone, of A and in (4) of counts, so they can be encrypted. Numbers of equations are ours.
    Dense layers are sent as they are. With SGD, (2) is Q's gradient times B'B.
    """

    name = "colr"
    numbers = 2
    title = "item updates of low rank, of which clients send one factor along random directions that all share"
    reference = ("Nguyen et al., Towards Efficient Communication and Secure Federated Recommendation System via "
                 "Low-rank Training, WWW 2024, arXiv 2401.03748")
    Settings = CoLRSettings
    first_step = 0
    ambiguities = {"mean": {"participants": "mean of FedAvg", "senders": "released code"},
                   "factor_lr": {"scaled": "released code", "plain": "without a factor"}}

    def _rank(self, name, shape):
        """How many numbers of each row of a public table are sent."""
        if self.settings.rank > shape[1] > 1:
            raise UserError(f"setting 'rank': found {self.settings.rank}, accepted: at most the numbers of a row of "
                            f"'{name}', {shape[1]}.")
        return min(self.settings.rank, shape[1])

    def sums(self, backbone, n_items):
        tables, dense = public_shapes(backbone)
        shapes = {f"{name} factor": (n_items, self._rank(name, shape)) for name, shape in tables.items()}
        if self.settings.mean == "senders":
            shapes |= {f"{name} senders": (n_items,) for name in tables}
        return {**shapes, **dense}

    def row_basis(self, name, width, draw):
        """(1), in double precision, times (r/d)^(1/4) with factor_lr=scaled: twice in (2), it is sqrt(r/d). Adam's
        steps do not follow the gradient's scale, so with it, once."""
        rank = min(self.settings.rank, width)
        if width == 1:
            return torch.ones(1, 1, dtype=torch.float64)
        basis = rng.normal_rows(draw.seed, f"basis of {name} {draw.step} {draw.round}", 0, rank, width)
        if self.settings.basis == "orthonormal":
            left, _, right = torch.linalg.svd(basis, full_matrices=False)
            basis = left @ right * math.sqrt(width)
        scale = (rank / width) ** 0.25 if self.settings.factor_lr == "scaled" else 1.0
        return basis * scale / math.sqrt(rank)

    def end_local(self, local):
        for name, (change, items) in local.changes.items():
            if name in local.dense:
                local.add(name, change)
                continue
            local.add(f"{name} factor", change, items)
            if self.settings.mean == "senders":
                local.add(f"{name} senders", (change != 0).any(2).to(change), items)

    def aggregate_sums(self, sums, count, public, draw):
        return {name: self._change(name, sums, count, table, draw) for name, table in public.items()}

    def _change(self, name, sums, count, table, draw):
        """(3) or (4), of a dense layer the mean."""
        if name in sums:
            return sums[name] / count
        counts = sums[f"{name} senders"].clamp(min=1.0)[:, None] if self.settings.mean == "senders" else count
        return sums[f"{name} factor"] / counts @ self.row_basis(name, table.shape[1], draw).to(table)
