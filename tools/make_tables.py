"""Write the tables that pages take from plugins and records: python tools/make_tables.py [PAGE ...]

A page says where a table stands, and which: ``<!-- table: NAME ARGUMENT ... -->``. What lies between that line and
``<!-- end -->`` is replaced by what the function of that name in ``TABLES`` returns. tests/test_docs.py compares
the pages with it.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product, takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Callable, Iterable, Sequence

import pandas as pd

import fedcl_bench as fb
from fedcl_bench.audit.leaks import shipped_papers
from fedcl_bench.core.settings import as_text, describe
from fedcl_bench.experiments import papers
from fedcl_bench.experiments.sensitivity import settings_of, value_text
from fedcl_bench.records.store import Run, load_runs, user_scores
from fedcl_bench.reports.comparison import headroom_rows, paired_tests
from fedcl_bench.reports.selection import Source, find
from fedcl_bench.runs.config import CORE_SETTINGS
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.specs import RunSpec
from fedcl_bench.stats.significance import LEVEL, compare_paired, holm

ROOT = Path(__file__).resolve().parents[1]
BETWEEN = re.compile(r"(<!-- table: ([^\n]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
SETS = {"ml-100k": "ML-100K", "ml-latest-small": "ML-Latest-Small", "lastfm-2k": "Last.FM 2K"}
OF_BLOCKS = {"fedmf": "FedMF", "fedncf": "FedNCF", "pfedrec": "PFedRec"}
OF_SESSIONS = {"gru4rec": "GRU4Rec", "sasrec": "SASRec", "tisasrec": "TiSASRec"}
BACKBONES = {**OF_BLOCKS, **OF_SESSIONS}
BOUNDS = ("joint", "joint-warm", "central", "recbole:ItemKNN", "recbole:EASE", "recbole:BPR", "recbole:LightGCN",
          "recbole:SASRec", "sknn", "recency", "popularity", "frozen", "alone", "f3crec", "fcucr")
NEWER = ("ader", "fedprox", "scaffold", "colr", "ifedrec", "fedcia", "canonfedrec", "ccd")
STATIC = {**OF_BLOCKS, "fedrap": "FedRAP", "gpfedrec": "GPFedRec"}
RETAIL = "online-retail-ffmsr+amazon-pantry"


def written(text: str) -> str:
    """A page with its tables made anew."""
    def table(found: re.Match) -> str:
        name, *arguments = found[2].split()
        return f"{found[1]}{TABLES[name](*arguments)}\n{found[3]}"
    return BETWEEN.sub(table, text)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def short(value: float | str, decimals: int = 4) -> str:
    """A number below 1 without the zero before its point."""
    text = f"{float(value):.{decimals}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def signed(value: float | str, decimals: int = 4) -> str:
    return ("-" if float(value) < 0 else "+") + short(abs(float(value)), decimals)


def p_value(p: float | str) -> str:
    return "" if p in ("", None) else "< .0001" if float(p) < 1e-4 else short(p, 4 if float(p) < 1e-3 else 3)


@cache
def published(folder: str) -> list[Run]:
    """The runs of a folder of results/published."""
    return load_runs(ROOT / "results/published" / folder)


def loaded(folder: str, *names: str, **settings: object) -> fb.Results:
    """The runs of a method, backbone and dataset in a folder of results/published."""
    return fb.load(ROOT / "results/published" / folder, *names, **settings)


@cache
def rows_of(path: str) -> tuple[dict[str, str], ...]:
    with open(ROOT / path, newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def where(path: str, **values: str) -> list[dict[str, str]]:
    """The rows of a CSV file that have these values."""
    return [row for row in rows_of(path) if all(row[name] == value for name, value in values.items())]


def standing(**values: str) -> list[dict[str, str]]:
    return where("results/pages/standing.csv", **values)


# Plugins

def ambiguities(*plugins: str) -> str:
    """Settings in which a paper and its code differ or leave something open, of METHOD/BACKBONE[@DATASET]."""
    registry, rows, seen = discover(), [], set()
    for plugin in plugins:
        names, _, dataset = plugin.partition("@")
        method, backbone = names.split("/")
        usual = settings_of(registry, RunSpec(method, backbone, dataset or "ml-100k"), None)
        settings = (*CORE_SETTINGS, *(registry.get(kind, name).cls.Settings
                                      for kind, name in (("method", method), ("backbone", backbone))))
        helps = {row[0]: row[3] for of in settings for row in describe(of)}
        for kind, name in (("method", method), ("backbone", backbone)):
            for setting, values in registry.get(kind, name).cls.ambiguities.items():
                if (name, setting) in seen:
                    continue
                seen.add((name, setting))
                default = next((value for value in values if as_text(value) == as_text(usual[setting])), None)
                told = {value: f"{value_text(value)} ({whose})" for value, whose in values.items()}
                rows.append([name, f"`{setting}`", helps[setting].replace("|", "\\|"),
                             told.get(default, value_text(usual[setting])),
                             "; ".join(text for value, text in told.items() if value is not default)])
    return markdown(("plugin", "setting", "what it decides", "default", "other"), rows)


def leaks() -> str:
    """The protocols of papers, with what predictors reach that use one channel alone."""
    rows = [{"protocol": f"{row['protocol']}, {row['metric']}",
             **{name: value.replace("0.", ".") for name, value in row.items()
                if name not in ("protocol", "dataset", "metric")}} for row in shipped_papers()]
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


# Records

@cache
def bounds() -> dict[tuple[str, str], dict[str, list]]:
    """The runs with bounds: (backbone, dataset) to method to its runs."""
    cells: dict[tuple[str, str], dict[str, list]] = {}
    for backbone in OF_BLOCKS:
        for dataset in SETS:
            for run in published("bounds"):
                if run.head["dataset"] == dataset and run.head["backbone"] in (backbone, "none") and not (
                        run.head["settings"].get("mask_history", False)):
                    cells.setdefault((backbone, dataset), {}).setdefault(run.head["method"], []).append(run)
    return {cell: methods for cell, methods in cells.items() if {"ft", "joint"} <= methods.keys()}


def headroom() -> str:
    """Gains over FT in N@20, mean of blocks 1 to 3, of bounds and methods; an asterisk where 0 is outside of the 95 %
    interval over users and seeds."""
    cells = {cell: {row.method: row for row in headroom_rows(methods, "ft", "joint", "ndcg@20")}
             for cell, methods in bounds().items()}
    names = [name for name in BOUNDS if any(name in rows for rows in cells.values())]

    def gain(rows: dict, name: str) -> str:
        if name not in rows:
            return ""
        mean, low, high = rows[name].against.gain
        return signed(mean) + "*" * (low > 0.0 or high < 0.0)
    return markdown(["N@20", *(f"{BACKBONES[backbone]}, {SETS[dataset]}" for backbone, dataset in cells)], [
        ["FT", *(short(rows["ft"].mean) for rows in cells.values())],
        *([f"`{name}`", *(gain(rows, name) for rows in cells.values())] for name in names)])


@dataclass(frozen=True)
class Shares:
    """A table of gains over a reference and of shares of what a bound gains."""

    folders: tuple[str, ...]  # of results/published, whose runs have default settings but for ``settings``
    backbones: tuple[str, ...]
    dataset: str
    settings: dict[str, object]
    methods: dict[str, str]  # by the names of their rows, with settings of their own; first the reference and the bound
    metrics: dict[str, str]  # by their titles
    head: str  # above the rows' names
    decimals: int = 3


SHARES = {
    "xing": Shares(("fcucr", "bounds"), tuple(OF_SESSIONS), "xing", {"patience": 0},
                   {"FT": "ft", "`central`": "central", "`sknn`": "sknn", "`fcucr`": "fcucr"},
                   {"among 100": "hit@10", "among all": "all:hit@10"}, "HR@10"),
    "domains": Shares(("bounds",), ("sasrec",), "amazon-office+amazon-arts", {
        "pilot_users": 2000, "pilot_core": 2, "dim": 64, "max_length": 20, "lr": 0.003, "rounds": 20, "patience": 5},
                      {f"`topology={name}`": f"ft:topology={name}" for name in ("local", "central", "federated")},
                      {"R@10": "recall@10", "N@50": "ndcg@50"}, "mean of domains", 4)}


def shares(name: str) -> str:
    """A reference, and gains over it of a bound and of methods with an asterisk as in ``headroom`` and, in brackets,
    their share of the bound's."""
    table, cells = SHARES[name], {}
    every = [run for folder in table.folders for run in published(folder)]
    source = Source(every, discover(), assignments=tuple(table.settings.items()))
    reference, bound, *_ = table.methods
    for backbone in table.backbones:
        runs = {row: found for row, method in table.methods.items()
                if (found := find(source, RunSpec.of(method, backbone, table.dataset))[0])}
        cells |= {(backbone, metric): {row.method: row for row in headroom_rows(runs, reference, bound, metric)}
                  for metric in table.metrics.values()}

    def gain(rows: dict, method: str) -> str:
        against = rows[method].against
        mean, low, high = against.gain
        share = f" ({short(against.share[0], 2)})" if against.share and method != bound else ""
        return signed(mean, table.decimals) + "*" * (low > 0.0 or high < 0.0) + share
    titles = {metric: title for title, metric in table.metrics.items()}
    return markdown([table.head, *(f"{BACKBONES[backbone]}, {titles[metric]}" for backbone, metric in cells)], [
        [reference, *(short(rows[reference].mean, table.decimals) for rows in cells.values())],
        *([method, *(gain(rows, method) for rows in cells.values())] for method in table.methods
          if method != reference)])


