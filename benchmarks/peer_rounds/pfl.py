"""pfl-research: its simulated backend with one process."""

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

sys.path.append(str(Path(__file__).parent))
from job import Job  # noqa: E402

torch.set_num_threads(1)
job = Job.read()
rng = np.random.default_rng(0)


# --- user code
class PrivateParameters(FederatedAveraging):
    """Federated averaging whose clients keep their own private parameters."""

    clients = {}

    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        module = model.pytorch_model
        module.load_state_dict(self.clients.get(user_dataset.user_id, {}), strict=False)
        result = super().train_one_user(initial_model_state, model, user_dataset, central_context)
        self.clients[user_dataset.user_id] = {name: module.state_dict()[name].clone() for name in module.private}
        for name in module.private:
            result[0][name].zero_()
        return result


def client(number):
    return Dataset(list(job.samples(rng, number)), user_id=number)


module, turns = job.make(), iter(range(len(job.lists) * job.rounds))
module.metrics = lambda *batch: {}
model = PyTorchModel(module, lambda *_, **__: module.optimiser(job), torch.optim.SGD(module.parameters(), lr=1.0))
data = FederatedDataset(client, lambda: next(turns, 0) % len(job.lists))
PrivateParameters().run(
    NNAlgorithmParams(central_num_iterations=job.rounds, evaluation_frequency=10 ** 9,
                      train_cohort_size=len(job.lists), val_cohort_size=0),
    SimulatedBackend(data, data), model,
    NNTrainHyperParams(local_num_epochs=job.epochs, local_learning_rate=1.0, local_batch_size=job.batch_size))
# --- end
