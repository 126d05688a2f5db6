"""Logs of runs, read back: they hold the record's rounds and tests, however the run came to its end. Metrics taken
from files of ranked lists alone are those of the record."""

import gzip
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import yaml
from helpers import lay_shop, refused

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.runs import logs
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.ranked_lists import in_order_of_metrics
from fedcl_bench.runs.runner import Interrupted, Watch, execute

SETTINGS = {"rounds": 2, "k_core": 80, "blocks": 2, "evaluate_every": 2}
RUN = ["--method", "f3crec", "--backbone", "fedmf", "--quiet",
       *(word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}"))]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with a log of each kind that needs no other package, and its only record."""
    folder = tmp_path_factory.mktemp("finished")
    assert main([*RUN, "--results", str(folder), "--log", "csv", "--log", f"tensorboard:{folder / 'events'}"]) == 0
    (record,) = (folder / "runs").iterdir()
    return folder, record


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package; what it was given is in ``begun`` and ``logged``."""
    given = SimpleNamespace(begun=[], logged=[], finished=0)

    def finish():
        given.finished += 1

    def init(**options):
        given.begun.append(options)
        return SimpleNamespace(log=given.logged.append, finish=finish,
                               define_metric=lambda name, step_metric: given.begun.append((name, step_metric)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return given


def frames(folder: Path, record: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    return tuple(pd.read_csv(folder / record.name / f"{name}.csv") for name in ("rounds", "tests"))


def check_csv(folder: Path, record: Path, *but: str) -> None:
    """The files hold the record's rounds and tests; ``but``: columns that differ from run to run."""
    rounds, tests = frames(folder, record)
    expected = pd.read_parquet(record / "rounds.parquet")
    assert rounds.number.tolist() == list(range(1, len(expected) + 1))
    pd.testing.assert_frame_equal(rounds[expected.columns].drop(columns=[*but]), expected.drop(columns=[*but]),
                                  check_dtype=False)
    expected = pd.read_parquet(record / "metrics.parquet")
    pd.testing.assert_frame_equal(tests[expected.columns], expected, check_dtype=False)
    last = rounds.groupby("step").number.max()
    assert tests.number.tolist() == last[tests.trained_block].tolist()


def test_events_and_csv_files_read_back_are_the_record(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, record = finished
    read = EventAccumulator(str(folder / "events" / record.name))
    read.Reload()
    rounds = pd.read_parquet(record / "rounds.parquet")
    for name in ("loss", "valid", "participants", "bytes_up", "train_seconds"):
        values = rounds[name].dropna()
        scalars = read.Scalars(f"round/{name}")
        assert [scalar.step - 1 for scalar in scalars] == values.index.tolist()
        assert [scalar.value for scalar in scalars] == pytest.approx(values.tolist())
    tests = pd.read_parquet(record / "metrics.parquet")
    for (metric, block), part in tests.groupby(["metric", "tested_block"]):
        scalars = read.Scalars(f"test/{metric}/block {block}")
        assert [scalar.step for scalar in scalars] == [2 * (block + 1) for block in part["trained_block"]]
        assert [scalar.value for scalar in scalars] == pytest.approx(part["mean"].tolist())
    assert read.Tags()["tensors"] == ["settings/text_summary"]
    folder, record = finished
    check_csv(folder / "logs/csv", record)
    rounds, _ = frames(folder / "logs/csv", record)
    assert len(rounds) == 4 and rounds.valid.isna().tolist() == [True, False] * 2


def test_wandb_is_given_the_same_offline(finished, wandb):
    """Also of a finished run, of which nothing is run again."""
    folder, record = finished
    assert main([*RUN, "--results", str(folder), "--log", f"wandb:{folder / 'offline'}"]) == 0
    options, axis = wandb.begun
    assert options["mode"] == "offline" and options["name"] == record.name and axis == ("*", "number")
    assert options["dir"] == str(folder / "offline" / record.name) and options["config"]["rounds"] == 2
    losses = [row["round/loss"] for row in wandb.logged if "round/loss" in row]
    assert losses == pd.read_parquet(record / "rounds.parquet").loss.tolist() and wandb.finished == 1
    assert [row["number"] for row in wandb.logged] == sorted(row["number"] for row in wandb.logged)
    tested = [row for row in wandb.logged if "test/ndcg@20/block 0" in row]
    assert [row["number"] for row in tested] == [2, 4]


def test_a_resumed_run_is_logged_from_its_beginning(registry, tmp_path):
    config = make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("a test", SETTINGS)])
    stream = load_stream(config.source, config.stream)
    target = [logs.Target("csv", tmp_path / "logs")]

    def execution(log, stop=lambda: False):
        return execute(config, lambda: stream, tmp_path, Watch(lambda _, progress: log.update(progress), stop=stop))
    asked = iter([False] * 4 + [True])
    with pytest.raises(Interrupted), logs.RunLog(config, target) as log:
        execution(log, lambda: next(asked))
    assert len(frames(tmp_path / "logs", tmp_path / config.name)[0]) >= 2
    with logs.RunLog(config, target) as log:
        result = execution(log)
        written = frames(tmp_path / "logs", tmp_path / config.name)[0]
        log.finish(Path(result["record"]))
    assert len(written) == 4  # while it ran
    check_csv(tmp_path / "logs", Path(result["record"]))


def test_tests_that_come_with_the_record_only(finished, registry, tmp_path):
    """As of a run on shards, whose tests are gathered at its end."""
    folder, record = finished
    config = make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("a test", SETTINGS)])
    curve = pd.read_parquet(record / "rounds.parquet").to_dict("records")
    with logs.RunLog(config, [logs.Target("csv", tmp_path)]) as log:
        for end in range(1, len(curve) + 1):
            log.update(SimpleNamespace(curve=curve[:end], tests=()))
        log.finish(record)
        log.finish(record)  # nothing is written twice
    check_csv(tmp_path, record)