POOLS = {"untrained": "all not trained on", "untouched": "released"}
STATIC_SETS = {"ml-100k": "ML-100K", "ml-1m": "ML-1M"}
CANDIDATES = {"sampled": "among 100", "all": "among all"}


@cache
def leaks_runs() -> dict[tuple[str, str], dict[str, dict[str, list]]]:
    """The runs of static streams: (dataset, candidates) to pool to backbone to its runs."""
    found: dict[tuple[str, str], dict[str, dict[str, list]]] = {}
    for run in published("leaks"):
        s, head = run.head["settings"], run.head
        of = found.setdefault((head["dataset"], s["candidates"]), {}).setdefault(s["negative_pool"], {})
        of.setdefault(head["backbone"], []).append(run)
    return found


@cache
def leaks_ranks(dataset: str, candidates: str, pool: str) -> dict[str, tuple[list[float], int]]:
    """HR@10 of every seed and the rank of each backbone: 1 + how many are above it by a paired test over users of which
    Holm's p among all pairs is below .05."""
    runs = leaks_runs()[dataset, candidates][pool]
    scores = {name: user_scores(of, "hit@10") for name, of in runs.items()}
    pairs = list(combinations(scores, 2))
    tests = [compare_paired(*pd.concat([scores[name] for name in pair], axis=1).dropna().T.to_numpy(), draws=1)
             for pair in pairs]
    above = Counter(pair[test.difference > 0] for pair, test, p in zip(pairs, tests, holm([t.p for t in tests]))
                    if p < LEVEL)
    return {name: ([run.meta["metrics"]["hit@10"]["per_block"][0] for run in of], 1 + above[name])
            for name, of in runs.items()}


