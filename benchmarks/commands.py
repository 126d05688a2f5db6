"""Seconds and peak memory of commands that make no run: listings, typos, and what is made of records.

    python benchmarks/commands.py [--repeats 3]
    python benchmarks/commands.py --records 5000

Each is a whole process, imports included; the fastest of the repeats is shown, beside what it should take on a quiet
machine. Processor time is the median, which other jobs on the machine disturb less. `import torch` stands beside them,
as tables and tests cannot be without: settings are declared in modules that use it.

The records are made up: those of Table 2 of F3CRec on ML-100K, 18 rows and five seeds, with 350 users and 60 rounds in
each of four blocks. With --records they are among so many: trials of a search.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
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
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.records.store import load_runs

ROOT = Path(__file__).resolve().parents[1]
TABLE = ["--table", "2", "--datasets", "ml-100k"]
COMPARE = ["compare", "f3crec", "ft", "reg", "--backbone", "fedmf"]
# Command, and the seconds that it should take at most.
COMMANDS = [(["--help"], 0.5), (["list"], 0.5), (["gird"], 0.5), (["--method", "f3cre"], 0.5),
            (["tables", *TABLE, "--records", "compact"], 3.0),
            ([*COMPARE, "--records", "compact"], 3.0)]
OF_MANY = [(["tables", *TABLE, "--records", "many"], 5.0), ([*COMPARE, "--records", "many"], 5.0),
           (["pack", "--paper", "f3crec", *TABLE, "--records", "many", "--out", "packed"], 5.0)]
# A process writes its peak itself: what the system says of a child counts what the one that starts it holds.
PEAK = """\
import atexit, sys
sys.path.insert(0, %r)
from fedcl_bench.kernels.memory import peak_mib
atexit.register(lambda: print(peak_mib(), file=sys.stderr))
""" % str(ROOT)
RUN = "from fedcl_bench.cli.main import main; sys.exit(main())"


def make_records(folder: Path, records: int | None) -> None:
    """Records of every run of the table, with five seeds; and as many trials with other settings as make up
    ``records``, or compact records."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fabricate import fabricate, level

    registry, lookalikes = discover(), {"users": 350, "rounds": 60}
    made = [fabricate(folder / "many", registry, spec, seed, level(0.08), **lookalikes)
            for spec in papers.specs("f3crec", [2], datasets=["ml-100k"]) for seed in range(5)]
    if records is None:
        return published.write(folder / "compact", load_runs(folder / "many"), "pack", lambda run: False)
    spec = RunSpec("ft", "fedmf", "ml-100k", (("lr", 0.123),))
    trial = fabricate(folder / "many", registry, spec, 0, level(0.08), **lookalikes)
    content = json.loads((trial / "run.json").read_text())
    for number in range(records - len(made) - 1):
        copy = trial.with_name(f"trial-{number}")
        shutil.copytree(trial, copy)
        changed = {**content, "hash": f"{number:032x}", "settings": {**content["settings"], "lr": 1 + number / 1e4}}
        (copy / "run.json").write_text(json.dumps(changed, indent=1))


def measured(folder: Path, code: str, words: list[str]) -> tuple[float, float, float]:
    """Seconds, processor seconds and peak MiB of a process; typos end with status 2."""
    shutil.rmtree(folder / "packed", ignore_errors=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PEAK + code, *words], cwd=folder, capture_output=True, text=True)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 2) or "Traceback" in done.stderr:
        sys.exit(done.stderr)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, used, float(done.stderr.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--records", type=count)
    args = parser.parse_args()
    print(heading(), flush=True)
    print(f"{'':<78}{'seconds':>8}{'CPU':>7}{'MiB':>6}{'at most':>9}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_records(folder, args.records)
        rows = [(" ".join(words), RUN, words, f"{most:g}") for words, most in (OF_MANY if args.records else COMMANDS)]
        for label, code, words, most in [*rows, ("import torch", "import torch", [], "")]:
            took, used, peak = zip(*(measured(folder, code, words) for _ in range(args.repeats)))
            print(f"{label:<78}{min(took):>8.2f}{statistics.median(used):>7.2f}{max(peak):>6.0f}{most:>9}", flush=True)


if __name__ == "__main__":
    main()
