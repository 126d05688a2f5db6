"""Searches: validation decides, test scores are never read, every method has the same budget of client-updates."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from helpers import ROOT, SameProcess, refused

from fedcl_bench.records import frames
from fedcl_bench.cli.commands import tune as tune_command
from fedcl_bench.cli.grid_view import show_tuned
from fedcl_bench.cli.main import main, parse
from fedcl_bench.data import source
from fedcl_bench.core.errors import UserError
from fedcl_bench.experiments import search, tune
from fedcl_bench.experiments.grid import Outcome, make_tasks
from fedcl_bench.experiments.search import Combination, Effort, TrialRun
from fedcl_bench.runs.summary import failed
from fedcl_bench.runs.specs import RunSpec, Tuned, Where
from fedcl_bench.experiments import pool

FT, REG, KD, F3CREC = (Combination(method, "fedmf", "ml-100k") for method in ("ft", "reg", "kd", "f3crec"))
QUICK = ["--set", "rounds=1", "--set", "k_core=80", "--set", "blocks=3"]
COMMAND = ["tune", "--methods", "ft,reg", "--backbones", "fedmf", "--budget", "2", "--sampler", "random", *QUICK]


def write_curve(folder, clients=5, **by_block):
    """A run's ``rounds.parquet`` and nothing else: validation values of its rounds by block."""
    rows = [(int(block[1:]), i, value, clients) for block, values in by_block.items() for i, value in enumerate(values)]
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=["step", "round", "valid", "participants"]).to_parquet(folder / "rounds.parquet")


@pytest.fixture
def searching(registry, tmp_path):
    """Tune without training: ``value`` says a run's validation value from its method and settings, or its status
    without one; ``cost`` how many clients take part in each of its two rounds. It is stopped after so many new runs.
    Returns results and the runs that were tried."""
    def searching(value, *combinations, again=False, cost=lambda method: 5, stop_after=1000, results="r", **effort):
        tried, left, folder = [], [stop_after], tmp_path / results

        def run(tasks):
            outcomes = []
            for task in tasks:
                settings, record = task.config.settings | {"seed": task.config.seed}, task.record(folder).folder
                found = value(task.spec.method, settings)
                if not record.exists() and not left[0]:
                    found = "waiting"
                if isinstance(found, str):
                    outcomes.append(Outcome(task, found, error="because"))
                else:
                    left[0] -= not record.exists()
                    write_curve(record, cost(task.spec.method), b0=[9.0], b1=[found, 0.0])
                    outcomes.append(Outcome(task, "finished", 1.0))
                tried.append((task.spec.method, settings))
            return outcomes
        tuning = tune.Tuning(registry, Effort(**{"seeds": 1, "sampler": "random", "budget": 12} | effort),
                             folder / "my-tuned", folder, again=again)
        return {result.combination: result for result in tune.tune(tuning, combinations, run)}, tried
    return searching


def settings_of(result):
    return [trial["settings"] for trial in result.content["trials"]]


# The objective


@pytest.mark.parametrize("blocks, per_step, best, updates", [
    ({"b0": [0.9], "b1": [0.1, 0.3, 0.2], "b2": [0.5, 0.1]}, 1, (0.3, 0.5), 25),
    ({"b0": [0.1, 0.7]}, 1, (0.7,), 10),
    ({"b0": [0.9, 0.2], "b1": [0.1, 0.3]}, 2, (0.9, 0.3), 20)])
def test_the_value_is_the_mean_of_the_best_of_blocks_1_on(tmp_path, blocks, per_step, best, updates):
    """Or of all domains. The folder has no other file, so nothing else can be read."""
    write_curve(tmp_path / "a", **blocks)
    run = tune.finished_run(SimpleNamespace(config=SimpleNamespace(seed=3, hash="h", per_step=per_step)),
                            tmp_path / "a")
    assert run == TrialRun(3, "h", best, updates) and run.value == pytest.approx(sum(best) / len(best))


def test_a_failed_run_costs_what_was_done(tmp_path, registry):
    task, = make_tasks(registry, [RunSpec("reg", "fedmf", "ml-100k")], [0])
    task.record(tmp_path).folder.mkdir(parents=True)
    for updates, counted in (([50, 3, 0], 3), ([50], 50), ([], 0)):
        task.record(tmp_path).fail(failed(task.config, "diverged", updates))
        run = tune.failed_run(task, task.record(tmp_path).folder)
        assert (run.updates, run.value) == (counted, None)


