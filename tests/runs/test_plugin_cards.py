"""What is read from the text of plugin files is what importing them gives, or is left to importing."""

from __future__ import annotations

import pytest

from fedcl_bench.cli.listing import cards_of
from fedcl_bench.cli.main import main
from fedcl_bench.errors import UserError
from fedcl_bench.runs.cards import Card, plugin_files, read_all, read_cards, refuse_typos
from fedcl_bench.runs.registry import discover

MINE = '''"""Mine."""
from fedcl_bench import Method

class Mine(Method):
    name = "mine"
    title = ("an example "
             "in two lines")
    reimplementation = True
'''


def test_shipped_files_read_as_importing_tells(registry):
    def key(card):
        return card.kind, card.name
    assert sorted(read_all(), key=key) == sorted(cards_of(registry), key=key)


def test_any_folder_is_read(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    for name in ("_part.py", "test_mine.py", "conftest.py"):
        (tmp_path / name).write_text("raise ValueError\n")
    assert plugin_files(tmp_path) == [tmp_path / "mine.py"]
    card = Card("method", "mine", "an example in two lines", "", True, tmp_path / "mine.py")
    assert read_cards(tmp_path / "mine.py") == [card]
    assert card in read_all([tmp_path]) and card in cards_of(discover([tmp_path]))


@pytest.mark.parametrize("before,after", [
    ('name = "mine"', 'name = "mi" + str(1)'), ("import Method", "import Method as M\nMethod = M"),
    ("class Mine", "Made = type('Made', (Method,), {'name': 'made', 'title': 'made'})\n\nclass Mine"),
    ("class Mine", "if True:\n    import os\n\nclass Mine"), ("import Method", "import *"),
    ("class Mine", "class Mine("),
    ("class Mine", "def marked(cls):\n    return cls\n\n@marked\nclass Mine"),
    ("from fedcl_bench import Method", "from elsewhere import Method"),
    ("from fedcl_bench import Method", "import fedcl_bench.method\nMethod = fedcl_bench.method.Method"),
    ("(Method)", "(fedcl_bench.method.Method)"), ("    title", "    heading")])
def test_what_the_text_does_not_settle_is_left_to_importing(tmp_path, before, after):
    assert before in MINE
    (tmp_path / "mine.py").write_text(MINE.replace(before, after, 1))
    assert read_cards(tmp_path / "mine.py") is None


def test_a_subclass_of_a_plugin_is_left_to_importing(tmp_path):
    (tmp_path / "mine.py").write_text(MINE + '\n\nclass Again(Mine):\n    name = "again"\n    title = "again"\n')
    assert read_cards(tmp_path / "mine.py") is None and read_all([tmp_path]) is None


def test_typos_are_answered_and_all_else_goes_on(tmp_path):
    refuse_typos("mine", "fedmf", [tmp_path / "absent"])  # the registry says that the folder is absent
    with pytest.raises(UserError, match="unknown method 'mine'"):
        refuse_typos("mine", "fedmf", [tmp_path])
    (tmp_path / "mine.py").write_text(MINE)
    for method, backbone in (("mine", "fedmf"), ("ft", "recbole:BPR"), ("pfedrec", None), ("FT", "FedMF")):
        refuse_typos(method, backbone, [tmp_path])
    (tmp_path / "made.py").write_text("from elsewhere import *\n")
    refuse_typos("anything", None, [tmp_path])  # only importing tells which names there are
    for method, backbone, words in (("f3cre", None, "Did you mean 'f3crec'"), ("ft", None, "--backbone is missing"),
                                    (None, "fedmf", "--method is missing"), ("ft", "fedfm", "Did you mean 'fedmf'")):
        with pytest.raises(UserError, match=words):
            refuse_typos(method, backbone)


def test_a_listing_is_the_same_from_texts_and_from_classes(tmp_path, capsys):
    assert main(["list"]) == 0
    read = capsys.readouterr().out
    assert main(["list", "--plugins", str(tmp_path)]) == 0
    assert capsys.readouterr().out == read
