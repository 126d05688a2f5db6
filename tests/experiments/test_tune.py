"""Searches: validation decides, test scores are never read, every method has the same budget of client-updates."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from helpers import ROOT, SameProcess

from fedcl_bench.cli.commands import tune as tune_command
from fedcl_bench.cli.main import main, parse
from fedcl_bench.data import source
from fedcl_bench.errors import UserError
from fedcl_bench.experiments import search, tune
from fedcl_bench.cli.grid_view import show_tuned
from fedcl_bench.experiments.grid import Outcome, make_tasks
from fedcl_bench.experiments.search import Combination, Effort, Run, Trial
from fedcl_bench.runs import specs
from fedcl_bench.runs.specs import RunSpec, Tuned, Where, read_tuned
from fedcl_bench.workers import pool

QUICK = ["--set", "rounds=1", "--set", "k_core=50"]
FT, REG, KD, F3CREC, SPP = (Combination(method, "fedmf", "ml-100k") for method in ("ft", "reg", "kd", "f3crec", "spp"))


def write_curve(folder, clients=5, **by_block):
    """A run's ``rounds.parquet`` and nothing else: validation values of its rounds by block."""
    rows = [(int(block[1:]), i, value, clients) for block, values in by_block.items() for i, value in enumerate(values)]
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=["step", "round", "valid", "participants"]).to_parquet(folder / "rounds.parquet")


@pytest.fixture
def searching(registry, tmp_path):
    """Tune without training: ``value`` says a run's validation value from its settings, or its status without one;
    ``cost`` how many clients take part in each of its two rounds. Runs are noted once each, FT's by which budgets are
    counted among them."""
    def searching(value, *combinations, again=False, cost=lambda method, s: 5, **effort):
        tried = {}

        def run(tasks):
            outcomes = []
            for task in tasks:
                settings, folder = task.config.settings | {"seed": task.config.seed}, task.record(tmp_path).folder
                tried[task.config.hash] = task.spec.method, settings
                found = value(task.spec.method, settings)
                if isinstance(found, str):
                    outcomes.append(Outcome(task, found, error="because"))
                else:
                    write_curve(folder, cost(task.spec.method, settings), b0=[9.0], b1=[found, 0.0])
                    outcomes.append(Outcome(task, "finished", 1.0))
            return outcomes
        tuning = tune.Tuning(registry, Effort(**{"seeds": 1, "sampler": "random", "budget": 12} | effort),
                             tmp_path / "my-tuned", tmp_path, again=again)
        results = tune.tune(tuning, combinations, run)
        return {result.combination: result for result in results}, list(tried.values())
    return searching


def runs_of(content):
    """All runs of a file's trials."""
    return [run for trial in content["trials"] for run in trial["runs"]]


# The objective


def test_the_value_is_the_mean_of_the_best_of_blocks_1_on(tmp_path):
    """The folder has no other file, so nothing else can be read. Client-updates are of the same blocks."""
    task = SimpleNamespace(config=SimpleNamespace(seed=3, hash="h", is_domains=False))
    write_curve(tmp_path / "a", b0=[0.9], b1=[0.1, 0.3, 0.2], b2=[0.5, 0.1])
    run = tune.finished_run(task, tmp_path / "a")
    assert run == Run(3, "h", (0.3, 0.5), 25) and run.value == pytest.approx((0.3 + 0.5) / 2)
    write_curve(tmp_path / "b", b0=[0.1, 0.7])
    assert tune.finished_run(task, tmp_path / "b") == Run(3, "h", (0.7,), 10)


def test_a_failed_run_costs_what_was_done(tmp_path, registry):
    task, = make_tasks(registry, [RunSpec("reg", "fedmf", "ml-100k")], [0])
    folder = task.record(tmp_path).folder
    assert tune.failed_run(task, folder).updates == 0
    folder.mkdir(parents=True)
    for updates, counted in (([50, 3, 0], 3), ([50], 50), ([], 0)):
        task.record(tmp_path).fail(task.config, "diverged", updates)
        run = tune.failed_run(task, folder)
        assert (run.updates, run.value) == (counted, None)