# A real search by the command line, in a folder with the shipped settings and the published records


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The folder, what was read of tables, and what the command printed."""
    folder, read, parse_table = tmp_path_factory.mktemp("tuned"), [], frames._table
    shutil.copytree(ROOT / "results/tuned", folder / "results/tuned")
    (folder / "results/published").symlink_to(ROOT / "results/published")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(pool, "Processes", SameProcess)
        patch.setattr(frames, "_table", lambda content, columns: read.append(columns) or parse_table(content, columns))
        assert main([*COMMAND, "--quiet"]) == 0
    return folder, read


@pytest.fixture
def in_folder(searched, monkeypatch):
    monkeypatch.chdir(searched[0])
    return Path("results")


def test_the_best_validation_wins(searched, in_folder):
    """Everybody has the same budget and FT's learning rate. Of the points that were tried on both seeds the one with
    the best mean is chosen. No test score is read, and the shipped settings stay."""
    found = {path.stem: json.loads(path.read_text()) for path in in_folder.glob("my-tuned/*.json")}
    assert set(found) == {"ml-100k-fedmf-ft", "ml-100k-fedmf-reg"}
    lr = found["ml-100k-fedmf-ft"]["settings"]["lr"]
    for content in found.values():
        updates, values = 0, {}
        for trial in content["trials"]:
            means = []
            for run in trial["runs"]:
                record, = in_folder.glob(f"runs/*-s{run['seed']}-{run['hash'][:12]}")
                curve = pd.read_parquet(record / "rounds.parquet").query("step >= 1")
                means.append(curve.groupby("step").valid.max().mean())
                assert run["value"] == pytest.approx(means[-1])
                assert run["client_updates"] == curve.participants.sum()
                updates += run["client_updates"]
                settings = json.loads((record / "run.json").read_text())["settings"]
                assert {name: settings[name] for name in trial["settings"]} == trial["settings"]
                assert settings["rounds"] == 1 and (content["method"] == "ft" or settings["lr"] == lr)
            assert trial["status"] == ("finished" if len(means) == 2 else "first seed only")
            assert trial["value"] == (pytest.approx(sum(means) / 2) if len(means) == 2 else None)
            if len(means) == 2:
                values[json.dumps(trial["settings"])] = trial["value"]
        spending = content["client_updates"]
        assert spending["spent"] == updates <= spending["budget"]
        assert spending["budget"] == found["ml-100k-fedmf-ft"]["client_updates"]["budget"]
        assert len(content["trials"]) >= 2 and content["value"] == max(values.values())
        best = next(trial for trial in content["trials"] if trial["value"] == content["value"])
        assert content["settings"] == {**({} if content["method"] == "ft" else {"lr": lr}), **best["settings"]}
        assert "validation ndcg@20" in content["objective"]
    assert {tuple(columns) for columns in searched[1] if columns} == {("step", "valid", "participants")}
    for path in (ROOT / "results/tuned").rglob("*.json"):
        assert (in_folder / path.relative_to(ROOT / "results")).read_bytes() == path.read_bytes()


def test_equal_searches_are_kept_and_trials_reused(in_folder, capsys):
    """The dry run finds the records of trials; so does the search that is asked for again, and comes to the same."""
    def found(*more):
        assert main([*COMMAND, "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)
    assert {result["status"] for result in found()["results"]} == {"kept"}
    kept, again = found("--dry-run"), found("--dry-run", "--again")
    assert [row["kept"] for row in kept + again] == [True, True, False, False]
    assert [(row["runs"], row["spent"]) for row in again] == [(row["runs"], row["spent"]) for row in kept]
    before = {path: path.read_bytes() for path in in_folder.glob("*/*.json")}
    times = {path: path.stat().st_mtime_ns for path in in_folder.glob("runs/*/run.json")}
    for path in in_folder.glob("my-tuned/*-ft.json"):  # as if the data, or the code, had been others
        content = path.read_text()
        path.write_text(re.sub('"hash": "[0-9a-f]', '"hash": "x', content))
        assert [row["kept"] for row in found("--dry-run")] == [False, True]
        path.write_text(content)
    assert {result["status"] for result in found("--again")["results"]} == {"tuned"}
    assert before == {path: path.read_bytes() for path in before}
    assert times == {path: path.stat().st_mtime_ns for path in in_folder.glob("runs/*/run.json")}


def test_what_was_chosen_is_used(in_folder, capsys):
    """With the user's own runs; the winning trial is the run. Published records keep to the settings that they have."""
    assert main(["grid", "--methods", "ft,reg,kd", "--backbones", "fedmf", *QUICK, "--tuned", "--dry-run",
                 "--json"]) == 0
    captured = capsys.readouterr()
    states = {run["method"]: run["state"] for run in json.loads(captured.out)}
    assert states == {"ft": "finished", "reg": "finished", "kd": "missing"}
    assert captured.err == ("tuned settings: of results/my-tuned for ft, reg on fedmf, ml-100k, "
                            "of results/tuned for the others\n")
    assert main(["tables", "--table", "2", "--datasets", "ml-100k", "--backbones", "fedmf", "--tuned", "--records",
                 "results/published/f3crec"]) == 0
    captured = capsys.readouterr()
    assert "missing" not in captured.out and captured.err == "tuned settings: of results/tuned\n"


