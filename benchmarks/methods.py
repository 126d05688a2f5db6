"""A round of methods of 2020 to 2026 on FedMF, ML-100K block 0, against a loop over clients, in processor seconds.

    python benchmarks/methods.py [--methods ft,fedprox,scaffold,colr,ifedrec,canonfedrec,fedcia] [--clients 40]
                                 [--repeats 3]

The loop does for every client what federated research scripts do, and what the method adds to it, on whole tables: it
deep-copies the server's model, makes an optimiser and a DataLoader, draws negatives and trains. It is timed on some
clients, evenly chosen by their interactions, and counted for all; what only the server does is left out of it, and is
part of the engine's round. Both have one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from machine import heading
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation.cross_device import CrossDevice
from fedcl_bench.federation.parts import Progress
from fedcl_bench.kernels.memory import keep_freed_blocks
from fedcl_bench.runs.config import RunConfig, make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.training.sampling import padded


USER, ITEM = "user_embedding.weight", "item_embedding.weight"


class FedMF(nn.Module):
    def __init__(self, n_items: int, dim: int):
        super().__init__()
        self.user_embedding, self.item_embedding = nn.Embedding(1, dim), nn.Embedding(n_items, dim)

    def forward(self, item: Tensor) -> Tensor:
        return (self.user_embedding(torch.zeros_like(item)) * self.item_embedding(item)).sum(1)


class FT:
    """Of the loop; ``sent``: the server's item table, (items, d)."""

    overrides: dict = {}  # settings of the run

    def __init__(self, config: RunConfig, sent: Tensor):
        self.settings, self.sent, (items, self.dim) = config.method_settings, sent, sent.shape
        self.rates = {USER: config.backbone_settings.lr, ITEM: config.backbone_settings.lr * items}
        self.total = torch.zeros_like(sent)

    def model(self) -> nn.Module:
        return FedMF(*self.sent.shape)

    def optimiser(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [value], "lr": self.rates[name]} for name, value in
                                model.named_parameters()])

    def loss(self, model: nn.Module, item: Tensor, label: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(item), label)

    def correct(self, user: int, model: nn.Module) -> None:
        """Add to the gradients."""

    def end(self, user: int, model: nn.Module, steps: int) -> None:
        """Send what the client has trained."""
        self.total += model.item_embedding.weight.detach()


class FedProx(FT):
    def loss(self, model, item, label):
        return super().loss(model, item, label) + self.settings.prox_mu / 2 * (model.item_embedding.weight
                                                                          - self.sent).square().sum()


class Scaffold(FT):
    """Option II."""

    def __init__(self, config, sent):
        super().__init__(config, sent)
        self.control, self.controls = torch.zeros_like(sent), {}

    def correct(self, user, model):
        model.item_embedding.weight.grad += self.control - self.controls.get(user, 0.0)

    def end(self, user, model, steps):
        super().end(user, model, steps)
        moved = self.sent - model.item_embedding.weight.detach()
        self.controls[user] = self.controls.get(user, 0.0) - self.control + moved / (steps * self.rates[ITEM])


class LowRank(FedMF):
    """A client of CoLR."""

    def __init__(self, sent: Tensor, basis: Tensor):
        super().__init__(*sent.shape)
        self.item_embedding.weight.requires_grad_(False)
        self.factor, self.basis = nn.Parameter(torch.zeros(len(sent), len(basis))), basis

    def forward(self, item):
        rows = self.item_embedding(item) + self.factor[item] @ self.basis
        return (self.user_embedding(torch.zeros_like(item)) * rows).sum(1)


class CoLR(FT):
    def model(self):
        basis = torch.linalg.qr(torch.randn(self.dim, self.settings.rank))[0].T
        self.total = torch.zeros(len(self.sent), len(basis))
        return LowRank(self.sent, basis)

    def optimiser(self, model):
        return torch.optim.SGD([{"params": [model.user_embedding.weight], "lr": self.rates[USER]},
                                {"params": [model.factor], "lr": self.rates[ITEM]}])

    def end(self, user, model, steps):
        self.total += model.factor.detach()


class IFedRec(FT):
    def loss(self, model, item, label):
        distance = nn.functional.mse_loss(model.item_embedding.weight, self.sent)
        return super().loss(model, item, label) + self.settings.align_weight * distance