def test_the_value_of_domains_is_the_mean_of_all(tmp_path):
    task = SimpleNamespace(config=SimpleNamespace(seed=3, hash="h", is_domains=True))
    write_curve(tmp_path / "a", b0=[0.9, 0.2], b1=[0.1, 0.3])
    assert tune.finished_run(task, tmp_path / "a") == Run(3, "h", (0.9, 0.3), 20)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A real search by the command line, in which every read of a table is noted."""
    folder, read, original = tmp_path_factory.mktemp("tuned"), [], tune.read_columns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pd, "read_parquet", lambda content, columns, parse=pd.read_parquet: read.append(columns) or
                      parse(content, columns=columns))
        patch.setattr(tune, "read_columns", lambda folder, name, columns, more: read.append(name) or
                      original(folder, name, columns))
        patch.setattr(pool, "Processes", SameProcess)
        patch.setattr(specs, "shipped_tuned", lambda: Path("nowhere"))
        assert main([*COMMAND, "--results", str(folder), "--quiet"]) == 0
    return folder, read


COMMAND = ["tune", "--methods", "kd,reg", "--backbones", "fedmf", "--budget", "3", "--sampler", "random", "--set",
           "rounds=2", "--set", "k_core=50", "--jobs", "1"]


def test_the_best_validation_wins(tuned):
    """FT is searched first although nobody named it; everybody has the same budget and FT's learning rate. Of the
    points that were tried on both seeds the one with the best mean is chosen."""
    folder, _ = tuned
    found = {path.stem: json.loads(path.read_text()) for path in (folder / "my-tuned").glob("*.json")}
    assert set(found) == {f"ml-100k-fedmf-{method}" for method in ("ft", "kd", "reg")}
    lr = found["ml-100k-fedmf-ft"]["settings"]["lr"]
    for content in found.values():
        assert [len(trial["runs"]) for trial in content["trials"]].count(2) >= 1 and len(content["trials"]) >= 3
        updates, values = 0, {}
        for trial in content["trials"]:
            means = []
            for run in trial["runs"]:
                record, = folder.glob(f"runs/*-s{run['seed']}-{run['hash'][:12]}")
                curve = pd.read_parquet(record / "rounds.parquet").query("step >= 1")
                means.append(curve.groupby("step").valid.max().mean())
                assert run["value"] == pytest.approx(means[-1])
                assert run["client_updates"] == curve.participants.sum()
                updates += run["client_updates"]
                settings = json.loads((record / "run.json").read_text())["settings"]
                assert {name: settings[name] for name in trial["settings"]} == trial["settings"]
                assert settings["rounds"] == 2 and (content["method"] == "ft" or settings["lr"] == lr)
            if len(means) == 2:
                values[json.dumps(trial["settings"])] = sum(means) / 2
                assert trial["value"] == pytest.approx(sum(means) / 2) and trial["status"] == "finished"
            else:
                assert trial["value"] is None and trial["status"] == "first seed only"
        spending = content["client_updates"]
        assert spending == {"budget": spending["budget"], "spent": updates}
        assert updates <= spending["budget"] == found["ml-100k-fedmf-ft"]["client_updates"]["budget"]
        assert content["value"] == pytest.approx(max(values.values())) and "validation ndcg@20" in content["objective"]
        best, *_ = [trial for trial in content["trials"] if trial["value"] == content["value"]]
        assert content["settings"] == {**({} if content["method"] == "ft" else {"lr": lr}), **best["settings"]}
    assert {t["settings"]["lr"] for t in found["ml-100k-fedmf-ft"]["trials"]} == {0.1, 0.5, 1.0}


def test_no_test_score_is_read(tuned):
    folder, read = tuned
    statuses = [json.loads(path.read_text())["status"] for path in folder.glob("runs/*/run.json")]
    finished = [status for status in statuses if status == "finished"]
    assert len(finished) >= 7 and set(map(str, read)) == {"rounds", "['step', 'valid', 'participants']"}


def test_equal_searches_are_kept_and_trials_reused(tuned, capsys):
    folder, _ = tuned
    assert main([*COMMAND, "--results", str(folder), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)["results"]
    assert [(result["method"], result["status"]) for result in found] == [("kd", "kept"), ("reg", "kept")]
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/run.json")}
    files = {path: path.read_text() for path in (folder / "my-tuned").glob("*.json")}
    assert main([*COMMAND, "--results", str(folder), "--again"]) == 0
    assert "as before" not in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/run.json")}
    assert files == {path: path.read_text() for path in files}


def test_grid_uses_what_was_chosen(tuned, capsys):
    folder, _ = tuned
    assert main(["grid", "--methods", "ft,kd", "--backbones", "fedmf", "--set", "rounds=2", "--set", "k_core=50",
                 "--results", str(folder), "--tuned", "--dry-run", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    for run in runs:
        chosen = Tuned.of(folder / "my-tuned", folder).settings(run["method"], "fedmf", "ml-100k")
        assert {name: run["settings"][name] for name in chosen} == chosen
        assert run["state"] == "finished"  # the winning trial is the run


# Points and budgets


def test_equal_budgets(searching):
    """All points where there are few, else as many different ones as the budget allows, the default first."""
    found, tried = searching(lambda method, s: 0.5, FT, REG, KD, F3CREC, budget=7)
    trials = {c.method: result.content["trials"] for c, result in found.items()}
    assert {method: len(t) for method, t in trials.items()} == {"ft": 3, "reg": 4, "kd": 7, "f3crec": 7}
    for method, mine in trials.items():
        assert len({json.dumps(t["settings"]) for t in mine}) == len(mine) == len({t["runs"][0]["hash"] for t in mine})
    assert trials["f3crec"][0]["settings"] == {"lambda_kd": 0.1, "top_n": 30, "eps": 0.006, "beta": 0.9}
    assert found[REG].content["sampler"] == "all points" and found[KD].content["sampler"] == "random"
    assert found[KD].content["settings"] == {"lr": 1.0, "lambda_kd": 0.1, "top_n": 30}  # a tie: the default stays


def test_points_follow_from_the_seed(searching):
    def trials(seed):
        found, _ = searching(lambda method, s: 0.5, F3CREC, budget=5, seed=seed, again=True)
        return [trial["settings"] for trial in found[F3CREC].content["trials"]]
    first = trials(0)
    assert trials(0) == first and trials(1)[1:] != first[1:]


def test_others_take_over_the_learning_rate(searching):
    found, tried = searching(lambda method, s: 1.0 - abs(s["lr"] - 0.5), KD, budget=3)
    assert found[FT].content["settings"] == {"lr": 0.5} and found[KD].content["settings"]["lr"] == 0.5
    assert [method for method, _ in tried] == ["ft"] * 3 + ["kd"] * 3
    _, tried = searching(lambda method, s: 0.5, REG, budget=2)
    assert [(method, s["lr"]) for method, s in tried] == [("ft", 1.0), ("ft", 0.5), ("reg", 0.5), ("reg", 0.5)]


def test_another_budget_or_space_is_another_search(searching):
    half = lambda method, s: 0.5  # noqa: E731
    searching(half, KD, budget=2)
    for effort, runs in (({"budget": 2}, 0), ({"budget": 3}, 3), ({"budget": 3, "fixed": {"top_n": "50"}}, 3),
                         ({"budget": 3, "fixed": {"top_n": "50"}}, 0), ({"budget": 3, "seed": 1}, 3),
                         ({"budget": 3, "seed": 1, "batch": 2}, 3), ({"budget": 3, "seeds": 2}, 5)):
        found, tried = searching(half, KD, **effort)
        assert [method for method, _ in tried].count("kd") == runs
        assert found[KD].status == ("tuned" if runs else "kept")


def test_a_fixed_setting_is_not_searched(searching):
    found, tried = searching(lambda method, s: 0.5, F3CREC, budget=4, fixed={"eps": "0.002"})
    assert all(s["eps"] == 0.002 for method, s in tried if method == "f3crec")
    assert "eps" not in found[F3CREC].content["space"] and found[F3CREC].content["fixed"] == {"eps": 0.002}
    assert found[FT].status == "tuned"  # FT has no eps, and need not


def test_a_fixed_setting_stays_where_its_value_is_neutral(registry):
    """The dataset's config may have another, so it must be among the trials' settings."""
    effort = Effort(fixed={"repeated_positives": "every", "lr": "0.5"})
    assert search.make_search(registry, KD, effort, {}).fixed == {"repeated_positives": "every", "lr": 0.5}
    idle = Effort(fixed={"eps": "0.001", "without": "arm"})  # the ablation has no eps
    assert search.make_search(registry, F3CREC, idle, {}).fixed == {"without": "arm"}


def test_a_dataset_has_its_own_space(registry):
    eps = {name: search.searched(registry, Combination("f3crec", "fedmf", name))["eps"]
           for name in ("ml-100k", "hetrec2011-ml", "lastfm-2k", "ml-latest-small")}
    assert {name: (values[0], values[-1], len(values)) for name, values in eps.items()} == {
        "ml-100k": (1e-3, 9e-3, 9), "hetrec2011-ml": (1e-3, 9e-3, 9), "lastfm-2k": (1e-4, 9e-4, 9),
        "ml-latest-small": (1e-5, 9e-5, 9)}


@pytest.mark.parametrize("space, message", [
    ({"epss": [1]}, "unknown setting in .*ml-100k.yaml.*'epss'.\nDid you mean 'eps'"),
    ({"eps": 0.1}, "f3crec, eps: found 0.1, accepted: a list"),
    ({"eps": [-1]}, "setting 'eps' .*ml-100k.yaml.*: found -1"),
])
def test_bad_spaces_of_datasets(registry, monkeypatch, space, message):
    monkeypatch.setattr(search, "load_config", lambda name: source.DatasetConfig(search={"f3crec": space}))
    with pytest.raises(UserError, match=message):
        search.searched(registry, F3CREC)


# Trials that do not finish


def test_a_diverged_trial_is_the_worst(searching):
    found, _ = searching(lambda method, s: "failed" if s.get("lambda_reg", 0) > 1e-5 else 0.1, REG)
    values = {t["settings"]["lambda_reg"]: (t["value"], t["status"]) for t in found[REG].content["trials"]}
    assert values == {1e-4: (None, "failed"), **dict.fromkeys((1e-5, 1e-6, 1e-7), (0.1, "finished"))}
    assert found[REG].content["settings"]["lambda_reg"] == 1e-5
    found, _ = searching(lambda method, s: "failed" if method == "kd" else 0.1, KD)
    assert found[KD].status == "failed" and "every one of them diverged" in found[KD].error and not found[KD].content


@pytest.mark.parametrize("status, expected", [("error", "failed"), ("busy", "failed"), ("stopped", "stopped"),
                                              ("waiting", "stopped")])
def test_nothing_is_chosen_from_a_part_of_the_trials(searching, tmp_path, status, expected):
    found, _ = searching(lambda method, s: status if s.get("top_n") == 50 else 0.1, KD)
    assert found[KD].status == expected and not (tmp_path / "my-tuned" / "ml-100k-fedmf-kd.json").exists()
    found, tried = searching(lambda method, s: status, Combination("kd", "fedmf", "ml-100k"), again=True)
    assert found[KD].status == expected


def test_without_ft_nothing_is_inherited(searching):
    found, tried = searching(lambda method, s: "failed", KD)
    assert {method for method, _ in tried} == {"ft"} and found[KD].status == "failed"
    assert "needs ft on fedmf, ml-100k" in found[KD].error


def test_without_a_run_of_ft_nothing_can_be_counted(searching):
    """Its default diverges, although another rate was tuned before."""
    searching(lambda method, s: s["lr"], FT)
    found, tried = searching(lambda method, s: "failed" if s["lr"] == 1.0 else 0.1, KD, fixed={"rounds": "7"})
    assert {method for method, _ in tried} == {"ft"} and found[KD].status == "failed"
    assert "counted in runs of FT" in found[KD].error and "lr" not in found[KD].content


# Seeds and client-updates


def test_the_better_third_and_the_default_are_tried_on_all_seeds(searching):
    """The chosen point has the best mean over seeds, not the luckiest seed; on the first one lambda 1e-3 is best."""
    def value(method, s):
        return s["beta"] / 2 + (0.3 if s["eps"] == 0.001 and s["seed"] == 0 else 0.0) if method == "f3crec" else 0.1

    found, tried = searching(value, F3CREC, budget=12, seeds=3)
    content, values = found[F3CREC].content, {}
    whole = [trial for trial in content["trials"] if len(trial["runs"]) == 3]
    assert [run["seed"] for run in runs_of({"trials": whole})] == [0, 1, 2] * len(whole)
    assert all(len(trial["runs"]) in (1, 3) for trial in content["trials"]) and content["trials"][0] in whole
    first = [trial["runs"][0]["value"] for trial in content["trials"]]
    assert len(content["trials"]) // 3 <= len(whole) <= len(content["trials"]) // 2
    assert {trial["runs"][0]["value"] for trial in whole} >= set(sorted(first)[-len(first) // 3:])
    best = max(whole, key=lambda trial: trial["value"])
    assert best["value"] == content["value"] == max(t["value"] for t in content["trials"] if t["value"] is not None)
    assert content["value"] == pytest.approx(best["settings"]["beta"] / 2 + (best["settings"]["eps"] == 0.001) * 0.1)


def test_the_budget_is_of_client_updates(searching):
    """Methods whose runs are cheap try more points, and dear ones fewer; nobody spends much more than the budget. A
    run counts a tenth of FT's at least."""
    price = {"ft": 40, "kd": 20, "f3crec": 80, "spp": 1}
    found, tried = searching(lambda method, s: 0.5, KD, F3CREC, SPP, budget=8, seeds=2, cost=lambda m, s: price[m])
    points = {c.method: len(result.content["trials"]) for c, result in found.items()}
    assert points["f3crec"] < 8 < points["kd"] == 10 and points["spp"] > 80  # KD has no more
    for result in found.values():
        spending, method = result.content["client_updates"], result.combination.method
        runs = len(runs_of(result.content))
        assert spending == {"budget": 8 * 2 * 2 * 40, "spent": runs * max(2 * price[method], 8)}
        assert spending["spent"] <= spending["budget"] * 1.05
    assert found[F3CREC].content["client_updates"]["spent"] >= 0.8 * spending["budget"]


