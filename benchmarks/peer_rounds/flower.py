"""Flower's simulation: a node for each client, whose private parameters lie in its ``Context.state``."""

from __future__ import annotations

import numpy as np
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import ArrayRecord, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from job import Job
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
job = Job.read()
rng = np.random.default_rng(0)


# --- user code
def public(model):
    return {name: table.numpy() for name, table in model.state_dict().items() if name not in model.private}


class Client(NumPyClient):
    def __init__(self, context):
        self.client, self.state = context.node_config["partition-id"], context.state

    def fit(self, parameters, config):
        model = job.make()
        private = self.state["private"].to_torch_state_dict() if "private" in self.state.array_records else {}
        sent = {name: torch.from_numpy(table.copy()) for name, table in zip(public(model), parameters)}
        model.load_state_dict({**sent, **private}, strict=False)
        optimiser = model.optimiser(job)
        data = TensorDataset(*map(torch.from_numpy, job.samples(rng, self.client)))
        for _ in range(job.epochs):
            for batch in DataLoader(data, job.batch_size, shuffle=True):
                optimiser.zero_grad()
                model.loss(*batch).backward()
                optimiser.step()
        if model.private:
            self.state["private"] = ArrayRecord({name: model.state_dict()[name] for name in model.private})
        return list(public(model).values()), 1, {}


def client(context):
    return Client(context).to_client()


class Average(FedAvg):
    def aggregate_fit(self, server_round, results, failures):
        for failure in failures:
            raise failure
        return super().aggregate_fit(server_round, results, failures)


def server(_):
    strategy = Average(fraction_fit=1.0, fraction_evaluate=0.0, min_fit_clients=len(job.lists),
                       min_available_clients=len(job.lists),
                       initial_parameters=ndarrays_to_parameters(list(public(job.make()).values())))
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=job.rounds))


run_simulation(ServerApp(server_fn=server), ClientApp(client_fn=client), len(job.lists),
               backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
# --- end
