"""Grids: what is planned, what is run, and that failures, kills and interruptions cost no more than they must."""

import json
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, SameProcess, records, same_numbers

from fedcl_bench.cli.grid_view import GridView
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.experiments import grid
from fedcl_bench.experiments.grid import Outcome
from fedcl_bench.experiments.worker import _stream
from fedcl_bench.kernels.memory import peak_mib, reset_peak
from fedcl_bench.plugin.method import Method
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.specs import RunSpec, Where, seed_text
from fedcl_bench.experiments import pool
from fedcl_bench.experiments.pool import GridState, Pool, Running
from fedcl_bench.experiments.processes import _ended

QUICK = ["--set", "rounds=2", "--set", "k_core=80", "--set", "blocks=2"]
CELLS = ["--methods", "ft,kd", "--backbones", "fedmf", "--seeds", "2", *QUICK]

# The command line in a process that does something to itself (or to its group) when a condition on the board is met.
DISTURBED = """
import os, signal, sys
from fedcl_bench.cli import grid_view
from fedcl_bench.cli.grid_view import GridView
from fedcl_bench.cli.main import main

condition, action, *arguments = sys.argv[1:]

def show(self, board):
    if eval(condition):
        exec(action)

grid_view.GridView.show = show
sys.exit(main(arguments))
"""


def disturbed(condition, action, *arguments):
    """Run a command that disturbs itself; returns when all its workers have ended, too (they share standard error)."""
    process = subprocess.Popen([sys.executable, "-c", DISTURBED, condition, action, *arguments], cwd=ROOT, text=True,
                               start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def grid_json(capsys, *arguments, status=0):
    assert main(["grid", *arguments, "--json", "--jobs", "2"]) == status
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The results of a grid that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "Processes", SameProcess)
        assert main(["grid", *CELLS, "--results", str(folder), "--quiet", "--jobs", "2"]) == 0
    return folder


@pytest.fixture
def tasks(registry):
    def make(*methods, seeds=1, **settings):
        settings = tuple({"rounds": 2, "k_core": 80, "blocks": 2, **settings}.items())
        specs = [RunSpec(method, "fedmf", "ml-100k", settings) for method in methods]
        return grid.make_tasks(registry, specs, range(seeds))
    return make


# Planning


@pytest.mark.parametrize("seeds,text", [([], ""), ([3], "3"), ([1, 0], "0, 1"), (range(5), "0-4"), ([0, 2], "0, 2"),
                                        ({5, 2, 1, 0, 7, 8}, "0-2, 5, 7, 8")])
def test_seeds_in_words(seeds, text):
    assert seed_text(seeds) == text


def test_a_worker_keeps_a_stream_by_the_columns_that_its_runs_read(registry):
    """Two runs of one dataset, of which the second reads ratings."""
    streams = OrderedDict()
    configs = [make_config(registry, "ft", "biasmf", "ml-100k", overrides=[("test", {"loss": loss, "k_core": 80})])
               for loss in ("bpr", "squared_error", "bpr")]
    found = [_stream(config, "ml-100k", streams, print) for config in configs]
    assert found[0] is found[2] and [stream.steps[0].train.ratings is not None for stream in found[:2]] == [False, True]


def test_a_product_with_seeds_innermost(registry):
    """Of names and of what varies; of a paper, its runs with what the command line asks for over them."""
    part = grid.GridPart(("ft", "f3crec"), ("fedmf",), seeds=2, set={"rounds": 5})
    assert part.specs() == [RunSpec(m, "fedmf", "ml-100k", (("rounds", 5),)) for m in ("ft", "f3crec")]
    planned = grid.make_tasks(registry, part.specs(), (3, 4))
    assert [(t.spec.method, t.config.seed, t.config.server.rounds) for t in planned] == [
        ("ft", 3, 5), ("ft", 4, 5), ("f3crec", 3, 5), ("f3crec", 4, 5)]
    assert planned[1].config.base_hash == planned[3].config.base_hash != planned[0].config.base_hash
    other = type("Other", (Method,), {"trained_backbone": lambda self, backbone, clients: backbone})  # in block 0 too
    config = planned[2].config
    assert config.shares_base and not replace(config, method=SimpleNamespace(cls=other)).shares_base
    for stream in ("static", "domains"):  # the first has no other block, methods act in that of the second
        assert not replace(config, stream=replace(config.stream, stream=stream)).shares_base
    varied = grid.GridPart(("f3crec",), ("fedmf",), set={"eps": 0.5}, vary={"eps": (0.1, 0.2), "beta": (0, 1)})
    assert [dict(spec.settings) for spec in varied.specs()] == [
        {"eps": eps, "beta": beta} for eps in (0.1, 0.2) for beta in (0, 1)]
    of_paper = grid.GridPart(("f3crec",), ("fedmf",), ("ml-100k",), set={"rounds": 2}, paper="f3crec", tables=(2,))
    assert of_paper.specs() == [RunSpec("f3crec", "fedmf", "ml-100k", (("rounds", 2),))]