def test_runs_that_diverge_leave_room_for_others(searching):
    found, _ = searching(lambda method, s: "failed" if s.get("top_n") == 50 else 0.1, F3CREC, budget=6)
    trials = found[F3CREC].content["trials"]
    assert len(trials) > 8 and any(trial["status"] == "failed" for trial in trials)


def test_promotion():
    def trial(value, runs=1):
        return Trial({"x": value}, [Run(seed, "h", () if value is None else (value,)) for seed in range(runs)])

    trials = [trial(value) for value in (0.1, 0.5, None, 0.4, 0.3, 0.5, 0.2)]
    assert search.promoted(trials) == [trials[0], trials[1], trials[5]]
    assert search.promoted(trials[:2]) == trials[:2] and search.promoted([trial(None)]) == []
    assert search.promoted([trial(None), trial(None), trial(0.1)])[0].point == {"x": 0.1}


def test_a_grid_is_tried_as_a_whole(searching):
    """However dear it is; other samplers end with the budget."""
    dear = {"cost": lambda method, s: 1 if method == "ft" else 100, "budget": 12}
    found, _ = searching(lambda method, s: 0.5, KD, sampler="grid", **dear)
    assert len(found[KD].content["trials"]) == 10 and found[KD].content["sampler"] == "grid"
    found, _ = searching(lambda method, s: 0.5, KD, **dear)
    assert len(found[KD].content["trials"]) < 5 and found[KD].content["sampler"] == "all points"


