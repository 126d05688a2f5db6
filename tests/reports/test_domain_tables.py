"""results/domains/tables.md, which docs/domains.md cites, is what its command makes of the committed records."""

from __future__ import annotations

import runpy

from helpers import ROOT

FOLDER = ROOT / "results/domains"


def test_the_tables_of_domains_are_those_of_the_records():
    made = runpy.run_path(str(FOLDER / "make_tables.py"))["text"]()
    assert (FOLDER / "tables.md").read_text(encoding="utf-8") == made, "run python results/domains/make_tables.py"
