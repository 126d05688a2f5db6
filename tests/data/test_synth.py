"""Synthetic streams: the law of their rows, the same bytes for the same seed, and their way into a run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from helpers import output_of

from fedcl_bench import rng
from fedcl_bench.cli.main import main
from fedcl_bench.data.source import load_config
from fedcl_bench.data.streams.synth import FACTORS, SPAN, START, SyntheticLog, activity, catalogue, step_of, write
from fedcl_bench.core.errors import UserError

WORLD = SyntheticLog(400, 300, per_user=20.0, seed=3)


def read(path: Path) -> np.ndarray:
    """Rows (user, item, second) of a file."""
    header, *lines = path.read_text().splitlines()
    assert header == "user_id:token\titem_id:token\ttimestamp:float"
    return np.array([line.split("\t") for line in lines], dtype=np.int64)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("synth") / "w.inter"
    write(WORLD, path)
    return read(path)


def test_every_user_has_its_number_of_different_items_in_order_of_time(rows):
    assert np.array_equal(np.bincount(rows[:, 0]), activity(WORLD, range(400)))
    assert len(np.unique(rows[:, :2], axis=0)) == len(rows)
    assert np.array_equal(rows, rows[np.lexsort((rows[:, 0], rows[:, 2]))])
    assert START <= rows[0, 2] and rows[-1, 2] < START + SPAN
    step = step_of(WORLD)  # holds the rows of the file
    assert (step.n_users, step.n_items, step.interactions) == (400, 300, len(rows))
    for user in (0, 17, 399):
        assert sorted(step.train.of(user).tolist()) == sorted(rows[rows[:, 0] == user, 1])


@settings(max_examples=10)
@given(world=st.builds(SyntheticLog, users=st.integers(1, 15), items=st.integers(2, 20), per_user=st.just(1.0),
                       blocks=st.integers(1, 5), base_share=st.sampled_from([0.1, 0.6, 1.0]),
                       exponent=st.sampled_from([0.0, 1.0, 3.0]), activity=st.sampled_from([0.0, 1.0, 3.0]),
                       taste=st.sampled_from([0.0, 3.0, 50.0]), drift=st.sampled_from([0.0, 0.5, 1.0]),
                       seed=st.integers(0, 2 ** 63 - 1)).filter(lambda log: log.blocks == 1 or log.base_share < 1.0),
       share=st.floats(0.0, 1.0), size=st.integers(20, 200))
def test_any_world_keeps_its_counts_and_does_not_depend_on_the_groups(tmp_path_factory, world, share, size):
    world = replace(world, per_user=1.0 + share * (world.items / 2 - 1.0))
    folder = tmp_path_factory.mktemp("worlds")
    assert write(world, folder / "a.inter", rows_at_once=size) == write(world, folder / "b.inter")
    assert (folder / "a.inter").read_bytes() == (folder / "b.inter").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["a.inter", "b.inter"]  # nothing else is left
    rows = read(folder / "a.inter")
    assert np.array_equal(np.bincount(rows[:, 0]), activity(world, range(world.users)))
    assert len(np.unique(rows[:, :2], axis=0)) == len(rows) and rows[:, 1].max() < world.items


def test_activity_is_log_normal_and_first_choices_follow_zipf():
    """One interaction each and no taste: the ranks of the items are Zipf's law itself."""
    world = SyntheticLog(20000, 50, per_user=1.0, activity=0.0, taste=0.0, drift=0.0, exponent=1.3)
    items = catalogue(world)
    rank = items.ranked[0].argsort()[step_of(world).train.values]
    weight = np.arange(1, 51) ** -1.3
    assert stats.chisquare(np.bincount(rank, minlength=50), 20000 * weight / weight.sum()).pvalue > 1e-3
    counts = activity(SyntheticLog(20000, 10 ** 6, per_user=1000.0, activity=0.5), range(20000)).double().numpy()
    z = (np.log(counts / 1000.0) + 0.5 ** 2 / 2) / 0.5
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert np.array_equal(activity(SyntheticLog(9, 100, per_user=7.0, activity=0.0), range(9)), [7] * 9)
    assert activity(SyntheticLog(500, 10, per_user=5.0, activity=5.0), range(500)).aminmax() == (1, 5)


def test_first_choices_follow_tastes():
    """One interaction each: a user takes an item with a probability in proportion to popularity x sigmoid."""
    world = SyntheticLog(3000, 40, per_user=1.0, activity=0.0, blocks=1, base_share=1.0)
    items = catalogue(world)
    popularity = torch.empty(40, dtype=torch.float64)
    popularity[items.ranked[0]] = torch.arange(1, 41, dtype=torch.float64) ** -1.0
    tastes = rng.normal_rows(0, "synth taste", 0, 3000, FACTORS)
    fit = tastes @ items.properties.double().T / FACTORS ** 0.5
    p = popularity * torch.sigmoid(3.0 * (fit - 1.0))
    p /= p.sum(1, keepdim=True)
    chosen = step_of(world).train.values
    found = fit.gather(1, chosen[:, None]).sum()
    mean = (p * fit).sum()
    variance = ((p * fit ** 2).sum(1) - (p * fit).sum(1) ** 2).sum()
    assert abs(found - mean) < 4.0 * variance.sqrt()
    assert stats.chisquare(np.bincount(chosen, minlength=40), p.sum(0).numpy()).pvalue > 1e-3


