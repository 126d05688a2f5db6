"""A round of FedDAE on ML-100K block 0 against a loop over clients, in processor seconds.

    python benchmarks/feddae.py [--repeats 3] [--threads N] [--set NAME=VALUE ...]

The loop does what the released code does for every client: it deep-copies a model, loads what the server and the client
have of it, makes an Adam for all parameters, takes the history from a DataLoader, adds the gradients to the server's,
and keeps a copy of the client's own encoder and gate. Both have one local epoch.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from engine_round import engine_round
from machine import heading
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedcl_bench.core.parallel import workers
from fedcl_bench.core.settings import parse_assignments
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation.cross_device import CrossDevice
from fedcl_bench.federation.parameter_growth import grow
from fedcl_bench.kernels.memory import keep_freed_blocks
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.rng import DrawKey
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover


def layers(sizes: list[int]) -> nn.Sequential:
    """Linear layers with a tanh between them."""
    return nn.Sequential(*[part for pair in zip(sizes, sizes[1:]) for part in (nn.Linear(*pair), nn.Tanh())][:-1])


class Client(nn.Module):
    def __init__(self, items: int, s):
        super().__init__()
        sizes = [items, *s.hidden, 2 * s.dim]
        self.own, self.shared, self.drop = layers(sizes), layers(sizes), nn.Dropout(s.dropout)
        self.decoder = layers([s.dim, *s.hidden[::-1], items])
        self.gate = nn.Sequential(nn.Linear(items, s.dim), nn.ReLU(), nn.Dropout(s.dropout), nn.Linear(s.dim, 2))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of a history, without the divergence, whose weight is 0 after the first round."""
        weights, latent = torch.softmax(self.gate(x), 1), 0.0
        for k, encoder in enumerate((self.own, self.shared)):
            mean, log_variance = encoder(self.drop(nn.functional.normalize(x))).chunk(2, 1)
            latent = latent + weights[:, k:k + 1] * (mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
        return -(torch.log_softmax(self.decoder(latent), 1) * x).sum()


def loop_round(first: Client, server: Client, kept: dict, loaders: dict, lr: float) -> None:
    """A round of the loop, without the step of the server's optimiser."""
    for user, loader in loaders.items():
        client = copy.deepcopy(first)
        client.decoder.load_state_dict(server.decoder.state_dict())
        client.shared.load_state_dict(server.shared.state_dict())
        client.load_state_dict(kept.get(user, {}), strict=False)
        optimiser = torch.optim.Adam(client.parameters(), lr=lr)
        for x, in loader:
            client(x).backward()
        for ours, theirs in zip(server.parameters(), client.parameters()):
            ours.grad = theirs.grad + (0 if ours.grad is None else ours.grad)
        optimiser.step()
        kept[user] = {name: value for name, value in copy.deepcopy(client.state_dict()).items()
                      if name.startswith(("own", "gate"))}


def seconds(function) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds of the loop; medians are shown")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="settings of the run")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_blocks()
    config = make_config(discover(), "ft", "feddae", "ml-100k", overrides=[
        ("--set", parse_assignments(args.set, "--set"))])
    stream = load_stream(config.source, config.stream)
    f, step = config.federation(stream), stream.steps[0]
    model = grow(Snapshot({}, {}), f.backbone, 0, step, torch.float32, torch.device("cpu"))
    users, opened = (step.train.lengths > 0).nonzero().flatten(), CrossDevice(f, step, model)
    chunks = opened.protocol.chunks(users, 0, model)
    first, kept = Client(step.n_items, f.backbone.settings), {}
    server = copy.deepcopy(first)
    loaders = {user: DataLoader(TensorDataset(torch.zeros(1, step.n_items).index_fill_(1, step.train.of(user), 1.0)))
               for user in users.tolist()}
    key = DrawKey(0, 0, 1)
    print(heading(args.threads), flush=True)
    with workers():
        engine = statistics.median(seconds(lambda: engine_round(chunks, model, users, opened.training, key))
                                   for _ in range(20))
    loop = statistics.median(seconds(lambda: loop_round(first, server, kept, loaders, f.backbone.settings.lr))
                             for _ in range(args.repeats))
    print(f"{len(users)} clients: engine {1e3 * engine:.0f} ms, loop {1e3 * loop:,.0f} ms, {loop / engine:.0f} times")


if __name__ == "__main__":
    main()
