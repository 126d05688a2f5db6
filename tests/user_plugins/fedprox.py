"""FedProx (Li et al., MLSys 2020): every public parameter stays near what the server sent in the round."""

from dataclasses import dataclass

from fedcl_bench import Method, setting


@dataclass(frozen=True)
class FedProxSettings:
    mu: float = setting(1e-4, "weight of the proximal term", low=0.0, search=(1e-6, 1e-5, 1e-4))


class FedProx(Method):
    name = "fedprox"
    title = "proximal term towards the parameters received in the round"
    reference = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"
    Settings = FedProxSettings

    def begin_step(self, step, model, backbone):
        self.server_state = dict(model.public)

    def aggregate(self, public):
        self.server_state = dict(public)
        return public

    @property
    def penalises_rows(self):
        return self.settings.mu > 0.0

    def row_penalty(self, name):
        if self.settings.mu == 0.0:
            return None
        received = self.server_state[name]
        return lambda rows, items: self.settings.mu / 2 * (rows - received[items]).flatten(2).square().sum(2)

    def begin_local(self, local):
        local.kept.update({name: values.detach().clone() for name, values in local.dense.items()})

    def local_loss(self, batch):
        if self.settings.mu == 0.0 or not batch.dense:
            return None
        return self.settings.mu / 2 * sum((values - batch.kept[name]).flatten(1).square().sum(1)
                                          for name, values in batch.dense.items())
