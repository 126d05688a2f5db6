"""On a GPU: every plugin trains and ranks as on the CPU, and runs are kept and go on from where they were.

Where there is no GPU, a pretended one takes its place: it shows what would fail there, or read the processor's memory.
What only a real one can show, as that a round does not wait for the host, is left out then.
"""

import json
import warnings
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from helpers import STABLE, lay_shop, same_numbers, stopped_everywhere, train_round
from pretended_gpu import pretended
from torch import nn

from fedcl_bench import SIZES, Snapshot
from fedcl_bench.cli.main import main
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.plugin.silo import TOPOLOGIES, ModuleBackbone
from fedcl_bench.federation.parts import Progress
from fedcl_bench.federation.cross_device import CrossDevice, begin_step
from fedcl_bench.kernels.memory import available
from fedcl_bench.kernels.ops import highest
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.checkpoints import read_model
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.runner import execute
from fedcl_bench.testing.trials import Pair, all_tables, finished, is_of_domains, is_sequential, runs_differ, stable

REAL = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not REAL, reason="needs a CUDA device, which is not here")
NAMES = discover()
CUDA = torch.device("cuda")
SESSIONS = {"stream": "sessions", "min_session_length": 5, "min_sessions": 4}
BLOCKS = {"blocks": 2, "base_share": 0.5, "k_core": 80}
# RecBole's models stand for themselves and for others: with texts, stages, contrasts, or one client at a time.
RECBOLES = [f"recbole:{name}" for name in ("BPR", "NeuMF", "SASRec", "GRU4Rec", "BERT4Rec", "FDSA", "S3Rec", "FEARec")]


def on_gpu():
    """A context in which there is a GPU."""
    return nullcontext() if REAL else pretended()


def differ(pair):
    """What differs between a pair's run on the CPU and on the GPU, in words.

    Modules of domains draw their dropout from the device's own generator. So on a real GPU their numbers are others,
    and two runs there are compared.
    """
    pair = stable(pair)
    with on_gpu():
        ended = finished(replace(pair.federation(), device=CUDA))
        # Single numbers, as the steps that PyTorch's Adam counts, may be anywhere.
        left = [name for name, table in all_tables(ended).items() if table.device.type != "cuda" and table.dim()]
        if left:
            return f"{', '.join(left)} left the GPU"
        if REAL and issubclass(pair.backbone_cls, ModuleBackbone):
            return runs_differ(ended, finished(replace(pair.federation(), device=CUDA)), 1e-6)
        model = Snapshot(**{part.name: to_cpu(getattr(ended.model, part.name)) for part in fields(Snapshot)})
        ended = replace(ended, model=model, client_state=to_cpu(ended.client_state),
                        server_state=to_cpu(ended.server_state))
    return runs_differ(pair.points[-1], ended, 1e-6)


def to_cpu(tables):
    return {name: table.cpu() for name, table in tables.items()}


@pytest.mark.parametrize("mixes", [
    lambda here, there: there @ here, lambda here, there: torch.cat([here, there]),
    lambda here, there: there.add_(here),
    lambda here, there: torch.searchsorted(there[0].contiguous(), here), lambda here, there: there.numpy(),
    lambda here, there: nn.Linear(3, 3).to(CUDA)(here), lambda here, there: there[0] @ here.cpu()[0],
    lambda here, there: torch.func.vmap(lambda row: row + torch.ones(3, device=row.device))(there) + here])
def test_devices_do_not_mix(mixes):
    """Also not on the pretended GPU, which else would show nothing."""
    with on_gpu():
        here, there = torch.ones(3, 3), torch.ones(3, 3, device=CUDA)
        there[0], there.T[torch.tensor([0, 2])], there.copy_(here)  # as on a real one
        with pytest.raises((RuntimeError, TypeError)):
            mixes(here, there)


@pytest.mark.parametrize("kind, method, backbone, settings", [  # what goes different ways through the engine
    ("blocks", "f3crec", "fedmf", {}), ("blocks", "ft", "gpfedrec", {}),
    ("sessions", "fcucr", "sasrec", {}), ("sessions", "ft", "dmi-gnn", {}), ("domains", "ft", "ccdr", {}),
    *(pytest.param(*pair, marks=pytest.mark.long) for pair in (
        ("blocks", "spp", "recbole:SASRec", {"rounds": 1}), ("domains", "ffmsr", "ffmsr", {"federated_rounds": 1})))])
def test_runs_equal_those_on_the_cpu(kind, method, backbone, settings):
    """One or two rounds of every step in double precision: losses, validation, parameters and state."""
    assert differ(Pair(NAMES, method, backbone, kind, settings)) is None


