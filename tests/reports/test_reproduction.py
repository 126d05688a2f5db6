"""The reproduction page: every status by its rule, every printed number present, the same bytes every time."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from fabricate import fabricate, level
from helpers import ROOT
from scipy import stats

from fedcl_bench.cli.main import main
from fedcl_bench.experiments.papers import Key, Printed, f3crec
from fedcl_bench.reports.pages import FOLDER, index
from fedcl_bench.reports.reproduction import Status, half_width, page, status
from fedcl_bench.reports.tables import Cell, Source
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.runs.store import load_runs

KEY = Key("ml-100k", "fedmf", "kd", "ndcg@20", "avg")
CELL = Cell(KEY, 4, mean=0.1, std=0.002, seeds=(0, 1, 2, 3, 4), printed=Printed("0.1000"))
HALF = 2.7764451051977987 * 0.002 * math.sqrt(1.2)  # t(.975, 4)


def test_interval_is_that_of_one_more_run():
    assert half_width(0.002, 5) == pytest.approx(HALF)
    assert half_width(1.0, 100000) == pytest.approx(stats.norm.ppf(0.975), rel=1e-4)


@pytest.mark.parametrize("mean,printed,kind", [
    (0.1, "0.1000", "reproduced"), (0.1 + HALF, "0.1000", "reproduced"), (0.1 + HALF + 0.00004, "0.1000", "reproduced"),
    (0.1 + HALF + 0.00006, "0.1000", "higher"), (0.1 - HALF - 0.00006, "0.1000", "lower"),
    (0.03, "0.0345", "inconclusive"), (0.03, "0.0315", "reproduced"), (0.03, "0.0400", "lower")])
def test_status_follows_the_interval(mean, printed, kind):
    """The paper's rounding counts; a number inside the interval but more than 10 % away is inconclusive."""
    assert status(replace(CELL, mean=mean, printed=Printed(printed))) == Status(kind)


def test_changes_are_near_within_five_points():
    change = replace(CELL, key=KEY._replace(column="change"), decimals=2, mean=10.0, std=10.0, printed=Printed("14.90"))
    assert status(change) == Status("reproduced")
    assert status(replace(change, printed=Printed("15.10"))) == Status("inconclusive")
    assert status(replace(change, std=1.0, printed=Printed("-5.00"))) == Status("higher")


def test_what_cannot_be_checked():
    assert status(replace(CELL, printed=None)) is None
    assert status(replace(CELL, printed=Printed("OOM"))).reason == "the paper's run went out of memory"
    assert status(replace(CELL, contradiction="it says so")) == Status("unchecked", "it says so")
    assert status(replace(CELL, mean=None, missing="no record")) == Status("unchecked", "no record")
    assert status(replace(CELL, seeds=(0, 1))) == Status("unchecked", "fewer than 3 seeds")
    assert status(replace(CELL, seeds=(0,), std=None)) == Status("unchecked", "fewer than 3 seeds")


def test_statistics_must_be_equal():
    count = Cell(Key("ml-100k", "", "interactions", "", "D0"), 0, mean=58771.0, printed=Printed("58771"))
    assert status(count) == Status("reproduced")
    assert status(replace(count, mean=58772.0)) == Status("higher")
    sparsity = replace(count, decimals=2, mean=91.19, printed=Printed("91.19"))
    assert status(sparsity) == Status("reproduced") and status(replace(sparsity, mean=91.18)) == Status("lower")


@pytest.fixture(scope="module")
def results(registry, tmp_path_factory):
    """ML-100K: F3CRec leads FT on FedMF and trails it on FedNCF; KD only on FedMF."""
    folder = tmp_path_factory.mktemp("reproduction")
    for i, (backbone, method, mean) in enumerate((
            ("fedmf", "ft", 0.0655), ("fedmf", "kd", 0.074), ("fedmf", "f3crec", 0.0834),
            ("fedncf", "ft", 0.09), ("fedncf", "f3crec", 0.08))):
        for seed in range(3):
            fabricate(folder, registry, RunSpec(method, backbone, "ml-100k"), seed, level(mean, gap=0.001, noise=i))
    return folder


def make(folder, registry, numbers=(2,), **only):
    source = Source(load_runs(folder), registry, None, (), lambda dataset: {})
    return page("f3crec", [f3crec.TABLES[n] for n in numbers], source, "run_bench.py reproduction", **only)


