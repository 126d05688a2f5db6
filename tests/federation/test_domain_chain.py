"""Domains over time: each block's run begins from the model after the block before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import same_numbers, stopped_everywhere

from fedcl_bench.cli.main import main
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.core.errors import Busy, Corrupt, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.cross_silo import CrossSilo, beginning
from fedcl_bench.runs import runner
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.model_file import read_model
from fedcl_bench.runs.runner import Interrupted, Watch, execute, execute_before

SMALL = {"max_length": 4, "dim": 6, "batch_size": 7, "rounds": 2, "topk": [3], "valid_metric": "recall@3",
         "base_share": 0.4, "domain_blocks": 3}


@pytest.fixture
def shops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, seed, users, items in (("books", 1, 30, 15), ("games", 2, 25, 11)):
        generator = np.random.default_rng(seed)
        rows = [f"u{user}\ti{(user + place * (1 + user % 2)) % items}\t{time}\n" for user in range(users)
                for place, time in enumerate(sorted(generator.random(12)))]
        Path("data", name).mkdir(parents=True)
        Path("data", name, f"{name}.inter").write_text(
            "user_id:token\titem_id:token\ttimestamp:float\n" + "".join(rows))
        texts = [f"i{item}\tthing {item % 3} of {name}\n" for item in range(items)]
        Path("data", name, f"{name}.item").write_text("item_id:token\ttitle:token_seq\n" + "".join(texts))


def configured(registry, block, method="ft", backbone="sasrec", **settings):
    return make_config(registry, method, backbone, "books+games", overrides=[("test", {
        **SMALL, "domain_block": block, **settings})])


def loaded(config):
    return load_stream(config.source, config.stream, config.features)


def chain(config, results=Path("results"), watch=Watch()):
    execute_before(config, loaded, results, watch)
    return execute(config, lambda: loaded(config), results, watch)


def model_of(result):
    return read_model(Path(result["record"])).tables


@pytest.mark.parametrize("topology", ["federated", "local", "central"])
def test_a_block_goes_on_from_the_model_after_the_one_before(registry, shops, topology):
    last = chain(configured(registry, 2, topology=topology))
    assert len(list(Path("results/runs").iterdir())) == 3 and not last["reused"]
    model = None
    for block in range(3):
        config = configured(registry, block, topology=topology)
        federation = config.federation(loaded(config))
        start = beginning(federation, model or CrossSilo(federation).start())
        for progress in run(federation, start):
            pass
        model, kept = progress.best.model, chain(config)
        assert kept["reused"] and kept["settings"]["domain_block"] == block
        for tables, of_record in ((model.public, model_of(kept).public), (model.dense, model_of(kept).dense)):
            assert all(torch.equal(table, of_record[name]) for name, table in tables.items())
    assert kept["hash"] == last["hash"]
    *_, anew = run(federation, beginning(federation, CrossSilo(federation).start()))
    table = "books/item_embedding.weight"
    assert not torch.equal(anew.best.model.public[table], model.public[table])


def test_an_interrupted_chain_ends_with_the_same_bits(registry, shops):
    config = configured(registry, 1)
    whole = chain(config)
    with pytest.raises(Interrupted):
        execute_before(config, loaded, Path("again"), Watch(stop=lambda: True))
    execute_before(config, loaded, Path("again"), Watch())
    stopped, where = stopped_everywhere(config, loaded(config), Path("again"))
    assert len(where) >= 2
    same_numbers(stopped, whole)


def test_ffmsr_clusters_anew_in_every_block(registry, shops):
    Path("vectors").mkdir()
    for seed, (name, items) in enumerate((("books", 15), ("games", 11))):
        np.savez(Path("vectors", name), item_id=[f"i{item}" for item in range(items)],
                 vectors=np.random.default_rng(seed).normal(size=(items, 3, 4)))
    settings = {"encoder": "given:vectors", "clusters": 3, "heads": 2, "inner_size": 8}
    config = configured(registry, 1, "ffmsr", "ffmsr", **settings)
    second = chain(config)
    first = chain(config.blocks_before[0])
    for result in (first, second):
        curve = pd.read_parquet(Path(result["record"]) / "rounds.parquet")
        federated = curve[curve["stage"] == 0]
        assert len(federated) == 10 and (federated["bytes_up"] > 0).all()
    received = [model_of(result) for result in (first, second)]
    (name,) = [name for name in received[0].public if name.startswith("books/") and "centroid" in name]
    assert not torch.equal(received[0].public[name], received[1].public[name])


def test_a_run_and_a_grid_train_the_blocks_before(shops, capsys, same_process):
    settings = [word for name, value in {**SMALL, "topk": "3"}.items() for word in ("--set", f"{name}={value}")]
    cell = ["--method", "ft", "--backbone", "sasrec", "--dataset", "books+games", *settings]
    assert main([*cell, "--set", "domain_block=1"]) == 0
    assert "block 0 of the 3 of each domain" in capsys.readouterr().err
    assert len(list(Path("results/runs").iterdir())) == 2
    assert main(["grid", "--methods", "ft", "--backbones", "sasrec", "--datasets", "books+games", *settings, "--vary",
                 "domain_block=2,1,0", "--vary", "topology=federated,local", "--jobs", "2", "--threads", "1",
                 "--quiet"]) == 0
    heads = [json.loads(path.read_text()) for path in Path("results/runs").glob("*/run.json")]
    assert sorted((head["settings"].get("topology", "federated"), head["settings"]["domain_block"])
                  for head in heads) == [(topology, block) for topology in ("federated", "local") for block in range(3)]
    same = [*settings, "--rows", "method", "--columns", "block", "--metrics", "recall@3"]
    assert main(["tables", *same, "--set", "domain_block=2"]) == 0
    with pytest.raises(AssertionError):  # two blocks are not tested on the same
        assert main(["tables", *same, "--methods", "ft:domain_block=1,ft:domain_block=2"]) == 0
    assert "domain_block=1" in capsys.readouterr().err


def test_without_the_block_before_it_is_refused(registry, shops):
    config = configured(registry, 1)
    with pytest.raises(UserError, match="found 1, which begins from the model after block 0; accepted: this once"):
        execute(config, lambda: loaded(config), Path("results"))
    first = chain(config.blocks_before[0])
    path = Path(first["record"]) / "model.pt"
    other = chain(configured(registry, 0, dim=4))
    for name in ("model.pt", "model.pt.b2sum"):
        path.with_name(name).write_bytes((Path(other["record"]) / name).read_bytes())
    with pytest.raises(Corrupt, match="model.pt: does not fit the run's .*'public.books/item_embedding.weight'"):
        execute(config, lambda: loaded(config), Path("results"))
    path.unlink()
    with pytest.raises(Corrupt, match="model.pt: is missing"):
        execute(config, lambda: loaded(config), Path("results"))


def test_a_block_that_another_process_is_at_is_waited_for(registry, shops, monkeypatch):
    config, asked = configured(registry, 1), []
    whole = runner.execute

    def busy_at_first(*args, **options):
        asked.append(1)
        if len(asked) < 3:
            raise Busy("another process")
        return whole(*args, **options)
    monkeypatch.setattr(runner, "execute", busy_at_first)
    monkeypatch.setattr(runner, "WAIT", 0.0)
    execute_before(config, loaded, Path("results"), Watch())
    assert len(asked) == 3 and len(list(Path("results/runs").iterdir())) == 1
    asked.clear()
    with pytest.raises(Interrupted, match="another process was at block 0"):
        execute_before(config, loaded, Path("results"), Watch(stop=lambda: True))
