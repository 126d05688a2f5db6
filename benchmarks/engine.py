"""Engine against a straightforward per-client loop: one round on ML-100K block 0 per backbone, in one process.

    python benchmarks/engine.py [--backbones fedmf,fedncf,pfedrec,fedrap,gpfedrec] [--repeats 7] [--threads N]

The straightforward loop does what federated research scripts do: for every client it deep-copies the server's model,
makes its optimisers and a DataLoader, draws negatives, trains on the batches, and adds the item table to a running sum.
The leanest loop is the same with bare tensors instead of the DataLoader, the fastest we could write without batching
clients. Both train the same 587 clients on the same number of samples as the engine, with one thread or --threads,
whichever is faster. GPFedRec's server, which makes every client a table of its own, is part of all three.

The roofline counts what no way of training can avoid if it treats samples one by one: each reads its item's row and
adds to a row of the sum of changes, 3 x 4 d bytes, at the speed at which this machine copies memory with the same
number of threads. (An engine that shares work between samples, or whose tables stay in the cache, may do better.)
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import numpy as np
import torch
from engine_round import block0, engine_round
from machine import copy_bandwidth, heading
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedcl_bench.plugin.backbone import Backbone
from fedcl_bench.data.stream import Step
from fedcl_bench.federation.parts import Federation
from fedcl_bench.plugin.backbone import ITEM, USER
from fedcl_bench.kernels.memory import keep_freed_blocks
from fedcl_bench.core.parallel import workers

ROUNDS = 20  # of the engine one after the other, as in a run


class Client(nn.Module):
    """A client's whole model; ``groups`` are the parameters of each optimiser, which step in turns, ``shared`` the item
    table that it uploads."""

    shared = ITEM

    def loss(self, item: Tensor, label: Tensor, backbone: Backbone, served: Tensor | None) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(item), label)


class FedMF(Client):
    groups = ([USER, ITEM],)

    def __init__(self, n_items: int, dim: int):
        super().__init__()
        self.user_embedding, self.item_embedding = nn.Embedding(1, dim), nn.Embedding(n_items, dim)

    def forward(self, item: Tensor) -> Tensor:
        return (self.user_embedding(torch.zeros_like(item)) * self.item_embedding(item)).sum(1)


class FedNCF(FedMF):
    groups = ([USER, ITEM, "predictor.0.weight", "predictor.0.bias"],)

    def __init__(self, n_items: int, dim: int):
        super().__init__(n_items, dim)
        self.predictor = nn.Sequential(nn.Linear(2 * dim, 1))

    def forward(self, item: Tensor) -> Tensor:
        user = self.user_embedding(torch.zeros_like(item))
        return self.predictor(torch.cat([user, self.item_embedding(item)], 1)).squeeze(1)


class GPFedRec(FedNCF):
    groups = ([USER, ITEM, *(f"predictor.{k}.{part}" for k in range(4) for part in ("weight", "bias"))],)

    def __init__(self, n_items: int, dim: int):
        super().__init__(n_items, dim)
        sizes = [2 * dim, 32, 16, 8, 1]
        self.predictor = nn.ModuleList([nn.Linear(*pair) for pair in zip(sizes, sizes[1:])])

    def forward(self, item: Tensor) -> Tensor:
        x = torch.cat([self.user_embedding(torch.zeros_like(item)), self.item_embedding(item)], 1)
        for layer in self.predictor[:-1]:
            x = torch.relu(layer(x))
        return self.predictor[-1](x).squeeze(1)

    def loss(self, item, label, backbone, served):
        return (super().loss(item, label, backbone, served)
                + backbone.settings.reg * nn.functional.mse_loss(self.item_embedding.weight, served))


class FedRAP(Client):
    shared = "item_commonality.weight"
    groups = ([shared, "item_personality.weight", "score.weight", "score.bias"],)

    def __init__(self, n_items: int, dim: int):
        super().__init__()
        self.item_commonality, self.item_personality = (nn.Embedding(n_items, dim) for _ in range(2))
        self.score = nn.Linear(dim, 1)

    def forward(self, item: Tensor) -> Tensor:
        return self.score(self.item_commonality(item) + self.item_personality(item)).squeeze(1)

    def loss(self, item, label, backbone, served):
        common, personal = self.item_commonality(item), self.item_personality(item)
        s = backbone.settings
        return (super().loss(item, label, backbone, served) + s.mu * common.abs().mean()
                - s.lambda_apart * nn.functional.mse_loss(personal, common))


class PFedRec(Client):
    groups = (["score.weight", "score.bias"], [ITEM])

    def __init__(self, n_items: int, dim: int):
        super().__init__()
        self.item_embedding, self.score = nn.Embedding(n_items, dim), nn.Linear(dim, 1)

    def forward(self, item: Tensor) -> Tensor:
        return self.score(self.item_embedding(item)).squeeze(1)


MODELS = {"fedmf": FedMF, "fedncf": FedNCF, "pfedrec": PFedRec, "fedrap": FedRAP, "gpfedrec": GPFedRec}


def loop_round(server: Client, private: list[dict[str, Tensor]], served: Tensor | None, lists: list[np.ndarray],
               f: Federation, with_loader: bool) -> Tensor:
    """One federated round, client by client; ``private`` holds each client's own parameters and is updated.

    Args:
        served: the tables that the server made for the clients, if it does, (clients, items, dim); updated.

    Returns:
        The mean item table, (items, dim).
    """
    rng, shared = np.random.default_rng(0), server.shared
    total = torch.zeros_like(dict(server.named_parameters())[shared])
    n_items, batch_size = len(total), f.local.batch_size
    rates, decay = f.backbone.learning_rates(n_items), getattr(f.backbone.settings, "batch_decay", 1.0)
    uploads = []
    for user, positives in enumerate(lists):
        model = copy.deepcopy(server)
        model.load_state_dict(private[user], strict=False)
        parameters = dict(model.named_parameters())
        optimisers = [torch.optim.SGD([{"params": [parameters[name]], "lr": rates[name]} for name in group],
                                      weight_decay=f.backbone.weight_decay) for group in server.groups]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, decay) for o in optimisers] if decay < 1.0 else []
        others = np.setdiff1d(np.arange(n_items), positives)
        negatives = torch.from_numpy(rng.choice(others, 4 * len(positives)))
        items = torch.cat([torch.as_tensor(positives), negatives])
        labels = torch.cat([torch.ones(len(positives)), torch.zeros(len(negatives))])
        if with_loader:
            loader = DataLoader(TensorDataset(items, labels), batch_size=batch_size, shuffle=True)
        before = float("inf")
        for _ in range(f.local.local_epochs):
            if not with_loader:
                loader = [(items[some], labels[some]) for some in torch.randperm(len(items)).split(batch_size)]
            epoch = torch.zeros(())
            for item, label in loader:
                for turn, optimiser in enumerate(optimisers):
                    loss = model.loss(item, label, f.backbone, None if served is None else served[user])
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                    epoch += loss.detach() if turn == 0 else 0.0
                for scheduler in schedulers:
                    scheduler.step()
            if f.local.tolerance > 0.0:
                if abs(before - float(epoch)) / max(abs(before), 1e-12) < f.local.tolerance:
                    break
                before = float(epoch)
        total += parameters[shared].detach()
        if served is not None:
            uploads.append(parameters[shared].detach().flatten())
        private[user] = {name: value.detach() for name, value in parameters.items() if name != shared}
    if served is None:
        return total / len(lists)
    tables = torch.stack(uploads)
    unit = nn.functional.normalize(tables, dim=1)
    similarity = unit @ unit.T
    linked = (similarity > similarity.mean() * f.backbone.settings.graph_threshold).to(tables.dtype)
    served.copy_((linked / linked.sum(1, keepdim=True).clamp(min=1.0) @ tables).view_as(served))
    return served.mean(0)


def rounds_of(name: str) -> tuple[dict, Step, int, int]:
    """The engine's round and the two loops' by name, the step they train on, samples over all local epochs, and the
    dimension of item rows."""
    start = block0(name)
    step, f, model, opened = start.step, start.f, start.model, start.opened
    server = MODELS[name](step.n_items, start.config.backbone_settings.dim)
    server.load_state_dict({server.shared: model.public[server.shared]}, strict=False)
    shapes = {key: value.shape for key, value in server.named_parameters() if key != server.shared}
    private = [{key: model.private[key][user].reshape(shape) for key, shape in shapes.items()}
               for user in range(step.n_users)]
    lists = [step.train.of(user).numpy() for user in range(step.n_users)]
    served = model.personalised.get(ITEM)

    def engine():
        with workers():
            for _ in range(ROUNDS):
                engine_round(start.chunks, model, start.users, opened.training, opened.key(step.index, 1))

    def loop(with_loader: bool):
        loop_round(server, list(private), served if served is None else served.clone(), lists, f, with_loader)

    kinds = {"engine": engine, "straightforward loop": lambda: loop(True), "leanest loop": lambda: loop(False)}
    samples = (1 + f.local.negatives) * len(step.train.values) * f.local.local_epochs
    return kinds, step, samples, start.config.backbone_settings.dim


def seconds(function) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbones", default="fedmf", help=f"separated by commas, of {', '.join(MODELS)}")
    parser.add_argument("--repeats", type=int, default=7, help="timed repeats of each; medians are shown")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    backbones = args.backbones.split(",")
    if wrong := [name for name in backbones if name not in MODELS]:
        parser.error(f"--backbones: found '{wrong[0]}', accepted: {', '.join(MODELS)}")
    torch.set_num_threads(args.threads)
    keep_freed_blocks()
    torch.manual_seed(0)
    print(heading(args.threads), flush=True)
    for backbone in backbones:
        kinds, step, samples, dim = rounds_of(backbone)
        for run in kinds.values():
            run()  # warm up
        # A loop's tensors are small: a second thread makes it slower as soon as anything else runs.
        counts = {name: (args.threads,) if name == "engine" else sorted({1, args.threads}) for name in kinds}
        times = {(name, count): [] for name in kinds for count in counts[name]}
        for _ in range(args.repeats):  # interleaved, so that a slow moment of the machine hits all of them
            for (name, count), values in times.items():
                torch.set_num_threads(count)
                values.append(seconds(kinds[name]) / (ROUNDS if name == "engine" else 1))
        torch.set_num_threads(args.threads)
        median = {name: min(statistics.median(times[name, count]) for count in counts[name]) for name in kinds}
        print(f"{backbone}, ML-100K block 0: {step.n_users} clients, {samples:,} samples per round")
        print(f"{'':24}{'ms per round':>14}{'engine is':>14}")
        for name, value in median.items():
            ratio = "" if name == "engine" else f"{value / median['engine']:13.1f}x"
            print(f"{name:24}{1e3 * value:14.1f}{ratio}")
        moved, bandwidth = 12 * dim * samples, copy_bandwidth()
        print(f"{'roofline':24}{1e3 * moved / bandwidth:14.1f}{median['engine'] * bandwidth / moved:13.1f}x its time "
              f"({moved / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s)")


if __name__ == "__main__":
    main()
