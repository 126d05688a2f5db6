"""Methods and a backbone as a user writes them from the pages alone, in ``tests/user_plugins``: they pass ``check`` as
they stand. tests/walk.sh runs them."""

import fedcl_bench as fb
import pytest
from helpers import ROOT

from fedcl_bench.testing import assert_passed, check_plugin, discover

FOLDER = ROOT / "tests/user_plugins"
SMALL = {"k_core": 80, "rounds": 2, "blocks": 2}


@pytest.fixture(scope="module")
def mine():
    return discover([FOLDER])


@pytest.mark.long  # what `new-plugin` writes has the same hooks, and quick tests check it: tests/cli/test_new_plugin.py
@pytest.mark.parametrize("kind, name, partner", [
    ("method", "ewc", "fedmf"), ("method", "norm-weighted", "fedmf"), ("backbone", "two-tower", "ft")])
def test_it_passes_check(mine, kind, name, partner):
    assert_passed(check_plugin(mine, mine.get(kind, name), partners=[partner], process=False))


def test_a_penalty_of_nothing_is_none(tmp_path):
    """As where a method that acts from block 0 on has no past yet."""
    (tmp_path / "nothing.py").write_text('''
import torch
from fedcl_bench import Method


class Nothing(Method):
    name, title, first_step = "nothing", "penalises nothing", 0

    def row_penalty(self, name):
        return lambda rows, items: torch.zeros(items.shape)
''')
    def scores(method, **where):
        where |= {"results": tmp_path / "results", "progress": False, "precision": "float64"}
        return list(fb.run(method, "fedmf", **SMALL, **where).metrics["mean"])
    assert scores("nothing", plugins=tmp_path) == pytest.approx(scores("ft"), abs=1e-9)


def test_a_partner_that_does_not_go_with_it_says_why(mine):
    report = check_plugin(mine, mine.get("method", "norm-weighted"), partners=["recbole:LightGCN"], process=False)
    verdict = report.failures[-1]
    assert "tried recbole:LightGCN" in verdict.evidence and "None" not in verdict.evidence
