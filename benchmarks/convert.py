"""A table of interactions to an atomic file: seconds and peak memory by the number of rows.

    python benchmarks/convert.py [--rows 1000000,10000000] [--users 1000003] [--items 100003]

Each line is one `data convert --table` in a process of its own. It holds a piece of the table, 8 bytes
per user and item, and 8 bytes of each of the first 5 million rows, so memory should not grow behind those.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import heading

from fedcl_bench.cli import count, counts

BENCH = Path(__file__).resolve().parents[1] / "run_bench.py"
COMMAND = """\
import sys
from fedcl_bench.cli.main import main
from fedcl_bench.kernels.memory import peak_mib
status = main(sys.argv[1:])
print(peak_mib())
sys.exit(status)
"""


def write_table(path: Path, rows: int, users: int, items: int) -> None:
    """A table with a rating from 1 to 5 and times in milliseconds."""
    with open(path, "w") as file:
        file.write("user,item,rating,time\n")
        for start in range(0, rows, 100_000):
            file.writelines(f"{i * 7919 % users},{i * 104729 % items},{i % 5 + 1},{1262304000000 + 500 * i}\n"
                            for i in range(start, min(rows, start + 100_000)))


def convert(folder: Path) -> tuple[float, float]:
    """Seconds and MiB of converting ``folder/table.csv``."""
    words = ["data", "convert", "--table", str(folder / "table.csv"), "--user", "user", "--item", "item", "--time",
             "time", "--rating", "rating", "--out", str(folder), "--force", "big"]
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, cwd=BENCH.parent)
    if done.returncode:
        sys.exit(done.stderr)
    return time.perf_counter() - began, float(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=counts, default=(1_000_000, 10_000_000), metavar="N,N")
    parser.add_argument("--users", type=count, default=1_000_003)
    parser.add_argument("--items", type=count, default=100_003)
    args = parser.parse_args()
    print(heading(), flush=True)
    print(f"{'rows':>12}{'seconds':>10}{'peak MiB':>10}")
    with tempfile.TemporaryDirectory(prefix="fedcl_bench-") as folder:
        for rows in args.rows:
            write_table(Path(folder) / "table.csv", rows, args.users, args.items)
            seconds, peak = convert(Path(folder))
            print(f"{rows:>12,}{seconds:>10.1f}{peak:>10.0f}", flush=True)


if __name__ == "__main__":
    main()
