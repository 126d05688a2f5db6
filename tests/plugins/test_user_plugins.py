"""Methods and a backbone as a user writes them from the pages alone, in ``tests/user_plugins``: they pass ``check`` as
they stand. tests/walk.sh runs them."""

import pytest
import torch
from helpers import ROOT, assert_same, build, federation, finish

from fedcl_bench import Method
from fedcl_bench.plugin.method import NoSettings
from fedcl_bench.testing import assert_passed, check_plugin, discover
from fedcl_bench.testing.worlds import growing_stream

FOLDER = ROOT / "tests/user_plugins"


@pytest.fixture(scope="module")
def mine():
    return discover([FOLDER])


@pytest.mark.long  # what `new-plugin` writes has the same hooks, and quick tests check it: tests/cli/test_new_plugin.py
@pytest.mark.parametrize("kind, name, partner", [
    ("method", "ewc", "fedmf"), ("method", "norm-weighted", "fedmf"), ("backbone", "two-tower", "ft")])
def test_it_passes_check(mine, kind, name, partner):
    assert_passed(check_plugin(mine, mine.get(kind, name), partners=[partner], process=False))


class Nothing(Method):
    """Penalises nothing, as where a method that acts from block 0 on has no past yet."""

    first_step = 0

    def row_penalty(self, name):
        return lambda rows, items: torch.zeros(items.shape)


def test_a_penalty_of_nothing_is_none(registry):
    found, expected = (finish(federation(registry, growing_stream(), method, rounds=2, precision="float64"))
                       for method in (Nothing(NoSettings()), build(registry, "method", "ft")))
    assert_same(found, expected, 1e-9)


def test_a_partner_that_does_not_go_with_it_says_why(mine):
    report = check_plugin(mine, mine.get("method", "norm-weighted"), partners=["recbole:LightGCN"], process=False)
    verdict = report.failures[-1]
    assert "tried recbole:LightGCN" in verdict.evidence and "None" not in verdict.evidence
