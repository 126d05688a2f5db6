"""Finished runs are found and verified, whether full or compact; what cannot be trusted is refused. Their model is
opened by PyTorch alone; what they say of the way to their result."""

import hashlib
import json
import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fabricate import alter, fabricate, level
from helpers import ROOT, executed, output_of

from fedcl_bench.cli.main import main
from fedcl_bench.cli.show import improvement_notes
from fedcl_bench.core.errors import Busy, UserError
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.evaluation.beyond_accuracy import PER_USER, RECOMMENDED
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.records import published
from fedcl_bench.records.frames import still_improving
from fedcl_bench.records.record import Record
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.checkpoints import read_model
from fedcl_bench.runs.runner import execute
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.runs.summary import nearly_best
from fedcl_bench.records.store import load_runs, user_scores
from fedcl_bench.reports import selection
from fedcl_bench.reports.selection import matching

QUICK = (("rounds", 2), ("k_core", 80))
REAL = RunSpec("f3crec", "fedmf", "ml-100k", QUICK)


@pytest.fixture(scope="module")
def real(registry, tmp_path_factory):
    """A results folder with two real runs of two rounds per block."""
    results = tmp_path_factory.mktemp("real")
    for seed in (0, 1):
        executed(make_config(registry, "f3crec", "fedmf", "ml-100k", seed, [("test", dict(QUICK))]), results)
    return results


@pytest.fixture
def three(registry, tmp_path):
    """A results folder with three fabricated runs."""
    for method, seed in (("ft", 0), ("ft", 1), ("f3crec", 0)):
        fabricate(tmp_path / "r", registry, RunSpec(method, "fedmf", "ml-100k"), seed, level(0.08))
    return tmp_path / "r"


def pack(folder, runs, command="pack", items=True):
    return published.write(folder, runs, command, lambda run: items)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def message(call) -> str:
    """The text of the UserError, after checking its form."""
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert len(text.splitlines()) <= 2
    return text


def test_real_runs_are_found_and_match_their_spec(real, registry):
    runs = load_runs(real)
    assert [run.seed for run in runs] == [0, 1]
    assert [run.seed for run in matching(reversed(runs), registry, REAL)] == [0, 1]
    assert matching(runs, registry, RunSpec("f3crec", "fedmf", "ml-100k")) == []  # 100 rounds
    assert matching(runs, registry, RunSpec("f3crec", "fedmf", "ml-100k", (*QUICK, ("without", "cc")))) == []
    assert matching(runs, registry, RunSpec("kd", "fedmf", "ml-100k", QUICK)) == []
    run = runs[0]
    own = run.users[(run.users.trained_block == 2) & (run.users.tested_block == 2) & (run.users.metric == "ndcg@20")]
    assert own.value.mean() == pytest.approx(run.meta["metrics"]["ndcg@20"]["per_block"][2])
    assert set(run.analysis["kind"]) == {"user_shift", "item_phi", "item_rank_change", RECOMMENDED,
                                         *(kind for kind in PER_USER if not kind.startswith("all:"))}


def test_compact_records_hold_the_same(real, registry, tmp_path):
    runs = load_runs(real)
    pack(tmp_path / "c", runs)
    small = load_runs(tmp_path / "c")
    assert [run.seed for run in matching(small, registry, REAL)] == [0, 1]
    for full, packed in zip(runs, small):
        assert {k: v for k, v in full.meta.items() if k != "files"} == packed.meta
        keys = ["metric", "trained_block", "tested_block", "user"]
        kept = full.users[full.users["metric"].isin(published.METRICS)]
        frames = [frame.astype({"metric": str}).sort_values(keys, ignore_index=True)[[*keys, "value"]]
                  for frame in (kept, packed.users)]
        pd.testing.assert_frame_equal(*frames, check_dtype=False, rtol=1e-7)
        pd.testing.assert_frame_equal(full.rounds, packed.rounds[full.rounds.columns], check_dtype=False, rtol=1e-6,
                                      atol=1e-4)
        frames = [run.analysis[run.analysis["kind"].isin(published.KINDS)].astype({"kind": str}).reset_index(drop=True)[
            ["block", "kind", "id", "value"]] for run in (full, packed)]
        pd.testing.assert_frame_equal(*frames, check_dtype=False, rtol=1e-6)
    np.testing.assert_allclose(user_scores(runs, "ndcg@20"), user_scores(small, "ndcg@20"), atol=1e-7)
    recorded = ("ndcg@5", "ndcg@20", "all:novelty@5", "mrr@5", "mae", "rmse")
    assert published._extra({"valid_metric": "ndcg@5", "extra_metrics": ["novelty"]}, recorded) == [
        "all:novelty@5", "mae", "ndcg@5", "rmse"]
    assert published._extra({"valid_metric": "recall@3", "stream": "domains"}, ("recall@3", "ndcg@3", "hit@3")) == [
        "ndcg@3", "recall@3"]  # of FFMSR's tables


