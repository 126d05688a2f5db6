"""FedProx: public parameters are pulled to what the server sent."""

from __future__ import annotations

from dataclasses import dataclass

from fedcl_bench import Method, Pull, setting


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
    numbers = 2
    title = "proximal pull of public parameters to what the server sent"
    reference = "Li et al., MLSys 2020"
    Settings = FedProxSettings
    first_step = 0
    needs_sequential = None

    def pull(self, name, private):
        return None if private else Pull(self.settings.prox_mu)
