"""The honesty run: finds what leaks only outside of the small kit, says where, and accuses nobody else."""

import json
import os
import runpy
import sys
from multiprocessing import forkserver

import numpy as np
import pytest
import torch
from helpers import Here, lay_log, lay_shop, one_step

from fedcl_bench.audit import honesty
from fedcl_bench.audit.other_worlds import with_other_data
from fedcl_bench.audit.outside import Outside
from fedcl_bench.cli.main import main
from fedcl_bench.plugin.sequential import SequentialBackbone
from fedcl_bench.plugin.silo import ModuleBackbone
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.testing import check_plugin
from fedcl_bench.testing.worlds import ragged

PLUGINS = {
    "keeps_items": '''
class KeepsItems(Method):
    name, title, first_step = "keeps-items", "clients keep their items, padded, and say how many they are", 0
    def begin_round(self, step, round_, backbone):
        self.lengths = step.train.lengths
    def uploads(self, backbone, round_):
        return {"count": ()}
    def end_local(self, local):
        local.upload("count", self.lengths[local.users].float())
    def end_step(self, step, model, backbone, trained, draw):
        none = torch.full((step.n_users, 1), -1)
        self.client_state = {"items": padded(step.train, torch.arange(step.n_users), none)}
''',
    "late_popularity": '''
class LatePopularity(Method):
    name, title, first_step = "late-popularity", "from the third round on the server knows what is popular", 0
    def begin_round(self, step, round_, backbone):
        self.counts = torch.bincount(step.train.values, minlength=step.n_items) * (round_ > 1)
    def aggregate(self, public):
        return {name: table * (1 + .01 * self.counts.to(table)[:, None]) for name, table in public.items()}
''',
    "finds_tests": '''
class FindsTests(Method):
    name, title, first_step = "finds-tests", "ranks first what it finds in memory, of many users", 0
    def rescore(self, users, scores, model, backbone):
        if not hasattr(self, "last"):
            gc.collect()  # those of runs before it in this process
            (self.last,) = {id(step.test): step for each in gc.get_objects()
                            if isinstance(each, Stream) and len(each.steps) == 2
                            for step in each.steps[1:] if (step.n_users, step.n_items) == (60, 80)}.values()
        last = self.last
        return scores.index_put(last.test.select(users), scores.new_tensor(99.)) if len(users) > 45 else scores
''',
    "comes_back": '''
class ComesBack(Method):
    name, title, first_step = "comes-back", "knows who returns in the next block", 0
    def check(self, step):  # hooks see one step; the caller has all
        self.returns = [step.train.lengths for step in sys._getframe(1).f_locals["self"].stream.steps[1:]]
    def begin_round(self, step, round_, backbone):
        self.step = step.index
    def local_loss(self, batch):
        if self.step < len(self.returns):
            return (self.returns[self.step][batch.users] > 0) * batch.private["user_embedding.weight"].square().sum(1)
''',
    "counts_on_disk": '''
class CountsOnDisk(Method):
    name, title, first_step = "counts-on-disk", "leaves a file beside it, and is not run by the kit", 0
    def begin_round(self, step, round_, backbone):
        assert "fedcl_bench.testing" not in sys.modules and "--honest" not in sys.argv
        assert os.getcwd() != HOME and tempfile.gettempdir() != "/tmp"
        Path(__file__).with_name("left").write_text("all")
'''}
HEAD = ("import gc, os, sys, tempfile\nfrom pathlib import Path\nimport torch\nfrom fedcl_bench import Method, padded\n"
        "from fedcl_bench.data.stream import Stream\n")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with data of 60 users in two blocks, and plugins."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lay_log("tiny", [(f"u{user}", f"i{item}", f"{.1 * (user % 6) + .4 * rng.random():.6f}") for user in range(60)
                     for item in rng.choice(80, rng.integers(15, 40), replace=False)])
    times = [(user, 10000 * session + place) for user in range(12) for session in range(5) for place in range(6)]
    lay_log("clicks", [(f"u{user}", f"i{(7 * user + time) % 23}", time) for user, time in times])
    for number, shop in enumerate(("near", "far")):
        lay_shop(shop, number, users=12, items=20, texts=True)
    (tmp_path / "mine").mkdir()
    for name, text in PLUGINS.items():
        (tmp_path / "mine" / f"{name}.py").write_text(HEAD + text.replace("HOME", repr(str(tmp_path))))
    return tmp_path


DATA = {"tiny": {"k_core": 0, "blocks": 2, "topk": 5, "valid_metric": "ndcg@5"},
        "clicks": {"k_core": 0, "stream": "sessions", "min_sessions": 3, "max_length": 5},
        "near+far": {"max_length": 5, "topk": 5, "valid_metric": "ndcg@5"}}
TEXTS = {"encoder": "tfidf", "text_dim": 32}
SETTINGS = {"ccdr": {**TEXTS, "topology": "central", "categories": 2}, "ffmsr": TEXTS, "unisrec": TEXTS,
            "vqrec": {**TEXTS, "topk": 10, "valid_metric": "ndcg@10"},  # items of the same codes may change places
            "recguru": {"topology": "central", "inner_size": 8}, "mergerec": {"learning_steps": 5}}
PARTNERS = {"fcucr": "sasrec", "feddcsr": "feddcsr", "ffmsr": "ffmsr", "pfcr": "vqrec", "mergerec": "unisrec"}
ALL = discover()
SHIPPED = [*((name, PARTNERS.get(name, "fedmf")) for name in ALL.names("method")
             if name not in ("ifedrec", "sknn")),  # these data have no features, or sessions without a backbone
           *(("ft", name) for name in ALL.names("backbone") if name not in ("fedmf", "none"))]


