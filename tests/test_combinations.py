"""Every method on every backbone of item lists: runs through all blocks, goes on from a checkpoint to the same numbers.

Sequential backbones and the methods that need one run on sessions: tests/test_session_runs.py.
"""

from dataclasses import replace
from itertools import product

import pytest
from helpers import SMALL, STABLE, assert_same

from fedcl_bench import DomainMethod, Method, ModuleBackbone, SequentialBackbone, UserError
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.evaluation import beyond_accuracy
from fedcl_bench.federation.loop import run
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.checkpoints import load_progress, save_progress
from fedcl_bench.runs.registry import discover

NAMES = discover()
BLOCKS = {**SMALL, "blocks": 3}
FEWER = {"fedcia": {"align_steps": 3}}  # each step multiplies items x items numbers of every client
BACKBONES = [name for name in NAMES.names("backbone") if name != "none"
             and not issubclass(NAMES.get("backbone", name).cls, (SequentialBackbone, ModuleBackbone))]
METHODS = [name for name in NAMES.names("method") if not NAMES.get("method", name).cls.needs_sequential
           and not issubclass(NAMES.get("method", name).cls, DomainMethod)
           and NAMES.get("method", name).cls.trains == "clients"  # others: tests/federation/test_bounds.py
           and NAMES.get("method", name).cls.aggregate_updates is Method.aggregate_updates]  # test_client_updates.py
# Backbones that a method refuses: clients train all rows, or keep tables; items are compared by inner products alone.
REFUSED = {"alone": ("feddae", "fedrap", "gpfedrec"), "colr": ("gpfedrec",),
           "scaffold": ("biasmf", "feddae", "gpfedrec", "ncf"),  # by their Adam; as colr
           "fedcia": ("biasmf", "feddae", "fedncf", "fedrap", "gpfedrec", "ncf")}


@pytest.fixture(scope="module")
def stream():
    config = make_config(NAMES, "ifedrec", "fedmf", "ml-100k", overrides=[("test", BLOCKS)])
    return load_stream(config.source, config.stream, config.features)


def test_what_fits_blocks_is_all_that_needs_neither_sessions_nor_domains():
    others = set(NAMES.names("backbone")) - set(BACKBONES)
    assert others == {"none", "dmi-gnn", "gru4rec", "hearint", "miasrec", "sasrec", "session-transformer",
                      "tisasrec",  # sessions
                      "ccdr", "feddcsr", "ffmsr", "recguru", "unisrec", "vqrec"}  # domains
    assert set(NAMES.names("method")) - set(METHODS) == {
        "canonfedrec", "fcucr", "feddcsr", "ffmsr", "mergerec", "pfcr", "ccd", "central", "central-joint", "frozen",
        "popularity", "recency", "sknn"}


def test_what_does_not_go_together_is_known_without_the_data(registry, stream):
    """As the checks before a run find it, of every method on backbones of all kinds."""
    refused = set()
    for method, backbone in product(NAMES.names("method"), ("fedmf", "fedncf", "gpfedrec", "sasrec")):
        if issubclass(NAMES.get("method", method).cls, DomainMethod):
            continue
        config = make_config(registry, method, backbone, "ml-100k", overrides=[("test", {"k_core": 80})])
        of_run = replace(stream, item_features=stream.item_features if config.features else None)
        try:
            config.check(config.federation(of_run))
            assert not config.misfit, (method, backbone)
        except UserError as error:
            assert config.misfit == str(error).partition("\nBackbones that fit")[0].partition("\nMethods that fit")[0]
            refused.add((method, backbone))
    assert {("alone", "gpfedrec"), ("fedcia", "fedncf"), ("ft", "sasrec"), ("fcucr", "fedmf")} < refused


# Of each method all pairs but one go to the long tests; each backbone is in the others too.
FIT = [(method, [name for name in BACKBONES if name not in REFUSED.get(method, ())]) for method in METHODS]


@pytest.mark.parametrize("method, backbone", [
    pytest.param(method, backbone, marks=[pytest.mark.long] * (j != i % len(fit)))
    for i, (method, fit) in enumerate(FIT) for j, backbone in enumerate(fit)])
def test_runs_through_all_blocks_and_resumes(registry, stream, tmp_path, method, backbone):
    def federation():
        return make_config(registry, method, backbone, "ml-100k",
                           overrides=[("test", {**BLOCKS, **STABLE.get(backbone, {}), **FEWER.get(method, {})})]
                           ).federation(stream)
    f = federation()
    f.check()
    points = list(run(f))
    last = points[-1]
    assert last.step == len(stream.steps) == 3
    assert {(t, s) for t, s, _ in last.tests} == {(t, s) for t in range(3) for s in range(t + 1)}
    assert all(0.0 <= scores.mean("ndcg@20") <= 1.0 for _, _, scores in last.tests)
    kinds = {(t, kind) for t, kind, _, _ in last.analysis}
    assert kinds == {(t, kind) for t in (1, 2) for kind in ("user_shift", "item_phi", "item_rank_change")} | {
        (t, kind) for t in range(3) for kind in (*beyond_accuracy.OF_BLOCKS, beyond_accuracy.RECOMMENDED)}
    middle = next(p for p in points if p.step == 2 and p.round == 1 and not p.trained)
    save_progress(tmp_path / "checkpoint.pt", middle, 1.0)
    restored, _ = load_progress(tmp_path / "checkpoint.pt", "cpu", f)
    *_, again = run(federation(), restored)
    for point in points[::3]:  # what is checked of a file holds at the start, within and at the end of blocks
        save_progress(tmp_path / "checkpoint.pt", point, 1.0)
        assert load_progress(tmp_path / "checkpoint.pt", "cpu", f)[0].round == point.round
    assert_same(again, last)
