"""A new user's way through the suite, ``tests/walk.sh``, from a package that is built and installed for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers import ROOT

SCRIPT = ROOT / "tests" / "walk.sh"
PACKAGE = ("fedcl_bench", "plugins", "dataset_configs", "setup.cfg", "setup.py", "pyproject.toml", "README.md",
           "LICENSE")


def installed(folder: Path) -> Path:
    """The programs of a new environment that sees this one's packages, with the suite installed from a copy."""
    source, environment = folder / "source", folder / "environment"
    source.mkdir()
    for name in PACKAGE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    (site / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    done = subprocess.run([sys.executable, "-m", "pip", "--python", environment / "bin" / "python",
                           "--disable-pip-version-check", "install", "--no-index", "--no-build-isolation", "--no-deps",
                           "--force-reinstall", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "fedcl_bench" / "plugins" / "f3crec.py").is_file()
    return environment / "bin"


def test_the_walk_has_25_steps():
    text = SCRIPT.read_text()
    assert len(re.findall(r"^step \"", text, re.MULTILINE)) == 25 and os.access(SCRIPT, os.X_OK)
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0


@pytest.mark.long
def test_a_new_user_arrives(tmp_path):
    pytest.importorskip("setuptools", reason="needs setuptools to build a package without network")
    programs = installed(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0 and "all 25 steps passed" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
