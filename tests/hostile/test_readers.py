"""Every reader against real files made wrong: the same numbers, a record left out, or one error of a few lines.

A few tries are made every time; `-m long` makes many more, and with `FUZZ=20` goes on for 20 minutes at each reader.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import numpy as np
import pandas as pd
import pytest
import torch
from fabricate import fabricate, level
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st
from mutations import (INSTEAD, changed_bytes, changed_json, changed_value, in_place_of, in_time, refused,
                       said)

import fedcl_bench as fb
from fedcl_bench.audit import audit
from fedcl_bench.data import prepared
from fedcl_bench.data.datasets import build_stream
from fedcl_bench.data.features import Hearing, load_features, locate_features
from fedcl_bench.data.overlap import persons_file, read_persons
from fedcl_bench.data.source import locate
from fedcl_bench.data.stream import StreamSettings
from fedcl_bench.runs import compact, heads, run_json
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.frames import digest
from fedcl_bench.runs.runner import Interrupted, Watch, execute
from fedcl_bench.runs.specs import RunSpec, Tuned, read_tuned
from fedcl_bench.runs.store import load_runs

FEW, MANY, MINUTES = 3, 200, float(os.environ.get("FUZZ", 0))
JOB = {"rounds": 1, "k_core": 80}
TABLE = ["tables", "--methods", "ft,f3crec", "--backbones", "fedmf", "--format", "csv", "--records"]
COMPARE = ["compare", "f3crec", "ft", "--backbone", "fedmf", "--json", "--records"]


@pytest.fixture(scope="module")
def world(registry, tmp_path_factory):
    """``results`` and ``compact`` with four made-up runs, and ``real`` with one that was trained and one half-way."""
    folder = tmp_path_factory.mktemp("hostile")
    for method, mean in (("ft", 0.08), ("f3crec", 0.09)):
        for seed in (0, 1):
            fabricate(folder / "results", registry, RunSpec(method, "fedmf", "ml-100k"), seed, level(mean), users=8)
    compact.write(folder / "compact", load_runs(folder / "results"), "a test", lambda run: True)
    config = make_config(registry, "kd", "fedmf", "ml-100k", overrides=[("a test", JOB)])
    stream = build_stream(config.source, config.stream)
    prepared.save(stream, folder / "prepared")
    execute(config, lambda: stream, folder / "real")
    with pytest.raises(Interrupted):
        execute(config, lambda: stream, folder / "half", Watch(stop=lambda: True))
    return folder


_pass = 0  # of many over one reader; each draws anew


def tries(count, *strategies):
    """Run a test with so many draws."""
    def decorate(test):
        chosen = hypothesis.settings(max_examples=count, suppress_health_check=list(hypothesis.HealthCheck),
                                     derandomize=False, database=None)
        return hypothesis.seed(_pass)(chosen(given(*strategies)(test)))
    return decorate


def fuzz(count, strategy, check):
    tries(count, strategy)(check)()


def at(path, check):
    """The check of one path, as hypothesis wants it."""
    def check_there(change):
        check(path, change)
    return check_there


def lengths(test):
    """A few tries, or many, over and over for ``MINUTES``."""
    @functools.wraps(test)
    def repeated(*args, count, **options):
        global _pass
        end, _pass = time.monotonic() + 60 * MINUTES, 0
        test(*args, count=count, **options)
        while count > FEW and time.monotonic() < end:
            _pass += 1
            test(*args, count=count, **options)
        if MINUTES:
            print(f"{_pass + 1} passes")
    return pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])(repeated)


def same_or_left_out(words, expected):
    """A command says what it said, or refuses, or leaves something out and says so."""
    status, out, lines = said(words)
    assert status or out == expected or any(line.startswith("left out: ") for line in lines), out
    return status


def record_of(world):
    return min((world / "results" / "runs").glob("f3crec*"))


@lengths
@pytest.mark.parametrize("name", [run_json.NAME, *run_json.FILES])
def test_records(world, count, name):
    """Bytes changed: what a record says is never believed beside its seal and checksums."""
    path = record_of(world) / name
    words = [*(TABLE if name == run_json.NAME else COMPARE), str(world / "results")]
    expected = said(words)[1]

    def check(change):
        with in_place_of(path, change):
            same_or_left_out(words, expected)
    fuzz(count, changed_bytes(path.read_bytes()), check)
    for change in INSTEAD[:3] if name == run_json.NAME else INSTEAD:  # without run.json a run has not ended
        check(change)


@lengths
def test_records_sealed_by_somebody_else(world, count):
    """A value of the wrong kind or length under a fitting seal: the seal is no signature, the schema still holds."""
    path, words = record_of(world) / run_json.NAME, [*TABLE, str(world / "results")]

    def check(change):
        with in_place_of(path, change):
            said(words)
            said([*COMPARE, str(world / "results")])
            refused(lambda: load_runs(world / "results"))
            if count > FEW:
                said(["report", str(world / "results"), "--out", str(world / "page.html")])
                said(["figures", "--records", str(world / "results"), "--figure", "curves,forgetting", "--out",
                      str(world / "figures"), "--format", "svg"])
    fuzz(count, changed_json(path.read_bytes(), run_json.sealed), check)


@lengths
def test_frames_with_fitting_checksums(world, count):
    """A foreign table, or one without a column, under fitting checksums."""
    folder = record_of(world)
    content = json.loads((folder / run_json.NAME).read_text())

    def check(name, column, how):
        path = folder / f"{name}.parquet"
        frame = pd.read_parquet(path)
        column = frame.columns[column % len(frame.columns)]
        changed = {"left out": frame.drop(columns=column), "empty": frame.iloc[:0], "texts": frame.assign(
            **{column: "a text"}), "foreign": pd.DataFrame({"x": [1]}), "short": frame.iloc[:1],
            "other": frame.assign(**{column: 99})}[how]
        with in_place_of(path, lambda path: changed.to_parquet(path, index=False)):
            files = {**content["files"], path.name: digest(path.read_bytes())}
            text = json.dumps(run_json.sealed({**content, "files": files}))
            with in_place_of(folder / run_json.NAME, text.encode()):
                said([*COMPARE, str(world / "results")])
                said(["pack", "--results", str(world / "results"), "--out", str(world / "packed")])
                if count > FEW:
                    said(["figures", "--records", str(world / "results"), "--figure", "curves", "--out",
                          str(world / "figures"), "--format", "svg"])
                shutil.rmtree(world / "packed", ignore_errors=True)
    tries(count, st.sampled_from(("users", "rounds", "analysis")), st.integers(0, 9), st.sampled_from(
        ("left out", "empty", "texts", "foreign", "short", "other")))(check)()


@lengths
@pytest.mark.parametrize("name", ["index.json", "*.parquet"])
def test_compact_records(world, count, name):
    (path,) = (world / "compact").glob(name)
    words = [*TABLE, str(world / "compact")]
    expected = said(words)[1]

    def check(change):
        with in_place_of(path, change):
            same_or_left_out(words, expected)
    fuzz(count, changed_bytes(path.read_bytes()), check)
    for change in INSTEAD:
        check(change)


@lengths
def test_compact_records_sealed_by_somebody_else(world, count):
    index = world / "compact" / compact.INDEX
    (data,) = (world / "compact").glob("*.parquet")

    def sealed(content):
        return {**content, "seal": compact._seal(content)}

    def check(change):
        with in_place_of(index, change):
            said([*TABLE, str(world / "compact")])
    fuzz(count, changed_json(index.read_bytes(), sealed), check)
    frame, content = pd.read_parquet(data), json.loads(index.read_text())

    def check_rows(column, value):
        changed = frame.copy()
        column = changed.columns[column % len(changed.columns)]
        changed[column] = [value] * len(changed)
        try:
            changed.to_parquet(data, index=False)
        except Exception:  # not every value can be in such a file
            return
        content["files"][data.name]["hash"] = compact._hash(data.read_bytes())
        with in_place_of(index, json.dumps(sealed(content)).encode()):
            for words in (TABLE, COMPARE):
                said([*words, str(world / "compact")])
    with in_place_of(data, data.read_bytes()):
        tries(count, st.integers(0, 99), st.sampled_from((None, "{}", "x", 1, [1], [0.5], [], [-1], [[1]], ["a"], [
            10 ** 12])))(check_rows)()


@lengths
def test_the_index_of_heads(world, count, monkeypatch):
    """It is not believed more than the records."""
    monkeypatch.setattr(heads, "MANY", 1)
    words = [*TABLE, str(world / "results")]
    expected = said(words)[1]
    path = world / "results" / heads.INDEX

    def check(change):
        with in_place_of(path, change):
            assert said(words)[:2] == (0, expected)

    def check_sealed(change):
        with in_place_of(path, change):
            said(words)
    said(words)
    fuzz(count, changed_bytes(path.read_bytes()), check)
    fuzz(count, changed_json(path.read_bytes(), lambda value: {**value, "seal": run_json.seal_of(value)}), check_sealed)
    for change in INSTEAD[1:]:
        check(change)
    path.unlink()


@contextmanager
def copied(folder, to):
    shutil.rmtree(to, ignore_errors=True)
    yield Path(shutil.copytree(folder, to))


def resumed(registry, results):
    """Warnings and numbers of the run of ``world``, gone on with in a results folder."""
    config = make_config(registry, "kd", "fedmf", "ml-100k", overrides=[("a test", JOB)])
    stream, warnings = build_stream(config.source, config.stream), []
    done = execute(config, lambda: stream, results, Watch(warn=warnings.append))
    return warnings, done["matrix"]


@lengths
@pytest.mark.parametrize("pattern", ["runs/*/checkpoint.pt", "shared/*.pt"])
def test_checkpoints_and_shared_blocks(world, registry, tmp_path, count, pattern):
    """Whatever is in their place, the run ends with its numbers; what was wrong is set aside and said."""
    expected = resumed(registry, world / "real")[1]

    def check(change):
        with copied(world / "half", tmp_path / "copy") as results:
            (path,) = results.glob(pattern)
            if pattern.startswith("shared"):
                next(results.glob("runs/*/checkpoint.pt")).unlink()
            change(path) if callable(change) else path.write_bytes(change)
            warnings, matrix = resumed(registry, results)
            assert matrix == expected
            assert all("set aside as" in line and len(line.splitlines()) == 1 for line in warnings)
    (path,) = (world / "half").glob(pattern)
    fuzz(min(count, 100) if count > FEW else 2, changed_bytes(path.read_bytes()), check)
    for change in INSTEAD if count > FEW else INSTEAD[:1]:
        check(change)


@lengths
def test_models(world, count):
    (folder,) = (world / "real").glob("runs/*")

    def recommended():
        model = fb.load(folder).model()
        return model.recommend(model.user_ids[0])
    expected = recommended()

    def check(name, change):
        with in_place_of(folder / name, change):
            wrong, again = refused(recommended)
            assert wrong or again.equals(expected)
    for name in ("model.pt", "model.pt.b2sum"):
        fuzz(count if count > FEW else 3, changed_bytes((folder / name).read_bytes()), at(name, check))
        for change in INSTEAD:
            check(name, change)
    content = torch.load(folder / "model.pt", weights_only=True)

    def check_content(changed):
        with in_place_of(folder / "model.pt", lambda path: torch.save(changed, path)):
            checksum = digest((folder / "model.pt").read_bytes())
            with in_place_of(folder / "model.pt.b2sum", f"{checksum}  model.pt\n".encode()):
                refused(lambda: fb.load(folder).model().tables)
    fuzz(count if count > FEW else 4, changed_value(content), check_content)


@lengths
def test_prepared_data(world, count):
    expected = prepared.load(world / "prepared")

    def check(path, change):
        with in_place_of(path, change):
            wrong, again = refused(lambda: prepared.load(world / "prepared"))
            assert wrong or torch.equal(again.steps[0].train.values, expected.steps[0].train.values)
    paths = sorted((world / "prepared").iterdir())
    for path in paths if count > FEW else (paths[0], paths[-1]):
        fuzz(count if count > FEW else 3, changed_bytes(path.read_bytes()), at(path, check))
        for change in INSTEAD:
            check(path, change)

    def resealed(value):
        value.pop("digest", None)
        return {**value, "digest": prepared._digest_of(value)}
    about = world / "prepared" / prepared._ABOUT

    def check_about(change):
        with in_place_of(about, change):
            refused(lambda: prepared.load(world / "prepared"))
    fuzz(count, changed_json(about.read_bytes(), resealed), check_about)


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Two small domains with texts, and vectors for them; and their features, made of an encoder's name."""
    monkeypatch.chdir(tmp_path)
    for name in ("books", "games"):
        Path(name).mkdir()
        Path(name, f"{name}.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "".join(
            f"u{user}\ti{(user + place) % 5}\t{place}\n" for user in range(6) for place in range(4)))
        Path(name, f"{name}.item").write_text("item_id:token\ttitle:token_seq\n" + "".join(
            f'i{item}\t"A ""{name[item]}"" of {name}"\n' for item in range(5)))
    Path("given").mkdir()
    for name in ("books", "games"):
        np.savez(f"given/{name}.npz", item_id=[f"i{item}" for item in range(5)], vectors=np.eye(5))
    shutil.copy("given/games.npz", "games.npz")
    pd.DataFrame({"item_id": [f"i{item}" for item in range(5)], "vector": list(np.eye(5))}).to_parquet("games.parquet")
    np.save("games.npy", np.eye(5))
    settings = StreamSettings(stream="domains", k_core=0)
    source = locate(f"{tmp_path}/books+{tmp_path}/games", None, settings)
    stream = build_stream(source, settings)

    def load(encoder, hearing=Hearing()):
        made = load_features(locate_features(source, encoder, 0, 4), source, stream, hearing)
        return [vectors.clone() for vectors in made]  # what is mapped may not be cut off
    return load


