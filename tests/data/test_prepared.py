"""Streams kept as arrays: the same stream, mapped, found only where it is right; and chunks that are not kept."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import build, train_round

from fedcl_bench.cli.main import main
from fedcl_bench.data import prepared
from fedcl_bench.data.datasets import build_stream, load_stream
from fedcl_bench.data.source import locate
from fedcl_bench.data.stream import Ragged, Stream, StreamSettings
from fedcl_bench.data.synth import World, write
from fedcl_bench.core.errors import UserError
from fedcl_bench.federation.parameter_growth import grow, row_width
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.runs.config import make_config
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
        assert all(getattr(a, name) == getattr(b, name) for name in prepared._NUMBERS)
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


@pytest.mark.parametrize("harm", [lambda folder: (folder / "stream.json").write_text("{"),
                                  lambda folder: (folder / "stream.json").unlink(),
                                  lambda folder: (folder / "1-train-values.npy").unlink(),
                                  lambda folder: (folder / "1-train-values.npy").write_bytes(b"")])
def test_damaged_folder_is_named(folder, harm):
    source = locate("w", folder, SETTINGS)
    kept = prepared.folder_of(source, SETTINGS)
    prepared.save(build_stream(source, SETTINGS), kept)
    harm(kept)
    with pytest.raises(UserError, match=f"{kept}: is damaged, (stream.json|1-train-values.npy): .*\n.*data prepare"):
        load_stream(source, SETTINGS)


SESSIONS = StreamSettings(stream="sessions", k_core=0, session_gap=30000.0)


def altered(folder, file, change, settings=SETTINGS):
    """A prepared folder in which one array is another."""
    source = locate("w", folder, settings)
    kept = prepared.folder_of(source, settings)
    prepared.save(build_stream(source, settings), kept)
    np.save(kept / file, change(np.load(kept / file)))
    return source, kept


def first_is(value):
    return lambda values: np.concatenate([np.array([value], values.dtype), values[1:]])


@pytest.mark.parametrize("change", [first_is(1), lambda values: np.roll(values, 1), lambda values: values[:-1],
                                    first_is(10 ** 9), lambda values: values.astype(np.int32)])
def test_other_content_is_seen(folder, change):
    """Also where it would be a stream."""
    source, kept = altered(folder, "0-train-values.npy", change)
    with pytest.raises(UserError, match="0-train-values.npy: its content is not what was written"):
        load_stream(source, SETTINGS)


def test_other_numbers_of_steps_are_seen(folder):
    source, kept = altered(folder, "0-train-values.npy", lambda values: values)
    about = (kept / "stream.json").read_text()
    (kept / "stream.json").write_text(about.replace('"old_users": 0', '"old_users": 1'))
    with pytest.raises(UserError, match="stream.json: its content is not what was written, or is of a former version"):
        load_stream(source, SETTINGS)


@pytest.mark.parametrize("settings, file, change, wrong", [
    (SETTINGS, "0-train-values.npy", first_is(10 ** 9), r"holds ids from 0 to 1000000000, expected ids from 0 to \d+"),
    (SETTINGS, "1-test-values.npy", first_is(-5), "holds ids from -5 to"),
    (SETTINGS, "0-valid-values.npy", lambda values: values.astype(np.int32), "holds int32 of shape"),
    (SETTINGS, "0-valid-values.npy", lambda values: values.astype(float), "holds float64 of shape"),
    (SETTINGS, "0-valid-values.npy", lambda values: values[:, None], "expected a list of int64"),
    (SETTINGS, "2-train-values.npy", lambda values: values[:-1], "2-train-indptr.npy: is not the ascending ends of"),
    (SETTINGS, "2-train-indptr.npy", lambda ends: ends[:-1], "is not the ascending ends of"),
    (SETTINGS, "2-train-indptr.npy", first_is(-8), "is not the ascending ends of"),
    (SETTINGS, "2-train-indptr.npy", lambda ends: np.concatenate([[0], ends[:0:-1][1:], ends[-1:]]), "ascending ends"),
    (SETTINGS, "items.npy", lambda names: names[:-1], "stream.json: the last step does not have the users and items"),
    (SESSIONS, "0-train-sessions-items.npy", first_is(-1), "holds ids from -1 to"),
    (SESSIONS, "0-test-sessions-start.npy", lambda ends: ends[::-1], "is not the ascending ends of"),
    (SESSIONS, "0-train-sessions-of_user.npy", lambda ends: ends + 1, "is not the ascending ends of"),
    (SESSIONS, "0-train-sessions-times.npy", lambda times: times[1:], "holds \\d+ times of \\d+ interactions")])
def test_what_is_no_stream_is_refused_whatever_its_digest(folder, monkeypatch, settings, file, change, wrong):
    """Compiled code would read far outside of its tables."""
    source, kept = altered(folder, file, change, settings)
    monkeypatch.setattr(prepared, "_digest_in", lambda path: "any")
    about = json.loads((kept / "stream.json").read_text())
    about["digests"], _ = dict.fromkeys(about["digests"], "any"), about.pop("digest")
    (kept / "stream.json").write_text(json.dumps(about | {"digest": prepared._digest_of(about)}))
    with pytest.raises(UserError, match=wrong) as error:
        load_stream(source, settings)
    assert "Delete the folder, or make it anew" in str(error.value)


def test_steps_that_do_not_follow_one_another_are_refused(folder):
    source, kept = altered(folder, "0-train-values.npy", lambda values: values)
    stream = prepared.load(kept)
    wrong = Stream((replace(stream.steps[0], old_users=1), *stream.steps[1:]), stream.user_tokens, stream.item_tokens)
    prepared.save(wrong, kept)
    with pytest.raises(UserError, match="stream.json: step 0 does not follow the one before"):
        prepared.load(kept)


@pytest.mark.parametrize(("inner", "settings"), [(True, LocalSettings()), (False, LocalSettings()),
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


def test_ragged_of_a_mapped_stream_selects(folder):
    source = locate("w", folder, SETTINGS)
    built = build_stream(source, SETTINGS)
    prepared.save(built, prepared.folder_of(source, SETTINGS))
    mapped: Ragged = load_stream(source, SETTINGS).steps[1].train
    users = torch.tensor([5, 0, 17])
    for a, b in zip(mapped.select(users), built.steps[1].train.select(users)):
        assert torch.equal(a, b)


def test_config_of_a_run_does_not_change(folder, registry):
    """A record made before a dataset was prepared is found after it."""
    source = locate("w", folder, SETTINGS)
    first = make_config(registry, "ft", "fedmf", "w", 0, [("--set", {"k_core": "0"})], folder).hash
    prepared.save(build_stream(source, SETTINGS), prepared.folder_of(source, SETTINGS))
    assert make_config(registry, "ft", "fedmf", "w", 0, [("--set", {"k_core": "0"})], folder).hash == first