def test_the_command_makes_a_dataset_that_runs(tmp_path, capsys):
    assert main("data synth tiny-1 --users 60 --items 80 --interactions-per-user 12 --blocks 2 "
                "--base-share .7".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = read(tmp_path / "data/tiny-1/tiny-1.inter")
    named = len(np.unique(rows[:, 1]))
    rest = f" ({80 - named} others have none)" if named < 80 else ""
    assert lines[:3] == [f"tiny-1: {len(rows):,} interactions of 60 users and {named} items{rest}",
                         "wrote: data/tiny-1/tiny-1.inter", "wrote: data/tiny-1/tiny-1.yaml"]
    assert load_config("tiny-1").settings == {"blocks": 2, "base_share": 0.7}
    assert lines[3] == "next: run_bench.py data tiny-1"
    out = output_of(capsys, *lines[3].split()[2:])
    assert f"{int(0.7 * len(rows)):,}" in out and "D1\n" in out  # of the YAML file
    assert lines[4].startswith("then: run_bench.py ")
    assert "ndcg@20" in output_of(capsys, *lines[4].split()[2:], "--set", "rounds=1", "--quiet")


def test_uniform_numbers_of_interactions_with_repeats(tmp_path):
    """The data of the federated tutorial: all items alike to everybody, and some several times."""
    world = SyntheticLog(2000, 500, 14.5, exponent=0.0, taste=0.0, drift=0.0, counts=(10, 19), repeats=True)
    write(world, tmp_path / "t.inter")
    rows = read(tmp_path / "t.inter")
    counts = np.bincount(rows[:, 0])
    assert stats.chisquare(np.bincount(counts, minlength=20)[10:]).pvalue > 0.001 and counts.min() == 10
    assert stats.chisquare(np.bincount(rows[:, 1], minlength=500)).pvalue > 0.001
    twice = len(rows) - len(np.unique(rows[:, :2], axis=0))
    assert twice == pytest.approx((counts * (counts - 1) / 2).sum() / 500, rel=0.2)


@pytest.mark.parametrize("words,message", [
    ("x --counts 5", "--counts: found '5', accepted: LOW-HIGH, as 10-50."),
    ("x --counts 2-9 --activity 3", "--activity has no effect with --counts"),
    ("x --counts 9-501", "--counts: found 9-501, accepted: LOW-HIGH from 1 to 500"),
    ("../x", "accepted: at most 100 letters, digits"), ("-x", ""), ("ml-100k", "'ml-100k' is a dataset that exists"),
    ("x --users 0", "--users"), ("x --items 1", "--items: found 1, accepted: 2 to"),
    ("x --interactions-per-user 501", "accepted: 1 to 500, half of the 1,000 items"),
    ("x --interactions-per-user nan", "--interactions-per-user: found nan"),
    ("x --drift 1.5", "--drift: found 1.5, accepted: 0 to 1"), ("x --base-share 0", "--base-share: found 0"),
    ("x --base-share 1", "--base-share: found 1, accepted: below 1"),
    ("x --exponent -1", "--exponent: found -1"), ("x --activity inf", "--activity: found inf")])
def test_bad_input(words, message, tmp_path, capsys):
    try:
        status = main(["data", "synth", *words.split()])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_existing_dataset_is_kept_unless_forced_and_a_file_is_no_folder(tmp_path, capsys):
    command = ["data", "synth", "x", "--users", "5", "--items", "20", "--interactions-per-user", "3"]
    assert main(command) == 0
    before = (tmp_path / "data/x/x.inter").read_bytes()
    assert main([*command, "--seed", "1"]) == 2 and "--force" in capsys.readouterr().err
    assert (tmp_path / "data/x/x.inter").read_bytes() == before
    assert main([*command, "--force"]) == 0
    assert (tmp_path / "data/x/x.inter").read_bytes() == before  # the seed makes the bytes
    (tmp_path / "data/x/x.item").write_text("item_id:token\n")
    capsys.readouterr()
    assert main([*command, "--seed", "1", "--force"]) == 0
    assert "x.item: was there before, and is read with these" in capsys.readouterr().out
    assert (tmp_path / "data/x/x.inter").read_bytes() != before
    (tmp_path / "data/x/x.inter").unlink()
    assert main(command) == 2 and "x.yaml: exists" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written .*--out DIR"):
        write(replace(WORLD, users=2), tmp_path / "file" / "x.inter")
