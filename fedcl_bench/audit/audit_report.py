"""An audit for people: as text, CSV and a figure's lines."""

from __future__ import annotations

from typing import Any, Mapping

import pandas as pd

from ..stats.accounting import INSTALL
from .attack import METRICS, OF_UPLOAD, SUM

HEADS = {"size_auc": "AUC", "size_precision": "precision", "size_auc_touched": "AUC, touched",
         "direction_auc": "AUC, direction", "direction_precision": "precision, direction"}
# What the papers' own noise is worth, however strong it is.
PAPERS = (
    "F3CRec's noise (Table 8: Laplace, uploads not clipped) bears no formal guarantee: nothing bounds what one client "
    "adds, so there is no epsilon.",
    "FCUCR's epsilon takes the sensitivity as 1, which nothing bounds, and is of Gaussian noise on the prototypes that "
    "clients receive (its code), not on what they upload: no formal guarantee.")


def title(audit: Mapping[str, Any]) -> str:
    seeds = audit["seeds"]
    return (f"{audit['method']} on {audit['backbone']}, {audit['dataset']}, block {audit['block']}, "
            f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")


def interval(value: Mapping[str, float] | None) -> str:
    return "–" if value is None else f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def table(audit: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: means over clients with 95 % intervals."""
    clipped = audit["settings"].get("upload_clip", 0.0) > 0.0
    heads = ["round", "noise", "uploads", *HEADS.values(), *["ε"] * clipped]
    rows = []
    for number in audit["rounds"]:
        for row in audit["levels"]:
            for uploads, prefix, epsilon in (("one", "", "epsilon"), ("sum", SUM, "epsilon_so_far")):
                if row["round"] == number and (number > 1 or not prefix):
                    rows.append([str(number), f"{row['noise']:g}", uploads,
                                 *(interval(row[prefix + name]) for name in OF_UPLOAD),
                                 *["none" if row[epsilon] is None else f"{row[epsilon]:.4g}"] * clipped])
    return heads, rows


def notes(audit: Mapping[str, Any]) -> list[str]:
    """How to read the table, and what it does not say."""
    chance, clients = audit["by_chance"], {row["clients"] for row in audit["levels"]}
    settings = audit["settings"]
    lines = [f"Mean over {' or '.join(map(str, sorted(clients)))} clients [95 % bootstrap interval]. AUC and precision "
             f"at n+ of items ranked by the size of their rows' change; touched: among the client's own positives and "
             f"negatives only; direction: by the change along the main direction. One: the upload of this round; sum: "
             f"all uploads of the client in the block up to it, added up, which averages noise out.",
             f"By chance: AUC .5, precision {chance['precision']:.3f}; knowing which rows changed, precision "
             f"{chance['precision_touched']:.3f}."]
    if settings.get("upload_clip", 0.0) > 0.0:
        norm = "L1" if settings.get("upload_mechanism", "laplace") == "laplace" else "L2"
        lines.append(f"Changes are clipped to an {norm} norm of {settings['upload_clip']:g}. " + (
            f"{', '.join(audit['not_attacked'])}, also uploaded, are not: no formal guarantee." if audit["not_attacked"]
            else f"ε for delta {audit['delta']:g}, all of a client's data replaced: of the one upload, or of all "
                 f"rounds so far, those of earlier blocks among them."))
        if any(row["epsilon_is_bound"] for row in audit["levels"]):
            lines.append(f"These are upper bounds; for tighter ones: {INSTALL}.")
    else:
        lines.append("Uploads are not clipped, so no level of noise bears a formal guarantee (--set upload_clip=C).")
    if audit["not_attacked"]:
        lines.append(f"Also uploaded and not attacked: {', '.join(audit['not_attacked'])}.")
    return [*lines, *PAPERS]


def markdown(audit: Mapping[str, Any]) -> str:
    heads, rows = table(audit)
    lines = [f"**{title(audit)}**", "", f"| {' | '.join(heads)} |", "|" + "--:|" * len(heads),
             *(f"| {' | '.join(row)} |" for row in rows), "", *(f"- {line}" for line in notes(audit))]
    return "\n".join(lines) + "\n"


def csv_text(audit: Mapping[str, Any]) -> str:
    """One line per noise, round and metric, in full precision."""
    rows = [{**{name: audit[name] for name in ("method", "backbone", "dataset", "block")},
             **{name: row[name] for name in ("round", "noise", "epsilon", "epsilon_so_far")}, "metric": metric,
             **row[metric], "clients": row["clients"]}
            for row in audit["levels"] for metric in METRICS if row[metric] is not None]
    return str(pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