def leaks_grid() -> str:
    """HR@10 of backbones by pool of negatives and candidates, with the rank of each among them."""
    columns = [(each, pool) for each in CANDIDATES for pool in POOLS]
    rows = []
    for dataset, name in product(STATIC_SETS, STATIC):
        cells = [leaks_ranks(dataset, *column).get(name) if (dataset, column[0]) in leaks_runs() else None
                 for column in columns]
        if any(cells):
            rows.append([f"{STATIC[name]}, {STATIC_SETS[dataset]}", *(
                f"{over_seeds(cell[0]) if len(cell[0]) > 1 else short(cell[0][0], 3)} ({cell[1]})" if cell else ""
                for cell in cells)])
    return markdown(["HR@10 (rank)", *(f"{CANDIDATES[each]}, {POOLS[pool]}" for each, pool in columns)], rows)


def f3crec_leads() -> str:
    """N@20 of FT and F3CRec, mean of blocks 1 to 3, under every combination of choices that is published."""
    rows = []
    for dataset, title in SETS.items():
        for backbone in OF_BLOCKS:
            of = {line["row"]: line for line in standing(paper="f3crec", table="2", dataset=dataset, backbone=backbone,
                                                         metric="ndcg@20", column="avg")}
            mine, ft = of["f3crec"], of["ft"]
            printed = [_printed_blocks(line) for line in (ft, mine)]  # by which the paper's methods are compared
            rows.append([f"{BACKBONES[backbone]}, {title}", *(
                f"{short(line['ours'])} [{short(line['printed'])}"
                + f"; by blocks {short(blocks)}" * (abs(blocks - float(line["printed"])) > 0.001) + "]"
                for line, blocks in zip((ft, mine), printed)),
                         f"{signed(mine['difference'])} [{signed(printed[1] - printed[0])}]",
                         f"{p_value(mine['p'])}, {p_value(mine['seed_p'])}", short(mine["detectable"]),
                         *_carried(backbone, dataset)])
    return markdown(["backbone, dataset", "FT", "F3CRec", "lead", "p over users, seeds", "detectable", "carried: lead",
                     "p over users, seeds"], rows)


def _printed_blocks(line: dict[str, str]) -> float:
    """The mean of what the paper prints for blocks 1 to 3, which its average contradicts here and there."""
    same = {name: line[name] for name in ("paper", "table", "dataset", "backbone", "row", "metric")}
    return mean(float(standing(**same, column=f"D{block}")[0]["printed"]) for block in (1, 2, 3))


def _carried(backbone: str, dataset: str) -> list[str]:
    """Lead and p with private parameters that go on from block to block."""
    if backbone == "fedmf":
        return ["", ""]
    (lead,) = _compare("f3crec-carried", backbone, dataset, "ft")
    return [signed(lead["difference"]), _p_values(lead)]


def _p_values(test: dict) -> str:
    """Of a paired test over users, and over seeds."""
    return f"{p_value(test['p'])}, {p_value(test['seed_p'])}"


def _compare(folder: str, backbone: str, dataset: str, *against: str) -> list[dict]:
    """Rows of paired tests of F3CRec over the runs of a published folder, which has one combination of each method."""
    mine, *others = (loaded(folder, method, backbone, dataset) for method in ("f3crec", *against))
    return mine.compare(others).to_dict("records")


