"""Settings that an ablation leaves without effect: truly without, told, left out of hashes, and old records found."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import pytest
import torch
from fabricate import alter, config_of, fabricate, level
from helpers import build, federation, finish

from fedcl_bench.cli.main import main
from fedcl_bench.errors import PluginError
from fedcl_bench.evaluation.ranking import EvaluationSettings
from fedcl_bench.experiments.grid import make_tasks, state
from fedcl_bench.federation.parts import Federation, FederationSettings
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.records import Record
from fedcl_bench.runs.runner import execute
from fedcl_bench.runs.specs import RunSpec, expected_settings
from fedcl_bench.runs.store import load_runs, matching
from fedcl_bench.sampling import LocalSettings
from fedcl_bench.settings import declared_idle
from fedcl_bench.testing.worlds import session_log, session_stream, small_stream

# Of every setting that an ablation idles another value, far from the default.
OTHERS = {"f3crec": {"eps": 0.5, "beta": 0.2, "lambda_kd": 0.9, "top_n": 3, "kd_reduction": "sum",
                     "refresh_lists": "all"},
          "fcucr": {"lambda_tasd": 0.3, "distillation": "fixed", "teacher": "previous", "neighbours": 1,
                    "fusion": "mean", "window": 1, "window_rule": "entries", "transfer_interval": 2,
                    "prototype_noise": 0.5}}
ABLATIONS = [("f3crec", "cc"), ("f3crec", "arm"), ("f3crec", "sc"), ("f3crec", "itm"), ("fcucr", "tasd"),
             ("fcucr", "iupr"), ("fcucr", "both")]


def idle_of(registry, method: str, **settings) -> dict[str, str]:
    return declared_idle([registry.get("method", method).cls.Settings(**settings)])


def few_rounds(registry, method: str, **settings) -> Federation:
    """Two or three rounds per step on few clients."""
    if method == "f3crec":
        plugin = build(registry, "method", method, **{"top_n": 5, **settings})
        return federation(registry, small_stream(blocks=3), plugin, build(registry, "backbone", "fedmf", dim=4),
                          rounds=2, evaluation=EvaluationSettings(topk=(5,), valid_metric="ndcg@5"))
    return Federation(session_stream(session_log(40), 40),
                      build(registry, "backbone", "sasrec", dim=6, max_length=5),
                      build(registry, "method", method, **{"head_size": 5, "neighbours": 3, **settings}),
                      LocalSettings("adam", local_epochs=2, negatives=1),
                      FederationSettings(rounds=3, precision="float64", tested_round="last", patience=0),
                      EvaluationSettings(topk=(3,), valid_metric="hit@3", candidates="sampled", sampled_candidates=10),
                      5)


def numbers(f: Federation) -> list[torch.Tensor]:
    """All tables, test scores, losses and bytes of a run."""
    progress = finish(f)
    curve = [[row[name] for name in ("loss", "valid", "bytes_up", "bytes_down")] for row in progress.curve]
    scores = [values for _, _, scores in progress.tests for values in scores.values.values()]
    return [*progress.model.tables(), *scores, torch.tensor(curve, dtype=torch.float64)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("method,without", ABLATIONS)
def test_idle_settings_change_no_number(registry, method, without):
    """All idle ones at once and the default give the same to the bit; another value of a setting that is not idle gives
    something else."""
    usual = numbers(few_rounds(registry, method, without=without))
    idle = idle_of(registry, method, without=without)
    assert same(usual, numbers(few_rounds(registry, method, without=without,
                                          **{name: OTHERS[method][name] for name in idle})))
    acting = {name: value for name, value in OTHERS[method].items() if name not in idle}
    for name, value in acting.items():
        if name not in ("window_rule", "refresh_lists"):  # act with a window, and where somebody has no data in a block
            assert not same(usual, numbers(few_rounds(registry, method, without=without, **{name: value}))), name


def test_what_is_idle(registry):
    for method, others in OTHERS.items():
        assert idle_of(registry, method) == {}
        choices = next(f for f in fields(registry.get("method", method).cls.Settings) if f.name == "without")
        assert {("none", *(without for name, without in ABLATIONS if name == method))} \
            == {tuple(choices.metadata["choices"])}
    assert idle_of(registry, "f3crec", without="sc") == {"beta": "with without=sc"}
    assert set(idle_of(registry, "f3crec", without="cc")) == set(OTHERS["f3crec"]) - {"beta"}
    assert set(idle_of(registry, "fcucr", without="both")) == set(OTHERS["fcucr"])


def test_a_class_names_settings_of_its_own_only():
    @dataclass(frozen=True)
    class Wrong:
        weight: float = 1.0

        def idle_settings(self):
            return {"lr": "always"}

    with pytest.raises(PluginError, match="Wrong.idle_settings names lr"):
        declared_idle([Wrong()])


def config(registry, **settings):
    return make_config(registry, "f3crec", "fedmf", "ml-100k", 0, [("test", settings)])


def test_hashes(registry):
    """Idle values do not count; hashes of runs without idle settings, and former ones, are those of published records.
    """
    assert config(registry).hash.startswith("02797fc01971") and config(registry).former_hash is None
    first, second = (config(registry, without="sc", beta=beta) for beta in (0.9, 0.5))
    assert first.hash == second.hash != config(registry, without="cc").hash
    assert first.former_hash.startswith("e45d2060831f") and second.former_hash.startswith("0f2cb5a5042b")
    assert config(registry, without="arm").former_hash.startswith("ffea2d6d695d")
    assert config(registry, without="itm").hash.startswith("d5fa5253a955")
    assert "beta" not in first.settings and first.idle == {"beta": "with without=sc"}
    assert config(registry, beta=0.5).hash != config(registry).hash and not config(registry, beta=0.5).idle


def as_before(results, registry, spec: RunSpec, seed: int = 0, **idle) -> Record:
    """A record of a spec as it was written when idle settings were part of the hash."""
    spec = RunSpec(spec.method, spec.backbone, spec.dataset, (*spec.settings, *idle.items()))
    former = config_of(registry, spec, seed)
    folder = fabricate(results, registry, spec, seed, level(0.08))
    content = json.loads((folder / "run.json").read_text())
    alter(folder, ["idle_settings"], hash=former.former_hash, settings={**content["settings"], **idle})
    return Record(folder.rename(folder.with_name(former.former_name)))


SPEC = RunSpec("f3crec", "fedmf", "ml-100k", (("without", "sc"),))


def test_tables_find_records_of_before(registry, tmp_path):
    as_before(tmp_path, registry, SPEC, 0, beta=0.9)
    run, = load_runs(tmp_path)
    assert run.meta["settings"]["beta"] == 0.9 and "beta" not in expected_settings(registry, SPEC)
    assert matching([run], registry, SPEC) == [run]
    assert matching([run], registry, RunSpec("f3crec", "fedmf", "ml-100k", (("without", "cc"),))) == []
    fabricate(tmp_path, registry, SPEC, 0, level(0.08))  # made again since
    present = config_of(registry, SPEC, 0).hash
    assert [run.hash for run in matching(load_runs(tmp_path), registry, SPEC)] == [present]


def test_of_two_records_of_before_the_one_with_the_specs_values_is_taken(registry, tmp_path):
    for beta in (0.5, 0.9):
        as_before(tmp_path, registry, SPEC, 0, beta=beta)
    run, = matching(load_runs(tmp_path), registry, SPEC)
    assert run.meta["settings"]["beta"] == 0.9


def refuse():
    raise AssertionError("a finished run is run again")


def test_a_finished_run_of_before_is_not_run_again(registry, tmp_path):
    task, = make_tasks(registry, [SPEC], [0])
    assert state(task, tmp_path).name == "missing"
    record = as_before(tmp_path, registry, SPEC, 0, beta=0.9)
    folder = record.folder.rename(record.folder.with_name(task.config.former_name))  # of the real data file
    assert state(task, tmp_path).name == "finished"
    done = execute(task.config, refuse, tmp_path)
    assert done["reused"] and done["record"] == str(folder)


def test_both_betas_are_one_run(registry, tmp_path, capsys, monkeypatch):
    """The second is not run; the record and the user are told what has no effect."""
    monkeypatch.chdir(tmp_path)
    command = ["--method", "f3crec", "--backbone", "fedmf", "--set", "rounds=1", "--set", "without=sc", "--json"]
    assert main([*command, "--set", "beta=0.9"]) == 0
    first = capsys.readouterr()
    result = json.loads(first.out)
    assert result["idle_settings"] == {"beta": "with without=sc"} and "beta" not in result["settings"]
    assert "setting 'beta' (--set) has no effect with without=sc." in first.err
    assert main([*command, "--set", "beta=0.5"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["reused"] and again["hash"] == result["hash"]
    assert main(command) == 0
    assert "has no effect" not in capsys.readouterr().err
