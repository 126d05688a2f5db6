"""Settings that others leave inactive: truly without effect, told, left out of hashes. And ``--reading``: all that
paper and code read differently at once, under what the user sets, named in the record."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace

import pytest
import torch
from helpers import build, federation, finish, numbers_of, output_of
from synthetic import small_stream

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import PluginError, UserError
from fedcl_bench.evaluation.metrics import EvaluationSettings
from fedcl_bench.federation.parts import Federation, FederationSettings
from fedcl_bench.runs.config import make_config, resolve, setting_notes
from fedcl_bench.plugin.local_settings import LocalSettings
from fedcl_bench.core.settings import inactive, inherited, setting
from fedcl_bench.testing.worlds import session_log, session_stream

SMALL = ["--set", "rounds=1", "--set", "k_core=80", "--set", "blocks=2", "--quiet"]
OF_DISTILLATION = {"lambda_tasd": 0.3, "distillation": "fixed", "teacher": "previous"}
OF_PROTOTYPES = {"neighbours": 1, "fusion": "mean", "window": 1, "window_rule": "entries", "transfer_interval": 2,
                 "prototype_noise": 0.5, "transfer": "before", "prototype": "mean", "revisited": "added"}
# What each ablation leaves inactive, with another value, far from the default.
ABLATIONS = {("f3crec", "cc"): {"eps": 0.5, "lambda_kd": 0.9, "top_n": 3, "kd_reduction": "sum",
                                "refresh_lists": "all"},
             ("f3crec", "arm"): {"eps": 0.5}, ("f3crec", "sc"): {"beta": 0.2}, ("f3crec", "itm"): {},
             ("fcucr", "tasd"): OF_DISTILLATION, ("fcucr", "iupr"): OF_PROTOTYPES,
             ("fcucr", "both"): {**OF_DISTILLATION, **OF_PROTOTYPES}}


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


@pytest.mark.parametrize("method,without", ABLATIONS)
def test_inactive_settings_change_no_number(registry, method, without):
    """All inactive ones at once and the default give the same to the bit."""
    others, cls = ABLATIONS[method, without], registry.get("method", method).cls.Settings
    assert set(inactive([cls(without=without)])) == set(others) and inactive([cls()]) == {}
    if others:
        usual, changed = (numbers_of(finish(few_rounds(registry, method, without=without, **settings)))
                          for settings in ({}, others))
        assert usual.keys() == changed.keys() and all(torch.equal(usual[name], changed[name]) for name in usual)


def test_every_ablation_is_known(registry):
    for method in ("f3crec", "fcucr"):
        choices = next(f for f in fields(registry.get("method", method).cls.Settings) if f.name == "without")
        assert {"none", *(without for name, without in ABLATIONS if name == method)} == {*choices.metadata["choices"]}
    assert inactive([registry.get("method", "f3crec").cls.Settings(without="sc")]) == {"beta": "with without=sc"}


@dataclass(frozen=True)
class Example:
    kind: str = setting("plain", "", choices=("plain", "kmeans", "kmeans++"))
    seeds: int = setting(3, "", only_if="kind=kmeans*")
    weight: float = setting(0.0, "", only_if="kind!=plain|kmeans")
    noise: float = setting(0.0, "")
    norm: float = setting(1.0, "", only_if="noise or weight")
    form: str = setting("round", "", only_if=("norm=2.0", "kind=plain or noise"))


def test_reasons_are_derived_from_conditions_and_wrong_ones_are_errors():
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
    @dataclass(frozen=True)
    class Wrong:
        weight: float = setting(1.0, "", only_if="lr=2")

    with pytest.raises(PluginError, match="Wrong.weight: only_if names 'lr', expected another setting"):
        inactive([Wrong()])
    with pytest.raises(PluginError, match="only_if: found 'lr > 1', accepted: NAME"):
        setting(1.0, "", only_if="lr > 1")


def config(registry, method="f3crec", backbone="fedmf", dataset="ml-100k", **settings):
    return make_config(registry, method, backbone, dataset, 0, [("--set", settings)])


def test_hashes(registry):
    """Inactive values do not count."""
    assert config(registry).hash.startswith("e5e1be51968d")
    first, second = (config(registry, without="sc", beta=beta) for beta in (0.9, 0.5))
    assert first.hash == second.hash != config(registry, without="cc").hash
    assert config(registry, without="itm").hash.startswith("7642583c4698")
    assert "beta" not in first.settings and first.inactive["beta"] == "with without=sc"
    assert config(registry, beta=0.5).hash != config(registry).hash
    assert not config(registry).inactive.keys() & config(registry).settings.keys()


@pytest.mark.parametrize("reading, expected", [
    ("paper", {"kd_reduction": "sum", "refresh_lists": "all", "inc_split": "random", "item_lr": "plain"}),
    ("code", {"kd_reduction": "mean", "refresh_lists": "trained", "inc_split": "chronological", "valid_decimals": 5,
              "repeated_positives": "once", "item_lr": "times_items", "init_from": "last"})])
def test_a_reading_is_its_values_of_all_settings(registry, reading, expected):
    """A run by it and one with its values set by hand are one run; what it leaves open stays."""
    read, by_hand = config(registry, reading=reading), config(registry, **expected)
    assert read.hash == by_hand.hash and read.readings == by_hand.readings == [reading]
    assert config(registry).readings == [] and "reading" not in read.settings
    told, = setting_notes(read, [("--reading", {"reading": reading})])
    assert all(f"{name}={value}" in told for name, value in expected.items())


def test_algorithm_1_of_fcucr(registry):
    parts = resolve(registry, "fcucr", "sasrec", "xing", [("--reading", {"reading": "paper"})])
    method = parts.method
    assert (parts.server.init, parts.server.weighting, parts.server.patience) == ("server", "interactions", 5)
    assert (method.transfer, method.prototype, method.revisited) == ("before", "mean", "added")
    assert (method.fusion, method.teacher, method.distillation) == ("mean", "previous", "fixed")


def test_settings_of_plugins_that_are_not_there_are_said(registry):
    usual = config(registry)
    of_dataset = replace(usual.source.config, backbone_settings={"fedmff": {"lr": 0.1}, "fedncf": {"lr": 0.1}},
                         search={"f3crec": {"top_n": [1]}, "fedmf": {"lr": [0.1]}, "f3crecc": {"top_n": [1]}})
    told = setting_notes(replace(usual, source=replace(usual.source, config=of_dataset)), [])
    assert len(told) == 2 and told[0].startswith("the config of dataset ml-100k has backbone_settings for an unknown "
                                                 "backbone 'fedmff'. Did you mean 'fedmf'? Known: ")
    assert "has search for an unknown method or backbone 'f3crecc'. Did you mean 'f3crec'? Known: " in told[1]


def test_what_the_user_sets_wins_and_is_said(registry):
    layers = [("--reading", {"reading": "paper"}), ("--set", {"inc_split": "chronological"})]
    mixed = make_config(registry, "f3crec", "fedmf", "ml-100k", 0, layers)
    assert mixed.stream.inc_split == "chronological" and mixed.method_settings.kd_reduction == "sum"
    assert mixed.readings == []
    assert setting_notes(mixed, layers)[0].endswith("; set otherwise: inc_split=chronological (paper: random).")
    without = config(registry, reading="paper", without="cc")  # leaves lists without effect
    assert without.method_settings.refresh_lists == "trained" and without.readings == ["paper"]
    ignored = config(registry, "fcucr", "session-transformer", stream="sessions", reading="paper")  # prototype=mean
    assert ignored.readings == ["paper"]


@pytest.mark.parametrize("method, backbone, reading, message", [
    ("f3crec", "fedmf", "papper", "unknown reading .*Did you mean 'paper'"),
    ("ft", "biasmf", "paper", "neither method nor backbone names settings that their paper reads")])
def test_readings_that_there_are_not(registry, method, backbone, reading, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        config(registry, method, backbone, reading=reading)


def test_command_line(tmp_path, capsys):
    """The record says which reading it is and what is inactive, as does the command; another value of that is the same
    run, and a method written with the reading finds its record."""
    words = ["--method", "f3crec", "--backbone", "fedmf", *SMALL, "--set", "without=sc", "--results", str(tmp_path),
             "--json"]
    assert main([*words, "--reading", "paper", "--set", "beta=0.9"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["readings"] == ["paper"] and record["settings"]["kd_reduction"] == "sum"
    assert record["inactive_settings"]["beta"] == "with without=sc"
    assert not record["inactive_settings"].keys() & record["settings"].keys()
    assert "setting 'beta' (--set) has no effect with without=sc." in err
    assert main([*words, "--set", "reading=paper"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["reused"] and "has no effect" not in err
    assert main(["--method", "ft", "--backbone", "fedmf", *SMALL, "--set", "inc_split=random", "--set",
                 "item_lr=plain", "--results", str(tmp_path)]) == 0
    capsys.readouterr()
    assert "reading=paper" in output_of(
        capsys, "compare", "f3crec:reading=paper,without=sc", "ft:inc_split=random,item_lr=plain", "--backbone",
        "fedmf", *SMALL[:-1], "--records", tmp_path)
