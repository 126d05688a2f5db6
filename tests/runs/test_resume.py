"""Runs that are killed, interrupted, damaged, repeated or shared give the numbers of an uninterrupted run. Every
checkpoint that a run writes is gone on from; a damaged or another run's is set aside, and the run begins afresh."""

import json
import shutil
import signal
import tracemalloc
from pathlib import Path

import pytest
import torch
from helpers import same_numbers

from fedcl_bench.api.progress_bars import Display
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.core.tuning import SIZES
from fedcl_bench.data.datasets import build_stream, load_stream
from fedcl_bench.federation.loop import run
from fedcl_bench.records import record as record_files
from fedcl_bench.records.record import Record
from fedcl_bench.runs import checkpoints, runner
from fedcl_bench.runs.checkpoints import load_progress, save_progress
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_asked_to_stop(uninterrupted, tmp_path, capsys, monkeypatch, number):
    """Ctrl-C and a scheduler's SIGTERM end it with status 130; the same command then has the numbers to the bit."""
    command = ["--method", "f3crec", "--backbone", "fedmf", "--set", f"rounds={ROUNDS}", "--set", "k_core=80",
               "--results", str(tmp_path)]
    update = Display.update

    def asked(self, stream, progress):
        update(self, stream, progress)
        if (progress.step, progress.round) == (1, 2):
            signal.raise_signal(number)
    with monkeypatch.context() as patch:
        patch.setattr(Display, "update", asked)
        assert main(command) == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr()
    assert "resuming in block 1, after round 2" in said.err
    same_numbers(json.loads(said.out), json.loads(json.dumps(uninterrupted, default=str)))


class PowerCut(BaseException):
    """Nothing catches it, as nothing does SIGKILL (see tests/hostile/test_kills.py)."""


def test_cut_off_again_and_again(uninterrupted, tmp_path, config, stream, monkeypatch):
    """In block 0, 1, 2, 3 and while the record is written, one after the other; whoever goes on has the numbers."""
    write = record_files.write_atomically

    def train(step, round_):
        def watch(_, progress):
            if (progress.step, progress.round) == (step, round_):
                raise PowerCut
        with pytest.raises(PowerCut):
            execute(config(), lambda: stream, tmp_path, Watch(watch))

    def write_some(path, content):
        write(path, content)
        if path.name == "users.parquet":  # the third file
            raise PowerCut
    for place in ((0, 3), (1, 2), (2, 2), (3, 1)):
        train(*place)
    with monkeypatch.context() as patch:
        patch.setattr(record_files, "write_atomically", write_some)
        train(4, None)
    assert not (tmp_path / "runs" / config().name / "run.json").exists()
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


@pytest.fixture
def finished(uninterrupted, tmp_path):
    """A results folder that has the run."""
    return Path(shutil.copytree(Path(uninterrupted["record"]).parents[1], tmp_path / "results"))


def test_finished_runs_are_not_run_again_nor_one_by_two_processes(uninterrupted, finished, config, stream, tmp_path):
    def never():
        raise AssertionError("a finished run must not even load its data")
    again = execute(config(), never, finished)
    assert again["reused"] and again["seconds"] == uninterrupted["seconds"]
    rerun = execute(config(), lambda: stream, finished, options=RunOptions(rerun=True))
    assert not rerun["reused"] and not rerun["block0_shared"]
    same_numbers(rerun, uninterrupted)
    record = Record(tmp_path / "runs" / config().name)
    with record.locked():
        with pytest.raises(UserError, match="another process is at this run"):
            execute(config(), lambda: stream, tmp_path)


def test_block_0_is_shared_between_methods(uninterrupted, tmp_path, config, stream):
    """FT first; F3CRec then trains blocks 1-3 only, with the numbers it would have had alone."""
    execute(config("ft"), lambda: stream, tmp_path)
    later = []
    found = execute(config(), lambda: stream, tmp_path, Watch(lambda _, p: later.append(p.step)))
    assert found["block0_shared"] and found["rounds"][0] == ROUNDS and later.count(0) == 0
    same_numbers(found, uninterrupted)


def test_damaged_files_are_set_aside(uninterrupted, finished, config, stream):
    """Half-written, changed or missing files are noticed, kept beside, and the run repeated."""
    folder, whole = finished / "runs" / config().name, finished / "whole"
    shutil.copytree(folder, whole)
    for name, change, says in (
            ("run.json", lambda path: path.write_bytes(path.read_bytes()[:500]), "run.json: is no JSON text"),
            ("users.parquet", lambda path: path.write_bytes(path.read_bytes()[:-100]), "users.parquet: has changed"),
            ("rounds.parquet", Path.unlink, "rounds.parquet: is missing")):
        shutil.rmtree(finished / "runs")
        shutil.copytree(whole, folder)
        change(folder / name)
        warnings = []
        with pytest.raises(Interrupted):
            execute(config(), lambda: stream, finished, Watch(warn=warnings.append, stop=lambda: True))
        assert len(warnings) == 1 and says in warnings[0] and "set aside" in warnings[0]
        assert len(list(folder.parent.glob("*.corrupt*"))) == 1
    found = execute(config(), lambda: stream, finished)
    assert not found["reused"]
    same_numbers(found, uninterrupted)


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


