"""A disk that is full, or a limit on the size of files: one clear error with the path, and what was there stays."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from helpers import ROOT

from fedcl_bench.cli import main as command
from fedcl_bench.cli.main import main
from fedcl_bench.data.streams import prepared
from fedcl_bench.core.errors import UserError
from fedcl_bench.core.files import replacing, write_atomically


@contextmanager
def files_of(size):
    """No file of this process grows beyond so many bytes; of bytecode Python would leave a part, so it writes none."""
    before, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = bytecode


def save_tensor(path):
    with replacing(path) as file:
        torch.save(torch.zeros(10 ** 5), file)


@pytest.mark.parametrize("write", [save_tensor, lambda path: write_atomically(path, bytes(10 ** 5)),
                                   lambda path: write_atomically(path, bytes(5000))], ids=["torch", "large", "small"])
def test_a_file_that_does_not_fit(write, tmp_path):
    """Also where the bytes wait in a buffer until the end; nothing half written is left."""
    path = tmp_path / "kept.pt"
    path.write_bytes(b"before")
    with files_of(4096), pytest.raises(UserError) as error:
        write(path)
    assert str(error.value).startswith(f"no space left at {path} (File too large): it is not written.\n")
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["kept.pt"]
    write(path)
    assert path.read_bytes() != b"before"


def test_a_run_whose_checkpoint_does_not_fit(tmp_path, capsys):
    """And goes on when there is space again."""
    run = ["--method", "ft", "--backbone", "fedmf", "--results", str(tmp_path), "--quiet"]
    run += [word for text in ("k_core=80", "rounds=1", "dim=8", "blocks=2") for word in ("--set", text)]
    with files_of(2048):
        assert main(run) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"run_bench.py: no space left at {tmp_path}") and len(said) == 2
    assert not list(tmp_path.rglob(".*.pt.*"))
    assert main(run) == 0


def test_prepared_data_that_does_not_fit(ml100k, tmp_path):
    with files_of(2048), pytest.raises(UserError, match="w.stream-1: cannot be written .no space left"):
        prepared.save(ml100k, tmp_path / "w.stream-1")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_whatever_else_a_command_writes(monkeypatch, capsys, number):
    def full(arguments):
        raise OSError(number, os.strerror(number), "some/file.csv")
    monkeypatch.setattr(command, "parse", full)
    assert main(["list"]) == 2
    assert f"no space left at some/file.csv ({os.strerror(number)})" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError(), ValueError("Error tokenizing data. C error: out of memory"),
                                   RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")])
def test_no_memory_before_a_run(monkeypatch, capsys, error):
    def full(arguments):
        raise error
    monkeypatch.setattr(command, "parse", full)
    assert main(["list"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("run_bench.py: out of memory (") and said[1].startswith("What helps: ")


ON_FULL_DISKS = """
import contextlib, io, subprocess, sys
from fedcl_bench.cli.main import main
disk, sizes = sys.argv[1], sys.argv[2:]
run = ["--method", "kd", "--backbone", "fedmf", "--results", disk + "/results", "--quiet", "--set", "k_core=80"]
run += [word for text in ("rounds=1", "dim=8", "blocks=2") for word in ("--set", text)]
for size in sizes:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], check=True)
    messages = io.StringIO()
    with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(io.StringIO()):
        status = main(run)
    print(size, status, messages.getvalue().replace("\\n", "|"))
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(run) == 0  # there is room again
    subprocess.run(["umount", disk], check=True)
"""


@pytest.mark.skipif(subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"],
                                   capture_output=True).returncode != 0 if shutil.which("unshare") else True,
                    reason="needs to mount a file system of its own")
@pytest.mark.parametrize("sizes", [[8, 64], pytest.param(list(range(4, 260, 8)), marks=pytest.mark.long)])
def test_a_run_on_a_disk_that_is_full(sizes, tmp_path):
    """Before the run or at whichever file it fills: lines that name the path; it goes on when there is room."""
    done = subprocess.run(["unshare", "-rm", sys.executable, "-c", ON_FULL_DISKS, str(tmp_path), *map(str, sizes)],
                          cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        size, status, messages = line.split(" ", 2)
        said = messages.rstrip("|").split("|")
        before = f"results folder {tmp_path}/results: not enough room: " in said[0] and len(said) in (2, 3)
        refused = status == "2" and (before or "no space left at" in said[0] and len(said) == 2)
        assert not messages if status == "0" else refused, line
    assert len(done.stdout.splitlines()) == len(sizes)
