"""FFMSR's tables: the printed numbers, and the runs behind them."""

from __future__ import annotations

import csv

import pytest

from fedcl_bench.cli.main import main
from fedcl_bench.experiments.papers import Key, ffmsr
from fedcl_bench.runs.specs import RunSpec

OFFICE, RETAIL = ffmsr.DATASETS
_DOMAINS = {"Office": (OFFICE, "D0"), "Arts": (OFFICE, "D1"), "OnlineRetail": (RETAIL, "D0"), "Pantry": (RETAIL, "D1")}
_METRICS = {"#Users": "users", "#Items": "items", "#Inters.": "interactions",
            "Avg. n (sequence length)": "average_length"}


def published(shared, number):
    """Cells of a published csv as (key, value)."""
    backbones = {name: backbone for backbone, name in {**ffmsr.LOCAL, **ffmsr.CENTRAL}.items()}
    backbones |= {"Bert4Rec": "recbole:BERT4Rec", "FedDCSR": "feddcsr", "PFCR": "vqrec"}
    methods = {"FedDCSR": "feddcsr", "PFCR": "pfcr", "FFMSR": "ffmsr"}
    variants = {name: row for row, name in {**ffmsr.ABLATIONS, **ffmsr.CLUSTERINGS, "text=pq": "FFMSR-PQ"}.items()}
    variants |= {"FFMSR": "ffmsr", "FFMSR-Origin": "without=semantic-fusion"}
    with open(shared / "paper_tables" / f"ffmsr_table{number}.csv", newline="") as file:
        for line in csv.DictReader(file):
            dataset, column = _DOMAINS[line["dataset"]]
            metric = _METRICS.get(line["metric"], line["metric"].lower())
            if number == 2:
                yield Key(dataset, "", metric, "", column), line["value"]
            elif number == 3:
                name = line["method"]
                yield Key(dataset, backbones.get(name, "ffmsr"), methods.get(name, "ft"), metric, column), line["value"]
            elif number == 5:
                row = {"Origin": "ft", "Enhanced": "semantics=true"}[line["setting"]]
                yield Key(dataset, backbones[line["method"]], row, metric, column), line["value"]
            else:
                row = variants[line.get("setting") or line["method"]]
                yield Key(dataset, "ffmsr", row, metric, column), line["value"]


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6, 7])
def test_every_printed_number_stands_in_its_cell(shared, number):
    expected = dict(published(shared, number))
    assert {key: printed.text for key, printed in ffmsr.printed()[number].items()} == expected
    assert set(ffmsr.TABLES[number].keys()) == set(expected)


def test_tables_repeat_each_other():
    printed = ffmsr.printed()
    for key, number in printed[4].items():
        others = [printed[3].get(key), printed[6].get(key), printed[7].get(key)]
        assert all(other is None or other == number for other in others)
    assert all(printed[3][key].value == number.value for key, number in printed[5].items() if key.row == "ft")


def test_rows_stand_for_runs():
    spec = ffmsr.row_spec
    assert spec("ffmsr", "ffmsr", OFFICE) == RunSpec("ffmsr", "ffmsr", OFFICE)
    assert spec("ffmsr", "ffmsr", RETAIL) == RunSpec("ffmsr", "ffmsr", RETAIL, (("clusters", 90),))
    assert spec("without=gate", "ffmsr", OFFICE).settings == (("without", "gate"),)
    assert spec("clustering=kmeans++", "ffmsr", OFFICE).settings == (("clustering", "kmeans++"), ("centroid", "plain"))
    assert spec("clustering=birch", "ffmsr", RETAIL).settings == (("clustering", "birch"), ("clusters", 90))
    assert spec("text=pq", "ffmsr", RETAIL) == RunSpec("ft", "ffmsr", RETAIL, (("topology", "local"), ("text", "pq")))
    assert spec("ft", "unisrec", RETAIL) == RunSpec("ft", "unisrec", RETAIL, (("topology", "local"),))
    assert spec("ft", "ccdr", OFFICE) == RunSpec("ft", "ccdr", OFFICE, (("topology", "central"),))
    assert spec("semantics=true", "unisrec", OFFICE) == RunSpec("ffmsr", "unisrec", OFFICE, (
        ("semantics", True), ("text_layers", 3)))
    assert spec("semantics=true", "recbole:S3Rec", RETAIL) == RunSpec("ffmsr", "recbole:S3Rec", RETAIL, (
        ("semantics", True), ("clusters", 90)))
    assert spec("pfcr", "vqrec", RETAIL) == RunSpec("pfcr", "vqrec", RETAIL)


def test_every_row_of_ffmsr_is_a_setting_that_is_accepted(registry):
    for number in (4, 6, 7):
        for spec in ffmsr.TABLES[number].specs():
            fields = {**registry.get("method", spec.method).cls.Settings.__dataclass_fields__,
                      **registry.get("backbone", "ffmsr").cls.Settings.__dataclass_fields__}
            for name, value in spec.settings:
                choices = fields[name].metadata["choices"] if name in fields else ("local",)
                assert choices is None or value in choices


def test_a_paper_without_figures_is_refused(capsys):
    assert main(["figures", "--paper", "ffmsr"]) == 2
    assert "'ffmsr', which has tables alone; accepted: f3crec, fcucr" in capsys.readouterr().err


def test_a_table_that_cannot_be_built_says_why(capsys):
    assert main(["tables", "--paper", "ffmsr", "--table", "8"]) == 2
    assert "table 8 of ffmsr: it leaves out the users whom Office and Arts share" in capsys.readouterr().err
    assert 8 not in ffmsr.TABLES
