"""An executable contract for plugins: is it correct, federated and continual?

``run_bench.py check NAME`` runs it on a plugin; a plugin's own test does the same:

    from fedcl_bench.testing import assert_passed, check_method

    def test_my_method():
        assert_passed(check_method(MyMethod))
"""

from ..runs.registry import discover
from .plugin_checks import check_attack, check_backbone, check_method, check_metric, check_plugin
from .report import Report, Verdict, assert_passed

__all__ = ["Report", "Verdict", "assert_passed", "check_attack", "check_backbone", "check_method", "check_metric",
           "check_plugin", "discover"]
