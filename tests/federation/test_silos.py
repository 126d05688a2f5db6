"""Domains as clients: equal to plain modules under torch.optim on the same mini-batches under every topology, resumed
to the bit, and nothing of a domain's items at another."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from helpers import by_domain, executed, federation_of, lay_shop, same_numbers, stopped_everywhere
from oracle import stream as numbers
from test_central import BACKBONES, Plain, cut

import fedcl_bench as fb
from fedcl_bench import ITEM, SIZES
from fedcl_bench.api.progress_bars import Display
from fedcl_bench.cli.main import main
from fedcl_bench.training.silo_modules import as_one_client
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.core.errors import Corrupt, UserError
from fedcl_bench.evaluation.session_ranking import Ranking, rank_by_module
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.federation.parts import Progress
from fedcl_bench.runs.checkpoints import load_progress, read_model, save_progress
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.runner import execute

SMALL = {"max_length": 4, "dim": 6, "dropout": 0.0, "batch_size": 7, "rounds": 3, "topk": [3], "valid_metric": "mrr@3",
         "precision": "float64", "lr": 0.01}
TOPOLOGIES = ("federated", "local", "central")


def configured(registry, topology="federated", name="sasrec", seed=0, **settings):
    overrides = {**SMALL, **BACKBONES.get(name, {}), "topology": topology, **settings}
    return make_config(registry, "ft", name.split(",")[0], "books+games", seed, [("test", overrides)])


class PlainDomains:
    """A module for each domain, trained sample by sample; they share an optimiser where their dense parameters are one.

    The modules of pooled domains have copies of these, which get the sum of their gradients.
    """

    def __init__(self, f, name):
        silos = CrossSilo(f)
        start = silos.start()
        self.f, self.pooled = f, f.topology == "central"
        self.plain = []
        for domain in silos.domains:
            seed = f.seed if self.pooled else domain.seed
            parts = SimpleNamespace(backbone=f.backbone, local=f.local, seed=seed,
                                    stream=SimpleNamespace(steps=[as_one_client(domain.step)]))
            self.plain.append(Plain(parts, name.split(",")[0], domain.part(start)))
        self.dense = [name for name in self.plain[0].module.names if name != ITEM]
        self.sizes = [len(plain.samples) for plain in self.plain]
        first, others = self.plain[0].module, [plain.module for plain in self.plain[1:]]
        self.shared = [first.names[name][0] for name in self.dense]
        self.sent, self.memory = {name: first.get_parameter(name).detach().clone() for name in self.shared}, {}
        tables = [module.get_parameter(module.names[ITEM][0]) for module in others]
        kind = torch.optim.Adam if f.local.optimiser == "adam" else torch.optim.SGD
        self.optimiser = kind([*first.parameters(), *tables], lr=f.backbone.settings.lr,
                              weight_decay=f.local.weight_decay)

    def round(self, number):
        """The loss of each domain."""
        if self.pooled:
            return [self._pooled_epoch(number)] * len(self.plain)
        losses = [plain.epoch(number) for plain in self.plain]
        if self.f.topology == "federated":
            self._average()
        return losses

    @torch.no_grad()
    def _average(self):
        sizes = [sum(len(sample) for sample in cut(plain.f.stream.steps[0].sessions["train"])) for plain in self.plain]
        weights = [size / sum(sizes) if self.f.server.weighting == "interactions" else 1 / len(sizes) for size in sizes]
        for parameter in self.shared:
            copies = [plain.module.get_parameter(parameter) for plain in self.plain]
            mean = sum(weight * copy for weight, copy in zip(weights, copies))
            if (s := self.f.server).server_optimiser != "none":
                mean = self.sent[parameter] = oracle.server_step(
                    s.server_optimiser, s.server_optimiser_lr, s.server_momentum, s.server_beta2, s.server_epsilon,
                    self.sent[parameter], mean, self.memory.setdefault(parameter, {}))
            for copy in copies:
                copy.copy_(mean)

    def _pooled_epoch(self, number):
        every = [(plain, sample) for plain in self.plain for sample in plain.samples]
        key = numbers(self.f.seed, "order of samples", number, 0)
        order, total = sorted(range(len(every)), key=lambda i: key(i) >> 1), 0.0
        for at in range(0, len(order), self.f.local.batch_size):
            for plain in self.plain:
                plain.module.zero_grad()
            batch = [every[i] for i in order[at:at + self.f.local.batch_size]]
            losses = torch.stack([plain.loss(sample) for plain, sample in batch])
            losses.mean().backward()
            self._step()
            total += losses.detach().sum().item()
        return total / len(order)

    @torch.no_grad()
    def _step(self):
        for parameter in self.shared:
            copies = [plain.module.get_parameter(parameter) for plain in self.plain]
            copies[0].grad = sum(torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in copies)
        for plain in self.plain:
            table = plain.module.get_parameter(plain.module.names[ITEM][0])
            table.grad = torch.zeros_like(table) if table.grad is None else table.grad  # Adam moves it all the same
        self.optimiser.step()
        for parameter in self.shared:
            for plain in self.plain[1:]:
                plain.module.get_parameter(parameter).copy_(self.plain[0].module.get_parameter(parameter))


_SGD = {"optimiser": "sgd", "weight_decay": 0.01, "lr": 0.05}
# Alone is federated without a mean. Of the others each topology has two kinds; the long tests have the rest.
CASES = [("local", "sasrec", _SGD, 1e-9), *(
    pytest.param(topology, name, more, near, marks=[pytest.mark.long] * (topology == left_out))
    for topology in ("federated", "central")
    for name, more, near, left_out in (("sasrec", _SGD, 1e-9, ""), ("sasrec, recbole", {}, 1e-6, "federated"), (
        "gru4rec", {}, 1e-6, "central"), ("dmi-gnn", _SGD, 1e-9, "federated"), ("miasrec", _SGD, 1e-9, "central")))]
CASES += [("federated", "gru4rec", {"weighting": "interactions"}, 1e-6),
          ("federated", "sasrec", {**_SGD, "server_optimiser": "adam", "server_optimiser_lr": 0.03}, 1e-9)]


@pytest.mark.parametrize("topology, name, more, near", CASES, ids=str)
def test_equals_plain_modules_on_the_same_batches(registry, shops, topology, name, more, near, monkeypatch):
    """Adam divides gradients by their size, so it makes rounding of the smallest large. Groups of similar lengths are
    as small as batches are here."""
    monkeypatch.setattr(SIZES, "central_encoded", 3)
    lay_shop("books", 1, 11, 15)  # half the users
    lay_shop("games", 2, 7, 11)
    f = federation_of(configured(registry, topology, name, rounds=2, **more))
    plain, domains, rounds, best = PlainDomains(f, name), CrossSilo(f).domains, 0, {}
    for progress in run(f):
        if progress.fraction_done or progress.step:
            continue
        rows = progress.curve[-2:]
        assert [row["step"] for row in rows] == [0, 1]
        assert [row["loss"] for row in rows] == pytest.approx(plain.round(rounds), rel=near)
        rounds += 1
        for domain, of_domain, row in zip(domains, plain.plain, rows):
            theirs, model = of_domain.module.tables(), domain.part(progress.model)
            for table, value in {**model.public, **model.dense}.items():
                torch.testing.assert_close(value, theirs[table], rtol=near, atol=near,
                                           msg=lambda m: f"{rounds} {domain.number} {table} {m}")
            ranks = of_domain.ranks("valid")
            assert row["valid"] == pytest.approx((1.0 / (ranks + 1)).where(ranks < 3, 0.0).mean().item(), abs=1e-6)
            hits = (of_domain.ranks("test") < 3).double()
            if progress.best_round(domain.number, "first") == rounds:
                best[domain.number] = hits
    assert rounds == 2
    for domain, _, scores in progress.tests:
        assert scores.values["hit@3"].tolist() == best[domain].tolist()
        assert scores.users.tolist() == list(domains[domain].users)


def test_a_round_goes_on_from_the_batch_that_it_was_stopped_after(registry, shops, tmp_path, monkeypatch):
    """Stopped after every batch and every round, the run gives the numbers of an uninterrupted one; of federated
    modules see test_domain_modules.py."""
    config = configured(registry, "central", dropout=0.3, precision="float32", rounds=2, batch_size=24)
    stream = load_stream(config.source, config.stream)
    whole = execute(config, lambda: stream, tmp_path / "whole")
    monkeypatch.setattr(SIZES, "report_every", 0.0)
    parts, told = stopped_everywhere(config, stream, tmp_path / "parts")
    assert len(told) > 6 and told == sorted(set(told)) and {round_ for round_, _ in told} == {0, 1, 2}
    same_numbers(whole, parts)


def test_a_domain_alone_ends_and_chooses_by_itself(registry, shops):
    """Each stops once its own validation gets no better, and is tested with its own best round."""
    f = federation_of(configured(registry, "local", rounds=40, patience=3, lr=0.02))
    seen = [progress for progress in run(f) if not progress.fraction_done]
    last = seen[-1]
    rounds = [sum(row["step"] == number for row in last.curve) for number in (0, 1)]
    assert len(set(rounds)) == 2 and max(rounds) < 40
    for domain, count, (_, _, scores) in zip(CrossSilo(f).domains, rounds, last.tests):
        best = last.best_round(domain.number, "first")
        assert count == best + 3
        model = domain.part(seen[best - 1].model)
        module = domain.load(seen[best - 1].model)
        tested = rank_by_module(f.backbone, module, domain.step, "test", Ranking([3], f.metrics))
        assert tested.values["mrr@3"].tolist() == scores.values["mrr@3"].tolist()
        chosen = domain.part(last.best.model)
        assert all(torch.equal(chosen.dense[name], model.dense[name]) for name in model.dense)
        assert torch.equal(chosen.public[ITEM], model.public[ITEM])


def test_shared_training_goes_on_until_all_would_end(registry, shops):
    f = federation_of(configured(registry, "federated", rounds=40, patience=2, lr=0.03))
    last = list(run(f))[-1]
    counts = [sum(row["step"] == number for row in last.curve) for number in (0, 1)]
    stale = [counts[number] - last.best_round(number, "first") for number in (0, 1)]
    assert counts[0] == counts[1] < 40 and min(stale) >= 2


def test_another_domains_data_changes_nothing_of_one_alone(registry, shops):
    def tested(topology):
        last = list(run(federation_of(configured(registry, topology, rounds=2, batch_size=16))))[-1]
        return [row["loss"] for row in last.curve if row["step"] == 0], last.tests[0][2].values["mrr@3"].tolist()

    before = {topology: tested(topology) for topology in TOPOLOGIES}
    lay_shop("games", 3, 12, 11)
    assert tested("local") == before["local"]
    assert all(tested(topology)[0] != before[topology][0] for topology in ("federated", "central"))


def test_items_of_two_domains_never_share_a_row(registry, shops):
    """In the pooled model too, a domain's samples have no gradient for another one's items."""
    f = federation_of(configured(registry, "central", optimiser="sgd", rounds=1))
    start = CrossSilo(f).start()
    lay_shop("games", 3, 12, 11)
    other = federation_of(configured(registry, "central", optimiser="sgd", rounds=1, lr=1e-9))
    books, games = by_domain(start.public)[ITEM]
    assert torch.equal(by_domain(CrossSilo(other).start().public)[ITEM][0], books)
    assert len(books) == 15 and not torch.equal(books[:11], games)
    assert all(torch.equal(*copies) for copies in by_domain(start.dense).values())


def test_the_record_says_what_was_shared(registry, shops, tmp_path):
    results = {}
    for topology in TOPOLOGIES:
        config = configured(registry, topology, topk=[3, 5], rounds=2, batch_size=16,
                            extra_metrics=["novelty", "popularity"])
        results[topology] = executed(config, tmp_path / "results")
    result = results["federated"]
    folder = Path(result["record"])
    rounds, users = pd.read_parquet(folder / "rounds.parquet"), pd.read_parquet(folder / "users.parquet")
    assert list(zip(rounds["step"], rounds["round"])) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    dense = by_domain(read_model(folder).tables.dense)
    sent = sum(copies[0].numel() * 8 for copies in dense.values())
    assert (rounds[["bytes_up", "bytes_down"]] == sent).all(None) and result["bytes"]["total_up"] == 4 * sent
    assert result["privacy"]["uploaded"] == list(dense) and result["privacy"]["kept_at_client"] == [ITEM]
    assert results["local"]["privacy"]["uploaded"] == [] and results["local"]["bytes"]["total_up"] == 0
    assert results["central"]["privacy"]["kept_at_client"] == [] and results["central"]["bytes"]["total_down"] == 0
    assert all(0.0 < value < 20.0 for value in result["metrics"]["popularity@3"]["per_block"])
    assert all(value > 0.5 for value in result["metrics"]["novelty@3"]["per_block"])
    assert result["dataset"] == "books+games" and result["rounds"] == [2, 2]
    assert result["tested"] == {"users": [20, 12], "interactions": [20, 12]}
    for metric, values in result["metrics"].items():
        of_users = users[users["metric"] == metric].groupby("tested_block")["value"].mean()
        assert values["per_block"] == pytest.approx(of_users.tolist(), abs=1e-12)
        assert values["avg_incremental"] == pytest.approx(np.mean(values["per_block"]), abs=1e-12)
        assert result["continual"][metric]["BWT"] == result["continual"][metric]["forgetting"] == 0.0
    assert set(users["user"][users["tested_block"] == 1]) == set(range(20, 32))
    assert len(set(result["hash"] for result in results.values())) == 3
    assert not {"local_epochs", "client_ratio", "negatives", "candidates", "upload_noise"} & set(result["settings"])


@pytest.mark.parametrize("masked", [False, True])
def test_history_is_ranked_unless_it_is_masked(registry, shops, masked):
    f = federation_of(configured(registry, "local", rounds=1, mask_history=masked))
    last = list(run(f))[-1]
    differ = 0
    for domain, (_, _, scores) in zip(CrossSilo(f).domains, last.tests):
        plain = PlainDomains(f, "sasrec").plain[domain.number]
        model = domain.part(last.best.model)
        plain.module.load(model.public, model.dense)
        for user, session in enumerate(cut(domain.step.sessions["test"])):
            each = plain.module.scores(plain.outputs(session)).detach()
            *history, target = [item for item, _ in session]
            left_out = {*history} - {target} if masked else set()
            rank = sum(bool(each[item] >= each[target]) for item in range(len(each)) if item not in left_out) - 1
            differ += rank != int((each >= each[target]).sum()) - 1
            assert scores.values["mrr@3"][user] == pytest.approx(1 / (rank + 1) if rank < 3 else 0.0)
    assert (differ > 0) == masked


def test_a_checkpoint_of_other_data_is_not_gone_on_from(registry, shops, tmp_path):
    f = federation_of(configured(registry))
    progress = next(progress for progress in run(f) if progress.round)
    save_progress(tmp_path / "kept.pt", progress, 1.0)
    assert load_progress(tmp_path / "kept.pt", "cpu", f)[0].round == 1
    lay_shop("games", 2, 12, 10)
    with pytest.raises(Corrupt, match="does not fit the run's data .* table 'public.games/item_embedding.weight'"):
        load_progress(tmp_path / "kept.pt", "cpu", federation_of(configured(registry)))


def test_what_makes_no_sense_is_refused(registry, shops):
    for method, backbone, settings, message in (
            ("kd", "sasrec", {}, "method 'kd' is about clients of one user each"),
            ("ft", "fedmf", {}, "backbone 'fedmf' is not sequential"),
            ("ft", "miasrec", {"loss": "bce"}, "accepted: cross_entropy with stream=domains"),
            ("ft", "sasrec", {"topk": [12]}, "found 12, accepted: at most the number of items, 11 in domain 'games'")):
        settings = {"topk": [3], "valid_metric": "mrr@3", **settings}
        with pytest.raises(UserError, match=message):
            federation_of(make_config(registry, method, backbone, "books+games", 0, [("test", settings)]))


@pytest.mark.parametrize("setting, reason", [
    *((setting, "with stream=domains") for setting in ("client_ratio=0.5", "local_epochs=2", "candidates=sampled",
                                                       "session_gap=5")),
    ("lr_decay=0.5", "without lr_step"), ("train_share=0.5", "with topology=federated")])
def test_settings_of_other_clients_have_no_effect(registry, shops, setting, reason):
    with pytest.raises(UserError, match=reason):
        make_config(registry, "ft", "gru4rec", "books+games", 0, [("test", dict([setting.split("=")]))])


def command(*more):
    settings = [word for value in ("rounds=2", "dim=4", "topk=3", "valid_metric=recall@3") for word in ("--set", value)]
    return ["--method", "ft", "--backbone", "sasrec", "--dataset", "books+games", *settings, *more]


def test_rounds_of_all_stages_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, shop in enumerate(("books", "games")):
        lay_shop(shop, number, users=12, items=20, texts=True)
    config = make_config(discover(), "ffmsr", "ffmsr", "books+games", overrides=[
        ("a test", {"encoder": "tfidf", "federated_rounds": 4, "rounds": 3})])
    assert [stage.name for stage in config.stages] == ["pretrain", "finetune"] and config.rounds == 7
    curve = [{"step": 0, "round": row, "stage": int(row > 3), "valid": 0.1 * row, "train_seconds": 1.0,
              "evaluate_seconds": 0.0} for row in range(6)]
    Display(config)._ended("books", Progress(curve=tuple(curve)), 0)
    assert "books: 6 rounds (pretrain 4, finetune 2) in 6.0 s" in capsys.readouterr().err


def test_it_runs_from_the_command_line(shops, capsys):
    assert main(command("-v", "--set", "pilot_users=10", "--set", "pilot_core=1")) == 0
    printed = capsys.readouterr()
    assert "a pilot: 10 users of each domain, 1-core; not comparable with all users" in printed.out
    header = next(line for line in printed.out.splitlines() if "test metric" in line)
    assert header.split() == ["test", "metric", "books", "games", "mean"]
    assert "over R[t,s]" not in printed.out and "books has only 10 test users" in printed.out
    assert "books: 2 rounds in" in printed.err and "topology federated" in printed.err
    assert main(command("--set", "pilot_users=10", "--set", "pilot_core=1", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["reused"] and result["settings"]["pilot_users"] == 10


def test_tables_and_tests_of_topologies_and_pairs(shops, capsys):
    """Domains of several pairs are called by their number, and the mean is that of the domains."""
    lay_shop("tea", 3, 12, 11)
    for more in (*(("--set", f"topology={topology}") for topology in TOPOLOGIES), ("--dataset", "books+tea"),
                 ("--set", "mask_history=true")):
        assert main(command("--quiet", *more)) == 0
    same = ["--records", "results", "--set", "rounds=2", "--set", "dim=4", "--set", "topk=3", "--set",
            "valid_metric=recall@3"]
    methods = ["ft", "ft:topology=local", "ft:topology=central"]

    def shown(*words):
        capsys.readouterr()
        assert main([*words, *same]) == 0
        return capsys.readouterr().out
    tables = ["tables", "--rows", "method", "--metrics", "recall@3", "--backbones", "sasrec"]
    table = shown(*tables, "--methods", ",".join(methods), "--columns", "block", "--datasets", "books+games")
    assert "| books | games | mean |" in table and "averaged over the domains" in table and "(games)" in table
    table = shown(*tables, "--methods", "ft", "--columns", "dataset,block")
    assert "| books+games domain 1 |" in table and "| books+tea mean |" in table
    assert "averaged over the domains" in table and "block 0" not in table
    compare = ["--backbone", "sasrec", "--dataset", "books+games", "--metric", "recall@3"]
    assert "blocks 0, 1" in shown("compare", *methods, *compare)
    with pytest.raises(AssertionError):  # another protocol
        shown("compare", "ft", "ft:mask_history=true", *compare)


def test_tuning_looks_at_every_domain(shops, capsys, same_process):
    small = [word for value in ("rounds=1", "dim=4", "topk=3", "valid_metric=recall@3") for word in ("--set", value)]
    assert main(["tune", "--methods", "ft", "--backbones", "gru4rec", "--datasets", "books+games", "--budget", "2",
                 *small]) == 0
    kept = json.loads(Path("results/my-tuned/books+games-gru4rec-ft.json").read_text())
    for trial in kept["trials"]:
        for tried in trial["runs"]:
            (folder,) = Path("results/runs").glob(f"*-{tried['hash'][:12]}")
            curve = pd.read_parquet(folder / "rounds.parquet")
            assert tried["value"] == pytest.approx(curve.groupby("step")["valid"].max().mean())
    assert "mean over domains" in kept["objective"]


def test_its_model_recommends_a_domains_own_items(shops):
    results = fb.run("ft", "sasrec", "books+games", rounds=1, dim=4, topk=[3], valid_metric="recall@3", batch_size=7,
                     progress=False)
    assert "books" in results.table().columns[0]
    model = fb.load("results", data_dir="data").model()
    scores = model.scores("games:u3")
    assert np.isinf(scores[:15]).all() and np.isfinite(scores[15:]).all()
    best = model.recommend("games:u3", 4, mask_seen=False)
    assert best["item"].str.startswith("games:").all() and len(best) == 4
    of_a_gpu = fb.load("results", data_dir="data").model()
    of_a_gpu.__dict__["config"] = replace(model.config, device="cuda")  # in the place of the cached property
    assert of_a_gpu.recommend("games:u3", 4, mask_seen=False).equals(best)
    assert results.users["user"].str.startswith(("books:", "games:")).all()
