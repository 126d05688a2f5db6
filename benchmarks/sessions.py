"""Rounds on sessions against a straightforward per-client loop: plain averaging and FCUCR on SASRec.

    python benchmarks/sessions.py [--data-dir data] [--repeats 5] [--clients 20] [--threads N]

The engine's rounds are those of a run with default settings: local training, retrieval, validation, and the test after
a round that is the best so far. Round 1 (which draws the clients' own starts) and the next warm up and do not count.

The loop does what federated research scripts do: for every client it deep-copies the server's model with its whole item
table, makes an Adam over all parameters, trains 4 local epochs on the session with the method's loss, asks the
knowledge base, adds the model to a running sum, and ranks the client's validation item. It is timed on a sample of the
clients in turn with the engine, so that a slow moment of the machine hits both, and scaled to all of them. It has a
process of its own, because the engine changes how memory is allocated, and 1 or --threads threads, whichever is faster
for it.

Beside the time, the table has the processor time of both, which other jobs on the machine disturb less, and both
ratios. The engine's is that of all its threads.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from machine import heading
from peer_rounds.sasrec import LENGTH, SASRec
from torch import nn
from torch.nn import functional

from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation.loop import run
from fedcl_bench.kernels.memory import peak_mib, reset_peak
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover

D, HIDDEN, NEIGHBOURS, CAP = 50, 80, 20, 10.0  # the defaults of the plugins


class Head(nn.Module):
    """FCUCR's private prediction module."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2 * D, HIDDEN), nn.Linear(HIDDEN, D)
        self.norm, self.alpha = nn.BatchNorm1d(HIDDEN, eps=1e-9), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, features, rho):
        x = self.first(torch.cat([features, rho], 2))
        p = torch.sigmoid(self.norm(x.flatten(0, 1))).view_as(x)
        return self.second(p * x + (1.0 - p) * self.alpha * x)


def padded(values: list[int]) -> torch.Tensor:
    """(1, L)."""
    return torch.tensor([[0] * (LENGTH - len(values)) + values])


class Loop:
    """One client after the other. ``fcucr``: with FCUCR's losses and retrieval; otherwise plain averaging."""

    def __init__(self, fcucr: bool, step):
        self.step, self.fcucr, self.train, self.server = step, fcucr, step.sessions["train"], SASRec(step.n_items)
        self.total = {key: torch.zeros_like(value) for key, value in self.server.state_dict().items()}
        self.heads: dict[int, Head] = {}

    def session(self, sessions, number: int) -> list[int]:
        return (1 + sessions.items[int(sessions.start[number]):int(sessions.start[number + 1])]).tolist()[-LENGTH - 1:]

    def answer(self, query: torch.Tensor, user: int, base: dict) -> torch.Tensor:
        """The fused prototypes of other clients."""
        similarity = functional.cosine_similarity(query.flatten()[None], base["prototypes"])
        near = similarity.masked_fill(base["owner"] == user, -torch.inf).topk(NEIGHBOURS)
        return (near.values.softmax(0) @ base["prototypes"][near.indices]).view_as(query)

    def client(self, user: int, round_: int, base: dict) -> None:
        """Everything that a round does for one client."""
        first, count = int(self.train.of_user[user]), int(self.train.count[user])
        items = self.session(self.train, first + round_ % count)
        known = {1 + item for item in self.step.train.of(user).tolist()}
        negatives = []
        while len(negatives) < len(items) - 1:
            drawn = int(torch.randint(1, self.step.n_items + 1, ()))
            if drawn not in known:
                negatives.append(drawn)
        rows, positive, negative = (padded(values) for values in (items[:-1], items[1:], negatives))
        real = positive > 0

        model = copy.deepcopy(self.server).train()
        head, rho = None, torch.zeros(1, LENGTH, D)
        parameters = list(model.parameters())
        if self.fcucr:
            head = self.heads.setdefault(user, Head()).train()
            parameters += head.parameters()
            with torch.no_grad():
                teacher = copy.deepcopy(self.server).eval()(rows)
            rho = self.answer(teacher, user, base)
        optimiser = torch.optim.Adam(parameters, lr=0.1, betas=(0.9, 0.98))
        for _ in range(4):
            optimiser.zero_grad()
            features = model(rows)
            outputs = head(features, rho) if head else features
            logits = [(outputs * model.items(wanted)).sum(2)[real] for wanted in (positive, negative)]
            loss = sum(functional.binary_cross_entropy_with_logits(found, torch.full_like(found, label))
                       for found, label in zip(logits, (1.0, 0.0)))
            if head:
                distance = functional.mse_loss(features, teacher)
                loss = loss + (loss.detach() / (distance.detach() + 1e-8)).clamp(max=CAP) * distance
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            if head:
                following = self.session(self.train, first + (round_ + 1) % count)
                self.answer(model(padded(following[:-1])), user, base)
            for key, value in model.state_dict().items():  # what the mean of all clients costs
                self.total[key] += value
            self.rank(user, head, base)

    def rank(self, user: int, head: Head | None, base: dict) -> None:
        """Validate: the item to find among 100 others."""
        valid = self.step.sessions["valid"]
        if not int(valid.count[user]):
            return
        items = self.session(valid, int(valid.of_user[user]))
        features = self.server.eval()(padded(items[:-1]))
        outputs = head.eval()(features, self.answer(features, user, base)) if head else features
        candidates = torch.cat([torch.tensor(items[-1:]), torch.randint(1, self.step.n_items + 1, (100,))])
        scores = self.server.items(candidates) @ outputs[0, -1]
        int((scores[1:] >= scores[0]).sum())


