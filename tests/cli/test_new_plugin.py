"""The scaffold: what it writes runs as it stands, in every command, and nothing is overwritten."""

import functools
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, build, one_step, ragged

from fedcl_bench import testing
from fedcl_bench.cli.commands.new_plugin import METHODS
from fedcl_bench.cli.main import main
from fedcl_bench.rng import DrawKey
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.runs.registry import discover

HOOKS_OF = {"server": ("def aggregate", "def end_step"), "penalty": ("def pull", "def downloads_previous_model"),
            "proximal": ("sees_rows", "def local_loss", "batch.moved"),
            "upload": ("def uploads", "def end_local", "def end_round", "batch.loss"),
            "replay": ("def replayed_items", "batch.replay_scores", "self.client_state")}
ROUNDS = ["--set", "rounds=1", "--set", "k_core=80"]
MINE = ["--plugins", "my_plugins"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder in which all kinds were made by the command: ``my_plugins`` with ewma, my-mf, first-hit and reverse."""
    folder = tmp_path_factory.mktemp("written")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["new-plugin", "method", "ewma"]) == main(["new-plugin", "backbone", "my-mf"]) == 0
        assert main(["new-plugin", "metric", "first-hit"]) == main(["new-plugin", "attack", "reverse"]) == 0
    finally:
        os.chdir(before)
    return folder


# What is written


def test_files_and_next_commands(capsys, output):
    assert main(["new-plugin", "method", "two-words"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote my_plugins/two_words.py", "wrote my_plugins/tests/test_two_words.py",
        "It runs as it stands; edit it and try:", "  run_bench.py check two-words --plugins my_plugins",
        "  run_bench.py --method two-words --backbone fedmf --plugins my_plugins"]
    plugin = discover([Path("my_plugins")]).get("method", "two-words")
    assert plugin.cls.__name__ == "TwoWords" and plugin.cls.Settings.__name__ == "TwoWordsSettings"
    Path("plugins").mkdir()  # one that is here is taken
    assert "--method ft --backbone mf2 --plugins plugins" in output("new-plugin", "backbone", "mf2")
    assert sorted(map(str, Path("plugins").rglob("*.py"))) == ["plugins/mf2.py", "plugins/tests/test_mf2.py"]
    assert main(["new-plugin", "method", "other", "--plugins", "deep/er"]) == 0 and Path("deep/er/other.py").is_file()


def test_a_folder_named_twice_is_one_folder(written):
    folder = written / "my_plugins"
    assert discover([folder, folder / "../my_plugins"]).names("method") == discover([folder]).names("method")
    assert discover([ROOT / "plugins"]).names("method") == discover().names("method")


# What it does


def test_the_mean_is_exponentially_weighted(written):
    """Two blocks with tables of ones and threes, decay .25, and an item that is new in the second block."""
    method = build(discover([written / "my_plugins"]), "method", "ewma", decay=0.25)

    def end(value, items):
        model = Snapshot({"item": torch.full((items, 3), value)}, {})
        method.end_step(one_step(ragged([0]), items), model, None, torch.tensor([0]), DrawKey(0, 0))
        return method.server_state["item"][:, 0].tolist()
    assert end(1.0, 2) == [1.0, 1.0]
    pulled = method.aggregate({"item": torch.full((3, 3), 3.0)})["item"]
    assert pulled[:, 0].tolist() == [0.75 * 3 + 0.25 * 1] * 2 + [3.0] and pulled.shape == (3, 3)
    assert end(3.0, 3) == [2.5, 2.5, 3.0]
    assert end(5.0, 3) == [0.75 * 5 + 0.25 * 2.5] * 2 + [0.75 * 5 + 0.25 * 3]


def test_the_backbone_is_matrix_factorisation(written, run_json):
    """With FedMF's settings it is FedMF, whose initial values have the same names."""
    job = ["--method", "ft", *ROUNDS, "--set", "optimiser=adam", "--set", "lr=0.01", "--backbone"]
    mine, _ = run_json(*job, "my-mf", "--plugins", str(written / "my_plugins"))
    assert mine["metrics"] == run_json(*job, "fedmf", "--set", "item_lr=plain")[0]["metrics"]


def test_in_every_command(same_process, written, output, monkeypatch):
    """From the file alone: list, run, grid, tables, compare."""
    monkeypatch.chdir(written)
    listed = output("list", *MINE)
    assert "ewma" in listed and "exponentially weighted mean" in listed and "my-mf" in listed
    assert "decay = 0.5" in output("list", "ewma", *MINE)
    assert "ewma on fedmf, ml-100k, seed 0" in output("--method", "ewma", "--backbone", "fedmf", *MINE, *ROUNDS)
    cells = ["--methods", "ft,ewma", "--backbones", "fedmf", "--seeds", "2", "--jobs", "1", *ROUNDS, *MINE]
    assert output("grid", *cells, "--quiet").startswith("4 of 4 runs finished, 3 of them now")
    table = output("tables", "--table", "2", "--datasets", "ml-100k", "--backbones", "fedmf", "--add", "ewma",
                   "--records", "results", *ROUNDS, *MINE)
    heads, d1 = table.splitlines()[2].split(" | "), table.splitlines()[4].split(" | ")
    assert heads[-1] == "ewma |" and d1[heads.index("FT")].count("±") == d1[-1].count("±") == 1
    assert "Not in the paper: ewma." in table and "missing: ewma" not in table
    assert "ewma on fedmf, ml-100k: ndcg@20" in output("compare", "ewma", "ft", "--backbone", "fedmf", *ROUNDS, *MINE)


def test_the_metric_is_the_first_places_hit(written, output, run_json):
    """It is in a run's numbers, and passes its check."""
    plugins = ["--plugins", str(written / "my_plugins")]
    metrics = run_json("--method", "ft", "--backbone", "fedmf", "--set", "extra_metrics=first-hit", "--set",
                       "topk=1,20", *ROUNDS, *plugins)[0]["metrics"]
    assert metrics["first-hit@20"] == metrics["first-hit@1"] == metrics["hit@1"] != metrics["hit@20"]
    assert "all properties hold" in output("check", "first-hit", *plugins)


def test_the_attack_reverses_what_its_users_trained(written, output):
    """Item rows and layers, so many times; and it passes its check."""
    attack = build(discover([written / "my_plugins"]), "attack", "reverse", strength=2.0)
    seen = SimpleNamespace(changes={"item": torch.tensor([[[1.0, -3.0]]]), "layer": torch.tensor([[0.5]])})
    sent = attack.upload(seen)
    assert {name: (change.tolist(), where) for name, (change, where) in sent.items()} == {
        "item": ([[[-2.0, 6.0]]], None), "layer": ([[-1.0]], None)} and attack.among_users
    assert "all properties hold" in output("check", "reverse", "--plugins", str(written / "my_plugins"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["ewma", "my_mf"])
def test_the_written_test_passes(written, name):
    """The plugin's own test, as its author runs it."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                           f"my_plugins/tests/test_{name}.py"],
                          cwd=written, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name, kind", [("ewma", "method"), ("my_mf", "backbone"), ("first_hit", "metric"),
                                        ("reverse", "attack")])
def test_the_written_test_asks_for_every_property(written, monkeypatch, name, kind):
    """Of the plugin beside it, without partners of its own choice."""
    asked = []
    for each in ("method", "backbone", "metric", "attack"):
        monkeypatch.setattr(testing, f"check_{each}", lambda cls, each=each: asked.append((each, cls.name)))
    monkeypatch.setattr(testing, "assert_passed", asked.append)
    found = runpy.run_path(str(written / f"my_plugins/tests/test_{name}.py"))
    found[f"test_{name}"]()
    assert asked == [(kind, name.replace("_", "-")), None]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind != "upload"))
                                  for kind in METHODS])
def test_every_kind_of_method_passes_check(kind, monkeypatch, tmp_path, output):
    """At first try, with no edits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(testing, "check_plugin", functools.partial(testing.check_plugin, process=False))
    assert main(["new-plugin", "method", f"my-{kind}", "--kind", kind]) == 0
    (text,) = [path.read_text() for path in Path("my_plugins").glob("*.py")]
    assert all(words in text for words in ("setting(", "title = ", *HOOKS_OF[kind])), text
    assert "all properties hold" in output("check", f"my-{kind}", *MINE, "--with", "fedmf")


# What is refused


@pytest.mark.parametrize("arguments, message", [
    (["metod", "mine"], "unknown kind of plugin 'metod'. Did you mean 'method'?"),
    (["method", "Mine"], "found the name 'Mine', accepted: lower-case letters"),
    (["method", "../up"], "found the name '../up', accepted"),
    (["method", "none"], "'none', which means something else"),
    (["method", "test-mine"], "'test-mine', which means something else"),
    (["method", "torch"], "'torch', which means something else"),
    (["method", "class"], "'class', which means something else"),
    (["method", "pull", "--kind", "penalty"], "'pull', which means something else"),
    (["method", "kd"], "the name 'kd' is taken by the method in"),
    (["method", "fedmf"], "the name 'fedmf' is taken by the backbone in"),
    (["backbone", "mine", "--kind", "replay"], "--kind: found 'replay' for a backbone; only methods come in several"),
    (["method", "mine", "--kind", "proximate"], "kind of method in --kind 'proximate'. Did you mean 'proximal'"),
    (["backbone", "xing"], "the name 'xing' is taken by a dataset"),
    (["method", "mine", "--plugins", "file"], "--plugins: 'file' is not a folder"),
    (["method", "mine", "--plugins", "file/below"], "cannot be written"),
])
def test_bad_names_and_places(refused, arguments, message):
    Path("file").write_text("")
    assert message in refused("new-plugin", *arguments)
    assert [path.name for path in Path().rglob("*")] == ["file"]


def test_nothing_is_overwritten(capsys, refused):
    assert main(["new-plugin", "method", "mine"]) == 0
    capsys.readouterr()
    assert "the name 'mine' is taken by the method in" in refused("new-plugin", "method", "mine")
    Path("my_plugins/broken.py").write_text("nonsense(\n")  # cannot be loaded, so its name is not known
    Path("my_plugins/tests/test_gone.py").write_text("# whose plugin was deleted\n")
    assert "my_plugins/broken.py exists and is left as it is" in refused("new-plugin", "backbone", "broken")
    assert "my_plugins/tests/test_gone.py exists and is left as it is" in refused("new-plugin", "method", "gone")
    assert {str(path.relative_to("my_plugins")): len(path.read_text().splitlines())
            for path in Path("my_plugins").rglob("*.py") if path.name != "mine.py"} == {
        "broken.py": 1, "tests/test_gone.py": 1, "tests/test_mine.py": 12}
