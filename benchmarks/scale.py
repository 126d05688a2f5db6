"""Seconds per round, cost per sample and peak memory of FedMF against clients, items, dimension and local epochs.

    python benchmarks/scale.py [--clients 1000,10000,100000,1000000] [--items 100000] [--dim 32] [--local-epochs 1]
        [--interactions-per-user 20] [--rounds 3] [--seconds 1] [--passes 1] [--threads N]

Each of the first four takes several values, as `--dim 16,64,256`; every combination is a line.

Clients, items and interactions are those of `run_bench.py data synth`, made in memory. Every size runs in a process of
its own, so that its peak memory is its own: that includes making the data and the tables. A round is local training of
all clients and the mean of their uploads, as in a run; validation, which ranks all items for all users, is not in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time

import torch
from engine_round import engine_round
from machine import heading

from fedcl_bench.cli import count, counts
from fedcl_bench.training.strategies import Training, choose_strategy
from fedcl_bench.data.streams.synth import SyntheticLog, step_of
from fedcl_bench.rng import DrawKey
from fedcl_bench.federation.client_sampling import Attendance
from fedcl_bench.federation.parameter_growth import grow
from fedcl_bench.federation.protocols import list_chunks
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.kernels.memory import keep_freed_blocks, peak_mib
from fedcl_bench.core.parallel import workers
from fedcl_bench.runs.registry import discover
from fedcl_bench.plugin.local_settings import LocalSettings

SIZES = ("clients", "items", "dim", "local_epochs")
COLUMNS = (*SIZES, "samples", "chunks", "data s", "chunks s", "round s", "ns per sample", "data MiB",
           "peak MiB")


def measure(clients: int, items: int, dim: int, local_epochs: int, args) -> dict[str, float]:
    """One size, in this process."""
    began = time.perf_counter()
    step = step_of(SyntheticLog(clients, items, args.interactions_per_user, activity=args.activity))
    made, data_peak = time.perf_counter() - began, peak_mib()
    cls = discover().get("backbone", "fedmf").cls
    backbone, local, method = cls(cls.Settings(dim=dim)), LocalSettings(local_epochs=local_epochs), Method(NoSettings())
    model = grow(Snapshot({}, {}), backbone, 0, step, torch.float32, torch.device("cpu"))
    began = time.perf_counter()
    users = Attendance().of(step, 0, 0).users
    training = Training(backbone, method, local, choose_strategy(backbone, method, model, local, sessions=False))
    chunks = list_chunks(step, users, model, training)
    chunked = time.perf_counter() - began
    seconds = []
    while len(seconds) <= args.rounds or sum(seconds[1:]) < args.seconds:
        began = time.perf_counter()
        model = engine_round(chunks, model, users, training, DrawKey(0, 0, len(seconds)))
        seconds.append(time.perf_counter() - began)
    samples = (1 + local.negatives) * local_epochs * len(step.train.values)
    typical = statistics.median(seconds[1:])  # the first one gets its memory from the system
    return dict(zip(COLUMNS, (clients, items, dim, local_epochs, samples, len(chunks), made, chunked, typical,
                              1e9 * typical / samples, data_peak, peak_mib())))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=counts, default=(10 ** 3, 10 ** 4, 10 ** 5, 10 ** 6), metavar="N,N")
    parser.add_argument("--items", type=counts, default=(10 ** 5,), metavar="N,N")
    parser.add_argument("--dim", type=counts, default=(32,), metavar="N,N")
    parser.add_argument("--local-epochs", type=counts, default=(1,), metavar="N,N")
    parser.add_argument("--interactions-per-user", type=float, default=20.0)
    parser.add_argument("--activity", type=float, default=SyntheticLog.activity,
                        help="standard deviation of log interactions per user; 0: all have equally many")
    parser.add_argument("--rounds", type=count, default=3, help="timed, after one that is not; medians are shown")
    parser.add_argument("--seconds", type=float, default=1.0,
                        help="rounds of less than that together are followed by more: a run has hundreds of short "
                             "ones, and the first few take longer")
    parser.add_argument("--passes", type=count, default=1,
                        help="over all sizes, one after the other, and lines are medians: on a machine that is now "
                             "faster, now slower")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    parser.add_argument("--one", type=counts, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        keep_freed_blocks()
        with workers():
            print(json.dumps(measure(*args.one, args)))
        return
    print(heading(args.threads), flush=True)
    print(f"FedMF, {args.interactions_per_user:g} interactions per client on average (log-normal, sigma "
          f"{args.activity:g}), 4 negatives each; median of {args.rounds} rounds or of {args.seconds:g} s"
          + (f", and of {args.passes} passes" if args.passes > 1 else "") + "\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    sizes = list(itertools.product(*(getattr(args, name) for name in SIZES)))
    found: dict[tuple, list[dict]] = {size: [] for size in sizes}
    rows = []
    for passed in range(1, args.passes + 1):
        for size in sizes:
            done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", ",".join(map(str, size))],
                                  stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"| {' | '.join(f'{n:,}' for n in size)} | failed with status {done.returncode} |", flush=True)
                continue
            found[size].append(json.loads(done.stdout))
            if passed == args.passes:
                rows.append({name: statistics.median(row[name] for row in found[size]) for name in COLUMNS})
                print("| " + " | ".join(f"{value:,.0f}" if float(value).is_integer() or value >= 100 else f"{value:.3g}"
                                        for value in rows[-1].values()) + " |", flush=True)
    costs = [row["ns per sample"] for row in rows]
    if len(costs) > 1:
        print(f"\ncost per sample, largest / smallest: {max(costs) / min(costs):.2f}")


if __name__ == "__main__":
    main()
