"""What every benchmark says of the machine it ran on."""

from __future__ import annotations

import os

from fedcl_bench.runs.summary import environment


def heading(threads: int | None = None) -> str:
    """Processor, versions and load, in one line; ``threads`` if the benchmark has any of its own."""
    env = environment("cpu")
    return (f"{env['processor']}, {env['cores']} cores, {f'{threads} threads, ' if threads else ''}"
            f"Python {env['python']}, torch {env['torch']}, "
            f"{'with' if env['compiled_kernels'] else 'without'} compiled kernels; load "
            + ", ".join(f"{load:.1f}" for load in os.getloadavg()))
