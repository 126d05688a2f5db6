"""Domains over time: one run trains block after block, each from every domain's best model of the one before."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import executed, federation_of, lay_log, output_of, same_numbers, stopped_everywhere

from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.federation.loop import run
from fedcl_bench.plugin.method import NoSettings
from fedcl_bench.plugin.silo import DomainMethod
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.checkpoints import read_model

SMALL = {"max_length": 4, "dim": 6, "batch_size": 16, "rounds": 2, "topk": [3], "valid_metric": "recall@3",
         "base_share": 0.4, "domain_blocks": 3}
FFMSR = {"encoder": "given:vectors", "clusters": 3, "heads": 2, "inner_size": 8, "batch_size": 32,
         "federated_rounds": 2}
BLOCKS = 3


@pytest.fixture(autouse=True, scope="module")
def shops(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shops"))
        Path("vectors").mkdir()
        for name, seed, users, items in (("books", 1, 9, 15), ("games", 2, 8, 11)):
            generator = np.random.default_rng(seed)
            lay_log(name, [(f"u{user}", f"i{(user + place * (1 + user % 2)) % items}", time) for user in range(users)
                           for place, time in enumerate(sorted(generator.random(12)))])
            np.savez(Path("vectors", name), item_id=[f"i{item}" for item in range(items)],
                     vectors=generator.normal(size=(items, 3, 4)))
        yield


def configured(registry, method="ft", backbone="sasrec", **settings):
    return make_config(registry, method, backbone, "books+games", overrides=[("test", {**SMALL, **settings})])


def ends(federation):
    """The progress after each step."""
    return [progress for progress in run(federation) if not progress.round and not progress.fraction_done]


@pytest.fixture(scope="module")
def ended(registry):
    """A federation and the ends of its steps: of SASRec under a topology, or FFMSR."""
    @functools.cache
    def ended(kind):
        config = configured(registry, "ffmsr", "ffmsr", **FFMSR) if kind == "ffmsr" else configured(
            registry, topology=kind)
        federation = federation_of(config)
        if kind == "ffmsr":
            upload, federation.method.blocks = federation.method.upload, set()
            federation.method.upload = lambda module, draw: federation.method.blocks.add(draw.step) or upload(
                module, draw)
        return federation, ends(federation)
    return ended


@pytest.fixture(scope="module")
def record(registry):
    return executed(configured(registry))


def tables_of(progress):
    return progress.best.model.public | progress.best.model.dense


@pytest.mark.parametrize("kind", ["federated", "central", "ffmsr"])  # alone is federated without a mean
def test_a_block_is_a_run_from_the_model_of_the_one_before(ended, kind, monkeypatch):
    (federation, whole), before = ended(kind), None
    assert [progress.step for progress in whole] == [1, 2, 3]
    for step, progress in zip(federation.stream.steps, whole):
        parts = tuple(replace(part, interactions=part.interactions[step.index:][:1])
                      for part in federation.stream.domains)
        alone = replace(federation, stream=replace(federation.stream, steps=(replace(step, index=0),), domains=parts))
        with monkeypatch.context() as patched:
            if before is not None:
                patched.setattr(CrossSilo, "start", lambda self, model=before: model)
            *_, end = run(alone)
        before = end.best.model
        assert all(torch.equal(table, tables_of(progress)[name]) for name, table in tables_of(end).items())
        rows = [{**row, "step": row["step"] % 2} for row in progress.curve if row["step"] // 2 == step.index]
        for here, there in zip(rows, end.curve, strict=True):
            assert all(here[name] == there[name] for name in here if not name.endswith("seconds"))
        diagonal = [scores for t, s, scores in progress.tests if t == s and t // 2 == step.index]
        for here, (_, _, there) in zip(diagonal, end.tests, strict=True):
            assert torch.equal(here.users, there.users)
            assert all(torch.equal(values, there.values[name]) for name, values in here.values.items())


def test_one_record_has_every_domains_row_of_tests_and_the_last_blocks_model(registry, record, ended):
    users = pd.read_parquet(Path(record["record"]) / "users.parquet")
    assert sorted(set(zip(users["trained_block"], users["tested_block"]))) == sorted(
        (2 * t + domain, 2 * s + domain) for t in range(BLOCKS) for s in range(t + 1) for domain in (0, 1))
    matrix, diagonal = record["matrix"]["recall@3"], record["metrics"]["recall@3"]["per_block"]
    assert len(diagonal) == 2 * BLOCKS and record["metrics"]["recall@3"]["avg_incremental"] == np.mean(diagonal[2:])
    for (t, s), mean in users[users["metric"] == "recall@3"].groupby(["trained_block", "tested_block"])["value"].mean(
            ).items():
        assert matrix[t][s] == pytest.approx(mean)
    transfer = np.mean([matrix[-1][s] - diagonal[s] for s in range(4)])
    assert record["continual"]["recall@3"]["BWT"] == pytest.approx(transfer)
    assert record["tested"]["interactions"] == record["tested"]["users"]
    saved, last = read_model(Path(record["record"])).tables, tables_of(ended("federated")[1][-1])
    assert all(torch.equal(table, last[name]) for name, table in (saved.public | saved.dense).items())
    assert executed(configured(registry))["reused"]


def test_weights_by_interactions_are_those_of_the_block(registry):
    f = federation_of(configured(registry, weighting="interactions"))
    for step in f.stream.steps:
        for domain in CrossSilo(f, step).domains:
            known = len(domain.step.train.values) - domain.step.trained_rows
            assert 0 < domain.step.trained_rows < domain.step.interactions and (known > 0) is (step.index > 0)


def test_an_interrupted_run_ends_with_the_same_bits(registry, record):
    config = configured(registry)
    stopped, where = stopped_everywhere(config, load_stream(config.source, config.stream), Path("again"))
    assert len(where) >= 2 * BLOCKS
    same_numbers(stopped, record)


def test_ffmsr_clusters_anew_in_every_block(ended):
    federation, progress = ended("ffmsr")
    assert federation.method.blocks == set(range(BLOCKS))  # what is drawn in an upload is another in each
    received = [{name: table for name, table in tables_of(each).items() if "centroid" in name} for each in progress]
    assert received[0] and all(not torch.equal(table, received[1][name]) for name, table in received[0].items())
    curve = pd.DataFrame(progress[-1].curve)
    federated = curve[curve["stage"] == 0]
    assert federated["step"].nunique() == 2 * BLOCKS and (federated["bytes_up"] > 0).all()


class Keeps(DomainMethod):
    """Adds to a parameter at the start of a step, and keeps what it was after one."""

    name = "keeps"

    def __init__(self):
        super().__init__(NoSettings())
        self.heard = []

    def begin_step(self, step, module, backbone):
        self.heard.append(("begin", step.index, step.n_items))
        next(iter(module.parameters())).add_(100.0)

    def end_step(self, step, module, backbone):
        self.heard.append(("end", step.index, step.n_items))
        next(iter(module.parameters())).mul_(0.0)


def test_a_method_hears_of_steps_at_each_domain(registry):
    config = configured(registry, "ft", "recbole:GRU4Rec", topology="local", lr=1e-9)
    method = Keeps()
    points = list(run(replace(federation_of(config), method=method)))
    assert method.heard == [(what, step, items) for step in range(BLOCKS) for what in ("begin", "end")
                            for items in (15, 11) if (what, step) != ("begin", 0)]
    first = tables_of(next(progress for progress in points if progress.step == 1 and not progress.round))
    assert not first[next(name for name in first if name.startswith("books/"))].any()
    begun = next(progress for progress in points if progress.step == 1 and progress.round == 1)
    assert begun.model.public[next(iter(begun.model.public))].min() > 99


def test_the_command_line_shows_and_tables_it(registry, record, capsys):
    settings = [word for name, value in {**SMALL, "topk": "3"}.items() for word in ("--set", f"{name}={value}")]
    shown = output_of(capsys, "--method", "ft", "--backbone", "sasrec", "--dataset", "books+games", *settings)
    assert "books, block 0" in shown and "games, block 2" in shown and "over R[t,s]: LA" in shown
    assert record["record"] in shown  # the run is not done again
    executed(configured(registry, topology="local"))
    table = output_of(capsys, "tables", *settings, "--records", "results", "--rows", "method", "--columns", "block",
                      "--metrics", "recall@3", "--methods", "ft,ft:topology=local")
    assert "games, block 2" in table
