"""Reg: keep parameters near those of the previous block."""

from __future__ import annotations

from dataclasses import dataclass

from fedcl_bench import Method, setting
from fedcl_bench.toolbox.functional import rows_of


@dataclass(frozen=True)
class RegSettings:
    lambda_reg: float = setting(1e-5, "weight of the penalty; from 1e-3 on it diverges on most data", low=0.0,
                                search=(1e-7, 1e-6, 1e-5, 1e-4))
    reg_reduction: str = setting("sum", "squared differences are summed (default of the released helper) or averaged",
                                 choices=("sum", "mean"))


class Reg(Method):
    """L = L_rec + lambda_reg ( ||p_u - p_u^{t-1}||^2 for old users + ||Q_u - Q^{t-1}||^2 over old item rows ). The
    anchors are the best-validation parameters of the previous block, fixed during a block. Rows of items new in the
    block are free. F3CRec describes this baseline without an equation; the loss is that of its released helper."""

    name = "reg"
    numbers = 1
    title = "squared-error pull of old parameters towards the previous block's"
    reference = "baseline of F3CRec (Lim et al., CIKM 2025, section 5.1)"
    Settings = RegSettings
    ambiguities = {"reg_reduction": {"sum": "released helper", "mean": "averaged"}}

    def _weight(self, anchor):
        mean = self.settings.reg_reduction == "mean"
        return self.settings.lambda_reg / (anchor.numel() if mean else 1)

    def local_loss(self, batch):
        """lambda_reg ||p_u - p_u^{t-1}||^2 of old users, for every private parameter, and the same of dense public
        ones."""
        if self.settings.lambda_reg == 0.0:
            return None
        loss = 0.0
        for name, values in batch.private.items():
            anchor = rows_of(self.client_state[name], batch.users)
            old = batch.users < len(self.client_state[name])
            difference = values[:, :anchor.shape[1]] - anchor  # personal tables may have new items
            loss = loss + self._weight(anchor[0]) * difference.flatten(1).square().sum(1) * old
        for name, values in batch.dense.items():
            anchor = self.server_state[name]
            loss = loss + self._weight(anchor) * (values - anchor).flatten(1).square().sum(1)
        return loss

    @property
    def penalises_rows(self):
        return self.settings.lambda_reg > 0.0

    def row_penalty(self, name):
        """lambda_reg ||Q_u,i - Q_i^{t-1}||^2 of every old item row i."""
        if self.settings.lambda_reg == 0.0:
            return None
        anchor = self.server_state[name]
        weight = self._weight(anchor)

        def penalty(rows, items):
            difference = rows - anchor[items.clamp(max=len(anchor) - 1)]
            return weight * difference.flatten(2).square().sum(2) * (items < len(anchor))

        return penalty

    def end_step(self, step, model, backbone, trained, draw):
        self.client_state = dict(model.private)
        self.server_state = {**model.public, **model.dense}

    def downloads_previous_model(self):
        return self.settings.lambda_reg > 0.0
