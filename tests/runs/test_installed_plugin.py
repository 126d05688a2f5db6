"""Plugins of an installed package: a real one is built and installed in an environment of its own and used there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers import ROOT

from fedcl_bench.cli.main import main

pytest.importorskip("setuptools", reason="needs setuptools to build a package without network")
# Beside the entry points of the documentation: a module named twice, one that cannot be imported, one that is not there
MORE = """\
acme-mean-again = "acme.acme_mean:AcmeMean"
acme-broken = "acme.broken"
acme-gone = "acme.not_there"
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a new environment that sees this one's packages, with the package of docs/plugins.md
    installed: a method named by its module and a backbone named by its class."""
    folder = tmp_path_factory.mktemp("installed")
    source, environment = folder / "source", folder / "environment"
    for kind, name in (("method", "acme-mean"), ("backbone", "acme-model")):
        assert main(["new-plugin", kind, name, "--plugins", str(source / "acme")]) == 0
    (source / "acme/__init__.py").write_text("")
    (source / "acme/broken.py").write_text("import nothing_of_this_name\n")
    (project,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/plugins.md").read_text(encoding="utf-8"), re.DOTALL)
    (source / "pyproject.toml").write_text(project + MORE)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    (site / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    python = environment / "bin" / "python"
    done = subprocess.run([sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install",
                           "--no-index", "--no-build-isolation", "--no-deps", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "acme" / "acme_mean.py").is_file()
    return python


@pytest.fixture
def bench(python, tmp_path):
    """Run a command in that environment, in an empty folder; returns its status, output and errors."""
    def run(*arguments):
        done = subprocess.run([python, "-m", "fedcl_bench", *arguments], cwd=tmp_path, text=True, capture_output=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr
    return run


def test_listed_beside_the_shipped_ones(bench):
    status, out, _ = bench("list")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert status == 0 and "exponentially weighted mean" in lines["acme-mean"] and "f3crec" in lines
    assert "matrix factorisation" in lines["acme-model"]
    assert "entry point acme.broken: ModuleNotFoundError: No module named 'nothing_of_this_name'" in out
    assert "entry point acme.not_there: ModuleNotFoundError: No module named 'acme.not_there'" in out


def test_run_and_grid(bench):
    """Worker processes of a grid find the package as the command does, and its numbers are the same."""
    choice = ["--set", "rounds=1", "--json", "--quiet"]
    status, out, _ = bench("--method", "acme-mean", "--backbone", "acme-model", *choice, "--results", "alone")
    alone = json.loads(out)
    assert status == 0 and (alone["method"], alone["backbone"]) == ("acme-mean", "acme-model")
    status, out, _ = bench("grid", "--methods", "acme-mean", "--backbones", "acme-model", *choice, "--jobs", "1")
    (run,) = json.loads(out)["runs"]
    assert status == 0 and run["new"] and run["hash"] == alone["hash"]


@pytest.mark.parametrize("name, module", [("acme-broken", "acme.broken"), ("acme-gone", "acme.not_there")])
def test_what_cannot_be_imported_fails_when_chosen(bench, name, module):
    status, out, err = bench("--method", name, "--backbone", "fedmf")
    assert status == 2 and out == "" and len(err.splitlines()) == 1
    assert f"method '{name}' cannot be loaded: entry point {module}: ModuleNotFoundError" in err
