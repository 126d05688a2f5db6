"""Streams kept as arrays: the same stream, mapped, found only where it is right; and chunks that are not kept."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers import build, train_round

from fedcl_bench.cli.main import main
from fedcl_bench.data import prepared
from fedcl_bench.data.datasets import build_stream, load_stream
from fedcl_bench.data.source import locate
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.data.stream import Stream
from fedcl_bench.data.synth import World, write
from fedcl_bench.core.errors import UserError
from fedcl_bench.federation.parameter_growth import grow, row_width
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.training.sampling import LaterChunk, Needs, make_chunks
from fedcl_bench.plugin.local_settings import LocalSettings
from fedcl_bench.core.tuning import SIZES

SETTINGS = StreamSettings(k_core=0)


@pytest.fixture
def folder(tmp_path):
    write(World(60, 40, per_user=12.0), tmp_path / "w" / "w.inter")
    return tmp_path


def tensors(stream: Stream) -> list:
    found = []
    for step in stream.steps:
        parts = [step.train, step.valid, step.test, *step.sessions.values()]
        found += [getattr(part, name) for part in parts for name in part.__dataclass_fields__]
    return found


def assert_same(one: Stream, other: Stream) -> None:
    for a, b in zip(tensors(one), tensors(other), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    for a, b in zip(one.steps, other.steps, strict=True):
        assert list(a.sessions) == list(b.sessions)
        assert (a.index, a.n_users, a.n_items, a.interactions) == (b.index, b.n_users, b.n_items, b.interactions)
    assert one.user_tokens.tolist() == other.user_tokens.tolist()
    assert one.item_tokens.tolist() == other.item_tokens.tolist()
    assert dict(one.unfiltered) == dict(other.unfiltered)


@pytest.mark.parametrize("settings", [SETTINGS, StreamSettings(stream="static", k_core=0),
                                      StreamSettings(stream="sessions", k_core=0, session_gap=30000.0,
                                                     session_from="gap", session_split="last", min_sessions=3,
                                                     min_session_length=2)])
def test_prepared_stream_is_the_stream(folder, settings):
    source = locate("w", folder, settings)
    built = build_stream(source, settings)
    prepared.save(built, prepared.folder_of(source, settings))
    assert_same(load_stream(source, settings), built)
    assert len(tensors(built)) == (24 if settings.stream == "blocks" else 6) + 12 * (settings.stream == "sessions")
    assert sorted(path.name for path in (folder / "w").iterdir()) == [
        "w.inter", prepared.folder_of(source, settings).name]


def test_arrays_are_mapped_and_never_written_back(folder):
    source = locate("w", folder, SETTINGS)
    kept = prepared.folder_of(source, SETTINGS)
    prepared.save(build_stream(source, SETTINGS), kept)
    stream = load_stream(source, SETTINGS)
    assert isinstance(stream.user_tokens, np.memmap)
    maps = open("/proc/self/maps").read()
    assert str(kept / "0-train-values.npy") in maps
    stream.steps[0].train.values[0] = 10 ** 6
    assert int(load_stream(source, SETTINGS).steps[0].train.values[0]) != 10 ** 6


def test_other_settings_and_changed_files_are_not_mistaken(folder):
    source = locate("w", folder, SETTINGS)
    places = {prepared.folder_of(source, SETTINGS),
              prepared.folder_of(source, StreamSettings(k_core=0, blocks=3)),
              prepared.folder_of(source, StreamSettings(k_core=0, split_seed=1))}
    with open(source.path, "a") as file:
        file.write("60\t3\t1609459200\n")
    places.add(prepared.folder_of(locate("w", folder, SETTINGS), SETTINGS))
    assert len(places) == 4


def test_command_and_a_run_on_it(folder, capsys, monkeypatch):
    data = ["--data-dir", str(folder), "--set", "k_core=0"]
    run = ["--method", "ft", "--backbone", "fedmf", "--dataset", "w", *data, "--set", "rounds=2", "--set", "topk=5",
           "--set", "valid_metric=ndcg@5", "--json", "--quiet", "--results"]
    assert main([*run, str(folder / "a")]) == 0
    before = json.loads(capsys.readouterr().out)
    assert main(["data", "prepare", "w", *data]) == 0
    said = capsys.readouterr().out
    assert "interactions in 4 steps" in said and "wrote: " in said

    def no_reading(*args):
        raise AssertionError("the interactions were read")
    monkeypatch.setattr("fedcl_bench.data.datasets.load_interactions", no_reading)
    assert main([*run, str(folder / "b")]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["hash"] == before["hash"] and after["metrics"] == before["metrics"]


def rolled(path):
    np.save(path, np.roll(np.load(path), 1))


@pytest.mark.parametrize("name, harm", [
    ("stream.json", lambda path: path.write_text("{")), ("stream.json", lambda path: path.unlink()),
    ("stream.json", lambda path: path.write_text(path.read_text().replace('"old_users": 0', '"old_users": 1'))),
    ("1-train-values.npy", lambda path: path.unlink()), ("1-train-values.npy", lambda path: path.write_bytes(b"")),
    ("1-train-values.npy", rolled)])
def test_damage_is_named(folder, name, harm):
    """Also where what is read would be a stream."""
    source = locate("w", folder, SETTINGS)
    kept = prepared.folder_of(source, SETTINGS)
    prepared.save(build_stream(source, SETTINGS), kept)
    harm(kept / name)
    with pytest.raises(UserError, match=f"{kept}: is damaged, {name}: .*\n.*data prepare"):
        load_stream(source, SETTINGS)


@pytest.mark.parametrize(("inner", "settings"), [(True, LocalSettings()),
                                                 (False, LocalSettings(negative_pool="untouched", local_epochs=2))])
def test_chunks_made_later_give_the_same_round(registry, ml100k, monkeypatch, inner, settings):
    step = ml100k.steps[0]
    backbone = build(registry, "backbone", "fedmf")
    model = grow(Snapshot({}, {}), backbone, 0, step, torch.float32, torch.device("cpu"))
    results = []
    for kept in (SIZES.kept_positives, len(step.train.values) - 1):
        monkeypatch.setattr(SIZES, "kept_positives", kept)
        chunks = make_chunks(step, torch.arange(step.n_users), settings, row_width(model, backbone), Needs(inner=inner))
        results.append(train_round(chunks, model, backbone, Method(NoSettings()), settings, 0, 0, 0)[:2])
    assert all(isinstance(chunk, LaterChunk) for chunk in chunks)
    (kept, loss), (later, same) = results
    assert loss == same
    assert all(torch.equal(a, b) for a, b in zip(kept.tables(), later.tables(), strict=True))
    assert not torch.equal(kept.public["item_embedding.weight"], model.public["item_embedding.weight"])
