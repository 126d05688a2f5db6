"""Processor time of Table 2 of F3CRec on ML-100K from 90 compact records, beside that of a command that reads none.

    python benchmarks/tables.py [--repeats 3]

The records are made up: 18 rows, five seeds, 350 users and 60 rounds in each of four blocks. Both commands are whole
processes, imports included, in turn; medians are shown, and their ratio.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import heading

from fedcl_bench.cli.commands.common import count
from fedcl_bench.experiments import papers
from fedcl_bench.runs import compact
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.store import load_runs

ROOT = Path(__file__).resolve().parents[1]
TABLE = ["tables", "--table", "2", "--records", "compact", "--datasets", "ml-100k"]


def make_records(folder: Path) -> None:
    """Compact records of every run of the table, with five seeds."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fabricate import fabricate, level

    registry = discover()
    for spec in papers.specs("f3crec", [2], datasets=["ml-100k"]):
        for seed in range(5):
            fabricate(folder / "runs", registry, spec, seed, level(0.08), users=350, rounds=60)
    compact.write(folder / "compact", load_runs(folder / "runs"), "pack", lambda run: False)


def seconds(folder: Path, arguments: list[str]) -> float:
    """Processor time of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, str(ROOT / "run_bench.py"), *arguments], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=count, default=3)
    args = parser.parse_args()
    print(heading(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_records(folder)
        pairs = [(seconds(folder, TABLE), seconds(folder, ["list"])) for _ in range(args.repeats)]
    table, listing = map(statistics.median, zip(*pairs))
    print(f"tables --table 2, 90 runs: {table:.2f} s of processor time; list: {listing:.2f} s; "
          f"ratio {table / listing:.2f}")


if __name__ == "__main__":
    main()
