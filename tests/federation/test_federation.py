"""The loop: participants, early stopping, the best round, noise, growth, and what is tested with which model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import grown

from fedcl_bench import RunFailed, Snapshot
from fedcl_bench.rng import DrawKey
from fedcl_bench.evaluation.ranking import RankingTask, UserScores, rank_all
from fedcl_bench.federation.client_sampling import Attendance
from fedcl_bench.federation.early_stopping import require_finite
from fedcl_bench.federation import parameter_growth
from fedcl_bench.federation.loop import run
from fedcl_bench.runs.config import make_config
from fedcl_bench.testing.worlds import growing_stream

USER, ITEM = "user_embedding.weight", "item_embedding.weight"


@pytest.fixture(scope="module")
def stream():
    """Three blocks of 22 users and 45 items, of which the second and the third bring two new ones each."""
    return growing_stream()


@pytest.fixture
def federation(registry, stream):
    return lambda method="ft", of=stream, **settings: make_config(
        registry, method, "fedmf", "ml-100k", overrides=[("test", settings)]).federation(of)


def test_sampled_clients(ml100k, federation):
    """A share of the clients, without replacement, anew in every round; the others keep their private vectors."""
    step = ml100k.steps[0]
    rounds = [Attendance(0.3).of(step, 0, r).users for r in range(40)]
    assert all(len(users) == round(0.3 * 587) == len(users.unique()) for users in rounds)
    assert not torch.equal(rounds[0], rounds[1]) and torch.equal(rounds[0], Attendance(0.3).of(step, 0, 0).users)
    drawn = torch.bincount(torch.cat(rounds), minlength=587).double()
    assert drawn.min() > 0 and drawn.std() == pytest.approx(np.sqrt(40 * 0.3 * 0.7), rel=0.15)  # binomial

    f = federation(of=ml100k, client_ratio=0.3, rounds=1)
    start = f.backbone.new_rows(0, range(587), range(1136))[1][USER].float()
    first = next(iter(run(f)))
    moved = (first.model.private[USER] != start).any(1).nonzero().flatten()
    assert torch.equal(moved, rounds[0]) and first.curve[0]["participants"] == len(moved)


def last_of_block0(f):
    return next(progress for progress in run(f) if progress.trained)


def test_validation_every_few_rounds(federation):
    """The same training with fewer validations: the last round's is among them, and the best round is one of them."""
    every = last_of_block0(federation(rounds=11, patience=0))
    some = last_of_block0(federation(rounds=11, patience=0, evaluate_every=4))
    values = {row["round"]: row["valid"] for row in some.curve if not math.isnan(row["valid"])}
    assert values == {number: every.curve[number]["valid"] for number in (3, 7, 10)}
    assert [row["loss"] for row in some.curve] == [row["loss"] for row in every.curve]
    assert some.best_round(0, "first") == 1 + max(values, key=values.get) == some.best.round + 1
    assert some.best_value == max(values.values())
    assert torch.equal(some.model.public[ITEM], every.model.public[ITEM])


@pytest.mark.parametrize("patience,interval,validated,best", [
    (2, 1, [0, 1, 2, 3], 1), (3, 1, [0, 1, 2, 3, 4, 5, 6, 7], 4), (1, 3, [2, 5, 8], 5), (3, 3, [2, 5, 8], 5),
    (4, 3, [2, 5, 8, 9], 9), (0, 4, [3, 7, 9], 9), (9, 20, [9], 9)])
def test_patience_counts_rounds_whatever_is_validated(federation, monkeypatch, patience, interval, validated, best):
    """Which rounds are validated, and the best of them, both from 0, with these validation values."""
    values = [0.1, 0.3, 0.2, 0.3, 0.5, 0.4, 0.1, 0.2, 0.3, 0.9]
    seen = []

    def validate(self, model, round_):
        seen.append(round_)
        return UserScores(torch.zeros(1), {"ndcg@20": torch.tensor([values[round_]], dtype=torch.float64)})

    monkeypatch.setattr("fedcl_bench.federation.protocols.Lists.validate", validate)
    found = last_of_block0(federation(rounds=10, patience=patience, evaluate_every=interval))
    assert seen == validated == [row["round"] for row in found.curve if not math.isnan(row["valid"])]
    assert (found.round, found.best.round, found.best_value) == (validated[-1] + 1, best, values[best])


