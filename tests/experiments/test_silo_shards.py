"""Domains spread over nodes have the numbers of domains in one process: each has its own data and module, and the
server neither. The nodes are threads of this process."""

from dataclasses import replace

import pytest
import torch
from helpers import assert_same, federation_of, lay_shop, lay_two_shops
from test_shards import Threads, finish

from fedcl_bench.core.errors import PluginError, UserError
from fedcl_bench.experiments.partition import divide, progress_part, stream_part, with_rows_of
from fedcl_bench.experiments.shards import Conductor
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.remote import Node, Undeclared
from fedcl_bench.runs.config import make_config

SMALL = {"precision": "float64", "rounds": 3, "dim": 4, "max_length": 4, "batch_size": 16, "topk": [3],
         "valid_metric": "recall@3"}
TEXTS = {"encoder": "given:vectors", "heads": 2, "inner_size": 8}


@pytest.fixture(autouse=True)
def shops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay_two_shops()


@pytest.fixture
def made(registry):
    """A configuration and its federation."""
    def make(method, backbone, dataset="books+games", **settings):
        config = make_config(registry, method, backbone, dataset, overrides=[("test", {**SMALL, **settings})])
        return config, federation_of(config)
    return make


RUNS = [
    ("ft", "sasrec", {}), ("ft", "sasrec", {"topology": "local"}),
    ("ft", "gru4rec", {"weighting": "interactions", "extra_metrics": "novelty,distance", "server_optimiser": "yogi",
                       "server_optimiser_lr": 0.01}),
    ("ffmsr", "ffmsr", {**TEXTS, "clusters": 3, "federated_rounds": 2}),
    ("pfcr", "vqrec", {**TEXTS, "codes": 2, "centroids": 3, "federated_rounds": 2, "prompts": 3, "prompt_heads": 2}),
    ("feddcsr", "feddcsr", {"heads": 2, "weighting": "interactions"}),
    ("mergerec", "unisrec", {**TEXTS, "ids": False, "learning_steps": 2}),
    ("ft", "sasrec", {"domain_blocks": 2, "base_share": 0.6}),
]


@pytest.mark.parametrize("method, backbone, settings", RUNS)
def test_numbers_of_an_undivided_run(made, method, backbone, settings):
    config, f = made(method, backbone, rounds=2, **settings)
    *_, alone = run(f)
    found, points = finish(Conductor(config, 2, (), Threads), config, f.stream)
    assert_same(found, alone, 1e-12)


def test_domains_that_share_nothing_end_by_themselves(made):
    """Each has as many rounds as alone, and no other domain's curve is at its node."""
    config, f = made("ft", "sasrec", topology="local", patience=2, rounds=8, valid_metric="mrr@3")
    *_, alone = run(f)
    rounds = [[row["step"] for row in alone.curve].count(unit) for unit in (0, 1)]
    assert len(set(rounds)) == 2 and max(rounds) < 8
    found, _ = finish(Conductor(config, 2, (), Threads), config, f.stream)
    assert_same(found, alone, 1e-12)
    for unit in (0, 1):
        part = progress_part(found, torch.tensor([unit]), f.stream.domains)
        assert [row["step"] for row in part.curve] == [unit] * rounds[unit]


def test_two_domains_at_a_node_and_a_checkpoint_of_one_process(made):
    """A run that one process began goes on over nodes, from within a round too, and the other way round."""
    lay_shop("films", 3, 15, 12)
    config, f = made("ft", "sasrec", "books+games+films", topology="federated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcl_bench.federation.cross_silo.SIZES.report_every", 0.0)
        points, parts = [], []
        for point in run(f):
            points.append(point)
            if point.round == 1 and point.fraction_done:
                parts.append(replace(point, within=lambda part=point.within(): part))
    middle = parts[len(parts) // 2]  # in the second domain's epoch
    assert [batches > 0 for _, batches, *_ in middle.within().epochs] == [True, True, False]
    [after] = [point for point in points if point.round == 2 and not point.fraction_done]
    for start in (None, after, middle):
        found, _ = finish(Conductor(config, 2, (), Threads), config, f.stream, start)
        assert_same(found, points[-1], 1e-12)
    conductor = Conductor(config, 3, (), Threads)
    of_servers = conductor.run(f, None)
    of_server = next(point for point in of_servers if point.round == 2)
    assert not any(table.numel() for table in of_server.model.tables()) and not of_server.server_state
    gathered = conductor.complete(of_server)
    assert_same(gathered, after, 1e-12)
    *_, last = run(f, gathered)
    assert_same(last, points[-1], 1e-12)


def test_parts_have_their_own_domains_and_are_all_of_them(made):
    config, f = made("ft", "sasrec", domain_blocks=2, base_share=0.6)
    names, units = divide(f.stream, 2), f.stream.units()
    assert [some.tolist() for some in names] == [[0], [1]]
    for number, part in enumerate(stream_part(f.stream, some) for some in names):
        for unit, step in enumerate(part.units()):
            for split in ("train", "valid", "test"):
                ours, whole = step.sessions[split], units[unit].sessions[split]
                if unit % 2 == number:
                    assert all(torch.equal(table, vars(whole)[name]) for name, table in vars(ours).items())
                else:
                    assert not len(ours.items) and not len(step.split(split).values)
        assert [bool(token) for token in part.item_tokens] == [
            token.startswith(f.stream.domains[number].name) for token in f.stream.item_tokens]
    end = list(run(f))[2]
    assert_same(with_rows_of(end, [progress_part(end, some, f.stream.domains) for some in names], names), end)
    with pytest.raises(UserError, match="--shards: found 3, accepted: at most the number of domains, 2"):
        divide(f.stream, 3)


def test_what_is_not_declared_is_not_sent(made, registry, monkeypatch):
    node = Node(lambda kind, tables: tables, torch.tensor([0]))
    for kind, name in (("epochs", "model/0/item_embedding.weight"), ("valid", "ranks"), ("ended", "loss")):
        with pytest.raises(Undeclared, match=f"message '{kind}' cannot have '{name}'"):
            node.ask(kind, {name: torch.zeros(1)})
    config, f = made("feddcsr", "feddcsr", heads=2)
    monkeypatch.setattr(config.method.cls, "upload", lambda self, module, draw: dict(module.named_parameters()))
    with pytest.raises((PluginError, RuntimeError), match="sends '.*', which is not declared"):
        finish(Conductor(config, 2, (), Threads), config, f.stream)


def test_codes_of_what_others_train_on_are_refused(made):
    config, f = made("ft", "vqrec", **TEXTS, codes=2, centroids=3, coded="trained")
    with pytest.raises(UserError, match="makes codes of which items domains train on"):
        finish(Conductor(config, 2, (), Threads), config, f.stream)
