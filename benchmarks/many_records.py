"""Seconds and peak memory of `tables`, `compare` and `pack` that take a paper's table out of thousands of records.

    python benchmarks/many_records.py [--records 5000] [--repeats 2] [--folder DIR]

Each is a whole process, imports included. Processor time is less disturbed by other jobs on the machine. What they
should take on a quiet machine stands beside them.

The records are made up: those of Table 2 of F3CRec on ML-100K with five seeds, and trials of a search beside them, with
350 users and 60 rounds in each of four blocks. They are kept in --folder, if one is named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import heading

from fedcl_bench.cli import count
from fedcl_bench.experiments import papers
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.specs import RunSpec

ROOT = Path(__file__).resolve().parents[1]
SECONDS, MIB = 5.0, 500
TABLE = ["--paper", "f3crec", "--table", "2", "--datasets", "ml-100k"]
COMMANDS = [["tables", *TABLE, "--records", "many"],
            ["compare", "f3crec", "ft", "reg", "--backbone", "fedmf", "--records", "many"],
            ["pack", *TABLE, "--results", "many", "--out", "packed"]]


def make_records(folder: Path, records: int) -> None:
    """The runs of the table, and as many trials with other settings as make up ``records``."""
    import json

    sys.path.insert(0, str(ROOT / "tests"))
    from fabricate import fabricate, level

    registry, made = discover(), []
    for spec in papers.specs("f3crec", [2], datasets=["ml-100k"]):
        for seed in range(5):
            made.append(fabricate(folder, registry, spec, seed, level(0.08), users=350, rounds=60))
    trial = fabricate(folder, registry, RunSpec("ft", "fedmf", "ml-100k", (("lr", 0.123),)), 0, level(0.08), users=350,
                      rounds=60)
    content = json.loads((trial / "run.json").read_text())
    for number in range(records - len(made) - 1):
        copy = trial.with_name(f"trial-{number}")
        shutil.copytree(trial, copy)
        changed = {**content, "hash": f"{number:032x}", "settings": {**content["settings"], "lr": 1 + number / 1e4}}
        (copy / "run.json").write_text(json.dumps(changed, indent=1))


def measured(folder: Path, arguments: list[str]) -> tuple[float, float, float]:
    """Seconds, processor seconds and peak MiB of a command."""
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, str(ROOT / "run_bench.py"), *arguments], cwd=folder,
                             stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"{' '.join(arguments)}: ended with {os.waitstatus_to_exitcode(status)}")
    peak = usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, peak


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=count, default=5000)
    parser.add_argument("--repeats", type=count, default=2)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    print(heading(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        if not (folder / "many").is_dir():
            make_records(folder / "many", args.records)
        print(f"{'':<84}{'seconds':>8}{'CPU':>7}{'MiB':>6}{'at most':>14}")
        for words in COMMANDS:
            rows = []
            for _ in range(args.repeats):
                shutil.rmtree(folder / "packed", ignore_errors=True)
                rows.append(measured(folder, words))
            took, used, peak = zip(*rows)
            print(f"{' '.join(words):<84}{min(took):>8.2f}{min(used):>7.2f}{max(peak):>6.0f}{SECONDS:>7g} s {MIB} MiB",
                  flush=True)


if __name__ == "__main__":
    main()
