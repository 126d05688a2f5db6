"""The loop over clients of released codes: a deep copy of the model, an optimiser and a DataLoader each."""

from __future__ import annotations

import copy

import numpy as np
import torch
from job import Job
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
job = Job.read()
rng = np.random.default_rng(0)


# --- user code
server = job.make()
private = {}
for _ in range(job.rounds):
    total = {name: torch.zeros_like(table) for name, table in server.state_dict().items()
             if name not in server.private}
    for client in range(len(job.lists)):
        model = copy.deepcopy(server)
        model.load_state_dict(private.get(client, {}), strict=False)
        optimiser = model.optimiser(job)
        data = TensorDataset(*map(torch.from_numpy, job.samples(rng, client)))
        for _ in range(job.epochs):
            for batch in DataLoader(data, job.batch_size, shuffle=True):
                optimiser.zero_grad()
                model.loss(*batch).backward()
                optimiser.step()
        trained = model.state_dict()
        private[client] = {name: trained[name] for name in model.private}
        for name, table in total.items():
            table += trained[name]
    server.load_state_dict({name: table / len(job.lists) for name, table in total.items()}, strict=False)
# --- end
