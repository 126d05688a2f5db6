"""FedCIA: clients keep their own item tables and share how similar items are, in place of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import torch

from fedcl_bench import Incompatible, Method, rng, setting
from fedcl_bench.toolbox.own_parameters import without_public

MAKING_MEAN = Lock()  # one thread makes it, the others take it


@dataclass(frozen=True)
class FedCIASettings:
    own_rate: float = setting(1.0, "learning rate of item rows, as a multiple of the backbone's over the number of "
                              "the run's users", above=0.0, search=(1.0, 3.0, 10.0, 30.0))
    align_steps: int = setting(100, "steps towards the mean similarities after each round", low=0, search=(10, 30, 100))
    align_lr: float = setting(0.1, "learning rate of these steps", above=0.0, search=(0.01, 0.1))
    align_decay: float = setting(1e-3, "weight decay in these steps", low=0.0)
    similarity_noise: float = setting(0.001, "scale b of Laplace noise on every similarity that is sent", low=0.0)


class FedCIA(Method):
    """No parameter is averaged. After local training client u, with item table V_u (items, d),

        (1)  sends S_u = V_u V_u' + Laplace(b), (items, items), of which the server needs the sum alone
        (2)  the server sends S = sum_u S_u / N
        (3)  takes align_steps steps of gradient descent on || V_u V_u' - S ||, the Frobenius norm, with weight decay

    then ranks, and trains on. Numbers of equations are ours; (3) is the released code's, whose clients
    in `ml100k_all` are users, as here, and elsewhere groups of users. A message has items^2 numbers. A step of (3)
    takes items d^2 operations a client in the basis of S's eigenvectors, 100 some 10 s of the processor on ML-100K.
    """

    name = "fedcia"
    numbers = 4
    title = "clients keep their item tables and move them towards the mean of all clients' item similarities"
    reference = ("Han et al., FedCIA: Federated Collaborative Information Aggregation for Privacy-Preserving "
                 "Recommendation, SIGIR 2025, arXiv 2504.14208")
    Settings = FedCIASettings
    first_step = 0
    ambiguities = {"similarity_noise": {0.001: "released code", 0.0: "without noise"}}

    def __init__(self, settings):
        super().__init__(settings)
        self._latest = None, None  # sums, and what _mean made of them, which all need

    def trained_backbone(self, backbone, clients):
        tables = backbone.new_rows(0, range(0), range(0))[0]
        if backbone.factor_names is None or len(tables) != 1 or backbone.whole_tables or backbone.keeps_local_tables:
            raise Incompatible(f"method '{self.name}' compares items by inner products of their rows, which "
                               f"'{backbone.name}' has none of.", "backbone",
                               lambda cls: cls.factor_names is not None)
        self._table, = tables
        return without_public(type(backbone), self.settings.own_rate / clients, whole_tables=True)(backbone.settings)

    @property
    def noise_drawn_at_once(self):
        return self.settings.similarity_noise > 0.0

    def sums(self, backbone, n_items):
        return {"similarity": (n_items, n_items)}

    def end_local(self, local):
        """(1), but for the noise."""
        table = local.private[self._table]
        local.add("similarity", (table, table.transpose(1, 2)))

    def aggregate_sums(self, sums, count, public, draw):
        return {name: torch.zeros_like(table) for name, table in public.items()}

    def receive(self, private, sums, count, draw):
        """(2) and (3)."""
        table = private[self._table]
        with MAKING_MEAN:
            values, vectors, size = self._mean(sums["similarity"], count, draw)
        # Numbers along small eigenvalues shrink in each step; products of denormal ones take many times as long.
        torch.set_flush_denormal(True)
        try:
            rows = torch.einsum("ji,cjd->cid", vectors, table)
            return {self._table: torch.einsum("ij,cjd->cid", vectors, self._aligned(rows, values, size))}
        finally:
            torch.set_flush_denormal(False)

    def _mean(self, similarity, count, draw):
        """(2): eigenvalues, (items,), and eigenvectors, (items, items), of the mean's symmetric part, and the sum of
        the mean's squares. Its noise, which is the same for all, is drawn at once, as is that of `upload_noise`."""
        of, result = self._latest
        if of is not similarity:
            s, mean = self.settings, similarity.double() / count
            if s.similarity_noise > 0.0:
                mean = mean + rng.mean_laplace(draw.seed, draw.step, draw.round, "similarity", tuple(mean.shape),
                                               s.similarity_noise, count).to(mean.device)
            values, vectors = torch.linalg.eigh(((mean + mean.T) / 2).to(similarity))
            result = values.double(), vectors, mean.square().sum()
            self._latest = similarity, result
        return result

    def _aligned(self, rows, values, size):
        """(3), of rows (C, items, d) in the basis of S's eigenvectors, where S V_u has values times rows."""
        s, factors = self.settings, values.to(rows)[:, None]
        for _ in range(s.align_steps):
            own = rows.transpose(1, 2) @ rows
            whole = own.double().square().sum((1, 2)) + size
            both = torch.linalg.vector_norm(rows, dim=2).double().square() @ values  # <V_u V_u', S>
            square = (whole - 2.0 * both).maximum(1e-12 * whole)  # in double: terms cancel
            rate = (2.0 * s.align_lr / square.sqrt()).to(rows)[:, None, None]  # of rows own - factors rows
            own.mul_(-rate).diagonal(dim1=1, dim2=2).add_(1.0 - s.align_lr * s.align_decay)
            rows = (rows * (rate * factors)).baddbmm_(rows, own)
        return rows
