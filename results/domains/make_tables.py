"""Write tables.md from the records of this folder: python results/domains/make_tables.py

tests/reports/test_pages.py compares the file with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Iterable, Sequence

import pandas as pd

import fedcl_bench as fb

HERE = Path(__file__).parent
TOPOLOGIES = ("federated", "local", "central")
TEXT = """\
# Tables of the runs on domains

Written by `python results/domains/make_tables.py` from the records of this folder; not to be edited. Values are means
and sample standard deviations over seeds, and p is that of the paired t-test over users and of that over seeds. Nothing
was tuned. The commands stand in [README.md](README.md) and in [domains](../../docs/domains.md).

## A pilot of Pantry and Arts

SASRec, 2,000 users of each domain, `pilot_core=3`, one seed:

{pilot}

## With and without common users

SASRec on Amazon's phones and electronics with half of the users in common, or none; p against `local`:

{common}

## Knowing who is common

RecGURU under `topology=central`, with `known_users`; p against not knowing, by users and by seeds:

{known}
"""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def values(results: fb.Results, metric: str) -> list[str]:
    """Of each domain, and their mean."""
    return list(results.table().loc[metric])


def p_value(p: float) -> str:
    return "< .0001" if p < 0.0001 else f"{p:.2g}"


def p_values(compared: pd.DataFrame) -> list[str]:
    """Over users and over seeds."""
    return [p_value(compared[name].item()) for name in ("p", "seed_p")]


def pilot() -> str:
    rows = []
    for topology in TOPOLOGIES:
        results = fb.load(HERE, backbone="sasrec", dataset="amazon-pantry+amazon-arts", topology=topology)
        rows.append([f"`{topology}`", *values(results, "recall@10"), *values(results, "ndcg@50")])
    names = [f"{domain}, {metric}" for metric in ("R@10", "N@50") for domain in ("Pantry", "Arts", "mean")]
    return markdown(["`topology=`", *names], rows)


def common_users() -> str:
    rows = []
    for common in ("half", "none"):
        runs = {topology: fb.load(HERE, backbone="sasrec", dataset=f"phone+electronic-{common}", topology=topology)
                for topology in TOPOLOGIES}
        for topology, results in runs.items():
            row = [common, f"`{topology}`", *values(results, "ndcg@50")]
            for metric in ("ndcg@50", "recall@10"):
                row += [] if metric == "ndcg@50" else [values(results, metric)[-1]]
                row.append("" if topology == "local" else ", ".join(p_values(results.compare(runs["local"], metric))))
            rows.append(row)
    return markdown(["common", "`topology=`", "phone, N@50", "electronics, N@50", "mean N@50", "p over users, seeds",
                     "mean R@10", "p over users, seeds"], rows)


def known_users() -> str:
    rows = []
    for common, known in (("half", False), ("half", True), ("none", False)):
        results = fb.load(HERE, backbone="recguru", dataset=f"phone+electronic-{common}", known_users=known)
        tests = ["", ""]
        if known:
            untold = fb.load(HERE, backbone="recguru", dataset=f"phone+electronic-{common}", known_users=False)
            tests = p_values(results.compare(untold, "ndcg@50"))
        rows.append([common, "yes" if known else "no", *values(results, "ndcg@50"), *tests])
    return markdown(["common", "known", "phone, N@50", "electronics, N@50", "mean N@50", "p, users", "p, seeds"], rows)


def text() -> str:
    return TEXT.format(pilot=pilot(), common=common_users(), known=known_users())


if __name__ == "__main__":
    (HERE / "tables.md").write_text(text(), encoding="utf-8")
