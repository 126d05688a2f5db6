"""What leaks: the counter of examples/leaks, the channels of `leaks` on data with values by hand, and whole audits."""

import json

import numpy as np
import pytest
import torch
from helpers import ROOT, lay_log, one_step, output_of, refused

from fedcl_bench import UserError
from fedcl_bench.audit import leaks
from fedcl_bench.audit.leaks import Times, Unit
from fedcl_bench.data.files.recbole_files import Interactions
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.data.stream import Sessions, Step, build_static, rows_of_static
from fedcl_bench.evaluation.metrics import Hit
from fedcl_bench.testing.worlds import ragged


@pytest.mark.parametrize("pool, low, high", [("untouched", 1.0, 1.0), ("untrained", 0.04, 0.16)])
def test_the_counter_finds_everything_that_was_spared(capsys, tmp_path, pool, low, high):
    """It learns nothing, and has HR@10 of 1 where an item to find is never a negative; else that of chance, 10 of
    100."""
    result = json.loads(output_of(capsys, "--method", "counter", "--plugins", ROOT / "examples/leaks", "--set",
                                  "stream=static", "--set", "k_core=80", "--set", "rounds=10", "--set",
                                  f"negative_pool={pool}", "--results", tmp_path, "--quiet", "--json"))
    assert low <= result["metrics"]["hit@10"]["per_block"][0] <= high
    assert ("leaks test items" in " ".join(result["notes"]).lower()) == (pool == "untouched")


# Two users, six items. Each user's items to rank are 3, 4 and 5.
STEP = one_step(ragged([0, 1], [1, 2]), 6, ragged([2], [0]), ragged([3], [4]))
CANDIDATES = {"valid": torch.tensor([[5, -1], [3, -1]]), "test": torch.tensor([[4, 5], [3, 5]])}
TIMES = Times(torch.tensor([1, 2, 0, 1]), torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 3.5]), ragged([3], []))
TEXTS = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])  # mean (4, 1) / 6
SCORES = {"training": [[1, 2, 1, 0, 0, 0]] * 2, "negatives": [[0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 1, 0]],
          "candidates": [[0, 0, 0, -2, -1, -3]] * 2, "popularity": [[2, 2, 2, 1, 1, 0]] * 2,
          "catalogue": [[1, 0, 1, 2, 2, 2]] * 2, "ids": [[0, -1, -2, -3, -4, -5]] * 2,
          "ties": [[0, 0, 0, 1, 0, 0], [0] * 6], "later": [[1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]],
          "texts": [[4 / 6, 4 / 6, 4 / 6, 1 / 6, 4 / 6, 0]] * 2}


def test_predictors_are_those_by_hand():
    """With k_core=2, an item that is trained on once has another interaction somewhere."""
    unit = Unit(STEP, [STEP], CANDIDATES, TIMES, TEXTS)
    found = {name: predictor(torch.arange(2)) for name, predictor in unit.predictors(2).items()}
    assert found.keys() == SCORES.keys()
    for name, scores in SCORES.items():
        assert torch.allclose(found[name].double(), torch.tensor(scores, dtype=torch.float64)), name
    assert unit.missing(1).tolist() == [0, 0, 0, 1, 1, 1]
    later = Unit(STEP, [STEP, STEP], CANDIDATES, None, None)  # counts go on from step to step
    assert later.counts("train").tolist() == [2, 4, 2, 0, 0, 0]
    assert [name for name, predictor in later.predictors(2).items() if predictor is None] == ["ties", "later", "texts"]


@pytest.mark.parametrize("candidates, values", [
    (None, {"negatives": 1.0, "ids": 0.5}), (CANDIDATES["test"], {"negatives": 1.0, "ids": 0.5, "candidates": 0.5})])
def test_values_are_those_by_hand(candidates, values):
    """HR@1: ids rank item 3 first, which is the first user's; candidates rank item 4 first, which is the second's."""
    unit = Unit(STEP, [STEP], {**CANDIDATES, "test": candidates}, TIMES, TEXTS)
    for name, value in values.items():
        assert unit.value(unit.predictors(1)[name], Hit(), 1, 0) == value
    many = one_step(ragged(*[[0]] * 900), 6, ragged(*[[1]] * 900), ragged(*[[3]] * 900))
    alike = Unit(many, [many], {"test": None}, None, None)
    for predictor in (None, lambda users: torch.zeros(len(users), 6), alike.predictors(1)["training"]):
        assert alike.value(predictor, Hit(), 1, 0) == pytest.approx(1 / 4, abs=0.06)  # in random order


