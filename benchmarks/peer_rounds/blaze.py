"""BlazeFL: its serial client trainer and server of federated averaging."""

from __future__ import annotations

import numpy as np
import torch
from blazefl.contrib.fedavg import FedAvgBaseClientTrainer, FedAvgBaseServerHandler, FedAvgUplinkPackage
from blazefl.core import deserialize_model, serialize_model
from job import Job
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
job = Job.read()
rng = np.random.default_rng(0)


# --- user code
class Selector:
    def select_model(self, name):
        return job.make()


class Data:
    def get_dataloader(self, type_, cid, batch_size, generator=None):
        return DataLoader(TensorDataset(*map(torch.from_numpy, job.samples(rng, cid))), batch_size, shuffle=True)


class Trainer(FedAvgBaseClientTrainer):
    private = {}

    def train(self, model_parameters, train_loader, cid):
        deserialize_model(self.model, model_parameters)
        self.model.load_state_dict(self.private.get(cid, {}), strict=False)
        self.model.train()
        optimiser = self.model.optimiser(job)
        for _ in range(self.epochs):
            for batch in train_loader:
                optimiser.zero_grad()
                self.model.loss(*batch).backward()
                optimiser.step()
        self.private[cid] = {name: self.model.state_dict()[name].clone() for name in self.model.private}
        return FedAvgUplinkPackage(cid, serialize_model(self.model), 1)


server = FedAvgBaseServerHandler(Selector(), "", Data(), job.rounds, len(job.lists), 1.0, "cpu", job.batch_size, 0)
trainer = Trainer(Selector(), "", Data(), "cpu", len(job.lists), job.epochs, job.batch_size, 1.0, 0)
while not server.if_stop():
    trainer.local_process(server.downlink_package(), server.sample_clients())
    for package in trainer.uplink_package():
        server.load(package)
# --- end
