"""Server optimisers for public parameters: FedAvgM (Hsu et al., 2019) and FedOpt (Reddi et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..rng import Tables


@dataclass(frozen=True)
class ServerOptimiser:
    """Takes the clients' mean change, after clipping and noise, for a pseudo-gradient.

    Δ_t is the mean of (what a client uploads) - x_t, and x_{t+1} what the server answers:

    - momentum (FedAvgM; Reddi et al. name it so too): m_t = β1 m_{t-1} + Δ_t,  x_{t+1} = x_t + η m_t
    - adam, yogi, adagrad (Reddi et al., Algorithm 2): m_t = β1 m_{t-1} + (1 - β1) Δ_t,
      x_{t+1} = x_t + η m_t / (√v_t + τ), without a correction of bias, with m_{-1} = 0, v_{-1} = τ² and

          adagrad  v_t = v_{t-1} + Δ_t²
          yogi     v_t = v_{t-1} - (1 - β2) Δ_t² sign(v_{t-1} - Δ_t²)
          adam     v_t = β2 v_{t-1} + (1 - β2) Δ_t²

    Which it is says the setting ``server_optimiser``, η ``server_optimiser_lr``, β1 ``server_momentum``, β2
    ``server_beta2`` and τ ``server_epsilon``.
    """

    settings: Any  # FederationSettings, which make it

    @property
    def tables(self) -> int:
        """How many it remembers for each public one."""
        return 1 if self.settings.server_optimiser == "momentum" else 2

    def step(self, sent: Tables, mean: Tables, moments: Tables) -> tuple[Tables, Tables]:
        """What the server answers, and what it remembers. ``sent``: x_t; ``mean``: of the uploads, the same names;
        ``moments``: from the round before, by ``m/NAME`` and ``v/NAME``; empty before the first."""
        after, kept, s = {}, {}, self.settings
        momentum = s.server_optimiser == "momentum"
        for name, value in mean.items():
            delta = value - sent[name]
            m = moments.get(f"m/{name}", torch.zeros_like(delta)) * s.server_momentum
            kept[f"m/{name}"] = m = m + delta * (1.0 if momentum else 1.0 - s.server_momentum)
            if momentum:
                after[name] = sent[name] + s.server_optimiser_lr * m
                continue
            v = moments.get(f"v/{name}", torch.full_like(delta, s.server_epsilon ** 2))
            kept[f"v/{name}"] = v = self._second(v, delta.square())
            after[name] = sent[name] + s.server_optimiser_lr * m / (v.sqrt() + s.server_epsilon)
        return after, kept

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        """v_t, given v_{t-1} and Δ_t²."""
        kind, beta2 = self.settings.server_optimiser, self.settings.server_beta2
        if kind == "adagrad":
            return v + square
        if kind == "yogi":
            return v - (1.0 - beta2) * square * torch.sign(v - square)
        return beta2 * v + (1.0 - beta2) * square
