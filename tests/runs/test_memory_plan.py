"""What a run is said to need before it starts: the plan's parts, what is available, and the refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import build

from fedcl_bench.cli.main import main
from fedcl_bench.client.lists import BatchView
from fedcl_bench.distillation import ranks_of
from fedcl_bench.errors import UserError
from fedcl_bench.evaluation.ranking import EvaluationSettings
from fedcl_bench.federation.footprint import load_of
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Federation, FederationSettings
from fedcl_bench.ops import memory
from fedcl_bench.ops.memory import Available, available
from fedcl_bench.runs import memory_plan
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.memory_plan import plan, require
from fedcl_bench.sampling import LocalSettings
from fedcl_bench.sizes import SIZES
from fedcl_bench.testing.worlds import session_log, session_stream

CPU = torch.device("cpu")
LAST, BEFORE = (943, 1152), (827, 1148)  # users and items of ML-100K's blocks 3 and 2


def federation(registry, ml100k, backbone, **settings):
    return make_config(registry, "ft", backbone, "ml-100k", overrides=[("test", settings)]).federation(ml100k)


def test_tables_are_counted_exactly(registry, ml100k):
    """Three times those of the last block and of the one before it, 4 bytes a number."""
    def numbers(users, items, of_pair, of_user):
        return items * 32 + users * of_user + users * items * of_pair

    for name, settings, of_pair, of_user in (("fedmf", {}, 0, 32), ("fedrap", {}, 32, 33), ("fedncf", {}, 0, 97),
                                             ("pfedrec", {"eval_item_table": "local"}, 32, 33),
                                             ("gpfedrec", {}, 64, 32 + 65 * 32 + 33 * 16 + 17 * 8 + 9)):
        f = federation(registry, ml100k, name, **settings)
        expected = 3 * 4 * (numbers(*LAST, of_pair, of_user) + numbers(*BEFORE, of_pair, of_user))
        assert plan(f, 1).parts["tables"] == expected
        assert plan(federation(registry, ml100k, name, precision="float64", **settings), 1).parts["tables"] == \
            2 * expected


def test_a_server_that_looks_at_uploads_holds_three_of_each(registry, ml100k):
    assert plan(federation(registry, ml100k, "gpfedrec"), 1).parts["uploads"] == 3 * 4 * 943 * 1152 * 32


def test_threads_multiply_what_they_hold(registry, ml100k):
    """A chunk of 2^20 numbers in rows of 32, 7 times with what is made of it and 96 bytes a row; with threads, two more
    trained ones of each wait."""
    f, rows = federation(registry, ml100k, "fedmf"), 1 << 15
    chunk, waiting = rows * (4 * 32 * 7 + 96), rows * (4 * 32 + 32)
    one, three = plan(f, 1).parts, plan(f, 3).parts
    assert (one["training"], three["training"]) == (chunk, 3 * chunk + 4 * waiting)
    assert {name for name in one if one[name] != three[name]} == {"training", "process"}


@pytest.mark.parametrize("name", ["fedmf", "fedncf", "pfedrec", "fedrap", "gpfedrec", "ncf", "biasmf", "recbole:NeuMF"])
def test_every_kind_of_backbone_has_a_plan(registry, ml100k, name):
    parts = plan(federation(registry, ml100k, name), 2).parts
    assert all(isinstance(value, int) and value >= 0 for value in parts.values())
    assert parts["tables"] >= 12 * 1152


def held(f):
    """Bytes of what a method holds at the end of a run beside the model's own tables, and how much it planned."""
    *_, progress = run(f)
    of_model = {id(table) for table in progress.model.tables()}
    state = [*progress.client_state.values(), *progress.server_state.values()]
    took = sum(values.numel() * values.element_size() for values in state if id(values) not in of_model)
    step = f.stream.steps[-1]
    return took, f.acting_in(step).memory(load_of(f, step, 1))[0]


@pytest.mark.parametrize("backbone", ["fedmf", "fedncf"])
@pytest.mark.parametrize("method", ["kd", "f3crec", "rlp2", "spp", "reg"])
def test_what_methods_keep_is_planned(registry, ml100k, method, backbone):
    """At least what they hold at the end, and not much more than twice it, as new state is made beside the old."""
    config = make_config(registry, method, backbone, "ml-100k", overrides=[("test", {"rounds": 1, "patience": 0})])
    took, planned = held(config.federation(ml100k))
    assert took <= planned <= 3 * took


