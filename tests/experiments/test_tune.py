"""Searches: validation decides, test scores are never read, every method has the same number of trials."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers import ROOT, SameProcess

from fedcl_bench.cli.commands import tune as tune_command
from fedcl_bench.cli.main import main, parse
from fedcl_bench.data import source
from fedcl_bench.errors import UserError
from fedcl_bench.experiments import tune
from fedcl_bench.experiments.grid import Outcome
from fedcl_bench.experiments.tune import Combination, Effort
from fedcl_bench.runs import specs
from fedcl_bench.runs.specs import Tuned, Where
from fedcl_bench.workers import pool

QUICK = ["--set", "rounds=1", "--set", "k_core=50"]
FT, REG, KD, F3CREC = (Combination(method, "fedmf", "ml-100k") for method in ("ft", "reg", "kd", "f3crec"))


def write_curve(folder, **by_block):
    """A run's ``rounds.parquet`` and nothing else: validation values of its rounds by block."""
    rows = [(int(block[1:]), i, value) for block, values in by_block.items() for i, value in enumerate(values)]
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=["step", "round", "valid"]).to_parquet(folder / "rounds.parquet")


@pytest.fixture
def searching(registry, tmp_path):
    """Tune without training: ``value`` says a trial's validation value from its settings, or its status without one."""
    def search(value, *combinations, again=False, **effort):
        tried = []

        def run(tasks):
            outcomes = []
            for task in tasks:
                tried.append((task.spec.method, dict(task.spec.settings)))
                found = value(task.spec.method, task.config.settings)
                if isinstance(found, str):
                    outcomes.append(Outcome(task, found, error="because"))
                else:
                    write_curve(task.record(tmp_path).folder, b0=[9.0], b1=[found, 0.0])
                    outcomes.append(Outcome(task, "finished", 1.0))
            return outcomes
        tuning = tune.Tuning(registry, Effort(**effort), tmp_path / "my-tuned", tmp_path, again=again)
        results = tune.tune(tuning, combinations, run)
        return {result.combination: result for result in results}, tried
    return search


# The objective


def test_the_value_is_the_mean_of_the_best_of_blocks_1_on(tmp_path):
    """The folder has no other file, so nothing else can be read."""
    write_curve(tmp_path / "a", b0=[0.9], b1=[0.1, 0.3, 0.2], b2=[0.5, 0.1])
    assert tune.validation_value(tmp_path / "a") == pytest.approx((0.3 + 0.5) / 2)
    write_curve(tmp_path / "b", b0=[0.1, 0.7])
    assert tune.validation_value(tmp_path / "b") == 0.7


def test_the_value_of_domains_is_the_mean_of_all(tmp_path):
    write_curve(tmp_path / "a", b0=[0.9, 0.2], b1=[0.1, 0.3])
    assert tune.validation_value(tmp_path / "a", domains=True) == pytest.approx((0.9 + 0.3) / 2)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A real search by the command line, in which every read of a table is noted."""
    folder, read, original = tmp_path_factory.mktemp("tuned"), [], tune.read_columns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pd, "read_parquet", lambda content, columns, parse=pd.read_parquet: read.append(columns) or
                      parse(content, columns=columns))
        patch.setattr(tune, "read_columns", lambda folder, name, columns: read.append(name) or
                      original(folder, name, columns))
        patch.setattr(pool, "Processes", SameProcess)
        patch.setattr(specs, "shipped_tuned", lambda: Path("nowhere"))
        assert main([*COMMAND, "--results", str(folder), "--quiet"]) == 0
    return folder, read


COMMAND = ["tune", "--methods", "kd,reg", "--backbones", "fedmf", "--budget", "3", "--set", "rounds=2",
           "--set", "k_core=50", "--jobs", "1"]


def test_the_best_validation_wins(tuned):
    """FT is searched first although nobody named it; everybody has three trials and FT's learning rate."""
    folder, _ = tuned
    found = {path.stem: json.loads(path.read_text()) for path in (folder / "my-tuned").glob("*.json")}
    assert set(found) == {f"ml-100k-fedmf-{method}" for method in ("ft", "kd", "reg")}
    lr = found["ml-100k-fedmf-ft"]["settings"]["lr"]
    for content in found.values():
        assert len(content["trials"]) == 3 == content["budget"]
        values = {}
        for trial in content["trials"]:
            record, = folder.glob(f"runs/*{trial['hash'][:12]}")
            if trial["status"] == "failed":  # some of Reg's weights diverge
                assert content["method"] == "reg" and trial["value"] is None
                continue
            curve = pd.read_parquet(record / "rounds.parquet")
            values[trial["hash"]] = curve[curve.step >= 1].groupby("step").valid.max().mean()
            assert trial["value"] == pytest.approx(values[trial["hash"]])
            settings = json.loads((record / "run.json").read_text())["settings"]
            assert {name: settings[name] for name in trial["settings"]} == trial["settings"]
            assert settings["rounds"] == 2 and (content["method"] == "ft" or settings["lr"] == lr)
        assert content["value"] == pytest.approx(max(values.values())) and "validation ndcg@20" in content["objective"]
        best, *_ = [trial for trial in content["trials"] if trial["value"] == content["value"]]
        assert content["settings"] == {**({} if content["method"] == "ft" else {"lr": lr}), **best["settings"]}
    assert {t["settings"]["lr"] for t in found["ml-100k-fedmf-ft"]["trials"]} == {0.1, 0.5, 1.0}