def test_tests_are_made_with_the_best_round(federation, stream):
    """R[t, s] is of the best validation round, masks block t's train and valid items, and ranks all items so far."""
    f = federation(patience=1, rounds=100, lr=2.0)
    for progress in run(f):
        if not progress.trained:
            continue
        t = progress.step
        step = stream.steps[t]
        best = progress.best.model
        assert len(best.public[ITEM]) == step.n_items and len(best.private[USER]) == step.n_users
        for trained, tested, scores in progress.tests:
            if trained == t:
                task = RankingTask(stream.steps[tested].test, [step.train, step.valid], [20])
                again = rank_all(f.backbone, None, progress.best.model, task)
                assert torch.equal(scores.values["ndcg@20"], again.values["ndcg@20"])
        assert [s for trained, s, _ in progress.tests if trained == t] == list(range(t + 1))
    assert torch.equal(progress.best.model.public[ITEM], progress.model.public[ITEM]) is False


def test_no_sampled_candidate_is_masked(federation, monkeypatch):
    """With mask_history neither, nor in tests of earlier blocks, whose users have trained on others since."""
    f, tasks = federation(rounds=1, candidates="sampled", sampled_candidates=5, mask_history=True), []

    def ranked(backbone, method, model, task):
        tasks.append(task)
        return rank_all(backbone, method, model, task)
    monkeypatch.setattr("fedcl_bench.federation.protocols.rank_all", ranked)
    for _ in run(f):
        pass
    assert len(tasks) == 3 + 3 + 2 + 1
    for task in tasks:
        users = (task.target.lengths > 0).nonzero().flatten()
        n_items = 1 + int(torch.cat([lists.values for lists in task.masks]).max())
        masked = torch.zeros(len(users), n_items, dtype=torch.bool)
        for lists in task.masks:
            masked[lists.select(users)] = True
        assert (task.candidates >= 0).all() and not masked.gather(1, task.candidates.clamp(max=n_items - 1))[
            task.candidates < n_items].any()


@pytest.mark.parametrize("init_from", ["last", "best"])
def test_a_method_goes_on_with_the_state_of_the_round_that_the_model_is_of(federation, monkeypatch, init_from):
    f = federation(patience=1, rounds=100, lr=2.0, init_from=init_from)

    def aggregate(method, public):
        method.server_state = {"number of rounds": method.server_state.get("number of rounds", torch.zeros(())) + 1}
        return public
    monkeypatch.setattr(type(f.method), "aggregate", aggregate)
    monkeypatch.setattr(f.method, "first_step", 0)
    progress = iter(run(f))
    base = next(p for p in progress if p.trained)
    assert base.best.round + 1 < base.round
    for expected in ({"last": base.round, "best": base.best.round + 1}[init_from] + more for more in range(2)):
        assert next(progress).server_state["number of rounds"] == expected


def test_private_parameters_of_a_method_that_acts_later_are_everybodys(federation, monkeypatch):
    """Also of users of block 0, in which FT acts; they are what they would be if they had been there before."""
    def new_private(method, seed, users, backbone):
        return {"extra": torch.arange(users.start, users.stop, dtype=torch.float64)[:, None]}
    tables = []
    for first_step in (0, 1):
        f = federation(rounds=1)
        monkeypatch.setattr(type(f.method), "new_private", new_private)
        monkeypatch.setattr(f.method, "first_step", first_step)
        *_, progress = run(f)
        tables.append(progress.model.private["extra"])
        assert len(tables[-1]) == progress.model.n_users
    assert torch.equal(*tables)


