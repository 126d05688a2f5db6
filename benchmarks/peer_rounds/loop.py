"""FedMF by the loop over clients of released codes: a deep copy of the model, an optimiser and a DataLoader each."""

from __future__ import annotations

import copy

import numpy as np
import torch
from job import Job
from model import FedMF
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
job = Job.read()
rng = np.random.default_rng(0)


# --- user code
server = FedMF(job.n_items, job.dim)
users = {}
for _ in range(job.rounds):
    total = torch.zeros(job.n_items, job.dim)
    for number, known in enumerate(job.lists):
        model = copy.deepcopy(server)
        model.load_state_dict(users.get(number, {}), strict=False)
        optimiser = torch.optim.SGD([{"params": [model.user], "lr": job.user_rate},
                                     {"params": model.items.parameters(), "lr": job.item_rate}])
        data = TensorDataset(*map(torch.from_numpy, job.samples(rng, known)))
        for item, label in DataLoader(data, job.batch_size, shuffle=True):
            optimiser.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(item), label).backward()
            optimiser.step()
        users[number] = {"user": model.user.detach()}
        total += model.items.weight.detach()
    server.items.weight.data = total / len(job.lists)
# --- end
