"""Milliseconds of one forward and backward pass of every sequential backbone for many clients, by size of chunk.

    python benchmarks/encoders.py [--backbones sasrec,gru4rec,tisasrec] [--clients 877] [--chunks 32,64,128]

Default settings, float32, dropout on, sequences of random items, times and lengths; medians of interleaved repeats. A
local epoch costs one such pass, and the scores, the loss and the optimiser besides.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from fedcl_bench import rng
from fedcl_bench.kernels.memory import keep_freed_blocks
from fedcl_bench.runs.registry import discover
from fedcl_bench.plugin.sequential import Dropout, Sequence


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def one_pass(backbone, clients: int, chunk: int):
    """A function that encodes and differentiates all clients once and returns the seconds."""
    length, dim = backbone.settings.max_length, backbone.settings.dim
    dense = {name: value.float() for name, value in backbone.new_dense(0).items()}
    generator = torch.Generator().manual_seed(0)
    chunks = []
    for users in torch.arange(clients).split(chunk):
        count = len(users)
        real = torch.arange(length) >= torch.randint(0, length, (count, 1), generator=generator)
        times = torch.randint(0, 3600, (count, length), generator=generator).double().sort(1).values * real
        inputs = 0.01 * torch.randn(count, length, dim, generator=generator) * real.unsqueeze(2)
        own = {name: value.expand(count, *value.shape).clone() for name, value in dense.items()}
        for tensor in (inputs, *own.values()):
            tensor.requires_grad_()
        change = torch.randn(count, length, dim, generator=generator)
        chunks.append((own, inputs, Sequence(real, times, real.long()), rng.client_keys(0, users), change))

    def run() -> float:
        began = time.perf_counter()
        for own, inputs, sequence, keys, change in chunks:
            found = backbone.encode(own, inputs, sequence, Dropout(keys))
            torch.autograd.grad((found * change).sum(), [inputs, *own.values()])
        return time.perf_counter() - began
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbones", default="sasrec,gru4rec,tisasrec")
    parser.add_argument("--clients", type=int, default=877)
    parser.add_argument("--chunks", type=numbers, default=[32, 64, 128])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_blocks()
    registry = discover()
    passes = {}
    for name in args.backbones.split(","):
        cls = registry.get("backbone", name).cls
        passes |= {(name, chunk): one_pass(cls(cls.Settings()), args.clients, chunk) for chunk in args.chunks}
    for run in passes.values():
        run()  # warm up
    seconds = {key: [] for key in passes}
    for _ in range(args.repeats):
        for key, run in passes.items():
            seconds[key].append(run())
    print(f"{args.clients} clients, {args.threads} thread(s)")
    print(f"{'backbone':<12}{'chunk':>6}{'median ms':>11}{'least ms':>10}")
    for (name, chunk), values in seconds.items():
        print(f"{name:<12}{chunk:>6}{1e3 * statistics.median(values):>11.0f}{1e3 * min(values):>10.0f}")


if __name__ == "__main__":
    main()
