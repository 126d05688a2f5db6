"""FedMF by a loop over clients with bare tensors, gradients by hand: the leanest that we could write."""

from __future__ import annotations

import numpy as np
import torch
from job import Job

torch.set_num_threads(1)
job = Job.read()
rng = np.random.default_rng(0)
# --- user code
items = torch.randn(job.n_items, job.dim) * 0.01
users = torch.randn(len(job.lists), job.dim) * 0.01
for _ in range(job.rounds):
    total = torch.zeros_like(items)
    for number in range(len(job.lists)):
        rows, user = items.clone(), users[number]
        chosen, labels = map(torch.from_numpy, job.samples(rng, number))
        for item, label in zip(chosen.split(job.batch_size), labels.split(job.batch_size)):
            of = rows[item]
            slope = (torch.sigmoid(of @ user) - label) / len(item)
            rows.index_add_(0, item, torch.outer(slope, user), alpha=-job.item_rate)
            user.sub_(slope @ of, alpha=job.user_rate)
        total += rows
    items = total / len(job.lists)
# --- end