def f3crec_released() -> str:
    """F3CRec on FedMF, ML-100K, with the released settings and split file, against the others."""
    tests = _compare("f3crec-authors-split", "fedmf", "ml-100k", "ft", "reg", "kd")
    return markdown(["F3CRec against", "lead", "p", "Holm", "p over seeds"], [
        [row["against"], signed(row["difference"]), *(p_value(row[name]) for name in ("p", "p_holm", "seed_p"))]
        for row in tests])


def f3crec_sensitivity() -> str:
    """What every ambiguity moves that moves anything: N@20 and the lead over FT, on three backbones."""
    tables = {name: {row["setting"]: row for row in rows_of(f"results/sensitivity/f3crec-{name}.csv")}
              for name in OF_BLOCKS}
    first = [table[""] for table in tables.values()]
    rows = [["by default", *(f"{_mean(line['value'])}, {_mean(line['lead'])}" for line in first)]]
    for setting in dict.fromkeys(setting for table in tables.values() for setting in table if setting):
        of = [table.get(setting) for table in tables.values()]
        if not any(row and float(_mean(row["change"])) for row in of):
            continue
        others = {re.split(r" \(|:", row["other"])[0] for row in of if row}  # without whose, or which settings
        other = others.pop() if len(others) == 1 else "the other"
        rows.append([f"`{setting}`: {other}",
                     *(f"{_mean(row['change'])}, {_mean(row['lead_change'])}" if row else "" for row in of)])
    return markdown(["changed alone", *OF_BLOCKS.values()], rows)


def _mean(text: str) -> str:
    return text.partition(" ±")[0]


def of_table(results: fb.Results, metric: str) -> str:
    """A metric's mean over seeds in the first column of a run's table."""
    return short(_mean(results.table().loc[metric].iloc[0]), 3)


# FCUCR itself among the published runs of its tables and figures, each of which has another value of one of these.
_FCUCR = {"without": "none", "neighbours": 20, "window": 0, "transfer_interval": 1, "lambda_tasd": 10.0,
          "prototype_noise": 0.0, "upload_noise": 0.0, "transfer": "after"}


def fcucr_starts() -> str:
    """HR@10 of FCUCR and its backbones under both starts, with the released choices and tuned."""
    rows = []
    for title, own, common in (("released choices", "fcucr/tables", "fcucr/tables-server"),
                               ("tuned", "fcucr-tuned/tables", "fcucr-tuned-server/tables")):
        patience = {"patience": 0} if title == "released choices" else {}
        for backbone in OF_SESSIONS:
            cells = []
            for tables, init in ((own, "per_client"), (common, "server")):
                of = {row["row"]: row for row in where(f"results/published/{tables}/table2.csv", backbone=backbone,
                                                       metric="hit@10")}
                usual = {"early_session": False, "weighting": "uniform"}
                ft, mine = (loaded(tables.partition("/")[0], name, backbone, "xing", init=init, **patience, **more)
                            for name, more in (("ft", usual), ("fcucr", {**usual, **_FCUCR} if patience else usual)))
                (test,) = mine.compare(ft, metric="hit@10").to_dict("records")
                cells += [short(of["ft"]["mean"], 3), short(of["fcucr"]["mean"], 3), _p_values(test)]
            rows.append([f"{BACKBONES[backbone]}, {title}", *cells])
    p = "p over users, seeds"
    return markdown(["backbone", "own starts: FT", "FCUCR", p, "common start: FT", "FCUCR", p], rows)


def fcucr_paper() -> str:
    """HR@10 of FCUCR and its ablations as the paper prints them, all ambiguities at once, against FT with what they
    share."""
    rows = []
    for backbone, title in OF_SESSIONS.items():
        chosen = {"backbone": backbone, "dataset": "xing", "weighting": "interactions", "init": "server"}
        lines = {"FT": loaded("fcucr", "ft", **chosen)} | {
            name: loaded("fcucr", "fcucr", **chosen, without=without) for name, without in (
                ("FCUCR", "none"), ("without TASD", "tasd"), ("without IUPR", "iupr"), ("head alone", "both"))}
        for name, results in lines.items():
            tested = ["", "", ""]
            if name != "FT":
                (found,) = results.compare("ft", metric="hit@10").to_dict("records")
                tested = [signed(found["difference"], 3), p_value(found["p"]), p_value(found["seed_p"])]
            rows.append([f"{title}, {name}", of_table(results, "hit@10"), *tested])
    return markdown(["line", "HR@10", "lead over FT", "p over users", "p over seeds"], rows)


def fcucr_noise() -> str:
    """HR@10 of FCUCR on SASRec by the standard deviation of noise on what clients receive, and on what they send."""
    rows = []
    for setting, title in (("prototype_noise", "Gaussian, on received prototypes (code)"),
                           ("upload_noise", "Laplace, on uploads (paper)")):
        cells = []
        for value in papers.get("fcucr").noise_values(setting):
            chosen = {**_FCUCR, setting: value, "init": "per_client", "patience": 0, "early_session": False}
            cells.append(of_table(loaded("fcucr", "fcucr", "sasrec", "xing", **chosen), "hit@10"))
        rows.append([title, *cells])
    return markdown(["noise", *map(str, papers.get("fcucr").NOISE)], rows)


