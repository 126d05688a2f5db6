"""Commands that need no numbers import nothing that takes long, once plugins' metadata is cached;
``benchmarks/commands.py`` prints their seconds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import ROOT

from fedcl_bench.cli.main import main

SLOW = ("torch", "pandas", "numpy", "recbole", "scipy", "pyarrow", "matplotlib", "ray")
SCRIPT = f"""
import sys
from fedcl_bench.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code
print("status", status, *(name for name in {SLOW} if name in sys.modules))
"""


@pytest.mark.parametrize("arguments,status", [
    (["--help"], 0), (["--version"], 0), (["list"], 0), (["list", "f3crc"], 2), (["gird"], 2),
    (["--method", "f3cre"], 2), (["--method", "ft", "--backbone", "fedfm", "--dataset", "ml-100k"], 2),
    (["--backbone", "fedmf"], 2), (["doctor", "--quick"], 0)])
def test_nothing_slow_is_imported(arguments, status, tmp_path, registry):
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], cwd=tmp_path, text=True, capture_output=True,
                          env={"PYTHONPATH": str(ROOT), "PATH": "",
                               "FEDCL_BENCH_CACHE": os.environ["FEDCL_BENCH_CACHE"]})
    assert done.stdout.splitlines()[-1:] == [f"status {status}"], done.stdout[-300:] + done.stderr[-500:]


def test_quick_doctor_says_what_is_wrong(tmp_path, capsys):
    options = ["doctor", "--quick", "--results", str(tmp_path)]
    assert main(options) == 0
    assert "without --quick plugins, data, device and kernels are checked too" in capsys.readouterr().out
    (tmp_path / "wrong.py").write_text("def nonsense(\n")
    for folder, words in ((tmp_path, "wrong.py: is not Python"), (tmp_path / "absent", "is not a folder")):
        assert main([*options, "--plugins", str(folder)]) == 1
        out = capsys.readouterr().out
        assert words in out and "1 to fix." in out


@pytest.mark.parametrize("arguments", [
    ["tables", "--table", "2", "--datasets", "ml-100k", "--backbones", "fedmf"],
    ["compare", "f3crec", "ft", "--backbone", "fedmf"]], ids=lambda arguments: arguments[0])
def test_readers_of_records_import_what_they_need(arguments):
    """PyTorch and pandas, half of their time; half a second of scipy.stats, and RecBole, would come on top."""
    needless = ("scipy.stats", "recbole", "matplotlib", "sklearn", "tensorboard", "ray")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace(str(SLOW), str(needless)), *arguments, "--tuned",
         "--records", "results/published/f3crec"], cwd=ROOT, text=True, capture_output=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"})
    assert done.stdout.splitlines()[-1:] == ["status 0"], done.stdout[-300:] + done.stderr[-500:]
