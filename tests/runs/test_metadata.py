"""The cache of plugins' metadata: what it holds is what importing the files gives, or it is not used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.runs import registry as registry_module
from fedcl_bench.runs.metadata import Metadata, plugin_files, read_all, refuse_typos
from fedcl_bench.runs.registry import discover

MINE = '''"""Mine."""
from fedcl_bench import Method

class Mine(Method):
    name = "mine"
    title = "an example"
    reimplementation = True
'''
CARD = Metadata("method", "mine", "an example", "", True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The cache's folder, not there yet."""
    monkeypatch.setenv("FEDCL_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
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
    assert main(["list", "--plugins", str(folder)]) == 0
    imported = capsys.readouterr().out
    monkeypatch.setattr(registry_module, "discover", None)
    assert main(["list", "--plugins", str(folder)]) == 0
    assert capsys.readouterr().out == imported and "an example [re-implementation]" in imported


def test_threads_that_discover_at_once_all_find_the_plugin(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(.1)\n" + MINE)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: CARD in discover([tmp_path]).metadata(), range(2)))
    assert found == [True, True] and CARD in read_all([tmp_path])