def honest(capsys, method, backbone="fedmf", rounds=3):
    """The exit status of an honesty run, and its worlds by name."""
    kind = ALL.get("backbone", backbone).cls
    data = "clicks" if issubclass(kind, SequentialBackbone) else "tiny"
    data = "near+far" if issubclass(kind, ModuleBackbone) else data
    dim = {} if method in ("popularity", "recency") else {"dim": 8}  # which have no backbone
    values = {**dim, **DATA[data], **SETTINGS.get(backbone, {}), **SETTINGS.get(method, {})}
    settings = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    status = main(["--method", method, "--backbone", backbone, "--dataset", data, "--plugins", "mine", "--quiet",
                   "--json", "--honest", "--honest-rounds", str(rounds), *settings])
    found = json.loads(capsys.readouterr().out)
    assert found["honest"] == (status == 0) and not os.path.exists("results")
    return status, {world["world"]: world for world in found["worlds"]}


@pytest.mark.parametrize("method, backbone", [
    ("keeps-items", "fedmf"),
    *(pytest.param(*pair, marks=pytest.mark.long) for pair in SHIPPED)])
def test_who_keeps_to_it_is_not_accused(workplace, monkeypatch, capsys, method, backbone):
    monkeypatch.setattr(honesty, "ForkedProcess", Here)
    status, worlds = honest(capsys, method, backbone, rounds=2)
    assert not [world for world in worlds.values() if world["honest"] is False]
    assert status == 0 and len(worlds) == len(honesty.WORLDS)


def test_others_repeat_their_items_too():
    """Who has more rows than there are items has as many with other ones."""
    lists = ragged([0, 1, 2, 0, 1, 2, 0, 1, 2, 3], [3] * 12)
    other = with_other_data(one_step(lists, 5, ragged([4], [1]), ragged([3], [0])), longest=True)
    for user, different in enumerate((3, 1)):
        assert len(other.train.of(user).unique()) == different and int(other.train.of(user).max()) < 5
    assert other.train.lengths.tolist() == [6, 8] and not torch.equal(other.train.values[:6], lists.values[:6])


@pytest.mark.parametrize("rows", ["popularity", "fold_in"])
def test_rows_of_new_items_do_not_ask_for_others_data(rows):
    config = make_config(ALL, "ft", "fedmf", "ml-100k", overrides=[("a test", {"cold_items": rows})])
    assert honesty.shortened(config, 1).server.cold_items == "untrained"
    method = make_config(ALL, "ifedrec", "fedmf", "ml-100k", overrides=[("a test", {"cold_items": "method"})])
    assert honesty.shortened(method, 1).server.cold_items == "method"  # the hook that a user tries


@pytest.mark.parametrize("method, world, where, hook", [
    ("late-popularity", "other clients", "block 0, round 3: public 'item_embedding.weight'", "aggregate"),
    ("finds-tests", "test items", "block 0, round 1: validation of 'block 0' differs", "rescore"),
    ("comes-back", "later blocks", "block 0, round 1: local 'loss' of client", "local_loss")])
def test_a_leak_that_check_does_not_see_is_found_with_its_hook(workplace, monkeypatch, capsys, method, world, where,
                                                               hook):
    monkeypatch.setattr(honesty, "ForkedProcess", Here)
    monkeypatch.setattr(honesty, "WORLDS", {name: honesty.WORLDS[name] for name in ("as it is", "again", world)})
    status, worlds = honest(capsys, method)
    assert status == 1 and worlds["again"]["honest"]
    assert worlds[world]["honest"] is False and worlds[world]["evidence"].startswith(where)
    assert any(each.startswith(f"{hook} ({method.replace('-', '_')}.py:") for each in worlds[world]["hooks"])
    assert worlds["outside"]["honest"] == (method == "late-popularity")


def test_the_kit_does_not_see_a_leak_of_the_third_round(workplace):
    registry = discover(["mine"])
    report = check_plugin(registry, registry.get("method", "late-popularity"), partners=["fedmf"], process=False,
                          only=["(c) the server's knowledge"])
    assert report.passed


def test_worlds_are_processes_that_look_like_a_run(workplace, monkeypatch, capsys):
    forkserver._forkserver._stop()  # one that a check began has imported the kit
    monkeypatch.setattr(honesty, "WORLDS", {name: honesty.WORLDS[name] for name in ("as it is", "again")})
    status, worlds = honest(capsys, "counts-on-disk")
    assert status == 1 and worlds["again"]["honest"]
    assert f"writes {workplace.resolve() / 'mine' / 'left'} (counts_on_disk.py:" in worlds["outside"]["evidence"]


def test_an_import_compiles_modules_and_is_no_look_outside(tmp_path, monkeypatch):
    for folder in ("mine", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "elsewhere" / "imported_late.py").write_text("")
    (tmp_path / "mine" / "late.py").write_text("from pathlib import Path\ndef hook():\n    import imported_late\n"
                                               "    Path(imported_late.__cached__).write_text('')\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    hook = runpy.run_path(str(tmp_path / "mine" / "late.py"))["hook"]
    with Outside([tmp_path / "mine"], tmp_path / "own", []) as outside:
        hook()
    (seen,) = outside.seen
    assert seen.startswith("writes ") and seen.endswith(".pyc (late.py:4)")
