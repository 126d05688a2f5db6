"""Plugins of an installed package: a real one is built and installed in an environment of its own and used there."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
from helpers import ROOT, install

from fedcl_bench.cli.main import main

pytest.importorskip("setuptools", reason="needs setuptools to build a package without network")
pytestmark = pytest.mark.long  # tests/runs/test_registry.py has entry points without an environment of their own
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
    source = folder / "source"
    for kind, name in (("method", "acme-mean"), ("backbone", "acme-model")):
        assert main(["new-plugin", kind, name, "--plugins", str(source / "acme")]) == 0
    (source / "acme/__init__.py").write_text("")
    (source / "acme/broken.py").write_text("import nothing_of_this_name\n")
    (project,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/plugins.md").read_text(encoding="utf-8"), re.DOTALL)
    (source / "pyproject.toml").write_text(project + MORE)
    assert (install(source, folder / "environment") / "acme" / "acme_mean.py").is_file()
    return folder / "environment" / "bin" / "python"


# Commands one after the other in one process, as most of a command's time is PyTorch's import.
COMMANDS = """
import contextlib, io, json, sys
from fedcl_bench.cli.main import main

if __name__ == "__main__":
    found = []
    for arguments in json.loads(sys.argv[1]):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
        assert "Traceback" not in err.getvalue(), err.getvalue()
        found.append((status, out.getvalue(), err.getvalue()))
    print(json.dumps(found))
"""
CHOICE = ["--set", "rounds=1", "--json", "--quiet"]


@pytest.fixture(scope="module")
def found(python, tmp_path_factory):
    """Status, output and errors of commands in that environment, in an empty folder."""
    commands = {"list": ["list"],
                "run": ["--method", "acme-mean", "--backbone", "acme-model", *CHOICE, "--results", "alone"],
                "grid": ["grid", "--methods", "acme-mean", "--backbones", "acme-model", *CHOICE, "--jobs", "1"],
                **{name: ["--method", name, "--backbone", "fedmf"] for name in ("acme-broken", "acme-gone")}}
    folder = tmp_path_factory.mktemp("empty")
    (folder / "commands.py").write_text(COMMANDS)
    done = subprocess.run([python, "commands.py", json.dumps(list(commands.values()))], cwd=folder, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, json.loads(done.stdout)))


def test_listed_beside_the_shipped_ones(found):
    status, out, _ = found["list"]
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert status == 0 and "exponentially weighted mean" in lines["acme-mean"] and "f3crec" in lines
    assert "matrix factorisation" in lines["acme-model"]
    assert "entry point acme.broken: ModuleNotFoundError: No module named 'nothing_of_this_name'" in out
    assert "entry point acme.not_there: ModuleNotFoundError: No module named 'acme.not_there'" in out


def test_run_and_grid(found):
    """Worker processes of a grid find the package as the command does, and its numbers are the same."""
    status, out, _ = found["run"]
    alone = json.loads(out)
    assert status == 0 and (alone["method"], alone["backbone"]) == ("acme-mean", "acme-model")
    status, out, _ = found["grid"]
    (run,) = json.loads(out)["runs"]
    assert status == 0 and run["new"] and run["hash"] == alone["hash"]


@pytest.mark.parametrize("name, module", [("acme-broken", "acme.broken"), ("acme-gone", "acme.not_there")])
def test_what_cannot_be_imported_fails_when_chosen(found, name, module):
    status, out, err = found[name]
    assert status == 2 and out == "" and len(err.splitlines()) == 1
    assert f"method '{name}' cannot be loaded: entry point {module}: ModuleNotFoundError" in err
