"""Metrics of a user's own: the page's example against RecBole's classes, in every command, and what `check` catches."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import ROOT, output_of, refused
from recbole.evaluator import metrics as recbole_metrics

import fedcl_bench as fb
from fedcl_bench.cli.main import main
from fedcl_bench.cli.show import few_users
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.core.errors import PluginError, UserError
from fedcl_bench.evaluation.metrics import SHIPPED, measure
from fedcl_bench.federation.loop import run
from fedcl_bench.plugin.metric import Catalogue, Metric, RankedLists
from fedcl_bench.records.published import write
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.records.store import load_runs
from fedcl_bench.testing import assert_passed, check_metric

QUICK = {"k_core": 80, "rounds": 1}
SESSIONS = {"stream": "sessions", "min_session_length": 5, "min_sessions": 4, "rounds": 1}
PAGE = re.search(r"^```python\n(# my_plugins/metrics\.py\n.*?)^```$", (ROOT / "docs/plugins.md").read_text(
    encoding="utf-8"), re.DOTALL | re.MULTILINE)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of plugins with the example of docs/plugins.md: ``map`` and ``tail``."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "metrics.py").write_text(PAGE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def mine(folder):
    return discover([folder])


def config_of(registry, **settings):
    return make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", {**QUICK, **settings})])


def finish(config):
    f = config.federation(load_stream(config.source, config.stream))
    f.check()
    *_, progress = run(f)
    return progress


@pytest.mark.parametrize("seed", range(3))
def test_the_example_is_recboles_map_and_tail(mine, seed, monkeypatch):
    rng = np.random.default_rng(seed)
    users, topk, n_items = 9, [1, 3, 7], 30
    items = rng.random((users, n_items)).argsort(1)[:, :7]
    hits = rng.random((users, 7)) < 0.3
    relevant = np.maximum(hits.sum(1) + rng.integers(0, 4, users), 1)
    counts = rng.integers(1, 12, n_items)
    catalogue = Catalogue(torch.from_numpy(counts).double(), torch.zeros(n_items), 9.0, torch.zeros(n_items, 2))
    lists = RankedLists(torch.from_numpy(hits), torch.from_numpy(relevant), torch.from_numpy(items), catalogue)
    ours = measure([mine.get("metric", name).cls() for name in ("map", "tail")], lists, topk)
    monkeypatch.setattr(np, "float", np.float64, raising=False)  # RecBole's MAP uses the old name
    config = {"topk": topk, "metric_decimal_place": 12, "tail_ratio": 5}
    theirs = recbole_metrics.MAP(config).calculate_metric(
        {"rec.topk": torch.from_numpy(np.concatenate([hits, relevant[:, None]], axis=1).astype(np.int64))})
    theirs |= recbole_metrics.TailPercentage(config).calculate_metric(
        {"rec.items": torch.from_numpy(items), "data.count_items": dict(enumerate(counts))})
    for k in topk:
        assert float(ours[f"map@{k}"].mean()) == pytest.approx(theirs[f"map@{k}"], abs=1e-9)
        assert float(ours[f"tail@{k}"].mean()) == pytest.approx(theirs[f"tailpercentage@{k}"], abs=1e-9)


def test_they_are_recorded_beside_the_same_numbers(mine, folder, tmp_path, capsys, monkeypatch):
    """Records, Python, tables and tests; runs with and without them are the same otherwise. Others are lacking."""
    monkeypatch.chdir(tmp_path)
    settings = {**QUICK, "plugins": folder, "progress": False}
    results = {method: fb.run(method, "fedmf", extra_metrics="tail,map", **settings) for method in ("ft", "f3crec")}
    plain = fb.run("ft", "fedmf", **settings)
    means = results["ft"].metrics
    names = ("ndcg", "recall", "hit", "precision", "mrr", "map", "tail")
    assert set(means["metric"]) == {f"{name}@20" for name in names}
    same = means[~means["metric"].isin(["map@20", "tail@20"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(same, plain.metrics)
    record = results["ft"].folders[0]
    users = pd.read_parquet(record / "users.parquet")
    kept = pd.read_parquet(record / "metrics.parquet").set_index(["trained_block", "tested_block", "metric"])["mean"]
    for name in ("map@20", "tail@20"):
        last = users[(users.trained_block == 3) & (users.tested_block == 1) & (users.metric == name)]
        assert len(last) and last["value"].between(0.0, 1.0).all()
        assert kept[3, 1, name] == pytest.approx(last["value"].mean())
    assert kept[3, 1, "map@20"] > 0.0
    assert json.loads((record / "run.json").read_text())["settings"]["extra_metrics"] == ["map", "tail"]

    words = ["--plugins", str(folder), "--set", "rounds=1", "--set", "k_core=80"]
    assert main(["tables", "--rows", "method", "--columns", "dataset", "--metrics", "map@20,tail@20", *words]) == 0
    expected = np.mean([run.meta["metrics"]["map@20"]["avg_incremental"] for run in results["ft"].runs])
    assert f"{expected:.4f}" in capsys.readouterr().out
    assert main(["compare", "f3crec", "ft", "--backbone", "fedmf", "--metric", "map@20", *words]) == 0
    assert "map@20 on the block just trained" in capsys.readouterr().out
    (test,) = results["f3crec"].compare("ft", metric="map@20").itertuples()
    assert test.difference == pytest.approx(np.mean([run.meta["metrics"]["map@20"]["avg_incremental"] for run in
                                                     results["f3crec"].runs]) - expected, abs=0.01)
    write(tmp_path / "c", load_runs(Path("results")), "pack", lambda run: True)
    packed = [run for run in load_runs(tmp_path / "c") if run.hash == results["ft"].runs[0].hash]
    assert {"map@20", "tail@20"} <= set(packed[0].users["metric"].unique())

    assert "no novelty@20" in refused(capsys, "tables", "--metrics", "novelty@20", *words)
    assert "other metrics with --set extra_metrics=NAME" in refused(
        capsys, "compare", "ft", "f3crec", "--backbone", "fedmf", "--metric", "novelty@20", *words)


def test_on_the_command_line_and_in_validation(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--method", "ft", "--backbone", "fedmf", "--set", "k_core=80", "--set", "rounds=3", "--quiet",
             "--plugins", str(folder)]
    shown = output_of(capsys, *words, "--set", "extra_metrics=map", "--set", "topk=5,20")
    assert "map@5 " in shown and "map@20 " in shown
    result = json.loads(output_of(capsys, *words, "--set", "valid_metric=MAP@10", "--json"))
    assert result["settings"]["valid_metric"] == "map@10" and "map@20" in result["metrics"]
    rounds = pd.read_parquet(Path(result["record"]) / "rounds.parquet")
    assert rounds["valid"].between(1e-6, 1.0, inclusive="neither").all()
    assert "map average precision" in " ".join(output_of(capsys, "list", "--plugins", folder).split())
    shown = output_of(capsys, "list", "tail", "--plugins", folder)
    assert "K places with an item of at most 5" in shown and "extra_metrics=tail" in shown and "valid" not in shown


def test_of_streams_of_sessions(mine):
    """A metric of hits is of both rankings, one of items of the full one; the lists are those that hits are of."""
    progress = finish(make_config(mine, "ft", "fedmf", "ml-100k", overrides=[
        ("test", {**SESSIONS, "extra_metrics": "map,tail,novelty"})]))
    (_, _, scores), = progress.tests
    assert {name for name in scores.values if "map" in name or "tail" in name or "novelty" in name} == {
        "map@10", "all:map@10", "all:tail@10", "all:novelty@10"}
    assert torch.equal(scores.values["map@10"], scores.values["mrr@10"])  # of a single item to find
    novelty = next(values for _, kind, _, values in progress.analysis if kind == "novelty")
    assert torch.equal(scores.values["all:novelty@10"], novelty)


def test_few_users_have_intervals_of_shares_alone():
    """A mean beyond [0, 1] is no share, so it has no interval of one."""
    values = {"per_block": [0.5], "avg_incremental": None}
    text, = few_users({"settings": {"stream": "blocks"}, "rounds": [1], "tested": {"users": [3]}, "metrics": {
        "ndcg@20": values, "all:hit@20": values, "novelty@20": {"per_block": [2.8]}}})
    assert "ndcg@20 0." in text and "all:hit@20 0." in text and "novelty" not in text


def test_code_counts_where_it_is_used(mine, registry, folder, tmp_path):
    edited = tmp_path / "edited"
    edited.mkdir()
    (edited / "metrics.py").write_text(PAGE.replace("counts <= 5", "counts <= 6"), encoding="utf-8")
    other = discover([edited])
    assert config_of(mine).hash == config_of(registry).hash == config_of(other).hash
    for settings in ({"extra_metrics": "map"}, {"valid_metric": "map@20"}):
        hashes = {config_of(source, **settings).hash for source in (mine, other)} | {config_of(mine).hash}
        assert len(hashes) == 3
    assert config_of(registry, extra_metrics="novelty").hash != config_of(registry).hash
    same = [config_of(mine, extra_metrics=value).hash for value in ("map,tail", "tail,map", ["Tail", "map", "map"])]
    assert len(set(same)) == 1
    assert config_of(mine, extra_metrics="map,tail", valid_metric="map@20").hash == config_of(
        mine, extra_metrics="tail", valid_metric="map@20").hash
    assert config_of(registry, extra_metrics="none").hash == config_of(registry).hash


@pytest.mark.parametrize("settings, message", [
    ({"extra_metrics": "mep"}, "unknown metric 'mep'.\nDid you mean 'map'"),
    ({"extra_metrics": "map@20"}, "found 'map@20', accepted: names of metrics without @K, as map"),
    ({"extra_metrics": "ndcg"}, "found 'ndcg', which every run has"),
    ({"extra_metrics": 3}, "accepted: a list of names, as a,b, or none"),
    ({"valid_metric": "tail@20"}, "'tail@20', whose metric looks at the items of lists, accepted: a metric of hits"),
    ({"valid_metric": "mep@20"}, "unknown metric 'mep'"), ({"valid_metric": "map"}, "accepted: NAME@K")])
def test_wrong_names(mine, settings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        config_of(mine, **settings)


def metric(values, doc="A test.", of_items=False):
    """A class of metrics with a name of its own."""
    body = {"name": "made", "title": "made here", "reference": "a test", "of_items": of_items, "__doc__": doc}
    return type("Made", (Metric,), {**body, "values": lambda self, lists: values(lists)})


def clears(lists):
    result = lists.hits.double().sum(1)
    lists.hits[:] = False
    return result


@pytest.mark.parametrize("cls, name, evidence", [
    (metric(lambda lists: 2.0 * lists.hits.any(1), doc=None), "says what it is", "no formula as its docstring"),
    (metric(lambda lists: lists.hits.double().mean()), "a number per user",
     "expected a floating tensor of shape (23,) = (n,): a number per user"),
    (metric(lambda lists: lists.hits.double().sum(1) / lists.hits.sum(1)), "a number per user",
     "expected finite numbers, also of lists without a hit"),
    (metric(lambda lists: lists.hits.double().sum(1) - lists.hits.double().sum(1).mean() if len(lists.hits)
            else torch.zeros(0)), "own list alone", "a value may depend on the user's own list alone"),
    (metric(lambda lists: lists.hits.double().sum(1) * (1 + (len(lists.hits) > 1000))), "own list alone",
     "alone; a value may"),
    (metric(lambda lists: (lists.items % 7).double().mean(1), of_items=True), "own list alone", "numbered otherwise"),
    (metric(lambda lists: lists.hits.double().sum(1) * (-1.0 if lists.k > 50 else 1.0)), "a hit counts",
     "with a hit more, at rank"),
    (metric(lambda lists: lists.hits.float().sum(1) * torch.tensor(10.0) ** lists.k), "a number per user", "finite"),
    (metric(lambda lists: torch.rand(len(lists.hits))), "the same each time", "it draws random numbers"),
    (metric(clears), "the same each time", "differ from call"),
    (metric(lambda lists: lists.items[:, 0].double()), "a number per user", "only with of_items = True"),
    (metric(lambda lists: lists.catalogue.counts.log()[lists.items[:, -1]] / (lists.items[:, -1] >= 0), of_items=True),
     "a number per user", "expected finite numbers"),
    (metric(lambda lists: torch.ones(len(lists.hits))), "a hit counts", "no hit at any rank changes a value"),
    (metric(lambda lists: 1.0 / (1.0 + lists.hits.sum(1))), "a hit counts", "with a hit more, at rank")],
    ids=("undescribed", "one number", "no number", "relative", "of many", "of numbers", "long", "overflows", "random",
         "writes", "peeks", "unranked", "constant", "upside down"))
def test_check_catches(cls, name, evidence):
    report = check_metric(cls, only=[name])
    assert not report.passed and evidence in report.failures[0].evidence
    assert report.failures[0].property == name


@pytest.mark.parametrize("cls", [metric(lambda lists: 2.0 * lists.hits.any(1)), *SHIPPED])
def test_check_passes(cls):
    assert_passed(check_metric(cls))


def test_check_of_the_example(folder, capsys):
    for name in ("map", "tail"):
        shown = output_of(capsys, "check", name, "--plugins", folder)
        assert "all properties hold" in shown and "partner" not in shown
    assert main(["check", "map", "--with", "ft", "--plugins", str(folder)]) == 2
    assert "a metric is checked without partners" in capsys.readouterr().err


def test_a_wrong_metric_ends_the_run_with_its_name_and_a_name_is_taken_once(tmp_path):
    (tmp_path / "mine.py").write_text(PAGE.replace("/ lists.relevant.clamp(max=lists.k)", "/ hits.sum(1)"),
                                      encoding="utf-8")
    with pytest.raises(PluginError, match="metric 'map': values returned nan"):
        finish(config_of(discover([tmp_path]), extra_metrics="map"))
    (tmp_path / "mine.py").write_text(PAGE.replace('name = "map"', 'name = "ndcg"'), encoding="utf-8")
    with pytest.raises(UserError, match="two metric plugins are named 'ndcg'"):
        discover([tmp_path]).get("metric", "ndcg")