# Points and budgets


def test_points_and_others_take_over_the_learning_rate(searching):
    """FT goes first although nobody named it. All points where there are few, else as many different ones as the budget
    allows, the default first."""
    found, tried = searching(lambda method, s: 1.0 - abs(s["lr"] - 0.5) + s.get("eps", 0), REG, F3CREC, budget=5)
    assert found[FT].content["settings"] == {"lr": 0.5} and [method for method, _ in tried[:3]] == ["ft"] * 3
    assert {s["lr"] for method, s in tried if method != "ft"} == {0.5}
    points = {c.method: [json.dumps(point) for point in settings_of(result)] for c, result in found.items()}
    assert {method: len(set(of)) for method, of in points.items()} == {"ft": 3, "reg": 4, "f3crec": 5}
    assert found[REG].content["sampler"] == "all points" and found[F3CREC].content["sampler"] == "random"
    assert settings_of(found[F3CREC])[0] == {"lambda_kd": 0.1, "top_n": 30, "eps": 0.006, "beta": 0.9}
    assert found[REG].content["settings"] == {"lr": 0.5, **settings_of(found[REG])[0]}  # a tie: the default stays
    other, _ = searching(lambda method, s: 0.5, F3CREC, budget=5, seed=1)
    assert settings_of(other[F3CREC])[1:] != settings_of(found[F3CREC])[1:]


def test_another_budget_or_space_is_another_search(searching):
    half = lambda method, s: s.get("lambda_kd", 0.5)  # noqa: E731
    searching(half, KD, budget=2)
    for effort, tuned in (({}, False), ({"budget": 3}, True), ({"fixed": {"top_n": "50"}}, True), ({"seed": 1}, True),
                          ({"batch": 2}, True), ({"seeds": 2}, True), ({"seeds": 2}, False)):
        found, _ = searching(half, KD, **{"budget": 2, **effort})
        assert found[KD].status == ("tuned" if tuned else "kept")


def test_a_fixed_setting_is_not_searched(searching, registry):
    """It stays where its value is neutral, as the dataset's config may have another, but not where it is idle."""
    found, tried = searching(lambda method, s: 0.5, F3CREC, budget=2,
                             fixed={"eps": "0.002", "lr": "0.3", "rounds": "7"})
    assert all((s["lr"], s["eps"]) == (0.3, 0.002) for method, s in tried if method == "f3crec")
    content = found[F3CREC].content
    assert "eps" not in content["space"] and content["fixed"] == {"eps": 0.002, "lr": 0.3, "rounds": 7}
    chosen = content["settings"]  # as tried, of what is searched or taken over from FT
    assert (chosen["eps"], chosen["lr"], "rounds" in chosen, found[FT].content["settings"]) == (
        0.002, 0.3, False, {"lr": 0.3})
    assert found[FT].status == "tuned"  # FT has no eps, and need not
    effort = Effort(fixed={"repeated_positives": "every", "lr": "0.5"})
    assert search.make_search(registry, KD, effort, {}).fixed == {"repeated_positives": "every", "lr": 0.5}
    idle = Effort(fixed={"eps": "0.001", "without": "arm"})  # the ablation has no eps
    assert search.make_search(registry, F3CREC, idle, {}).fixed == {"without": "arm"}


