"""FedMF by Flower's simulation: a node for each client, whose user vector lies in its ``Context.state``."""

from __future__ import annotations

import numpy as np
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import ArrayRecord, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from job import Job
from model import FedMF
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
job = Job.read()
rng = np.random.default_rng(0)


# --- user code
class Client(NumPyClient):
    def fit(self, parameters, config):
        known, state = job.lists[self.get_context().node_config["partition-id"]], self.get_context().state
        model = FedMF(job.n_items, job.dim)
        model.items.weight.data = torch.from_numpy(parameters[0].copy())
        if "user" in state.array_records:
            model.user.data = torch.from_numpy(state["user"].to_numpy_ndarrays()[0].copy())
        optimiser = torch.optim.SGD([{"params": [model.user], "lr": job.user_rate},
                                     {"params": model.items.parameters(), "lr": job.item_rate}])
        data = TensorDataset(*map(torch.from_numpy, job.samples(rng, known)))
        for item, label in DataLoader(data, job.batch_size, shuffle=True):
            optimiser.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(item), label).backward()
            optimiser.step()
        state["user"] = ArrayRecord([model.user.detach().numpy()])
        return [model.items.weight.detach().numpy()], 1, {}


def client(context):
    made = Client()
    made.set_context(context)
    return made.to_client()


def server(_):
    start = ndarrays_to_parameters([FedMF(job.n_items, job.dim).items.weight.detach().numpy()])
    strategy = FedAvg(fraction_fit=1.0, fraction_evaluate=0.0, min_fit_clients=len(job.lists),
                      min_available_clients=len(job.lists), initial_parameters=start)
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=job.rounds))


run_simulation(ServerApp(server_fn=server), ClientApp(client_fn=client), len(job.lists),
               backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
# --- end
