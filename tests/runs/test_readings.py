"""``--reading``: all that paper and code read differently at once, under what the user sets, named in the record."""

from __future__ import annotations

import json

import pytest

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.runs.config import make_config, setting_notes

SMALL = ["--set", "rounds=1", "--set", "k_core=80", "--set", "blocks=2", "--quiet"]


def config(registry, method="f3crec", backbone="fedmf", dataset="ml-100k", **settings):
    return make_config(registry, method, backbone, dataset, 0, [("--set", settings)])


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
    from fedcl_bench.runs.config import resolve

    parts = resolve(registry, "fcucr", "sasrec", "xing", [("--reading", {"reading": "paper"})])
    method = parts.method
    assert (parts.server.init, parts.server.weighting, parts.server.patience) == ("server", "interactions", 5)
    assert (method.transfer, method.prototype, method.revisited) == ("before", "mean", "added")
    assert (method.fusion, method.teacher, method.distillation) == ("mean", "previous", "fixed")


def test_what_the_user_sets_wins_and_is_said(registry):
    layers = [("--reading", {"reading": "paper"}), ("--set", {"inc_split": "chronological"})]
    mixed = make_config(registry, "f3crec", "fedmf", "ml-100k", 0, layers)
    assert mixed.stream.inc_split == "chronological" and mixed.method_settings.kd_reduction == "sum"
    assert mixed.readings == []
    assert setting_notes(mixed, layers)[0].endswith("; set otherwise: inc_split=chronological (paper: random).")
    without = config(registry, reading="paper", without="cc")  # leaves lists without effect
    assert without.method_settings.refresh_lists == "trained" and without.readings == ["paper"]


@pytest.mark.parametrize("method, backbone, reading, message", [
    ("f3crec", "fedmf", "papper", "unknown reading .*Did you mean 'paper'"),
    ("ft", "biasmf", "paper", "neither method nor backbone names settings that their paper reads")])
def test_readings_that_there_are_not(registry, method, backbone, reading, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        config(registry, method, backbone, reading=reading)


def test_command_line(tmp_path, capsys):
    """The record says which reading it is, and a method written with it finds the same record."""
    words = ["--method", "f3crec", "--backbone", "fedmf", *SMALL, "--results", str(tmp_path)]
    assert main([*words, "--reading", "paper", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["readings"] == ["paper"] and record["settings"]["kd_reduction"] == "sum"
    assert main([*words, "--set", "reading=paper", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reused"]
    assert main(["--method", "ft", "--backbone", "fedmf", *SMALL, "--set", "inc_split=random", "--set",
                 "item_lr=plain", "--results", str(tmp_path)]) == 0
    capsys.readouterr()
    shared = ["--set", "rounds=1", "--set", "k_core=80", "--set", "blocks=2", "--records", str(tmp_path)]
    assert main(["compare", "f3crec:reading=paper", "ft:inc_split=random,item_lr=plain", "--backbone", "fedmf",
                 *shared]) == 0
    assert "reading=paper" in capsys.readouterr().out