_loop: Loop


def begin_loop(method: str, data_dir: Path) -> None:
    """In the loop's own process."""
    global _loop
    torch.manual_seed(0)
    config = configured("ft", data_dir)
    _loop = Loop(method == "fcucr", load_stream(config.source, config.stream).steps[0])


def time_loop(users: list[int], round_: int, base: dict, threads: int) -> tuple[float, float]:
    """Seconds and processor seconds per client of a round, after one that warms up."""
    torch.set_num_threads(threads)
    base = {name: torch.from_numpy(value) for name, value in base.items()}
    _loop.client(users[0], round_, base)
    began, used = time.perf_counter(), time.process_time()
    for user in users:
        _loop.client(user, round_, base)
    return (time.perf_counter() - began) / len(users), (time.process_time() - used) / len(users)


def configured(method: str, data_dir: Path):
    return make_config(discover(), method, "sasrec", "xing", 0, [("here", {"patience": 0})], data_dir)


def compare(method: str, args: argparse.Namespace) -> None:
    """Print a line of the table."""
    config = configured(method, args.data_dir)
    stream = load_stream(config.source, config.stream)
    federation = config.federation(stream)
    federation.check()
    clients = stream.steps[0].n_users
    sample = torch.linspace(0, clients - 1, args.clients * args.repeats).long().view(args.repeats, -1).tolist()
    reset_peak()
    torch.set_num_threads(args.threads)
    train, evaluate, used, each = [], [], [], []
    rounds = run(federation)
    with ProcessPoolExecutor(1, get_context("spawn"), begin_loop, (method, args.data_dir)) as pool:
        for number in range(2 + args.repeats):
            before = time.process_time()
            progress = next(rounds)
            before = time.process_time() - before
            base = {name: progress.server_state[name].numpy() for name in ("prototypes", "owner")
                    if name in progress.server_state}
            if number == 1:  # small operations can take longer on several threads
                trial = {threads: pool.submit(time_loop, sample[0][:3], 1, base, threads).result()
                         for threads in {1, args.threads}}
                threads = min(trial, key=lambda threads: trial[threads][0])
            elif number > 1:
                train.append(progress.curve[-1]["train_seconds"])
                evaluate.append(progress.curve[-1]["evaluate_seconds"])
                used.append(before)
                each.append(pool.submit(time_loop, sample[number - 2], number, base, threads).result())
    rounds.close()
    together, busy = statistics.median(a + b for a, b in zip(train, evaluate)), statistics.median(used)
    client, client_busy = (statistics.median(times) for times in zip(*each))
    print(f"{method:28}{1e3 * statistics.median(train):9.0f}{1e3 * statistics.median(evaluate):11.0f}"
          f"{1e3 * together:9.0f}{1e3 * busy:8.0f}{peak_mib():7.0f}"
          f"{threads:9}{1e3 * client:9.1f}{1e3 * client_busy:8.1f}"
          f"{client * clients:9.1f}{client * clients / together:9.0f}x{client_busy * clients / busy:7.0f}x"
          f"{os.getloadavg()[0]:7.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder with xing/xing.inter")
    parser.add_argument("--methods", default="ft,fcucr")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds of each; medians are shown")
    parser.add_argument("--clients", type=int, default=20, help="clients of the loop per repeat, others in each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    print(heading(args.threads), flush=True)
    print(f"SASRec, XING, default settings, medians of {args.repeats} rounds after 2; loop: {args.clients} clients "
          f"each time")
    print(f"{'':28}{'engine, ms per round':^37}{'peak':>7}{'loop:':>9}{'ms per client':^17}{'s per':>9}"
          f"{'engine is':^18}{'load':>7}")
    print(f"{'':28}{'training':>9}{'evaluation':>11}{'together':>9}{'CPU':>8}{'MiB':>7}{'threads':>9}{'time':>9}"
          f"{'CPU':>8}{'round':>9}{'time':>10}{'CPU':>8}")
    for method in args.methods.split(","):
        compare(method, args)


if __name__ == "__main__":
    main()
