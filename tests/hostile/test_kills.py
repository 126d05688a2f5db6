"""A process that is killed at any point of what it writes leaves nothing behind, and its work is done again alike."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from fedcl_bench.core import files
from fedcl_bench.cli.main import main


@pytest.mark.long
@pytest.mark.parametrize("job, kills", [("run", 150), ("rerun", 45), ("pack", 99)])
def test_killed_while_writing(job, kills, tmp_path):
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, str(here / "killed.py"), job, str(tmp_path), str(kills)], cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == kills or job == "pack" and len(results) > 8
    wrong = [found for found in results if not (found["killed"] and found["ended"] and found["same"])
             or found["left"] or found["missing"]]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.fixture
def dead():
    """How names end of what a process made that is no more."""
    child = subprocess.Popen(["true"])
    child.wait()
    return f"{platform.node()}-{child.pid}-abc.part"


def test_only_what_nobody_writes_is_swept(tmp_path, dead):
    for name in (f".run.json.{dead}", ".notes.txt", f".run.json.elsewhere{dead}"):
        (tmp_path / name).touch()
    with files.replacing(tmp_path / "run.json") as file:
        file.write(b"new")
        files.sweep(tmp_path)
        assert len(list(tmp_path.glob(".run.json.*"))) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", ".notes.txt", f".run.json.elsewhere{dead}"}


def test_folders_of_dead_processes_go_and_others_stay(tmp_path, dead):
    """Of the same path alone, and not while somebody fills them."""
    for name in (f".prepared.{dead}", f".other.{dead}", ".prepared.mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with files.folder_beside(tmp_path / "prepared") as first:
        with files.folder_beside(tmp_path / "prepared") as second:
            assert first.is_dir() and second.is_dir() and first != second
    assert {path.name for path in tmp_path.iterdir()} == {f".other.{dead}", ".prepared.mine"}


def test_a_stale_checkpoint_goes_and_a_folder_of_the_users_stays(tmp_path, monkeypatch, dead):
    monkeypatch.chdir(tmp_path)
    job = ["--method", "ft", "--backbone", "fedmf", "--set", "rounds=1", "--set", "k_core=80", "--quiet"]
    assert main(job) == 0
    (folder,) = Path("results/runs").iterdir()
    (folder / "checkpoint.pt").write_bytes(b"of a process that was killed")
    Path(f"results/shared/.x.pt.{dead}").touch()
    assert main(job) == 0
    assert not (folder / "checkpoint.pt").exists() and len(list(Path("results/shared").iterdir())) == 1
    (folder / "plots").mkdir()
    (folder / "plots" / "mine.png").touch()
    assert main([*job, "--rerun", "--log", f"csv:{folder}/plots/mine.png/x"]) == 2
    assert (folder / "run.json").exists()  # the run that takes its place cannot begin
    assert main([*job, "--rerun"]) == 0
    assert (folder / "plots" / "mine.png").exists()
