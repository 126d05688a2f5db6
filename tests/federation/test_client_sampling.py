"""Clients as they are: away, late, or failing after their training."""

import dataclasses

import pytest
import torch
from helpers import build, federation
from synthetic import small_stream

from fedcl_bench.data.stream import Ragged
from fedcl_bench.federation.client_sampling import Attendance
from fedcl_bench.federation.loop import run
from fedcl_bench.plugin.local_settings import LocalSettings
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.summary import summary


@pytest.fixture(scope="module")
def step():
    """3,000 clients; client c has 1 + c % 20 interactions, and every hundredth none."""
    lengths = 1 + torch.arange(3000) % 20
    lengths[::100] = 0
    values = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    step = small_stream().steps[0]
    return dataclasses.replace(step, train=Ragged(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), values))


def test_failing_clients(step):
    """As often as asked, whatever their number, in a way that depends on nothing but seed, step and round."""
    everybody, _, none = Attendance().of(step, 0, 0)
    assert none == 0 and torch.equal(everybody, step.train.lengths.nonzero().flatten()) and len(everybody) == 2970
    some = [Attendance(dropout=0.2).of(step, 0, round_) for round_ in range(20)]
    share = sum(each.dropped for each in some) / (20 * 2970)
    assert share == pytest.approx(0.2, abs=4 * (0.2 * 0.8 / (20 * 2970)) ** 0.5)
    assert all(count == len(users) and count + dropped == 2970 for users, count, dropped in some)
    assert not torch.equal(some[0].users, some[1].users)
    assert torch.equal(some[0].users, Attendance(dropout=0.2).of(step, 0, 0).users)
    assert not torch.equal(some[0].users, Attendance(dropout=0.2).of(step, 1, 0).users)
    left = [Attendance(ratio=0.003, dropout=0.99999).of(step, 0, round_) for round_ in range(10)]
    assert all(len(users) == 1 and dropped == 8 for users, _, dropped in left)  # of nine, and never nobody
    lowest = [Attendance(ratio=0.003).of(step, 0, round_).users[0] for round_ in range(10)]
    assert [int(each.users[0]) for each in left] != [int(user) for user in lowest]


def test_who_is_asked_does_not_depend_on_who_fails(step):
    asked = Attendance(ratio=0.3).of(step, 5, 7).users
    arrived, _, dropped = Attendance(ratio=0.3, dropout=0.5).of(step, 5, 7)
    assert dropped and torch.isin(arrived, asked).all() and len(arrived) + dropped == len(asked)


def test_a_client_is_there_for_half_a_day(step):
    """For 12 rounds of 24 without a gap but the night's, on every day the same."""
    days = torch.zeros(48, 3000, dtype=torch.bool)
    for hour in range(48):
        days[hour, Attendance(availability="day").of(step, 3, hour).users] = True
    having = step.train.lengths > 0
    assert torch.equal(days[:24], days[24:]) and (days[:24].sum(0)[having] == 12).all()
    changes = (days[:24] != days[1:25]).sum(0)[having]
    assert (changes == 2).all()
    assert days[0].sum() == pytest.approx(2970 / 2, rel=0.1)


def test_active_clients_are_there_more_often(step):
    rounds = torch.zeros(3000)
    for round_ in range(100):
        rounds[Attendance(availability="activity").of(step, 0, round_).users] += 1
    lengths = step.train.lengths
    often = [float(rounds[lengths == length].mean()) for length in range(1, 21)]
    assert often == sorted(often) and often[0] < 5 and often[-1] > 95


def test_epochs_of_stragglers(step):
    users = step.train.lengths.nonzero().flatten()
    epochs = Attendance(stragglers=0.5).epochs(users, 4, 0, 0, 0)
    counts = torch.bincount(epochs, minlength=5)[1:].double() / len(users)
    assert counts.tolist() == pytest.approx([1 / 6] * 3 + [1 / 2], abs=0.03)
    assert Attendance(stragglers=0.5).epochs(users, 1, 0, 0, 0).unique().tolist() == [1]
    assert Attendance(stragglers=1.0).epochs(users, 2, 0, 0, 0).unique().tolist() == [1]


def last(registry, method="ft", backbone="fedmf", local=LocalSettings(local_epochs=3, batch_size=16), **server):
    *_, progress = run(federation(registry, small_stream(blocks=2), build(registry, "method", method),
                                  build(registry, "backbone", backbone), local=local, rounds=2, **server))
    return progress


@pytest.mark.parametrize("method, backbone", [("ft", "fedmf"), ("f3crec", "fedncf")])
def test_stragglers_are_clients_of_fewer_epochs(registry, method, backbone):
    """If everybody is late with two epochs, the run is that of one epoch; it differs from those of two."""
    two = LocalSettings(local_epochs=2, batch_size=16)
    late, early, full = (last(registry, method, backbone, local, stragglers=share) for local, share in (
        (two, 1.0), (LocalSettings(batch_size=16), 0.0), (two, 0.0)))
    for name, table in early.model.public.items():
        torch.testing.assert_close(late.model.public[name], table)
        assert not torch.equal(full.model.public[name], table)
    mixed = last(registry, method, backbone, stragglers=0.5)
    assert all(row["participants"] == full.curve[i]["participants"] for i, row in enumerate(mixed.curve))


def test_what_failing_clients_trained_is_lost(registry):
    """The round is that of the others alone; the failing ones keep what they had, and have received the model."""
    progress = last(registry, client_dropout=0.5)
    first = small_stream(blocks=2).steps[0]
    users, _, dropped = Attendance(dropout=0.5).of(first, 0, 0)
    assert progress.curve[0]["participants"] == len(users) and progress.curve[0]["dropped"] == dropped > 0
    assert "dropped" not in last(registry).curve[0]
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", {"client_dropout": 0.5})])
    sent = summary(config, progress, 1.0, False)["bytes"]
    assert sent["total_up"] == sum(row["bytes_up"] * row["participants"] for row in progress.curve)
    assert sent["total_down"] == sum(row["bytes_down"] * (row["participants"] + row["dropped"])
                                     for row in progress.curve)