@lengths
def test_features_kept_beside_the_data(told, count):
    """Whatever is in a file's place, the vectors are the same; what was wrong is said."""
    expected, warnings = told("tfidf"), []
    path = min(Path("books").glob("*.features-*"))
    content = path.read_bytes()

    def check(change):
        with in_place_of(path, change):
            same = path.is_file() and path.read_bytes() == content
            gone = not os.path.lexists(path)
            warnings.clear()
            with in_time():
                again = told("tfidf", Hearing(warnings.append))
            assert all(map(torch.equal, again, expected)) and bool(warnings) != (same or gone)
    fuzz(count, changed_bytes(content), check)
    for change in INSTEAD:
        check(change)


@lengths
@pytest.mark.parametrize("name", ["games.item", "games.npz", "games.parquet", "games.npy"])
def test_texts_and_given_vectors(told, count, name):
    path, encoder = Path("games/games.item"), "tfidf"
    if name != "games.item":
        Path("given/games.npz").unlink(missing_ok=True)
        path, encoder = Path("given", name), "given:given"
        shutil.copy(name, path)
    told(encoder)

    def check(change):
        with in_place_of(path, change):
            wrong, made = refused(lambda: told(encoder))
            assert wrong or all(vectors.isfinite().all() for vectors in made)
    fuzz(count, changed_bytes(path.read_bytes()), check)
    for change in INSTEAD:
        check(change)