@pytest.mark.filterwarnings("ignore:The 'future.infer_string' option")  # pandas 4 will have no such choice
def test_records_of_pandas_2_and_3_hold_the_same(registry, tmp_path):
    """Texts are objects in pandas 2 and have a type of their own in pandas 3, in memory and in files."""
    for texts in (False, True):
        with pd.option_context("future.infer_string", texts):
            fabricate(tmp_path / f"{texts}", registry, RunSpec("ft", "fedmf", "ml-100k"), 0, level(0.08))
    read = []
    for texts in (False, True):
        with pd.option_context("future.infer_string", texts):
            read += [load_runs(tmp_path / name)[0] for name in ("False", "True")]
            frames = [{name: getattr(run, name).to_dict("list") for name in ("users", "analysis", "rounds")}
                      for run in read]
    assert all(frame == frames[0] for frame in frames)


def test_bytes_do_not_depend_on_the_order(three, tmp_path):
    runs = load_runs(three)
    pack(tmp_path / "once", runs)
    for i, some in enumerate(([runs[2:], runs[:2]], [[run] for run in reversed(runs)], [runs, runs])):
        for part in some:
            pack(tmp_path / str(i), part)
        assert contents(tmp_path / str(i)) == contents(tmp_path / "once")
    pack(tmp_path / "again", load_runs(tmp_path / "once"))  # compact records of compact records
    assert contents(tmp_path / "again") == contents(tmp_path / "once")
    assert len(contents(tmp_path / "once")) == 2  # files of earlier states are gone


@pytest.mark.parametrize("limit,runs_per_file", [(lambda whole: whole, [3]), (lambda whole: whole - 1, [1, 2]),
                                                 (lambda whole: 1, [1, 1, 1])])
def test_a_file_over_the_limit_is_halved(three, tmp_path, monkeypatch, limit, runs_per_file):
    """Down to single runs, which stay whole; the values are the same, and the order of packing does not matter."""
    runs = load_runs(three)
    (whole,) = pack(tmp_path / "one", runs)["files"].values()
    monkeypatch.setattr(published, "LIMIT", limit(whole["bytes"]))
    files = pack(tmp_path / "c", runs)["files"]
    assert [file["runs"] for file in files.values()] == runs_per_file
    assert {name: len(content) for name, content in contents(tmp_path / "c").items() if name != published.INDEX} \
        == {name: file["bytes"] for name, file in files.items()}
    for full, packed in zip(load_runs(tmp_path / "one"), load_runs(tmp_path / "c"), strict=True):
        assert full.meta == packed.meta
        for frame in ("users", "rounds", "analysis"):
            pd.testing.assert_frame_equal(getattr(full, frame), getattr(packed, frame), check_exact=True)
    for run in reversed(runs):
        pack(tmp_path / "again", [run])
    assert contents(tmp_path / "again") == contents(tmp_path / "c")


def test_published_files_are_small():
    """Git keeps every version of a file."""
    published = ROOT / "results" / "published"
    sizes = {str(path.relative_to(published)): path.stat().st_size for path in published.rglob("*") if path.is_file()}
    assert any(name.endswith(".parquet") for name in sizes)
    assert {name: size for name, size in sizes.items() if size > 512 * 1024} == {}


