"""What a record says of the way to its result."""

from __future__ import annotations

import math

import pandas as pd

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
