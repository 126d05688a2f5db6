"""This suite's engine; the plugin in ``plugins/`` is the user code."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine_round import begun, engine_round  # noqa: E402
from job import Job  # noqa: E402

from fedcl_bench.core.parallel import workers  # noqa: E402
from fedcl_bench.kernels.memory import keep_freed_blocks  # noqa: E402

torch.set_num_threads(1)
keep_freed_blocks()
job = Job.read()
start = begun(job.model, job.dataset, Path(job.data_dir) if job.data_dir else None)
opened, model = start.opened, start.model
with workers():
    for number in range(job.rounds):
        chunks = start.chunks if opened.same_group else opened.protocol.chunks(start.users, number, model)
        model = engine_round(chunks, model, start.users, opened.training, opened.key(0, number))