def test_no_test_score_is_read(tuned):
    folder, read = tuned
    statuses = [json.loads(path.read_text())["status"] for path in folder.glob("runs/*/run.json")]
    finished = [status for status in statuses if status == "finished"]
    assert len(finished) >= 7 and read == ["rounds", ["step", "valid"]] * len(finished)


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
    """Whole grids where they fit, else as many different points as the budget allows, the default first."""
    found, tried = searching(lambda method, s: 0.5, FT, REG, KD, F3CREC, budget=7)
    trials = {c.method: result.content["trials"] for c, result in found.items()}
    assert {method: len(t) for method, t in trials.items()} == {"ft": 3, "reg": 6, "kd": 7, "f3crec": 7}
    for method, mine in trials.items():
        assert len({json.dumps(t["settings"]) for t in mine}) == len(mine) == len({t["hash"] for t in mine})
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
    assert {method for method, _ in tried} == {"reg"} and all(s["lr"] == 0.5 for _, s in tried)


def test_another_budget_or_space_is_another_search(searching):
    half = lambda method, s: 0.5  # noqa: E731
    searching(half, KD, budget=2)
    for effort, runs in (({"budget": 2}, 0), ({"budget": 3}, 3), ({"budget": 3, "fixed": {"top_n": "50"}}, 3),
                         ({"budget": 3, "fixed": {"top_n": "50"}}, 0), ({"budget": 3, "seed": 1}, 3)):
        found, tried = searching(half, KD, **effort)
        assert len(tried) == runs and found[KD].status == ("tuned" if runs else "kept")


def test_a_fixed_setting_is_not_searched(searching):
    found, tried = searching(lambda method, s: 0.5, F3CREC, budget=4, fixed={"eps": "0.002"})
    assert all(s["eps"] == 0.002 for method, s in tried if method == "f3crec")
    assert "eps" not in found[F3CREC].content["space"] and found[F3CREC].content["fixed"] == {"eps": 0.002}
    assert found[FT].status == "tuned"  # FT has no eps, and need not


def test_a_dataset_has_its_own_space(registry):
    eps = {name: tune.searched(registry, Combination("f3crec", "fedmf", name))["eps"]
           for name in ("ml-100k", "hetrec2011-ml", "lastfm-2k", "ml-latest-small")}
    assert {name: (values[0], values[-1], len(values)) for name, values in eps.items()} == {
        "ml-100k": (1e-3, 9e-3, 9), "hetrec2011-ml": (1e-3, 9e-3, 9), "lastfm-2k": (1e-4, 9e-4, 9),
        "ml-latest-small": (1e-5, 9e-5, 9)}


@pytest.mark.parametrize("search, message", [
    ({"epss": [1]}, "unknown setting in .*ml-100k.yaml.*'epss'.\nDid you mean 'eps'"),
    ({"eps": 0.1}, "f3crec, eps: found 0.1, accepted: a list"),
    ({"eps": [-1]}, "setting 'eps' .*ml-100k.yaml.*: found -1"),
])
def test_bad_spaces_of_datasets(registry, monkeypatch, search, message):
    monkeypatch.setattr(tune, "load_config", lambda name: source.DatasetConfig(search={"f3crec": search}))
    with pytest.raises(UserError, match=message):
        tune.searched(registry, F3CREC)


# Trials that do not finish


def test_a_diverged_trial_is_the_worst(searching):
    found, _ = searching(lambda method, s: "failed" if s.get("lambda_reg", 0) > 1e-4 else 0.1, REG)
    assert [t["value"] for t in found[REG].content["trials"]] == [0.1, 0.1, None, None, None, None]
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


# TPE


