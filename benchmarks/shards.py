"""A run of FedMF in one process with N threads, and on N shards of one thread each over Ray, by its number of clients.

    python benchmarks/shards.py [--clients 100000,1000000] [--items 100000] [--dim 32] [--rounds 5] [--shards 2]
        [--interactions-per-user 20] [--evaluate-users 1000] [--passes 3] [--folder DIR]

Interactions are those of `data synth`, in two blocks. Both run as whole commands, in turns. A round is what its record
says of training: local training of all clients, and the mean of their uploads, which shards send to the server. The
median over rounds and passes is shown, without each block's first round; `job` is the whole command.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import heading

from fedcl_bench.cli import count, counts
from fedcl_bench.records.store import load_runs

BENCH = [sys.executable, "-m", "fedcl_bench"]


def synthesise(clients: int, args: argparse.Namespace, folder: Path) -> None:
    """Write and prepare the interactions of so many clients."""
    made = ["data", "synth", "big", "--users", str(clients), "--items", str(args.items), "--blocks", "2",
            "--interactions-per-user", str(args.interactions_per_user), "--out", str(folder), "--force"]
    for command in (made, ["data", "prepare", "big", "--data-dir", str(folder)]):
        subprocess.run([*BENCH, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measured(how: list[str], args: argparse.Namespace, folder: Path) -> tuple[list[float], float]:
    """Seconds of training of each round but blocks' first, and of the whole command."""
    with tempfile.TemporaryDirectory(dir=folder) as results:
        settings = {"rounds": args.rounds, "patience": 0, "dim": args.dim, "evaluate_users": args.evaluate_users}
        command = [*BENCH, "run", "--method", "ft", "--backbone", "fedmf", "--dataset", "big", "--data-dir",
                   str(folder), "--results", results, "--quiet", *how,
                   *(word for name, value in settings.items() for word in ("--set", f"{name}={value}"))]
        began = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        took = time.perf_counter() - began
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout}")
        rounds = load_runs(Path(results))[0].rounds
        return [float(row.train_seconds) for row in rounds.itertuples() if row.round > 0], took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=counts, default=(10 ** 5, 10 ** 6), metavar="N,N")
    parser.add_argument("--items", type=count, default=10 ** 5)
    parser.add_argument("--dim", type=count, default=32)
    parser.add_argument("--rounds", type=count, default=5, help="of each block, at least two")
    parser.add_argument("--shards", type=count, default=2)
    parser.add_argument("--interactions-per-user", type=float, default=20.0)
    parser.add_argument("--evaluate-users", type=int, default=1000, help="0: all")
    parser.add_argument("--passes", type=count, default=3)
    parser.add_argument("--folder", type=Path, help="where data and records are while they are needed")
    args = parser.parse_args()
    kinds = {f"one process, {args.shards} threads": ["--threads", str(args.shards)],
             f"{args.shards} shards": ["--ray", "local", "--shards", str(args.shards), "--threads", "1"]}
    print(heading(args.shards), flush=True)
    print(f"FedMF of dimension {args.dim}, {args.items:,} items, {args.interactions_per_user:g} interactions per "
          f"client; median of {args.passes} passes\n", flush=True)
    print("| clients | " + " | ".join(f"round s, {kind}" for kind in kinds) + " | ratio | " +
          " | ".join(f"job s, {kind}" for kind in kinds) + " | ratio |\n|" + "---|" * 7, flush=True)
    for clients in args.clients:
        with tempfile.TemporaryDirectory(prefix="fedcl_bench-", dir=args.folder) as name:
            synthesise(clients, args, Path(name))
            rounds, jobs = {kind: [] for kind in kinds}, {kind: [] for kind in kinds}
            for _ in range(args.passes):
                for kind, how in kinds.items():
                    each, took = measured(how, args, Path(name))
                    rounds[kind] += each
                    jobs[kind].append(took)
        cells = []
        for values in (rounds, jobs):
            alone, spread = map(statistics.median, values.values())
            cells += [f"{alone:.3g}", f"{spread:.3g}", f"{spread / alone:.2f}"]
        print(f"| {clients:,} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
