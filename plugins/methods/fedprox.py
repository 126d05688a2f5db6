"""FedProx: public parameters are pulled to what the server sent."""

from __future__ import annotations

from dataclasses import dataclass

from fedcl_bench import Method, setting


@dataclass(frozen=True)
class FedProxSettings:
    prox_mu: float = setting(1e-4, "weight mu of the proximal term; it diverges from 2 over the learning rate of item "
                             "rows on, which FedMF multiplies by the number of items", low=0.0,
                             search=(1e-5, 1e-4, 1e-3))


class FedProx(Method):
    """A client minimises h(w; w^t) = F(w) + mu / 2 ||w - w^t||^2 (Eq. 2), w its public parameters and w^t what the
    server sent, by the run's local epochs. ``stragglers`` are the paper's partial work (Algorithm 2).
    """

    name = "fedprox"
    numbers = 1
    title = "proximal pull of public parameters to what the server sent"
    reference = "Li et al., MLSys 2020"
    Settings = FedProxSettings
    first_step = 0
    sees_rows = True
    needs_sequential = None

    def local_loss(self, batch):
        moved = sum(values.flatten(1).square().sum(1) for values in batch.moved.values())
        return 0.5 * self.settings.prox_mu * moved