def line(text, start):
    (found,) = [line for line in text.splitlines() if line.startswith(start)]
    return found


def test_leads_are_reported_with_evidence(results, registry):
    text = make(results, registry)
    found = line(text, "| ML-100K | FedMF | +")
    assert "| +0.0179 | +0.0179 | < 0.0001 | 40 | 3 of 3 | **yes** | τ +1.00 (3 methods) |" in found
    found = line(text, "| ML-100K | FedNCF | -")
    assert "-0.0100 | +0.0133 | < 0.0001 | 40 | 0 of 3 | **no** | – |" in found
    found = line(text, "| Lastfm-2K | FedNCF |")
    assert found.endswith("| +0.0090 | | | | cannot be checked: no record | – |")  # of the paper's D1-D3, not its Avg


def test_every_printed_number_is_on_the_page(results, registry):
    text = make(results, registry, range(2, 9))
    for number in range(2, 9):
        section = re.split(r"(?m)^## ", text)[[s.split(":")[0] for s in re.split(r"(?m)^## ", text)].index(
            f"Table {number}")]
        marks = re.findall(r"[✓~▲▼?] (?:–|[+-]?[\d.]+)[^|]* \(([^)]+)\)", section)
        printed = [cell.text.lstrip("-+") for cell in f3crec.printed()[number].values()]
        assert sorted(mark.lstrip("-+") for mark in marks) == sorted(printed)


def test_cells_sections_and_records(results, registry):
    text = make(results, registry)
    section = text.split("### ML-100K on FedMF")[1].split("###")[0]
    assert "✓ 0.0865 ± 0.0010 (0.0855) +0.0010" in section  # Avg of FT
    assert re.search(r"- Records of FT \(seeds 0-2\): ([0-9a-f]{8} ?){3}\n", section)
    assert ("`run_bench.py grid --paper f3crec --table 2 --datasets ml-100k --backbones fedmf --seeds 3`") in section
    assert "Cannot be checked: no record." in section
    hetrec = text.split("### HetRec2011 on FedMF")[1].split("###")[0]
    assert "the paper's run went out of memory" in hetrec and "the mean of its D1-D3 is 0.1112" in hetrec
    rows = [row for row in text.splitlines() if row.startswith("| 2 ")]
    numbers = [int(x) for x in rows[0].split("|")[3:-1]]
    assert int(rows[0].split("|")[2]) == sum(numbers) == 552 + 24 + 114


def test_same_records_same_page(results, registry):
    assert make(results, registry) == make(results, registry)
    only = make(results, registry, datasets=["ml-100k"], backbones=["fedmf"])
    assert "FedNCF" not in only and "Lastfm-2K" not in only


def test_command(results, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduction", "--records", str(results), "--datasets", "ml-100k"]) == 0
    assert capsys.readouterr().out == "results/pages/reproduction.md\n"
    text = (tmp_path / "results/pages/reproduction.md").read_text()
    assert f"`run_bench.py reproduction --records {results.name} --datasets ml-100k`" in text
    assert "| 1 Data statistics | 16 | 16 | 0 |" in text
    listed = (tmp_path / "results/pages/README.md").read_text()
    (row,) = [row for row in listed.splitlines() if "(reproduction.md" in row]
    rows = [[int(x) for x in row.split("|")[2:-1]] for row in text.splitlines() if re.match(r"\| [1-8] \w", row)]
    sums = [sum(column) for column in zip(*rows)]
    assert len(rows) == 8 and sums[0] == sum(sums[1:])
    assert row.split("|")[6:-1] == [*(f" {count} " for count in sums), f" {sums[1] / (sums[0] - sums[5]):.0%} "]
    (tmp_path / "elsewhere").mkdir()
    assert main(["reproduction", "--records", str(results), "--table", "1", "--out", "elsewhere/page.md"]) == 0
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["page.md"]
    capsys.readouterr()
    assert main(["reproduction", "--records", "nowhere"]) == 2 and "no folder nowhere" in capsys.readouterr().err
    assert main(["reproduction", "--records", str(results), "--out", "results"]) == 2
    assert "results: cannot be written" in capsys.readouterr().err


def test_the_index_is_that_of_the_pages():
    pages = ROOT / FOLDER
    assert (pages / "README.md").read_text(encoding="utf-8") == index(pages)
