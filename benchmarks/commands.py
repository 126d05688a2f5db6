"""Seconds of commands that make no run: listings, typos, tables and tests from 90 compact records.

    python benchmarks/commands.py [--repeats 3]

Each is a whole process, imports included. The fastest of the repeats is shown, beside what it should take on a quiet
machine. The records are those of `tables.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import heading
from tables import ROOT, TABLE, make_records

from fedcl_bench.cli.commands.common import count

COMPARE = ["compare", "f3crec", "ft", "reg", "--backbone", "fedmf", "--records", "compact"]
# Command, and the seconds that it should take at most.
COMMANDS = [(["--help"], 0.5), (["list"], 0.5), (["gird"], 0.5), (["--method", "f3cre"], 0.5),
            (["doctor", "--quick"], 0.5), (TABLE, 3.0), (COMPARE, 3.0)]


def seconds(folder: Path, arguments: list[str]) -> float:
    """Seconds of a command; typos end with status 2."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, str(ROOT / "run_bench.py"), *arguments], cwd=folder, capture_output=True)
    if done.returncode not in (0, 2) or b"Traceback" in done.stderr:
        sys.exit(done.stderr.decode())
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=count, default=3)
    args = parser.parse_args()
    print(heading(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_records(folder)
        for arguments, most in COMMANDS:
            best = min(seconds(folder, arguments) for _ in range(args.repeats))
            print(f"{' '.join(arguments):<78} {best:5.2f} s, to be at most {most:g} s", flush=True)


if __name__ == "__main__":
    main()
