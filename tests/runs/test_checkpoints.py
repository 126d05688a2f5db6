"""Checkpoints: every one that a run writes is gone on from; a damaged or another run's is set aside, and the run begins
afresh."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from fedcl_bench.data.datasets import build_stream
from fedcl_bench.federation.loop import run
from fedcl_bench.runs import checkpoints
from fedcl_bench.runs.checkpoints import load_progress, save_progress
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.runner import Interrupted, Watch, execute
from fedcl_bench.core.tuning import SIZES

BLOCKS = {"k_core": 80, "blocks": 3, "rounds": 2}
SESSIONS = {"stream": "sessions", "min_session_length": 5, "min_sessions": 8, "rounds": 1, "max_length": 5, "dim": 8}
RUNS = {
    "blocks": ("f3crec", "fedmf", {**BLOCKS, "fold_in": 3}),
    "own tables": ("kd", "fedrap", BLOCKS),
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


def flipped(content):
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    return bytes(changed)


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
    (lambda content, path: content[:len(content) // 2], "its hash does not match its content"),
    (lambda content, path: b"", "its hash does not match its content"),
    (lambda content, path: flipped(content), "its hash does not match its content"),
    (packed(lambda value: value.update(version=0)), "not a checkpoint of this version: found 0, accepted: 2"),
    (packed(lambda value: value.pop("version")), "not a checkpoint of this version: found None, accepted: 2"),
    (packed(lambda value: value.update(run="0123")), "is of another run: found the hash 0123, accepted: "),
    (packed(narrower), "found float32 (276, 3) as table 'public.item_embedding.weight', accepted: float32 (276, 32)"),
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
