"""Bounds: retraining on all data, a model that stays as it is, no federation, one party with all data."""

import json
from dataclasses import replace

import oracle
import pytest
import torch
from helpers import build, finish, grown, recbole_config, same_clients, same_tables
from recbole.config import Config
from recbole.data.interaction import Interaction
from recbole.trainer import Trainer

from fedcl_bench import Snapshot, UserError
from fedcl_bench.cli import main
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.data.stream import Ragged
from fedcl_bench.experiments.partition import check_divisible
from fedcl_bench.federation.cold_start import ranks_by
from fedcl_bench.federation.cross_device import CrossDevice
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Best, Progress
from fedcl_bench.rng import DrawKey
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.testing.worlds import ragged
from fedcl_bench.toolbox.own_parameters import without_public

ITEM = "item_embedding.weight"
SETTINGS = {"k_core": 60, "blocks": 3, "rounds": 2, "patience": 0, "precision": "float64"}


@pytest.fixture(scope="module")
def started(registry):
    """A run's federation on a dense slice of ML-100K, by method and backbone."""
    def start(method, backbone="fedmf", **settings):
        config = make_config(registry, method, backbone, "ml-100k", overrides=[("test", {**SETTINGS, **settings})])
        return config.federation(start.streams.setdefault("blocks", load_stream(config.source, config.stream)))
    start.streams = {}
    return start


def all_so_far(stream):
    """Every block with the training data of the blocks before it, user by user."""
    steps = []
    for step in stream.steps:
        lists = [sum((earlier.train.of(u).tolist() for earlier in stream.steps[:step.index + 1]
                      if u < earlier.n_users), []) for u in range(step.n_users)]
        steps.append(replace(step, train=ragged(*lists)))
    return replace(stream, steps=tuple(steps))


def test_earlier_items_come_first():
    first = Ragged(torch.tensor([0, 2, 2]), torch.tensor([5, 3]), torch.tensor([1.0, 2.0]))
    later = Ragged(torch.tensor([0, 1, 3, 4]), torch.tensor([7, 8, 5, 9]), torch.tensor([3.0, 4.0, 5.0, 6.0]))
    joined = first.before(later)
    assert [joined.of(user).tolist() for user in range(3)] == [[5, 3, 7], [8, 5], [9]]
    assert joined.rated.of(0).tolist() == [1.0, 2.0, 3.0]


def test_joint_warm_is_ft_on_all_data_up_to_the_block(started):
    f = started("joint-warm")
    expected = finish(replace(started("ft"), stream=all_so_far(f.stream)))
    found = finish(f)
    same_tables(found.model, expected.model)
    assert not torch.equal(found.model.public[ITEM], finish(started("ft")).model.public[ITEM])


def test_joint_is_ft_on_the_concatenated_block_from_the_beginning(started):
    f, ft = started("joint"), started("ft")
    ft = replace(ft, stream=all_so_far(f.stream))
    untrained = grown(ft.backbone, ft.stream.steps[0], ft.seed)
    expected = next(p for p in run(ft, Progress(step=1, model=untrained, best=Best(untrained))) if p.trained)
    found = next(p for p in run(f) if p.step == 1 and p.trained)
    same_tables(found.model, expected.model)
    masked, ranked = (next(scores.mean("ndcg@20") for t, s, scores in p.tests if t == s == 1)
                      for p in (expected, found))
    assert masked != ranked  # joint's tests mask the block's own items alone, as all methods' do


@pytest.mark.parametrize("backbone, lr", [("fedmf", 30.0), ("pfedrec", 1.0)])
def test_frozen_keeps_the_model_that_block_0_was_tested_with(started, backbone, lr):
    f = started("frozen", backbone, rounds=4, lr=lr)
    assert f.server.init_from == "last" or f.server.reset_private
    points = list(run(f))
    trained = next(p for p in points if p.step == 0 and p.trained)
    block0, last = trained.best.model, points[-1]
    assert f.server.reset_private or not torch.equal(block0.public[ITEM], trained.model.public[ITEM])
    assert [row["participants"] for row in last.curve if row["step"]] == [0, 0]
    for before, after in ((block0.public, last.model.public), (block0.private, last.model.private)):
        assert before
        for name, table in before.items():
            assert torch.equal(after[name][:len(table)], table)
    assert len(last.model.public[ITEM]) == f.stream.steps[-1].n_items


