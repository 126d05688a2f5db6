"""One client that holds all sessions: equal to a plain module under torch.optim on the same mini-batches, resumed to
the bit, and refused where it makes no sense."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import executed, federation_of, grown, refused, same_numbers, stopped_everywhere
from oracle import stream as numbers
from session_oracle import clicked_together, left_padded, single_client
from torch import nn

import fedcl_bench as fb
from fedcl_bench import SIZES, UserError, setting
from fedcl_bench.cli.main import main
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.experiments.partition import check_divisible
from fedcl_bench.federation.loop import run
from fedcl_bench.plugin.sequential import EncoderSettings
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.memory_check import ended, require
from fedcl_bench.runs.runner import execute

SMALL = {"max_length": 4, "dim": 6, "dropout": 0.0, "batch_size": 7, "rounds": 3, "topk": [3], "valid_metric": "mrr@3",
         "precision": "float64", "lr": 0.01}
_MIASREC = {"heads": 2, "inner_size": 7, "session_dropout": 0.0, "item_dropout": 0.0, "padding": "none"}
BACKBONES = {"sasrec": {}, "gru4rec": {}, "sasrec, recbole": {"architecture": "recbole", "layers": 2},
             "miasrec": _MIASREC, "miasrec, entmax": {**_MIASREC, "selection": "entmax"},
             "miasrec, padding": {**_MIASREC, "padding": "vectors"},
             "dmi-gnn": {"global_dropout": 0.0, "graph_neighbours": 3, "long_session": 2.0},
             "dmi-gnn, extractors": {"global_dropout": 0.0, "graph_neighbours": 0, "patterns": "extractors",
                                     "interests": 2}}


@pytest.fixture
def log(tmp_path, monkeypatch):
    """15 sessions of 2 to 6 of 15 items to train on and 6 to test."""
    monkeypatch.chdir(tmp_path)
    generator, rows, position = np.random.default_rng(7), [], 0
    for number in range(21):
        for item in generator.integers(0, 15, generator.integers(2, 7)):
            position += 1
            rows.append(f"s{number}\ti{item}\t{position}\t{'train' if number < 15 else 'test'}\n")
    Path("log.inter").write_text("user:token\titem:token\ttime:float\tsplit:token\n" + "".join(rows))
    Path("log.yaml").write_text("USER_ID_FIELD: user\nITEM_ID_FIELD: item\nTIME_FIELD: time\nSESSION_FIELD: user\n"
                                "SPLIT_FIELD: split\nsettings: {stream: sessions, topology: central, session_from: "
                                "column, session_split: column}\n")


def configured(registry, name="sasrec", method="ft", seed=0, **settings):
    backbone = name.split(",")[0]
    overrides = {**SMALL, **BACKBONES.get(name, {}), **settings}
    return make_config(registry, method, backbone, "./log.inter", seed, [("test", overrides)])


def cut(sessions):
    """Sessions as lists of (item, time)."""
    pairs = list(zip(sessions.items.tolist(), sessions.times.tolist()))
    return [pairs[a:b] for a, b in zip(sessions.start.tolist(), sessions.start[1:].tolist())]


class Plain:
    """A module of one client and torch.optim's optimiser, sample by sample."""

    def __init__(self, f, name, start):
        self.f, self.settings, sessions = f, f.backbone.settings, f.stream.steps[0].sessions
        self.module = single_client(name, self.settings, start.n_items).double().load(start.public, start.dense)
        train = cut(sessions["train"])
        most = getattr(self.settings, "graph_neighbours", 0)
        self.module.graph = clicked_together([[item for item, _ in session] for session in train], most)
        self.samples = [session[:end] for session in train for end in range(2, len(session) + 1)]
        kind = torch.optim.Adam if f.local.optimiser == "adam" else torch.optim.SGD
        self.optimiser = kind(self.module.parameters(), lr=self.settings.lr, weight_decay=f.local.weight_decay)
        step = f.local.lr_step or 10 ** 9
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimiser, step, f.local.lr_decay)
        self.whole = not f.backbone.positionwise

    def outputs(self, sample):
        rows, times = left_padded([item for item, _ in sample[:-1]], [time for _, time in sample[:-1]],
                                  self.settings.max_length)
        return self.module(rows, times)

    def loss(self, sample):
        outputs, target = self.outputs(sample), sample[-1][0]
        if self.whole:
            positives = torch.zeros(self.settings.max_length, dtype=torch.int64)
            positives[-1] = target + 1
            return self.module.loss(outputs, positives, positives)
        return nn.functional.cross_entropy(self.module.scores(outputs)[None], torch.tensor([target]))

    def epoch(self, number):
        key = numbers(self.f.seed, "order of samples", number, 0)
        order = sorted(range(len(self.samples)), key=lambda i: key(i) >> 1)
        total = 0.0
        for at in range(0, len(order), self.f.local.batch_size):
            batch = order[at:at + self.f.local.batch_size]
            self.optimiser.zero_grad()
            losses = torch.stack([self.loss(self.samples[i]) for i in batch])
            losses.mean().backward()
            self.optimiser.step()
            total += losses.detach().sum().item()
        self.schedule.step()
        return total / len(order)

    @torch.no_grad()
    def ranks(self, split):
        """How many items are before the one to find, of each session."""
        scores = [(self.module.scores(self.outputs(session)), session[-1][0])
                  for session in cut(self.f.stream.steps[0].sessions[split])]
        return torch.tensor([int((each >= each[target]).sum()) - 1 for each, target in scores])