def test_published_tables_are_of_the_records_beside_them():
    for folder in {path.parent.parent for path in (ROOT / "results/published").glob("*/tables*/*.csv")}:
        there = {run.hash for run in load_runs(folder)}
        for path in folder.glob("tables*/*.csv"):
            hashes = pd.read_csv(path, dtype=str)["records"].dropna().str.split().explode()
            assert len(hashes) and set(hashes) <= there, path


def test_the_record_with_more_analysis_is_kept(three, tmp_path):
    runs = load_runs(three)
    pack(tmp_path / "few", runs, items=False)
    assert set(load_runs(tmp_path / "few")[0].analysis["kind"]) == {"user_shift"}
    pack(tmp_path / "few", runs)
    pack(tmp_path / "all", runs)
    pack(tmp_path / "all", runs, items=False)
    assert contents(tmp_path / "few") == contents(tmp_path / "all")


def test_what_one_run_has_in_each_round_and_another_in_some_is_packed(three, tmp_path):
    def with_dropped(run, dropped):
        return replace(run, load=lambda name: run.load(name).assign(dropped=dropped) if name == "rounds"
                       else run.load(name))
    runs, dropped = load_runs(three)[:2], ([1] * 8, [1.0, math.nan] * 4)
    pack(tmp_path / "c", map(with_dropped, runs, dropped))
    for run, expected in zip(load_runs(tmp_path / "c"), dropped, strict=True):
        np.testing.assert_array_equal(run.rounds["dropped"], expected)


def test_a_pack_that_dies_changes_nothing(three, tmp_path, monkeypatch):
    runs = load_runs(three)
    pack(tmp_path / "c", runs[:1])
    write = published.write_atomically

    def die(path, content):
        if path.name == published.INDEX:
            raise RuntimeError("killed")
        write(path, content)
    monkeypatch.setattr(published, "write_atomically", die)
    with pytest.raises(RuntimeError):
        pack(tmp_path / "c", runs)
    assert [run.hash for run in load_runs(tmp_path / "c")] == [runs[0].hash]


def test_two_packs_into_one_folder_at_a_time_lose_no_run(three, tmp_path, monkeypatch):
    runs, row = load_runs(three), published._row

    def slow(*arguments):
        monkeypatch.setattr(published, "_row", row)
        pack(tmp_path / "c", runs[:1])
        return row(*arguments)
    monkeypatch.setattr(published, "_row", slow)
    with pytest.raises(UserError, match="another command has packed runs into it meanwhile"):
        pack(tmp_path / "c", runs[1:])
    pack(tmp_path / "c", runs[1:])
    assert {run.hash for run in load_runs(tmp_path / "c")} == {run.hash for run in runs}


def test_changed_compact_records_are_refused(three, tmp_path):
    folder = tmp_path / "c"
    pack(folder, load_runs(three))
    data, index = next(folder.glob("*.parquet")), folder / published.INDEX
    good = contents(folder)
    for path, content, expected in (
            (data, good[data.name][:-10], "has changed since it was packed"),
            (data, good[data.name][:99] + b"\0" + good[data.name][100:], "has changed since it was packed"),
            (index, good[index.name][:50], "is no JSON text"),
            (index, good[index.name].replace(b'"format": 1', b'"format": 9'),  "field 'format': Invalid enum value 9")):
        assert content != good[path.name]
        path.write_bytes(content)
        assert expected in (text := message(lambda: load_runs(folder))) and str(path) in text
        path.write_bytes(good[path.name])
    data.unlink()
    assert "is missing" in message(lambda: load_runs(folder))
    assert message(lambda: pack(folder, load_runs(three)))  # nor is anything added to it


def test_changed_full_records_and_other_schema_versions_are_refused(three):
    folder = next((three / "runs").glob("f3crec*"))
    users = folder / "users.parquet"
    good = users.read_bytes()
    users.write_bytes(good[:-5])
    assert "users.parquet: has changed" in message(lambda: load_runs(three))
    users.write_bytes(good)
    for version in (1, 99):
        alter(folder, schema=version)
        text = message(lambda: load_runs(three))
        assert str(folder / "run.json") in text and f"found {version}, accepted: 3, the version" in text
        assert "run it again" in text
    alter(folder, without=["schema"])
    assert "missing required field `schema`" in message(lambda: load_runs(three))
    (folder / "run.json").write_text("{")
    assert "run.json: is no JSON text" in message(lambda: load_runs(three))


