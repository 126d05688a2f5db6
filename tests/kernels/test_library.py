"""Which library of compiled kernels is loaded, what is said where there is none, and that no other ever is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from fedcl_bench.cli.commands import doctor
from fedcl_bench.kernels import ops, library

OPS = Path(library.__file__).parent
compiled = pytest.mark.skipif(ops.why_not() is not None, reason=f"no compiled kernels: {ops.why_not()}")
PLANTED = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void loaded(void) { fclose(fopen(getenv("WITNESS"), "w")); }
const char *sources(void) { return "%s"; }
"""


@pytest.fixture
def folder(tmp_path):
    """A copy of the folder of the kernels and their sources."""
    for path in (*OPS.glob("kernels*.[ch]"), *OPS.glob("kernels*.so")):
        shutil.copy(path, tmp_path)
    return tmp_path


def loaded_by(process, **environment):
    """What another process says of its kernels, and which files of that name it has in memory."""
    program = ("import re; from fedcl_bench.kernels import ops; print(ops.why_not()); "
               "print(*{line.split()[-1] for line in open('/proc/self/maps') if re.search(r'kernels.*\\.so', line)})")
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=process,
                          env={**os.environ, "PYTHONPATH": str(ROOT), **environment})
    return said.stdout.splitlines()


@compiled
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="does not say what is loaded")
def test_nothing_outside_the_package_is_loaded(tmp_path):
    """Libraries of the right names and sources lie in the working directory, the home folder and its cache."""
    witness, planted = tmp_path / "witness", tmp_path / "planted.so"
    (tmp_path / "planted.c").write_text(PLANTED % library.sources(OPS))
    subprocess.run([*os.environ.get("CC", "cc").split(), "-fPIC", "-shared", tmp_path / "planted.c", "-o", planted],
                   check=True)
    for place in (tmp_path, *map(tmp_path.joinpath, ("fedcl_bench/kernels", "fedcl_bench", ".cache/fedcl_bench"))):
        place.mkdir(parents=True, exist_ok=True)
        for name in (*library.BUILDS, "kernels.so", "libkernels.so"):
            shutil.copy(planted, place / name)
    why, files = loaded_by(tmp_path, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path), WITNESS=str(witness),
                           LD_LIBRARY_PATH=str(tmp_path), FEDCL_BENCH_KERNELS=str(planted), CC=str(planted))
    assert why == "None" and Path(files).parent == OPS
    assert not witness.exists()
    subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(planted)!r})"], check=True,
                   env={**os.environ, "WITNESS": str(witness)})
    assert witness.exists()  # it would have told


def test_switched_off(tmp_path):
    assert loaded_by(tmp_path, FEDCL_BENCH_KERNELS="0")[0] == "switched off by FEDCL_BENCH_KERNELS=0"


@compiled
def test_the_fastest_build_that_the_processor_can_run(folder, monkeypatch):
    assert isinstance(library.load(folder), dict)
    built = [name for name in library.BUILDS if (folder / name).exists()]
    if built == ["kernels_generic.so"]:
        return
    monkeypatch.setattr(library, "processor", lambda: library.BUILDS["kernels_v3.so"])
    (folder / "kernels_v4.so").unlink()
    (folder / "kernels_v4.so").write_text("cannot be run here")
    assert isinstance(library.load(folder), dict)
    monkeypatch.setattr(library, "processor", lambda: frozenset({"avx", "fma"}))
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
