"""What checkpoints must hold: every one that a run writes is gone on from, and none that it cannot have written."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from fedcl_bench.data.datasets import build_stream
from fedcl_bench.errors import Corrupt, HookFailed
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Progress, Within
from fedcl_bench.runs import resumable
from fedcl_bench.runs.checkpoints import load_progress, save_progress
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.faults import named
from fedcl_bench.runs.frames import COLUMNS
from fedcl_bench.runs.runner import Watch, execute
from fedcl_bench.sizes import SIZES

BLOCKS = {"k_core": 80, "blocks": 3, "rounds": 3}
SESSIONS = {"stream": "sessions", "min_session_length": 5, "min_sessions": 8, "rounds": 2, "max_length": 5, "dim": 8}
RUNS = {
    "blocks": ("f3crec", "fedmf", BLOCKS),
    "seldom validated": ("kd", "fedmf", {**BLOCKS, "evaluate_every": 2, "best_round": "latest", "valid_decimals": 1}),
    "clients fail": ("ft", "fedmf", {**BLOCKS, "client_dropout": 0.3, "patience": 1, "lr": 1e-6}),
    "folded in": ("ft", "fedmf", {**BLOCKS, "fold_in": 3, "init_from": "best"}),
    "static": ("ft", "fedmf", {"stream": "static", "k_core": 80, "rounds": 2, "candidates": "sampled"}),
    "sessions": ("fcucr", "sasrec", {**SESSIONS, "early_session": True}),
    "last round": ("ft", "sasrec", {**SESSIONS, "evaluate_every": 2, "tested_round": "last", "candidates": "sampled",
                                    "extra_metrics": ["novelty"]}),
    "one client": ("ft", "sasrec", {**SESSIONS, "topology": "central", "evaluate_every": 2}),
    "one client, SGD": ("ft", "sasrec", {**SESSIONS, "topology": "central", "optimiser": "sgd", "rounds": 1})}


@pytest.fixture(scope="module")
def made(registry):
    """A function: the parts of one of the runs, with a stream that is built once."""
    streams = {}

    def make(name):
        method, backbone, settings = RUNS[name]
        config = make_config(registry, method, backbone, "ml-100k", 0, [("test", settings)])
        if name not in streams:
            streams[name] = build_stream(config.source, config.stream)
        return config.federation(streams[name])
    return make


@pytest.fixture
def taken(tmp_path):
    """A function: what is read of a progress that was saved."""
    def take(progress, federation):
        save_progress(tmp_path / "kept.pt", progress, 1.0)
        return load_progress(tmp_path / "kept.pt", "cpu", federation)
    return take


def test_every_field_has_its_check():
    assert resumable.FIELDS.keys() == {f.name for f in fields(Progress)} - {"under_way"}
    assert resumable._COLUMNS.keys() == COLUMNS["rounds"].keys()


@pytest.mark.parametrize("name", RUNS)
def test_runs_go_on_from_whatever_they_write(made, taken, monkeypatch, name):
    monkeypatch.setattr(SIZES, "told_every", 0.05)
    f = made(name)
    for progress in run(f):
        other = made(name)
        assert taken(progress, other)[0].round == progress.round
        assert not other.method.client_state and not other.method.server_state


def changed_row(**values):
    return lambda p: {"curve": (*p.curve[:-1], {**p.curve[-1], **values})}


def changed_test(change):
    return lambda p: {"tests": ((*p.tests[0][:2], change(p.tests[0][2])), *p.tests[1:])}


def changed_analysis(kind, change):
    return lambda p: {"analysis": tuple((*row[:2], *change(*row[2:])) if row[1] == kind else row for row in p.analysis)}


def changed_table(change):
    return lambda p: {"model": replace(p.model, public={name: change(rows) for name, rows in p.model.public.items()})}


@pytest.mark.parametrize("change, field", [
    (lambda p: {"step": 4}, "step"), (lambda p: {"round": 0}, "curve"), (lambda p: {"round": 3}, "curve"),
    (lambda p: {"trained": True}, "trained"), (lambda p: {"best_value": 0.9}, "best_value"),
    (lambda p: {"best_value": math.nan}, "best_value"), (lambda p: {"stale": 7}, "stale"),
    (lambda p: {"curve": p.curve[1:]}, "curve"), (lambda p: {"curve": p.curve[::-1]}, "curve"),
    (lambda p: {"curve": (*p.curve, p.curve[-1])}, "curve"), (changed_row(step=9), r"curve\[4\].step"),
    (changed_row(valid=math.nan), r"curve\[4\].valid"), (changed_row(valid=1.5), r"curve\[4\].valid"),
    (changed_row(participants=10 ** 6), r"curve\[4\].participants"), (changed_row(dropped=1), r"curve\[4\].dropped"),
    (changed_table(lambda rows: rows * math.inf), "model.public"),
    (changed_table(lambda rows: rows[:-1]), "model.public"),
    (lambda p: {"model": replace(p.model, private={**p.model.private, "another": torch.zeros(len(p.ways))})},
     "model.private.another"),
    (lambda p: {"model": replace(p.model, start=dict(p.model.private))}, "model.start"),
    (lambda p: {"best": replace(p.best, round=2)}, "best.round"), (lambda p: {"previous": p.model}, "previous.private"),
    (lambda p: {"client_state": {"lists": torch.zeros(10 ** 4, 1)}}, "client_state.lists"),
    (lambda p: {"tests": p.tests * 2}, "tests"),
    (changed_test(lambda scores: replace(scores, users=scores.users.flip(0))), r"tests\[0\].users"),
    (changed_test(lambda scores: replace(scores, values={"x@20": scores.values["ndcg@20"]})), r"tests\[0\]"),
    (changed_test(lambda scores: replace(scores, values={name: values - 2 for name, values in scores.values.items()})),
     r"tests\[0\].ndcg@20"),
    (changed_test(lambda scores: replace(scores, values={name: values[:3] for name, values in scores.values.items()})),
     r"tests\[0\].ndcg@20"),
    (lambda p: {"analysis": p.analysis[1:]}, "analysis"), (lambda p: {"analysis": p.analysis[::-1]}, "analysis"),
    (changed_analysis("known", lambda ids, values: (ids[1:], values[1:])), r"analysis\[2\].ids"),
    (changed_analysis("known", lambda ids, values: (ids, values * math.nan)), r"analysis\[2\].values"),
    (changed_analysis("recall rare-items", lambda ids, values: (ids + 1000, values)), r"analysis\[9\].ids"),
    (changed_analysis("user_shift", lambda ids, values: (ids + 1, values)), r"analysis\[10\].ids"),
    (lambda p: {"ways": p.ways[:1]}, "ways"), (lambda p: {"ways": ("given", "fused")}, r"ways\[0\]")])
def test_what_no_run_writes_is_refused(made, taken, change, field):
    """Two rounds of the second block are done."""
    f = made("blocks")
    progress = next(progress for progress in run(f) if (progress.step, progress.round) == (1, 2))
    with pytest.raises(Corrupt, match=rf"field '{field}") as error:
        taken(replace(progress, **change(progress)), f)
    assert len(str(error.value).splitlines()) == 2


def changed_within(**values):
    return lambda p, within: {"within": lambda: replace(within, **{
        name: change(getattr(within, name)) for name, change in values.items()})}


@pytest.mark.parametrize("change, field", [
    (changed_within(epochs=lambda epochs: ()), "within.epochs"),
    (changed_within(epochs=lambda epochs: ((1, *epochs[0][1:]),)), "within.epochs"),
    (changed_within(epochs=lambda epochs: ((0, 10 ** 6, 1.0, 1.0),)), r"within.epochs\[0\]"),
    (changed_within(epochs=lambda epochs: ((0, 0, 1.0, 0.0),)), r"within.epochs\[0\]"),
    (changed_within(epochs=lambda epochs: ((0, 1, math.nan, 1.0),)), r"within.epochs\[0\]\[2\]"),
    (changed_within(server_state=lambda state: {"step of another": torch.zeros(())}), "within.server_state"),
    (changed_within(model=lambda model: replace(model, dense={})), "within.model.dense"),
    (changed_within(model=lambda model: replace(model, memory={"another": torch.zeros(3)})), "within.model.memory"),
    (lambda p, within: {"step": 1, "round": 0}, "trained"), (lambda p, within: {"round": 2}, "curve")])
def test_a_round_under_way_is_one_of_the_run(made, taken, monkeypatch, change, field):
    """The second epoch is under way."""
    monkeypatch.setattr(SIZES, "told_every", 0.0)
    f = made("one client")
    progress = next(progress for progress in run(f) if progress.round == 1 and progress.within)
    within = progress.within()
    assert within.epochs[0][1] == 1 and taken(progress, f)[0].within().epochs == within.epochs
    with pytest.raises(Corrupt, match=rf"field '(progress\.)?{field}"):
        taken(replace(progress, **change(progress, within)), f)


@pytest.mark.parametrize("name", ["one client", "blocks"])
def test_no_round_is_under_way_after_the_last_one_or_of_clients_with_a_user_each(made, taken, name):
    f = made(name)
    last = next(progress for progress in run(f) if progress.trained)
    within = Within(last.model, last.server_state, ((0, 1, 1.0, 1.0),))
    with pytest.raises(Corrupt, match="field 'within': found 'a round under way', accepted: none where no epoch"):
        taken(replace(last, within=lambda: within), f)


def test_what_clients_remember_is_that_of_their_data(registry, made, taken):
    """Ids in it are looked up in item tables."""
    config = make_config(registry, "ft", "hearint", "ml-100k", 0, [("test", {**SESSIONS, "rounds": 1})])
    f = config.federation(made("sessions").stream)
    progress = next(run(f))
    assert taken(progress, f)
    name, memory = next(iter(progress.model.memory.items()))
    with pytest.raises(Corrupt, match=f"field 'model.memory.{name}': found 'other numbers'"):
        taken(replace(progress, model=replace(progress.model, memory={**progress.model.memory, name: memory + 1})), f)


def test_a_shared_block_is_one_that_has_ended(registry, made, tmp_path):
    """Another checkpoint in its place is set aside."""
    method, backbone, settings = RUNS["blocks"]
    config = make_config(registry, method, backbone, "ml-100k", 0, [("test", settings)])
    f, warnings = made("blocks"), []
    path = config.base_file(tmp_path)
    path.parent.mkdir(parents=True)
    save_progress(path, next(progress for progress in run(f) if progress.step), 1.0)
    execute(config, lambda: f.stream, tmp_path, Watch(warn=warnings.append))
    assert len(warnings) == 1 and "is no block 0 that has ended; set aside as" in warnings[0]


def test_a_shared_block_that_another_run_sets_aside_first_is_no_fault(registry, made, tmp_path, monkeypatch):
    method, backbone, settings = RUNS["blocks"]
    config = make_config(registry, method, backbone, "ml-100k", 0, [("test", settings)])
    config.base_file(tmp_path).parent.mkdir(parents=True)
    config.base_file(tmp_path).write_bytes(b"of a former version")
    rename = Path.rename

    def faster(path, target):
        path.unlink(missing_ok=True)
        return rename(path, target)
    monkeypatch.setattr(Path, "rename", faster)
    warnings = []
    execute(config, lambda: made("blocks").stream, tmp_path, Watch(warn=warnings.append))
    assert warnings == [] and config.base_file(tmp_path).is_file()



def test_a_state_that_a_method_cannot_use_is_an_error_of_its_hook(made):
    """Nothing says what methods keep. Hooks that the suite's own classes lend them are theirs."""
    f = made("seldom validated")
    progress = next(progress for progress in run(f) if progress.step == 1)
    with pytest.raises(HookFailed, match=r"method 'kd': replayed_items raised KeyError: 'lists'") as error, named():
        list(run(f, replace(progress, client_state={})))
    assert len(str(error.value).splitlines()) <= 4
