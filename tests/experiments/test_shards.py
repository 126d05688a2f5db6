"""A run whose clients are divided among shards has the numbers of an undivided one, whatever the method, backbone and
stream. The shards are threads of this process; those of ``test_ray.py`` are workers of a cluster."""

from dataclasses import replace

import pytest
import torch
from helpers import SMALL as WHOLE, STABLE, Threads, assert_same, numbers_of, same_numbers

from fedcl_bench import rng
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.core.errors import RunFailed, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Progress
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.runner import RunOptions, execute
from fedcl_bench.experiments.partition import divide, progress_part, stream_part, with_rows_of
from fedcl_bench.experiments.shards import TRIES, Conductor

SMALL = {**WHOLE, "blocks": 2}
SESSIONS = {"min_session_length": 5, "min_sessions": 4, "stream": "sessions"}
TINY = {**SESSIONS, "dim": 8, "max_length": 10, "local_epochs": 1}


@pytest.fixture(scope="module")
def made(registry):
    """A configuration of two rounds in double precision, and its stream."""
    streams = {}

    def make(method, backbone, **settings):
        config = make_config(registry, method, backbone, "ml-100k", overrides=[
            ("test", {"precision": "float64", "rounds": 2, **settings})])
        key = (config.stream, str(config.features))
        if key not in streams:
            streams[key] = load_stream(config.source, config.stream, config.features)
        return config, streams[key]
    return make


def finish(conductor, config, stream, progress=None):
    """The whole progress at the end, and the points on the way."""
    points = []
    for point in conductor.run(config.federation(stream), progress):
        points.append((point.step, point.round))
        if point.step == len(stream.steps):
            return conductor.complete(point), points


RUNS = [
    *[(method, "fedmf", SMALL) for method in ("spp", "frozen", "ifedrec")],  # f3crec is in what follows
    *[pytest.param(method, "fedmf", SMALL, marks=pytest.mark.long)
      for method in ("ader", "ft", "f3crec", "fedprox", "reg", "kd", "rlp2", "joint", "joint-warm")],
    *[pytest.param("f3crec", backbone, {**SMALL, **STABLE[backbone]}, marks=pytest.mark.long)
      for backbone in ("fedncf", "fedrap", "biasmf", "pfedrec", "gpfedrec", "ncf")],
    ("f3crec", "fedmf", {**SMALL, "blocks": 3, "client_ratio": 0.3, "weighting": "interactions",
                         "server_optimiser": "adam", "server_optimiser_lr": 0.01, "fold_in": 3}),
    ("ft", "fedmf", {**SMALL, "local_epochs": 3, "stragglers": 0.5, "client_dropout": 0.3, "availability": "activity"}),
    ("reg", "fedncf", {**SMALL, "lr": 0.01, "reset_private": True, "init_from": "best", "upload_noise": 0.001}),
    ("reg", "fedmf", {**SMALL, "upload_noise": 0.001, "upload_clip": 0.5, "upload_mechanism": "gaussian"}),
    ("spp", "fedrap", {**SMALL, **STABLE["fedrap"], "fold_in": 3, "fold_in_rounds": 2, "client_ratio": 0.5}),
    ("ft", "pfedrec", {**SMALL, **STABLE["pfedrec"], "fold_in": 3, "cold_start": "mean"}),
    ("ft", "fedmf", {**SMALL, "fold_in": 3, "cold_start": "popularity", "extra_metrics": "novelty,distance"}),
    ("alone", "fedmf", SMALL),
    ("fedcia", "fedmf", {**SMALL, "align_steps": 2, "client_ratio": 0.1}),
    pytest.param("alone", "fedncf", {**SMALL, **STABLE["fedncf"]}, marks=pytest.mark.long),
    ("ft", "fedmf", {"stream": "static", "k_core": 80, "dim": 8}),
    ("ft", "fedmf", {**SMALL, "evaluate_users": 60, "drift_users": 60, "candidates": "sampled"}),
    ("ft", "fedmf", {**SMALL, "evaluate_users": 60, "drift_users": 0}),
    ("ft", "fedmf", {**SESSIONS, "early_session": True, "extra_metrics": "popularity"}),
    ("ft", "sasrec", {**TINY, "init": "per_client", "client_ratio": 0.5}),
    ("ft", "session-transformer", {**TINY, "init": "server"}),
    ("ft", "dmi-gnn", {**TINY, "loss": "bce", "graph_neighbours": 2}),
    ("fcucr", "gru4rec", {**TINY, "without": "iupr", "teacher": "previous"}),
    ("fcucr", "sasrec", TINY),
    *[pytest.param("fcucr", backbone, TINY, marks=pytest.mark.long) for backbone in (
        "gru4rec", "tisasrec", "session-transformer")],
    ("fcucr", "gru4rec", {**TINY, "transfer": "before", "client_ratio": 0.7}),
    *[("fcucr", "sasrec", {**TINY, "transfer": transfer, "client_ratio": 0.002})  # a shard without participants
      for transfer in ("before", "after")],
    ("ft", "gpfedrec", {**SMALL, **STABLE["gpfedrec"], "client_ratio": 0.6}),
    ("ft", "feddae", {**SMALL, "hidden": [6]}),
    ("colr", "fedmf", {**SMALL, "rank": 2, "mean": "senders", "client_ratio": 0.5}),
    ("scaffold", "fedmf", {**SMALL, "client_ratio": 0.5}),
    pytest.param("canonfedrec", "fedmf", {**SMALL, "spread_floor": 0.1, "client_ratio": 0.2,
                                           "lr": 0.01}, marks=pytest.mark.long),
    pytest.param("fedprox", "sasrec", TINY, marks=pytest.mark.long),
    pytest.param("ader", "gru4rec", {**TINY, "rounds": 3, "client_ratio": 0.7}, marks=pytest.mark.long),
    ("ft", "fedmf", {**SMALL, "client_ratio": 0.2, "aggregator": "median"}),
    *[pytest.param("f3crec", "fedmf", {**SMALL, "aggregator": kind}, marks=pytest.mark.long)
      for kind in ("trimmed_mean", "krum", "norm_bound")],
]


