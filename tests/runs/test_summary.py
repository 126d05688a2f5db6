"""What a record says of the way to its result."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
from fabricate import fabricate, level

from fedcl_bench.cli.show import improvement_notes
from fedcl_bench.records.frames import still_improving
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.runs.summary import nearly_best


def test_nearly_best():
    """The first validated round with 95 % of a block's best; what came later is not counted."""
    curve = pd.DataFrame({
        "step": [0, 0, 0, 0, 1, 1], "round": [0, 1, 2, 3, 0, 1], "valid": [0.1, math.nan, 0.96, 1.0, 0.5, 0.2],
        "participants": [10, 10, 10, 10, 4, 4], "dropped": [1, 0, 0, 0, 0, 0], "bytes_up": [2, 2, 2, 2, 2, 2],
        "bytes_down": [3, 3, 3, 3, 3, 3], "train_seconds": [1.0] * 6, "evaluate_seconds": [0.5] * 6})
    assert nearly_best(curve) == {"share": 0.95, "rounds": [3, 1], "seconds": [4.5, 1.5], "bytes_up": [60, 8],
                                  "bytes_down": [93, 12]}
    assert nearly_best(curve.drop(columns="dropped"))["bytes_down"] == [90, 12]
    zero = curve.assign(valid=0.0)
    assert nearly_best(zero)["rounds"] == [1, 1]


@pytest.mark.parametrize("valid, rising", [
    ([.1, .2, .3], True), ([.1, .3, .2], False),
    ([.1, .3, .3], False),  # as good as before: no improvement
    ([.1, float("nan"), .2, float("nan")], True),  # the last round that was validated
    ([.3], False), ([float("nan"), .3], False),  # nothing to compare with
    ([-.9, -.8], True)])  # of an error the values are negative
def test_blocks_that_end_while_validation_still_improves(valid, rising):
    done = [.1, .3, .2]
    curve = pd.DataFrame({"step": [0] * 3 + [1] * len(valid), "valid": done + valid})
    assert still_improving(curve) == [1] * rising


def test_only_the_last_stage_can_still_improve():
    curve = pd.DataFrame({"step": 0, "stage": [0, 0, 1, 1], "valid": [.1, .2, .4, .3]})
    assert still_improving(curve) == [] and still_improving(curve.assign(valid=[.9, .8, .1, .2])) == [0]


def test_a_run_says_that_validation_still_improves(registry, tmp_path):
    """Fabricated runs have two rounds a block, the second of which is better; those of one round say nothing."""
    def said(seeds, rounds):
        folders = [fabricate(tmp_path / str(rounds), registry, RunSpec("ft", "fedmf", "ml-100k"), seed, level(0.1),
                             rounds=rounds) for seed in range(seeds)]
        runs = [{**json.loads((folder / "run.json").read_text()), "record": str(folder)} for folder in folders]
        return improvement_notes(runs[0] if seeds == 1 else {**runs[0], "runs": runs})
    assert said(2, 2) == ["still improving in the last round: validation of 8 of 8 blocks (block 0, block 1, block 2, "
                          "block 3); more rounds may give other numbers"]
    assert said(1, 1) == []