def test_settings_of_one_method(capsys):
    """They win over --set, and are what a run with them alone has."""
    words = ["--backbones", "fedmf", "--dry-run", "--json", "--set", "rounds=2", "--set", "patience=5"]

    def planned(methods: str, *more: str) -> list[str]:
        assert main(["grid", "--methods", methods, *words, *more]) == 0
        return [run["hash"] for run in json.loads(capsys.readouterr().out)]
    assert planned("f3crec:eps=.003,without=cc,kd:topk=5,20") == [
        *planned("f3crec", "--set", "eps=.003", "--set", "without=cc"), *planned("kd", "--set", "topk=5,20")]
    for method, words in (("kd:lambda_kd=.1", "belongs to --set"), ("popularity", "methods that need a backbone")):
        assert main(["tune", "--methods", method, "--backbones", "fedmf"]) == 2
        assert words in capsys.readouterr().err


def test_equal_runs_are_planned_once(registry):
    """However a run is written: by its default, as text, or in two parts of a file."""
    specs = [RunSpec("ft", "fedmf", "ml-100k", settings) for settings in ((), (("lr", "1.0"),), (("lr", 1),))]
    once = grid.make_tasks(registry, specs, (0, 1))
    assert len(once) == 2
    assert len(grid.merged([once, grid.make_tasks(registry, specs[:1], (1, 2))])) == 3


def test_the_device_is_part_of_every_run(registry, capsys, tmp_path, monkeypatch):
    """It reaches the workers and the commands that are shown; without the device, nothing starts."""
    spec, arguments = RunSpec("ft", "fedmf", "ml-100k"), ["grid", "--methods", "ft", "--backbones", "fedmf", "--device"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*arguments, "cuda", "--results", str(tmp_path)]) == 2
    assert "--device cuda: PyTorch finds no CUDA device here" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    task, = grid.make_tasks(registry, [spec], [3], device="cuda")
    assert (task.config.device, task.config.seed) == ("cuda", 3)
    assert task.command(Where()) == \
        "run_bench.py --method ft --backbone fedmf --dataset ml-100k --seed 3 --device cuda"
    on_cpu, = grid.make_tasks(registry, [spec], [3])
    (found,), _ = grid_json(capsys, *arguments[1:], "auto", "--first-seed", "3", "--dry-run",
                            "--results", str(tmp_path))
    assert found["hash"] == task.config.hash != on_cpu.config.hash


