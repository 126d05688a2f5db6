"""The benchmark of whole runs: its parts add up, and what it compares."""

from argparse import Namespace
from pathlib import Path

from helpers import script

from fedcl_bench.cli.main import main


def test_parts_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench = script("benchmarks/run_at_size")
    assert not main(["data", "synth", "big", "--users", "80", "--items", "40", "--blocks", "2",
                     "--interactions-per-user", "10"])
    args = Namespace(rounds=2, dim=4, evaluate_users=30)
    assert set(bench.one("prepare", args, Path("data"))["parts"]) == {"prepare"}
    whole, again = (bench.one(stage, args, Path("data")) for stage in ("run", "resume"))
    assert whole["rounds"] == again["rounds"] == 4 and whole["written"] == again["written"]
    assert set(bench.PARTS) - {"prepare", "resume"} == whole["parts"].keys()
    assert all(wall > 0 and peak > 0 for wall, _, peak in whole["parts"].values())
