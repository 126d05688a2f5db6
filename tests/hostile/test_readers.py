"""Every reader against real files made wrong: the same numbers, a record left out, or one error of a few lines.

``FUZZ=200`` makes so many tries of each file instead of a few.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fabricate import fabricate, level
from helpers import ROOT, lay_shop
from mutations import TRIES, changed_json, fuzz, in_time, refused, said

import fedcl_bench as fb
from fedcl_bench.audit import audit
from fedcl_bench.data.streams import prepared
from fedcl_bench.data.datasets import build_stream
from fedcl_bench.data.items.features import Callbacks, load_features, locate_features
from fedcl_bench.data.streams.overlap import persons_file, read_persons
from fedcl_bench.data.source import locate
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.records import published
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.runner import Interrupted, Watch, execute
from fedcl_bench.runs.specs import RunSpec, Tuned, read_tuned
from fedcl_bench.records.store import load_runs

JOB = {"rounds": 1, "k_core": 80}
TABLE = ["tables", "--methods", "ft,f3crec", "--backbones", "fedmf", "--format", "csv", "--records"]
LOG = ["user_id:token\titem_id:token\ttimestamp:float\n",
       *(f"{u}\t{(u * 7 + i) % 11}\t{1000 * u + i}\n" for u in range(8) for i in range(8))]
COMPARE = ["compare", "f3crec", "ft", "--backbone", "fedmf", "--json", "--records"]


def same_or_refused(read, same):
    """A check that what is read is the same as now, or that it is refused."""
    expected = read()

    def check():
        wrong, again = refused(read)
        assert wrong or same(again, expected)
    return check


def same_or_left_out(words):
    """A check that a command says what it says now, or refuses, or leaves something out and says so."""
    expected = said(words)[1]
    assert expected

    def check():
        status, out, lines = said(words)
        assert status or out == expected or any(line.startswith("left out: ") for line in lines), out
    return check


@pytest.fixture(scope="module")
def world(registry, tmp_path_factory):
    """``results`` and ``compact`` with four made-up runs, and ``real`` with one that was trained and one half-way."""
    folder = tmp_path_factory.mktemp("hostile")
    for method, mean in (("ft", 0.08), ("f3crec", 0.09)):
        for seed in (0, 1):
            fabricate(folder / "results", registry, RunSpec(method, "fedmf", "ml-100k"), seed, level(mean), users=8)
    published.write(folder / "compact", load_runs(folder / "results"), "a test", lambda run: True)
    config = make_config(registry, "kd", "fedmf", "ml-100k", overrides=[("a test", JOB)])
    stream = build_stream(config.source, config.stream)
    prepared.save(stream, folder / "prepared")
    execute(config, lambda: stream, folder / "real")
    with pytest.raises(Interrupted):
        execute(config, lambda: stream, folder / "half", Watch(stop=lambda: True))
    return folder, config, stream


@pytest.mark.parametrize("place, words, has_checksum", [
    ("results/runs/f3crec*/users.parquet", COMPARE, True),  # all frames are read in one way
    ("results/runs/f3crec*/run.json", COMPARE, False), ("compact/index.json", TABLE, False),
    ("compact/*.parquet", TABLE, True)])
def test_records(world, place, words, has_checksum):
    """Whatever is in a file without a checksum, commands end as they have to."""
    folder, path = place.partition("/")[0], min(world[0].glob(place))
    words = [*words, str(world[0] / folder)]
    check = same_or_left_out(words) if has_checksum else lambda: said(words)
    fuzz(path, check)
    if path.suffix == ".json":
        fuzz(path, check, changed_json, 2 * TRIES)


@pytest.mark.parametrize("pattern", ["runs/*/checkpoint.pt", "shared/*.pt"])
def test_checkpoints_and_shared_blocks(world, tmp_path, pattern):
    """Whatever is in their place, the run ends with its numbers; what was wrong is set aside and said."""
    folder, config, stream = world
    expected = execute(config, lambda: stream, folder / "real")["matrix"]
    (path,) = (folder / "half").glob(pattern)

    def check():
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        (tmp_path / "copy" / path.parent.relative_to(folder / "half")).mkdir(parents=True)
        there, warnings = tmp_path / "copy" / path.relative_to(folder / "half"), []
        if path.is_fifo():
            os.mkfifo(there)
        elif path.exists():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, there)
        done = execute(config, lambda: stream, tmp_path / "copy", Watch(warn=warnings.append))
        assert done["matrix"] == expected and len(warnings) == path.exists()
        assert all("set aside as" in line and len(line.splitlines()) == 1 for line in warnings)
    fuzz(path, check, tries=TRIES // 3)


@pytest.mark.parametrize("name", ["model.pt", "model.pt.b2sum"])
def test_models(world, name):
    (folder,) = (world[0] / "real").glob("runs/*")

    def recommended():
        model = fb.load(folder).model()
        return model.recommend(model.user_ids[0])
    fuzz(folder / name, same_or_refused(recommended, pd.DataFrame.equals), tries=TRIES // 3)


def test_prepared_data(world):
    path = world[0] / "prepared"
    fuzz(path, same_or_refused(lambda: prepared.load(path).steps[0].train.values, torch.equal))


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Two small domains with texts, and vectors for them; and their features, made of an encoder's name."""
    monkeypatch.chdir(tmp_path)
    Path("given").mkdir()
    items = [f"i{item}" for item in range(5)]
    for seed, name in enumerate(("books", "games")):
        lay_shop(name, seed, 6, 5, texts=True)
        np.savez(f"given/{name}.npz", item_id=items, vectors=np.eye(5))
    shutil.copy("given/games.npz", "games.npz")
    pd.DataFrame({"item_id": items, "vector": list(np.eye(5))}).to_parquet("games.parquet")
    np.save("games.npy", np.eye(5))
    settings = StreamSettings(stream="domains", k_core=0)
    source = locate("books+games", None, settings)
    stream = build_stream(source, settings)

    def load(encoder, hearing=Callbacks()):
        made = load_features(locate_features(source, encoder, 0, 4), source, stream, hearing)
        return [vectors.clone() for vectors in made]  # what is mapped may not be cut off
    return load