def test_a_worker_has_the_device_of_its_run(registry, tmp_path, monkeypatch, same_process):
    """It finds no GPU and says so, instead of computing on the processor."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    task, = grid.make_tasks(registry, [RunSpec("ft", "fedmf", "ml-100k", (("rounds", 1),))], [0], device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with Pool(pool.Folders(tmp_path), jobs=1) as workers:
        outcome, = workers.run([task])
    assert (outcome.status, "PyTorch finds no CUDA device" in outcome.error) == ("error", True)


def test_a_file_of_grids_and_the_command_line_over_it(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text("backbones: [fedmf]\nseeds: 5\nset: {rounds: 50}\ngrids:\n"
                    "  - {methods: 'ft, reg', set: {lr: 0.5}}\n"
                    "  - {methods: [f3crec], seeds: 2, vary: {eps: [1e-3, 2e-3]}}\n")
    first, second = grid.read_parts(path, {"set": {"rounds": 2}})
    assert (first.methods, first.seeds, first.set) == (("ft", "reg"), 5, {"rounds": 2, "lr": 0.5})
    assert (second.seeds, second.set, second.vary) == (2, {"rounds": 2}, {"eps": ("1e-3", "2e-3")})
    assert [part.seeds for part in grid.read_parts(path, {"seeds": 1})] == [1, 1]
    assert [part.vary for part in grid.read_parts(path, {"set": {"eps": 0.5}})] == [{}, {}]  # one value in place of two
    assert grid.read_parts(path, {"vary": {"eps": ("3e-3",)}})[1].vary == {"eps": ("3e-3",)}


@pytest.mark.parametrize("text, message", [
    ("method: [ft]\n", "unknown field in .*grid.yaml 'method'.\nDid you mean 'methods'"),
    ("paper: [f3crec, fcucr]\n", "field 'paper': .* accepted: the name of one paper"),
    ("methods: 3\n", "field 'methods': found 3, accepted: a list of names"),
    ("methods: [ft]\nseeds: 0\n", "field 'seeds': found 0, accepted: a whole number from 1"),
    ("methods: [ft]\nvary: {eps: 0.1}\n", "field 'vary': .* settings with lists of values"),
    ("methods: [ft]\nset: rounds\n", "field 'set': found 'rounds'"),
    ("grids: {methods: [ft]}\n", "field 'grids': accepted: a list"),
    ("backbones: [fedmf]\n", "--methods is missing"),
    ("- ft\n", "expected 'name: value' lines, found list"),
])
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        [part.specs() for part in grid.read_parts(path, {})]


# Running


def test_finished_runs_are_not_repeated(undisturbed, capsys):
    before = {path: path.stat().st_mtime_ns for path in undisturbed.glob("runs/*/run.json")}
    assert len(before) == 4
    found, err = grid_json(capsys, *CELLS, "--results", str(undisturbed))
    assert found["counts"]["finished"] == 4 and not any(run["new"] for run in found["runs"]) and err == ""
    assert before == {path: path.stat().st_mtime_ns for path in undisturbed.glob("runs/*/run.json")}
    assert main(["grid", *CELLS, "--first-seed", "1", "--results", str(undisturbed), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "4 runs: 2 finished, 0 failed, 0 interrupted, 2 to run. " in out
    words = ["grid", "--methods", "ft,fcucr", "--backbones", "fedmf", "--seeds", "2", *QUICK, "--results",
             str(undisturbed), "--dry-run"]
    assert main(words) == main([*words, "--json"]) == 0
    out, _, plan = capsys.readouterr().out.rpartition("\n[")
    assert "4 runs: 2 finished, 0 failed, 0 interrupted, 0 to run, 2 that cannot be run. " in out
    assert out.count("cannot be run: method 'fcucr' needs a sequential backbone") == 1
    assert [run["state"] for run in json.loads(f"[{plan}")] == ["finished"] * 2 + ["incompatible"] * 2


def test_block_0_is_computed_once_and_changes_no_number(undisturbed, tmp_path, capsys):
    shared = {name: record["block0_shared"] for name, record in records(undisturbed).items()}
    assert sorted(name.split("-")[0] for name, was in shared.items() if was) == ["kd", "kd"]
    assert len(list((undisturbed / "shared").glob("*.pt"))) == 2
    assert main(["--method", "kd", "--backbone", "fedmf", "--seed", "1", *QUICK, "--results", str(tmp_path), "--json",
                 "--quiet"]) == 0
    alone = json.loads(capsys.readouterr().out)
    same_numbers(records(undisturbed)[Path(alone["record"]).name], alone)


def test_killed_and_started_again(undisturbed, tmp_path, capsys, monkeypatch):
    """SIGKILL of the whole process group after the first finished run: the rest is run, nothing twice, same numbers.

    One process, so that no second run can finish between the first one's end and the kill.
    """
    code, _, err = disturbed("board.count('finished') >= 1 and board.running", "os.killpg(0, signal.SIGKILL)",
                             "grid", *CELLS, "--results", str(tmp_path), "--jobs", "1")
    assert code == -signal.SIGKILL and err.count(" finished: ") == 1
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/run.json")}
    assert len(kept) == 1
    monkeypatch.setattr(pool, "Processes", SameProcess)
    found, _ = grid_json(capsys, *CELLS, "--results", str(tmp_path))
    assert found["counts"]["finished"] == 4 and sum(run["new"] for run in found["runs"]) == 3
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    expected = records(undisturbed)
    for name, record in records(tmp_path).items():
        same_numbers(record, expected.pop(name))
    assert not expected


LONG = ["grid", "--methods", "ft", "--backbones", "fedmf", "--seeds", "2", "--set", "rounds=9000",
        "--set", "patience=9000", "--set", "k_core=80", "--jobs"]
ALL_IN_ROUNDS = "all(r.at for r in board.running) and len(board.running) == board.jobs"


@pytest.mark.long
def test_workers_end_when_the_parent_is_killed(tmp_path):
    """Minutes of work are left when the parent dies; its workers save the round they are in and end."""
    code, _, err = disturbed(ALL_IN_ROUNDS, "os.kill(os.getpid(), signal.SIGKILL)", *LONG, "2", "--results",
                             str(tmp_path))
    assert code == -signal.SIGKILL and err == ""
    assert len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 2 and not records(tmp_path)


def test_ctrl_c_saves_the_round(tmp_path):
    """SIGINT reaches parent and worker alike, as in a terminal."""
    code, out, err = disturbed(ALL_IN_ROUNDS + " and not getattr(self, 'asked', None)",
                               "self.asked = True; os.killpg(0, signal.SIGINT)", *LONG, "1", "--results", str(tmp_path))
    assert code == 130 and "Traceback" not in err and "the same command goes on from there" in err
    assert err.count("stopped after round") == 1 and "0 of 2 runs finished" in out
    assert len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 1 and not records(tmp_path)


@pytest.mark.long
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    code, _, err = disturbed("board.running[:1] and board.running[0].at",
                             "os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)",
                             *LONG, "1", "--results", str(tmp_path))
    assert code == 130 and "Traceback" not in err and not records(tmp_path)


def test_a_failing_run_leaves_the_others(same_process, tmp_path, capsys):
    """A diverging run is reported with the command that repeats it, and again only when asked for."""
    arguments = ["--methods", "reg", "--backbones", "fedmf", "--vary", "lambda_reg=1e30,1e-5", *QUICK, "--results",
                 str(tmp_path)]
    assert main(["grid", *arguments, "--jobs", "1"]) == 1
    out, err = capsys.readouterr()
    assert "1 of 2 runs finished" in out and "training diverged in block 1" in out
    assert ("run_bench.py --method reg --backbone fedmf --dataset ml-100k --seed 0 --set rounds=2 --set k_core=80 "
            f"--set blocks=2 --set lambda_reg=1e30 --results {tmp_path}") in out
    found, _ = grid_json(capsys, *arguments, status=1)
    assert [(run["status"], run["new"]) for run in found["runs"]] == [("failed", False), ("finished", False)]
    found, _ = grid_json(capsys, *arguments, "--retry-failed", status=1)
    assert [(run["status"], run["new"]) for run in found["runs"]] == [("failed", True), ("finished", False)]


MINE = """from fedcl_bench import Method