# Adam with weight decay moves a bias without gradient, as that of attention's keys is, by what rounding leaves of it.
_ADAM = {"lr_step": 1, "lr_decay": 0.5}
CASES = [*((name, {"optimiser": "sgd", "weight_decay": 0.01, "lr": 0.05}, 1e-9) for name in sorted(BACKBONES)),
         *(pytest.param(name, _ADAM, 1e-6, marks=[pytest.mark.long] * (i % 2))
           for i, name in enumerate(sorted(BACKBONES)[::2])), ("gru4rec", {**_ADAM, "weight_decay": 0.01}, 1e-6)]


@dataclass(frozen=True)
class Named(EncoderSettings):
    """Names that settings of other backbones have, with another meaning."""

    layers: str = setting("few", "")
    heads: int = setting(2, "")
    hidden: int = setting(3, "")
    loss: float = setting(0.5, "")
    output_embedding: str = setting("private", "")


def test_nothing_is_guessed_from_names_of_settings(registry, log):
    plain = federation_of(configured(registry, "sasrec", rounds=1))

    class Other(type(plain.backbone)):
        def __init__(self, settings):
            super().__init__(plain.backbone.settings)
            self.settings = settings
        dense_starts, encode = (lambda self, *args, hook=hook: hook(*args)
                                for hook in (plain.backbone.dense_starts, plain.backbone.encode))
    shared = {field.name: getattr(plain.backbone.settings, field.name) for field in fields(EncoderSettings)}
    f = replace(plain, backbone=Other(Named(**shared)))
    f.check()
    require(f)
    assert "dim=N (now 6)" in str(ended(MemoryError(), f))
    first, second = ([*run(each)][-1] for each in (plain, f))
    assert [row["valid"] for row in first.curve] == [row["valid"] for row in second.curve]


@pytest.mark.parametrize("name, more, near", CASES, ids=str)
def test_equals_a_plain_module_on_the_same_batches(registry, log, name, more, near):
    """Adam divides gradients by their size, so it makes rounding of the smallest large."""
    f = federation_of(configured(registry, name, rounds=2, **more))
    start = grown(f.backbone, f.stream.steps[0], f.seed)
    plain, rounds, best = Plain(f, name.split(",")[0], start), 0, None
    for progress in run(f):
        if progress.fraction_done or not progress.round:
            continue
        assert progress.curve[-1]["loss"] == pytest.approx(plain.epoch(rounds), rel=near)
        rounds += 1
        theirs = plain.module.tables()
        for ours, value in {**progress.model.public, **progress.model.dense}.items():
            torch.testing.assert_close(value, theirs[ours], rtol=near, atol=near,
                                       msg=lambda m: f"{rounds} {ours} {m}")
        reciprocal = (1.0 / (plain.ranks("valid") + 1)).where(plain.ranks("valid") < 3, 0.0).mean().item()
        assert progress.curve[-1]["valid"] == pytest.approx(reciprocal, abs=1e-6)
        hits = (plain.ranks("test") < 3).double()
        assert progress.curve[-1]["test_recall@3"] == pytest.approx(hits.mean().item(), abs=1e-12)
        best = hits if progress.best.round + 1 == rounds else best
    (_, _, scores), = progress.tests
    assert scores.values["hit@3"].tolist() == best.tolist()
    assert rounds == 2


