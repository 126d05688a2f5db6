"""The reproducibility checklist: what records know is answered, and the rest is left to the authors."""

import re

import pytest
from fabricate import fabricate, fabricate_failed, fabricate_methods, level
from helpers import output_of, refused

from fedcl_bench.cli.main import main
from fedcl_bench.reports.checklist import AUTHORS, QUESTIONS
from fedcl_bench.runs.specs import RunSpec, Tuned


@pytest.fixture(scope="module")
def folder(registry, tmp_path_factory):
    results = tmp_path_factory.mktemp("checklist")
    fabricate_methods(results, registry, {"ft": 0.08, "kd": 0.081})
    fabricate(results, registry, RunSpec("ft", "fedncf", "ml-100k", (("rounds", 7),)), 4, level(0.09))
    return results


def answered(capsys, *words):
    return dict(re.findall(r"^- \*\*(.+?)\*\* (.+)$", output_of(capsys, "checklist", *map(str, words)), re.MULTILINE))


def test_every_question_has_an_answer_of_the_records_or_is_the_authors(folder, capsys):
    found = answered(capsys, "--records", folder)
    assert list(found) == [question for questions in QUESTIONS.values() for question in questions]
    assert found["Which methods and baselines?"].count(" on fedmf, ") == 4
    assert "rounds=7 (ft on fedncf, ml-100k)" in found["Which settings beside the defaults?"]
    assert found["Which seeds?"] == "0-2 (4 combinations); 4 (1 combination)"
    assert "rounds 100 or 150 or 7" in found["What chooses the model that is tested?"]
    assert AUTHORS in found["How were methods and baselines tuned, with which budgets?"]
    assert [question for question, answer in found.items() if answer == AUTHORS] == [
        "Under which licences, and where can they be had?", "Where is the code, under which licence?"]


def test_tuning_is_that_of_the_files_of_tune(folder, registry, tmp_path, capsys):
    words = "--records", folder, "--methods", "ft,kd", "--datasets", "ml-100k", "--backbones", "fedmf", "--tuned"
    found = answered(capsys, *words)["How were methods and baselines tuned, with which budgets?"]
    assert re.search(r"ft on fedmf, ml-100k: 3 of 3 points of lr \((\S+, ){2}\S+\), budget of 24 runs of FT on 2 seeds",
                     found)
    assert "kd on fedmf, ml-100k: " in found and "fedncf" not in found
    chosen = Tuned.of(True, tmp_path).settings("f3crec", "fedmf", "ml-100k")
    for seed, more in enumerate(((), (("without", "arm"),))):  # of which the second leaves eps without effect
        fabricate(tmp_path / "tuned", registry, RunSpec("f3crec", "fedmf", "ml-100k", (*chosen.items(), *more)), seed,
                  level(0.08))
    found = answered(capsys, "--records", tmp_path / "tuned", "--tuned")
    assert "not tuned" not in found["How were methods and baselines tuned, with which budgets?"]
    assert found["Which seeds?"] == "0 (1 combination); 1 (1 combination)"
    fabricate(tmp_path, registry, RunSpec("f3crec", "fedmf", "ml-100k"), 0, level(0.08))  # by its defaults
    assert "f3crec on fedmf, ml-100k: not tuned" in answered(capsys, "--records", tmp_path, "--tuned")[
        "How were methods and baselines tuned, with which budgets?"]


def test_leaks_and_failures_are_said(registry, tmp_path, capsys):
    spec = RunSpec("ft", "fedmf", "ml-100k", (("stream", "static"), ("negative_pool", "untouched")))
    fabricate(tmp_path, registry, spec, 0, level(0.1))
    fabricate_failed(tmp_path, registry, RunSpec("kd", "fedmf", "ml-100k"), 1, "the loss is not finite.\nmore")
    found = answered(capsys, "--records", tmp_path)
    assert found["Which runs failed?"] == "1; kd on fedmf, ml-100k, seed 1: the loss is not finite"
    assert found["Does information of the test reach training or ranking?"] == "1 of 1 runs: leaks test items"
    changed = "negative_pool=untouched, stream=static (ft on fedmf, ml-100k)"  # and not what follows from the stream
    assert found["Which settings beside the defaults?"] == changed


def test_latex_has_the_same_answers_with_its_letters_escaped(folder, capsys):
    text = output_of(capsys, "checklist", "--records", folder, "--format", "latex")
    assert text.count(r"\item[") == sum(map(len, QUESTIONS.values())) and r"k\_core 10" in text
    assert text.count(r"\begin{description}") == text.count(r"\end{description}") == len(QUESTIONS)
    assert "--records" in refused(capsys, "checklist", "--records", folder, "--methods", "reg")
    assert "Did you mean 'kd'" in refused(capsys, "checklist", "--records", folder, "--methods", "kdd")
    assert len(answered(capsys, "--records", folder, "--methods", "KD")) > 9


def test_damaged_records_are_left_out(registry, tmp_path, capsys):
    """Here and of the page, which no other record may leave without a run either."""
    kept, gone = (fabricate(tmp_path, registry, RunSpec("ft", "fedmf", "ml-100k"), seed, level(0.1))
                  for seed in (3, 5))
    (gone / "users.parquet").write_bytes(b"?")
    assert main(["checklist", "--records", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "**Which seeds?** 3 (1 combination)" in said.out and "users.parquet: has changed" in said.err
    (kept / "rounds.parquet").unlink()
    for command in (["checklist"], ["report", "--out", str(tmp_path / "report.html")]):
        assert main([*command, "--records", str(tmp_path)]) == 2
        assert "no finished run of these" in capsys.readouterr().err
