"""The reproduction page: every printed number present with its standing, the same bytes every time."""

from __future__ import annotations

import re

import pytest
from fabricate import fabricate, level
from helpers import ROOT

from fedcl_bench.cli.main import main
from fedcl_bench.experiments.papers import f3crec
from fedcl_bench.reports.pages import FOLDER, index
from fedcl_bench.reports.reproduction import page
from fedcl_bench.reports.tables import Source
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.records.store import load_runs

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
        marks = re.findall(r"[✓↗✗○∅] (?:–|[+-]?[\d.]+)[^|]* \(([^)]+)\)", section)
        printed = [cell.text.lstrip("-+") for cell in f3crec.printed()[number].values()]
        assert sorted(mark.lstrip("-+") for mark in marks) == sorted(printed)


def test_cells_sections_and_records(results, registry):
    text = make(results, registry)
    section = text.split("### ML-100K on FedMF")[1].split("###")[0]
    assert "✓ 0.0865 ± 0.0010 (0.0855) +0.0010" in section  # Avg of FT
    assert re.search(r"- Records of FT \(seeds 0-2\): ([0-9a-f]{8} ?){3}\n", section)
    assert ("`run_bench.py grid --paper f3crec --table 2 --datasets ml-100k --backbones fedmf --seeds 3`") in section
    assert "</sup> Open: no record." in section
    hetrec = text.split("### HetRec2011 on FedMF")[1].split("###")[0]
    assert "56 ∅." in hetrec and f"Data not available: {f3crec.WITHOUT_DATA['hetrec2011-ml']}." in hetrec
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
    assert row.split("|")[6:-1] == [*(f" {count} " for count in sums), f" {sums[1] / sums[0]:.0%} "]
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
