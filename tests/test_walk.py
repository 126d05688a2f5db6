"""A new user's way through the suite, ``tests/walk.sh``, from a package that is built and installed for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, install

SCRIPT = ROOT / "tests" / "walk.sh"
PACKAGE = ("fedcl_bench", "plugins", "dataset_configs", "setup.cfg", "setup.py", "pyproject.toml", "README.md",
           "LICENSE")


def installed(folder: Path) -> Path:
    """The programs of a new environment that sees this one's packages, with the suite installed from a copy."""
    source = folder / "source"
    source.mkdir()
    for name in PACKAGE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    site = install(source, folder / "environment", "--force-reinstall")
    assert (site / "fedcl_bench" / "plugins" / "methods" / "f3crec.py").is_file()
    return folder / "environment" / "bin"


@pytest.mark.long
def test_a_new_user_arrives(tmp_path):
    pytest.importorskip("setuptools", reason="needs setuptools to build a package without network")
    programs = installed(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0 and "all 17 steps passed" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