@pytest.mark.parametrize("method, backbone, settings", RUNS)
def test_numbers_of_an_undivided_run(made, method, backbone, settings):
    config, stream = made(method, backbone, **settings)
    *_, alone = run(config.federation(stream))
    found, points = finish(Conductor(config, 2, (), Threads), config, stream)
    # FCUCR's Dice divides by deviations near 0.
    assert_same(found, alone, 1e-7 if method == "fcucr" and backbone != "sasrec" else 1e-12)
    assert len(points) == len(alone.curve) + len(stream.steps)


def test_a_shard_of_which_nobody_is_evaluated(made):
    """Two users are, on three shards; plugins are not asked about nobody."""
    config, stream = made("fcucr", "sasrec", **{**TINY, "evaluate_users": 1, "rounds": 1})
    *_, alone = run(config.federation(stream))
    assert_same(finish(Conductor(config, 3, (), Threads), config, stream)[0], alone, 1e-12)


def test_more_shards_and_a_checkpoint_of_one_process(made):
    """A run that one process began goes on over three shards, and the other way round."""
    config, stream = made("f3crec", "fedmf", **SMALL)
    points = list(run(config.federation(stream)))
    middle = next(p for p in points if (p.step, p.round) == (1, 1))
    assert_same(finish(Conductor(config, 3, (), Threads), config, stream, middle)[0], points[-1], 1e-9)
    conductor = Conductor(config, 3, (), Threads)
    for point in conductor.run(config.federation(stream), None):
        if (point.step, point.round) == (1, 1):
            gathered = conductor.complete(point)
            assert conductor.complete(point) is gathered
            assert_same(gathered, middle, 1e-9)
            break
    *_, last = run(config.federation(stream), gathered)
    assert_same(last, points[-1], 1e-9)