def test_a_column_that_comes_later(tmp_path):
    writer = logs.CsvWriter(tmp_path, None)
    for row in ({"loss": 1.0}, {"loss": 2.0, "extra": 3}, {"loss": 4.0}):
        writer.write("rounds", 1, row)
    writer.flush()
    assert (tmp_path / "rounds.csv").read_text().split() == ["number,loss,extra", "1,1.0,", "1,2.0,3", "1,4.0,"]


def test_a_missing_package_and_a_folder_that_is_a_file_are_named(tmp_path, capsys, monkeypatch, finished, registry):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "python -m pip install wandb" in refused(capsys, *RUN, "--results", tmp_path / "results", "--log", "wandb")
    assert not (tmp_path / "results").exists()
    (tmp_path / "file").write_text("")
    config = make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("a test", SETTINGS)])
    for kind in ("csv", "tensorboard"):
        with pytest.raises(UserError, match="--log: cannot be written"), \
                logs.RunLog(config, [logs.Target(kind, tmp_path / "file")]) as log:
            log.finish(finished[1])


FT = "--method ft --set rounds=2 --quiet --save-lists "
RUNS = {  # a command, and the metric that its lists have
    "blocks": (FT + "--backbone fedmf --set k_core=80 --set blocks=3", "ndcg@20"),
    "static": (FT + "--backbone fedmf --set stream=static --set k_core=80 --set topk=5,10", "ndcg@10"),
    "sessions": (FT + "--backbone sasrec --set stream=sessions --set min_session_length=5 --set min_sessions=4 "
                      "--set dim=8 --set patience=0 --set topk=100 --set evaluate_users=60", "all:ndcg@100"),
    "domains": (FT + "--backbone sasrec --dataset tea+pots --set dim=8 --set topk=3 "
                     "--set valid_metric=ndcg@3 --set patience=0", "ndcg@3")}


def lines(path):
    return [line.split(" ") for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def ndcg(run, qrels, k):
    """By the files alone, as tools that know nothing of the suite take it: sorted by score, binary gains."""
    lists, to_find = defaultdict(list), defaultdict(set)
    for user, _, item, _, score, _ in run:
        lists[user].append((-float(score), item))
    for user, _, item, gain in qrels:
        assert gain == "1"
        to_find[user].add(item)
    ideal = [sum(1 / math.log2(place + 2) for place in range(n)) for n in range(k + 1)]
    return sum(sum(1 / math.log2(place + 2) for place, (_, item) in enumerate(sorted(lists[user])[:k]) if item in found)
               / ideal[min(k, len(found))] for user, found in to_find.items()) / len(to_find)


@pytest.mark.parametrize("name", RUNS)
def test_recomputed_metrics_are_the_records(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lay_shop("tea", 0, 30, 12), lay_shop("pots", 1, 25, 9)
    words, metric = RUNS[name]
    assert main(words.split()) == 0, capsys.readouterr().err
    (record,), (folder,) = (list((tmp_path / "results" / part).glob("*")) for part in ("runs", "lists"))
    content = json.loads((record / "run.json").read_text())
    tests = 0
    for trained, row in enumerate(content["matrix"][metric]):
        for tested, value in enumerate(row):
            if value is not None and (folder / f"trained{trained}-tested{tested}.run.gz").exists():
                run = lines(folder / f"trained{trained}-tested{tested}.run.gz")
                assert len({(user, item) for user, _, item, *_ in run}) == len(run)
                found = ndcg(run, lines(folder / f"tested{tested}.qrels.gz"), int(metric.partition("@")[2]))
                assert found == pytest.approx(value, abs=1e-12) and value > 0
                tests += 1
    assert tests == {"blocks": 6, "static": 1, "sessions": 1, "domains": 2}[name] == len(list(folder.glob("*.run.gz")))
    metadata = (folder / "ir_metadata.yaml").read_text().splitlines()
    assert metadata[0] == "# ir_metadata.start" and metadata[-1] == "# ir_metadata.end"
    said = yaml.safe_load("\n".join(line[2:] for line in metadata[1:-1]))
    assert said["method"]["retrieval"][0]["hash"] == content["hash"]
    assert said["data"]["test collection"]["name"] == content["dataset"]


def test_a_finished_run_without_lists_is_not_taken_for_one_with_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = RUNS["static"][0].split()
    assert main([word for word in words if word != "--save-lists"]) == 0 and not (tmp_path / "results/lists").exists()
    before = next((tmp_path / "results/runs").iterdir()).name
    assert main(words) == 2 and "--rerun" in capsys.readouterr().err
    assert main([*words, "--rerun"]) == 0 and main(words) == 0
    (tmp_path / "results/lists" / before / "ir_metadata.yaml").unlink()  # as where only some are written
    assert main(words) == 2 and "--rerun" in capsys.readouterr().err
    assert main([*words, "--honest"]) == 2 and "--save-lists" in capsys.readouterr().err


def test_items_of_equal_score_come_before_the_one_to_find():
    lists = torch.tensor([[4, 7, 5], [4, 7, 5], [4, 7, 5], [4, 7, 5]])
    to_find, rank = torch.tensor([4, 4, 9, 5]), torch.tensor([0.0, 1 / 3, 1 / 2, 1.0])
    assert in_order_of_metrics(lists, to_find, rank).tolist() == [[7, 5, -1], [7, 5, 4], [4, 9, 7], [5, 4, 7]]
