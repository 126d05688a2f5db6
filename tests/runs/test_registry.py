"""Plugins: discovery, errors, and that a new method is one file. One that is broken is listed with its file and line,
and whatever it does, the others work. The cache of their metadata is what importing gives, or is not used."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest
import torch
from helpers import executed, refused, output_of

import fedcl_bench as fb
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import RunFailed, UserError
from fedcl_bench.core.settings import assemble, setting
from fedcl_bench.runs import registry as registry_module
from fedcl_bench.runs.config import make_config, resolve
from fedcl_bench.runs.metadata import (digest, Metadata, OWN_METRICS, plugin_files, read_all, refuse_typos,
                                       shipped_folders)
from fedcl_bench.runs.registry import discover, numbers_of

SHRINK = '''"""Shrink: an example method in one file."""
from dataclasses import dataclass

from fedcl_bench.plugin.method import Method
from fedcl_bench.core.settings import setting


@dataclass(frozen=True)
class ShrinkSettings:
    shrink: float = setting(0.5, "factor on the averaged table", above=0.0, high=1.0)


class Shrink(Method):
    name = "shrink"
    title = "multiply the averaged table by a factor"
    Settings = ShrinkSettings

    def aggregate(self, public):
        return {name: table * self.settings.shrink for name, table in public.items()}
'''


def test_shipped_plugins_and_the_version_of_their_numbers(registry):
    """It is their own, not that of a class that they are made from; a copy that somebody edits is known by its file."""
    assert not registry.broken
    for plugin in registry.plugins.values():
        assert plugin.cls.title and plugin.cls.reference
        assert plugin.path == OWN_METRICS if plugin.kind == "metric" else plugin.path.parent in shipped_folders()
    for plugin in registry.plugins.values():
        if plugin.kind != "metric":
            assert plugin.numbers == vars(plugin.cls)["numbers"] and isinstance(plugin.numbers, int)
    mine, beside = type("Mine", (registry.get("method", "ft").cls,), {}), shipped_folders()[0] / "mine.py"
    assert numbers_of(mine, beside, b"content") == digest(b"content")  # one's own, in a clone
    assert registry.get("backbone", "recbole:BPR").numbers == f"1 of RecBole {version('recbole')}"
    assert registry.get("metric", "ndcg").numbers is None


def lay_package(folder, name, entry_points):
    """What tells Python of an installed package with these entry points."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[fedcl_bench.plugins]\n{entry_points}")


