"""Readings of papers: which runs they stand for, what their records say, and the command from end to end."""

import csv
import json

import pytest
from synthetic import flat_runs

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import PluginError, UserError
from fedcl_bench.experiments.sensitivity import Case, cases
from fedcl_bench.reports import sensitivity_table
from fedcl_bench.reports.frame import OverSeeds
from fedcl_bench.reports.sensitivity_table import effects, markdown
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.specs import RunSpec

OWN = """
from dataclasses import dataclass
from fedcl_bench import Method, setting

@dataclass(frozen=True)
class OwnSettings:
    strength: float = setting(1.0, "how strong", low=0.0)

class Own(Method):
    name = "own"
    title = "a method with two readings"
    Settings = OwnSettings
    ambiguities = {"strength": {1: "paper", 2: "code"}, "batch_size": {512: "code", 256: "paper"}}
"""


def of(registry, method, backbone, dataset="ml-100k", against="ft", **settings):
    specs = [RunSpec(name, backbone, dataset, tuple(settings.items() if name == method or not own else ()))
             for name, own in ((method, False), (against, "without" in settings))]
    return cases(registry, *specs)


def settings_by_name(planned):
    return {case.setting: (case.proposed.settings, case.against.settings) for case in planned}


def test_ambiguities_of_method_and_backbone_change_one_at_a_time(registry):
    """For both methods, if both have the setting; and the default is what the runs have, not what a class says."""
    planned, notes = of(registry, "f3crec", "fedncf")
    assert planned[0] == Case(RunSpec("f3crec", "fedncf", "ml-100k"), RunSpec("ft", "fedncf", "ml-100k")) and not notes
    changed = settings_by_name(planned)
    assert set(changed) == {"", "kd_reduction", "refresh_lists", "inc_split", "valid_decimals", "reset_private",
                            "init_from", "repeated_positives", "reading"}
    assert changed["kd_reduction"] == ((("kd_reduction", "sum"),), ())
    assert changed["reset_private"] == ((("reset_private", False),),) * 2
    case = next(case for case in planned if case.setting == "reset_private")
    assert (case.default, case.other) == ("true (released code)", "false (paper)")
    turned, _ = of(registry, "f3crec", "fedncf", reset_private="false")
    case = next(case for case in turned if case.setting == "reset_private")
    assert case.other == "true (released code)" and dict(case.against.settings) == {"reset_private": True}
    assert "kd_reduction" in settings_by_name(of(registry, "f3crec", "fedncf", against="kd")[0])
    both = of(registry, "f3crec", "fedncf", against="kd")[0]
    assert settings_by_name(both)["kd_reduction"] == ((("kd_reduction", "sum"),),) * 2


def test_all_readings_of_a_paper_together_come_last(registry):
    """The other method has those that it has too, whosever they are."""
    *_, joint, = of(registry, "f3crec", "fedncf")[0]
    assert joint.setting == "reading" and joint.other.startswith("paper: kd_reduction, refresh_lists, inc_split")
    assert joint.proposed.settings == (("reading", "paper"),)
    assert dict(joint.against.settings) == {"inc_split": "random", "reset_private": False}


def test_settings_without_effect_are_left_out(registry):
    planned, notes = of(registry, "f3crec", "fedmf", without="cc")
    assert {"kd_reduction", "refresh_lists"}.isdisjoint(settings_by_name(planned))
    assert notes == [f"{name} is left out, as it has no effect with without=cc."
                     for name in ("kd_reduction", "refresh_lists")]
    assert "inc_split" not in settings_by_name(of(registry, "f3crec", "pfedrec", stream="static")[0])


def test_sessions(registry):
    changed = settings_by_name(of(registry, "fcucr", "sasrec", "xing")[0])
    assert {"init", "distillation", "teacher", "fusion", "weighting", "patience", "architecture"} < set(changed)
    assert changed["patience"] == ((("patience", 0),),) * 2 and changed["fusion"] == ((("fusion", "mean"),), ())


