"""Many small runs: throughput of `grid` against --jobs, and what sharing block 0 saves.

    python benchmarks/grid.py [--jobs 1,2] [--methods ft,reg,kd] [--backbone fedmf] [--seeds 2] [--rounds 20]

Each line is one `run_bench.py grid` in a process and with a results folder of its own, from start to exit, over
ML-100K. "Alone" is the same runs where no two methods share a block 0: one command and results folder per method. The
grids are interleaved and repeated, so that a slow moment of the machine hits all; medians are shown.
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

from fedcl_bench.cli import count, counts, names

BENCH = Path(__file__).resolve().parents[1] / "run_bench.py"


def grid(methods: list[str], jobs: int, args) -> float:
    """Seconds of one grid, from nothing."""
    with tempfile.TemporaryDirectory(prefix="fedcl_bench-") as results:
        command = [sys.executable, str(BENCH), "grid", "--methods", ",".join(methods), "--backbones", args.backbone,
                   "--seeds", str(args.seeds), "--set", f"rounds={args.rounds}", "--set", "patience=0",
                   "--jobs", str(jobs), "--threads", "1", "--results", results, "--quiet"]
        began = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout}")
        return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=counts, default=(1, 2), metavar="N,N")
    parser.add_argument("--methods", type=names, default=("ft", "reg", "kd"), metavar="A,B")
    parser.add_argument("--backbone", default="fedmf")
    parser.add_argument("--seeds", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=20, help="rounds of every block")
    parser.add_argument("--repeats", type=count, default=3)
    args = parser.parse_args()
    runs = len(args.methods) * args.seeds
    print(heading(), flush=True)
    print(f"{runs} runs: {', '.join(args.methods)} on {args.backbone}, ML-100K, {args.seeds} seeds, {args.rounds} "
          f"rounds a block, 1 thread each; median of {args.repeats}\n", flush=True)
    kinds = {f"--jobs {jobs}": lambda jobs=jobs: grid(args.methods, jobs, args) for jobs in args.jobs}
    kinds[f"--jobs {args.jobs[0]}, block 0 alone"] = lambda: sum(grid([m], args.jobs[0], args) for m in args.methods)
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.repeats):
        for name, run in kinds.items():
            taken[name].append(run())
    print("| | seconds | runs per minute | throughput |\n|---|---|---|---|")
    first = statistics.median(next(iter(taken.values())))
    for name, values in taken.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.1f} | {60 * runs / median:.1f} | {first / median:.2f}x |")


if __name__ == "__main__":
    main()
