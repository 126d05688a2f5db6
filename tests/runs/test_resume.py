"""Runs that are killed, interrupted, damaged, repeated or shared give the numbers of an uninterrupted run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, same_numbers

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.records.record import Record
from fedcl_bench.runs import runner
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.runner import Interrupted, RunOptions, Watch, execute

ROUNDS = 3
SMALL = {"rounds": ROUNDS, "k_core": 80}


@pytest.fixture
def config(registry):
    return lambda method="f3crec", **settings: make_config(
        registry, method, "fedmf", "ml-100k", overrides=[("test", {**SMALL, **settings})])


@pytest.fixture(scope="module")
def stream(registry):
    config = make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("test", SMALL)])
    return load_stream(config.source, config.stream)


@pytest.fixture(scope="module")
def uninterrupted(registry, stream, tmp_path_factory):
    """The record of the run that nothing disturbed."""
    config = make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("test", SMALL)])
    return execute(config, lambda: stream, tmp_path_factory.mktemp("whole"))


# One process after the other, forked before PyTorch has a thread, trains until it kills itself.
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.records import record
from fedcl_bench.runs import runner
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.model_file import read_model
from fedcl_bench.runs.registry import discover
from fedcl_bench.toolbox.recbole_model import build_model

torch.set_num_threads(1)
build_model("BPR", 1, 1, {"embedding_size": 1})  # imports what each process would else import
config = make_config(discover(), "f3crec", "fedmf", "ml-100k", overrides=[("test", {"rounds": %d, "k_core": 80})])
stream = load_stream(config.source, config.stream)
write = record.write_atomically

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def train(step, round_):
    def watch(stream, progress):
        if step < 4 and (progress.step, progress.round) == (step, round_):
            die()

    def write_then_die(path, content):
        write(path, content)
        if path.name == "users.parquet":
            die()
    if step == 4:  # while the finished record is being written: after its third file
        record.write_atomically = write_then_die
    runner.execute(config, lambda: stream, Path(sys.argv[1]), runner.Watch(watch))

for step, round_ in ((0, 3), (1, 2), (2, 2), (3, 1), (4, 0)):
    child = os.fork()
    if not child:
        try:
            train(step, round_)
        finally:
            os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(ended, (Path(sys.argv[1]) / "runs" / config.name / "run.json").exists())
""" % ROUNDS


def test_killed_in_every_block_and_resumed(uninterrupted, tmp_path, config, stream):
    """SIGKILL in block 0, 1, 2, 3 and while writing, one after the other, then run to the end: bit-identical."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{-signal.SIGKILL} False"] * 5, done.stderr
    notes = []
    found = execute(config(), lambda: stream, tmp_path, Watch(note=notes.append))
    assert notes == ["all blocks are trained, writing the record."]
    same_numbers(found, uninterrupted)


@pytest.mark.parametrize("at", [(0, ROUNDS), (1, 2)])
def test_stopped_inside_a_block_and_resumed(uninterrupted, tmp_path, config, stream, at):
    """Asked to stop, a run saves the very round it is in."""
    seen = []
    with pytest.raises(Interrupted, match="the same command goes on"):
        execute(config(), lambda: stream, tmp_path,
                Watch(lambda _, p: seen.append((p.step, p.round)), stop=lambda: seen[-1] == at))
    notes, later = [], []
    found = execute(config(), lambda: stream, tmp_path,
                    Watch(lambda _, p: later.append((p.step, p.round)), note=notes.append))
    assert notes == [f"resuming in block {at[0]}, after round {at[1]}."]
    assert at not in later and len(later) + len(seen) == 4 * (ROUNDS + 1)  # no round was trained twice
    same_numbers(found, uninterrupted)


def test_saved_every_now_and_then(uninterrupted, tmp_path, config, stream, monkeypatch):
    """A crash loses at most the time between two checkpoints."""
    monkeypatch.setattr(runner, "SAVE_EVERY", 0.0)

    def crash(_, progress):
        if (progress.step, progress.round) == (2, 2):
            raise RuntimeError("power cut")
    with pytest.raises(RuntimeError):
        execute(config(), lambda: stream, tmp_path, Watch(crash))
    later = []
    found = execute(config(), lambda: stream, tmp_path, Watch(lambda _, p: later.append((p.step, p.round))))
    assert later[0] == (2, 2)
    same_numbers(found, uninterrupted)


# The command line in two processes, of which one is asked to stop after round 2 of block 1 and the other of block 2.
# All that takes long to import is imported before they part.
ASKED = """
import os, signal, sys
import torch
from fedcl_bench.cli.main import main
from fedcl_bench.api.progress_bars import Display
from fedcl_bench.data import datasets
from fedcl_bench.runs import runner
from fedcl_bench.toolbox.recbole_model import build_model