def test_a_choice_that_is_ft_in_effect_says_so(searching, capsys):
    """Settings with which every block comes out as FT's."""
    found, _ = searching(lambda method, s: 0.5 if s.get("beta", 0.0) == 0.0 else 0.4, F3CREC, KD, budget=60)
    assert found[F3CREC].content["settings"]["beta"] == 0.0 and found[F3CREC].content["ft_in_effect"]
    assert found[KD].content["ft_value"] == 0.5 and found[KD].content["ft_in_effect"]
    assert "ft_in_effect" not in found[FT].content
    show_tuned(list(found.values()), ["file"] * 3)
    out = capsys.readouterr().out
    assert out.count("0.5000 = FT") == 2 and "= FT: no block's validation is 0.0001 away" in out
    found, _ = searching(lambda method, s: 0.5 + 2e-4 * (method == "f3crec" and s["seed"]), F3CREC, seeds=2, budget=2)
    assert not found[F3CREC].content["ft_in_effect"] and found[F3CREC].content["ft_value"] == 0.5


def test_jobs_and_interruptions_change_nothing(registry, tmp_path):
    """The runs that are asked for hang on the values before them alone: a search that was stopped after any run goes on
    to the same file."""
    def value(task):
        return task.config.settings["lambda_kd"] + task.config.seed / 9 if task.spec.method == "kd" else 0.1

    def stopping(after):
        left = [after]

        def run(tasks):
            outcomes = []
            for task in tasks:
                folder = task.record(tmp_path / str(after)).folder
                if not folder.exists() and not left[0]:
                    outcomes.append(Outcome(task, "waiting"))
                    continue
                left[0] -= not folder.exists()
                write_curve(folder, 5, b0=[9.0], b1=[value(task)])
                outcomes.append(Outcome(task, "finished", 1.0))
            return outcomes
        return run

    files = []
    for after in (1, 4, 100):
        tuning = tune.Tuning(registry, Effort(budget=4, sampler="random"), tmp_path / str(after) / "t",
                             tmp_path / str(after))
        statuses = []
        while not statuses or statuses[-1] == "stopped":
            statuses.append(tune.tune(tuning, [KD], stopping(after))[-1].status)
        files.append(tuning.file(KD).read_text())
        assert statuses[-1] == "tuned" and (len(statuses) == 1) == (after == 100)
    assert files[0] == files[1] == files[2]


