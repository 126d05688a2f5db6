"""F3CRec (Lim et al., CIKM 2025): Tables 1-8 and Figures 3 and 4.

The printed numbers are in ``f3crec.csv``. The paper runs one seed, full ranking, and blocks D0-D3.
"""

from __future__ import annotations

from functools import partial

from ...runs.specs import RunSpec
from . import Key, Lead, PaperTable, read_printed

TITLE = "F3CRec (Lim et al., CIKM 2025)"
OURS = "f3crec"  # the paper's own method
BASELINE = "ft"
METRIC = "ndcg@20"  # of figures, unless another is asked for
DATASETS = {"ml-100k": "ML-100K", "ml-latest-small": "ML-Latest-Small", "lastfm-2k": "Lastfm-2K",
            "hetrec2011-ml": "HetRec2011"}
BACKBONES = {"fedmf": "FedMF", "fedncf": "FedNCF", "pfedrec": "PFedRec"}
METHODS = {"ft": "FT", "reg": "Reg", "kd": "KD", "rlp2": "RLP2", "spp": "SPP", "f3crec": "F3CRec"}
NOISE = (0.1, 0.2, 0.3, 0.4, 0.5)

LABELS = {
    **DATASETS, **BACKBONES, **METHODS,
    "without=cc": "w/o c.c", "without=arm": "w/o a.r.m", "without=sc": "w/o s.c", "without=itm": "w/o i.t.m",
    **{f"upload_noise={scale}": f"λ = {scale}" for scale in NOISE},
    "ndcg@20": "N@20", "recall@20": "R@20", "avg": "Avg",
    "static": "static", "dynamic": "dynamic", "diff": "diff.",
    "degradation": "degradation", "item_rank_change": "change of rank",
    "accumulated_users": "# of accumulated users", "accumulated_items": "# of accumulated items",
    "interactions": "# of interactions", "sparsity": "sparsity (%)",
}
STATISTICS = ("accumulated_users", "accumulated_items", "interactions", "sparsity")
LEFT_OUT: dict[int, str] = {}  # tables that cannot be built, and why
SEEDS = "Ours: mean ± sample standard deviation over seeds; in parentheses: the paper, one seed."


def row_spec(row: str, backbone: str, dataset: str) -> RunSpec:
    """The run of a row: a method, or F3CRec with one setting changed."""
    if row in METHODS:
        return RunSpec(row, backbone, dataset)
    name, value = row.split("=")
    return RunSpec(OURS, backbone, dataset, ((name, float(value) if name == "upload_noise" else value),))


_TWO = ("ml-100k", "lastfm-2k")  # the datasets of the paper's analyses
_GROUPS = ("Per run: users known before D1 who have training data in D0 and D1 and a test item in D0 are ordered by "
           "their preference shift (Eq. 2) after the first round of D1, under the run's own method; static are the "
           "lowest 20 %, dynamic the highest 20 % (rounded down, ties by user number). a00 and a10 are the group's "
           "mean N@20 on D0's test items after D0 and after D1. ")


def _ablation(number: int, title: str, rows: tuple[str, ...]) -> PaperTable:
    return PaperTable(number, title, _TWO, ("fedmf",), rows, ("ndcg@20", "recall@20"), ("avg", "change"),
                      ("dataset", "row"), ("metric", "column"), row_spec, best="max", change_of=OURS,
                      notes=(SEEDS, "Avg: mean over D1-D3 of the metric on the block just trained. Change: of Avg "
                             "against F3CRec, over the seeds both have."))