def weighted_noise() -> str:
    """FT on BiasMF under noise on uploads that the mean weights by interactions."""
    rows = []
    for noise in (0.0, 0.01, 0.1):
        average = loaded("weighted-noise", "ft", "biasmf", "ml-100k", upload_noise=noise,
                         weighting="interactions").table().iloc[:, -1]
        rows.append([f"{noise:g}", *(" ± ".join(map(short, average[metric].split(" ± ")))
                                     for metric in ("ndcg@20", "recall@20"))])
    return markdown(["noise b", "N@20", "R@20"], rows)


def fcucr_baselines() -> str:
    """HR@10 of every line of Table 2, among 100 sampled items and among all."""
    rows = []
    for line in where("results/published/fcucr/tables/table2.csv", metric="hit@10"):
        if line["mean"] and line["backbone"] not in OF_SESSIONS:
            (every,) = where("results/published/fcucr/tables/table2.csv", metric="all:hit@10",
                             backbone=line["backbone"], row=line["row"])
            rows.append([f"`{line['backbone']}`", f"{short(line['mean'], 3)} [{short(line['paper'], 3)}]",
                         short(every["mean"], 3)])
    for backbone in ("dmi-gnn", "hearint", "miasrec"):
        results = loaded("fcucr-cross-entropy", "ft", backbone, "xing", loss="cross_entropy")
        rows.append([f"`{backbone}`, `loss=cross_entropy`",
                     *(of_table(results, metric) for metric in ("hit@10", "all:hit@10"))])
    for line in where("results/published/fcucr/tables/table3.csv", metric="hit@10", backbone="sasrec"):
        (every,) = where("results/published/fcucr/tables/table3.csv", metric="all:hit@10", backbone="sasrec",
                         row=line["row"])
        paper = f" [{short(line['paper'], 3)}]" if line["paper"] else ""
        rows.append([f"FCUCR on SASRec{', ' if line['row'] != 'fcucr' else ''}{line['row'].replace('fcucr', '')}",
                     short(line["mean"], 3) + paper, short(every["mean"], 3)])
    return markdown(["line", "among 100", "among all"], rows)


def ffmsr_retail() -> str:
    """OnlineRetail and Pantry with all users: Recall@10, the paper's in brackets."""
    printed, rows = papers.get("ffmsr").printed()[3], []
    for name, method, backbone, ties in (("SASRec", "ft", "sasrec", "random"),
                                         ("SASRec, ties as in the file", "ft", "sasrec", "file"),
                                         ("UniSRec", "ft", "unisrec", "random"), ("PFCR", "pfcr", "vqrec", "random"),
                                         ("FFMSR", "ffmsr", "ffmsr", "random")):
        results = loaded("ffmsr-retail", method, backbone, dataset=RETAIL, tie_order=ties)
        key = ("recbole:SASRec" if backbone == "sasrec" else backbone, method, "recall@10")
        rows.append([name, str(len(results.seeds)), *(
            f"{results.table()[domain]['recall@10'].replace('0.', '.')} "
            f"[{short(printed[papers.Key(RETAIL, *key, column)].value)}]"
            for column, domain in zip(("D0", "D1"), RETAIL.split("+")))])
    return markdown(["line", "seeds", "OnlineRetail", "Pantry"], rows)


def mergerec_pilot() -> str:
    """Recall@10 of models trained alone, averaged in every round, and merged once."""
    folder, pilot = ROOT / "results/domains", {"dataset": RETAIL, "pilot_users": 1000}
    runs = {"alone": fb.load(folder, "ft", topology="local", **pilot),
            "averaged in every round": fb.load(folder, "ft", topology="federated", **pilot),
            "merged once": fb.load(folder, "mergerec", **pilot)}
    rows = [[name, *(text.replace("0.", ".") for text in results.table().loc["recall@10"]),
             "" if name == "alone" else _p_values(results.compare(runs["alone"], "recall@10").iloc[0])]
            for name, results in runs.items()]
    return markdown(["trained", "OnlineRetail", "Pantry", "mean", "p over users, seeds"], rows)


# What the tutorial prints as expected, of dense and of sparse data, and what our data of the kinds are.
EXPECTED = {"dense": {"precision@10": (.15, .30), "ndcg@10": (.25, .45)},
            "sparse": {"precision@10": (.05, .15), "ndcg@10": (.10, .25)}}
TUTORIAL_DATA = {"tutorial": "uniform", "tastes": "tastes"}


def over_seeds(values: Sequence[float], decimals: int = 3) -> str:
    """Mean ± standard deviation."""
    return f"{short(mean(values), decimals)} ± {short(stdev(values), decimals)}"