def test_a_dataset_has_its_own_space(registry, monkeypatch):
    for name, unit in (("ml-100k", 1e-3), ("lastfm-2k", 1e-4), ("ml-latest-small", 1e-5)):
        eps = search.searched(registry, Combination("f3crec", "fedmf", name))["eps"]
        assert eps == pytest.approx([unit * i for i in range(1, 10)])
    for space, message in (({"epss": [1]}, "unknown setting in .*ml-100k.yaml.*'epss'.\nDid you mean 'eps'"),
                           ({"eps": 0.1}, "f3crec, eps: found 0.1, accepted: a list"),
                           ({"eps": [-1]}, "setting 'eps' .*ml-100k.yaml.*: found -1")):
        monkeypatch.setattr(search, "load_config", lambda name: source.DatasetConfig(search={"f3crec": space}))
        with pytest.raises(UserError, match=message):
            search.searched(registry, F3CREC)


def test_a_bound_searches_what_ft_does(registry):
    """What FT's learning rate holds down would bound nothing; but not with settings of its own, or no backbone."""
    space = {name: search.searched(registry, Combination(name, "fedmf", "ml-100k"))
             for name in ("ft", "joint", "central", "popularity", "frozen")}
    assert space["joint"] == space["ft"] == {"lr": (0.1, 0.5, 1.0)}
    assert [*space["central"]] == ["central_lr"] and space["popularity"] == space["frozen"] == {}


def test_the_better_third_and_the_default_are_tried_on_all_seeds(searching):
    """The chosen point has the best mean over seeds, not the luckiest seed: on the first one eps of .001 is best."""
    def value(method, s):
        return s["beta"] / 2 + s["lambda_kd"] + (0.3 if s["eps"] == 0.001 and s["seed"] == 0 else 0.0) \
            if method == "f3crec" else 0.1

    found, _ = searching(value, F3CREC, budget=8, seeds=3)
    trials = found[F3CREC].content["trials"]
    whole = [trial for trial in trials if len(trial["runs"]) == 3]
    assert trials[0] in whole and all(len(trial["runs"]) in (1, 3) for trial in trials)
    assert all([run["seed"] for run in trial["runs"]] == [0, 1, 2] for trial in whole)
    assert len(trials) // 3 <= len(whole) <= len(trials) // 2
    assert max(trials, key=lambda trial: trial["runs"][0]["value"]) in whole
    best = max(whole, key=lambda trial: trial["value"])
    assert best["value"] == found[F3CREC].content["value"]
    assert best["value"] == pytest.approx(sum(value("f3crec", {**best["settings"], "seed": i}) for i in range(3)) / 3)


def test_the_budget_is_of_client_updates(searching):
    """Methods whose runs are cheap try more points, and dear ones fewer; nobody spends much more than the budget. A
    run counts a tenth of FT's at least. A grid is tried as a whole, however dear it is."""
    price = {"ft": 40, "kd": 1, "f3crec": 80}
    found, _ = searching(lambda method, s: sum(v for v in s.values() if type(v) is float), KD, F3CREC, budget=8,
                         seeds=2, cost=price.get)
    points = {c.method: len(result.content["trials"]) for c, result in found.items()}
    assert points["f3crec"] < 8 < points["kd"] == 10  # KD has no more
    for result in found.values():
        spending, method = result.content["client_updates"], result.combination.method
        runs = sum(len(trial["runs"]) for trial in result.content["trials"])
        assert spending == {"budget": 8 * 2 * 2 * 40, "spent": runs * max(2 * price[method], 8)}
        assert spending["spent"] <= spending["budget"] * 1.05
    whole, _ = searching(lambda method, s: 0.5, REG, sampler="grid", budget=4, cost=lambda m: 1 if m == "ft" else 100)
    assert len(settings_of(whole[REG])) == 4 and whole[REG].content["sampler"] == "grid"


