"""Engine against a straightforward per-client loop: one FedMF round on ML-100K block 0, in one process.

    python benchmarks/engine.py [--repeats 7] [--threads N]

The straightforward loop does what federated research scripts do: for every client it deep-copies the server's model,
makes an optimiser and a DataLoader, draws negatives, trains on the batches, and adds the item table to a running sum.
The leanest loop is the same with bare tensors instead of the DataLoader, the fastest we could write without batching
clients. Both train the same 587 clients on the same number of samples as the engine.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedcl_bench.config import make_config
from fedcl_bench.datasets import load_stream
from fedcl_bench.growth import grow
from fedcl_bench.rounds import train_round
from fedcl_bench.memory import keep_freed_blocks
from fedcl_bench.method import Method, NoSettings
from fedcl_bench.model import Snapshot
from fedcl_bench.parallel import workers
from fedcl_bench.records import environment
from fedcl_bench.registry import discover
from fedcl_bench.sampling import make_chunks
from fedcl_bench.server import participants

USER, ITEM = "user_embedding.weight", "item_embedding.weight"


def loop_round(server, private, lists, lr, item_lr, batch_size, with_loader):
    """One federated round, client by client."""
    rng = np.random.default_rng(0)
    total = torch.zeros_like(server.item_embedding.weight)
    for user, positives in enumerate(lists):
        model = copy.deepcopy(server)
        with torch.no_grad():
            model.user_embedding.weight.copy_(private[user:user + 1])
        optimiser = torch.optim.SGD([{"params": model.user_embedding.parameters(), "lr": lr},
                                     {"params": model.item_embedding.parameters(), "lr": item_lr}])
        others = np.setdiff1d(np.arange(model.n_items), positives)
        negatives = torch.from_numpy(rng.choice(others, 4 * len(positives)))
        items = torch.cat([torch.as_tensor(positives), negatives])
        labels = torch.cat([torch.ones(len(positives)), torch.zeros(len(negatives))])
        if with_loader:
            batches = DataLoader(TensorDataset(items, labels), batch_size=batch_size, shuffle=True)
        else:
            order = torch.randperm(len(items))
            batches = [(items[some], labels[some]) for some in order.split(batch_size)]
        for item, label in batches:
            score = model.predict({"user_id": torch.zeros(len(item), dtype=torch.long), "item_id": item})
            loss = torch.nn.functional.binary_cross_entropy_with_logits(score, label)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            total += model.item_embedding.weight
            private[user] = model.user_embedding.weight[0]
    return total / len(lists)


def seconds(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="timed repeats of each; medians are shown")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_blocks()
    torch.manual_seed(0)

    config = make_config(discover(), "ft", "fedmf", "ml-100k")
    step = load_stream(config.source, config.stream).steps[0]
    backbone = config.backbone.cls(config.backbone_settings)
    model = grow(Snapshot({}, {}), backbone, 0, step, torch.float32, torch.device("cpu"))
    rates = backbone.learning_rates(step.n_items)
    chunks = make_chunks(step, participants(step, 1.0, 0, 0), config.local, config.backbone_settings.dim)
    server = backbone.recbole_model(1, step.n_items)
    with torch.no_grad():
        server.item_embedding.weight.copy_(model.public[ITEM])
    lists = [step.train.of(user).numpy() for user in range(step.n_users)]
    vectors = model.private[USER].clone()

    def engine():
        with workers():
            train_round(chunks, model, backbone, Method(NoSettings()), config.local, 0, 0, 0)

    def loop(with_loader):
        loop_round(server, vectors.clone(), lists, rates[USER], rates[ITEM], config.local.batch_size, with_loader)

    kinds = {"engine": lambda: [engine() for _ in range(5)], "straightforward loop": lambda: loop(True),
             "leanest loop": lambda: loop(False)}
    for run in kinds.values():
        run()  # warm up
    times = {name: [] for name in kinds}
    for _ in range(args.repeats):  # interleaved, so that a slow moment of the machine hits all of them
        for name, run in kinds.items():
            times[name].append(seconds(run) / (5 if name == "engine" else 1))
    median = {name: statistics.median(values) for name, values in times.items()}
    env = environment("cpu")
    print(f"{env['processor']}, {env['cores']} cores, {env['threads']} threads, Python {env['python']}, "
          f"torch {env['torch']}")
    print(f"FedMF, ML-100K block 0: {len(lists)} clients, {5 * len(step.train.values):,} samples per round")
    print(f"{'':24}{'ms per round':>14}{'engine is':>14}")
    for name, value in median.items():
        ratio = '' if name == 'engine' else f'{value / median["engine"]:13.1f}x'
        print(f"{name:24}{1e3 * value:14.1f}{ratio}")


if __name__ == "__main__":
    main()