@pytest.mark.parametrize("error, busy", [(BlockingIOError(11, "taken"), True), (OSError(38, "no locks here"), False)])
def test_a_file_system_without_locks_is_not_busy(tmp_path, monkeypatch, error, busy):
    def flock(file, flags):
        raise error
    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(Busy, match="another process") if busy else nullcontext(), Record(tmp_path / "run").locked():
        assert not busy


def test_unfinished_failed_and_set_aside_runs_do_not_count(three):
    runs = three / "runs"
    folder = next(runs.glob("f3crec*"))
    (runs / "unfinished").mkdir()
    (runs / f"{folder.name}.corrupt1").mkdir()
    (runs / f"{folder.name}.corrupt1" / "run.json").write_text("{")
    folder.rename(runs / f"{folder.name}.corrupted")  # a dataset may be named so
    folder = runs / f"{folder.name}.corrupted"
    failed = json.loads((folder / "run.json").read_text())
    (runs / "failed").mkdir()
    kept = ("schema", "method", "backbone", "dataset", "seed", "settings", "hash", "environment")
    (runs / "failed" / "run.json").write_text(json.dumps({**{name: failed[name] for name in kept}, "status": "failed",
                                                          "error": "it diverged"}))
    assert len(load_runs(three)) == 3


def test_folders_of_compact_records_are_read_together_and_none_is_said(three, tmp_path):
    runs = load_runs(three)
    pack(tmp_path / "p" / "a", runs[:2])
    pack(tmp_path / "p" / "b", runs[1:])
    assert [run.hash for run in load_runs(tmp_path / "p")] == [run.hash for run in runs]
    assert "no folder" in message(lambda: load_runs(tmp_path / "nowhere"))
    assert "no finished run" in message(lambda: load_runs(tmp_path))
    (tmp_path / "runs").mkdir()
    assert "no finished run" in message(lambda: load_runs(tmp_path))


def test_of_two_records_of_a_seed_that_of_the_present_code_is_taken_and_other_data_refused(three, registry):
    spec = RunSpec("f3crec", "fedmf", "ml-100k")
    folder = next((three / "runs").glob("f3crec*"))
    older = folder.with_name("older")
    older.mkdir()
    for path in folder.iterdir():
        (older / path.name).write_bytes(path.read_bytes())
    alter(older, hash="0" * 32)
    current = json.loads((folder / "run.json").read_text())["hash"]
    assert [run.hash for run in matching(load_runs(three), registry, spec)] == [current]
    alter(folder, hash="1" * 32)
    text = message(lambda: matching(load_runs(three), registry, spec))
    assert "2 records of f3crec on fedmf, ml-100k, seed 0" in text and "000000000000, 111111111111" in text
    fabricate(three, registry, RunSpec("ft", "fedmf", "ml-100k"), 2, level(0.08), data="e" * 32)
    text = message(lambda: matching(load_runs(three), registry, RunSpec("ft", "fedmf", "ml-100k")))
    assert "different data files" in text and "seed 2" in text


def test_seeds_of_two_versions_of_a_users_plugin_are_refused(three, registry, monkeypatch):
    """One seed each, so that nothing else shows it; a user's plugin has the digest of its file for ``numbers``."""
    runs, spec = load_runs(three), RunSpec("ft", "fedmf", "ml-100k")
    monkeypatch.setattr(selection, "_current_hash", lambda registry, spec, tuned, meta: next(
        run.hash for run in runs if run.meta is meta) if meta["seed"] else "of the file as it is now")
    assert len(matching(runs, registry, spec)) == 2
    get, own = type(registry).get, replace(registry.get("method", "ft"), numbers="digest")
    monkeypatch.setattr(type(registry), "get", lambda self, kind, name: own if name == "ft" else get(self, kind, name))
    assert "other seeds are of different plugin code" in message(lambda: matching(runs, registry, spec))