TABLES = {table.number: table for table in (
    PaperTable(1, "Data statistics", tuple(DATASETS), ("",), STATISTICS, ("",), ("D0", "D1", "D2", "D3"),
               ("dataset", "row"), ("column",), None,
               notes=("Ours; in parentheses: the paper.",
                      "Sparsity: 100 (1 - interactions of the block / (accumulated users x accumulated items)).")),
    PaperTable(2, "Main comparison", tuple(DATASETS), tuple(BACKBONES), tuple(METHODS), ("ndcg@20", "recall@20"),
               ("D1", "D2", "D3", "avg", "change"), ("dataset", "metric", "column"), ("row",), row_spec, best="max",
               lead=Lead("ndcg@20", "avg"), change_of=BASELINE,
               notes=(SEEDS, "D1-D3: the metric on the block just trained. Improv.: of Avg over FT, over the seeds "
                      "both have.",
                      "* p ≤ .05, two-sided paired t-test of F3CRec against the best baseline on N@20, and F3CRec is "
                      "better. The paper does not state what is paired; ours: users, each with the metric on the block "
                      "just trained averaged over D1-D3 and the seeds both have; N@20 and R@20 are tested each on its "
                      "own.")),
    _ablation(3, "Ablation of the client's parts", ("f3crec", "without=cc", "without=arm", "ft")),
    PaperTable(4, "Static and dynamic users: degradation", _TWO, ("fedmf",), ("f3crec", "without=arm", "spp"),
               ("degradation",), ("static", "dynamic"), ("dataset", "column"), ("row",), row_spec, best="min",
               notes=(SEEDS, _GROUPS + "Degradation: (a00 - a10) / a00. The paper does not say whether its groups "
                      "are common to all methods; by its Tables 4 and 5 their a00 differ.")),
    PaperTable(5, "Static and dynamic users: N@20 on D0's test items after D1", _TWO, ("fedmf",),
               ("f3crec", "without=arm", "spp"), ("ndcg@20",), ("static", "dynamic"), ("dataset", "column"), ("row",),
               row_spec, best="max", notes=(SEEDS, _GROUPS + "Shown: a10.")),
    _ablation(6, "Ablation of the server's parts", ("f3crec", "without=sc", "without=itm", "ft")),
    PaperTable(7, "Static and dynamic items: change of rank", _TWO, ("fedmf",), ("f3crec", "without=itm"),
               ("item_rank_change",), ("static", "dynamic", "diff"), ("dataset", "row"), ("column",), row_spec,
               notes=(SEEDS, "Per block t from D1 on: old items are ordered by phi (Eq. 8) between the best models of "
                      "t-1 and t; static are the lowest 20 %, dynamic the highest 20 % (rounded down, ties by item "
                      "number). An item's change of rank is |rank before - rank after| / rank before, averaged over "
                      "the users trained in t-1 but not in t. Shown: the groups' means, averaged over the 3 "
                      "transitions; diff. is dynamic - static.")),
    PaperTable(8, "Laplace noise on uploads", tuple(DATASETS), ("fedmf",),
               ("f3crec", *(f"upload_noise={scale}" for scale in NOISE)), ("ndcg@20", "recall@20"), ("avg",),
               ("dataset", "metric"), ("row",), row_spec,
               notes=(SEEDS, "F3CRec on FedMF; mean over D1-D3; λ: scale of the noise on every uploaded number. It "
                      "bears no formal privacy guarantee.")),
)}


def label(table: int, name: str) -> str:
    """A name as the paper prints it."""
    if name == "change":
        return "Improv. (%)" if table == 2 else "change (%)"
    return "λ = 0" if table == 8 and name == OURS else LABELS.get(name, name)


printed = partial(read_printed, "f3crec")  # the paper's numbers, by table

# Figure 4 varies one setting at a time around the dataset's defaults; the values are those the paper searched, with
# beta in steps of .1 instead of .05.
_EPS_UNIT = {"ml-100k": -3, "hetrec2011-ml": -3, "lastfm-2k": -4, "ml-latest-small": -5}


def _figure_4() -> list[RunSpec]:
    specs = []
    for dataset in DATASETS:
        values = {"eps": [float(f"{i}e{_EPS_UNIT[dataset]}") for i in range(1, 10)],
                  "lambda_kd": [float(f"1e{i}") for i in range(-5, 1)], "beta": [i / 10 for i in range(11)]}
        specs += [RunSpec(OURS, "fedmf", dataset, ((name, value),)) for name in values for value in values[name]]
    return specs


FIGURES = {"3": TABLES[2].specs, "4": _figure_4}
FIGURE_ALIASES: dict[str, str] = {}


def inconsistencies() -> dict[tuple[int, Key], str]:
    """Cells whose printed number contradicts another printed one by more than rounding, and how."""
    contradictions: dict[tuple[int, Key], str] = {}
    two = printed()[2]
    for key, cell in two.items():
        if key.column != "avg" or cell.value is None:
            continue
        mean = sum(two[key._replace(column=block)].value for block in ("D1", "D2", "D3")) / 3
        if abs(cell.value - mean) > 1e-4:
            contradictions[2, key] = f"the paper prints {cell.text}, and the mean of its D1-D3 is {mean:.4f}"
            change, base = key._replace(column="change"), two[key._replace(row=BASELINE)].value
            implied = 100.0 * (cell.value / base - 1.0)
            rounding = 0.005 + 100.0 * 0.5e-4 / base * (1.0 + cell.value / base)
            if change in two and abs(two[change].value - implied) > rounding:
                contradictions[2, change] = f"the paper prints {two[change].text}, and its Avg gives {implied:.2f}"
    for number in (3, 6, 8):
        for key, cell in printed()[number].items():
            if key.column == "avg" and key in two and two[key].value != cell.value:
                contradictions[number, key] = f"the paper prints {cell.text} here and {two[key].text} in Table 2"
    return contradictions
