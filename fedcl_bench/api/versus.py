"""Results against other methods: the paired tests of the command ``compare``, as a frame."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Sequence

import pandas as pd

from ..core.errors import UserError
from ..core.settings import inactive
from ..data.settings import StreamSettings
from ..reports.comparison import against_each, changed_settings
from ..reports.selection import matching
from ..runs.config import CORE_SETTINGS, resolve, without_effect
from ..records.run import Run
from ..runs.specs import RunSpec, Tuned, parse_method, seed_text
from ..records.store import load_runs
from .origin import Origin, warned


def shared_changes(run: Run, origin: Origin, method: str, backbone: str) -> dict[str, Any]:
    """The settings of stream, clients, server, evaluation and backbone in which a run differs from its defaults: what
    another method on its backbone must have too, to be compared with it, but for what it ignores."""
    dataset, registry = origin.dataset(run), origin.registry
    known = registry.get("backbone", backbone).cls
    shared = {f.name for cls in (*CORE_SETTINGS, known.Settings) for f in fields(cls)}
    changes = {name: value for name, value in changed_settings(registry, run.meta, dataset).items() if name in shared}
    of_stream = {f.name: changes[f.name] for f in fields(StreamSettings) if f.name in changes}
    parts = resolve(registry, method, backbone, dataset, [("shared", of_stream)])
    ignored = without_effect(parts, known, registry.get("method", method).cls).keys() - inactive(parts).keys()
    return {name: value for name, value in changes.items() if name not in ignored}


def runs_of(text: str, beside: Sequence[Run], origin: Origin, tuned: Path | None) -> list[Run]:
    """The runs of another method beside those of one.

    Args:
        text: the method, with settings of its own as ``f3crec:without=arm,eps=0.01``.
        beside: the seeds of the one, all with its settings.
        tuned: folder of tuned settings that it has; None: it has those that the one changes and methods share.

    Raises:
        UserError: for an unknown method or setting, or if there is no such run, with the call that makes it.
    """
    method, own = parse_method(text)
    run, method = beside[0], origin.registry.get("method", method).name
    backbone = origin.registry.backbone_for(method, run.meta["backbone"])
    settings = {**({} if tuned else shared_changes(run, origin, method, backbone)), **dict(own)}
    spec = RunSpec(method, backbone, origin.dataset(run), tuple(settings.items()))
    runs = matching(load_runs(origin.records, warned), origin.registry, spec, Tuned.of(tuned, origin.records))
    if not runs:
        raise UserError(f"no record in {origin.records} of {spec.title} on {spec.backbone}, {run.meta['dataset']}.\n"
                        f"Make it with: {origin.call(spec, settings, {each.seed for each in beside})}")
    return runs


def against(mine: tuple[str, Sequence[Run]], others: dict[str, Sequence[Run]], metric: str,
            blocks: Sequence[int] | None) -> pd.DataFrame:
    """The first method against each of the others, one row per other method; the columns are those of
    ``Results.compare``. Errors as of ``against_each``."""
    name, runs = mine
    if same := [other for other, of_other in others.items() if {r.hash for r in of_other} & {r.hash for r in runs}]:
        raise UserError(f"compare: {same[0]} are the same runs as those compared; name another method.")
    rows = []
    # A name of its own, so that a variant of the method does not take its place.
    for c in against_each({f"{name} ": runs, **others}, f"{name} ", metric, blocks):
        by_seed = {f"seed_{what}": getattr(c.seeds, what, None) for what in ("difference", "t", "p")}
        rows.append({"against": c.other, "difference": c.users.difference, "low": c.users.low, "high": c.users.high,
                     "t": c.users.t, "p": c.users.p, "p_holm": c.p_holm, "p_sign_flip": c.users.p_permutation,
                     "d_z": c.users.effect, "users": c.users.n, "users_left_out": c.users_left_out,
                     "seeds": seed_text(c.common), "seeds_left_out": seed_text(c.left_out), **by_seed})
    return pd.DataFrame(rows)
