"""Plugins: discovery, errors, and that a new method is one file."""

from __future__ import annotations

import ast
import json
import os
from importlib.metadata import version

import pytest

import fedcl_bench
from fedcl_bench.cli.commands.new_plugin import TEMPLATES
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.core.files import shipped
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.metadata import OWN_METRICS, digest, plugin_files, shipped_folders
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.runner import execute
from fedcl_bench.core.settings import assemble, setting

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


def test_shipped_plugins(registry):
    assert registry.names("method") == ["ader", "alone", "canonfedrec", "ccd", "central", "central-joint", "colr",
                                        "f3crec", "fcucr", "fedcia", "feddcsr", "fedprox", "ffmsr", "frozen", "ft",
                                        "ifedrec", "joint", "joint-warm", "kd", "mergerec", "pfcr", "popularity",
                                        "recency", "reg", "rlp2", "scaffold", "sknn", "spp"]
    assert registry.names("backbone") == ["biasmf", "ccdr", "dmi-gnn", "feddae", "feddcsr", "fedmf", "fedncf", "fedrap",
                                          "ffmsr", "gpfedrec", "gru4rec", "hearint", "miasrec", "ncf", "none",
                                          "pfedrec", "recguru", "sasrec", "session-transformer", "tisasrec", "unisrec",
                                          "vqrec"]
    assert registry.names("metric") == ["distance", "hit", "mrr", "ndcg", "novelty", "popularity", "precision",
                                        "recall"]
    assert registry.names("attack") == ["clusterattack", "fedrecattack"]
    assert not registry.broken
    for plugin in registry.plugins.values():
        assert plugin.cls.title and plugin.cls.reference
        assert plugin.path == OWN_METRICS if plugin.kind == "metric" else plugin.path.parent in shipped_folders()


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