@pytest.mark.parametrize("settings", [{}, {"teacher": "previous"}, {"window": 1}])
def test_what_fcucr_keeps_is_planned(registry, settings):
    stream = session_stream(session_log(40), 40)
    f = Federation(stream, build(registry, "backbone", "sasrec", dim=32, max_length=20),
                   build(registry, "method", "fcucr", **settings), LocalSettings("adam", local_epochs=1, negatives=1),
                   FederationSettings(rounds=3, patience=0, tested_round="last"),
                   EvaluationSettings(topk=(3,), valid_metric="hit@3", candidates="sampled", sampled_candidates=10), 5)
    f.check()
    took, planned = held(f)
    assert took <= planned <= 6 * took


MEASURE = """
import json, sys
from fedcl_bench.runs.config import make_config
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation.loop import run
from fedcl_bench.ops.memory import peak_mib, reset_peak
from fedcl_bench.runs.memory_plan import plan
from fedcl_bench.runs.registry import discover
import torch
torch.set_num_threads(2)
config = make_config(discover(), "ft", sys.argv[1], "ml-100k", 0, [("test", json.loads(sys.argv[2]))])
f = config.federation(load_stream(config.source, config.stream))
planned = plan(f, 2).total / (1 << 20)
reset_peak()
with open("/proc/self/statm") as file:
    before = int(file.read().split()[1]) / 256
for _ in run(f):
    pass
print(json.dumps((planned, peak_mib() - before)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to measure a process's memory")
@pytest.mark.long
@pytest.mark.parametrize("backbone, settings", [
    ("fedrap", {"l2": 0.0}), ("pfedrec", {"eval_item_table": "local", "dim": 64})])
def test_the_plan_against_what_runs_take(backbone, settings):
    """Of runs that are large: at most 30 % more, and not much less, as two threads' chunks do not always overlap. A
    round is not repeated before all kinds of snapshots are there."""
    settings = {"rounds": 3, "blocks": 1, "patience": 0, **settings}
    done = subprocess.run([sys.executable, "-c", MEASURE, backbone, json.dumps(settings)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    planned, took = json.loads(done.stdout)
    assert 0.6 * planned < took < 1.3 * planned


def lay(root, **files):
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_what_is_available(tmp_path):
    """The least of the machine's memory and every enclosing control group's limit, whose cached files count as free."""
    assert available(CPU, tmp_path) is None
    lay(tmp_path, proc__meminfo="MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    assert available(CPU, tmp_path) == Available(800 << 10, "available on this machine")
    inner = "sys/fs/cgroup/jobs/mine/"
    for name, content in (("proc/self/cgroup", "0::/jobs/mine\n"), (inner + "memory.max", "max\n"),
                          (inner + "memory.current", "7\n"), ("sys/fs/cgroup/jobs/memory.max", str(1 << 20)),
                          ("sys/fs/cgroup/jobs/memory.current", str(700 << 10)),
                          ("sys/fs/cgroup/jobs/memory.stat", f"anon 5\ninactive_file {100 << 10}\nslab 3\n")):
        lay(tmp_path, **{name: content})
    assert available(CPU, tmp_path) == Available(424 << 10, "of this process's limit of 0.00 GiB")
    lay(tmp_path, **{"sys/fs/cgroup/jobs/memory.current": str(2 << 20)})
    assert available(CPU, tmp_path).bytes == 0


def test_what_is_available_in_control_groups_of_the_first_version(tmp_path):
    for name, content in (("proc/self/cgroup", "5:cpu:/x\n4:cpuset,memory:/x\n"),
                          ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", str(3 << 30)),
                          ("sys/fs/cgroup/memory/x/memory.usage_in_bytes", str(1 << 30)),
                          ("sys/fs/cgroup/memory/x/memory.stat", "total_inactive_file 1024\n"),
                          ("sys/fs/cgroup/memory/memory.limit_in_bytes", str(1 << 62)),
                          ("sys/fs/cgroup/memory/memory.usage_in_bytes", str(1 << 30))):
        lay(tmp_path, **{name: content})
    assert available(CPU, tmp_path) == Available((2 << 30) + 1024, "of this process's limit of 3.00 GiB")


def test_a_limit_of_addresses_counts(tmp_path, monkeypatch):
    """What is left is the limit without the pages that the process has, used or not."""
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (
        (3 << 30, 4 << 30) if kind == memory.resource.RLIMIT_AS else (-1, -1)))
    lay(tmp_path, proc__meminfo=f"MemAvailable: {8 << 20} kB\n",
        proc__self__statm=f"{(1 << 30) // memory.resource.getpagesize()} 1 1 1 0 1 0\n")
    assert available(CPU, tmp_path) == Available(2 << 30, "of this process's limit of 3.00 GiB, see ulimit -v")


def left(monkeypatch, number):
    monkeypatch.setattr(memory_plan, "available", lambda device: number and Available(number, "available here"))


def test_a_run_that_does_not_fit_is_refused(registry, ml100k, monkeypatch):
    """By one byte, with the numbers and what helps; nothing is said where nothing is known."""
    f = federation(registry, ml100k, "fedrap", precision="float64")
    need, alone = plan(f, 2).total, plan(f, 1).total
    for enough in (need, None):
        left(monkeypatch, enough)
        require(f, 2)
    left(monkeypatch, need - 1)
    with pytest.raises(UserError) as error:
        require(f, 2)
    text = str(error.value)
    assert f"needs about {need / 2 ** 30:.2f} GiB beyond its data" in text
    assert "GiB of it for tables (943 users, 1,152 items)" in text
    assert f"--threads 1, which needs {alone / 2 ** 30:.2f} GiB and changes no number" in text
    assert "--set dim=N (now 32)" in text and "--set precision=float32" in text
    left(monkeypatch, alone - 1)
    with pytest.raises(UserError) as error:
        require(f, 2)
    assert "--threads" not in str(error.value) and "available here" in str(error.value)


def test_rows_too_long_to_make_are_refused_before_one_is_made(registry, ml100k, monkeypatch):
    """Rows of 10^9 numbers: 8 GB each."""
    left(monkeypatch, 20 << 30)
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", {"dim": 10 ** 9})])
    with pytest.raises(UserError) as error:
        config.check(config.federation(ml100k))
    assert "not enough memory: 20.00 GiB are left (available here). The item tables alone need" in str(error.value)
    assert "(1,152 items of 1,000,000,000 numbers)" in str(error.value)
    assert "a smaller --set dim=N (now 1000000000)" in str(error.value)


def test_every_backbone_has_tables_without_rows(registry, ml100k):
    """What the question before all others asks for; it lets every one pass that fits."""
    for kind, name in registry.plugins:
        if kind == "backbone":
            memory_plan.require_item_tables(federation(registry, ml100k, name))


def test_the_command_refuses_before_anything_is_written(monkeypatch, tmp_path, capsys):
    left(monkeypatch, 50 << 20)
    assert main(["--method", "pfedrec", "--set", "rounds=1", "--results", str(tmp_path / "results")]) == 2
    assert "not enough memory: 0.05 GiB are left (available here). This run needs about" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_imports_are_not_searched_for_garbage_later():
    """What PyTorch's import leaves is frozen, once; what comes later is not."""
    said = subprocess.run([sys.executable, "-c", "import gc\n"
                           "from fedcl_bench.ops.memory import importing\n"
                           "with importing():\n    import torch\n    assert not gc.isenabled()\n"
                           "frozen = gc.get_freeze_count()\n"
                           "with importing():\n    assert gc.isenabled()\n"
                           "later = [[] for _ in range(1000)]\n"
                           "print(gc.isenabled(), frozen > 50_000, gc.get_freeze_count() == frozen)"],
                          capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True"] * 3


@pytest.mark.parametrize("method, settings, state, working", [
    ("ft", {}, 0, 0), ("kd", {}, 2 * 943 * 30 * 12, 0), ("f3crec", {}, 2 * 943 * 30 * 12, 4 * 943 * 1152),
    ("f3crec", {"without": "arm"}, 2 * 943 * 30 * 12, 0), ("f3crec", {"without": "cc"}, 0, 0)])
def test_methods_say_what_they_hold(registry, ml100k, method, settings, state, working):
    """Lists and probabilities of 30 items per user, and scores of all items per thread."""
    f = make_config(registry, method, "fedmf", "ml-100k", overrides=[("test", settings)]).federation(ml100k)
    parts, without = plan(f, 2).parts, plan(federation(registry, ml100k, "fedmf"), 2).parts
    assert parts["the method's state"] == state
    assert parts["training"] - without["training"] == 2 * working


def test_scores_for_ranks_are_made_in_pieces(monkeypatch):
    """Of at most so many clients that their scores of all items are no more than the size; the ranks are the same."""
    scores, asked = torch.randn(17, 50), []
    clients = torch.tensor([16, 3, 5, 4, 0, 9, 1])
    items = torch.randint(50, (7, 4))
    view = object.__new__(BatchView)
    view._trainer = SimpleNamespace(n_items=50)
    monkeypatch.setattr(BatchView, "all_scores", lambda self, part: asked.append(len(part)) or scores[part])
    whole = view.ranks(clients, items)
    monkeypatch.setattr(SIZES, "ranked_scores", 3 * 50 + 49)
    assert torch.equal(view.ranks(clients, items), whole) and asked == [7, 3, 3, 1]
    assert torch.equal(whole, ranks_of(scores[clients], items))
