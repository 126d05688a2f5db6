"""The numbers of docs/results.md, and of an exercise in docs/domains.md, are those of the committed records."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import ROOT
from standing import FACTS

import fedcl_bench as fb
from fedcl_bench.experiments import papers
from fedcl_bench.experiments.papers import ffmsr
from fedcl_bench.reports.tables import Source, build
from fedcl_bench.runs.specs import Tuned
from fedcl_bench.runs.store import load_runs

PAGE = ROOT / "docs/results.md"
OFFICE = "amazon-office+amazon-arts"
RETAIL = "online-retail-ffmsr+amazon-pantry"


def short(value: float, decimals: int) -> str:
    """A number below 1 as the pages write it, without the zero before the point."""
    return f"{value:.{decimals}f}".removeprefix("0")


def rows_of(page: Path, heading: str) -> list[list[str]]:
    """The cells of the rows of the table whose heading line begins so; every table of the page."""
    lines, found = page.read_text(encoding="utf-8").splitlines(), []
    for start in [i for i, line in enumerate(lines) if line.startswith(heading)]:
        for line in lines[start + 2:]:
            if not line.startswith("|"):
                break
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def published(registry, folder: str, paper: str, number: int, tuned: Path | None = None, **settings) -> dict:
    """Our cells of a table, rebuilt from published records: (dataset, backbone, row, metric) to (mean, std, mark)."""
    source = Source(load_runs(ROOT / "results/published" / folder), registry, Tuned.of(tuned, ROOT),
                    tuple(settings.items()), None)
    built = build(paper, papers.get(paper).TABLES[number], source)
    return {(cell.key.dataset, cell.key.backbone, cell.key.row, cell.key.metric): (
                cell.mean, cell.std, " = FT" if cell.is_reference else "")
            for cell in built.cells() if cell.key.column in ("avg", "value") and cell.mean is not None}


@pytest.mark.parametrize("heading, folder, tuned, settings, count", [
    ("| dataset | backbone | FT |", "f3crec", "", {}, 9),
    ("| dataset, carried over | backbone | FT |", "f3crec-carried", "carried", {"reset_private": False}, 6)])
def test_f3crecs_numbers_are_those_of_the_records(registry, heading, folder, tuned, settings, count):
    cells = published(registry, folder, "f3crec", 2, ROOT / "results/tuned" / tuned, **settings)
    names = {"ML-100K": "ml-100k", "ML-Latest-Small": "ml-latest-small", "Last.FM 2K": "lastfm-2k"}
    printed = papers.get("f3crec").printed()[2]
    rows = rows_of(PAGE, heading)
    assert len(rows) == count
    for dataset, backbone, *shown in rows:
        dataset, backbone = names[dataset], backbone.lower()
        for method, text in zip(papers.get("f3crec").METHODS, shown, strict=True):
            if text == "–":
                assert (dataset, backbone, method, "ndcg@20") not in cells
                continue
            *numbers, mark = cells[dataset, backbone, method, "ndcg@20"]
            mean, std = (short(value, 4) for value in numbers)
            paper = printed[papers.Key(dataset, backbone, method, "ndcg@20", "avg")].value
            assert text == f"{mean} ± {std}{mark} [{short(paper, 4)}]"


LINES = {"Fed-GRU4Rec": ("gru4rec", "ft"), "FCUCR on GRU4Rec": ("gru4rec", "fcucr"), "Fed-SASRec": ("sasrec", "ft"),
         "FCUCR on SASRec": ("sasrec", "fcucr"), "Fed-TiSASRec": ("tisasrec", "ft"),
         "FCUCR on TiSASRec": ("tisasrec", "fcucr"), "&nbsp; without TASD": ("sasrec", "without=tasd"),
         "&nbsp; without IUPR": ("sasrec", "without=iupr"), "&nbsp; without both": ("sasrec", "without=both"),
         "PFedRec": ("pfedrec", "ft"), "FedRAP": ("fedrap", "ft"), "GPFedRec": ("gpfedrec", "ft"),
         "GPFedRec (3 seeds)": ("gpfedrec", "ft"), "Fed-DMI-GNN": ("dmi-gnn", "loss=bce"),
         "Fed-HearInt": ("hearint", "loss=bce"), "Fed-MiaSRec": ("miasrec", "loss=bce")}


def test_fcucrs_numbers_are_those_of_the_records(registry):
    """Both tables of docs/results.md, untuned and tuned, under both starts."""
    tables = {}
    for start in ("per_client", "server"):
        folder = "fcucr-tuned" + ("-server" if start == "server" else "")
        tuned = ROOT / "results/tuned" / folder.replace("-tuned", "")
        tables[False, start] = {**published(registry, "fcucr", "fcucr", 2, patience=0, init=start),
                                **published(registry, "fcucr", "fcucr", 3, patience=0, init=start)}
        tables[True, start] = published(registry, folder, "fcucr", 2, tuned, patience=5, init=start)
    for heading, tuned in (("| | own starts (re", False), ("| | own starts |", True)):
        rows = rows_of(PAGE, heading)
        assert len(rows) >= 8
        run = {(start, *cell[:3]) for start in ("per_client", "server") for cell in tables[tuned, start]}
        for name, *shown in rows:
            backbone, row = LINES[name]
            for start, (sampled, _, full) in (("per_client", shown[:3]), ("server", shown[3:])):
                if not sampled:
                    start_at_the_server = row == "ft" and backbone in ("pfedrec", "fedrap", "gpfedrec")
                    assert start_at_the_server or (start, "xing", backbone, row) not in run
                    continue
                found = {metric: tables[tuned, start]["xing", backbone, row, metric][0]
                         for metric in ("hit@10", "ndcg@10", "all:hit@10")}
                ours = [short(found[metric], 3) for metric in ("hit@10", "ndcg@10")]
                assert sampled.partition(" [")[0] == " / ".join(ours), name
                assert full == short(found["all:hit@10"], 4), name


def pilot_lines(registry) -> list[list[str]]:
    """FFMSR's pilot as the page has it: of every line of Tables 3-7 the table, its name, Recall@10 of both domains and
    their mean with its p, and the mean NDCG@10 with its p. A line of an earlier table is not repeated."""
    (reading,) = [reading for reading in FACTS["ffmsr"].readings if reading.folder]
    source = Source(load_runs(ROOT / "results/published" / reading.folder), registry, None, reading.settings, None)
    lines, earlier = [], set()
    for number in reading.tables:
        cells = {cell.key: cell for cell in build("ffmsr", ffmsr.TABLES[number], source, [OFFICE]).cells()}
        for backbone, row in dict.fromkeys((key.backbone, key.row) for key in cells):
            spec = ffmsr.row_spec(row, backbone, OFFICE)
            if spec in earlier:
                continue
            earlier.add(spec)
            name = ffmsr.label(number, row)
            if number == 3:
                name = ffmsr.label(3, backbone if row == "ft" else row)
            elif number == 5:
                name = f"{ffmsr.label(5, backbone)}, {name.lower()}"
            shown = [str(number), name]
            for metric, columns in (("recall@10", ("D0", "D1", "mean")), ("ndcg@10", ("mean",))):
                of_metric = [cells[papers.Key(OFFICE, backbone, row, metric, column)] for column in columns]
                shown += [" ± ".join(short(value, 4) for value in (cell.mean, cell.std) if value is not None) or "–"
                          for cell in of_metric]
                p = of_metric[-1].p
                shown.append("" if p is None or row == "ffmsr" else "< .0001" if p < 1e-4 else short(p, 4))
            lines.append(shown)
    return lines


def test_ffmsrs_pilot_is_that_of_the_records(registry):
    assert rows_of(PAGE, "| table | line | Office R@10") == pilot_lines(registry)


def retail_lines(folder: Path) -> list[list[str]]:
    """OnlineRetail and Pantry with all users as the page has them, the paper's in brackets."""
    printed, lines = papers.get("ffmsr").printed()[3], []
    for name, method, ties in (("SASRec", "ft", "random"), ("SASRec, ties as in the file", "ft", "file"),
                               ("FFMSR", "ffmsr", "random")):
        results = fb.load(folder, method, dataset=RETAIL, tie_order=ties)
        for column, domain in (("D0", "OnlineRetail"), ("D1", "Pantry")):
            of_paper = "recbole:SASRec" if method == "ft" else method
            shown = [name, str(len(results.seeds)), domain]
            for metric in ("recall@10", "ndcg@10", "recall@50", "ndcg@50"):
                ours = results.table()[RETAIL.split("+")[int(column[1])]][metric].replace("0.", ".")
                paper = printed[papers.Key(RETAIL, of_paper, method, metric, column)].value
                shown.append(f"{ours} [{short(paper, 4)}]")
            lines.append(shown)
    return lines