def tutorial() -> str:
    """P@10 and N@10 of the tutorial's models beside its expected ranges; an asterisk where the mean lies in them."""
    rows = []
    for kind, data in TUTORIAL_DATA.items():
        for density, ranges in EXPECTED.items():
            cells = []
            for metric, (low, high) in ranges.items():
                for backbone in ("biasmf", "ncf"):
                    values = [run.meta["metrics"][metric]["per_block"][0] for run in published("tutorial")
                              if (run.meta["backbone"], run.meta["dataset"]) == (backbone, f"{kind}-{density}")]
                    inside = low <= round(sum(values) / len(values), 3) <= high
                    cells.append(over_seeds(values) + "*" * inside)
                cells.append(f"{short(low, 2)}-{short(high, 2)}")
            rows.append([f"{data}, {density}", *cells])
    return markdown(["data", "P@10: BiasMF", "NCF", "expected", "N@10: BiasMF", "NCF", "expected"], rows)


def cold_start() -> str:
    """Users and items that arrive after a block's training, by what they get: means over blocks 1 to 3."""
    groups = (("", "ndcg@20"), ("new-users", "ndcg@20"), ("old-users", "ndcg@20"), ("new-items", "recall@100"),
              ("old-items", "recall@100"))
    ways = {("none", ""): "nobody"} | {
        ("none", way): f"users: `{way}`" for way in ("fold_in", "mean", "popularity")} | {
        (way, ""): f"items: `{way}`" for way in ("untrained", "similar", "popularity", "fold_in")}
    rows = []
    for way, title in ways.items():
        runs = [run for run in published("tutorial") if run.meta["dataset"] == "ml-100k" and way == (
            run.meta["settings"].get("cold_items", "none"), run.meta["settings"].get("cold_start", ""))
            and run.meta["backbone"] == "fedmf"]
        rows.append([title, *(over_seeds([
            sum(of["per_block"][1:] if not group else of[metric][1:]) / 3
            for run in runs for of in [run.meta["groups"][group] if group else run.meta["metrics"][metric]]])
            for group, metric in groups)])
    return markdown(["who arrives later", "N@20", "new users", "old users", "R@100: new items", "old items"], rows)


def ratings() -> str:
    """MAE and RMSE of BiasMF's predicted ratings over all of a block's test ratings."""
    runs = [run for run in published("tutorial") if run.meta["settings"].get("loss") == "squared_error"]
    return markdown(["", *(f"block {block}" for block in range(4))], [
        [name, *(over_seeds([run.meta["ratings"][name.lower()][block] for run in runs]) for block in range(4))]
        for name in ("MAE", "RMSE")])


SERVERS = {"mean": "mean", "norm_bound": "norm bound", "trimmed_mean": "trimmed mean", "median": "median",
           "krum": "Multi-Krum"}


def attacks(attack: str) -> str:
    """By the server's aggregator and method, with malicious clients in block 0 alone: the exposure of promoted items
    after each block, R@10 and N@10 after block 0 and their means over blocks 1 to 3; first of runs without an attack.
    """
    cells: dict[tuple[str, str], list] = {}
    for run in published("attacks"):
        s = run.meta["settings"]
        attacked = s.get("malicious", 0.0) > 0.0
        if not attacked or s["attack"] == attack:
            server = SERVERS[s.get("aggregator", "mean")]
            server = server if attacked else f"no attack, {server}"
            method = run.meta["method"] + (" without sc" if s.get("without") == "sc" else "")
            if s.get("without") != "cc":
                cells.setdefault((server, method), []).append(run.meta)

    def cell(values: Sequence[float]) -> str:
        return over_seeds(values) if len(values) > 1 else short(values[0], 3)
    titles = [*(f"no attack, {title}" for title in SERVERS.values()), *SERVERS.values()]
    promotes = attack == "fedrecattack"
    rows = []
    methods = "ft", "reg", "kd", "f3crec", "f3crec without sc"
    for server, method in product(titles, methods):
        if not (runs := cells.get((server, method))):
            continue
        exposure = [cell([run["lists"]["er@10"][block] for run in runs]) for block in range(4)] if promotes else []
        values = [[run["metrics"][f"{name}@10"]["per_block"] for run in runs] for name in ("recall", "ndcg")]
        rows.append([server, method, str(len(runs)), *exposure, *(
            cell([sum(of[blocks]) / len(of[blocks]) for of in every])
            for every in values for blocks in (slice(0, 1), slice(1, 4)))])
    exposed = ["ER@10, block 0", "1", "2", "3"] if promotes else []
    return markdown(["server", "method", "seeds", *exposed, "R@10, block 0", "1-3", "N@10, block 0", "1-3"], rows)