# TPE


def test_tpe_finds_the_better_region_with_distinct_points(searching):
    pytest.importorskip("optuna")

    def value(method, s):
        return 0.0 if method == "ft" else s["beta"] - abs(s["lambda_kd"] - 0.01)
    found, tried = searching(value, F3CREC, budget=30, sampler="tpe", batch=2)
    trials = found[F3CREC].content["trials"]
    assert len(trials) == 30 == len({t["runs"][0]["hash"] for t in trials})
    assert trials[0]["settings"]["eps"] == 0.006  # the default
    early, late = ([t["value"] for t in part] for part in (trials[:10], trials[20:]))
    assert sum(late) / 10 > sum(early) / 10
    assert found[F3CREC].content["value"] == max(t["value"] for t in trials)
    again, _ = searching(value, F3CREC, budget=30, sampler="tpe", batch=2, again=True)
    assert again[F3CREC].content == found[F3CREC].content and "optuna" in found[F3CREC].content


def test_tpe_never_ends_before_the_points(registry):
    """Where it comes back to what it knows, other points are taken; each is proposed once."""
    pytest.importorskip("optuna")
    proposing = search.Tpe(search.make_search(registry, KD, Effort(budget=3, seed=2**40), {"lr": 1.0}))
    points = []
    while batch := proposing.propose(3):
        points += batch
        for point in batch:
            proposing.tell(point, None if point["top_n"] == 50 else point["lambda_kd"])
    assert len(points) == 10 == len({json.dumps(point) for point in points})


