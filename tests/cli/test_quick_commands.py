"""Commands that need no numbers import nothing that takes long, once plugins' metadata is cached;
``benchmarks/commands.py`` prints their seconds."""

import json
import os
import subprocess
import sys

from helpers import ROOT

SLOW = ("torch", "pandas", "numpy", "recbole", "scipy", "pyarrow", "matplotlib", "ray")
# Commands one after the other in a new process; what they and the package's names imported is asked for after each.
SCRIPT = """
import contextlib, io, json, sys, fedcl_bench
from fedcl_bench.cli.main import main
dir(fedcl_bench), fedcl_bench.UserError
found = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = main(arguments)
        except SystemExit as stop:
            status = stop.code
    found.append([status, *(name for name in sys.argv[2:] if name in sys.modules)])
print(json.dumps(found))
"""


def imported(commands, names, then="", **environment):
    """(status, those of these modules that are imported by then) of each command; ``then``: what is done after them."""
    done = subprocess.run([sys.executable, "-c", SCRIPT + then, json.dumps(commands), *names], cwd=ROOT, text=True,
                          capture_output=True, env={"PYTHONPATH": str(ROOT), "PATH": "", **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_slow_is_imported(registry, tmp_path):
    assert registry.plugins  # all are imported, so that the cache holds them
    commands = {"--help": 0, "--version": 0, "list": 0, "list f3crc": 2, "gird": 2, "--method f3cre": 2,
                "--method ft --backbone fedfm --dataset ml-100k": 2, "--backbone fedmf": 2,
                f"new-plugin method of-a-test --plugins {tmp_path / 'new'}": 0}
    found = imported([command.split() for command in commands], SLOW,
                     FEDCL_BENCH_CACHE=os.environ["FEDCL_BENCH_CACHE"])
    assert dict(zip(commands, found, strict=True)) == {command: [status] for command, status in commands.items()}


def test_readers_of_records_import_what_they_need():
    """PyTorch and pandas, half of their time; half a second of scipy.stats, and RecBole, would come on top. No engine,
    no other command and no other plugin."""
    published = ["--tuned", "--records", "results/published/f3crec"]
    commands = [["tables", "--table", "2", "--datasets", "ml-100k", "--backbones", "fedmf", *published],
                ["compare", "f3crec", "ft", "--backbone", "fedmf", "--datasets", "ml-100k", *published]]
    needless = ("scipy.stats", "recbole", "matplotlib", "sklearn", "tensorboard", "ray",
                "fedcl_bench.federation.parts", "fedcl_bench.experiments.grid", "fedcl_bench.cli.commands.run",
                "fedcl_bench.toolbox.transformer")
    assert imported(commands, needless, OMP_NUM_THREADS="1") == [[0], [0]]


def test_runs_import_what_they_need(tmp_path):
    """The second one's server has an optimiser of PyTorch's. RecBole's own import of scikit-learn takes longer than
    reading ML-100K; so does that of tensorboard. Its metrics work all the same."""
    short = ["--set", "rounds=1", "--set", "k_core=80", "--results", str(tmp_path)]
    commands = [["--method", "f3crec", "--backbone", "fedmf", *short],
                ["--method", "central", "--backbone", "biasmf", *short]]
    metrics = ("from recbole.evaluator import metrics\n"
               "assert metrics.sk_auc([0.0, 1.0], [0.0, 1.0]) == 0.5 and 'sklearn.metrics' in sys.modules\n"
               "from sklearn.metrics import mean_squared_error\nassert mean_squared_error([1.0], [3.0]) == 4.0\n")
    assert imported(commands, ("pandas", "scipy", "torch._dynamo", "sklearn", "tensorboard"), metrics,
                    OMP_NUM_THREADS="1") == [[0], [0]]


def test_statistics_of_a_paper_are_those_of_the_data(output):
    """Table 1 needs no records: ML-100K's counts are the printed ones."""
    table = output("tables", "--table", "1", "--datasets", "ml-100k")
    for counts in (("587", "697", "827", "943"), ("1,136", "1,146", "1,148", "1,152"),
                   ("58,771", "13,060", "13,060", "13,062"), ("91.19", "98.36", "98.62", "98.80")):
        assert " | ".join(f"{count} ({count})" for count in counts) in table
    assert "missing" not in table