def test_the_record_is_that_of_any_run(made, tmp_path):
    """Hash, folder, files and content; and a second command, with or without shards, finds it."""
    config, stream = made("f3crec", "fedmf", **SMALL)
    one = execute(config, lambda: stream, tmp_path / "one")
    sharded = RunOptions(engine=Conductor(config, 2, (), Threads))
    other = execute(config, lambda: stream, tmp_path / "other", options=sharded)
    assert other.keys() == one.keys()
    for key in ("rounds", "best_round", "bytes", "settings", "hash", "base_hash", "privacy"):
        assert other[key] == one[key], key
    for metric, values in one["matrix"].items():
        for row, same in zip(other["matrix"][metric], values):
            assert row == pytest.approx(same, rel=0.0, abs=1e-9)
    again = execute(config, lambda: stream, tmp_path / "other")
    assert again["reused"] and again["metrics"] == other["metrics"]
    assert {path.name for path in (tmp_path / "one").rglob("*")} == {
        path.name for path in (tmp_path / "other").rglob("*")}
    same_numbers(other, execute(config, lambda: stream, tmp_path / "third", options=sharded))


@pytest.mark.parametrize("method", ["rlp2", "ader"])
def test_at_a_steps_end_clients_are_gathered_as_the_server_is(made, method):
    """Who is ahead of it has ended the step already, and ends it once more in the run that goes on."""
    config, stream = made(method, "fedmf", **SMALL)
    points = list(run(config.federation(stream)))
    conductor, seen = Conductor(config, 2, (), Threads), []
    for point, alone in zip(conductor.run(config.federation(stream), None), points):
        if point.trained and point.step < len(stream.steps):
            seen.append(conductor.complete(point))
            assert seen[-1].client_state.keys() == alone.client_state.keys()
            assert_same(seen[-1], alone, 1e-9)
    assert [each.step for each in seen] == [0, 1]
    *_, last = run(config.federation(stream), seen[-1])
    assert_same(last, points[-1], 1e-9)


@pytest.mark.parametrize("last_answer", [pytest.param(1, marks=pytest.mark.long), 12])
def test_lost_shards_start_again_from_what_was_gathered(made, last_answer):
    """The numbers are those of shards that were never lost, bit for bit, and no round is shown twice."""
    config, stream = made("f3crec", "fedmf", **SMALL)
    expected, points = finish(Conductor(config, 2, (), Threads), config, stream)
    groups, notes = [], []

    def start(plans):
        groups.append(Threads(plans, (lambda answers: answers == last_answer) if len(groups) < 2 else
                              lambda answers: False))
        return groups[-1]
    conductor = Conductor(config, 2, (), start, notes.append)
    seen = []
    for point in conductor.run(config.federation(stream), None):
        seen.append((point.step, point.round))
        if point.round == 0:
            found = conductor.complete(point)
    assert seen == points and len(groups) == 3 and len(notes) == 2
    assert notes[0] == "a test's worker died; starting the shards again, from the last state gathered."
    assert_same(found, expected)


def test_shards_that_die_again_and_again(made):
    config, stream = made("ft", "fedmf", **SMALL)
    groups = []

    def start(plans):
        groups.append(Threads(plans, lambda answers: answers == 2))
        return groups[-1]
    with pytest.raises(UserError, match=f"lost {TRIES} times in a row, the last time as a test's worker died"):
        finish(Conductor(config, 2, (), start), config, stream)
    assert len(groups) == TRIES


def test_errors_of_shards(made, tmp_path):
    """A run that diverges is marked as failed; another version of the code at a shard is refused."""
    config, stream = made("reg", "fedmf", **{**SMALL, "rounds": 8}, lambda_reg=1e60)
    with pytest.raises(RunFailed, match="training diverged in block 1(.|\n)*Marked as failed"):
        execute(config, lambda: stream, tmp_path, options=RunOptions(engine=Conductor(config, 2, (), Threads)))
    other = replace(config, method=replace(config.method, numbers="edited"))
    with pytest.raises(UserError, match="a worker has another version of method 'reg'"):
        finish(Conductor(other, 2, (), Threads), other, stream)

    def elsewhere(plans):
        return Threads([replace(plan, versions="fedcl_bench 0, torch 1.0") for plan in plans])
    with pytest.raises(UserError, match="a worker has fedcl_bench .*, and this command fedcl_bench 0, torch 1.0"):
        finish(Conductor(config, 2, (), elsewhere), config, stream)