class CanonFedRec(FT):
    """As released: Adam for all parameters."""

    overrides = {"optimiser": "adam", "lr": 0.1, "item_lr": "plain"}

    def optimiser(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.1)

    def loss(self, model, item, label):
        user = nn.functional.normalize(model.user_embedding.weight, dim=1)
        rows = nn.functional.normalize(model.item_embedding(item), dim=1)
        near = (rows[label > 0.0] - user).square().sum(1).mean()
        return near + self.settings.uniformity_weight * torch.pdist(rows).square().mul(-2.0).exp().mean().log()

    def end(self, user, model, steps):
        """The client sends its table, which the server turns and compares with its own on the sphere."""
        sent = nn.functional.normalize(self.sent, dim=1)
        table = nn.functional.normalize(model.item_embedding.weight.detach(), dim=1)
        left, _, right = torch.linalg.svd(table.T @ sent)
        turned = table @ (left @ right)
        cosine = (sent * turned).sum(1, keepdim=True).clamp(-1.0, 1.0)
        beside = turned - cosine * sent
        self.total += torch.acos(cosine) / beside.norm(dim=1, keepdim=True).clamp(min=1e-12) * beside


class FedCIA(FT):
    """Its server's mean is that of the client's own similarities, which takes as long."""

    def end(self, user, model, steps):
        table = model.item_embedding.weight.detach().clone().requires_grad_()
        mean = (table @ table.T).detach()
        optimiser = torch.optim.SGD([table], lr=self.settings.align_lr, weight_decay=self.settings.align_decay)
        for _ in range(self.settings.align_steps):
            optimiser.zero_grad()
            (table @ table.T - mean + 1e-6).norm().backward()
            optimiser.step()


LOOPS = {"ft": FT, "fedprox": FedProx, "scaffold": Scaffold, "colr": CoLR, "ifedrec": IFedRec,
         "canonfedrec": CanonFedRec, "fedcia": FedCIA}


def train(loop: FT, server: nn.Module, lists: dict[int, np.ndarray], local) -> None:
    """Of the clients with these items."""
    rng, n_items = np.random.default_rng(0), len(loop.sent)
    for user, positives in lists.items():
        model, steps = deepcopy(server), 0
        optimiser, others = loop.optimiser(model), np.setdiff1d(np.arange(n_items), positives)
        negatives = rng.choice(others, local.negatives * len(positives))
        items = torch.from_numpy(np.concatenate([positives, negatives]))
        labels = (torch.arange(len(items)) < len(positives)).float()
        loader = DataLoader(TensorDataset(items, labels), batch_size=local.batch_size, shuffle=True)
        for _ in range(local.local_epochs):
            for item, label in loader:
                optimiser.zero_grad()
                loop.loss(model, item, label).backward()
                loop.correct(user, model)
                optimiser.step()
                steps += 1
        loop.end(user, model, steps)


def seconds(function, *args) -> float:
    began = time.process_time()
    function(*args)
    return time.process_time() - began


class Engine:
    """Rounds of the suite, one after the other, without validation."""

    def __init__(self, config: RunConfig):
        f = config.federation(load_stream(config.source, config.stream, config.features))
        self.step = f.stream.steps[0]
        self.clients, self.progress = CrossDevice.open(f, self.step, Progress())
        self.stops = self.clients.early_stopping(0, self.progress)

    def round(self) -> None:
        *_, update = [*self._train()]
        update = self.clients.aggregate(self.progress, update)
        self.progress = replace(self.progress, round=self.progress.round + 1, model=update.model,
                                **self.clients.state(update))

    def _train(self):
        yield (yield from self.clients.train(self.progress, self.stops))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(LOOPS), help="separated by commas")
    parser.add_argument("--clients", type=int, default=40, help="clients that the loop is timed on")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds of each; medians are shown")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_blocks()
    print(heading(1))
    print(f"{'':14}{'engine, ms':>12}{'loop, ms':>12}{'times':>8}", flush=True)
    for method in args.methods.split(","):
        config = make_config(discover(), method, "fedmf", "ml-100k", overrides=[("loop", LOOPS[method].overrides)])
        engine = Engine(config)
        step = engine.step
        users = (step.train.lengths > 0).nonzero().flatten()
        users = users[step.train.lengths[users].argsort()]
        some = users[torch.linspace(0, len(users) - 1, min(args.clients, len(users))).long()]
        items, counts = padded(step.train, some), step.train.counts(some)
        lists = {int(user): row[:count].numpy() for user, row, count in zip(some, items, counts)}
        loop = LOOPS[method](config, torch.randn(step.n_items, config.backbone_settings.dim) * 0.01)
        server = loop.model()
        engine.round()  # warm up, and the first round has no state yet
        train(loop, server, {user: lists[user] for user in list(lists)[:2]}, config.local)
        ours = statistics.median(seconds(engine.round) for _ in range(args.repeats))
        theirs = statistics.median(seconds(train, loop, server, lists, config.local) for _ in range(args.repeats))
        theirs *= len(users) / len(lists)
        print(f"{method:14}{1e3 * ours:12,.1f}{1e3 * theirs:12,.0f}{theirs / ours:8,.0f}", flush=True)


if __name__ == "__main__":
    main()