def newer_methods(dataset: str) -> str:
    """Newer methods beside FT over a dataset's blocks 1 to 3, tuned with one budget: the mean of N@20 and tests against
    FT's, the share of what `joint-warm` gains, and what a client sends and receives in a round beside FT's. Of the
    backbone FedDAE FT beside FedMF's."""
    heads = [run.head for run in published("newer-methods")]
    present = {(head["backbone"], head["method"]) for head in heads if head["dataset"] == dataset}
    rows = []
    for backbone in BACKBONES:
        if not (names := [name for name in NEWER if (backbone, name) in present]):
            continue
        of = {name: loaded("newer-methods", name, backbone, dataset) for name in ("ft", "joint-warm", *names)}
        tests = {line["against"]: line for line in of["ft"].compare([of[name] for name in names]).to_dict("records")}
        shares = {row.method: row.against.share for row in headroom_rows(
            {name: results.runs for name, results in of.items()}, "ft", "joint-warm", "ndcg@20") if row.against}
        for name in ("ft", *names):
            test, share = tests.get(name), shares.get(name)
            tuned = name == "ft" or any((ROOT / "results/tuned").rglob(f"{dataset}-{backbone}-{name}.json"))
            rows.append([f"{BACKBONES[backbone]}, {name}" + " (as released)" * (not tuned),
                         late_mean(of[name].runs),
                         *([signed(-test["difference"]), *(p_value(test[p]) for p in ("p_holm", "seed_p"))]
                           if test else [""] * 3),
                         "" if not test else "none" if share is None else
                         "{} ({} to {})".format(*(short(each, 2) for each in share)),
                         bytes_beside(of[name].runs, of["ft"].runs)])
    if ("feddae", "ft") in present:
        ours, theirs = (loaded("newer-methods", "ft", backbone, dataset).runs for backbone in ("feddae", "fedmf"))
        test = paired_tests(ours, theirs, "ndcg@20", (1, 2, 3))
        rows.append(["FedDAE, ft", late_mean(ours), signed(test.users.difference), p_value(test.users.p),
                     p_value(test.seeds.p), "", bytes_beside(ours, theirs)])
    return markdown(["method", "N@20, blocks 1-3", "less FT's", "p over users, Holm", "p over seeds",
                     "share of headroom", "bytes up, down"], rows)


# HR@10 and NDCG@10 on ML-1M, read from Figure 3 of CoLR (WWW 2024) to about .001: of FedMF by its dimension, and of
# CoLR of dimension 64 by its rank.
COLR_FIGURE_3 = {
    "ft": {64: (.649, .374), 32: (.624, .354), 16: (.581, .323), 8: (.508, .279), 4: (.442, .243), 2: (.436, .239),
           1: (.425, .234)},
    "colr": {32: (.644, .372), 16: (.635, .365), 8: (.624, .357), 4: (.607, .344), 2: (.593, .333), 1: (.573, .319)}}


def colr_paper() -> str:
    """FedMF and CoLR by the numbers that a client sends per item, the paper's in brackets, and tests of HR@10."""
    rows = []
    for size in COLR_FIGURE_3["ft"]:
        cells, of = [], {}
        for name, setting in (("ft", "dim"), ("colr", "rank")):
            if (printed := COLR_FIGURE_3[name].get(size)) is None:
                cells += [""] * 2
                continue
            of[name] = loaded("colr", name, "fedmf", **{setting: size})
            for metric, value in zip(("hit@10", "ndcg@10"), printed):
                values = [run.meta["metrics"][metric]["per_block"][0] for run in of[name].runs]
                cells.append(f"{over_seeds(values)} [{short(value, 3)}]")
        tested = _p_values(of["colr"].compare(of["ft"], "hit@10").iloc[0]) if len(of) > 1 else ""
        rows.append([str(size), *cells, tested])
    return markdown(["numbers per item", "FedMF, HR@10", "NDCG@10", "CoLR, HR@10", "NDCG@10", "p over users, seeds"],
                    rows)


def late_mean(runs: Sequence) -> str:
    """N@20 over blocks 1 to 3."""
    return over_seeds([sum(run.meta["metrics"]["ndcg@20"]["per_block"][1:]) / 3 for run in runs], 4)


def bytes_beside(runs: Sequence, others: Sequence) -> str:
    """What a client sends and receives in a round of every block, as multiples of what one of others does."""
    ours, theirs = ([sum(some[0].meta["bytes"][f"{way}_per_client_round"]) for way in ("up", "down")]
                    for some in (runs, others))
    return ", ".join(short(now / base, 2) for now, base in zip(ours, theirs))


def counts() -> str:
    """How many printed numbers of F3CRec and FCUCR have which standing, data that was not run aside."""
    kinds = ("reproduced", "direction reproduced", "open", "not reproduced")
    averages = {"metric": "ndcg@20", "column": "avg"}
    rows = []
    for name, paper, tables, asked in (
            ("F3CRec: data", "f3crec", "1", {}), ("F3CRec: Table 2, averages of N@20", "f3crec", "2", averages),
            ("F3CRec: ablations and analyses", "f3crec", "34567", {}), ("F3CRec: noise", "f3crec", "8", {}),
            ("FCUCR: Tables 2 and 3", "fcucr", "23", {}), ("FCUCR: Tables 4 and 5", "fcucr", "45", {})):
        lines = [line for line in standing(paper=paper, **asked) if line["table"] in tables]
        found = Counter(line["standing"] for line in lines)
        others = [line for line in lines if line["base_standing"]]
        by_base = [str(sum(line[kind] == "reproduced" for line in others)) for kind in ("standing", "base_standing")]
        rows.append([name, *(str(found[kind]) for kind in kinds), *(by_base if others else ["", ""])])
    return markdown(["printed numbers", *kinds, "of rows with a base", "by the base's number"], rows)