def test_a_split_files_place_is_not_published(registry, tmp_path):
    spec = RunSpec("ft", "fedmf", "ml-100k", (("split_file", "/home/somebody/split.tsv"),))
    fabricate(tmp_path / "r", registry, spec, 0, level(0.08))
    pack(tmp_path / "c", load_runs(tmp_path / "r"))
    (run,) = load_runs(tmp_path / "c")
    assert run.meta["settings"]["split_file"] == "split.tsv"
    elsewhere = RunSpec("ft", "fedmf", "ml-100k", (("split_file", "/elsewhere/other.tsv"),))
    assert matching([run], registry, elsewhere) == [run]
    assert matching([run], registry, RunSpec("ft", "fedmf", "ml-100k")) == []


def test_pack_command(three, registry, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fabricate(three, registry, RunSpec("f3crec", "fedmf", "ml-100k", (("without", "itm"),)), 0, level(0.08))
    fabricate(three, registry, RunSpec("f3crec", "fedmf", "ml-100k", (("eps", 0.5),)), 0, level(0.08))
    options = ["--records", str(three), "--out"]
    assert "5 runs in 1 files" in output_of(capsys, "pack", *options, "c/all")
    kinds = {(run.meta["method"], run.meta["settings"].get("without"), run.meta["settings"].get("eps")):
             set(run.analysis["kind"]) for run in load_runs(Path("c/all"))}
    per_item = {"user_shift", "item_phi", "item_rank_change"}
    assert kinds == {("ft", None, None): {"user_shift"}, ("f3crec", "none", 0.006): per_item,
                     ("f3crec", "itm", 0.006): per_item, ("f3crec", "none", 0.5): {"user_shift"}}
    assert main(["pack", *options, "c/two", "--paper", "f3crec", "--table", "2", "--datasets", "ml-100k"]) == 0
    assert "2 of the 18 combinations" in capsys.readouterr().out
    index = json.loads(Path("c/two/index.json").read_text())
    assert index["commands"] == [f"run_bench.py pack --records {three.name} --out c/two --paper f3crec --table 2 "
                                 f"--datasets ml-100k"]
    assert {run.meta["method"] for run in load_runs(Path("c/two"))} == {"ft", "f3crec"}
    for bad, expected in ((["--table", "2"], "--table has no effect without --paper"),
                          (["--paper", "f3crec", "--table", "5", "--datasets", "lastfm-2k"], "nothing to pack"),
                          (["--paper", "f3rec"], "Did you mean 'f3crec'?")):
        assert main(["pack", *options, "c/bad", *bad]) == 2
        assert expected in capsys.readouterr().err
    for users in Path(three.name).glob("runs/*/users.parquet"):
        users.write_bytes(b"")
    assert main(["pack", *options, "c/bad"]) == 2
    assert "nothing to pack: no record in" in capsys.readouterr().err and not Path("c/bad").exists()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not list threads")
def test_reading_a_record_begins_no_thread(tmp_path):
    """One of Arrow's would give Python's memory back when it is its turn, and ends a process that ends before."""
    pd.DataFrame({name: np.arange(5.0) for name in "abcd"}).to_parquet(tmp_path / "users.parquet")
    code = ("import os, sys; from pathlib import Path; from fedcl_bench.records.frames import numbers_in\n"
            "path = Path(sys.argv[1]); before = len(os.listdir('/proc/self/task'))\n"
            "assert list(numbers_in(path.read_bytes(), path, '')) == list('abcd')\n"
            "print(len(os.listdir('/proc/self/task')) - before)")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "users.parquet")], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.stdout.split() == ["0"], done.stderr


@pytest.fixture(scope="module")
def finished(registry, tmp_path_factory):
    """A record of RLP2, whose state says how it ranks, and its stream."""
    config = make_config(registry, "rlp2", "fedmf", "ml-100k", overrides=[("test", {"rounds": 1, "k_core": 80})])
    stream = load_stream(config.source, config.stream)
    return Path(execute(config, lambda: stream, tmp_path_factory.mktemp("results"))["record"]), stream


