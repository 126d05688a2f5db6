"""The table of one result: what the command ``run`` shows, and ``Results.table``."""

from __future__ import annotations

from typing import Any, Mapping

from ..records.store import block_names, domains_of


def texts(result: Mapping[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """Columns, and a row of text per metric: the mean over users on the block just trained, ± standard deviation over
    seeds; ``result``: what ``execute`` or ``combined`` returns."""
    rows = {}
    for name, values in result["metrics"].items():
        means, deviations = ([*values[f"per_block{suffix}"], values[f"avg_incremental{suffix}"]]
                             if f"per_block{suffix}" in values else [] for suffix in ("", "_std"))
        if len(result.get("seeds", ())) > 1:
            rows[name] = [f"{mean:.4f} ± {std:.4f}" for mean, std in zip(means, deviations) if mean is not None]
        else:
            rows[name] = [f"{mean:.4f}" for mean in means if mean is not None]
    blocks, domains = len(result["rounds"]), domains_of(result)
    return block_names(domains, blocks) + ["mean" if domains else f"avg 1-{blocks - 1}"] * (blocks > 1), rows