def imports(source: str) -> list[tuple[str, str]]:
    """What a plugin takes from the suite: (module, name) pairs."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "fedcl_bench"]
        elif isinstance(node, ast.ImportFrom) and (node.level or node.module.split(".")[0] == "fedcl_bench"):
            found += [("." * node.level + (node.module or ""), alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("path", [*(path for folder in shipped_folders() for path in plugin_files(folder)),
                                  *sorted(set(TEMPLATES.glob("*.py.txt")) - {TEMPLATES / "test.py.txt"})],
                         ids=lambda path: path.name)
def test_plugins_import_the_top_level_alone(path):
    """What plugins are written from comes from the package itself, from its toolbox or from ``rng``."""
    taken = imports(path.read_text().replace("$name", "mine").replace("${cls}", "Mine").replace("$cls", "Mine"))
    assert taken
    for module, name in taken:
        if module == "fedcl_bench":
            assert name in fedcl_bench.__all__ or name == "rng", name
        else:
            assert module.startswith("fedcl_bench.toolbox.") or module == "fedcl_bench.rng", module


def test_the_package_offers_what_plugins_are_written_from():
    from fedcl_bench.core import settings
    from fedcl_bench.plugin import backbone, method, sequential

    assert fedcl_bench.Method is method.Method and fedcl_bench.setting is settings.setting
    assert fedcl_bench.Backbone is backbone.Backbone
    assert fedcl_bench.SequentialBackbone is sequential.SequentialBackbone
    assert set(fedcl_bench.__all__) <= set(dir(fedcl_bench))
    assert all(hasattr(fedcl_bench, name) for name in fedcl_bench.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Methods'"):
        fedcl_bench.Methods  # noqa: B018


def test_a_new_method_is_one_file(tmp_path, monkeypatch, capsys):
    """The file alone makes the method listed, configurable and runnable, and editing it makes a new record."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "shrink.py"
    path.write_text(SHRINK)
    assert main(["list", "--plugins", "mine"]) == 0
    assert "multiply the averaged table" in capsys.readouterr().out
    command = ["--method", "shrink", "--backbone", "fedmf", "--plugins", "mine", "--set", "rounds=1", "--set",
               "k_core=80", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["shrink"] == 0.5
    assert main([*command[:-1], "--set", "shrink=2"]) == 2
    assert "'shrink' (--set): found '2'" in capsys.readouterr().err


def run_of(registry, ml100k, folder, method):
    """A run's hash and numbers."""
    config = make_config(registry, method, "fedmf", "ml-100k", overrides=[("a test", {"rounds": 1})])
    return config.hash, execute(config, lambda: ml100k, folder)["metrics"]


def test_an_edited_plugin_runs_its_new_code_in_the_same_process(tmp_path, ml100k):
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
    runs = [run_of(registry, ml100k, tmp_path / "results", "shrink") for registry in (first, second)]
    assert runs[0][0] != runs[1][0] and runs[0][1] != runs[1][1]
    assert runs[1][1] == run_of(second, ml100k, tmp_path / "results", "ft")[1]  # a factor of 1 is FT
    path.write_text(before)
    assert discover([tmp_path]).get("method", "shrink") == old  # and as it was again


def test_an_edited_module_of_a_package_is_refused_in_the_same_process(tmp_path, monkeypatch):
    (tmp_path / "edited.py").write_text(SHRINK)
    lay_package(tmp_path, "edited", "shrink = edited\n")
    monkeypatch.syspath_prepend(tmp_path)
    discover()
    (tmp_path / "edited.py").write_text(SHRINK.replace("table * self", "table * 2 * self"))
    with pytest.raises(UserError, match="(?s)was edited after this Python process.*Start Python anew"):
        discover()


def test_shipped_plugins_carry_the_version_of_their_numbers(registry):
    """Their own, not that of a class that they are made from; a copy that somebody edits is known by its file."""
    for plugin in registry.plugins.values():
        if plugin.kind != "metric":
            assert plugin.numbers == vars(plugin.cls)["numbers"] and isinstance(plugin.numbers, int)
    assert registry.get("backbone", "recbole:BPR").numbers == f"1 of RecBole {version('recbole')}"
    assert registry.get("metric", "ndcg").numbers is None


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


def test_two_plugins_of_one_name(tmp_path):
    (tmp_path / "mine.py").write_text(SHRINK.replace('"shrink"\n', '"ft"\n'))
    with pytest.raises(UserError, match=r"two method plugins are named 'ft': .*ft.py and .*mine.py"):
        discover([tmp_path]).get("method", "ft")


def test_one_setting_name_cannot_mean_two_things(tmp_path):
    (tmp_path / "mine.py").write_text(SHRINK.replace("shrink: float", "rounds: float"))
    with pytest.raises(UserError, match="'rounds' is declared by both"):
        make_config(discover([tmp_path]), "shrink", "fedmf", "ml-100k")


def test_doctor_and_setup_agree():
    import configparser

    from fedcl_bench.cli.commands.doctor import ACCOUNTANT, RAY
    from fedcl_bench.stats import accounting
    from fedcl_bench.experiments import cluster
    assert (ACCOUNTANT, RAY) == (accounting.ACCOUNTANT, cluster.REQUIREMENT)
    parser = configparser.ConfigParser()
    parser.read(shipped("plugins").parent / "setup.cfg")
    for extra, requirement in (("privacy", ACCOUNTANT), ("ray", RAY)):
        assert requirement in parser["options.extras_require"][extra].splitlines()
        assert requirement in parser["options.extras_require"]["test"].splitlines()


def test_settings_accept_what_they_say():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Some:
        flag: bool = setting(False, "a flag")
        number: float = setting(1.0, "a number")
        text: str = setting("", "a text")
        many: tuple[int, ...] = setting((1,), "numbers", low=1)

    def one(**values):
        return assemble([Some], [("here", values)], "a test")[0]
    assert one(flag="true").flag is True and one(number="1e-3").number == 0.001 and one(number=2).number == 2.0
    assert one(many="3,4").many == (3, 4) and one(many=[5]).many == (5,) and one(many=6).many == (6,)
    for bad in (dict(flag="1"), dict(flag=1), dict(number=True), dict(number="inf"), dict(text=3), dict(many=""),
                dict(many="0")):
        with pytest.raises(UserError):
            one(**bad)


@pytest.mark.parametrize("stream", ["blocks", "static"])
def test_every_combination_has_one_meaning_per_setting(registry, stream):
    from fedcl_bench.runs.config import resolve
    for method in registry.names("method"):
        for backbone in registry.names("backbone"):
            try:
                assert resolve(registry, method, backbone, "ml-100k", [("a test", {"stream": stream})])
            except UserError as error:  # the two go together on no stream
                assert "is for domains of many" in str(error) or "which '" + backbone in str(error)