def test_online_retail_and_pantry_are_those_of_the_records():
    assert rows_of(PAGE, "| line | seeds |") == retail_lines(ROOT / "results/published/ffmsr-retail")


def compared(results: fb.Results, alone: fb.Results, metrics: list[str]) -> list[str]:
    """Of each metric the mean of both domains, and p against training alone."""
    cells = []
    for metric in metrics:
        p = results.compare(alone, metric)["p"].item() if results is not alone else None
        cells += [results.table().loc[metric, "mean"].replace("0.", "."),
                  "" if p is None else "< .0001" if p < 0.0001 else short(p, 4 if p < 0.01 else 2)]
    return cells


def of_domains(results: fb.Results, metric: str) -> list[str]:
    return [text.replace("0.", ".") for text in results.table().loc[metric][:-1]]


def test_the_exercises_table_is_that_of_its_records():
    """Domains with and without common users."""
    lines = []
    for common in ("half", "none"):
        runs = {topology: fb.load(ROOT / "results/domains", backbone="sasrec", dataset=f"phone+electronic-{common}",
                                  topology=topology) for topology in ("federated", "local", "central")}
        lines += [[common, f"`{topology}`", *of_domains(results, "ndcg@50"),
                   *compared(results, runs["local"], ["ndcg@50", "recall@10"])] for topology, results in runs.items()]
    assert rows_of(ROOT / "docs/domains.md", "| common |") == lines