def test_features_kept_beside_the_data(told):
    """Whatever is in a file's place, the vectors are the same; what was wrong is said."""
    expected = told("tfidf")
    path = min(Path("data/books").glob("*.features-*"))
    content = path.read_bytes()

    def check():
        as_it_was = not path.exists() or path.is_file() and path.read_bytes() == content
        warnings = []
        with in_time():
            again = told("tfidf", Callbacks(warnings.append))
        assert all(map(torch.equal, again, expected)) and bool(warnings) != as_it_was
    fuzz(path, check)


@pytest.mark.parametrize("name", ["games.item", "games.npz", "games.parquet", "games.npy"])
def test_texts_and_given_vectors(told, name):
    path, encoder = Path("data/games/games.item"), "tfidf"
    if name != "games.item":
        Path("given/games.npz").unlink(missing_ok=True)
        path, encoder = Path("given", name), "given:given"
        shutil.copy(name, path)
    fuzz(path, same_or_refused(lambda: told(encoder), lambda made, _: all(part.isfinite().all() for part in made)))


def test_who_users_are(tmp_path):
    """Each user is one person, whom nobody else is; or the file is refused."""
    path = tmp_path / "shop.overlap"
    path.write_bytes(persons_file("".join(LOG).encode(), "chain"))
    fuzz(path, same_or_refused(lambda: read_persons(tmp_path / "shop.inter"),
                               lambda persons, _: len(set(persons.values())) == len(persons)))


def test_tuned_settings(world, tmp_path):
    path = Path(shutil.copy(ROOT / "results" / "tuned" / "ml-100k-fedmf-ft.json", tmp_path))

    def check():
        refused(lambda: read_tuned(path) if path.exists() else None)
        refused(lambda: Tuned((tmp_path,)).settings("ft", "fedmf", "ml-100k"))
        said([*TABLE, str(world[0] / "results"), "--tuned", str(tmp_path)])
    fuzz(path, check)
    fuzz(path, check, changed_json)


CONFIG = {"title": "a log", "settings": {"k_core": 0, "blocks": 2}, "method_settings": {"kd": {"top_n": 5}},
          "search": {"kd": {"top_n": [5, 6]}}, "val_interval": {"timestamp": "[0,inf)"}, "notes": "of a user"}


@pytest.mark.parametrize("name", ["log.inter", "log.yaml", "log.csv", "log.jsonl", "log.parquet"])
def test_data_of_a_user(tmp_path, name):
    """Numbers follow what stands there; whatever it is, the command ends as commands have to."""
    log, path = str(tmp_path / "log.inter"), tmp_path / name
    files = {"log.inter": "".join(LOG), "log.yaml": json.dumps(CONFIG),
             "log.csv": "".join(LOG).replace("\t", ",").replace(":token", "").replace(":float", "")}
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    table = pd.read_csv(tmp_path / "log.csv", dtype={"user_id": str, "item_id": str})
    table.to_json(tmp_path / "log.jsonl", orient="records", lines=True)
    table.to_parquet(tmp_path / "log.parquet")
    convert = ["data", "convert", "mine", "--table", str(path), "--user", "user_id", "--item", "item_id", "--time",
               "timestamp", "--out", str(tmp_path / "out"), "--force"]

    def check():
        return said(["data", log] if name in ("log.inter", "log.yaml") else convert)
    assert check()[0] == 0
    fuzz(path, check)
    if name == "log.yaml":
        fuzz(path, check, changed_json)


def test_kept_levels_of_audits(tmp_path, monkeypatch):
    """A level that is not what was written is computed anew."""
    frame = pd.DataFrame({name: [0.5, 0.25] for name in ("round", "user", "items", "positives", "touched",
                                                         *audit.METRICS)})
    monkeypatch.setattr(audit, "attacked", lambda level, stream: frame)
    level_ = type("Level", (), {"file": "levels/x.parquet"})
    assert [audit.level_clients(level_, tmp_path, lambda: None)[1] for _ in range(2)] == [False, True]
    for file in ("levels/x.parquet", "levels/x.parquet.b2sum"):
        content = (tmp_path / file).read_bytes()
        for wrong in (b"", b"\xff", content[:20], content[:20] + bytes([content[20] ^ 1]) + content[21:]):
            (tmp_path / file).write_bytes(wrong)
            assert audit.level_clients(level_, tmp_path, lambda: None)[1] is False
    assert audit.level_clients(level_, tmp_path, lambda: None)[1] is True
