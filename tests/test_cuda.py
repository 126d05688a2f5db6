"""On a GPU: every plugin trains and ranks as on the CPU, a round does not wait for the host, and several runs of a grid
share one GPU. Nothing else in the tests needs one."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from helpers import train_round

from fedcl_bench.cli.main import main
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Progress
from fedcl_bench.federation.steps import begin_step, open_step
from fedcl_bench.ops.memory import available
from fedcl_bench.ops.topk import highest
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.sequential import SequentialBackbone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, which is not here")

NAMES = discover()
CUDA = torch.device("cuda")
SESSIONS = {"stream": "sessions", "min_session_length": 5, "min_sessions": 4}
BLOCKS = {"blocks": 2, "base_share": 0.5, "k_core": 70}
# Rates at which no model diverges in two rounds, and few epochs.
STABLE = {"fedrap": {"lr_items": 1.0, "local_epochs": 2}, "gpfedrec": {"lr": 0.01}, "biasmf": {"local_epochs": 1},
          "ncf": {"local_epochs": 1}, "fedncf": {"lr": 0.01}, "pfedrec": {"lr": 0.01}}


def is_sequential(backbone):
    return issubclass(NAMES.get("backbone", backbone).cls, SequentialBackbone)


def combinations():
    """Every method with every backbone it goes with."""
    for method in NAMES.names("method"):
        for backbone in NAMES.names("backbone"):
            if is_sequential(backbone) == NAMES.get("method", method).cls.needs_sequential or (
                    method == "ft" and is_sequential(backbone)):
                yield method, backbone


def federation(registry, method, backbone, device, **settings):
    of_stream = SESSIONS if is_sequential(backbone) else BLOCKS
    config = make_config(registry, method, backbone, "ml-100k", 0, [
        ("test", {"rounds": 2, "patience": 0, **of_stream, **STABLE.get(backbone, {}), **settings})], device=device)
    return config.federation(load_stream(config.source, config.stream))


def close(found, expected, **tolerance):
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("method,backbone", list(combinations()))
def test_runs_equal_those_on_the_cpu(registry, method, backbone):
    """Two rounds of every step in double precision: parameters, losses, state, tests and analysis."""
    on_cpu, on_gpu = (list(run(federation(registry, method, backbone, device, precision="float64")))[-1]
                      for device in ("cpu", "cuda"))
    assert all(table.device.type == "cuda" for table in on_gpu.model.tables())
    for mine, theirs in zip(on_gpu.model.tables(), on_cpu.model.tables(), strict=True):
        close(mine, theirs, rtol=1e-6, atol=1e-9)
    for kind in ("client_state", "server_state"):
        mine, theirs = getattr(on_gpu, kind), getattr(on_cpu, kind)
        assert mine.keys() == theirs.keys()
        for name in mine:
            close(mine[name], theirs[name], rtol=1e-6, atol=1e-9)
    assert [row["loss"] for row in on_gpu.curve] == pytest.approx([row["loss"] for row in on_cpu.curve], rel=1e-8)
    for (t, s, mine), (t2, s2, theirs) in zip(on_gpu.tests, on_cpu.tests, strict=True):
        assert (t, s) == (t2, s2) and torch.equal(mine.users.cpu(), theirs.users)
        for metric in theirs.values:
            close(mine.values[metric], theirs.values[metric])
    for (_, kind, _, mine), (_, kind2, _, theirs) in zip(on_gpu.analysis, on_cpu.analysis, strict=True):
        assert kind == kind2
        close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method,backbone", [("ft", name) for name in NAMES.names("backbone") if name != "gpfedrec"]
                         + [("reg", "fedmf"), ("spp", "fedmf"), ("fcucr", "sasrec")])
def test_a_round_waits_for_the_host_once(registry, method, backbone):
    """For its mean loss. Which calls of other methods do is in tests/federation/test_round_trips.py."""
    f = federation(registry, method, backbone, "cuda")
    f.method.client_state, f.method.server_state = {}, {}
    step = f.stream.steps[0].to(CUDA)
    acting = f.acting_in(step)
    model = begin_step(f, step, Progress()).model
    chunks = open_step(f, step, model).protocol.chunks((step.train.lengths > 0).nonzero().flatten(), 1, model)

    def one_round():
        acting.begin_round(step, 1, f.backbone)
        train_round(chunks, model, f.backbone, acting, f.local, 0, step.index, 1)

    one_round()  # kernels are loaded and workspaces made
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one_round()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchronizing CUDA operation" in str(w.message)]) == 1


@pytest.mark.parametrize("columns", [7, 320, 2047, 50001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_are_ranked_as_on_the_cpu(columns, dtype):
    scores = torch.randint(-3, 4, (5, columns), generator=torch.Generator().manual_seed(columns)).to(dtype)
    assert torch.equal(highest(scores.to(CUDA), 20).cpu(), highest(scores, 20))


def test_several_runs_of_a_grid_share_a_gpu(tmp_path, capsys):
    arguments = ["grid", "--methods", "ft,kd", "--backbones", "fedmf,fedncf", "--device", "cuda", "--jobs", "3",
                 "--set", "rounds=2", "--results", str(tmp_path), "--json"]
    assert main(arguments) == 0
    json.loads(capsys.readouterr().out)
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/*/run.json"))]
    assert [record["device"] for record in records] == ["cuda"] * 4
    assert {record["environment"]["accelerator"] for record in records} == {torch.cuda.get_device_name()}


def test_memory_of_the_gpu_is_looked_at():
    assert 0 < available(CUDA).bytes <= torch.cuda.get_device_properties(0).total_memory