class Mine(Method):
    name, title, first_step = "mine", "ends the program", 0

    def check(self, step):
        __import__("os")._exit(0)
"""


def test_a_worker_that_dies_costs_its_run_only(tmp_path, capsys):
    """Another does the next run."""
    (tmp_path / "mine.py").write_text(MINE)
    assert main(["grid", "--methods", "mine,ft", "--backbones", "fedmf", *QUICK, "--plugins", str(tmp_path),
                 "--results", str(tmp_path / "results"), "--jobs", "1"]) == 1
    said = "".join(capsys.readouterr())
    assert "1 of 2 runs finished" in said and "Traceback" not in said
    assert "did not finish: mine on fedmf" in said and "exit code 0 in the middle of its run" in said
    (record,) = records(tmp_path / "results").values()  # the other is not marked as failed
    assert (record["method"], record["status"]) == ("ft", "finished")


@pytest.mark.parametrize("code, says", [(-signal.SIGKILL, "was killed by SIGKILL (out of memory? fewer --jobs help)"),
                                        (-signal.SIGSEGV, "was killed by SIGSEGV"), (3, "ended with exit code 3")])
def test_why_a_worker_ended(code, says):
    assert _ended(code) == f"the worker {says}"


def test_a_run_that_another_process_is_at(same_process, tasks, tmp_path, monkeypatch):
    """It is tried once more at the end and then reported; its record is left alone."""
    monkeypatch.setattr(pool, "BUSY_WAIT", 0.0)
    task, = tasks("ft")
    with task.record(tmp_path).locked(), Pool(pool.Folders(tmp_path), jobs=1) as workers:
        outcome, = workers.run([task])
    assert outcome.status == "busy" and "another process is at this run" in outcome.error
    assert grid.state(task, tmp_path).status == "missing"


# Scheduling


def test_one_run_makes_a_block_0_at_a_time(tasks, tmp_path):
    workers = Pool(pool.Folders(tmp_path), jobs=4)
    ft, other, kd, _ = tasks("ft", "kd", seeds=2)
    board = GridState(3, 4, waiting=[kd, other], running=[Running(ft, 0.0)])
    assert workers._next(board, {}) is other and workers._next(board, {}) is None and board.waiting == [kd]
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / f"{kd.config.base_hash}.pt").touch()
    assert workers._next(board, {}) is kd


def test_runs_with_checkpoints_first_then_long_ones(tasks):
    ft, kd, reg, f3crec = tasks("ft", "kd", "reg", "f3crec")
    done = [Outcome(task, "finished", seconds) for task, seconds in ((ft, 5.0), (kd, 9.0), (reg, 7.0))]
    board = GridState(4, 1, outcomes=done, waiting=[ft, kd, reg, f3crec])
    pool._order(board, {reg.config.hash})
    assert board.waiting == [reg, f3crec, kd, ft]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system cannot count peaks anew")
def test_peak_memory_is_that_of_the_run():
    """A worker's second run does not report the first one's peak."""
    block = torch.ones(100 << 20, dtype=torch.uint8)
    high = peak_mib()
    del block
    reset_peak()
    assert peak_mib() < high - 50


def test_time_left(tasks, monkeypatch):
    """The mean of the method's own runs where there are some, else of the dataset's; jobs side by side."""
    monkeypatch.setattr(pool.time, "monotonic", lambda: 104.0)
    ft0, ft1, kd0, kd1 = tasks("ft", "kd", seeds=2)
    assert GridState(4, 2, waiting=[ft0]).time_left() is None
    done = [Outcome(ft0, "finished", 99.0, took=10.0)]
    assert GridState(4, 2, done, [Running(ft1, 100.0)], [kd0, kd1]).time_left() == (6 + 10 + 10) / 2
    done.append(Outcome(kd0, "finished", 99.0, took=30.0))
    assert GridState(4, 2, done, [Running(ft1, 100.0)], [kd1]).time_left() == (6 + 30) / 2
    assert GridState(4, 8, done, [], [kd1]).time_left() == 30


def test_a_log_gets_a_line_of_progress_a_minute(tasks, monkeypatch, capsys):
    """Standard error is no terminal here, as in logs of a cluster; a quiet command and a finished one say nothing."""
    monkeypatch.setattr(pool.time, "monotonic", lambda: 130.0)
    ft0, ft1, kd0, _ = tasks("ft", "kd", seeds=2)
    board = GridState(3, 1, [Outcome(ft0, "finished", 99.0, took=50.0)], [Running(ft1, 100.0, (1, 5, 7, 100))], [kd0])
    now = [0.0]
    views = [GridView(clock=lambda: now[0]), GridView(quiet=True, clock=lambda: now[0])]
    for now[0] in (0.25, 59.75, 60.0, 60.25, 119.75, 3725.0):
        for view in views:
            view.show(board)
    rest = f"about 1:10 left; {ft1.label}: block 1 of 0-4, round 7 of at most 100"
    assert capsys.readouterr().err.splitlines() == [
        f"1 of 3 done, 1 running, 1 waiting, {elapsed} elapsed, {rest}" for elapsed in ("1:00", "1:02:05")]
    now[0] = 9999.0
    views[0].show(GridState(1, 1, board.outcomes))
    assert capsys.readouterr().err == ""


def test_lists_of_all_runs_are_written(same_process, tmp_path, capsys):
    """To the files of `run --save-lists`, under the hashes of runs without; finished runs without lists are refused."""
    words = ["--methods", "ft,kd", "--backbones", "fedmf", *QUICK]
    done, _ = grid_json(capsys, *words, "--save-lists", "--results", str(tmp_path / "with"))
    plain, _ = grid_json(capsys, *words, "--results", str(tmp_path / "without"))
    assert [run["hash"] for run in done["runs"]] == [run["hash"] for run in plain["runs"]]
    assert not (tmp_path / "without/lists").exists()
    names = {path.name for path in (tmp_path / "with/runs").iterdir()}
    assert len(names) == 2 and {path.name for path in (tmp_path / "with/lists").iterdir()} == names
    for folder in (tmp_path / "with/lists").iterdir():
        assert len(list(folder.glob("*.run.gz"))) == 3 and len(list(folder.glob("*.qrels.gz"))) == 2
    assert main(["grid", *words, "--save-lists", "--results", str(tmp_path / "with"), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["grid", *words, "--save-lists", "--results", str(tmp_path / "without"), "--quiet"]) == 2
    assert "2 of 2 runs" in capsys.readouterr().err