def test_counts_rank(started):
    for name, steps in (("popularity", slice(0, 3)), ("recency", slice(2, 3))):
        f = started(name)
        assert f.backbone.name == "none"
        last = finish(f)
        counts = torch.bincount(torch.cat([step.train.values for step in f.stream.steps[steps]]),
                                minlength=f.stream.steps[-1].n_items)
        scores = f.method.rescore(torch.arange(4), torch.zeros(4, len(counts)), last.model, f.backbone)
        assert torch.equal(scores, counts.float().expand(4, -1))


def test_scores_that_are_a_method_s_state_are_not_written_to(started):
    """Masks are; a view of state would keep them, and one row for all users would have everybody's."""
    f = started("popularity")
    values = [scores.mean("ndcg@20") for t, s, scores in finish(f).tests if t == s]

    class Copied(type(f.method)):
        def rescore(self, users, scores, model, backbone):
            return super().rescore(users, scores, model, backbone).clone()

    copied = finish(replace(f, method=Copied(f.method.settings)))
    assert values == [scores.mean("ndcg@20") for t, s, scores in copied.tests if t == s]


@pytest.mark.parametrize("name, settings", [("fedmf", {"lr": 0.5}), ("pfedrec", {"lr": 0.02}), (
    "ncf", {"lr": 0.01, "hidden": (8,), "dim": 6, "local_epochs": 1})])
def test_alone_is_a_client_s_own_loop(started, name, settings, monkeypatch):
    rate = 3.0
    f = started("alone", name, own_rate=rate, optimiser="adam" if name == "ncf" else "sgd", **settings)
    step, inner = f.stream.steps[0], f.backbone.inner
    after = [p for p in run(f) if p.step == 0 and p.round][1]
    tables = inner.new_rows(f.seed, range(0), range(step.n_items))[0]
    dense, private = inner.new_dense(f.seed), inner.new_rows(f.seed, range(step.n_users), range(0))[1]
    plain_rate, factor = oracle.MODELS[name].rate, rate / f.stream.steps[-1].n_users
    monkeypatch.setattr(oracle.MODELS[name], "rate", lambda self, key, *when: plain_rate(self, key, *when) * (
        1.0 if key in private else factor))
    for user in (0, step.n_users - 1):
        model = Snapshot(tables, private, dense)
        for round_ in range(2):
            plain = oracle.Round(seed=f.seed, step=0, round=round_, backbone=name, settings=inner.settings,
                                 negatives=f.local.negatives, optimiser=f.local.optimiser,
                                 epochs=f.local.local_epochs, batch_size=f.local.batch_size)
            trained = plain.client(user, step.train.of(user).tolist(), model, oracle.nothing)
            values = {key: value.detach() for key, value in trained.named_parameters()}
            own = {key: table.index_copy(0, torch.tensor([user]), values[key].reshape(1, *table.shape[1:]))
                   for key, table in private.items()}
            model = Snapshot({key: values[key] for key in tables}, own, {key: values[key] for key in dense})
            private = own
        same_clients(after.model.private, {user: values})
    assert after.curve[0]["bytes_up"] == after.curve[0]["bytes_down"] == 0


