"""What threads gain and cost: seconds of whole jobs with one thread and with one per core, beside busy loops.

    GOMP_SPINCOUNT=5000 python benchmarks/threads.py [--repeats 5] [--loops 0,2] [--jobs NAME,NAME]

The variable is what jobs set themselves, before PyTorch is imported; without it threads spin while they wait.

Both numbers of threads take turns, and the fastest of the repeats counts; ``gain`` is the seconds with one thread over
those with one per core. Numbers is what ``core.parallel.threads_for`` decides by.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import Callable, Iterator

import torch
from machine import heading

from fedcl_bench.cli import cores, count, names
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Federation
from fedcl_bench.federation.parts import numbers_at_once
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import Registry, discover
from fedcl_bench.testing.trials import Pair


def of_lists(registry: Registry, method: str, backbone: str, **settings: object) -> Callable[[], Federation]:
    """A job on ML-100K."""
    config = make_config(registry, method, backbone, "ml-100k", overrides=[("benchmark", settings)])
    stream = load_stream(config.source, config.stream)
    return lambda: config.federation(stream)


def of_domains(registry: Registry, backbone: str, **settings: object) -> Callable[[], Federation]:
    """A job on three small domains."""
    pair = Pair(registry, "ft", backbone, "domains", settings)
    return pair.federation


JOBS: dict[str, Callable[[Registry], Callable[[], Federation]]] = {
    "FFMSR d=8": lambda r: of_domains(r, "ffmsr"),
    "FFMSR d=256": lambda r: of_domains(r, "ffmsr", dim=256),
    "F3CRec on FedMF k_core=70": lambda r: of_lists(r, "f3crec", "fedmf", rounds=4, k_core=70),
    "F3CRec on FedMF": lambda r: of_lists(r, "f3crec", "fedmf", rounds=4),
    "FT on FedNCF": lambda r: of_lists(r, "ft", "fedncf", rounds=2),
    "FT on FedRAP": lambda r: of_lists(r, "ft", "fedrap", rounds=1, local_epochs=2),
    "FT on NCF": lambda r: of_lists(r, "ft", "ncf", rounds=1, local_epochs=1),
}


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    with ExitStack() as stack:
        for _ in range(loops):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        yield


def seconds(make: Callable[[], Federation], threads: int) -> float:
    torch.set_num_threads(threads)
    federation, began = make(), time.perf_counter()
    for _ in run(federation):
        pass
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--loops", type=names, default=["0", "2"])
    parser.add_argument("--jobs", type=names, default=list(JOBS))
    args = parser.parse_args()
    registry, all_cores = discover(), cores()
    print(heading(all_cores), flush=True)
    print(f"| job | numbers | loops | 1 thread, s | {all_cores} threads, s | gain |\n|---|--:|--:|--:|--:|--:|")
    for name in args.jobs:
        make = JOBS[name](registry)
        for loops in map(int, args.loops):
            with busy(loops):
                seconds(make, 1)
                pairs = [[seconds(make, threads) for threads in (1, all_cores)] for _ in range(args.repeats)]
            one, several = map(min, zip(*pairs))
            print(f"| {name} | {numbers_at_once(make()):,} | {loops} | {one:.2f} | {several:.2f} | "
                  f"{one / several:.2f} |", flush=True)


if __name__ == "__main__":
    main()