# Dividing


def test_parts_are_all_of_the_stream(ml100k):
    """Every client is in one part, with its own lists, and the parts have about equally much to train."""
    names = divide(ml100k, 3)
    assert torch.equal(torch.cat(names).sort().values, torch.arange(ml100k.steps[-1].n_users))
    parts = [stream_part(ml100k, some) for some in names]
    for t, step in enumerate(ml100k.steps):
        assert sum(part.steps[t].n_users for part in parts) == step.n_users
        for some, part in zip(names, parts):
            for split in ("train", "valid", "test"):
                for user, name in enumerate(some[some < step.n_users].tolist()):
                    assert torch.equal(part.steps[t].split(split).of(user), step.split(split).of(name))
    work = [sum(len(step.train.values) for step in part.steps) for part in parts]
    assert max(work) <= 1.05 * min(work)


def test_progress_in_parts_and_together_again(made):
    config, stream = made("spp", "fedmf", **SMALL)
    middle = next(p for p in run(config.federation(stream)) if (p.step, p.round) == (1, 1))
    names = divide(stream, 3)
    parts = [progress_part(middle, some) for some in names]
    assert [part.model.n_users for part in parts] == [int((some < stream.steps[1].n_users).sum()) for some in names]
    assert_same(with_rows_of(middle, parts, names), middle)
    assert with_rows_of(Progress(), [Progress()] * 3, names) == Progress()


def test_clients_that_go_by_other_names():
    """They draw as those; rows of tables do not."""
    keys = rng.client_keys(5, torch.arange(10))
    with rng.global_client_ids(torch.tensor([1, 2, 3, 7])):
        assert torch.equal(rng.client_keys(5, torch.arange(4)), keys[[1, 2, 3, 7]])
        assert torch.equal(rng.row_keys(5, torch.arange(4)), keys[:4])
        assert rng.names_of(range(0, 4)) == [range(1, 4), range(7, 8)] and rng.names_of(range(2, 2)) == [range(0)]
    assert rng.names_of(range(2, 4)) == [range(2, 4)]


def test_too_many_parts(ml100k):
    with pytest.raises(UserError, match="--shards: found 588, accepted: at most the number of users, 587 in block 0"):
        divide(ml100k, 588)
    with pytest.raises(UserError, match="found 587; one of so many shards has no client with .* data in block 0"):
        divide(ml100k, 587)
    # Of real clients some may have nothing to test, and each has a user of block 0, however much that one has.
    assert [part[0] for part in divide(ml100k, 587, "--clients")] == list(range(587))


@pytest.mark.parametrize("cold_items, more", [
    ("untrained", {}), ("similar", {}), ("popularity", {"fold_in": 2}),
    ("fold_in", {"fold_in_rounds": 2, "weighting": "interactions", "client_ratio": 0.7})])
def test_items_that_arrive_later(registry, growing, cold_items, more):
    config = make_config(registry, "ft", "fedmf", str(growing), overrides=[("test", {
        "precision": "float64", "rounds": 2, "k_core": 0, "topk": (5,), "valid_metric": "ndcg@5",
        "cold_items": cold_items if cold_items != "similar" else "popularity", **more})])
    config = replace(config, server=replace(config.server, cold_items=cold_items))  # there is no file of texts
    stream = load_stream(config.source, config.stream)
    stream = replace(stream, features=(torch.eye(7).double()[torch.arange(stream.steps[-1].n_items) % 7],))
    assert all(step.n_items > step.old_items for step in stream.steps)
    *_, alone = run(config.federation(stream))
    found, wanted = map(numbers_of, (finish(Conductor(config, 2, (), Threads), config, stream)[0], alone))
    for name in [name for name in wanted if cold_items == "popularity" and name.startswith("user_shift")]:
        del found[name], wanted[name]  # all new items have one row: rounding decides which of them is ranked first
    assert_same(found, wanted, 1e-12)
