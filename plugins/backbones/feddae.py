"""FedDAE: a variational autoencoder whose clients mix a shared encoder with one of their own by a gate of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedcl_bench import BackboneSettings, HistoryBackbone, setting
from fedcl_bench.toolbox.layers import apply_linear, item_rows, perceptron, same_for_all

OUTPUT = "decoder.items"
GATE, OWN, SHARED = "gate", "own", "shared"  # each begins with a table NAME.items

# By what beta is multiplied in round r of block t
SCHEDULES = {"product": lambda t, r: 1.0 if t == r == 0 else 0.0, "tanh": lambda t, r: math.tanh(r / 10.0),
             "constant": lambda t, r: 1.0}


@dataclass(frozen=True)
class FedDAESettings(BackboneSettings):
    lr: float = setting(0.001, "learning rate of the client's own encoder and gate", above=0.0,
                        search=(0.0003, 0.001, 0.003, 0.01))
    lr_public: float = setting(0.3, "learning rate of the shared encoder and the decoder; Adam at the server knows no "
                               "scale of what it makes", above=0.0)
    dim: int = setting(16, "length d of the latent vector (released code: 256)", low=1)
    hidden: tuple[int, ...] = setting((), "sizes of the encoders' hidden layers (tanh), in reverse the decoder's "
                                      "(released code: 768,512)", low=1)
    dropout: float = setting(0.5, "dropout of the encoders' input and of the gate's hidden layer", low=0.0, below=1.0)
    kl_weight: float = setting(1.0, "beta: weight of the KL divergence", low=0.0)
    kl_schedule: str = setting("product", "beta is multiplied with tanh(r/10) after every round r from 0, and so is 0 "
                               "after the very first (released code); with tanh(r/10) of a block's round; or stays",
                               choices=tuple(SCHEDULES), only_if="kl_weight")
    restore: str = setting("paper", "a client keeps its own encoder and gate from round to round (paper), or gets the "
                           "mean of all clients' encoders and the gate that all began with (released code, whose "
                           "assignments to state_dict() change nothing)", choices=("paper", "released"))


class FedDAE(HistoryBackbone):
    """z_u = w_1 z_l + w_2 z_g with w = softmax(MLP_u(x_u)), z_l and z_g drawn by the encoders q_u and q of the history
    x_u / |x_u|, and the loss -sum_i x_ui log softmax(p(z_u))_i + beta KL(z_u || N(0, I)), with a shared decoder p. With
    ``restore=released`` all encoders are public and the gate never moves (in the code it moves within a round). The
    code's weight decay, 1e-8 by default, is left out."""

    name = "feddae"
    numbers = 1
    title = "variational autoencoder: shared encoder and decoder, a private encoder, and a private gate that mixes both"
    reference = ("Li et al., Personalized Federated Collaborative Filtering: A Variational AutoEncoder Approach, AAAI "
                 "2025, arXiv 2408.08931")
    Settings = FedDAESettings
    ambiguities = {"restore": {"paper": "paper", "released": "released code"},
                   "kl_schedule": {"product": "released code", "tanh": "its formula of a round"},
                   "server_optimiser": {"adam": "released code, at .001 with Adam's bias correction: a tenth to a "
                                                "twentieth of these steps",
                                        "none": "paper's appendix: gradient descent"}}
    defaults = {"optimiser": "adam", "server_optimiser": "adam", "server_optimiser_lr": 0.003, "server_beta2": 0.999,
                "server_epsilon": 1e-8, "init_from": "best"}
    output = OUTPUT
    sends_gradients = True

    @property
    def _parts(self) -> tuple[str, ...]:
        """What has an item table of its own."""
        return (SHARED,) if self.settings.restore == "paper" else (SHARED, OWN, GATE)

    def _rows(self, seed, part, items):
        """Rows with which an encoder or gate begins; PyTorch's would depend on the number of items."""
        s = self.settings
        width = s.dim if part == GATE else [*s.hidden, 2 * s.dim][0]
        return item_rows(seed, f"{part}.items", items, width, 0.01)

    def _layers(self, seed, part):
        """The other layers of an encoder or gate."""
        s = self.settings
        sizes = [s.dim, 2] if part == GATE else [*s.hidden, 2 * s.dim]
        return {f"{part}.bias": torch.zeros(sizes[0], dtype=torch.float64), **perceptron(seed, part, sizes)}

    def new_rows(self, seed, users, items):
        width = [self.settings.dim, *self.settings.hidden[::-1]][-1]
        output = item_rows(seed, OUTPUT, items, width, (3 * width) ** -0.5)
        public = {OUTPUT: torch.cat([output, torch.zeros_like(output[:, :1])], 1)}  # the last column is the bias
        public |= {f"{part}.items": self._rows(seed, part, items) for part in self._parts}
        private = {name: value for part in (OWN, GATE) if part not in self._parts
                   for name, value in self._layers(seed, part).items()}
        return public, same_for_all(private, users)

    def new_dense(self, seed):
        decoder = perceptron(seed, "decoder", [self.settings.dim, *self.settings.hidden[::-1]])
        return decoder | {name: value for part in self._parts for name, value in self._layers(seed, part).items()}

    def new_personal(self, seed, items):
        return {f"{part}.items": self._rows(seed, part, items) for part in (OWN, GATE) if part not in self._parts}

    def learning_rates(self, n_items, round_=0, batch=0):
        s = self.settings
        rates = {OUTPUT: s.lr_public}
        for part in ("decoder", SHARED, OWN, GATE):
            public = part in ("decoder", *self._parts)
            layers = [f"{part}.{k}.{kind}" for k in range(1 if part == GATE else len(s.hidden))
                      for kind in ("weight", "bias")]
            first = [] if part == "decoder" else [f"{part}.items", f"{part}.bias"]
            rates |= dict.fromkeys([*first, *layers], 0.0 if public and part == GATE else
                                   s.lr_public if public else s.lr)
        return rates

    def represent(self, clients, pool, history):
        s = self.settings
        weights = self._weights(clients, pool, history)
        means, variances, latents = zip(*(self._encoded(clients, pool, history, part) for part in (OWN, SHARED)))
        z = weights[0] * latents[0] + weights[1] * latents[1]
        h = self._through(clients, "decoder", z, len(s.hidden), last=True)
        vectors = torch.cat([h, torch.ones_like(h[:, :1])], 1)
        draw = history.draw
        beta = 0.0 if draw is None else s.kl_weight * SCHEDULES[s.kl_schedule](draw.step, draw.round)
        if beta == 0.0:
            return vectors, None
        mean = weights[0] * means[0] + weights[1] * means[1]
        variance = weights[0].square() * variances[0] + weights[1].square() * variances[1]
        return vectors, -0.5 * beta * (1.0 + variance.log() - mean.square() - variance).sum(1)

    def _weights(self, clients, pool, history):
        """w_1 and w_2, each (C, 1)."""
        hidden = torch.relu(pool(f"{GATE}.items", history.dropout_factors(GATE, 0.0, clients[f"{GATE}.bias"]))
                            + clients[f"{GATE}.bias"])
        hidden = history.dropped(GATE, self.settings.dropout, hidden)
        return torch.softmax(self._through(clients, GATE, hidden, 1), 1).split(1, 1)

    def _encoded(self, clients, pool, history, part):
        """Mean, variance and a draw of the latent vector by one encoder, each (C, d)."""
        s = self.settings
        bias = clients[f"{part}.bias"]
        factors = history.dropout_factors(part, s.dropout, bias) * history.size.to(bias).rsqrt()
        x = self._through(clients, part, pool(f"{part}.items", factors) + bias, len(s.hidden), first=True)
        mean, log_variance = x.split(s.dim, 1)
        return mean, log_variance.exp(), mean + (0.5 * log_variance).exp() * history.normal(f"{part} z", mean)

    def _through(self, clients, part, x, count, first=False, last=False):
        """x, (C, d), through layers with a tanh between them, ``first`` and ``last`` too where others are beside."""
        for k in range(count):
            x = torch.tanh(x) if first or k else x
            x = apply_linear(clients, f"{part}.{k}", x.unsqueeze(1)).squeeze(1)
        return torch.tanh(x) if last and count else x