@pytest.mark.long
@pytest.mark.parametrize("kind, least", [("blocks", 60), ("sessions", 12), ("domains", 40)])
def test_all_runs_equal_those_on_the_cpu(kind, least):
    """Every method with every backbone that it goes with, domains under each topology."""
    wrong, count = {}, 0
    for method in NAMES.names("method"):
        for backbone in [*NAMES.names("backbone"), *RECBOLES]:
            for topology in TOPOLOGIES if kind == "domains" else [None]:
                pair = Pair(NAMES, method, backbone, kind, {"topology": topology} if topology else {})
                if pair.fits() is None:
                    count += 1
                    wrong[f"{pair} {topology or ''}"] = differ(pair)
    assert count > least and {name: words for name, words in wrong.items() if words} == {}


@pytest.mark.parametrize("method, backbone, dataset, settings", [
    ("f3crec", "fedmf", "ml-100k", {"k_core": 80, "blocks": 2, "extra_metrics": "distance,novelty",
                                    "upload_noise": 0.001, "upload_clip": 1.0}),
    ("ft", "pfedrec", "ml-100k", {"k_core": 80, "blocks": 2, "fold_in": 3, "cold_start": "fold_in"}),
    pytest.param("ffmsr", "ffmsr", "books+games", {"dim": 8, "encoder": "tfidf", "federated_rounds": 1, "clusters": 3,
                                                   "text_dim": 4}, marks=pytest.mark.long),
    pytest.param("ft", "miasrec", "books+games", {"dim": 8, "topology": "central", "batch_size": 24},
                 marks=pytest.mark.long)])
def test_a_run_is_kept_and_goes_on_from_where_it_was(registry, tmp_path, monkeypatch, method, backbone, dataset,
                                                     settings):
    """With ``device=cuda``, stopped at each sign of life; its record can be read without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SIZES, "report_every", 0.0)
    lay_shop("books", 1, 7, 9, texts=True)
    lay_shop("games", 2, 6, 8, texts=True)
    layers = [("test", {"rounds": 2, "patience": 0, "topk": "3,5", "valid_metric": "ndcg@5", **settings})]
    with on_gpu():
        config = make_config(registry, method, backbone, dataset, 0, layers, device="cuda")
        stream = load_stream(config.source, config.stream, config.features)
        whole = execute(config, lambda: stream, tmp_path / "whole")
        parts, told = stopped_everywhere(config, stream, tmp_path / "parts")
        assert json.loads((Path(whole["record"]) / "run.json").read_text())["device"] == "cuda" and len(told) > 2
        if not REAL:
            assert whole["environment"]["accelerator"] == "pretended"
    same_numbers(whole, parts)
    assert all(table.device.type == "cpu" for table in read_model(Path(whole["record"])).tables.tables())


def federation(registry, method, backbone):
    of_stream = SESSIONS if is_sequential(NAMES.get("backbone", backbone).cls) else BLOCKS
    config = make_config(registry, method, backbone, "ml-100k", 0, [
        ("test", {"rounds": 2, "patience": 0, **of_stream, **STABLE.get(backbone, {})})], device="cuda")
    return config.federation(load_stream(config.source, config.stream))


@needs_gpu
@pytest.mark.parametrize("method,backbone", [
    *(("ft", name) for name in NAMES.names("backbone")
      if name != "gpfedrec" and not is_of_domains(NAMES.get("backbone", name).cls)),
    ("reg", "fedmf"), ("spp", "fedmf"), ("fcucr", "sasrec")])
def test_a_round_waits_for_the_host_once(registry, method, backbone):
    """For its mean loss. Which calls of other methods do is in tests/federation/test_round_trips.py."""
    f = federation(registry, method, backbone)
    f.method.client_state, f.method.server_state = {}, {}
    step = f.stream.steps[0].to(CUDA)
    acting = f.acting_in(step)
    model = begin_step(f, step, Progress()).model
    chunks = CrossDevice(f, step, model).protocol.chunks((step.train.lengths > 0).nonzero().flatten(), 1, model)

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


@needs_gpu
@pytest.mark.parametrize("columns", [7, 320, 2047, 50001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_are_ranked_as_on_the_cpu(columns, dtype):
    scores = torch.randint(-3, 4, (5, columns), generator=torch.Generator().manual_seed(columns)).to(dtype)
    assert torch.equal(highest(scores.to(CUDA), 20).cpu(), highest(scores, 20))


@needs_gpu
def test_several_runs_of_a_grid_share_a_gpu(tmp_path, capsys):
    arguments = ["grid", "--methods", "ft,kd", "--backbones", "fedmf,fedncf", "--device", "cuda", "--jobs", "3",
                 "--set", "rounds=2", "--results", str(tmp_path), "--json"]
    assert main(arguments) == 0
    json.loads(capsys.readouterr().out)
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/*/run.json"))]
    assert [record["device"] for record in records] == ["cuda"] * 4
    assert {record["environment"]["accelerator"] for record in records} == {torch.cuda.get_device_name()}


@needs_gpu
def test_memory_of_the_gpu_is_looked_at():
    assert 0 < available(CUDA).bytes <= torch.cuda.get_device_properties(0).total_memory