@lengths
def test_who_users_are(tmp_path, count):
    """Each user is one person, whom nobody else is; or the file is refused."""
    path = tmp_path / "shop.overlap"
    path.write_bytes(persons_file("".join(LOG).encode(), "chain"))
    expected = read_persons(tmp_path / "shop.inter")
    assert len(expected) == 8

    def check(change):
        with in_place_of(path, change):
            wrong, persons = refused(lambda: read_persons(tmp_path / "shop.inter"))
            assert wrong or len(set(persons.values())) == len(persons)
    fuzz(count, changed_bytes(path.read_bytes()), check)
    for change in INSTEAD:
        check(change)


@lengths
def test_tuned_settings(world, tmp_path, count):
    path = Path(shutil.copy(ROOT / "results" / "tuned" / "ml-100k-fedmf-ft.json", tmp_path))
    tuned = Tuned((tmp_path,))
    words = [*TABLE, str(world / "results"), "--tuned", str(tmp_path)]

    def check(change):
        with in_place_of(path, change):
            refused(lambda: read_tuned(path) if path.exists() else None)
            refused(lambda: tuned.settings("ft", "fedmf", "ml-100k"))
            said(words)
    fuzz(count, changed_bytes(path.read_bytes()), check)
    fuzz(count, changed_json(path.read_bytes()), check)
    for change in INSTEAD:
        check(change)


