"""The local training of a round and what the server makes of it, as the loop does them, for timing them alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation import server
from fedcl_bench.federation.client_sampling import Attendance
from fedcl_bench.federation.cross_device import CrossDevice
from fedcl_bench.federation.parameter_growth import grow
from fedcl_bench.federation.round import Work, train_clients
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover


def begun(backbone, dataset="ml-100k", data_dir=None, block=0):
    """FT on a dataset's block (or its sessions) before the first round, with an untrained model: ``config``, ``step``,
    ``f``, the federation, ``model``, ids of ``users``, their ``chunks``, and ``opened``, the step's training."""
    config = make_config(discover(), "ft", backbone, dataset, data_dir=data_dir)
    stream = load_stream(config.source, config.stream)
    step, f = stream.steps[block], config.federation(stream)
    model = grow(Snapshot({}, {}), f.backbone, 0, replace(step, old_users=0, old_items=0), torch.float32,
                 torch.device("cpu"))
    users = Attendance().of(step, 0, 0).users
    opened = CrossDevice(f, step, model)
    return SimpleNamespace(config=config, step=step, f=f, model=model, users=users, opened=opened,
                           chunks=opened.protocol.chunks(users, 0, model))


def engine_round(chunks, model, users, training, key):
    """The model after a round of these chunks, whose clients are ``users``."""
    sums = train_clients([Work(training, chunks)], model, key)
    model = server.mean(sums, model, training.backbone, key.seed)
    return server.aggregate(training.backbone, model, users, training.protection, key)
