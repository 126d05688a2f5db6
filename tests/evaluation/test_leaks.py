"""What leaks: the counter of examples/leaks, the channels of `leaks` on data with values by hand, and whole audits."""

from __future__ import annotations

import json

import pytest
from helpers import ROOT

from fedcl_bench.cli.main import main


@pytest.mark.parametrize("pool, low, high", [("untouched", 1.0, 1.0), ("untrained", 0.04, 0.16)])
def test_the_counter_finds_everything_that_was_spared(capsys, tmp_path, pool, low, high):
    """It learns nothing, and has HR@10 of 1 where an item to find is never a negative; else that of chance, 10 of
    100."""
    assert main(["--method", "counter", "--plugins", str(ROOT / "examples/leaks"), "--set", "stream=static", "--set",
                 "k_core=50", "--set", "rounds=10", "--set", f"negative_pool={pool}", "--results", str(tmp_path),
                 "--quiet", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert low <= result["metrics"]["hit@10"]["per_block"][0] <= high
    assert ("leaks test items" in " ".join(result["notes"]).lower()) == (pool == "untouched")
