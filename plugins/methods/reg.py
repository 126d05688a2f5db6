"""Reg: keep parameters near those of the previous block."""

from __future__ import annotations

from dataclasses import dataclass

from fedcl_bench import Method, Pull, setting


@dataclass(frozen=True)
class RegSettings:
    lambda_reg: float = setting(1e-5, "weight of the penalty; from 1e-3 on it diverges on most data", low=0.0,
                                search=(1e-7, 1e-6, 1e-5, 1e-4))
    reg_reduction: str = setting("sum", "squared differences are summed (default of the released helper) or averaged",
                                 choices=("sum", "mean"))


class Reg(Method):
    """L = L_rec + lambda_reg ( ||p_u - p_u^{t-1}||^2 for old users + ||Q_u - Q^{t-1}||^2 over old item rows ). The
    anchors are the best-validation parameters of the previous block, fixed during a block. Rows of items new in the
    block are free. F3CRec describes this baseline without an equation; the loss is that of its released helper,
    which has no term of predictors."""

    name = "reg"
    numbers = 2
    title = "squared-error pull of old parameters towards the previous block's"
    reference = "baseline of F3CRec (Lim et al., CIKM 2025, section 5.1)"
    Settings = RegSettings
    ambiguities = {"reg_reduction": {"sum": "released helper", "mean": "averaged"}}

    @property
    def penalises_rows(self):
        return self.settings.lambda_reg > 0.0

    def pull(self, name, private):
        """lambda_reg ||x - x^{t-1}||^2 of every parameter; new users and items have no past."""
        anchor = (self.client_state if private else self.server_state).get(name)
        if anchor is None or self.settings.lambda_reg == 0.0:
            return None
        each = anchor[0] if private else anchor
        averaged = each.numel() if self.settings.reg_reduction == "mean" else 1
        return Pull(2.0 * self.settings.lambda_reg / averaged, anchor)

    def end_step(self, step, model, backbone, trained, draw):
        self.client_state = dict(model.private)
        self.server_state = {**model.public, **model.dense}

    def downloads_previous_model(self):
        return self.settings.lambda_reg > 0.0