build_model("BPR", 1, 1, {"embedding_size": 1})

def asked(signal, step):
    update = Display.update

    def watched(self, stream, progress):
        update(self, stream, progress)
        if (progress.step, progress.round) == (step, 2):
            os.kill(os.getpid(), signal)
    Display.update = watched
    sys.exit(main(sys.argv[1:]))

for number, step in ((signal.SIGINT, 1), (signal.SIGTERM, 2)):
    child = os.fork()
    if not child:
        asked(number, step)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 130:
        sys.exit("another status")
"""


def test_asked_to_stop_on_the_command_line(tmp_path, capsys):
    """Ctrl-C and a scheduler's SIGTERM end the process with status 130 and one line; the same command goes on."""
    arguments = ["--method", "kd", "--backbone", "fedmf", "--set", "rounds=3", "--set", "k_core=80",
                 "--results", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", ASKED, *arguments, "--threads", "1"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0 and done.stdout == "" and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("the same command goes on from there") == 2 and "resuming in block 1" in done.stderr
    results = []
    for extra in ([], ["--results", str(tmp_path / "whole")]):
        assert main([*arguments, "--json", *extra]) == 0
        captured = capsys.readouterr()
        assert ("resuming in block 2" in captured.err) == (not extra)
        results.append(json.loads(captured.out))
    same_numbers(*results)


@pytest.fixture
def finished(uninterrupted, tmp_path):
    """A results folder that has the run."""
    return Path(shutil.copytree(Path(uninterrupted["record"]).parents[1], tmp_path / "results"))


def test_finished_runs_are_not_run_again(uninterrupted, finished, config, stream):
    def never():
        raise AssertionError("a finished run must not even load its data")
    again = execute(config(), never, finished)
    assert again["reused"] and again["seconds"] == uninterrupted["seconds"]
    rerun = execute(config(), lambda: stream, finished, options=RunOptions(rerun=True))
    assert not rerun["reused"] and not rerun["block0_shared"]
    same_numbers(rerun, uninterrupted)


def test_block_0_is_shared_between_methods(uninterrupted, tmp_path, config, stream):
    """FT first; F3CRec then trains blocks 1-3 only, with the numbers it would have had alone."""
    execute(config("ft"), lambda: stream, tmp_path)
    later = []
    found = execute(config(), lambda: stream, tmp_path, Watch(lambda _, p: later.append(p.step)))
    assert found["block0_shared"] and found["rounds"][0] == ROUNDS and later.count(0) == 0
    same_numbers(found, uninterrupted)


@pytest.mark.parametrize("name, change, says", [
    ("run.json", lambda path: path.write_bytes(path.read_bytes()[:500]), "run.json: is no JSON text"),
    ("users.parquet", lambda path: path.write_bytes(path.read_bytes()[:-100]), "users.parquet: has changed"),
    ("rounds.parquet", Path.unlink, "rounds.parquet: is missing")])
def test_damaged_files_are_set_aside(uninterrupted, finished, config, stream, name, change, says):
    """Half-written, changed or missing files are noticed, kept beside, and the run repeated."""
    folder, warnings = finished / "runs" / config().name, []
    change(folder / name)
    found = execute(config(), lambda: stream, finished, Watch(warn=warnings.append))
    assert len(warnings) == 1 and says in warnings[0] and "set aside" in warnings[0] and not found["reused"]
    assert len(list(folder.parent.glob("*.corrupt*"))) == 1
    same_numbers(found, uninterrupted)


def test_two_processes_at_one_run(tmp_path, config, stream):
    record = Record(tmp_path / "runs" / config().name)
    with record.locked():
        with pytest.raises(UserError, match="another process is at this run"):
            execute(config(), lambda: stream, tmp_path)


def test_the_hash_covers_what_changes_results(registry, config, tmp_path):
    base = config()
    for changed in (config("kd"), config(eps=0.001), config(lr=0.9), config(inc_split="random"),
                    make_config(registry, "f3crec", "fedmf", "ml-100k", 1, [("test", SMALL)])):
        assert changed.hash != base.hash
    assert config(eps=0.001).base_hash == base.base_hash == config("ft").base_hash
    for settings in ({"upload_noise": 0.1}, {"lr": 0.5}):  # another learning rate is another block 0
        assert config(**settings).base_hash != base.base_hash


def test_a_stream_of_one_step_leaves_no_shared_block(tmp_path, monkeypatch, capsys):
    """There is no later block in which methods would differ, so nothing of it is kept for others."""
    monkeypatch.chdir(tmp_path)
    assert main(["--method", "ft", "--backbone", "fedmf", "--set", "stream=static", "--set", "rounds=1", "--set",
                 "k_core=80", "--json"]) == 0
    assert not (tmp_path / "results" / "shared").exists() and len(list((tmp_path / "results" / "runs").iterdir())) == 1