def test_old_rows_survive_growth(federation, ml100k):
    """A block appends rows for new users and items and leaves the others as they were."""
    f = federation(of=ml100k, rounds=2)
    progress = iter(run(f))
    base = next(p for p in progress if p.trained)
    next(progress)
    first = next(progress)
    idle = (ml100k.steps[1].train.lengths == 0).nonzero().flatten()
    old, new = idle[idle < 587], idle[idle >= 587]
    assert torch.equal(first.model.private[USER][old], base.model.private[USER][old])
    rows = f.backbone.new_rows(0, range(587, 697), range(1136, 1146))[1][USER].float()
    assert len(first.model.private[USER]) == 697 and len(first.model.public[ITEM]) == 1146
    assert torch.equal(first.model.private[USER][new], rows[new - 587])


def test_rows_do_not_depend_on_how_many_users_are_drawn_together(federation, stream, monkeypatch):
    f, step = federation(), replace(stream.steps[0], n_users=23)
    whole, narrow = (grown(f.backbone, step, dtype=dtype).private[USER]
                     for dtype in (torch.float64, torch.float32))
    monkeypatch.setattr(parameter_growth, "_USERS", 5)
    assert torch.equal(grown(f.backbone, step).private[USER], whole)
    assert torch.equal(narrow, whole.float()) and len(whole) == 23


def test_later_blocks_may_have_another_learning_rate(federation, registry):
    """Block 0 is that of a run without it, and is shared; later blocks are those of a run with that rate."""
    def end(settings, progress=None):
        *_, last = run(federation(rounds=2, lr=0.5, **settings), progress)
        return last
    first = next(progress for progress in run(federation(rounds=2, lr=0.5)) if progress.step == 1)
    found, other = end({"lr_later": 0.1}), end({})
    *_, expected = run(federation(rounds=2, lr=0.1), first)
    for part in ("public", "private"):
        for name, table in getattr(expected.model, part).items():
            assert torch.equal(getattr(found.model, part)[name], table)
            assert not torch.equal(getattr(other.model, part)[name], table)
    configs = [make_config(registry, "kd", "fedmf", "ml-100k", overrides=[("test", {"lr_later": rate})])
               for rate in (0.0, 0.1, 0.2)]
    assert len({config.base_hash for config in configs}) == 1 and len({config.hash for config in configs}) == 3
    assert configs[0].hash == make_config(registry, "kd", "fedmf", "ml-100k").hash
    with pytest.raises(RunFailed, match=r"block 1, round 1(.|\n)*lr_later=1e\+30(.|\n)*--set lr_later=1e\+29"):
        end({"lr_later": 1e30}, first)


def test_new_users_are_folded_in_at_the_rate_of_their_block(federation):
    first = next(progress for progress in run(federation(rounds=1, fold_in=3)) if progress.step == 1)
    ends = [next(iter(run(federation(rounds=1, fold_in=3, fold_in_rounds=1, **rate), first))).model.private[USER]
            for rate in ({"lr_later": 0.1}, {"lr": 0.1}, {})]
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_ends_a_run(federation, stream, bad):
    """Wherever it is, also beside infinities of the other sign; empty tables are none."""
    f, step = federation(), stream.steps[0]
    kinds = ("public", "private", "dense", "local", "personalised")
    fine = {kind: {"a": torch.tensor([[1e19, -1e19], [0.0, 1.0]]), "b": torch.zeros(0, 2)} for kind in kinds}
    require_finite(0.5, Snapshot(**fine), f, step.n_items, DrawKey(0, 0))
    with pytest.raises(RunFailed, match="round 1"):
        require_finite(bad, Snapshot(**fine), f, step.n_items, DrawKey(0, 0))
    for kind in kinds:
        for row, column in ((0, 0), (1, 1)):
            table = fine[kind]["a"].clone()
            table[row, column] = bad
            with pytest.raises(RunFailed):
                require_finite(0.5, Snapshot(**{**fine, kind: {"a": table}}), f, step.n_items, DrawKey(0, 0))
