"""Which library of compiled kernels is loaded, and what is said where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from fedcl_bench.cli.commands import doctor
from fedcl_bench.kernels import ops, library

OPS = Path(library.__file__).parent
compiled = pytest.mark.skipif(ops.why_not() is not None, reason=f"no compiled kernels: {ops.why_not()}")


@pytest.fixture
def folder(tmp_path):
    """A copy of the folder of the kernels and their sources."""
    for path in (*OPS.glob("kernels*.[ch]"), *OPS.glob("kernels*.so")):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_switched_off(monkeypatch):
    monkeypatch.setenv("FEDCL_BENCH_KERNELS", "0")
    assert library._loaded.__wrapped__() == "switched off by FEDCL_BENCH_KERNELS=0"


@compiled
def test_the_fastest_build_that_the_processor_can_run(folder, monkeypatch):
    assert isinstance(library.load(folder), dict)
    built = [name for name in library.BUILDS if (folder / name).exists()]
    if built == ["kernels_generic.so"]:
        return
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    (folder / "kernels_v4.so").unlink()
    (folder / "kernels_v4.so").write_text("cannot be run here")
    assert isinstance(library.load(folder), dict)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert library.load(folder) == "compiled kernels need a processor with AVX2 or AVX-512 (x86-64-v3 or x86-64-v4)"


@compiled
def test_what_does_not_fit_is_not_used(folder):
    with open(folder / "kernels_real.h", "a") as file:
        file.write("/* a change */\n")
    assert library.load(folder).startswith("compiled kernels were built from other sources: install fedcl_bench again")


def test_a_broken_library(folder):
    for name in library.BUILDS:
        (folder / name).write_bytes(b"no library")
    assert library.load(folder).startswith("compiled kernels cannot be loaded (")


def test_doctor_says_what_to_do(tmp_path, monkeypatch):
    why = library.load(tmp_path)
    assert why == ("compiled kernels were not built: install gcc (11 or later) or clang (12 or later), then install "
                   "fedcl_bench again (in its folder: python -m pip install -e .)")
    monkeypatch.setattr(ops, "why_not", lambda: why)
    assert doctor._kernels().startswith(f"optional: {why}; PyTorch's operations are used")


def test_a_package_is_built_without_a_compiler(folder, compiler="no-such-compiler"):
    """Without kernels, and with the older ones gone where there were some."""
    pytest.importorskip("setuptools")
    source, ops = folder / "source", folder / "source/fedcl_bench/kernels"
    ops.mkdir(parents=True)
    for path in (ROOT / "setup.py", *folder.glob("kernels*.[ch]")):
        shutil.copy(path, source if path.name == "setup.py" else ops)
    done = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=source, capture_output=True,
                          text=True, env={**os.environ, "CC": compiler})
    assert done.returncode == 0, done.stderr
    assert not list(ops.glob("*.so")) and "fedcl_bench.kernels.kernels_" in done.stderr