def test_entry_points_of_an_installed_package(tmp_path, monkeypatch):
    """One names a module, one a class, one what cannot be imported and one what is not there."""
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme/__init__.py").write_text("")
    (tmp_path / "acme/shrink.py").write_text(SHRINK)
    (tmp_path / "acme/again.py").write_text(SHRINK.replace("shrink", "again").replace("Shrink", "Again"))
    (tmp_path / "acme/broken.py").write_text("import nothing_of_this_name\n")
    lay_package(tmp_path, "acme", "shrink = acme.shrink\nagain = acme.again:Again\nbroken = acme.broken\n"
                                  "gone = acme.not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = discover()
    assert {"shrink", "again", "f3crec"} <= set(registry.names("method"))
    assert registry.get("method", "shrink").path == tmp_path / "acme/shrink.py"
    assert registry.broken == {
        "broken": "entry point acme.broken: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        "gone": "entry point acme.not_there: ModuleNotFoundError: No module named 'acme.not_there'"}


def test_the_package_offers_what_plugins_are_written_from():
    assert set(fb.__all__) <= set(dir(fb)) and all(hasattr(fb, name) for name in fb.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Methods'"):
        fb.Methods


def test_a_new_method_is_one_file(tmp_path, monkeypatch, capsys):
    """The file alone makes the method listed, configurable and runnable, and editing it makes a new record."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "shrink.py"
    path.write_text(SHRINK)
    assert "multiply the averaged table" in output_of(capsys, "list", "--plugins", "mine")
    command = ["--method", "shrink", "--backbone", "fedmf", "--plugins", "mine", "--set", "rounds=1", "--set",
               "k_core=80", "--json"]
    assert json.loads(output_of(capsys, *command))["settings"]["shrink"] == 0.5
    assert "'shrink' (--set): found '2'" in refused(capsys, *command[:-1], "--set", "shrink=2")


def run_of(registry, folder, method):
    """A run's hash and numbers."""
    config = make_config(registry, method, "fedmf", "ml-100k", overrides=[("a test", {"rounds": 1, "k_core": 80})])
    return config.hash, executed(config, folder)["metrics"]


def test_an_edited_plugin_runs_its_new_code_in_the_same_process(tmp_path):
    """Also if it is edited within a second to the same length, which Python's own cache of compiled code overlooks."""
    path, before = tmp_path / "shrink.py", SHRINK.replace("* self.settings.shrink", "* 0.5")
    path.write_text(before)
    first = discover([tmp_path])
    stamp = path.stat().st_mtime
    edited = before.replace("* 0.5", "* 1.0")
    path.write_text(edited)
    os.utime(path, (stamp, stamp))
    second = discover([tmp_path])
    old, new = (registry.get("method", "shrink") for registry in (first, second))
    assert old.numbers != new.numbers == digest(path.read_bytes()) and old.cls is not new.cls
    runs = [run_of(registry, tmp_path / "results", "shrink") for registry in (first, second)]
    assert runs[0][0] != runs[1][0] and runs[0][1] != runs[1][1]
    assert runs[1][1] == run_of(second, tmp_path / "results", "ft")[1]  # a factor of 1 is FT
    path.write_text(before)
    assert discover([tmp_path]).get("method", "shrink") == old  # and as it was again


def test_helpers_beside_a_plugin_are_part_of_its_code(tmp_path, cache):
    """As are those that they import; an edit of one is seen at once, here and by the cache."""
    helped = SHRINK.replace("from dataclasses", "from . import _other\nfrom ._shared import times\nfrom dataclasses")
    path = tmp_path / "shrink.py"
    path.write_text(helped.replace("table * self.settings.shrink", "_other.ONE * times(table, self.settings.shrink)"))
    (tmp_path / "_shared.py").write_text("from ._other import ONE\n\n\ndef times(a, b):\n    return ONE * a * b\n")
    (tmp_path / "_other.py").write_text("ONE = 1.0\n")
    (tmp_path / "_unused.py").write_text("raise ValueError\n")
    first = discover([tmp_path])
    plugin = first.get("method", "shrink")
    assert {file.name for file in plugin.helpers} == {"_shared.py", "_other.py"} and not first.broken
    assert read_all([tmp_path])
    stamp = (tmp_path / "_other.py").stat().st_mtime
    (tmp_path / "_other.py").write_text("ONE = 2.0\n")
    os.utime(tmp_path / "_other.py", (stamp, stamp))
    assert read_all([tmp_path]) is None
    second = discover([tmp_path])
    assert plugin.numbers != second.get("method", "shrink").numbers
    runs = [run_of(registry, tmp_path / "results", "shrink") for registry in (first, second)]
    assert runs[0][0] != runs[1][0] and runs[0][1] != runs[1][1]
    (tmp_path / "_other.py").write_text("ONE = 1.0\nONE +\n")
    assert f"SyntaxError: invalid syntax ({tmp_path / '_other.py'}, line 2)" in discover([tmp_path]).broken["shrink"]


@pytest.mark.parametrize("line, says", [
    ("from .shrink import Shrink", "imports .shrink, accepted: files beside it whose names begin with _"),
    ("from ._absent import x", "imports ._absent, accepted"),
    ("from .._shared import x", "imports .._shared, accepted"),
    ("from _shared import x", "No module named '_shared'; a file beside it begins with _ and is imported as from")])
def test_how_plugins_share_code_is_said(tmp_path, cache, line, says):
    (tmp_path / "_shared.py").write_text("x = 1\n")
    (tmp_path / "shrink.py").write_text(SHRINK)
    (tmp_path / "other.py").write_text(f"{line}\n")
    assert says in discover([tmp_path]).broken["other"]


@pytest.mark.parametrize("module, edited", [("edited", "edited.py"), ("whole.shrink", "whole/shrink.py"),
                                            ("parted.shrink", "parted/helpers/factor.py")])
def test_an_edited_module_of_a_package_is_refused_in_the_same_process(tmp_path, monkeypatch, module, edited):
    """What its plugin imports is code of the plugin, too, and stands in hashes."""
    path = tmp_path / f"{module.replace('.', '/')}.py"
    for file in (path, tmp_path / edited):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("FACTOR = 1\n")
    path.write_text(SHRINK)
    lay_package(tmp_path, module.partition(".")[0], f"shrink = {module}\n")
    monkeypatch.syspath_prepend(tmp_path)
    numbers = discover().get("method", "shrink").numbers
    assert (numbers == digest(SHRINK.encode())) == (path == tmp_path / edited)
    (tmp_path / edited).write_text(SHRINK.replace("table * self", "table * 2 * self"))
    with pytest.raises(UserError, match="(?s)was edited after this Python process.*Start Python anew"):
        discover()


@pytest.mark.parametrize("alone", [True, False])
def test_a_file_is_imported_when_one_of_its_names_is_asked_for(tmp_path, alone):
    """Whatever the name's case, and however the file writes it, also in one line with others; all files are for a
    list."""
    written = 'name = "shrink"' if alone else 'name, title = "shrink", "in one line"'
    (tmp_path / "shrink.py").write_text(SHRINK.replace('name = "shrink"', written))
    (tmp_path / "other.py").write_text("raise ValueError('imported')\n")
    registry = discover([tmp_path])
    assert registry.pair("SHRINK", "fedmf") == ("shrink", "fedmf")
    assert {path.stem for path in registry.waiting} >= {"other", "f3crec", "sasrec"} and not registry.failed
    assert "imported" in registry.broken["other"] and not registry.waiting
    (tmp_path / "shrink.py").write_text(SHRINK.replace('name = "shrink"', 'name = "".join(("shr", "unk"))'))
    assert discover([tmp_path]).get("method", "shrunk").cls.__name__ == "Shrink"


def test_one_name_cannot_mean_two_things(tmp_path):
    """Neither of plugins nor of settings."""
    (tmp_path / "mine.py").write_text(SHRINK.replace('"shrink"\n', '"ft"\n'))
    with pytest.raises(UserError, match=r"two method plugins are named 'ft': .*ft.py and .*mine.py"):
        discover([tmp_path]).pair("ft", "fedmf")  # which asks several times
    (tmp_path / "mine.py").write_text(SHRINK.replace("shrink: float", "rounds: float"))
    with pytest.raises(UserError, match="'rounds' is declared by both"):
        make_config(discover([tmp_path]), "shrink", "fedmf", "ml-100k")


def test_settings_accept_what_they_say():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Some:
        flag: bool = setting(False, "a flag")
        number: float = setting(1.0, "a number")
        text: str = setting("", "a text")
        many: tuple[int, ...] = setting((1,), "numbers", low=1)
        names: tuple[str, ...] = setting((), "names")

    def one(**values):
        return assemble([Some], [("here", values)], "a test")[0]
    assert one(flag="true").flag is True and one(number="1e-3").number == 0.001 and one(number=2).number == 2.0
    assert one(many="3, 4").many == (3, 4) and one(many=[5]).many == (5,) and one(many=6).many == (6,)
    assert one(names="a, b").names == ("a", "b") and one(names="none").names == ()
    for bad in (dict(flag="1"), dict(flag=1), dict(number=True), dict(number="inf"), dict(text=3), dict(many=""),
                dict(many="0")):
        with pytest.raises(UserError):
            one(**bad)


def test_every_combination_has_one_meaning_per_setting(registry):
    """On blocks; in the static stream every plugin beside one of the other kind."""
    methods, backbones = registry.names("method"), registry.names("backbone")
    combinations = [(method, backbone, "blocks") for method in methods for backbone in backbones]
    combinations += [(method, "fedmf", "static") for method in methods]
    combinations += [("ft", backbone, "static") for backbone in backbones]
    for method, backbone, stream in combinations:
        try:
            assert resolve(registry, method, backbone, "ml-100k", [("a test", {"stream": stream})])
        except UserError as error:  # the two go together on no stream
            assert "is for domains of many" in str(error) or "which '" + backbone in str(error) or backbone == "none"


GOOD = '''
from fedcl_bench.plugin.method import Method

class Good(Method):
    name = "good"
    title = "does nothing"
'''
HOOK = GOOD.replace('"good"', '"mine"') + """    first_step = 0

    def check(self, step):
        deeper()

def deeper():
    {}
"""
JOB = ["run", "--method", "mine", "--backbone", "fedmf", "--set", "rounds=1", "--set", "k_core=80", "--quiet"]


def named(name: str) -> str:
    """A method of this name, written as Python code."""
    return GOOD.replace('"good"', name)


# What a file holds, and what is said of it.
BROKEN = {
    "latin": (GOOD.replace("does nothing", "na\xefve").encode("latin-1"), "line 6: SyntaxError"),
    "no_text": (named("3"), "line 4: method Good: its name is 3"),
    "slash": (named("'../x'"), "line 4: method Good: its name is '../x'"),
    "long": (named("'x' * 5000"), "(5000 characters)"),
    "escape": (named("'a\\x1b[2J'"), "its name is 'a\\x1b[2J'"),
    "untitled": (GOOD.replace('title = "does nothing"', "pass"), "line 4: method Good: its title is missing"),
    "leaves": ("import sys\nsys.exit(0)\n", "line 2: SystemExit"),
    "syntax": ("x = 1\ndef f(:\n", "line 2: SyntaxError"),
    "nul": ("x = 1\0\n", "nul.py"),
    "imports": ("\n\nimport nothing_of_this_name\n", "line 3: ModuleNotFoundError"),
    "double": (GOOD + "import torch\nprint('printed')\ntorch.set_default_dtype(torch.float64)\n",
               "changes torch's default dtype, on which"),
    "fails": ("import torch\ntorch.set_default_dtype(torch.float64)\n1 / 0\n", "line 3: ZeroDivisionError"),
    "signature": (GOOD + "    def end_step(self, step, model, backbone):\n        pass\n",
                  "line 4: method Good: its end_step takes self, step, model, backbone; accepted: self, step, model, "
                  "backbone, trained, draw"),
    "settings": (GOOD + "    from dataclasses import make_dataclass\n"
                        "    Settings = make_dataclass('S', [('a', int, 3)])\n",
                 "its Settings cannot be read (PluginError: 'a' is not declared with setting(default, help))"),
    "list": ("from dataclasses import dataclass\nfrom fedcl_bench import setting\n\n\n@dataclass(frozen=True)\n"
             "class Settings:\n    sizes: tuple[int, ...] = setting([8], 'of layers')\n",
             "line 7: setting: found the default [8], accepted: a number, true or false, a text, or a tuple")}


def write(folder, name, content):
    (folder / f"{name}.py").write_bytes(content if isinstance(content, bytes) else content.encode())


def test_broken_plugins_are_listed_and_fail_only_when_chosen(tmp_path, capsys):
    for name, (content, _) in BROKEN.items():
        write(tmp_path, name, content)
    write(tmp_path, "good", GOOD)
    registry = discover([tmp_path])
    assert registry.get("method", "good").name == "good" and registry.get("method", "ft")
    assert registry.broken.keys() == BROKEN.keys()
    for name, (_, says) in BROKEN.items():
        assert says in registry.broken[name] and f"{tmp_path / name}.py" in registry.broken[name]
        assert len(registry.broken[name]) < 400 and "\n" not in registry.broken[name]
    shown = output_of(capsys, "list", "--plugins", tmp_path)
    assert "does nothing" in shown and all(says in shown for _, says in BROKEN.values())
    assert "\x1b" not in shown and "printed" not in shown
    assert torch.get_default_dtype() is torch.float32
    with pytest.raises(UserError, match="imports.py, line 3: ModuleNotFoundError.*nothing_of_this_name"):
        registry.get("method", "imports")
    assert main(["doctor", "--plugins", str(tmp_path), "--results", str(tmp_path)]) == 1
    assert "FIX" in capsys.readouterr().out


@pytest.mark.parametrize("does, says", [
    ("return 1 / 0", "ZeroDivisionError: division by zero"), ("raise SystemExit(0)", "SystemExit"),
    ("open('no such file')", "FileNotFoundError"),
    ("raise RuntimeError('\\x1b[2J\\nb' * 500)", r"RuntimeError: \\x1b")])
def test_an_error_of_a_hook_names_plugin_hook_and_line(tmp_path, capsys, does, says):
    other = "from fedcl_bench import Metric; Other = type('Other', (Metric,), {'name': 'other', 'title': 'other'})"
    write(tmp_path, "mine", other + HOOK.format(does))
    assert main([*JOB, "--plugins", str(tmp_path), "--results", str(tmp_path / "results")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert re.match(f"run_bench.py: method 'mine': check raised {says}", lines[0]) and len(lines) == 3
    assert f"{tmp_path}/mine.py, line 10, in check: deeper()" in lines[1]
    assert f"{tmp_path}/mine.py, line 13, in deeper: " in lines[2]


def test_grids_and_python_say_the_same_of_a_hook(tmp_path, capsys, same_process):
    write(tmp_path, "mine", HOOK.format("return 1 / 0"))
    assert main(["grid", "--methods", "mine", "--backbones", "fedmf", "--set", "rounds=1", "--set", "k_core=80",
                 "--plugins", str(tmp_path), "--results", str(tmp_path / "results")]) == 1
    out = capsys.readouterr().out
    assert "method 'mine': check raised ZeroDivisionError" in out and "mine.py, line 13, in deeper: return 1 / 0" in out
    with pytest.raises(RunFailed, match="method 'mine': check raised ZeroDivisionError") as caught:
        fb.run("mine", "fedmf", plugins=tmp_path, results=tmp_path / "results", progress=False, rounds=1, k_core=80)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


MINE = '''"""Mine."""
from fedcl_bench import Method

class Mine(Method):
    name = "mine"
    title = "an example"
    reimplementation = True
'''
CARD = Metadata("method", "mine", "an example", "", True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache's folder, not there yet."""
    monkeypatch.setenv("FEDCL_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path, cache):
    """A folder with a plugin, and with files that are none."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/mine.py").write_text(MINE)
    for name in ("_part.py", "test_mine.py", "conftest.py"):
        (tmp_path / "mine" / name).write_text("raise ValueError\n")
    return tmp_path / "mine"


def test_the_cache_is_what_importing_gave_as_long_as_the_files_stay(folder):
    assert plugin_files(folder) == [folder / "mine.py"] and read_all([folder]) is None
    assert CARD in discover([folder]).metadata()
    cached = read_all([folder])
    assert CARD in cached and sorted(map(repr, cached)) == sorted(map(repr, discover([folder]).metadata()))
    assert CARD not in read_all()
    (folder / "mine.py").write_text(MINE.replace("an example", "an EXAMPLE"))
    assert read_all([folder]) is None and {"ft", "f3crec"} <= {plugin.name for plugin in read_all()}
    (folder / "mine.py").write_text(MINE)
    (folder / "wrong.py").write_text("import nothing_of_this_name\n")
    assert "wrong" in discover([folder]).broken and read_all([folder]) is None  # its error may be gone next time


def test_a_cache_that_cannot_be_used_is_none(folder, cache):
    cache.write_text("a file in the place of the folder")
    assert CARD in discover([folder]).metadata() and read_all([folder]) is None
    cache.unlink()
    assert discover([folder]).plugins
    for damaged in ("{", "[]", "[" * 100_000, (cache / "plugins.json").read_text().replace('"title"', '"heading"')):
        (cache / "plugins.json").write_text(damaged)
        assert read_all([folder]) is None
        assert discover([folder]).plugins and CARD in read_all([folder])


def test_two_plugins_of_one_name_are_left_to_the_registry(folder, tmp_path):
    (tmp_path / "second").mkdir()
    (tmp_path / "second/mine.py").write_text(MINE)
    assert discover([folder]).plugins and discover([tmp_path / "second"]).plugins
    assert read_all([folder, tmp_path / "second"]) is None


def test_typos_are_answered_and_all_else_goes_on(folder, tmp_path):
    refuse_typos("mine", "fedmf", [folder])  # not cached
    assert discover([folder]).plugins  # imported, and cached
    for method, backbone in (("mine", "fedmf"), ("ft", "recbole:BPR"), ("pfedrec", None), ("FT", "FedMF")):
        refuse_typos(method, backbone, [folder])
    refuse_typos("mine", "fedmf", [tmp_path / "absent"])  # the registry says that the folder is absent
    for method, backbone, words in (("mine", "fedmf", "unknown method 'mine'"), (None, "fedmf", "--method is missing"),
                                    ("f3cre", None, "Did you mean 'f3crec'"),
                                    ("ft", "fedfm", "Did you mean 'fedmf'")):
        with pytest.raises(UserError, match=words):
            refuse_typos(method, backbone)


def test_a_listing_is_the_same_from_the_cache_and_from_classes(folder, capsys, monkeypatch):
    imported = output_of(capsys, "list", "--plugins", folder)
    monkeypatch.setattr(registry_module, "discover", None)
    assert output_of(capsys, "list", "--plugins", folder) == imported and "an example [re-implementation]" in imported


def test_threads_that_discover_at_once_all_find_the_plugin(tmp_path, cache):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(.1)\n" + MINE)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: CARD in discover([tmp_path]).metadata(), range(2)))
    assert found == [True, True] and CARD in read_all([tmp_path])