def test_central_is_the_first_epoch_of_recbole_s_trainer(registry, started, tmp_path, monkeypatch):
    """Of RecBole's BPR on the same mini-batches, which FedMF is with pairs for samples."""
    class Pairwise(registry.get("backbone", "fedmf").cls):
        pairwise = True

    f = started("central", central_negatives=1, central_batch=256, central_lr=0.003, precision="float32")
    f = replace(f, backbone=Pairwise(f.backbone.settings))
    step = f.stream.steps[0]
    users, items = f.method.samples(step.training, DrawKey(f.seed, 0, 0))
    start = grown(f.backbone, step, f.seed, torch.float32)
    model = oracle.recbole_bpr(step.n_users, step.n_items, f.backbone.settings.dim)
    model.load_state_dict({**start.public, **start.private})
    batches = [Interaction({"user_id": user, "item_id": item[:, 0], "neg_item_id": item[:, 1]})
               for user, item in zip(users.split(256), items.split(256))]
    with recbole_config():
        config = Config("BPR", "ml-100k", config_dict={"learning_rate": 0.003, "use_gpu": False})
        monkeypatch.chdir(tmp_path)  # RecBole writes logs
        trainer = Trainer(config, model)
        trainer.tensorboard.close()
        loss = trainer._train_epoch(batches, 0)
    found = next(run(f))
    for name, table in (found.model.public | found.model.private).items():
        torch.testing.assert_close(table, model.state_dict()[name], atol=1e-5, rtol=1e-5)
        assert not torch.equal(table, (start.public | start.private)[name])
    assert found.curve[0]["loss"] == pytest.approx(loss / len(batches), rel=0.01)  # RecBole weighs all batches alike


def test_what_does_not_go_together_is_refused(registry, started):
    """Nor is an epsilon stated of uploads that nobody makes."""
    for method in ("central", "alone"):
        fitting = "fedmf, fedncf, fedrap .with other settings., "
        with pytest.raises(UserError, match=f"(?s)clients of 'fedrap' train all rows.*that fit: .*{fitting}"):
            started(method, "fedrap")
    for method in ("central", "popularity"):
        with pytest.raises(UserError, match=f"--shards: .* method '{method}' has no server"):
            check_divisible(started(method))
    for method, name, value in (("central", "upload_noise", 1), ("central", "batch_size", 3),
                                ("popularity", "client_ratio", 0.5), ("recbole:EASE", "upload_clip", 1),
                                ("alone", "upload_noise", 1), ("alone", "cold_items", "untrained")):
        with pytest.raises(UserError, match=f"setting '{name}' .* has no effect with the method {method}"):
            make_config(registry, method, "fedmf", "ml-100k", overrides=[("test", {name: value})])
    with pytest.raises(UserError, match="setting 'gradient_norm' .* has no effect with the method central"):
        make_config(registry, "central", "session-transformer", "ml-100k", overrides=[("test", {
            "stream": "sessions", "loss": "bce", "output_embedding": "tied", "gradient_norm": 2.0})])
    frozen = {"batch_size": 64, "upload_noise": 0.1}  # which has clients in block 0
    make_config(registry, "frozen", "fedmf", "ml-100k", overrides=[("test", frozen)])
    make_config(registry, "central", "fedmf", "ml-100k", overrides=[("test", {"fold_in": 2, "local_epochs": 3})])
    with pytest.raises(UserError, match="accepted: fold_in or popularity with method 'alone' on 'fedmf', whose"):
        started("alone", fold_in=2, cold_start="mean").check()


@pytest.mark.parametrize("line, lacks", [("history = True", "must say how it gives up C1"),
                                         ("trains = 'server'", "so it needs central_round"),
                                         ("trains, central_round = 'server', print", "must say how it gives up F4"),
                                         ("aggregate_updates = print", "must say how it gives up F7"),
                                         ("gives_up = {'f7': 'norms'}", "names 'f7', accepted: F1, F2, .*, P1"),
                                         ("trains = 'clouds'", "its trains is 'clouds', accepted: clients, server or")])
def test_a_bound_says_what_it_gives_up(tmp_path, line, lacks):
    (tmp_path / "silent.py").write_text("from fedcl_bench import Method\n\n\nclass Silent(Method):\n"
                                        f"    name = title = 'silent'\n    {line}\n")
    with pytest.raises(UserError, match=lacks):
        discover([tmp_path]).get("method", "silent")


