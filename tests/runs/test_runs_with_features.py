"""Runs of backbones that read what items' texts say: identity, record, notes, and use of the record afterwards."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import lay_log

import fedcl_bench as fb
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.runs.config import make_config
from fedcl_bench.records.record import Record

SMALL = {"max_length": 4, "dim": 6, "batch_size": 7, "rounds": 2, "topk": [3], "valid_metric": "mrr@3",
         "encoder": "tfidf", "text_dim": 8}
WORDS = [word for text in ("max_length=4", "dim=6", "batch_size=7", "rounds=2", "topk=3", "valid_metric=mrr@3",
                           "topology=local") for word in ("--set", text)]
TABLE = ["tables", "--methods", "ft", "--backbones", "unisrec", "--datasets", "books+games", "--metrics", "mrr@3",
         "--columns", "block", "--records", "results", *WORDS]


def lay(name, items, untold=()):
    rows = [(f"u{user}", f"i{(user + (1 + user % 2) * place) % items}", place) for user in range(9)
            for place in range(3 + user % 4)]
    lay_log(name, rows).with_suffix(".item").write_text("item_id:token\ttitle:token_seq\n" + "".join(
        f"i{item}\tthing {item % 3} of {name}\n" for item in range(items) if item not in untold))


@pytest.fixture(autouse=True)
def shops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay("books", 8, untold=(3, 5))
    lay("games", 6)


def configured(registry, backbone="unisrec", **settings):
    of_backbone = {**SMALL, **settings} if backbone == "unisrec" else {}
    return make_config(registry, "ft", backbone, "books+games", overrides=[("test", of_backbone)])


def vectors(folder, books=8, dim=4):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for seed, (name, items, length) in enumerate((("books", books, dim), ("games", 6, 4))):
        np.savez(Path(folder, f"{name}.npz"), item_id=[f"i{item}" for item in range(items)],
                 vectors=np.random.default_rng(seed).normal(size=(items, 2, length)))


def run(*words):
    return main(["--method", "ft", "--backbone", "unisrec", "--dataset", "books+games", *WORDS, *words])


def test_a_run_reads_texts_and_its_record_says_so(capsys):
    assert run("--set", "encoder=tfidf", "--set", "text_dim=8") == 0
    assert "books: 2 of 8 items have no text or vector; theirs are zeros." in capsys.readouterr().err
    (path,) = Path("results/runs").glob("*/run.json")
    content = json.loads(path.read_text())
    told = content["features"]
    assert {name: told[name] for name in told if name != "fingerprint"} == {
        "items": [8, 6], "silent": [2, 0], "layers": [1, 1], "dim": [8, 8]}
    assert content["settings"]["encoder"] == "tfidf" and content["settings"]["text_dim"] == 8
    assert run("--set", "encoder=tfidf", "--set", "text_dim=8") == 0
    assert "from its record" in capsys.readouterr().out
    model = fb.load("results").model()
    scores = torch.from_numpy(model.scores("books:u1"))
    assert scores[:8].isfinite().all() and scores[:8].unique().numel() > 1
    content["features"]["silent"] = [1]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"field 'features.silent': found 1 values, expected one per block, 2"):
        Record(path.parent).read()


def test_what_decides_the_features_is_in_the_hash(registry):
    first, other = configured(registry), configured(registry, "gru4rec")
    assert first.features and other.features is None
    lay("games", 6, untold=(0,))
    assert configured(registry).hash != first.hash and configured(registry, "gru4rec").hash == other.hash
    assert configured(registry, text_dim=9).hash != configured(registry).hash
    settings = {name: value for name, value in SMALL.items() if name != "text_dim"}
    vectors("one/place")
    Path("one/place").rename("place")

    def given(folder):
        return make_config(registry, "ft", "unisrec", "books+games", overrides=[
            ("test", {**settings, "encoder": f"given:{folder}"})]).hash
    moved = given("place")
    vectors("one/place")
    assert given("one/place") == given("./place") == moved != configured(registry).hash
    vectors("place", dim=3)
    assert given("place") != moved


def test_a_command_finds_the_runs_of_an_encoder_wherever_it_lies(capsys):
    vectors("one/place")
    assert run("--set", "encoder=given:one/place") == 0
    Path("one/place").rename("place")
    capsys.readouterr()
    for encoder, is_there in (("given:place", True), ("tfidf", False)):
        assert main([*TABLE, "--format", "csv", "--set", f"encoder={encoder}"]) == 0
        assert ("no record with these settings" in capsys.readouterr().out) != is_there


def test_seeds_of_other_texts_are_not_averaged(capsys):
    assert run("--set", "encoder=tfidf") == 0
    lay("games", 6, untold=(0,))
    assert run("--set", "encoder=tfidf", "--seed", "1") == 0
    capsys.readouterr()
    assert main([*TABLE, "--set", "encoder=tfidf"]) == 2
    assert "come from other texts of items, vectors or models than those of seed 0" in capsys.readouterr().err


def test_domains_of_different_vectors_are_refused_before_anything_is_written(capsys):
    vectors("place", dim=3)
    assert run("--set", "encoder=given:place") == 2
    assert "domains 'books' and 'games': their items' vectors have 1 layers of 3" in capsys.readouterr().err
    assert not list(Path("results").glob("runs/*"))


@pytest.mark.parametrize("words, said", [
    (["encoder=tfid"], "unknown encoder 'tfid'.\nDid you mean 'tfidf'?"),
    (["encoder=tfidf", "text_layers=3"], "'text_layers': found 3, accepted: at most 1"),
    (["text_layers=-1"], "'text_layers' (--set): found '-1'"),
    (["encoder=given:place", "text_dim=9"], "setting 'text_dim' (--set) has no effect with encoder=given:place")])
def test_wrong_settings_end_the_command_before_anything_is_read(words, said, capsys):
    vectors("place")
    status = run(*(word for setting in words for word in ("--set", setting)))
    assert said in capsys.readouterr().err and status == (0 if "no effect" in said else 2)