# Bad input


@pytest.mark.parametrize("arguments, message", [
    (["--methods", "kdd", "--backbones", "fedmf"], "unknown method 'kdd'"),
    (["--methods", "kd"], "--backbones is missing"),
    (["--methods", "kd", "--backbones", "fedmf", "--budget", "0"], "accepted: a whole number from 1"),
    (["--methods", "kd", "--backbones", "fedmf", "--seeds", "0"], "accepted: a whole number from 1"),
    (["--methods", "kd", "--backbones", "fedmf", "--batch", "0"], "accepted: a whole number from 1"),
    (["--methods", "kd", "--backbones", "fedmf", "--sampler", "tpes"], "invalid choice: 'tpes'"),
    (["--methods", "kd", "--backbones", "fedmf", "--seed", "9223372036854775807"], "seeds from 0"),
    (["--methods", "kd", "--backbones", "fedmf", "--sampler", "grid", "--budget", "5"], "10 points, more than"),
    (["--methods", "kd", "--backbones", "fedmf", "--set", "lamda_kd=1"], "unknown setting (--set) 'lamda_kd'"),
    (["--methods", "kd", "--backbones", "fedmf", "--set", "top_n=x"], "setting 'top_n' (--set): found 'x'"),
    (["--methods", "kd", "--backbones", "fedmf", "--datasets", "lastfm-2k"], "--data-dir"),
    (["--methods", "kd", "--backbones", "fedmf", "--table", "2"], "--paper"),
])
def test_bad_commands_start_nothing(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and len(captured.err.strip().splitlines()) in (1, 2)
    assert not list(tmp_path.iterdir())


def test_tpe_without_optuna(capsys, monkeypatch):
    """It is asked for before anything runs, and only where there are more points than the budget."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", "--methods", "kd", "--backbones", "fedmf", "--budget", "9"]) == 2
    error = capsys.readouterr().err
    assert "the default, needs Optuna for the 10 points of kd on fedmf, ml-100k: python -m pip install" in error
    assert "--sampler random needs nothing" in error and len(error.splitlines()) == 2
    assert main(["tune", "--methods", "kd", "--backbones", "fedmf", "--budget", "10", "--dry-run"]) == 0


# What would be done


def test_a_dry_run_counts_what_the_search_would_do(searching, registry, tmp_path, capsys, monkeypatch):
    """Trials of FT are known; those of the others hang on its choice, until it is made."""
    monkeypatch.chdir(tmp_path)
    command = ["tune", "--methods", "ft,reg", "--backbones", "fedmf", "--budget", "4", "--seeds", "1", "--results",
               str(tmp_path)]

    def planned(*more):
        assert main([*command, "--dry-run", "--json", *more]) == 0
        return {row["method"]: (row["grid_points"], row["runs"], row["spent"], row["kept"])
                for row in json.loads(capsys.readouterr().out)}
    new, waits = (3, 0, 0.0, False), (4, None, 0.0, False)
    assert planned() == {"ft": new, "reg": waits}
    assert not list(tmp_path.iterdir())
    searching(lambda method, settings: settings["lr"], FT, budget=4)
    kept = (3, 3, 0.75, True)
    assert planned() == {"ft": kept, "reg": (4, 0, 0.0, False)}  # the trials were made up, without records
    assert planned("--again") == {"ft": new, "reg": waits}
    assert planned("--set", "lambda_reg=0.1") == {"ft": kept, "reg": (1, 0, 0.0, False)}
    assert planned("--set", "rounds=2") == {"ft": new, "reg": waits}
    assert planned("--sampler", "tpe")["ft"] == kept  # all points: no sampler is needed
    assert main([*command, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "lr (3)" in out and "Searches: 1 to do, 1 done before and kept." in out
    assert "client-updates of 4 trials of FT on 1 seed." in out
    assert main(["tune", "--methods", "ft", "--backbones", "fedmf", "--set", "lrr=1", "--dry-run"]) == 2


def test_a_dry_run_finds_the_records_of_trials(tmp_path, capsys):
    """As far as the search would come with them: it begins with FT's default on all seeds."""
    command = ["tune", "--methods", "ft", "--backbones", "fedmf", "--set", "rounds=1", "--results", str(tmp_path)]
    for words, runs in ((["--seed", "0"], 0), (["--seed", "1"], 1), (["--set", "lr=0.5"], 2), (["--set", "lr=0.1"], 4)):
        assert main(["--method", "ft", "--backbone", "fedmf", "--set", "rounds=1", *words, "--results", str(tmp_path),
                     "--quiet"]) == 0
        capsys.readouterr()
        assert main([*command, "--dry-run", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["runs"], row["space"]) == (runs, {"lr": [0.1, 0.5, 1.0]})
        assert (row["spent"] > 0) == (runs == 4)  # the first step is done, and the default's other seed


# Where the choice is kept


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with copies of the shipped settings and the published records, in which commands are given."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "results/tuned", "results/tuned")
    Path("results/published").symlink_to(ROOT / "results/published")
    return tmp_path


def test_shipped_settings_stay_and_the_published_records_are_found(checkout, same_process, capsys):
    """What a user tunes is used with the user's own runs. Published records keep to the settings that they have."""
    shipped = {path: path.read_bytes() for path in Path("results/tuned").rglob("*.json")}
    assert main(["tune", "--methods", "ft,f3crec", "--backbones", "fedmf", "--budget", "1", "--seeds", "1",
                 "--sampler", "random", *QUICK, "--quiet"]) == 0
    assert shipped == {path: path.read_bytes() for path in Path("results/tuned").rglob("*.json")}
    mine = {path.name for path in Path("results/my-tuned").iterdir()}
    assert mine == {"ml-100k-fedmf-ft.json", "ml-100k-fedmf-f3crec.json"}
    assert "settings: results/my-tuned/ml-100k-fedmf-ft.json" in capsys.readouterr().out
    published = ["--tuned", "--records", "results/published/f3crec"]
    assert main(["tables", "--table", "2", "--datasets", "ml-100k", "--backbones", "fedmf", *published]) == 0
    captured = capsys.readouterr()
    assert "missing" not in captured.out and captured.err == "tuned settings: of results/tuned\n"
    assert main(["compare", "f3crec", "ft", "--backbone", "fedmf", *published]) == 0
    assert capsys.readouterr().err == "tuned settings: of results/tuned\n"
    assert main(["grid", "--methods", "ft,kd,f3crec", "--backbones", "fedmf", *QUICK, "--tuned", "--dry-run",
                 "--json"]) == 0
    captured = capsys.readouterr()
    states = {run["method"]: (run["state"], run["settings"]["lr"]) for run in json.loads(captured.out)}
    assert states["ft"] == states["f3crec"] == ("finished", 1.0) and states["kd"][0] == "missing"
    assert captured.err == ("tuned settings: of results/my-tuned for ft, f3crec on fedmf, ml-100k, "
                            "of results/tuned for the others\n")
    assert main(["compare", "f3crec", "ft", "--backbone", "fedmf", *QUICK, "--tuned"]) == 0  # of the user's own records


def test_settings_are_looked_up_in_order(checkout):
    """The user's before the shipped ones, and beside the records that are read."""
    names = "ft", "fedmf", "ml-100k"
    shipped, mine = Path("results/tuned/ml-100k-fedmf-ft.json"), Path("mine/my-tuned/ml-100k-fedmf-ft.json")
    mine.parent.mkdir(parents=True)
    assert Tuned.of(True, Path("mine")).file(*names) == shipped
    mine.write_text('{"settings": {"lr": 0.25}}')
    assert Tuned.of(True, Path("mine")).settings(*names) == {"lr": 0.25}
    assert Tuned.of(True, Path("results")).file(*names) == Tuned.of(True, Path("nowhere")).file(*names) == shipped
    assert Tuned.of(Path("mine/my-tuned"), Path("results")).file(*names) == mine
    assert Tuned.of(None, Path("mine")) is None
    with pytest.raises(UserError, match="no file mine/my-tuned/x-b-ft.json or results/tuned/x-b-ft.json.\n"
                                        "Make it with: run_bench.py tune --methods ft --backbones b --datasets x "
                                        "--plugins p"):
        Tuned.of(True, Path("mine"), Where((Path("p"),))).settings("ft", "b", "x")


@pytest.mark.parametrize("options,expected", [
    ([], ("results/my-tuned", "results/tuned")), (["--results", "r"], ("r/my-tuned", "results/tuned")),
    (["--tuned", "t"], ("t", None)), (["--shipped"], ("results/tuned", None)),
    (["--shipped", "--tuned", "results/tuned/fcucr"], ("results/tuned/fcucr", None))])
def test_where_tune_writes(options, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = tune_command._folders(parse(["tune", *options]))
    assert tuple(folder and str(folder) for folder in folders) == expected


@pytest.mark.parametrize("folder", ["results/tuned", "results/tuned/fcucr"])
def test_shipped_settings_are_written_only_when_asked_to(folder, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["tune", "--methods", "ft", "--backbones", "fedmf", "--tuned", folder, "--dry-run"]) == 2
    assert "holds settings that the suite ships" in capsys.readouterr().err


def test_an_equal_shipped_search_is_kept(checkout, searching, capsys):
    """It is not repeated, and FT's choice is taken from it. Files of former versions are read, but were other
    searches."""
    command = ["tune", "--methods", "kd,reg", "--backbones", "fedmf", "--dry-run", "--json"]

    def kept(*more):
        assert main([*command, *more]) == 0
        rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
        chosen = Tuned.of(True, Path("results")).settings("ft", "fedmf", "ml-100k")
        assert set(rows) == {"kd", "reg"} and rows["kd"]["inherited"] == chosen
        return [rows["kd"]["kept"], rows["reg"]["kept"]]

    assert kept("--budget", "12", "--seeds", "1", "--sampler", "random") == [False, False]
    searching(lambda method, s: 0.1, KD, budget=12)
    Path("my-tuned/ml-100k-fedmf-kd.json").rename("results/tuned/ml-100k-fedmf-kd.json")
    shutil.rmtree("my-tuned")
    shipped = json.loads(Path("results/tuned/ml-100k-fedmf-kd.json").read_text())["inherited"]
    assert shipped == Tuned.of(True, Path("results")).settings("ft", "fedmf", "ml-100k")
    assert kept("--budget", "12", "--seeds", "1", "--sampler", "random") == [True, False]
    assert kept("--budget", "2", "--seeds", "1", "--sampler", "random") == [False, False]
