"""FedMF by this suite's engine; the plugin ``plugins/backbones/fedmf.py`` is the user code."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine_round import block0, engine_round  # noqa: E402

from fedcl_bench.core.parallel import workers  # noqa: E402
from fedcl_bench.kernels.memory import keep_freed_blocks  # noqa: E402

torch.set_num_threads(1)
keep_freed_blocks()
start = block0("fedmf")
model = start.model
with workers():
    for number in range(int(sys.argv[2])):
        model = engine_round(start.chunks, model, start.users, start.opened.training, start.opened.key(0, number))