def test_times_are_those_by_hand():
    """User 0's last item has the time of the one before it. Sessions: user 1 has none to test on."""
    rows = Interactions(np.array([0, 0, 0, 1, 1, 1, 1]), np.array([0, 1, 2, 1, 2, 0, 3]),
                        np.array([1.0, 5.0, 5.0, 2.0, 3.0, 4.0, 6.0]), np.array(["u", "v"]), np.array(list("abcd")))
    step, = build_static(rows, StreamSettings(stream="static"), "toy").steps
    times = leaks._times(step, *rows_of_static(rows, StreamSettings(stream="static"), "toy"))
    assert times.times.tolist() == [1.0, 2.0, 3.0] and times.items.tolist() == [0, 1, 2]
    assert times.first.tolist() == [5.0, 6.0]
    assert [times.tied.of(user).tolist() for user in range(2)] == [step.test.of(0).tolist(), []]

    def sessions(users, *lists):
        items, moments = (torch.tensor([pair[i] for pairs in lists for pair in pairs]) for i in range(2))
        return Sessions.laid_out(np.array(users), np.array([*map(len, lists)]), items.numpy(),
                                 moments.double().numpy(), 2)
    step = Step.of_sessions(0, (2, 4), (0, 0), 9, {
        "train": sessions([0, 1], [(0, 4), (1, 5)], [(2, 1), (3, 9)]), "valid": sessions([1], [(0, 10), (1, 11)]),
        "test": sessions([0], [(2, 7), (3, 7)])})
    times = leaks._session_times(step)
    assert (times.items.tolist(), times.times.tolist()) == ([2, 0, 1, 3], [1.0, 4.0, 5.0, 9.0])
    assert times.first.tolist() == [7.0, float("inf")]
    assert [times.tied.of(user).tolist() for user in range(2)] == [[3], []]


@pytest.mark.parametrize("protocol", ["static, as here", pytest.param("F3CRec: blocks", marks=pytest.mark.long)])
def test_the_shipped_table_is_that_of_now(protocol, monkeypatch):
    monkeypatch.setattr(leaks, "PAPERS", {protocol: leaks.PAPERS[protocol]})
    assert leaks.papers(None) == [row for row in leaks.shipped_papers() if row["protocol"] == protocol]


def test_the_command(capsys):
    """What is open depends on the settings, what a channel is worth does not."""
    def found(*words):
        return json.loads(output_of(capsys, "leaks", *words, "--json"))
    assert "--data-dir: has no effect without --dataset" in refused(capsys, "leaks", "--data-dir", "mine")
    ours, released = (found("--set", "stream=static", "--set", "k_core=80", *more)
                      for more in ((), ("--set", "negative_pool=untouched")))
    here, there = ({each["name"]: each for each in of["channels"]} for of in (ours, released))
    assert [name for name in here if here[name]["on"] != there[name]["on"]] == ["negatives"]
    assert not here["negatives"]["on"] and {name: each["alone"] for name, each in here.items()} == {
        name: each["alone"] for name, each in there.items()}
    assert here["negatives"]["alone"] == 1.0 and 0.1 < ours["chance"] < 0.2
    assert ours["metric"] == "hit@10" and " items to find have the time of" in here["ties"]["how"]
    out = output_of(capsys, "leaks", "--set", "stream=static", "--set", "k_core=80", "--set", "tie_order=random")
    assert "negatives               closed         1.0000" in out and "at least 80 times" in out
    assert "ties                    closed" in out
    assert not {each["name"]: each["on"] for each in found("--set", "inc_split=random", "--set", "k_core=80")[
        "channels"]}["ties"]
    out = output_of(capsys, "leaks")
    assert all(name in out for name in leaks.PAPERS)


def test_a_split_file_has_no_times_and_no_core(tmp_path):
    """Item d is known for a test interaction alone."""
    lines = [f"0\t{user}\t{item}\t{split}" for user, items in (("u", "abcd"), ("v", "bacb")) for item, split in
             zip(items, ("train", "train", "valid", "test"))]
    (tmp_path / "split.tsv").write_text("\n".join(["block\tuser\titem\tsplit", *lines]))
    found = leaks.audit("ml-100k", {"split_file": str(tmp_path / "split.tsv"), "topk": "1", "valid_metric": "hit@1"})
    channels = {each.name: each for each in found.channels}
    assert [name for name, each in channels.items() if each.on is None] == ["ties", "later"]
    assert channels["ties"].alone is None and "at least 1 times (k_core); 2 have fewer" in channels["catalogue"].how


def test_a_block_without_a_test_is_named(tmp_path, monkeypatch):
    """In a split file, and where all users have too few rows in it."""
    lines = [f"{block}\t{user}\t{item}\t{split}" for user in "uv" for block, items in ((0, "abcd"), (1, "ef"))
             for item, split in zip(items, ("train", "valid", "test") if block == 0 else ("train", "valid"))]
    (tmp_path / "split.tsv").write_text("\n".join(["block\tuser\titem\tsplit", *lines]))
    monkeypatch.chdir(tmp_path)
    few = lay_log("few", [(f"u{n}", f"i{n % 5}", n) for n in range(30)])
    for dataset, settings in (("ml-100k", {"split_file": str(tmp_path / "split.tsv")}), (str(few), {"k_core": "0"})):
        with pytest.raises(UserError, match="block [01] has no test interaction.*--set blocks=N"):
            leaks.audit(dataset, {**settings, "topk": "1", "valid_metric": "hit@1"})


@pytest.mark.parametrize("words, message", [
    (["--papers", "--set", "stream=static"], "--papers: has datasets and settings of its own"),
    (["--set", "negative_pool=all"], "accepted: one of untrained, untouched"),
    (["--set", "valid_metric=rmse@20"], "unknown metric 'rmse'"),
    (["--set", "valid_metric=rmse"], "accepted: clients that are users or domains"),
    (["--dataset", "nothing"], "nothing")])
def test_errors(capsys, words, message):
    assert message in refused(capsys, "leaks", *words).replace("\n", " ")