LOG = ["user_id:token\titem_id:token\ttimestamp:float\n",
       *(f"{u}\t{(u * 7 + i) % 11}\t{1000 * u + i}\n" for u in range(8) for i in range(8))]
CONFIG = """title: a log
notes: of a user
settings: {k_core: 0, blocks: 2}
method_settings:
  kd: {top_n: 5}
search:
  kd: {top_n: [5, 6]}
val_interval: {timestamp: "[0,inf)"}
"""


@lengths
@pytest.mark.parametrize("name", ["log.inter", "log.yaml", "log.csv"])
def test_data_of_a_user(tmp_path, count, name):
    """Numbers follow what stands there; whatever it is, the command ends as commands have to."""
    files = {"log.inter": "".join(LOG), "log.yaml": CONFIG,
             "log.csv": "".join(LOG).replace("\t", ",").replace(":token", "").replace(":float", "")}
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    path, log = tmp_path / name, str(tmp_path / "log.inter")
    words = {"log.inter": [["data", log]], "log.csv": [[
        "data", "convert", "mine", "--csv", str(path), "--user", "user_id", "--item", "item_id", "--time", "timestamp",
        "--out", str(tmp_path / "out"), "--force"]],
        "log.yaml": [["data", log], ["list", log], ["tune", "--methods", "kd", "--backbones", "fedmf", "--datasets",
                                                    log, "--results", str(tmp_path / "r"), "--dry-run"]]}[name]

    def check(change):
        with in_place_of(path, change):
            for command in words:
                said(command)
    for command in words:
        assert said(command)[0] == 0
    fuzz(count, changed_bytes(path.read_bytes()), check)
    for change in INSTEAD:
        check(change)
    if name == "log.yaml":
        config = {"settings": {"k_core": 0, "blocks": 2}, "method_settings": {"kd": {"top_n": 5}}, "title": "a log",
                  "search": {"kd": {"top_n": [5, 6]}}, "val_interval": {"timestamp": "[0,inf)"}, "notes": "n"}
        fuzz(count, changed_json(json.dumps(config).encode()), check)


