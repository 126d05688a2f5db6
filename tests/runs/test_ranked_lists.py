"""Ranked lists in files: metrics taken from the files alone are those of the record."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict

import pytest
import torch
import yaml
from helpers import lay_shop

from fedcl_bench.cli.main import main
from fedcl_bench.runs.ranked_lists import in_order_of_metrics

FT = "--method ft --set rounds=2 --quiet --save-lists "
RUNS = {  # a command, and the metric that its lists have
    "blocks": (FT + "--backbone fedmf --set k_core=80", "ndcg@20"),
    "static": (FT + "--backbone fedmf --set stream=static --set k_core=80 --set topk=5,10", "ndcg@10"),
    "sessions": (FT + "--backbone sasrec --set stream=sessions --set min_session_length=5 --set min_sessions=4 "
                      "--set dim=8 --set patience=0 --set topk=100", "all:ndcg@100"),
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
    assert tests == {"blocks": 10, "static": 1, "sessions": 1, "domains": 2}[name] == len(list(folder.glob("*.run.gz")))
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
    assert main([*words, "--rerun"]) == 0 and (tmp_path / "results/lists" / before).is_dir()
    assert main([*words, "--honest"]) == 2 and "--save-lists" in capsys.readouterr().err


def test_items_of_equal_score_come_before_the_one_to_find():
    lists = torch.tensor([[4, 7, 5], [4, 7, 5], [4, 7, 5], [4, 7, 5]])
    to_find, rank = torch.tensor([4, 4, 9, 5]), torch.tensor([0.0, 1 / 3, 1 / 2, 1.0])
    assert in_order_of_metrics(lists, to_find, rank).tolist() == [[7, 5, -1], [7, 5, 4], [4, 9, 7], [5, 4, 7]]