def test_bounds_are_said_to_be_bounds(tmp_path, capsys):
    words = "run --method joint --backbone fedmf --set k_core=80 --set rounds=1 --quiet --results".split()
    assert main.main([*words, str(tmp_path)]) == 0
    assert "gives up: clients keep the data of all earlier blocks (C1)" in capsys.readouterr().out
    for method, kept in (("alone", ["user_embedding.weight", "item_embedding.weight"]), ("central", [])):
        assert main.main([*("--json" if word == "--quiet" else method if word == "joint" else word for word in words),
                          str(tmp_path)]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["privacy"] == {"uploaded": [], "kept_at_client": kept, "upload_noise": 0.0, "notes": []}
        assert result["bytes"]["up_per_client_round"] == result["bytes"]["down_per_client_round"] == [0] * 4


def test_what_users_had_before_is_not_ranked(started):
    """With mask_history, unless it is to be found: by counting hits user by user."""
    f = started("popularity", mask_history=True)
    end, unmasked = finish(f), finish(started("popularity"))
    steps, lists = f.stream.steps, {(t, s): scores for t, s, scores in end.tests}
    counts = torch.bincount(torch.cat([step.train.values for step in steps]), minlength=end.model.n_items).tolist()
    for tested in (1, 2):
        expected = []
        for user in (steps[tested].test.lengths > 0).nonzero().flatten().tolist():
            target = set(steps[tested].test.of(user).tolist())
            had = {item for step in steps[:tested] for name in ("train", "valid", "test") if user < step.n_users
                   for item in step.split(name).of(user).tolist()} - target
            had |= {item for name in ("train", "valid") for item in steps[2].split(name).of(user).tolist()}
            ranked = sorted(set(range(len(counts))) - had, key=lambda item: -counts[item])
            expected.append(len(target.intersection(ranked[:20])) / len(target))
        found = lists[2, tested].values["recall@20"]
        assert found.tolist() == pytest.approx(expected)
        others = next(scores for t, s, scores in unmasked.tests if (t, s) == (2, tested))
        assert others.mean("recall@20") < found.mean()


def test_popular_items_are_counted_once_under_joint(started):
    """What new users get by popularity is of each block's own interactions, though clients train on all of them."""
    f = started("joint", fold_in=2, cold_start="popularity")
    ft = started("ft", fold_in=2, cold_start="popularity")
    step = f.stream.steps[2]
    found, expected = (ranks_by(each, step, each.method).counts for each in (f, ft))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("method", ["joint", "frozen"])
def test_who_has_never_trained_depends_on_what_a_bound_trains_on(started, method):
    """Joint's clients train on earlier blocks' data too, frozen's in block 0 alone."""
    f = started(method, fold_in=2, cold_start="popularity")
    steps = f.stream.steps[:1] if method == "frozen" else f.stream.steps
    trained = torch.zeros(f.stream.steps[2].n_users, dtype=torch.bool)
    for step in steps[:3]:
        there = step.old_users if step.index else step.n_users  # new users arrive after the training
        trained[:there] |= f.as_trained_on(step).train.lengths[:there] > 0
    assert torch.equal(ranks_by(f, f.stream.steps[2], f.method).users, ~trained) and trained.any()


@pytest.mark.parametrize("method", ["popularity", "recency", "recbole:Pop"])
def test_items_that_arrive_after_the_training_come_last(started, method):
    f = started(method)
    last, items = finish(f), f.stream.steps[-1].n_items
    scores = f.method.rescore(torch.arange(2), torch.zeros(2, items + 1), last.model, f.backbone)
    assert scores[:, :items].any() and (scores[:, items, None] <= scores).all()


def test_the_data_of_rounds_without_clients_are_made_once(started):
    f = started("popularity")
    opened, _ = CrossDevice.open(f, f.stream.steps[1], finish(f))
    assert opened._without_arrivals is opened._without_arrivals


def test_a_backbone_of_clients_alone_reads_the_features_of_items(registry):
    reads = type("Reads", (type(build(registry, "backbone", "fedmf")),), {"needs_features": True})
    backbone = without_public(reads, 0.1)(reads.Settings())
    backbone.features = torch.ones(3, 2)
    assert backbone.needs_features and backbone.inner.features is backbone.features
