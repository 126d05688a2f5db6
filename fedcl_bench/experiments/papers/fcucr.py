"""FCUCR (Zhang et al., WWW 2026): Tables 1-5, and Figure 2 and the sensitivity and noise curves of Figures 3-10.

The printed numbers are in ``fcucr.csv``, times in seconds. The paper averages five runs, streams sessions, and ranks
each user's target among 100 sampled items; what it prints nothing for, full ranking, is shown beside it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

from ...runs.specs import RunSpec
from . import Key, Lead, PaperTable, read_printed

TITLE = "FCUCR (Zhang et al., WWW 2026)"
OURS = "fcucr"  # the paper's own method
BASELINE = "ft"
METRIC = "hit@10"  # of figures, unless another is asked for
DATASETS = {"xing": "XING", "retailrocket": "RetailRocket", "lastfm-1k": "LastFM", "tmall": "Tmall"}
BACKBONES = {"gru4rec": "GRU4Rec", "sasrec": "SASRec", "tisasrec": "TiSASRec"}  # those FCUCR is put on
STATIC = {"pfedrec": "PFedRec", "fedrap": "FedRAP", "gpfedrec": "GPFedRec"}
WHOLE_SESSIONS = {"dmi-gnn": "DMI-GNN", "hearint": "HearInt", "miasrec": "MiaSRec"}
BCE = "loss=bce"  # the row of a baseline that was trained as FCUCR trains its backbones
TRANSFER = ("fcucr", "without=iupr", "ft")  # with and without prototype transfer, for Figure 2b and c
METHODS = {"ft": "FedAvg", "fcucr": "FCUCR"}
WINDOWS = (1, 2, 3, 5)  # rounds; FCUCR itself keeps all
INTERVALS = (2, 3, 4, 5)  # rounds; FCUCR itself transfers in every one
NEIGHBOURS = (1, 5, 20, 100, 200, 1000)
LAMBDAS = (0.1, 1.0, 5.0, 10.0, 20.0, 50.0)
NOISE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)  # standard deviations
# By what setting noise is added, and how large a standard deviation is in it: of Gaussian noise on received prototypes,
# as in the released code, and of Laplace noise on uploaded parameters, as Section 5.6 has it, where b = std / sqrt(2).
NOISY = {"prototype_noise": 1.0, "upload_noise": 2.0 ** -0.5}
KEPT, KEPT_UP_TO = 0.95, 0.3  # Appendix D.2: with std <= .3 more than this share of the accuracy without noise is kept

_SAMPLED, _FULL = ("hit@10", "ndcg@10"), ("all:hit@10", "all:ndcg@10")
STATISTICS = ("users", "items", "sessions", "average_length")
LABELS = {
    **DATASETS, **BACKBONES, **STATIC, **WHOLE_SESSIONS, **METHODS, BCE: "FedAvg, one negative",
    "without=tasd": "w/o TASD", "without=iupr": "w/o IUPR", "without=both": "w/o both",
    "window=1": "last round", **{f"window={n}": f"last {n} rounds" for n in WINDOWS[1:]},
    **{f"transfer_interval={n}": f"every {n} rounds" for n in INTERVALS},
    "hit@10": "HR@10", "ndcg@10": "NDCG@10", "all:hit@10": "HR@10, all items", "all:ndcg@10": "NDCG@10, all items",
    "round_seconds": "seconds per round", "upload_mib": "MiB sent per client and round", "value": "ours (paper)",
    "users": "Users", "items": "Items", "sessions": "Sessions", "average_length": "Averaged Length",
}
_TYPES = {"window": int, "transfer_interval": int}
LEFT_OUT: dict[int, str] = {}  # tables that cannot be built, and why


def label(table: int, name: str) -> str:
    """A name as the paper prints it, or what it stands for."""
    if name == OURS and table in (4, 5):
        return "all rounds" if table == 4 else "every round"
    return LABELS.get(name, name)


def row_spec(row: str, backbone: str, dataset: str) -> RunSpec:
    """The run of a row: a method, or FCUCR with one setting changed, or a baseline with another loss."""
    if row in METHODS:
        return RunSpec(row, backbone, dataset)
    name, value = row.split("=")
    method = BASELINE if row == BCE else OURS
    return RunSpec(method, backbone, dataset, ((name, _TYPES.get(name, str)(value)),))


_SEEDS = "Ours: mean ± sample standard deviation over seeds; in parentheses: the paper, a mean of five runs."
_RANKED = ("HR@10, NDCG@10: the target among 100 sampled items; all items: the same target among all items, which the "
           "paper does not print.")
_SECONDS = ("Seconds per round: training and evaluation, mean over rounds. They depend on the machine and on what else "
            "ran on it; what machine the paper used is not known here. Its minutes and hours are printed in seconds.")


def _variants(number: int, title: str, rows: tuple[str, ...]) -> PaperTable:
    return PaperTable(number, title, tuple(DATASETS), ("sasrec",), rows, (*_SAMPLED, "round_seconds"), ("value",),
                      ("dataset", "row"), ("metric",), row_spec, notes=(_SEEDS, _SECONDS))


TABLES = {table.number: table for table in (
    PaperTable(1, "Data statistics", tuple(DATASETS), ("",), STATISTICS, ("",), ("value",), ("dataset",), ("row",),
               None, notes=("Ours; in parentheses: the paper.",)),
    PaperTable(2, "Main comparison", tuple(DATASETS), (*STATIC, *WHOLE_SESSIONS, *BACKBONES), ("ft", BCE, "fcucr"),
               (*_SAMPLED, *_FULL, "upload_mib"), ("value",), ("dataset", "backbone", "row"), ("metric",), row_spec,
               best="max",
               only=(*product(STATIC, ["ft"]), *product(WHOLE_SESSIONS, ["ft", BCE]), *product(BACKBONES, METHODS)),
               lead=Lead("hit@10", "value", name_p=True),
               notes=(_SEEDS, _RANKED,
                      "FedAvg on a sequential backbone is the paper's Fed-GRU4Rec, Fed-SASRec and Fed-TiSASRec; on "
                      "PFedRec, FedRAP and GPFedRec it is these methods as they are. Best and second: among all lines "
                      "of a dataset.",
                      "FedAvg on DMI-GNN, HearInt and MiaSRec is the paper's Fed-DMI-GNN, Fed-HearInt and Fed-MiaSRec. "
                      "It does not say which loss it trained them with, so its numbers stand beside both: their own "
                      "cross-entropy over all items, and one negative for the target, as FCUCR trains its backbones.",
                      "* p ≤ .05, two-sided paired t-test of FCUCR against FedAvg on the same backbone, and FCUCR is "
                      "better. The paper does not state what is paired; ours: users, each averaged over the seeds both "
                      "have; every metric is tested on its own.")),
    PaperTable(3, "Ablation", tuple(DATASETS), ("sasrec",), (OURS, "without=tasd", "without=iupr", "without=both"),
               (*_SAMPLED, *_FULL), ("value",), ("dataset", "row"), ("metric",), row_spec, best="max",
               notes=(_SEEDS, _RANKED, "The paper has no line w/o both, which keeps the private prediction module.")),
    _variants(4, "Rounds whose prototypes the knowledge base keeps", (*(f"window={n}" for n in WINDOWS), OURS)),
    _variants(5, "Interval of the prototype transfer", (OURS, *(f"transfer_interval={n}" for n in INTERVALS))),
)}
printed = partial(read_printed, "fcucr")  # the paper's numbers, by table


def inconsistencies() -> dict[tuple[int, Key], str]:
    """Cells whose printed number contradicts another printed one: none. Tables 3-5 repeat FCUCR's numbers as Table 2
    has them, and Table 5 the seconds of Table 4."""
    return {}


def early_rows(backbone: str) -> dict[str, RunSpec]:
    """The lines of Figure 2a on a backbone, by method; backbones of whole sessions have their baseline alone."""
    rows = (BCE,) if backbone in WHOLE_SESSIONS else tuple(METHODS)
    specs = [row_spec(row, backbone, "") for row in rows]
    return {spec.method: replace(spec, settings=(*spec.settings, ("early_session", True))) for spec in specs}


def _early() -> list[RunSpec]:
    return [replace(spec, dataset=dataset) for dataset, backbone in product(DATASETS, (*BACKBONES, *WHOLE_SESSIONS))
            for spec in early_rows(backbone).values()]


def _probability() -> list[RunSpec]:
    return [row_spec(row, backbone, dataset)
            for dataset, backbone, row in product(DATASETS, BACKBONES, TRANSFER)]


def noise_values(name: str) -> dict[float, float]:
    """A setting's values for the standard deviations of Figures 7-10."""
    return {round(deviation * NOISY[name], 4): deviation for deviation in NOISE}


def _noise() -> list[RunSpec]:
    return [spec for name in NOISY for spec in _values(name, tuple(noise_values(name)))]


def _values(name: str, values: tuple[float, ...]) -> list[RunSpec]:
    return [RunSpec(OURS, "sasrec", dataset, ((name, value),)) for dataset in DATASETS for value in values]


FIGURES = {"early": _early, "probability": _probability, "k": partial(_values, "neighbours", NEIGHBOURS),
           "lambda": partial(_values, "lambda_tasd", LAMBDAS), "noise": _noise}
FIGURE_ALIASES = {"2a": "early", **dict.fromkeys(("2b", "2c", "2bc"), "probability")}
