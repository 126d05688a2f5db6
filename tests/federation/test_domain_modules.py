"""Domains whose recommenders are plain PyTorch modules: equal to a loop that anybody would write, resumed to the bit,
in stages, with what a method uploads and receives."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import executed, federation_of, finish, same_numbers, stopped_everywhere
from test_silos import TOPOLOGIES

import fedcl_bench as fb
from fedcl_bench import SIZES, rng
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.core.errors import PluginError, RunFailed, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.runner import execute

PLUGINS = '''
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedcl_bench.plugin.silo import DomainMethod, DomainModule, ModuleBackbone, ModuleSettings, Stage
from fedcl_bench.plugin.method import NoSettings
from fedcl_bench.core.settings import setting


class Pooled(DomainModule):
    rows = ("items.weight", "hints")

    def __init__(self, data, settings):
        super().__init__()
        self.items = nn.Embedding(data.n_items, settings.dim)
        self.mix = nn.Sequential(nn.Dropout(settings.dropout), nn.Linear(settings.dim, settings.dim), nn.Tanh())
        self.late = nn.Linear(settings.dim, settings.dim, bias=False)
        self.register_buffer("hints", torch.zeros(data.n_items, 2))
        self.codes, self.wrapped = data.codes, False

    def enter_stage(self, stage):
        if stage == "alone":
            self.hints += 1.0

    def scores(self, batch):
        rows = self.items(batch.items.clamp(min=0)) * batch.real.unsqueeze(2)
        vector = self.mix(rows.sum(1) / batch.lengths.unsqueeze(1)) + batch.last(rows)
        if self.stage == "alone":
            vector = self.late(vector)
        return vector @ self.items.weight.T + self.hints.sum(1)


@dataclass(frozen=True)
class PooledSettings(ModuleSettings):
    dropout: float = setting(0.0, "share of numbers dropped", low=0.0, high=0.9)


class PooledBackbone(ModuleBackbone):
    name, title, reference, Settings = "pooled", "Mean of items", "", PooledSettings
    exchanges = frozenset({"hints"})

    def prepared(self, domains):
        return [replace(data, codes=torch.tensor([each.n_items for each in domains])) for data in domains]

    def module(self, data):
        return Pooled(data, self.settings)


class Twice(Pooled):
    def __init__(self, data, settings):
        super().__init__(data, settings)
        self.again, self.thrice = self.mix, nn.Module()
        self.thrice.weight = self.mix[1].weight

    def item_vectors(self):
        return self.items.weight[:, :1]


class TwiceBackbone(PooledBackbone):
    name, title = "twice", "Some of its parameters have several names"

    def module(self, data):
        return Twice(data, self.settings)


class Hints(DomainMethod):
    name, title, reference, Settings = "hints", "Exchanges hints", "", NoSettings
    needs, sent = "hints", ("sizes",)

    def stages(self):
        return (Stage("together", rounds=2, trained=("items", "mix")),
                Stage("alone", exchanges=False, new_optimiser=True))

    def module(self, backbone, data):
        module = backbone.module(data)
        module.wrapped = True
        return module

    def upload(self, module, draw):
        return {"sizes": module.items.weight.norm(dim=1) + 0.0 * torch.rand(len(module.hints))}

    def aggregate(self, uploads, weights, draw):
        total = sum(upload["sizes"].mean() for upload in uploads)
        return [{"hints": torch.stack([upload["sizes"], total.expand(len(upload["sizes"]))], 1)} for upload in uploads]
'''
SMALL = {"max_length": 4, "dim": 6, "batch_size": 7, "rounds": 3, "topk": [3], "valid_metric": "mrr@3",
         "precision": "float64", "lr": 0.01}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "pooled.py").write_text(PLUGINS)
    return discover([folder])


def configured(registry, method="ft", backbone="pooled", **settings):
    return make_config(registry, method, backbone, "books+games", 0, [("test", {**SMALL, **settings})])


def samples_of(step, length):
    """Every beginning of every training history, by user and length, and what comes next."""
    return [(history[:end][-length:].tolist(), int(history[end])) for history in
            (step.train.of(user) for user in range(step.n_users)) for end in range(1, len(history))]


class PlainLoop:
    """A module per domain and the loop around it, one sample after the other."""

    def __init__(self, f):
        self.f, silos = f, CrossSilo(f)
        self.domains, self.pooled = silos.domains, f.topology == "central"
        self.modules = [domain.module for domain in silos.domains]
        start = silos.start()
        for domain in self.domains:
            domain.load(start)
        if self.pooled:
            for module in self.modules[1:]:
                module.mix, module.late = self.modules[0].mix, self.modules[0].late
        groups = [{id(p): p for module in self.modules for p in module.parameters()}] if self.pooled else [
            {id(p): p for p in module.parameters()} for module in self.modules]
        self.optimisers = [torch.optim.Adam(group.values(), lr=f.backbone.settings.lr) for group in groups]
        self.samples = [samples_of(domain.step, f.backbone.settings.max_length) for domain in self.domains]

    def score(self, module, history):
        rows = module.items.weight
        vector = module.mix(rows[history].mean(0)) + rows[history[-1]]
        return rows @ vector + module.hints.sum(1)

    def epoch(self, which, seed, optimiser, number):
        every = [(self.modules[i], sample) for i in which for sample in self.samples[i]]
        keys = rng.bits(rng.client_keys(rng.key(seed, "order of samples", number), torch.tensor([0])),
                          torch.arange(len(every)))
        order, total = rng.sort_keys(keys).argsort().tolist(), 0.0
        for at in range(0, len(order), self.f.local.batch_size):
            batch = [every[i] for i in order[at:at + self.f.local.batch_size]]
            losses = torch.stack([-self.score(module, history).log_softmax(0)[target]
                                  for module, (history, target) in batch])
            optimiser.zero_grad()
            if self.pooled:  # a table moves on also in a batch without samples of its domain
                for parameter in {id(p): p for m in self.modules for p in m.parameters()}.values():
                    parameter.grad = torch.zeros_like(parameter)
            losses.mean().backward()
            optimiser.step()
            total += float(losses.detach().sum())
        return total / len(every)

    def round(self, number):
        if self.pooled:
            return [self.epoch([0, 1], self.f.seed, self.optimisers[0], number)] * 2
        seeds = [rng.key(self.f.seed, "domain", i) >> 1 for i in (0, 1)]
        losses = [self.epoch([i], seeds[i], self.optimisers[i], number) for i in (0, 1)]
        if self.f.topology == "federated":
            with torch.no_grad():
                for left, right in zip(*(module.mix.parameters() for module in self.modules)):
                    mean = (left + right) / 2
                    left.copy_(mean)
                    right.copy_(mean)
        return losses


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_equals_a_plain_loop(known, shops, topology):
    config = configured(known, topology=topology, rounds=2)
    f = federation_of(config)
    plain, number = PlainLoop(f), 0
    for progress in run(federation_of(config)):
        if progress.fraction_done or progress.step:
            continue
        rows = progress.curve[-2:]
        assert [row["loss"] for row in rows] == pytest.approx(plain.round(number), rel=1e-9)
        number += 1
        for domain, module, row in zip(plain.domains, plain.modules, rows):
            model = domain.part(progress.model)
            for name, value in {**model.public, **model.dense}.items():
                if name != "late.weight":  # which no loss reaches in this stage
                    torch.testing.assert_close(value, module.state_dict()[name], rtol=1e-7, atol=1e-9)
            ranks = []
            for user in range(domain.step.n_users):
                if len(domain.step.valid.of(user)):
                    scores = plain.score(module, domain.step.train.of(user)[-4:].tolist()).detach()
                    ranks.append(int((scores >= scores[domain.step.valid.of(user)[0]]).sum()))
            assert row["valid"] == pytest.approx(sum(1 / rank for rank in ranks if rank <= 3) / len(ranks), abs=1e-6)
    assert number == 2


@pytest.mark.parametrize("method, topology", [("ft", "central"), ("hints", "federated")])
def test_a_run_stopped_after_any_batch_goes_on_to_the_same_bits(known, shops, tmp_path, monkeypatch, method,
                                                                topology):
    config = configured(known, method, topology=topology, dropout=0.4, precision="float32", rounds=2, batch_size=24)
    stream = load_stream(config.source, config.stream)
    whole = execute(config, lambda: stream, tmp_path / "whole")
    monkeypatch.setattr(SIZES, "report_every", 0.0)
    parts, told = stopped_everywhere(config, stream, tmp_path / "parts")
    assert len(told) > 2 * max(whole["rounds"]) and told == sorted(set(told))
    same_numbers(whole, parts)


def test_stages_train_send_and_end_as_they_say(known, shops, tmp_path):
    config = configured(known, "hints", rounds=12, patience=2, lr=0.05)
    f = federation_of(config)
    before, seen = CrossSilo(f).start(), []
    for progress in run(f):
        if not progress.fraction_done and not progress.step:
            seen.append(progress)
    frozen, hints = "books/late.weight", "books/hints"
    assert torch.equal(seen[1].model.dense[frozen], before.dense[frozen])
    assert not torch.equal(seen[2].model.dense[frozen], before.dense[frozen])
    sizes = seen[1].model.public["books/items.weight"].norm(dim=1)
    torch.testing.assert_close(seen[1].model.public[hints][:, 0], sizes)
    assert seen[1].model.public[hints][:, 1].unique().numel() == 1
    torch.testing.assert_close(seen[2].model.public[hints], seen[1].model.public[hints] + 1.0)  # entered once
    torch.testing.assert_close(seen[-1].model.public[hints], seen[2].model.public[hints])
    steps = seen[2].server_state["step of books/items.weight"]
    assert steps.max() < seen[1].server_state["step of books/items.weight"].max()  # the optimiser is new

    result = executed(config, tmp_path / "results")
    rounds = pd.read_parquet(Path(result["record"]) / "rounds.parquet")
    assert (rounds.groupby("step")["stage"].value_counts().unstack()[0] == 2).all()
    assert (rounds["bytes_up"] > 0).eq(rounds["stage"] == 0).all()
    assert set(rounds["bytes_up"][rounds["stage"] == 0]) == {15 * 8, 11 * 8}
    assert rounds.groupby("step").size().nunique() == 2  # alone, each ends by itself
    for step, of_step in rounds.groupby("step"):
        last = of_step[of_step["stage"] == 1]["valid"].tolist()
        assert len(last) == last.index(max(last)) + 3
        assert result["best_round"][step] == 2 + last.index(max(last)) + 1
    assert result["privacy"]["uploaded"] == ["sizes", "features"]  # which `prepared` reads of all domains
    assert "late.weight" in result["privacy"]["kept_at_client"]


@pytest.mark.parametrize("topology", ["federated", "central"])  # alone is federated without a mean
def test_a_parameter_of_several_names_is_one(known, shops, topology):
    """It counts under the first name: once is it sent, trained and set."""
    once, twice = (finish(federation_of(configured(known, backbone=name, topology=topology, rounds=2)))
                   for name in ("pooled", "twice"))
    assert once.model.dense.keys() == twice.model.dense.keys()
    assert all(torch.equal(value, twice.model.dense[name]) for name, value in once.model.dense.items())
    same = ("loss", "valid", "bytes_up", "bytes_down")
    assert [[row[name] for name in same] for row in once.curve] == [[row[name] for name in same] for row in twice.curve]


def test_distances_are_those_of_the_items_vectors(known, shops):
    """By default of the first table of items' rows, else of what the module says: here 1 number, its sign."""
    for name, signs in (("pooled", False), ("twice", True)):
        progress = finish(federation_of(configured(known, backbone=name, extra_metrics="distance,novelty", rounds=1)))
        distances = torch.cat([scores.values["distance@3"] for _, _, scores in progress.tests])
        thirds = distances * 3 / 4  # of 3 pairs none or two have different signs
        assert (distances >= 0).all() and distances.max() > 0
        assert torch.allclose(thirds, thirds.round(), atol=1e-9) == signs
    with pytest.raises(PluginError, match="no table of items' vectors in rows, and does not implement item_vectors"):
        fb.DomainModule().item_vectors()


