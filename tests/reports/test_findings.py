"""docs/findings.md: its numbers are those of the published records, of tuned settings, or of docs/sensitivity.md."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from helpers import ROOT
from test_results_page import rows_of, short

from fedcl_bench.experiments.papers.f3crec import LABELS
from fedcl_bench.reports.comparison import against_each
from fedcl_bench.reports.tables import Source, find, measure
from fedcl_bench.runs.specs import RunSpec, Tuned
from fedcl_bench.runs.store import load_runs

PAGE = ROOT / "docs/findings.md"
SETS = ("ml-100k", "ml-latest-small", "lastfm-2k")


def signed(value: float, decimals: int) -> str:
    """A difference as the page writes it."""
    return ("-" if value < 0 else "+") + short(abs(value), decimals)


def p_of(p: float) -> str:
    return "p < .0001" if p < 1e-4 else f"p = {short(p, 3)}"


@pytest.fixture(scope="module")
def words():
    """The page in one line, without commands and links' targets."""
    text = re.sub(r"^```.*?^```$", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


@pytest.fixture(scope="module")
def numbers():
    """The published numbers, which tests/reports/test_pages.py holds to the records."""
    with open(ROOT / "results/pages/standing.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def runs(registry):
    """The published runs of a method: name, backbone, folder and settings to them."""
    kept = {}

    def of(folder, method, backbone, dataset="ml-100k", tuned=None, **settings):
        kept.setdefault(folder, load_runs(ROOT / "results/published" / folder))
        source = Source(kept[folder], registry, tuned and Tuned((ROOT / "results/tuned" / tuned,)),
                        tuple(settings.items()), None)
        name, _, setting = method.partition(":")
        spec = RunSpec(name, backbone, dataset, (tuple(setting.split("=")),) if setting else ())
        return find(source, spec)[0]
    return of


def says(words, *parts):
    """Each part stands on the page; returns them."""
    for part in parts:
        assert part in words, part
    return parts


def cell(numbers, dataset, backbone, row, table="2", metric="ndcg@20", column="avg"):
    (line,) = [line for line in numbers if (line["dataset"], line["backbone"], line["row"], line["table"],
                                            line["metric"], line["column"])
               == (dataset, backbone, row, table, metric, column)]
    return {name: float(value) if name not in ("standing", "reason") and re.fullmatch(r"-?[\d.]+", value) else value
            for name, value in line.items()}


def case(line):
    """Backbone and dataset of a number."""
    return f"{LABELS[line['backbone']]}, {LABELS[line['dataset']]}"


def difference(line):
    return f"{signed(float(line['difference']), 4)}, {p_of(float(line['p']))}"


def what_holds(words, numbers):
    one = [line for line in numbers if line["table"] == "1" and line["dataset"] in SETS]
    assert {line["standing"] for line in one} == {"reproduced"}
    averages = [line for line in numbers if line["table"] == "2" and line["dataset"] in SETS
                and (line["metric"], line["column"]) == ("ndcg@20", "avg")]
    kinds = Counter(line["standing"] for line in averages)
    assert set(kinds) <= {"reproduced", "direction reproduced", "open", "not reproduced"}
    missed = [line for line in averages if line["standing"] == "not reproduced"]
    noise = [line for line in numbers if line["table"] == "8" and line["dataset"] == "ml-100k"]
    assert {line["standing"] for line in noise} == {"reproduced"}
    fcucr = [line for line in numbers if (line["paper"], line["table"], line["row"], line["dataset"])
             == ("fcucr", "2", "fcucr", "xing")]
    assert {line["standing"] for line in fcucr} == {"reproduced"}
    leads = [cell(numbers, "xing", backbone, "fcucr", metric="hit@10", column="value")
             for backbone in ("gru4rec", "sasrec", "tisasrec")]
    assert leads[0]["p"] < 1e-4 and leads[1]["p"] < 1e-4
    first, second, third = ((signed(of["difference"], 3), signed(of["printed_difference"], 3)) for of in leads)
    shown = [f"{LABELS[line['row']]} on {case(line)}, {short(float(line['ours']), 4)} "
             f"({short(float(line['printed']), 4)})" for line in missed]
    return says(
        words, f"All {len(one)} printed statistics", f"{len(averages)} averages", f"{kinds['reproduced']} of them",
        f"{kinds['direction reproduced']} in direction, {kinds['open']} are open, "
        f"and {kinds['not reproduced']} are not reproduced",
        *shown,
        f"All {len(noise)} numbers of Table 8",
        f"all {len(fcucr)} numbers of FCUCR", f"{first[0]} ({first[1]} printed) on GRU4Rec", "p < .0001 for both",
        f"{second[0]} ({second[1]}) on SASRec", f"it is {third[0]} ({third[1]}), {p_of(leads[2]['p'])}")


def the_authors_split(words, numbers, runs):
    methods = {name: runs("f3crec-authors-split", name, "fedmf", split_file="any") for name in (
        "f3crec", "ft", "reg", "kd")}
    means = {name: [measure(run, "ndcg@20", "avg") for run in of] for name, of in methods.items()}
    printed = {name: cell(numbers, "ml-100k", "fedmf", name)["printed"] for name in ("f3crec", "ft")}
    f3crec, ft = (f"{short(np.mean(means[name]), 4)} ± {short(np.std(means[name], ddof=1), 4)} "
                  f"({short(printed[name], 4)})" for name in ("f3crec", "ft"))
    over = {of.other: of for of in against_each(methods, "f3crec", "ndcg@20", draws=1)}
    (reg,) = against_each({name: methods[name] for name in ("reg", "ft")}, "reg", "ndcg@20", draws=1)
    return says(
        words, f"F3CRec has {f3crec}, FT {ft}",
        f"{signed(over['ft'].users.difference, 4)}, {p_of(over['ft'].users.p)}",
        f"and {short(over['ft'].p_holm, 3)} after Holm's correction for three comparisons",
        f"by {signed(reg.users.difference, 4)}, {p_of(reg.users.p)}",
        f"F3CRec is {signed(over['reg'].users.difference, 4)} above Reg, {p_of(over['reg'].users.p)}")


def readings(words, numbers, runs):
    """What moves F3CRec, as docs/sensitivity.md has it, and its lead with released settings on our split."""
    rows = rows_of(ROOT / "docs/sensitivity.md", "| setting | default | here |")
    default, on_fedncf, *others = (row for row in rows if row[0] == "all as by default")
    rows = rows[:rows.index(others[0])] if others else rows
    value = {(row[0], i > rows.index(on_fedncf)): (row[3].split()[0], row[5].split()[0]) for i, row in enumerate(rows)}
    base, other = (row[3].split()[0] for row in (default, on_fedncf))
    methods = {name: runs("f3crec-released", name, "fedmf") for name in ("f3crec", "ft")}
    (over,) = against_each(methods, "f3crec", "ndcg@20", draws=1)
    seeds = [[measure(run, "ndcg@20", "avg") for run in methods[name]] for name in ("f3crec", "ft")]
    assert len(seeds[0]) == 5 and all(a > b for a, b in zip(*seeds))
    detectable = cell(numbers, "ml-100k", "fedmf", "f3crec", table="3")["detectable"]
    lead = default[5].split()[0]
    return says(
        words, f"F3CRec has {base} with the first and {value['inc_split', False][0]} with the second",
        f"lead over FT is {signed(over.users.difference, 4)}, {p_of(over.users.p)}",
        f"could have seen {short(detectable, 4)}", f"over seeds {p_of(over.by_seed.p)}",
        f"it is {signed(np.mean(seeds[0][:3]) - np.mean(seeds[1][:3]), 4)} in published records and {lead} in the runs",
        f"F3CRec's {base} becomes {value['item_lr', False][0]}",
        f"falls from {lead} to {value['kd_reduction', False][1]}",
        f"hardly changes, {other} and {value['reset_private', True][0]}",
        f"{on_fedncf[5].split()[0]} with the reset, {value['reset_private', True][1]} without")


def shared_bases(words):
    """The released script and the suite from one block 0, and F3CRec's lead on FedNCF from each."""
    rounds, runs = (pd.read_csv(ROOT / f"results/bases/{name}.csv") for name in ("rounds", "runs"))
    assert (rounds.script == rounds.suite).all() and rounds.base.nunique() == 3 and set(rounds.block) == {1, 2, 3}
    every = _leads(runs[runs.base != "script-42 without start"])
    runs = runs[(runs.program == "suite") & (runs.base != "script-42 without start")]
    by_base = _leads(runs).groupby("base")
    low, high, mean = (signed(getattr(by_base.mean(), of)(), 4) for of in ("min", "max", "mean"))
    return says(words, f"all {len(rounds)} rounds",
                f"{low} to {high}, {mean} on average over {by_base.ngroups} of them",
                f"deviation between seeds {short(by_base.var().mean() ** 0.5, 4)}", "The paper prints +.0133",
                f"none of {len(every)} runs has more than {signed(every.max(), 4)}")


def _leads(runs):
    """F3CRec's lead over FT in N@20, mean of blocks 1 to 3, by base, program and seed."""
    table = runs.assign(value=runs[["block1", "block2", "block3"]].mean(axis=1)).pivot(
        index=["base", "program", "seed"], columns="method", values="value")
    return (table.f3crec - table.ft).dropna()


def starts(words, runs):
    """FCUCR with the released code's choices, under both starts, and its ablations."""
    def hit(method, backbone, metric="hit@10", **settings):
        of = runs("fcucr", method, backbone, "xing", patience=0, **settings)
        return np.mean([measure(run, metric, "value") for run in of])
    own = [short(hit(method, "sasrec"), 3) for method in ("fcucr", "fcucr:without=tasd", "fcucr:without=iupr",
                                                        "fcucr:without=both", "ft")]
    common = [short(hit(method, "sasrec", init="server"), 3) for method in ("fcucr", "ft")]
    behind = []
    for backbone, name in (("gru4rec", "GRU4Rec"), ("sasrec", "SASRec"), ("tisasrec", "TiSASRec")):
        pair = {of: runs("fcucr", of, backbone, "xing", patience=0, init="server") for of in ("fcucr", "ft")}
        (over,) = against_each(pair, "fcucr", "hit@10", draws=1)
        behind.append(f"{signed(over.users.difference, 3)} on {name} ({p_of(over.users.p)})")
    whole = [hit(method, backbone, "all:hit@10", init=start) for method in ("fcucr", "ft") for start in (
        "per_client", "server") for backbone in ("gru4rec", "sasrec", "tisasrec")]
    assert short(max(whole), 3) == ".008"
    return says(
        words, f"FCUCR has {own[0]} with own starts and {common[0]} with a common one; its backbone has {own[4]} and "
               f"{common[1]}", f"{behind[0]}, {behind[1]} and {behind[2]}",
        f"FCUCR has {own[0]}, without TASD {own[1]}, without IUPR {own[2]}, without both {own[3]}",
        "more than .008 there", f"FedRAP has {short(hit('ft', 'fedrap', 'all:hit@10'), 3)} and Fed-DMI-GNN "
                                f"{short(hit('ft:loss=bce', 'dmi-gnn', 'all:hit@10'), 3)}")


def baselines_and_ablations_of_fcucr(words, numbers):
    def of(backbone, row="ft", table="2"):
        found = cell(numbers, "xing", backbone, row, table, "hit@10", "value")
        return short(found["ours"], 3), short(found["printed"], 3)
    pfedrec, fedrap, dmi, mia = (of(name) for name in ("pfedrec", "fedrap", "dmi-gnn", "miasrec"))
    items = cell(numbers, "xing", "", "items", "1", "", "value")["ours"]
    tasd, iupr = (of("sasrec", row, "3")[1] for row in ("without=tasd", "without=iupr"))
    return says(
        words, f"PFedRec has {pfedrec[0]} ({pfedrec[1]}), FedRAP {fedrap[0]} ({fedrap[1]}) and Fed-DMI-GNN {dmi[0]} "
               f"({dmi[1]})", f"Fed-MiaSRec is lower, {mia[0]} ({mia[1]})", f"all {items:,.0f}",
        f"prints {tasd} without TASD and {iupr} without IUPR")


def tuned_alike(words, numbers):
    """Table 2 with settings tuned by the same budget, on both sets."""
    averages = [line for line in numbers if line["table"] == "2" and line["dataset"] in SETS
                and (line["metric"], line["column"]) == ("ndcg@20", "avg") and line["p"]]
    as_ft = [line for line in averages if float(line["detectable"]) < 1e-4]
    differs = [line for line in averages if float(line["p"]) < 0.05]
    mine = [line for line in averages if line["row"] == "f3crec"]
    assert len(mine) == 9 and not [line for line in mine if line in differs and float(line["difference"]) > 0.0]
    nearest = min((line for line in mine if float(line["difference"]) > 0.0 and line not in as_ft),
                  key=lambda line: float(line["p"]))
    users = [int(cell(numbers, dataset, "fedmf", "f3crec")["users"]) for dataset in SETS]
    seen = [cell(numbers, dataset, "fedmf", "f3crec") for dataset in SETS]
    detectable, printed = ([short(line[name], 4) for line in seen] for name in ("detectable", "printed_difference"))
    return says(
        words, f"none of the {len(mine)} cases", f"nearest to that on {case(nearest)}: {difference(nearest)}",
        f"In {sum(line in as_ft for line in mine)} it is FT", f"Of {len(averages) - len(as_ft)} comparisons",
        f"{len(differs)} have p < .05",
        *(f"{LABELS[line['row']]} on {case(line)} ({difference(line)})" for line in differs),
        f"{users[0]}, {users[1]} and {users[2]} users",
        f"that is {', '.join(detectable)}, and the paper's leads are {', '.join(printed)}")


def carried_over(words, numbers, runs):
    """The same searches and runs with private parameters that go on from block to block."""
    parts = []
    for dataset in SETS:
        for backbone in ("fedncf", "pfedrec"):
            pair = {name: runs("f3crec-carried", name, backbone, dataset, "carried", reset_private=False)
                    for name in ("f3crec", "ft")}
            (over,) = against_each(pair, "f3crec", "ndcg@20", draws=1)
            parts.append(f"{signed(over.users.difference, 4)} on {LABELS[backbone]}, {LABELS[dataset]} "
                         f"({p_of(over.users.p)})")
    for backbone in ("fedncf", "pfedrec"):
        ft = np.mean([measure(run, "ndcg@20", "avg") for run in runs("f3crec-carried", "ft", backbone, "ml-100k",
                                                                     "carried", reset_private=False)])
        parts.append(f"{short(cell(numbers, 'ml-100k', backbone, 'ft')['ours'], 4)} with it and {short(ft, 4)} without "
                     f"on {LABELS[backbone]}")
    return says(words, *parts)


def fcucr_tuned(words, runs):
    found = {}
    for folder, tuned, start in (("fcucr-tuned", "fcucr", "per_client"),
                                 ("fcucr-tuned-server", "fcucr-server", "server")):
        for backbone in ("gru4rec", "sasrec", "tisasrec"):
            pair = {name: runs(folder, name, backbone, "xing", tuned, patience=5, init=start)
                    for name in ("fcucr", "ft")}
            (over,) = against_each(pair, "fcucr", "hit@10", draws=1)
            found[start, backbone] = over.users
    gru, sas, ti = (found["per_client", name] for name in ("gru4rec", "sasrec", "tisasrec"))
    assert gru.p < 1e-4 and sas.p < 1e-4
    assert all(found["server", name].difference < 0.0 for name in ("gru4rec", "sasrec", "tisasrec"))
    return says(words, f"GRU4Rec ({signed(gru.difference, 3)}) and SASRec ({signed(sas.difference, 3)})",
                f"TiSASRec ({signed(ti.difference, 3)}, {p_of(ti.p)})")


def effort(words):
    """How much was searched for F3CRec's and FCUCR's settings."""
    def search(name):
        return json.loads((ROOT / f"results/tuned/{name}.json").read_text())
    assert [len(search(f"fcucr/xing-sasrec-{name}")["trials"]) for name in ("fcucr", "ft")] == [4, 4]
    first, *others = (search(f"{dataset}-fedmf-f3crec") for dataset in SETS)
    assert {(of["budget"], of["seeds"]) for of in (first, *others)} == {(24, 2)} and len(first["space"]) == 4
    assert all(of["grid_points"] == first["grid_points"] for of in others)
    tried = [len(of["trials"]) for of in (first, *others)]
    return says(words, "24 runs of FT on two seeds", f"{tried[0]}, {tried[1]} and {tried[2]} points of "
                f"{first['grid_points']:,}", "four settings", "four trials for every method")


def test_every_number_has_its_source(words, numbers, runs):
    parts = [*what_holds(words, numbers), *the_authors_split(words, numbers, runs), *readings(words, numbers, runs),
             *shared_bases(words),
             *starts(words, runs), *baselines_and_ablations_of_fcucr(words, numbers), *tuned_alike(words, numbers),
             *carried_over(words, numbers, runs), *fcucr_tuned(words, runs), *effort(words), "p < .05", "p < .0001"]
    left = words
    for part in sorted(parts, key=len, reverse=True):
        left = left.replace(part, " ")
    assert re.findall(r"\S*\.\d\S*", left) == []


def test_it_is_short():
    assert len(PAGE.read_text(encoding="utf-8").split()) <= 1500
