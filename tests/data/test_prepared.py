"""Streams kept on disk: the same stream, mapped, found only where it is right; and chunks that are not kept."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import build, grown, output_of, train_round

from fedcl_bench.data import datasets
from fedcl_bench.data.streams import prepared
from fedcl_bench.data.datasets import build_stream, load_stream
from fedcl_bench.data.source import locate
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.data.stream import Stream
from fedcl_bench.data.streams.synth import SyntheticLog, write
from fedcl_bench.core.errors import UserError
from fedcl_bench.federation.parameter_growth import row_width
from fedcl_bench.kernels.memory import Available
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.training.sampling import LaterChunk, Needs, make_chunks
from fedcl_bench.plugin.local_settings import LocalSettings
from fedcl_bench.core.tuning import SIZES

SETTINGS = StreamSettings(k_core=0)
DOMAINS = StreamSettings(stream="domains", k_core=0)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    for seed, name in enumerate("wv"):
        write(SyntheticLog(60, 40, per_user=12.0, seed=seed), folder / name / f"{name}.inter")
    return folder


@pytest.fixture
def folder(worlds, tmp_path):
    return shutil.copytree(worlds, tmp_path, dirs_exist_ok=True)


def kept(folder, dataset="w", settings=SETTINGS):
    """A dataset, its stream, and where that is kept, as it is now."""
    source = locate(dataset, folder, settings)
    built, place = build_stream(source, settings), prepared.file_of(source, settings)
    prepared.save(built, place)
    return source, built, place


def arrays(part):
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in vars(part).items()
            if tensor is not None}


def content(stream: Stream) -> list:
    """All that a stream holds."""
    steps = [{**vars(step), **{split: arrays(step.split(split)) for split in ("train", "valid", "test")},
              "sessions": {name: arrays(sessions) for name, sessions in step.sessions.items()}}
             for step in stream.steps]
    return [steps, stream.user_tokens.tolist(), stream.item_tokens.tolist(), dict(stream.unfiltered), stream.domains]


@pytest.mark.parametrize("dataset, settings", [
    ("w", SETTINGS), ("w", StreamSettings(stream="static", k_core=0)), ("w+v", DOMAINS),
    ("w+v", replace(DOMAINS, domain_blocks=2)),
    ("w", StreamSettings(stream="sessions", k_core=0, session_gap=30000.0)),
    ("w", StreamSettings(stream="sessions", k_core=0, session_gap=30000.0, topology="central"))])
def test_prepared_stream_is_the_stream(folder, dataset, settings):
    source, built, place = kept(folder, dataset, settings)
    stream = load_stream(source, settings)
    assert content(stream) == content(built)
    assert str(place) in open("/proc/self/maps").read()
    assert sorted(path.name for path in (folder / "w").iterdir()) == sorted(["w.inter", place.name])
    stream.steps[0].train.values[0] = 10 ** 6  # is never written back
    assert content(load_stream(source, settings)) == content(built)


def test_other_settings_and_changed_files_are_not_mistaken(folder):
    def place(dataset, settings):
        return prepared.file_of(locate(dataset, folder, settings), settings)

    others = [("w", SETTINGS), ("w", replace(SETTINGS, blocks=3)), ("w", replace(SETTINGS, split_seed=1)),
              ("w+v", DOMAINS), ("v+w", DOMAINS), ("w+v", replace(DOMAINS, pilot_users=5, pilot_core=0)),
              ("w+v", replace(DOMAINS, domain_blocks=2)), ("w+v", replace(DOMAINS, domain_blocks=3))]
    sessions = StreamSettings(stream="sessions", k_core=0, topology="central")
    others += [("w", replace(sessions, **changed)) for changed in ({}, {"valid_share": 0.2}, {"topology": "federated"})]
    places = {place(*other) for other in others}
    assert place("w+v", replace(DOMAINS, topology="central")) in places  # the same data, however it is trained on
    with open(folder / "w" / "w.inter", "a") as file:
        file.write("60\t3\t1609459200\n")
    places |= {place(*other) for other in others}
    assert len(places) == 2 * len(others)


def test_what_disk_or_memory_cannot_hold_is_refused_with_what_fits(folder, monkeypatch):
    source, stream, place = kept(folder)
    rows = sum(step.interactions for step in stream.steps)
    monkeypatch.setattr(prepared, "free_bytes", lambda path: 1000)
    with pytest.raises(UserError, match=f"not enough room: 0.0 MiB .*\nAbout [1-9][0-9]* of the {rows} interactions "):
        prepared.save(stream, place)
    source, rows = locate("w", folder, SETTINGS), 700
    monkeypatch.setattr(datasets, "available", lambda device: Available(rows * 10, "available here"))
    with pytest.raises(UserError, match="w.inter: not enough memory: .* about [0-9]* interactions take .*; about 210 "):
        build_stream(source, SETTINGS)
    monkeypatch.setattr(datasets, "available", lambda device: Available(rows * 100, "available here"))
    assert build_stream(source, SETTINGS).steps


def test_command_and_a_run_on_it(folder, capsys, monkeypatch):
    data = ["--data-dir", str(folder), "--set", "k_core=0"]
    run = ["--method", "ft", "--backbone", "fedmf", "--dataset", "w", *data, "--set", "rounds=2", "--set", "topk=5",
           "--set", "valid_metric=ndcg@5", "--json", "--quiet", "--results"]
    before = json.loads(output_of(capsys, *run, folder / "a"))
    said = output_of(capsys, "data", "prepare", "w", *data)
    assert "interactions in 4 steps" in said and "wrote: " in said

    def no_reading(*args):
        raise AssertionError("the interactions were read")
    monkeypatch.setattr("fedcl_bench.data.datasets.load_interactions", no_reading)
    after = json.loads(output_of(capsys, *run, folder / "b"))
    assert after["hash"] == before["hash"] and after["metrics"] == before["metrics"]


def test_damage_is_named_also_where_what_is_read_would_be_a_stream(folder):
    """Other damage: tests/hostile/test_readers.py."""
    source, built, place = kept(folder)
    content, values = place.read_bytes(), built.steps[1].train.values.numpy().tobytes()
    assert values in content
    place.write_bytes(content.replace(values, values[8:] + values[:8]))
    with pytest.raises(UserError, match=f"{place}: is damaged .*\n.*data prepare"):
        load_stream(source, SETTINGS)


@pytest.mark.parametrize(("inner", "settings"), [(True, LocalSettings()),
                                                 (False, LocalSettings(negative_pool="untouched", local_epochs=2))])
def test_chunks_made_later_give_the_same_round(registry, ml100k, monkeypatch, inner, settings):
    step = ml100k.steps[0]
    backbone = build(registry, "backbone", "fedmf")
    model = grown(backbone, step, dtype=torch.float32)
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
