"""The server weighs each client's change by its norm to a power: below 0 large changes count less."""

from dataclasses import dataclass

from fedcl_bench import Method, setting


@dataclass(frozen=True)
class NormWeightedSettings:
    norm_power: float = setting(-0.5, "a change counts as its norm to this power", low=-1.0, high=1.0,
                                search=(-1.0, -0.5, 0.5))


class NormWeighted(Method):
    name = "norm-weighted"
    title = "mean of clients' changes weighted by their norms"
    Settings = NormWeightedSettings
    first_step = 0
    gives_up = {"F7": "the server takes the norm of each client's change"}

    def aggregate_updates(self, updates):
        factors = updates.weights * updates.norms().clamp(min=1e-12) ** self.settings.norm_power
        return updates.weighted_sum(factors / factors.sum())