def claims() -> str:
    """What becomes of the differences that F3CRec and FCUCR print, as the page of standings counts them."""
    page = (ROOT / "results/pages/standing.md").read_text(encoding="utf-8")
    lines = page.partition("## Claims")[2].partition("## Counts")[0].splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| paper | table"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in takewhile(lambda line: line.startswith("|"), lines[head + 2:])]
    kinds = ("reproduced", "smaller", "absent", "opposite", "cannot tell")
    return markdown(["claims", "number", *kinds], [
        [f"{paper}, Table {table}", count, *(f"{user}, {seed}" for user, seed in zip(found[:5], found[5:]))]
        for paper, table, count, *found in rows])


def one_block_0() -> str:
    """F3CRec's lead over FT on FedNCF from the same block 0, by script and suite."""
    runs = pd.read_csv(ROOT / "results/bases/runs.csv")
    runs = runs[runs.base != "script-42 without start"]
    table = runs.assign(value=runs[["block1", "block2", "block3"]].mean(axis=1)).pivot(
        index=["base", "program", "seed"], columns="method", values="value")
    leads = (table.f3crec - table.ft).dropna()
    rows = [[program, str(len(of)), *(signed(getattr(of, name)()) for name in ("min", "mean", "max"))]
            for program, of in leads.groupby("program")]
    return markdown(["program", "runs", "lowest lead", "mean", "highest"], rows)


# Measurements

def audit(folder: str, block_round: str) -> str:
    """What the attacks find in the uploads of one round, and in those of all rounds up to it added up, by noise."""
    names = {"size_auc": "AUC, size", "size_precision": "precision", "direction_auc": "AUC, direction",
             "direction_precision": "precision", "sum_direction_auc": "AUC, direction of the sum",
             "sum_direction_precision": "precision"}
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for line in where(f"results/audits/{folder}/audit.csv", round=block_round):
        rows.setdefault((line["noise"], line["epsilon"]), {})[line["metric"]] = line["mean"]
    return markdown(["noise", "epsilon", *names.values()], [
        [f"{float(noise):g}", f"{float(epsilon):,.3g}" if epsilon else "none", *(short(of[name], 3) for name in names)]
        for (noise, epsilon), of in rows.items()])


def cost_model() -> str:
    """The constants of the cost model, found from the kept measurements, and how well they meet them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import cost_model as model
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    rounds = model.read(sorted((ROOT / "benchmarks/results").glob("scale_*.md")))
    times = model.fit(rounds)
    ratios = [float(r.work() @ times) / r.seconds for r in rounds]
    memory = [(r.data + r.memory()) / r.peak for r in rounds]
    work = {"a": "S: drawing, training, adding up", "b": "S E d log2(t), t the item table over 1 MiB, if above 1",
            "c": "M d: tables written as a whole", "g": "S E u, u earlier updates of the client in the round",
            "h": "chunks: Python"}
    table = markdown(["work per round", "time per unit"], [
        [text, f"{name} = {value:.3g} {'us' if name == 'h' else 'ns'}"]
        for (name, text), value in zip(work.items(), times, strict=True)])
    return (f"{table}\n\nOver {len(rounds)} sizes the model gives {min(ratios):.2f} to {max(ratios):.2f} times "
            f"the seconds, and {min(memory):.2f} to {max(memory):.2f} times the peak memory.")


TABLES: dict[str, Callable[..., str]] = {table.__name__.replace("_", "-"): table for table in (
    ambiguities, leaks, headroom, shares, leaks_grid, f3crec_leads, f3crec_released, f3crec_sensitivity, fcucr_starts,
    fcucr_paper, fcucr_noise, weighted_noise, fcucr_baselines, ffmsr_retail, mergerec_pilot, tutorial, cold_start,
    ratings, attacks, newer_methods, colr_paper, counts, claims, one_block_0, audit, cost_model)}


def pages() -> list[Path]:
    """The pages that have such a table."""
    names = "ambiguities", "attacks", "domains/README", "fcucr", "newer-methods", "tutorial"
    results = [ROOT / f"results/{name}.md" for name in names]
    places = [*sorted((ROOT / "docs").glob("*.md")), *results, ROOT / "benchmarks/README.md"]
    return [page for page in places if BETWEEN.search(page.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] + ".")
    parser.add_argument("page", nargs="*", type=Path, help="default: all pages that have such tables")
    for path in parser.parse_args().page or pages():
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
