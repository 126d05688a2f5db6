"""``python -m fedcl_bench.testing.child``: go on with a run in a process of its own.

Reads from standard input what ``properties.fresh_process`` writes.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

from ..federation.loop import run
from ..runs.checkpoints import load_progress, save_progress
from ..runs.registry import Registry, load_file
from .trials import Pair


def main() -> None:
    spec = json.load(sys.stdin)
    torch.manual_seed(123)
    np.random.seed(123)
    random.seed(123)
    registry = Registry()
    for path in dict.fromkeys(spec["files"]):
        load_file(registry, Path(path))
    pair = Pair(registry, spec["method"], spec["backbone"], spec["kind"], spec["settings"])
    progress, _ = load_progress(Path(spec["start"]), "cpu")
    for progress in run(pair.federation(), progress):
        pass
    save_progress(Path(spec["end"]), progress, 0.0)


if __name__ == "__main__":
    main()
