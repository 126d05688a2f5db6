"""Settings that others leave inactive: truly without effect, told, left out of hashes, and old records found."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import pytest
import torch
from helpers import build, federation, finish

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import PluginError
from fedcl_bench.evaluation.metrics import EvaluationSettings
from fedcl_bench.federation.parts import Federation, FederationSettings
from fedcl_bench.runs.config import make_config
from fedcl_bench.plugin.local_settings import LocalSettings
from fedcl_bench.core.settings import inactive, inherited, setting
from fedcl_bench.testing.worlds import session_log, session_stream, small_stream

# Of every setting that an ablation leaves inactive another value, far from the default.
OTHERS = {"f3crec": {"eps": 0.5, "beta": 0.2, "lambda_kd": 0.9, "top_n": 3, "kd_reduction": "sum",
                     "refresh_lists": "all"},
          "fcucr": {"lambda_tasd": 0.3, "distillation": "fixed", "teacher": "previous", "neighbours": 1,
                    "fusion": "mean", "window": 1, "window_rule": "entries", "transfer_interval": 2,
                    "prototype_noise": 0.5, "transfer": "before", "prototype": "mean", "revisited": "added"}}
ABLATIONS = [("f3crec", "cc"), ("f3crec", "arm"), ("f3crec", "sc"), ("f3crec", "itm"), ("fcucr", "tasd"),
             ("fcucr", "iupr"), ("fcucr", "both")]


def inactive_of(registry, method: str, **settings) -> dict[str, str]:
    return inactive([registry.get("method", method).cls.Settings(**settings)])


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
def test_inactive_settings_change_no_number(registry, method, without):
    """All inactive ones at once and the default give the same to the bit; another value of an active setting gives
    something else."""
    usual = numbers(few_rounds(registry, method, without=without))
    without_effect = inactive_of(registry, method, without=without)
    assert same(usual, numbers(few_rounds(registry, method, without=without,
                                          **{name: OTHERS[method][name] for name in without_effect})))
    acting = {name: value for name, value in OTHERS[method].items() if name not in without_effect}
    for name, value in acting.items():
        if name not in ("window_rule", "refresh_lists"):  # act with a window, and where somebody has no data in a block
            assert not same(usual, numbers(few_rounds(registry, method, without=without, **{name: value}))), name


def test_what_is_inactive(registry):
    for method, others in OTHERS.items():
        assert inactive_of(registry, method) == {}
        choices = next(f for f in fields(registry.get("method", method).cls.Settings) if f.name == "without")
        assert {("none", *(without for name, without in ABLATIONS if name == method))} \
            == {tuple(choices.metadata["choices"])}
    assert inactive_of(registry, "f3crec", without="sc") == {"beta": "with without=sc"}
    assert set(inactive_of(registry, "f3crec", without="cc")) == set(OTHERS["f3crec"]) - {"beta"}
    assert set(inactive_of(registry, "fcucr", without="both")) == set(OTHERS["fcucr"])


@dataclass(frozen=True)
class Example:
    kind: str = setting("plain", "", choices=("plain", "kmeans", "kmeans++"))
    seeds: int = setting(3, "", only_if="kind=kmeans*")
    weight: float = setting(0.0, "", only_if="kind!=plain|kmeans")
    noise: float = setting(0.0, "")
    norm: float = setting(1.0, "", only_if="noise or weight")
    form: str = setting("round", "", only_if=("norm=2.0", "kind=plain or noise"))


def test_reasons_are_derived_from_conditions():
    """An inactive setting counts with its default, and its reason is that of what hangs on it alone."""
    first = {"seeds": "with kind=plain", "weight": "with kind=plain", "norm": "without noise or weight",
             "form": "without noise or weight"}
    assert inactive([Example()]) == inactive([Example(weight=1.0)]) == first
    assert inactive([Example("kmeans++", noise=1.0, weight=0.5)]) == {"form": "with norm=1.0"}
    assert inactive([Example("kmeans", weight=1.0)])["norm"] == "without noise or weight"
    assert inactive([Example("kmeans++", weight=1.0, norm=2.0)]) == {"form": "with kind=kmeans++ and without noise"}

    @dataclass(frozen=True)
    class Narrower(Example):
        noise: float = inherited(Example, "noise", only_if="kind=plain")

    assert inactive([Narrower("kmeans", noise=2.0)]).keys() == {"weight", "noise", "norm", "form"}


def test_wrong_conditions_are_errors():
    @dataclass(frozen=True)
    class Wrong:
        weight: float = setting(1.0, "", only_if="lr=2")

    with pytest.raises(PluginError, match="Wrong.weight: only_if names 'lr', expected another setting"):
        inactive([Wrong()])
    with pytest.raises(PluginError, match="only_if: found 'lr > 1', accepted: NAME"):
        setting(1.0, "", only_if="lr > 1")


def config(registry, **settings):
    return make_config(registry, "f3crec", "fedmf", "ml-100k", 0, [("test", settings)])


def test_hashes(registry):
    """Inactive values do not count."""
    assert config(registry).hash.startswith("773506dae5c3")
    first, second = (config(registry, without="sc", beta=beta) for beta in (0.9, 0.5))
    assert first.hash == second.hash != config(registry, without="cc").hash
    assert config(registry, without="itm").hash.startswith("a4d328a89c30")
    assert "beta" not in first.settings and first.inactive["beta"] == "with without=sc"
    assert config(registry, beta=0.5).hash != config(registry).hash
    assert not config(registry).inactive.keys() & config(registry).settings.keys()


def test_both_betas_are_one_run(registry, tmp_path, capsys, monkeypatch):
    """The second is not run; the record and the user are told what has no effect."""
    monkeypatch.chdir(tmp_path)
    command = ["--method", "f3crec", "--backbone", "fedmf", "--set", "rounds=1", "--set", "without=sc", "--json"]
    assert main([*command, "--set", "beta=0.9"]) == 0
    first = capsys.readouterr()
    result = json.loads(first.out)
    assert result["inactive_settings"]["beta"] == "with without=sc" and "beta" not in result["settings"]
    assert not result["inactive_settings"].keys() & result["settings"].keys()
    assert "setting 'beta' (--set) has no effect with without=sc." in first.err
    assert main([*command, "--set", "beta=0.5"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["reused"] and again["hash"] == result["hash"]
    assert main(command) == 0
    assert "has no effect" not in capsys.readouterr().err
