"""``python -m fedcl_bench.testing.child``: go on with a run in a process of its own.

Reads from standard input what ``properties.fresh_process`` writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..runs.checkpoints import load_progress, save_progress
from ..runs.registry import Registry
from .properties import random_state
from .trials import Pair, finished


def main() -> None:
    spec = json.load(sys.stdin)
    with random_state(123):
        registry = Registry(waiting={Path(path): Path(path).read_bytes() for path in spec["files"]})
        pair = Pair(registry, spec["method"], spec["backbone"], spec["kind"], spec["settings"])
        progress = finished(pair.federation(), load_progress(Path(spec["start"]), "cpu")[0])
    save_progress(Path(spec["end"]), progress, 0.0)


if __name__ == "__main__":
    main()