def test_what_knowing_users_changes_is_that_of_its_records():
    lines, untold = [], fb.load(ROOT / "results/domains", backbone="recguru", dataset="phone+electronic-half",
                                known_users=False)
    for common, known in (("half", False), ("half", True), ("none", False)):
        runs = fb.load(ROOT / "results/domains", backbone="recguru", dataset=f"phone+electronic-{common}",
                       known_users=known)
        alone = untold if known else runs
        lines.append([common, "yes" if known else "no", *of_domains(runs, "ndcg@50"),
                      *compared(runs, alone, ["ndcg@50", "recall@10"])])
        if known:
            compared_by_user = runs.compare(untold, "ndcg@50")
            assert short(-compared_by_user["difference"].item(), 4) == ".0005"
            assert short(compared_by_user["seed_p"].item(), 2) == ".38"
    assert rows_of(ROOT / "docs/domains.md", "| pair | known |") == lines


def test_mergerecs_pilot_is_that_of_its_records():
    folder, pilot = ROOT / "results/domains", {"dataset": RETAIL, "pilot_users": 1000}
    runs = {"alone": fb.load(folder, "ft", topology="local", **pilot),
            "averaged in every round": fb.load(folder, "ft", topology="federated", **pilot),
            "merged once": fb.load(folder, "mergerec", **pilot)}
    lines = [[name, *of_domains(results, "recall@10"), *compared(results, runs["alone"], ["recall@10", "ndcg@50"])]
             for name, results in runs.items()]
    assert rows_of(ROOT / "docs/domain_methods.md", "| trained |") == lines
