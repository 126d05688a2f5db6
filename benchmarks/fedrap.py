"""A round of FedRAP on MovieLens-1M, static protocol, beside the 660 s of its authors' log.

    python benchmarks/fedrap.py --data-dir DIR [--local-epochs 10] [--rounds 3] [--threads N]

DIR holds ml-1m/ml-1m.inter (user_id, item_id and timestamp; without absolute times, their order). A round is what a run
does: local training of all clients, the mean of the shared table, and validation among 99 sampled items. The personal
tables cannot be written faster than memory allows: that bound is printed too, with the copy speed measured here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from machine import copy_bandwidth, heading

from fedcl_bench.cli import count
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.data.source import find_file
from fedcl_bench.core.errors import UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.kernels.memory import keep_freed_blocks, peak_mib, reset_peak
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover

AUTHORS = 660.0  # seconds per round, 10 local epochs, in the authors' log


def federation(args: argparse.Namespace):
    """FedRAP on the static stream of ML-1M as `run` makes it; times are `timestamp`, or `order` in a file without."""
    path = find_file("ml-1m", args.data_dir)
    with path.open(encoding="utf-8") as file:
        columns = [column.partition(":")[0] for column in file.readline().split()]
    layer = {"stream": "static", "local_epochs": args.local_epochs, "rounds": args.rounds + 2, "patience": 0}
    config = make_config(discover(), "ft", "fedrap", "ml-1m", 0, [("here", layer)], args.data_dir)
    source = config.source
    if "timestamp" not in columns and "order" in columns:
        source = replace(source, config=replace(source.config, TIME_FIELD="order"))
    result = config.federation(load_stream(source, config.stream))
    result.check()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with ml-1m/ml-1m.inter")
    parser.add_argument("--local-epochs", type=count, default=10)
    parser.add_argument("--rounds", type=count, default=3, help="timed, after one that is not; medians are shown")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_blocks()
    f = federation(args)
    print(heading(args.threads), flush=True)
    step, dim = f.stream.steps[0], f.backbone.settings.dim
    print(f"FedRAP, ML-1M, static: {step.n_users:,} clients, {step.n_items:,} items, {len(step.train.values):,} "
          f"training interactions, d {dim}, {args.local_epochs} local epochs; median of {args.rounds} rounds",
          flush=True)
    speed = copy_bandwidth()
    reset_peak()
    rounds, wall, processor, rows = run(f), [], [], []
    for number in range(args.rounds + 1):
        began, used = time.perf_counter(), time.process_time()
        rows.append(next(rounds).curve[-1])
        wall.append(time.perf_counter() - began)
        processor.append(time.process_time() - used)
    rounds.close()
    second = statistics.median(wall[1:])
    train, evaluate = (statistics.median(row[name] for row in rows[1:]) for name in ("train_seconds",
                                                                                     "evaluate_seconds"))
    table = 4 * step.n_users * step.n_items * dim
    print(f"training              {train:8.2f} s")
    print(f"validation            {evaluate:8.2f} s")
    print(f"a round               {second:8.2f} s    {statistics.median(processor[1:]):.2f} processor seconds")
    print(f"the authors' log      {AUTHORS:8.0f} s    {AUTHORS / second:.0f}x")
    print(f"peak memory           {peak_mib() / 1024:8.2f} GiB  the personal tables take {table / 2 ** 30:.2f} GiB")
    print(f"memory bound          {2 * table / speed:8.2f} s    to read and write them once at {speed / 1e9:.1f} GB/s")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
