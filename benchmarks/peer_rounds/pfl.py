"""FedMF by pfl-research: its simulated backend with one process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent.resolve()]  # not this file
import numpy as np  # noqa: E402
import torch  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.hyperparam import NNTrainHyperParams  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402
from torch import nn  # noqa: E402

sys.path.append(str(Path(__file__).parent))
from job import Job  # noqa: E402
from model import FedMF  # noqa: E402

torch.set_num_threads(1)
job = Job.read()
rng = np.random.default_rng(0)


# --- user code
class Model(FedMF):
    def loss(self, item, label):
        return nn.functional.binary_cross_entropy_with_logits(self(item.long()), label)

    def metrics(self, item, label):
        return {}


class PrivateUsers(FederatedAveraging):
    """Federated averaging whose clients keep their own user vector."""

    users = {}

    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        user = model.pytorch_model.user.data
        user.copy_(self.users.get(user_dataset.user_id, user))
        result = super().train_one_user(initial_model_state, model, user_dataset, central_context)
        self.users[user_dataset.user_id] = user.clone()
        result[0]["user"].zero_()
        return result


def client(number):
    return Dataset(list(job.samples(rng, job.lists[number])), user_id=number)


def optimiser(_, lr):
    return torch.optim.SGD([{"params": [module.user], "lr": job.user_rate},
                            {"params": module.items.parameters(), "lr": job.item_rate}], lr=lr)


module, turns = Model(job.n_items, job.dim), iter(range(len(job.lists) * job.rounds))
model = PyTorchModel(module, optimiser, torch.optim.SGD(module.parameters(), lr=1.0))
data = FederatedDataset(client, lambda: next(turns, 0) % len(job.lists))
PrivateUsers().run(
    NNAlgorithmParams(central_num_iterations=job.rounds, evaluation_frequency=10 ** 9,
                      train_cohort_size=len(job.lists), val_cohort_size=0),
    SimulatedBackend(data, data), model,
    NNTrainHyperParams(local_num_epochs=1, local_learning_rate=1.0, local_batch_size=job.batch_size))
# --- end