def test_a_new_method_needs_its_class_alone(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    planned, _ = of(discover([tmp_path]), "own", "fedmf")
    told = {case.setting: (case.default, case.other) for case in planned}
    assert told["strength"] == ("1.0 (paper)", "2.0 (code)") and told["batch_size"] == ("512 (code)", "256 (paper)")
    (tmp_path / "own.py").write_text(OWN.replace('"strength": {', '"strenght": {'))
    with pytest.raises(PluginError, match="name 'strenght', expected a setting"):
        of(discover([tmp_path]), "own", "fedmf")
    (tmp_path / "own.py").write_text(OWN.replace('2: "code"', '-2: "code"'))
    with pytest.raises(UserError, match="'strength'.*found -2, accepted: a number at least 0"):
        of(discover([tmp_path]), "own", "fedmf")


@pytest.mark.parametrize("ambiguities,message", [
    ('["strength"]', "no mapping of settings"), ('{"strength": (1, 2)}', "no mapping of settings"),
    ('{"strength": {1: 2}}', "no mapping of settings"), ('{"strength": {1: "a\\x1b[2J"}}', "cannot be printed")])
def test_ambiguities_of_another_form_are_named(tmp_path, ambiguities, message):
    (tmp_path / "own.py").write_text(OWN.replace(OWN[OWN.index('{"strength"'):].strip(), ambiguities))
    registry = discover([tmp_path])
    assert message in registry.broken["own"] and not registry.knows("method", "own")


def test_list_shows_the_ambiguities(capsys):
    assert main(["list", "kd"]) == 0
    out = capsys.readouterr().out
    assert "read differently by paper and code" in out
    assert "kd_reduction: mean (released code), sum (paper, Eq. 5 as printed)" in out
    assert main(["list", "ft"]) == 0 and "read differently" not in capsys.readouterr().out
    assert main(["list", "ft", "--set", "stream=static"]) == 0 and "read differently" in capsys.readouterr().out


def made_up():
    default = Case(RunSpec("f3crec", "fedmf", "ml-100k"), RunSpec("ft", "fedmf", "ml-100k"))
    small, large, gone = (Case(default.proposed, default.against, name, "old", "new") for name in ("a", "b", "c"))
    return {default: (flat_runs("f3crec", {0: 0.5, 1: 0.7}), flat_runs("ft", {0: 0.4, 1: 0.4})),
            small: (flat_runs("f3crec", {0: 0.6, 1: 0.7}), flat_runs("ft", {0: 0.4, 1: 0.6})),
            gone: ([], flat_runs("ft", {0: 0.4, 1: 0.4})),
            large: (flat_runs("f3crec", {1: 0.4, 2: 0.9}), flat_runs("ft", {1: 0.5}))}


def test_changes_are_of_the_same_seed():
    first, *others = effects(made_up(), "ndcg@20")
    assert [effect.case.setting for effect in others] == ["b", "a", "c"]  # the largest first, without runs last
    assert (first.seeds, first.value.mean, first.lead.mean) == (2, pytest.approx(0.6), pytest.approx(0.2))
    assert first.value_change is None is first.lead_change
    large, small, gone = others
    assert large.seeds == 1 and large.value_change.mean == pytest.approx(-0.3)  # .4 - .7 of seed 1
    assert large.lead_change.mean == pytest.approx(-0.1 - 0.3)
    assert small.value_change == OverSeeds(pytest.approx(0.05), pytest.approx(0.05 * 2 ** 0.5), 2)
    assert small.lead_change == OverSeeds(pytest.approx(-0.05), pytest.approx(0.15 * 2 ** 0.5), 2)
    assert gone.seeds == 0 and gone.value is None
    text = markdown([first, *others], "N@20", "FT", [])
    assert "| a | old | new | 0.6500 ± 0.0707 | +0.0500 ± 0.0707 | +0.1500 ± 0.0707 | -0.0500 ± 0.2121 | 2 |" in text
    assert "| c | old | new | – | – | – | – | 0 |" in text


def test_notes():
    cases_of = list(made_up())
    split = Case(*cases_of[0].specs, "inc_split", "chronological", "random")
    many = sensitivity_table.notes(effects({**made_up(), split: ([], [])}, "ndcg@20"), range(3), ["b is left out."])
    assert "over seeds 0-2" in many[0] and many[2].startswith("inc_split: what is tested changes too")
    assert many[3:] == ["c = new: no seed of all its runs finished.",
                        "inc_split = random: no seed of all its runs finished.", "b is left out."]
    alone = sensitivity_table.notes(effects(made_up(), "ndcg@20"), range(1), [])
    assert alone[0].startswith("Seed 0 alone") and not any("tested" in note for note in alone)


def test_the_command(tmp_path, capsys, same_process):
    """What is missing is run, and drawn from records; what is there is not run again."""
    words = ["sensitivity", "kd", "--backbone", "fedmf", "--seeds", "1", "--set", "rounds=1", "--set", "k_core=80",
             "--set", "blocks=2", "--jobs", "1", "--results", str(tmp_path / "results"), "--out", str(tmp_path),
             "--format", "svg,png"]
    assert main([*words, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {run["state"] for run in plan["runs"]} == {"missing"} and len(plan["runs"]) == len(plan["cases"]) + 3 == 9
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [case["seeds"] for case in found["cases"]] == [1] * 6 and found["metric"] == "ndcg@20"
    stem = tmp_path / "sensitivity-kd-fedmf-ml-100k-ndcg20"
    assert found["files"] == [f"{stem}.{kind}" for kind in ("svg", "png", "md", "csv")]
    with open(f"{stem}.csv", newline="") as file:
        lines = {line["setting"]: line for line in csv.DictReader(file)}
    by_hash = {path.name.rsplit("-", 1)[1]: json.loads((path / "run.json").read_text())
               for path in (tmp_path / "results/runs").iterdir()}
    values = {tuple(meta["settings"][name] for name in ("item_lr", "init_from")): [] for meta in by_hash.values()}
    for run in plan["runs"]:
        settings = run["settings"]
        if run["method"] == "kd" and (settings["kd_reduction"], settings["refresh_lists"]) == ("mean", "trained"):
            metrics = by_hash[run["hash"][:12]]["metrics"]["ndcg@20"]
            values[settings["item_lr"], settings["init_from"]].append(metrics["avg_incremental"])
    (default,), (plain,) = values["times_items", "last"], values["plain", "last"]
    assert float(lines["item_lr"]["value_change"]) == pytest.approx(plain - default)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "results/runs").glob("*/run.json")}
    assert main(words) == 0
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "results/runs").glob("*/run.json")}
    assert "all as by default" in capsys.readouterr().out
    assert main(["sensitivity", "fcucr", "--backbone", "fedmf"]) == 2
    assert "method 'fcucr' needs a sequential backbone" in capsys.readouterr().err