BLOCKS = {"k_core": 80, "blocks": 3, "rounds": 2, "dim": 8}
SESSIONS = {"stream": "sessions", "min_session_length": 5, "min_sessions": 8, "rounds": 1, "max_length": 5, "dim": 8}
RUNS = {
    "blocks": ("f3crec", "fedmf", {**BLOCKS, "fold_in": 3}),
    "own tables": ("kd", "fedrap", {**BLOCKS, "rounds": 1}),
    "static": ("ft", "fedmf", {"stream": "static", "k_core": 80, "rounds": 1}),
    "sessions": ("fcucr", "sasrec", SESSIONS),
    "memory": ("ft", "hearint", SESSIONS),
    "one client": ("ft", "sasrec", {**SESSIONS, "topology": "central"})}


@pytest.fixture(scope="module")
def made(registry):
    """A function: configuration and parts of one of the runs, with a stream that is built once."""
    streams = {}

    def make(name):
        method, backbone, settings = RUNS[name]
        config = make_config(registry, method, backbone, "ml-100k", 0, [("test", settings)])
        if name not in streams:
            streams[name] = build_stream(config.source, config.stream)
        return config, config.federation(streams[name])
    return make


@pytest.mark.parametrize("name", RUNS)
def test_runs_go_on_from_whatever_they_write(made, tmp_path, monkeypatch, name):
    monkeypatch.setattr(SIZES, "report_every", 0.05)
    for progress in run(made(name)[1]):
        other = made(name)[1]
        save_progress(tmp_path / "kept.pt", progress, 1.0, "a run")
        assert load_progress(tmp_path / "kept.pt", "cpu", other, "a run")[0].round == progress.round
        assert not other.method.client_state and not other.method.server_state


@pytest.fixture(scope="module")
def half(made, tmp_path_factory):
    """The bytes of a checkpoint after the first round of the second block, and the matrix that its run ends with."""
    results, seen = tmp_path_factory.mktemp("half"), []
    config, f = made("blocks")
    with pytest.raises(Interrupted):
        execute(config, lambda: f.stream, results,
                Watch(lambda stream, p: seen.append((p.step, p.round)), stop=lambda: seen[-1] == (1, 1)))
    (path,) = results.glob("runs/*/checkpoint.pt")
    content = path.read_bytes()
    return content, execute(config, lambda: f.stream, results)["matrix"]


def packed(change):
    """A change to what a checkpoint holds, under a checksum that fits."""
    def changed(content, path):
        path.write_bytes(content)
        value = checkpoints.unpack(path, "cpu")
        change(value)
        checkpoints.write_packed(path, value)
        return path.read_bytes()
    return changed


def narrower(value):
    tables = value["progress"]["model"]["public"]
    tables.update({name: table[:, :3].clone() for name, table in tables.items()})


@pytest.mark.parametrize("change, says", [
    (packed(lambda value: value.update(version=0)), "not a checkpoint of this version: found 0, accepted: 3"),
    (packed(lambda value: value.pop("version")), "not a checkpoint of this version: found None, accepted: 3"),
    (packed(lambda value: value.update(run="0123")), "is of another run: found the hash 0123, accepted: "),
    (packed(narrower), "found float32 (276, 3) as table 'public.item_embedding.weight', accepted: float32 (276, 8)"),
    (packed(lambda value: value["progress"]["model"].update(private={})), "found none as table 'private.")])
def test_one_that_does_not_fit_is_set_aside(half, made, tmp_path, change, says):
    """The run ends with its numbers all the same."""
    content, matrix = half
    config, f = made("blocks")
    path, warnings = tmp_path / "runs" / config.name / "checkpoint.pt", []
    path.parent.mkdir(parents=True)
    path.write_bytes(change(content, path))
    done = execute(config, lambda: f.stream, tmp_path, Watch(warn=warnings.append))
    assert len(warnings) == 1 and says in warnings[0] and str(path) in warnings[0]
    assert warnings[0].endswith("set aside as checkpoint.corrupt, starting afresh.") and done["matrix"] == matrix


def test_a_shared_block_is_one_that_has_ended(half, made, tmp_path):
    """Another checkpoint in its place is set aside."""
    config, f = made("blocks")
    path, warnings = config.base_file(tmp_path), []
    path.parent.mkdir(parents=True)
    path.write_bytes(packed(lambda value: value.update(run=config.base_hash))(half[0], path))
    done = execute(config, lambda: f.stream, tmp_path, Watch(warn=warnings.append))
    assert len(warnings) == 1 and "is no block 0 that has ended; set aside as" in warnings[0]
    assert done["matrix"] == half[1]


def test_reading_holds_little_besides_the_tensors(tmp_path):
    """Not the bytes of the file, which a run of many clients has no room for twice."""
    held, table = tmp_path / "a.pt", torch.arange(6_000_000.0)
    checkpoints.write_packed(held, {"table": table})
    tracemalloc.start()  # of Python's own memory, in which files are read; that of tensors is PyTorch's
    found = checkpoints.unpack(held, "cpu")["table"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(found, table) and peak < 0.6 * table.nbytes