def test_pytorch_opens_a_model_that_carries_the_ids_and_the_checksum_of_b2sum(finished):
    folder, stream = finished
    content = torch.load(folder / "model.pt", weights_only=True)
    assert content["user_ids"] == stream.user_tokens.tolist() and content["item_ids"] == stream.item_tokens.tolist()
    table = next(iter(content["public"].values()))
    assert len(table) == len(content["item_ids"]) and {f.name for f in fields(Snapshot)} < content.keys()
    saved = read_model(folder)
    assert saved.user_ids == content["user_ids"] and set(saved.client_state) == set(content["client_state"])
    assert "keys" in saved.client_state and torch.equal(next(iter(saved.tables.public.values())), table)
    digest, name = (folder / "model.pt.b2sum").read_text().split()
    content = (folder / "model.pt").read_bytes()
    assert name == "model.pt" and digest == hashlib.blake2b(content, digest_size=32).hexdigest()


def test_state_that_no_ranking_needs_is_left_out(registry, tmp_path):
    """Reg keeps the tables of the step before, which may be gigabytes."""
    config = make_config(registry, "reg", "fedmf", "ml-100k", overrides=[("test", {"rounds": 1, "k_core": 80})])
    saved = read_model(Path(executed(config, tmp_path)["record"]))
    assert saved.client_state == saved.server_state == {} and saved.user_ids


def test_nearly_best():
    """The first validated round with 95 % of a block's best; what came later is not counted."""
    curve = pd.DataFrame({
        "step": [0, 0, 0, 0, 1, 1], "round": [0, 1, 2, 3, 0, 1], "valid": [0.1, math.nan, 0.96, 1.0, 0.5, 0.2],
        "participants": [10, 10, 10, 10, 4, 4], "dropped": [1, 0, 0, 0, 0, 0], "bytes_up": [2, 2, 2, 2, 2, 2],
        "bytes_down": [3, 3, 3, 3, 3, 3], "train_seconds": [1.0] * 6, "evaluate_seconds": [0.5] * 6})
    assert nearly_best(curve) == {"share": 0.95, "rounds": [3, 1], "seconds": [4.5, 1.5], "bytes_up": [60, 8],
                                  "bytes_down": [93, 12]}
    assert nearly_best(curve.drop(columns="dropped"))["bytes_down"] == [90, 12]
    zero = curve.assign(valid=0.0)
    assert nearly_best(zero)["rounds"] == [1, 1]


@pytest.mark.parametrize("valid, rising", [
    ([.1, .2, .3], True), ([.1, .3, .2], False),
    ([.1, .3, .3], False),  # as good as before: no improvement
    ([.1, float("nan"), .2, float("nan")], True),  # the last round that was validated
    ([.3], False), ([float("nan"), .3], False),  # nothing to compare with
    ([-.9, -.8], True)])  # of an error the values are negative
def test_blocks_that_end_while_validation_still_improves(valid, rising):
    done = [.1, .3, .2]
    curve = pd.DataFrame({"step": [0] * 3 + [1] * len(valid), "valid": done + valid})
    assert still_improving(curve) == [1] * rising


def test_a_run_says_that_validation_still_improves(registry, tmp_path):
    """Fabricated runs have two rounds a block, the second of which is better; those of one round say nothing."""
    def said(seeds, rounds):
        folders = [fabricate(tmp_path / str(rounds), registry, RunSpec("ft", "fedmf", "ml-100k"), seed, level(0.1),
                             rounds=rounds) for seed in range(seeds)]
        runs = [{**json.loads((folder / "run.json").read_text()), "record": str(folder)} for folder in folders]
        return improvement_notes(runs[0] if seeds == 1 else {**runs[0], "runs": runs})
    assert said(2, 2) == ["still improving in the last round: validation of 8 of 8 blocks (block 0, block 1, block 2, "
                          "block 3); more rounds may give other numbers"]
    assert said(1, 1) == []
    curve = pd.DataFrame({"step": 0, "stage": [0, 0, 1, 1], "valid": [.1, .2, .4, .3]})
    assert still_improving(curve) == [] and still_improving(curve.assign(valid=[.9, .8, .1, .2])) == [0]
