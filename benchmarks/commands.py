"""Seconds of commands that make no run: listings, typos, tables and tests from 90 compact records.

    python benchmarks/commands.py [--repeats 3]

Each is a whole process, imports included; the fastest of the repeats is shown, beside what it should take on a quiet
machine. Processor time is the median, which other jobs on the machine disturb less. `import torch` stands beside them,
as tables and tests cannot be without: settings are declared in modules that use it.

The records are made up: those of Table 2 of F3CRec on ML-100K, 18 rows and five seeds, with 350 users and 60 rounds in
each of four blocks.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import heading

from fedcl_bench.cli import count
from fedcl_bench.experiments import papers
from fedcl_bench.records import published
from fedcl_bench.runs.registry import discover
from fedcl_bench.records.store import load_runs

ROOT = Path(__file__).resolve().parents[1]
TABLE = ["tables", "--table", "2", "--records", "compact", "--datasets", "ml-100k"]
COMPARE = ["compare", "f3crec", "ft", "reg", "--backbone", "fedmf", "--records", "compact"]
# Command, and the seconds that it should take at most.
COMMANDS = [(["--help"], 0.5), (["list"], 0.5), (["gird"], 0.5), (["--method", "f3cre"], 0.5),
            (["doctor", "--quick"], 0.5), (TABLE, 3.0), (COMPARE, 3.0)]


def make_records(folder: Path) -> None:
    """Compact records of every run of the table, with five seeds."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fabricate import fabricate, level

    registry = discover()
    for spec in papers.specs("f3crec", [2], datasets=["ml-100k"]):
        for seed in range(5):
            fabricate(folder / "runs", registry, spec, seed, level(0.08), users=350, rounds=60)
    published.write(folder / "compact", load_runs(folder / "runs"), "pack", lambda run: False)


def seconds(folder: Path, arguments: list[str]) -> tuple[float, float]:
    """Seconds and processor seconds of Python with these arguments; typos end with status 2."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 2) or b"Traceback" in done.stderr:
        sys.exit(done.stderr.decode())
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=count, default=3)
    args = parser.parse_args()
    print(heading(), flush=True)
    print(f"{'':<78}{'seconds':>8}{'CPU':>7}{'at most':>9}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_records(folder)
        rows = [(" ".join(words), [str(ROOT / "run_bench.py"), *words], f"{most:g}") for words, most in COMMANDS]
        for label, arguments, most in [*rows, ("import torch", ["-c", "import torch"], "")]:
            took, used = zip(*(seconds(folder, arguments) for _ in range(args.repeats)))
            print(f"{label:<78}{min(took):>8.2f}{statistics.median(used):>7.2f}{most:>9}", flush=True)


if __name__ == "__main__":
    main()
