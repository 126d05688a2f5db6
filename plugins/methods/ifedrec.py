"""IFedRec: a network at the server learns items' rows from their attributes, for items that nobody has trained on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fedcl_bench import ItemFeatureSettings, Method, Pull, setting
from fedcl_bench.toolbox.server_module import ServerModule

ROWS = "rows of "  # begins the names of what the network says of each table


@dataclass(frozen=True)
class IFedRecSettings(ItemFeatureSettings):
    align_weight: float = setting(0.3, "weight of the distance of a client's item rows to the network's (released "
                                  "code: 1 on FedNCF, 10 on PFedRec, with dim=200)", low=0.0, search=(0.1, 0.3, 1.0))
    align_reduction: str = setting("mean", "squared differences are averaged over the table (released code) or summed",
                                   choices=("mean", "sum"), only_if="align_weight")
    network_lr: float = setting(0.005, "learning rate of the server's Adam", above=0.0, search=(0.001, 0.005, 0.02))
    network_steps: int = setting(1, "steps of it after every round, each on all items", low=1, search=(1, 5, 20))
    network_hidden: tuple[int, ...] = setting((300,), "sizes of the network's hidden layers (ReLU)", low=1)
    network_output: str = setting("tanh", "the network's rows are within -1 and 1 (released code), or unbounded",
                                  choices=("tanh", "linear"))


class IFedRec(Method):
    """After every round the server fits M(x_i) to the mean row q_i of each item i with attributes x_i, by
    L = mean (M(x_i) - q_i)^2, and sends r_i = M(x_i) beside q. A client's loss gets align_weight mean (q_i - r_i)^2
    over the whole table, and attributes stay at the server. With ``cold_items=method`` new items have the rows r_i.
    """

    name = "ifedrec"
    numbers = 2
    title = "the server learns item rows from attributes, near which clients keep theirs; cold items are ranked by them"
    reference = "Zhang et al., When Federated Recommendation Meets Cold-Start Problem, WWW 2024, arXiv 2305.12650"
    Settings = IFedRecSettings
    ambiguities = {"align_reduction": {"mean": "released code", "sum": "squared distance"},
                   "network_output": {"tanh": "released code", "linear": "rows of any size"}}
    first_step = 0
    needs_features = True
    broadcasts = (ROWS,)

    def _network(self, public):
        s, width = self.settings, sum(table[0].numel() for table in public.values())

        def make():
            sizes, layers = [self.features.shape[1], *s.network_hidden], []
            for inputs, outputs in zip(sizes, sizes[1:]):
                layers += [nn.Linear(inputs, outputs), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(sizes[-1], width), *[nn.Tanh()] * (s.network_output == "tanh"))
        return ServerModule("network", make, partial(torch.optim.Adam, lr=s.network_lr))

    @torch.no_grad()
    def _rows(self, network, state, items, public):
        """The network's rows of some items, by table."""
        like = next(iter(public.values()))
        rows = network.load(state)(self.features[items.start:items.stop].to(like))
        parts = rows.split([table[0].numel() for table in public.values()], dim=1)
        return {name: part.reshape(-1, *table.shape[1:]) for (name, table), part in zip(public.items(), parts)}

    def _with_rows(self, network, state, public):
        rows = self._rows(network, state, range(len(next(iter(public.values())))), public)
        return {**state, **{f"{ROWS}{name}": table for name, table in rows.items()}}

    def new_server_state(self, seed, public):
        network = self._network(public)
        return self._with_rows(network, network.start(seed, next(iter(public.values()))), public)

    def aggregate(self, public):
        """Fit the network to the mean of the uploads; its rows go to the clients beside that."""
        network = self._network(public)
        target = torch.cat([table.flatten(1) for table in public.values()], dim=1)
        attributes = self.features[:len(target)].to(target)
        state = network.train(self.server_state, lambda module: (module(attributes) - target).square().mean(),
                              self.settings.network_steps)
        self.server_state = self._with_rows(network, state, public)
        return public

    @property
    def penalises_rows(self):
        return self.settings.align_weight > 0.0

    def pull(self, name, private):
        """Of align_weight mean (q - r)^2; items that are new since the last round have no r yet."""
        anchors = {key: table for key, table in self.server_state.items() if key.startswith(ROWS)}
        if private or ROWS + name not in anchors or self.settings.align_weight == 0.0:
            return None
        numbers = sum(table.numel() for table in anchors.values()) if self.settings.align_reduction == "mean" else 1
        return Pull(2.0 * self.settings.align_weight / numbers, anchors[ROWS + name])

    def new_item_rows(self, items, public):
        return self._rows(self._network(public), self.server_state, items, public)
