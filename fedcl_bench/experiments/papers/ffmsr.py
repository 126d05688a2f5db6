"""FFMSR (Lu et al., 2025): Tables 2-7, whose numbers are those of two domains that train in one run, and Figures 5-7.

The printed numbers are in ``ffmsr.csv``. Column D0 is the first domain of a dataset's name, D1 the second.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from ...runs.specs import RunSpec
from . import Key, Lead, PaperTable, read_printed

TITLE = "FFMSR (Lu et al., 2025)"
OURS = "ffmsr"  # the paper's own method
BASELINE = "ft"
METRIC = "recall@10"  # of figures, unless another is asked for
DATASETS = {"amazon-office+amazon-arts": "Office-Arts", "online-retail-ffmsr+amazon-pantry": "OnlineRetail-Pantry"}
LOCAL = {"recbole:SASRec": "SASRec", "recbole:BERT4Rec": "BERT4Rec", "recbole:FEARec": "FEARec",
         "recbole:FDSA": "FDSA", "recbole:S3Rec": "S3Rec", "unisrec": "UniSRec"}
CENTRAL = {"ccdr": "CCDR", "recguru": "RecGURU"}
FEDERATED = {"feddcsr": "feddcsr", "vqrec": "pfcr", "ffmsr": "ffmsr"}  # a backbone's own method
BACKBONES = {**LOCAL, **CENTRAL, **FEDERATED}
METHODS = {"ft": "alone or pooled", "feddcsr": "FedDCSR", "pfcr": "PFCR", "ffmsr": "FFMSR"}
ABLATIONS = {"without=semantic-fusion": "w/o semantic fusion", "without=adaptation-filter": "w/o adaptation filter",
             "without=encoder-filter": "w/o encoder filter", "without=orthogonality": "w/o orthogonal losses",
             "without=gate": "w/o gating"}
CLUSTERINGS = {"clustering=agglomerative": "Agglomerative", "clustering=birch": "Birch",
               "clustering=kmeans": "K-means", "clustering=kmeans++": "K-means++"}
ENHANCED = "semantics=true"  # a baseline with FFMSR's fusion and filters
ALONE = ("without=semantic-fusion", "text=pq")  # rows for which nothing is sent
_K = {"online-retail-ffmsr+amazon-pantry": 90}  # of Office and Arts the default
STATISTICS = ("users", "items", "interactions", "average_length")
_METRICS, _DOMAINS = ("recall@10", "recall@50", "ndcg@10", "ndcg@50"), ("D0", "D1")
_COLUMNS = (*_DOMAINS, "mean")  # the paper prints no mean; rows are compared by it
LABELS = {
    **DATASETS, **LOCAL, **CENTRAL, "feddcsr": "FedDCSR", "vqrec": "VQ-Rec", "ffmsr": "FFMSR", **METHODS, **ABLATIONS,
    **CLUSTERINGS, ENHANCED: "Enhanced", "text=pq": "FFMSR-PQ", "D0": "first domain", "D1": "second domain",
    "recall@10": "R@10", "recall@50": "R@50", "ndcg@10": "N@10", "ndcg@50": "N@50", "users": "#Users",
    "items": "#Items", "interactions": "#Inters.", "average_length": "Avg. n",
}
LEFT_OUT = {  # tables that cannot be built, and why
    8: "it leaves out the users whom Office and Arts share. Who they are only the publisher's ids say, which the "
       "released files do not have."}


def label(table: int, name: str) -> str:
    """A name as the paper prints it, or what it stands for."""
    if table == 6 and name == "without=semantic-fusion":
        return "FFMSR-Origin"
    if table == 5 and name == "ft":
        return "Origin"
    return LABELS.get(name, name)


def row_spec(row: str, backbone: str, dataset: str) -> RunSpec:
    """The run of a row: a baseline alone or pooled, a method, or FFMSR with one setting changed."""
    settings: tuple[tuple[str, Any], ...] = ()
    if row == "ft":
        return RunSpec("ft", backbone, dataset, (("topology", "central" if backbone in CENTRAL else "local"),))
    if row == ENHANCED:  # what is the default under FFMSR, by the name that it has in published records
        settings = (("semantics", True), *([("text_layers", 3)] if backbone == "unisrec" else []))
    elif "=" in row:
        settings = (tuple(row.split("=", 1)),)
    if row in ALONE:
        return RunSpec("ft", backbone, dataset, (("topology", "local"), *settings))
    if row in ("clustering=kmeans", "clustering=kmeans++"):  # FFMSR's own row has weighted means
        settings += (("centroid", "plain"),)
    method = row if row in METHODS else OURS
    if method == OURS and dataset in _K:
        settings += (("clusters", _K[dataset]),)
    return RunSpec(method, backbone, dataset, settings)


_SEEDS = "Ours: mean ± sample standard deviation over seeds; in parentheses: the paper."
_DOMAIN_NOTE = ("First and second domain: in the order of the dataset's name, and their mean, which the paper does not "
                "print. All items of the domain are ranked.")
_TEST_NOTE = ("*, °: significantly better, worse than FFMSR on the mean: two-sided paired t-test over the users of "
              "both domains, each averaged over the seeds, Holm's correction over the rows, p ≤ .05.")

printed = partial(read_printed, "ffmsr")  # the paper's numbers, by table
IMPROVEMENT = "improvement"  # the row of Table 3 that says by how many percent FFMSR is above the best baseline


def implied_improvement(key: Key) -> float:
    """The number of that row that the printed numbers of Table 3 give, in percent."""
    same = {(other.backbone, other.row): cell.value for other, cell in printed()[3].items()
            if (other.dataset, other.metric, other.column) == (key.dataset, key.metric, key.column)
            and other.row != IMPROVEMENT}
    ours = same.pop((OURS, OURS))
    return 100.0 * (ours / max(same.values()) - 1.0)


def _printed_improvements() -> str:
    """The row of Table 3 as a sentence."""
    of = {name: ", ".join("/".join(printed()[3][Key(name, OURS, IMPROVEMENT, metric, column)].text
                                   for column in _DOMAINS) for metric in _METRICS) for name in DATASETS}
    return ("The paper's improvement of FFMSR over its best baseline in percent, by metric, in first/second domain: "
            + "; ".join(f"{DATASETS[name]} {texts}" for name, texts in of.items())
            + ". Its * compares with that baseline.")


def _variants(number: int, title: str, rows: tuple[str, ...]) -> PaperTable:
    tested = OURS in rows
    return PaperTable(number, title, tuple(DATASETS), ("ffmsr",), rows, _METRICS, _COLUMNS, ("dataset", "row"),
                      ("column", "metric"), row_spec, best="max", baseline=OURS if tested else None,
                      notes=(_SEEDS, _DOMAIN_NOTE, *[_TEST_NOTE] * tested))


TABLES = {table.number: table for table in (
    PaperTable(2, "Data statistics", tuple(DATASETS), ("",), STATISTICS, ("",), _DOMAINS, ("dataset", "column"),
               ("row",), None, notes=("Ours; in parentheses: the paper.",)),
    PaperTable(3, "Main comparison", tuple(DATASETS), (*LOCAL, *CENTRAL, *FEDERATED), tuple(METHODS), _METRICS,
               _COLUMNS, ("dataset", "backbone", "row"), ("column", "metric"), row_spec, best="max",
               lead=Lead("recall@10", "mean", name_p=True),
               only=(*product((*LOCAL, *CENTRAL), ["ft"]), *FEDERATED.items()),
               notes=(_SEEDS, _DOMAIN_NOTE, "CCDR and RecGURU pool the domains' samples; VQ-Rec under PFCR is the "
                      "paper's PFCR.", _printed_improvements())),
    _variants(4, "Ablation", (*ABLATIONS, OURS)),
    PaperTable(5, "FFMSR's parts in other recommenders", tuple(DATASETS), ("recbole:FDSA", "recbole:S3Rec", "unisrec"),
               ("ft", ENHANCED), _METRICS, _COLUMNS, ("dataset", "backbone", "row"), ("column", "metric"), row_spec,
               best="max", notes=(_SEEDS, _DOMAIN_NOTE, "Origin: alone; enhanced: under FFMSR, in whose first "
                                                          "stage S3Rec pre-trains.")),
    _variants(6, "Fusion of layers or codes of texts, alone", ALONE),
    _variants(7, "Clusterings", (*CLUSTERINGS, OURS)),
)}


def inconsistencies() -> dict[tuple[int, Key], str]:
    """Cells whose printed number contradicts another printed one by more than rounding, and how: mean lengths in Table
    2. Tables 4, 7 and 8 repeat FFMSR's numbers as Table 3 has them, and Table 6 Table 4's without semantic fusion.
    Of the improvements of Table 3 one does not follow from its numbers."""
    contradictions: dict[tuple[int, Key], str] = {}
    for key, cell in printed()[2].items():
        if key.row == "average_length":
            interactions, users = (printed()[2][key._replace(row=row)].value for row in ("interactions", "users"))
            if abs(cell.value - interactions / users) > 0.005:
                contradictions[2, key] = (f"the paper prints {cell.text}, and its counts give "
                                          f"{interactions / users:.2f}")
    for key, cell in printed()[3].items():
        if key.row == IMPROVEMENT and abs(cell.value - implied_improvement(key)) > 0.01:
            contradictions[3, key] = (f"the paper prints {cell.text}, and its numbers give "
                                      f"{implied_improvement(key):.2f}")
    return contradictions


def _values(name: str, values: tuple[int, ...]) -> list[RunSpec]:
    base = row_spec(OURS, OURS, "online-retail-ffmsr+amazon-pantry")
    others = tuple((other, kept) for other, kept in base.settings if other != name)
    return [replace(base, settings=((name, value), *others)) for value in values]


# The paper's text names K = 30, 60 and 90, a = 1 and 4, and t = 3 and 5. Figures 8 and 9 are of seconds.
FIGURES = {"5": partial(_values, "clusters", (30, 60, 90, 120)),
           "6": partial(_values, "text_layers", (1, 2, 3, 4, 6)),
           "7": partial(_values, "federated_rounds", (1, 3, 5, 7))}
FIGURE_ALIASES = {"k": "5", "a": "6", "t": "7"}