def test_tpe_finds_the_better_region_and_interruptions_change_nothing(searching, tmp_path):
    """What is asked for hangs on the values before alone: a stopped search goes on to the same file."""
    def value(method, s):
        return 0.0 if method == "ft" else s["beta"] - abs(s["lambda_kd"] - 0.01)

    files = []
    for stop_after in (9, 1000):
        statuses = []
        while "tuned" not in statuses:
            found, _ = searching(value, F3CREC, budget=16, sampler="tpe", batch=2, stop_after=stop_after,
                                 results=str(stop_after))
            statuses.append(found[F3CREC].status)
        assert (len(statuses) > 1) == (stop_after == 9)
        files.append((tmp_path / str(stop_after) / "my-tuned/ml-100k-fedmf-f3crec.json").read_text())
    trials = found[F3CREC].content["trials"]
    assert files[0] == files[1] and len(trials) == 16 == len({t["runs"][0]["hash"] for t in trials})
    assert sum(t["value"] for t in trials[-6:]) > sum(t["value"] for t in trials[:6])
    assert found[F3CREC].content["value"] == max(t["value"] for t in trials)


def test_tpe_never_ends_before_the_points(registry):
    """Where it comes back to what it knows, other points are taken; each is proposed once."""
    study = search.Study(search.make_search(registry, KD, Effort(budget=6, seed=2**40), {"lr": 1.0}),
                         [TrialRun(0, "", (0.5,), 10)])
    steps = study.steps()
    wanted = next(steps)
    with pytest.raises(StopIteration):
        while True:
            wanted = steps.send([TrialRun(0, "", () if point["top_n"] == 50 else (point["lambda_kd"],), 1)
                                 for point, _ in wanted])
    assert len(study.trials) == 10 == len({json.dumps(trial.point) for trial in study.trials})


# Trials that do not finish


def test_a_diverged_trial_is_the_worst(searching):
    found, _ = searching(lambda method, s: "failed" if s.get("lambda_reg", 0) > 1e-5 else 0.1, REG)
    values = {t["settings"]["lambda_reg"]: (t["value"], t["status"]) for t in found[REG].content["trials"]}
    assert values == {1e-4: (None, "failed"), **dict.fromkeys((1e-5, 1e-6, 1e-7), (0.1, "finished"))}
    assert found[REG].content["settings"]["lambda_reg"] == 1e-5
    found, _ = searching(lambda method, s: "failed" if method == "kd" else 0.1, KD)
    assert found[KD].status == "failed" and "every one of them diverged" in found[KD].error and not found[KD].content


@pytest.mark.parametrize("status, expected", [("error", "failed"), ("busy", "failed"), ("stopped", "stopped")])
def test_nothing_is_chosen_from_a_part_of_the_trials(searching, tmp_path, status, expected):
    found, _ = searching(lambda method, s: status if s.get("lambda_reg") == 1e-6 else 0.1, REG)
    assert found[REG].status == expected and not list(tmp_path.glob("*/*/*-reg.json"))


def test_without_a_run_of_ft_nothing_is_inherited_or_counted(searching):
    found, tried = searching(lambda method, s: "failed", KD)
    assert {method for method, _ in tried} == {"ft"} and found[KD].status == "failed"
    assert "needs ft on fedmf, ml-100k" in found[KD].error
    searching(lambda method, s: s["lr"], FT)  # another rate was tuned before, and the default diverges
    found, tried = searching(lambda method, s: "failed" if s["lr"] == 1.0 else 0.1, KD, fixed={"rounds": "7"})
    assert {method for method, _ in tried} == {"ft"} and found[KD].status == "failed"
    assert "counted in runs of FT" in found[KD].error and not found[KD].content


def test_a_choice_that_is_ft_in_effect_says_so(searching, capsys):
    """Settings with which every block comes out as FT's."""
    found, _ = searching(lambda method, s: 0.5, REG)
    assert found[REG].content["ft_value"] == 0.5 and found[REG].content["ft_in_effect"]
    assert "ft_in_effect" not in found[FT].content
    show_tuned(list(found.values()), ["file"] * 2)
    out = capsys.readouterr().out
    assert out.count("0.5000 = FT") == 1 and "= FT: no block's validation is 0.0001 away" in out
    found, _ = searching(lambda method, s: 0.5 + 2e-4 * (method == "reg" and s["seed"]), REG, seeds=2, budget=2)
    assert not found[REG].content["ft_in_effect"] and found[REG].content["ft_value"] == 0.5


# The command


