"""Seconds per round of every backbone beside FedMF's, and without compiled kernels, in one process.

    python benchmarks/rounds.py [--dataset ml-100k] [--backbones fedmf,fedncf,pfedrec] [--block 0] [--repeats 7]

Training and evaluation of a round as a run does them; medians of interleaved repeats. The last columns are the same
round by PyTorch's operations, and how many times as long it takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from engine_round import begun, engine_round
from machine import heading

from fedcl_bench.kernels import ops
from fedcl_bench.kernels.memory import keep_freed_blocks
from fedcl_bench.core.parallel import workers


def one_round(name: str, args):
    """A function that does one FT round of a backbone and returns (training, evaluation) seconds."""
    start = begun(name, args.dataset, args.data_dir, args.block)
    opened = start.opened

    def run():
        began = time.perf_counter()
        with workers():
            after = engine_round(start.chunks, start.model, start.users, opened.training,
                                 opened.key(start.step.index, 0))
            trained = time.perf_counter()
            opened.protocol.validate(after, 0)
        return trained - began, time.perf_counter() - trained
    return run


def without_kernels(function):
    """What a function returns with compiled kernels switched off."""
    with mock.patch.object(ops, "why_not", lambda: "switched off"):
        return function()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="ml-100k")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--backbones", default="fedmf,fedncf,pfedrec")
    parser.add_argument("--block", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_blocks()
    rounds = {}
    for name in args.backbones.split(","):
        rounds[name, True] = one_round(name, args)
        run = without_kernels(lambda: one_round(name, args))
        rounds[name, False] = partial(without_kernels, run)
    for run in rounds.values():
        run()  # warm up
    times = {key: [] for key in rounds}
    for _ in range(args.repeats):  # interleaved, so that a slow moment of the machine hits all of them
        for key, run in rounds.items():
            times[key].append(run())
    print(heading(args.threads), flush=True)
    print(f"{args.dataset}, block {args.block}, FT, median of {args.repeats}; ms per round")
    print(f"{'':12}{'training':>10}{'evaluation':>12}{'together':>10}{'ratio':>8}{'without kernels':>18}{'ratio':>8}")
    medians = {key: [1e3 * statistics.median(column) for column in zip(*values)] for key, values in times.items()}
    first = sum(next(iter(medians.values())))
    for name in args.backbones.split(","):
        train, evaluate = medians[name, True]
        without = sum(medians[name, False])
        print(f"{name:12}{train:10.1f}{evaluate:12.1f}{train + evaluate:10.1f}{(train + evaluate) / first:7.1f}x"
              f"{without:18.1f}{without / (train + evaluate):7.1f}x")


if __name__ == "__main__":
    main()