def test_kept_levels_of_audits(tmp_path, monkeypatch):
    """A level that is not what was written is computed anew."""
    frame = pd.DataFrame({name: [0.5, 0.25] for name in ("round", "user", "items", "positives", "touched",
                                                         *audit.METRICS)})
    monkeypatch.setattr(audit, "attacked", lambda level, stream: frame)
    level_ = type("Level", (), {"file": "levels/x.parquet"})
    assert [audit.level_clients(level_, tmp_path, lambda: None)[1] for _ in range(2)] == [False, True]
    path, checksum = (tmp_path / f"{level_.file}{end}" for end in ("", ".b2sum"))
    whole, flipped = path.read_bytes(), bytearray(path.read_bytes())
    flipped[flipped.index(b"\0\0\0\0\0\0\xe0?") + 6] ^= 16  # 0.5, as it stands there
    for wrong in (b"", b"PAR1", b"x" * 99, bytes(flipped)):
        path.write_bytes(wrong)
        assert audit.level_clients(level_, tmp_path, lambda: None)[1] is False
    checksum.write_bytes(b"\xff")
    assert audit.level_clients(level_, tmp_path, lambda: None)[1] is False
    checksum.unlink()
    assert audit.level_clients(level_, tmp_path, lambda: None)[1] is False
    frame.drop(columns="items").to_parquet(path)
    checksum.write_text(f"{digest(path.read_bytes())}  x.parquet\n")
    assert audit.level_clients(level_, tmp_path, lambda: None)[1] is False
    assert path.read_bytes() == whole