def test_a_dry_run_counts_what_the_search_would_do(tmp_path, capsys, monkeypatch):
    """Trials of others than FT hang on its choice, until it is made."""
    monkeypatch.chdir(tmp_path)
    command = ["tune", "--methods", "ft,reg", "--backbones", "fedmf", "--budget", "4", "--seeds", "1", "--dry-run"]
    assert main([*command, "--json"]) == 0
    assert [(row["method"], row["grid_points"], row["runs"], row["spent"], row["kept"]) for row in
            json.loads(capsys.readouterr().out)] == [("ft", 3, 0, 0.0, False), ("reg", 4, None, 0.0, False)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "lr (3)" in out and "Searches: 2 to do, 0 done before and kept." in out
    assert "client-updates of 4 trials of FT on 1 seed." in out and not list(tmp_path.iterdir())
    Path("dataset_configs").mkdir()
    Path("dataset_configs/ml-100k.yaml").write_text("search: {rge: {lambda_reg: [1]}}\n")
    assert main(command) == 0
    assert "config of dataset ml-100k has search for an unknown method or backbone 'rge'" in capsys.readouterr().err


# Where the choice is kept


def test_what_does_not_go_together_is_said_before_the_first_trial(in_folder, capsys):
    assert "method 'fcucr' needs a sequential backbone" in refused(
        capsys, "tune", "--methods", "fcucr", "--backbones", "fedmf", "--dry-run")


def test_settings_are_looked_up_in_order(in_folder, tmp_path):
    """The user's before the shipped ones, and beside the records that are read."""
    names, mine = ("ft", "fedmf", "ml-100k"), tmp_path / "my-tuned/ml-100k-fedmf-ft.json"
    shipped = Path("results/tuned/ml-100k-fedmf-ft.json")
    mine.parent.mkdir(parents=True)
    assert Tuned.of(True, tmp_path).file(*names) == Tuned.of(True, Path("nowhere")).file(*names) == shipped
    mine.write_text('{"settings": {"lr": 0.25}}')
    assert Tuned.of(True, tmp_path).settings(*names) == Tuned.of(mine.parent, tmp_path).settings(*names) == {"lr": 0.25}
    assert Tuned.of(None, tmp_path) is None
    with pytest.raises(UserError, match="no file .*/my-tuned/xing-b-ft.json or results/tuned/xing-b-ft.json.\nMake it "
                                        "with: run_bench.py tune .* --backbones b --datasets xing --plugins p"):
        Tuned.of(True, tmp_path, Where((Path("p"),))).settings("ft", "b", "xing")


@pytest.mark.parametrize("options,expected", [
    ([], ("results/my-tuned", "results/tuned")), (["--results", "r"], ("r/my-tuned", "results/tuned")),
    (["--out", "t"], ("t", None)), (["--shipped"], ("results/tuned", None)),
    (["--shipped", "--out", "results/tuned/fcucr"], ("results/tuned/fcucr", None))])
def test_where_tune_writes(options, expected, monkeypatch):
    """Shipped settings are written, and an equal search of them made again, only when asked to."""
    monkeypatch.chdir(ROOT)
    folders = tune_command._folders(parse(["tune", *options]))
    assert tuple(folder and str(folder) for folder in folders) == expected
    with pytest.raises(UserError, match="holds settings that the suite ships"):
        tune_command._folders(parse(["tune", "--out", "results/tuned/fcucr"]))


def test_an_equal_shipped_search_is_kept(monkeypatch, capsys, tmp_path):
    """FT's choice is taken from the shipped file, too."""
    shutil.copytree(ROOT / "results/tuned", tmp_path / "results/tuned")
    monkeypatch.chdir(tmp_path)
    for budget, kept in ((24, True), (23, False)):
        assert main(["tune", "--methods", "f3crec", "--backbones", "fedmf", "--dry-run", "--json", "--budget",
                     str(budget)]) == 0
        said = capsys.readouterr()
        (row,) = json.loads(said.out)
        assert "note: ft" not in said.err and row["kept"] == kept
        assert row["inherited"] == Tuned.of(True, Path("results")).settings("ft", "fedmf", "ml-100k")
    assert main(["tune", "--methods", "kd,f3crec", "--backbones", "fedmf", "--dry-run", "--set", "rounds=5"]) == 0
    assert capsys.readouterr().err == ("note: ft on fedmf, ml-100k, which others take over, was tuned with other --set "
                                       "(none; here rounds=5); name ft too to tune it with these.\n")
