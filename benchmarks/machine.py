"""What every benchmark says of the machine it ran on, and how fast that copies memory."""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import torch

from fedcl_bench.core.parallel import in_order, workers
from fedcl_bench.runs.summary import environment


def heading(threads: int | None = None) -> str:
    """Processor, versions and load, in one line; ``threads`` if the benchmark has any of its own."""
    env = environment("cpu")
    return (f"{env['processor']}, {env['cores']} cores, {f'{threads} threads, ' if threads else ''}"
            f"Python {env['python']}, torch {env['torch']}, "
            f"{'with' if env['compiled_kernels'] else 'without'} compiled kernels; load "
            + ", ".join(f"{load:.1f}" for load in os.getloadavg()))


def ready_for_recbole() -> None:
    """Before RecBole's Config is made: it takes the command line for its own, and reads names that NumPy 2 removed."""
    del sys.argv[1:]
    for name, value in (("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_)):
        setattr(np, name, value)


def copy_bandwidth(mib: int = 1024) -> float:
    """Bytes read and written per second when all of PyTorch's threads copy large tensors: the best of four times."""
    pieces = [(torch.ones(mib << 15), torch.empty(mib << 15)) for _ in range(8)]
    seconds = []
    with workers():
        for _ in range(4):
            began = time.perf_counter()
            list(in_order(lambda pair: pair[1].copy_(pair[0]), pieces, torch.device("cpu")))
            seconds.append(time.perf_counter() - began)
    return 2 * 4 * (mib << 15) * len(pieces) / min(seconds)
