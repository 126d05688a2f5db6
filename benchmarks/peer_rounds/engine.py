"""FedMF by this suite's engine; the plugin ``plugins/fedmf.py`` is the user code."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine_round import engine_round  # noqa: E402

from fedcl_bench.core.parallel import workers  # noqa: E402
from fedcl_bench.data.datasets import load_stream  # noqa: E402
from fedcl_bench.federation.client_sampling import Attendance  # noqa: E402
from fedcl_bench.federation.cross_device import open_step  # noqa: E402
from fedcl_bench.federation.parameter_growth import grow  # noqa: E402
from fedcl_bench.kernels.memory import keep_freed_blocks  # noqa: E402
from fedcl_bench.plugin.state import Snapshot  # noqa: E402
from fedcl_bench.runs.config import make_config  # noqa: E402
from fedcl_bench.runs.registry import discover  # noqa: E402

torch.set_num_threads(1)
keep_freed_blocks()
config = make_config(discover(), "ft", "fedmf", "ml-100k")
stream = load_stream(config.source, config.stream)
step, f = stream.steps[0], config.federation(stream)
model = grow(Snapshot({}, {}), f.backbone, 0, step, torch.float32, torch.device("cpu"))
users = Attendance().of(step, 0, 0).users
opened = open_step(f, step, model)
chunks = opened.protocol.chunks(users, 0, model)
with workers():
    for number in range(int(sys.argv[2])):
        model = engine_round(chunks, model, users, opened.training, opened.key(step.index, number))