def test_an_epoch_that_diverges_is_no_checkpoint(known, shops, tmp_path, monkeypatch):
    monkeypatch.setattr(SIZES, "report_every", 0.0)
    config = configured(known, lr=1e200, precision="float32")
    with pytest.raises(RunFailed, match="training diverged in domain 'books', round 1"):
        stopped_everywhere(config, load_stream(config.source, config.stream), tmp_path / "results")


@pytest.mark.parametrize("method, topology, known_together", [
    ("ft", "local", [[15], [11]]), ("ft", "central", [[15, 11]] * 2), ("hints", "federated", [[15, 11]] * 2)])
def test_domains_that_train_together_are_prepared_together(known, shops, method, topology, known_together):
    made = [domain.module for domain in CrossSilo(federation_of(configured(known, method, topology=topology))).domains]
    assert [module.codes.tolist() for module in made] == known_together
    assert [module.wrapped for module in made] == [method == "hints"] * 2


@pytest.mark.parametrize("change, said", [
    (("return {\"sizes\": module", "return {\"secret\": module"), "sends 'secret', which is not declared"),
    (('[{"hints": torch.stack', '[{"mints": torch.stack'), "answers 'mints', .*expected one of"),
    (('rows = ("items.weight", "hints")', 'rows = ("items.weight", "hint")'), "names 'hint', which does not exist"),
    (('rows = ("items.weight", "hints")', 'rows = ("items.weight", "mix.1.bias")'), r"a parameter .*\(15, ...\)"),
    (("return vector @ self.items.weight.T + self.hints.sum(1)", "return vector"), "expected a floating tensor"),
    (('trained=("items", "mix")', 'trained=("item_", "mixed")'), "none of its parameters begins with 'item_' or"),
])
def test_broken_plugins_are_named(shops, tmp_path, change, said):
    assert change[0] in PLUGINS
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "pooled.py").write_text(PLUGINS.replace(*change))
    config = configured(discover([tmp_path / "more"]), "hints")
    with pytest.raises(PluginError, match=f"(?s)'(hints|pooled)': .*{said}"):
        list(run(federation_of(config)))


def test_what_does_not_go_together_is_refused(known, shops):
    for method, backbone, settings, said in (
            ("hints", "pooled", {"topology": "local"}, "found local, accepted: federated with method 'hints'"),
            ("hints", "sasrec", {}, "(?s)exchanges hints, which 'sasrec' has none of.*that fit: .*pooled"),
            ("hints", "fedmf", {}, "(?s)exchanges hints, which 'fedmf' has none of"),
            ("f3crec", "pooled", {}, "(?s)is about clients of one user each.*that fit: .*ft, .*hints")):
        with pytest.raises(UserError, match=said):
            federation_of(configured(known, method, backbone, **settings))
    for method in ("ft", "hints"):
        config = make_config(known, method, "pooled", "ml-100k")
        with pytest.raises(UserError, match="is one of domains; name two or more, as in --dataset A.B"):
            config.check(config.federation(load_stream(config.source, config.stream)))