def test_an_epoch_goes_on_from_the_batch_that_it_was_stopped_after(registry, log, tmp_path, monkeypatch):
    """Stopped after every batch and every round, the run gives the numbers of an uninterrupted one."""
    config = configured(registry, "dmi-gnn", global_dropout=0.5, weight_decay=1e-5, precision="float32", batch_size=16,
                        rounds=2)
    stream = load_stream(config.source, config.stream)
    whole = execute(config, lambda: stream, tmp_path / "whole")
    monkeypatch.setattr(SIZES, "report_every", 0.0)
    parts, told = stopped_everywhere(config, stream, tmp_path / "parts")
    batches = -(-len(stream.steps[0].sessions["train"].prefixes().end) // config.local.batch_size)
    assert batches > 2 and len(told) == 2 * (batches + 1) and told == sorted(set(told))
    same_numbers(whole, parts)
    for name in ("metrics", "users"):
        left, right = (pd.read_parquet(Path(each["record"], f"{name}.parquet")) for each in (whole, parts))
        assert left.equals(right)


def test_the_record_has_both_curves(registry, log, tmp_path):
    config = configured(registry, "miasrec", topk=[3, 5], extra_metrics=["popularity"])
    result = executed(config, tmp_path / "results")
    folder = Path(result["record"])
    rounds, users = pd.read_parquet(folder / "rounds.parquet"), pd.read_parquet(folder / "users.parquet")
    assert list(rounds["round"]) == [0, 1, 2] and (rounds[["bytes_up", "bytes_down"]] == 0).all(None)
    best = rounds.iloc[int(rounds["valid"].argmax())]
    assert result["best_round"] == [int(best["round"]) + 1]
    for metric in ("recall@3", "mrr@5"):
        assert best[f"test_{metric}"] == pytest.approx(result["metrics"][metric]["per_block"][0], abs=1e-12)
    assert result["metrics"]["popularity@3"]["per_block"][0] > 0.0
    assert result["tested"] == {"users": [6], "interactions": [6]} and users["user"].nunique() == 6
    assert result["privacy"]["uploaded"] == [] and result["settings"]["topology"] == "central"
    assert not {"local_epochs", "client_ratio", "negatives", "candidates", "upload_noise"} & set(result["settings"])
    found = fb.load(folder, dataset="./log.inter")
    assert sorted(found.users["user"].unique()) == list("012345")  # numbers of sessions, as one client has them all
    for ask, message in ((lambda: found.recommend("all"), "the model knows no users"),
                         (lambda: found.groups, "measured where every client is a user")):
        with pytest.raises(UserError, match=message):
            ask()


def test_what_makes_no_sense_is_refused(registry, log):
    for method, backbone, settings, message in (
            ("fcucr", "sasrec", {"max_length": 4}, "method 'fcucr' is about many clients"),
            ("kd", "sasrec", {"max_length": 4}, "method 'kd' is about many clients"),
            ("ft", "fedmf", {}, "federated with backbone 'fedmf', which is not sequential"),
            ("ft", "miasrec", {"loss": "bce"}, "setting 'loss': found bce, accepted: cross_entropy")):
        settings = {"topk": [3], "valid_metric": "mrr@3", **settings}
        with pytest.raises(UserError, match=message):
            federation_of(make_config(registry, method, backbone, "./log.inter", 0, [("test", settings)]))
    with pytest.raises(UserError, match="with topology=central there is one"):
        check_divisible(federation_of(configured(registry, "gru4rec")))


def test_settings_of_clients_have_no_effect_and_those_of_one_client_none_on_many(registry, log):
    for words, reason in (("client_ratio=0.5", "with topology=central"), ("init=per_client", "with topology=central"),
                          ("local_epochs=2", "with topology=central"), ("lr_decay=0.5", "without lr_step"),
                          ("candidates=sampled", "with topology=central"),
                          *((f"{words} topology=federated", "topology=federated; leave it out")
                            for words in ("lr_step=2", "weight_decay=0.1", "train_share=0.5"))):
        settings = dict(word.split("=") for word in words.split())
        with pytest.raises(UserError, match=reason):
            make_config(registry, "ft", "gru4rec", "./log.inter", 0, [("test", settings)])


def test_it_runs_from_the_command_line(log, capsys):
    settings = [word for value in ("rounds=1", "dim=4", "topk=3", "valid_metric=mrr@3") for word in ("--set", value)]
    words = ["--method", "ft", "--backbone", "dmi-gnn", "--dataset", "./log.inter", *settings, "--results", "results"]
    assert "accepted: runs in which every client is a user" in refused(capsys, *words, "--by", "worst-decile")
    assert main([*words, "--json", "-v"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["settings"]["diversity"] == 1.0  # of the backbone's own paper
    assert "one party holds all data" in printed.err