def test_tpe_finds_the_better_region_with_distinct_points(searching):
    pytest.importorskip("optuna")

    def value(method, s):
        return 0.0 if method == "ft" else s["beta"] - abs(s["lambda_kd"] - 0.01)
    found, tried = searching(value, F3CREC, budget=30, sampler="tpe", batch=2)
    trials = found[F3CREC].content["trials"]
    assert len(trials) == 30 == len({t["hash"] for t in trials})
    assert trials[0]["settings"]["eps"] == 0.006  # the default
    early, late = ([t["value"] for t in part] for part in (trials[:10], trials[20:]))
    assert sum(late) / 10 > sum(early) / 10
    assert found[F3CREC].content["value"] == max(t["value"] for t in trials)
    again, _ = searching(value, F3CREC, budget=30, sampler="tpe", batch=2, again=True)
    assert again[F3CREC].content == found[F3CREC].content


# Bad input


@pytest.mark.parametrize("arguments, message", [
    (["--methods", "kdd", "--backbones", "fedmf"], "unknown method 'kdd'"),
    (["--methods", "kd"], "--backbones is missing"),
    (["--methods", "kd", "--backbones", "fedmf", "--budget", "0"], "accepted: a whole number from 1"),
    (["--methods", "kd", "--backbones", "fedmf", "--sampler", "grid", "--budget", "5"], "12 points, more than"),
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
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", "--methods", "kd", "--backbones", "fedmf", "--sampler", "tpe"]) == 2
    assert "needs Optuna: python -m pip install" in capsys.readouterr().err


# What would be done


def test_a_dry_run_counts_what_the_search_would_do(searching, registry, tmp_path, capsys, monkeypatch):
    """Trials of FT are known; those of the others hang on its choice, until it is made."""
    monkeypatch.chdir(tmp_path)
    command = ["tune", "--methods", "ft,reg", "--backbones", "fedmf", "--budget", "4", "--results", str(tmp_path)]

    def planned(*more):
        assert main([*command, "--dry-run", "--json", *more]) == 0
        return {row["method"]: (row["grid_points"], row["trials"], row["finished"], row["kept"])
                for row in json.loads(capsys.readouterr().out)}
    assert planned() == {"ft": (3, 3, 0, False), "reg": (6, 4, None, False)}
    assert not list(tmp_path.iterdir())
    searching(lambda method, settings: settings["lr"], FT, budget=4)
    assert planned() == {"ft": (3, 3, 0, True), "reg": (6, 4, 0, False)}  # the trials were made up, without records
    assert planned("--again") == {"ft": (3, 3, 0, False), "reg": (6, 4, None, False)}
    assert planned("--set", "lambda_reg=0.1") == {"ft": (3, 3, 0, True), "reg": (1, 1, 0, False)}
    assert planned("--set", "rounds=2") == {"ft": (3, 3, 0, False), "reg": (6, 4, None, False)}
    assert planned("--sampler", "tpe")["ft"] == (3, 3, 0, True)  # all points: no sampler is needed
    assert main([*command, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "lr (3)" in out and "Searches: 1 with 4 trials to come, 1 done before and kept." in out
    assert main(["tune", "--methods", "ft", "--backbones", "fedmf", "--set", "lrr=1", "--dry-run"]) == 2


def test_a_dry_run_finds_the_records_of_trials(tmp_path, capsys):
    command = ["tune", "--methods", "ft", "--backbones", "fedmf", "--set", "rounds=1", "--results", str(tmp_path)]
    assert main(["--method", "ft", "--backbone", "fedmf", "--set", "rounds=1", "--set", "lr=0.5", "--results",
                 str(tmp_path), "--quiet"]) == 0
    capsys.readouterr()
    assert main([*command, "--dry-run", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["trials"], row["finished"], row["space"]) == (3, 1, {"lr": [0.1, 0.5, 1.0]})


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
    assert main(["tune", "--methods", "ft,f3crec", "--backbones", "fedmf", "--budget", "1", *QUICK, "--quiet"]) == 0
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


def test_an_equal_shipped_search_is_kept(checkout, capsys):
    """It is not repeated, and FT's choice is taken from it."""
    command = ["tune", "--methods", "kd,reg", "--backbones", "fedmf", "--dry-run", "--json"]
    assert main(command) == 0
    assert {row["method"]: row["kept"] for row in json.loads(capsys.readouterr().out)} == {"kd": True, "reg": True}
    assert main([*command, "--budget", "2"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    chosen = Tuned.of(True, Path("results")).settings("ft", "fedmf", "ml-100k")
    assert set(rows) == {"kd", "reg"} and not rows["kd"]["kept"] and rows["kd"]["inherited"] == chosen
