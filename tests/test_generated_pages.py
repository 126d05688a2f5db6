"""Tables that pages take from plugins and records are what tools/make_tables.py makes of these today."""

from __future__ import annotations

import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))
try:
    import make_tables
finally:
    sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize("page", make_tables.pages(), ids=lambda page: page.name)
def test_tables_are_those_of_plugins_and_records(page):
    text = page.read_text(encoding="utf-8")
    assert make_tables.written(text) == text, f"run python tools/make_tables.py {page.relative_to(ROOT)}"


def test_every_kind_of_table_is_on_a_page():
    """No table is made for nobody, and each page with a marker is looked at."""
    text = "".join(page.read_text(encoding="utf-8") for page in make_tables.pages())
    assert {found[2].split()[0] for found in make_tables.BETWEEN.finditer(text)} == set(make_tables.TABLES)
