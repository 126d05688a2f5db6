"""results/domains/tables.md, which docs/domains.md cites, is what its command makes of the committed records."""

from __future__ import annotations

import runpy

from helpers import ROOT

from fedcl_bench.reports import comparison
from fedcl_bench.stats.significance import compare_paired

FOLDER = ROOT / "results/domains"


def test_the_tables_of_domains_are_those_of_the_records(monkeypatch):
    # They show the p of the t-test alone: no bootstrap and no permutations.
    monkeypatch.setattr(comparison, "compare_paired", lambda a, b, draws, unit: compare_paired(a, b, 1, unit=unit))
    made = runpy.run_path(str(FOLDER / "make_tables.py"))["text"]()
    assert (FOLDER / "tables.md").read_text(encoding="utf-8") == made, "run python results/domains/make_tables.py"
