"""Results: the finished runs of one combination, one per seed."""

from __future__ import annotations

import io
import warnings
from dataclasses import fields
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Sequence

import numpy as np
import pandas as pd

from ..core.errors import UserError, require_known
from ..core.settings import inactive
from ..core.text import quoted
from ..data.datasets import load_stream
from ..data.settings import StreamSettings
from ..records.store import LEAKS, Run, leaks, load_runs, why_no_groups
from ..reports import draw, frame
from ..reports.comparison import against_each, changed_settings, unequal
from ..reports.selection import matching
from ..runs.config import CORE_SETTINGS, attack_of, resolve, without_effect
from ..runs.metadata import NO_BACKBONE
from ..runs.specs import RunSpec, Tuned, parse_method, seed_text
from .arguments import as_path, as_whole, check_texts, in_python
from .model import Model, holds_all_sessions, saved_model
from .origin import Origin, warned
from .result_table import texts
from .seeds import combined

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS = ("rounds", "matrix")
_BLOCKS = {"trained": "trained_block", "tested": "tested_block"}


class Results:
    """The finished runs of one method, backbone, dataset and settings; made by ``fedcl_bench.run`` and ``load``.

    Frames are made anew from the records when asked for, so changing one changes nothing else. Blocks count from 0, and
    in a static stream or one of sessions there is only block 0.

    Attributes:
        runs: the runs, sorted by seed; ``runs[0].meta`` is the content of its ``run.json``.
        method, backbone, dataset: their names.
        seeds: ascending.
        metric: that chose the best round, as ``ndcg@20``: the default of ``compare`` and ``plot``.
        folders: of each seed's record; of compact records, theirs.
    """

    def __init__(self, runs: Sequence[Run], origin: Origin):
        self.runs = tuple(sorted(runs, key=lambda run: run.seed))
        meta = self.runs[0].meta
        self.method, self.backbone, self.dataset = (str(meta[kind]) for kind in ("method", "backbone", "dataset"))
        self.metric = str(meta["settings"]["valid_metric"])
        self.seeds, self.folders = [run.seed for run in self.runs], [run.path for run in self.runs]
        self._origin = origin
        self._models: dict[int, Model] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that have an effect, by name; a copy."""
        return dict(self.runs[0].meta["settings"])

    @property
    def metrics(self) -> pd.DataFrame:
        """Test metrics, one row per test. Columns: seed; trained_block, the block trained last; tested_block; metric,
        as ``ndcg@20``; mean, over users, from 0 to 1; users, how many the mean is over."""
        test = ["seed", *_BLOCKS.values()]
        means = frame.results(self.runs).query("group == ''").drop(columns="group").rename(
            columns={**_BLOCKS, "value": "mean"})
        counts = self._seeded("users").groupby(test, observed=True)["user"].nunique().rename("users")
        found = means.join(counts, on=test).fillna({"users": 0}).astype({"users": int})
        # Of an earlier block a domain's own test stands for all; a test of nobody has no mean.
        return found[(found["users"] > 0) | found["mean"].isna()].reset_index(drop=True)

    @property
    @in_python()
    def users(self) -> pd.DataFrame:
        """Test metrics per user, one row per test, user and metric. Columns: seed, trained_block, tested_block; user,
        its original id as text, of a stream of sessions with topology=central the number of the test session; metric;
        value, from 0 to 1.

        Raises:
            UserError: if neither a model nor the data is there to tell the original ids.
        """
        users = self._seeded("users")
        numbers = users["user"].to_numpy()
        ids = numbers.astype(str).astype(object) if holds_all_sessions(self.settings) else self._user_ids[numbers]
        return users.assign(user=ids, metric=users["metric"].astype(str))

    @property
    def groups(self) -> pd.DataFrame:
        """Test metrics of groups of users and items on the block trained (docs/protocols.md). Columns: seed; block;
        group, as new-users; metric; mean, over the group's users, nan where it has nobody; users, how many it has.

        Raises:
            UserError: for a record from before groups were recorded, or whose clients are not users.
        """
        for run in self.runs:
            if "groups" not in run.meta:
                raise UserError(f"groups: the record {run.path} has none, as {why_no_groups(run.meta)}.")
        of_groups = frame.results(self.runs).query("group != ''").drop(columns="trained").rename(
            columns={"tested": "block", "value": "mean"})
        place, counted = ["seed", "block", "group"], of_groups["metric"] == "users"
        counts = of_groups[counted].set_index(place)["mean"].astype(int).rename("users")
        return of_groups[~counted].join(counts, on=place).reset_index(drop=True)

    @property
    def rounds(self) -> pd.DataFrame:
        """What happened in each round. Columns: seed; step, the block; round, from 0; participants; loss; valid, the
        validation metric (nan: not validated); bytes_up and bytes_down per participant; train_seconds and
        evaluate_seconds; and what the backbone or method measures besides."""
        return self._seeded("rounds")

    @property
    def matrix(self) -> pd.DataFrame:
        """R[t, s], the mean of a metric on block s after training up to block t. Columns: seed; metric; trained_block
        (t); then 0, 1, ..., one per tested block (s), nan where s > t."""
        means = frame.results(self.runs).query("group == ''").rename(columns=_BLOCKS).pivot_table(
            "value", ["seed", "metric", "trained_block"], "tested_block", sort=False)
        return means.rename_axis(columns=None).reset_index()

    def _seeded(self, name: str) -> pd.DataFrame:
        """One of the frames of all records, under each other."""
        return pd.concat({run.seed: getattr(run, name) for run in self.runs}, names=["seed"]).reset_index(
            "seed").reset_index(drop=True)

    def table(self) -> pd.DataFrame:
        """What the command ``run`` shows, as text: a row per metric, a column per block and their average but for
        block 0. Cells are the mean over users and seeds on the block just trained, with ± the sample standard deviation
        over seeds if there are several."""
        columns, rows = texts(combined([{**run.meta, "record": str(run.path), "reused": True} for run in self.runs]))
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("metric")

    @in_python()
    def compare(self, others: str | Results | Sequence[str | Results], metric: str | None = None,
                blocks: int | Sequence[int] | None = None, tuned: str | Path | None = None) -> pd.DataFrame:
        """Paired tests against other methods, as the command ``compare`` does them (docs/tables.md).

        Args:
            others: methods whose records lie in the same results folder, as ``"ft"`` or ``"f3crec:without=arm"``, or
                other results. A method is taken with the settings that these results change and that methods share.
            metric: as ``ndcg@20``; None: the one that chose the best round.
            blocks: one, or those averaged over; None: all but block 0.
            tuned: folder of tuned settings that the other methods have.

        Returns:
            One row per other method. Columns: against; difference, positive if these results are better, with its 95 %
            interval low, high; t and p of a paired t-test over users, p_holm, p_sign_flip, d_z, users and
            users_left_out; seeds that both have and seeds_left_out, as text; seed_difference, seed_t and seed_p of the
            same test over seeds, None with fewer than 2.

        Raises:
            UserError: for an unknown method, metric or block, if there is no such record (with the call that makes it),
                or if the two cannot be compared.
        """
        check_texts("compare", metric=metric)
        one = isinstance(blocks, str) or not isinstance(blocks, Iterable)
        chosen = None if blocks is None else [as_whole("compare", "blocks", block, 0, self.runs[0].head["blocks"] - 1)
                                              for block in ([blocks] if one else blocks)]
        if chosen == []:
            raise UserError("compare: found no blocks, accepted: one or more, or None for all but block 0.")
        several = [others] if isinstance(others, (str, Results)) or not isinstance(others, Iterable) else [*others]
        for other in several:
            if not isinstance(other, (str, Results)):
                raise UserError(f"compare: found {quoted(other)}, accepted: methods, as 'ft', and other results.")
        folder = None if tuned is None else as_path("compare", "tuned", tuned)
        named: dict[str, Sequence[Run]] = {}
        for other in several:
            if isinstance(other, Results):
                named[other._name_beside([*named, *several])] = other.runs
            else:
                named[other] = runs_of(other, self.runs, self._origin, folder)
        if not named:
            raise UserError("compare: found no other method, accepted: one or more, as compare('ft').")
        choices = Tuned.of(folder or True, self._origin.records)
        for name, runs in named.items():
            if differ := unequal(self.runs[0], runs[0], self._origin.registry, choices):
                warnings.warn(f"{self.method} has other settings than {name}: {differ}", stacklevel=3)
            for key in ("backbone", "dataset"):
                pair = {runs[0].meta[key], self.runs[0].meta[key]}
                if len(pair) > 1 and NO_BACKBONE not in pair:
                    raise UserError(f"compare: {name} has {key} {runs[0].meta[key]}, these results have "
                                    f"{self.runs[0].meta[key]}; compare results on the same one.")
        return against((self.method, self.runs), named, metric or self.metric, chosen)

    def _name_beside(self, taken: Sequence[Any]) -> str:
        number, name = 1, self.method
        while name in taken:
            number += 1
            name = f"{self.method} ({number})"
        return name

    @in_python()
    def plot(self, kind: str = "rounds", metric: str | None = None) -> Figure:
        """A figure for print.

        Args:
            kind: ``rounds``: the validation metric over the rounds, one panel per block, mean and band of one standard
                deviation over seeds; ``matrix``: R[t, s], mean over seeds.
            metric: of ``matrix``, as ``recall@20``; None: the one that chose the best round.

        Returns:
            A matplotlib figure, 3.3 or 7 inches wide; ``figure.savefig("file.pdf")`` writes it, and notebooks show it.

        Raises:
            UserError: for an unknown kind or metric.
        """
        check_texts("plot", kind=kind, metric=metric)
        require_known("kind of plot", [kind], PLOTS)
        if kind == "rounds" and metric not in (None, self.metric):
            raise UserError(f"plot: found metric={quoted(metric)}, accepted with kind='rounds': {self.metric}, which "
                            f"was validated.")
        look, title, metric = draw.looks({self.method: self.method}), self._title(), metric or self.metric
        if kind == "rounds":
            curves = frame.validation_curves(self.runs)
            figure = draw.validation_curves({self.method: curves}, look, self.metric, title)
        else:
            frame.check_metric(self.runs, metric)
            figure = draw.forgetting_maps({self.method: frame.mean_matrix(self.runs, metric)}, look, metric, title)

        def picture() -> bytes:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=120)
            return buffer.getvalue()
        # A notebook shows a figure that pyplot has not made only if it gives its own picture.
        figure._repr_png_ = picture
        return figure

    def model(self, seed: int | None = None) -> Model:
        """The trained model of a seed, as it was tested after the last block.

        Args:
            seed: None: the first.

        Returns:
            ``tables`` (PyTorch tensors), ``user_ids`` and ``item_ids`` (original ids in the order of their rows),
            ``scores(user)`` and ``recommend(user, k)``.

        Raises:
            UserError: for a seed that is not among these, or if the record's ``model.pt`` is not there or has changed.
        """
        by_seed = {run.seed: run for run in self.runs}
        seed = self.runs[0].seed if seed is None else as_whole("model", "seed", seed, 0)
        if seed not in by_seed:
            raise UserError(f"model: found seed {seed}, accepted: {seed_text(by_seed)}.")
        if seed not in self._models:
            self._models[seed] = Model(by_seed[seed], saved_model(by_seed[seed]), self._origin)
        return self._models[seed]

    def recommend(self, user: str | int, k: int = 10, seed: int | None = None,
                  mask_seen: bool = True) -> pd.DataFrame:
        """The best items for a user, by the model of a seed.

        Args:
            user, k, mask_seen: as for ``Model.recommend``, whose frame this is.
            seed: None: the first.

        Raises:
            UserError: as ``model`` and ``Model.recommend``.
        """
        return self.model(seed).recommend(user, k, mask_seen)

    def __repr__(self) -> str:
        return f"{self._title()}\n{self.table().to_string()}"

    def _repr_html_(self) -> str:
        """The table with its caption, for notebooks; every name is escaped."""
        folders = "<br>".join(escape(str(folder)) for folder in dict.fromkeys(self.folders))
        return (f"<div><b>{escape(self._title())}</b>{self.table().to_html(escape=True)}"
                f"<small>test users per block: {', '.join(map(str, self.runs[0].meta['tested']['users']))}<br>{folders}"
                f"</small></div>")

    def _title(self) -> str:
        return f"{self.method} on {self.backbone}, {self.dataset}; seed{'s' * (len(self.runs) > 1)} " \
               f"{seed_text(self.seeds)}{f'; {LEAKS}' * leaks(self.settings)}"

    @cached_property
    def _user_ids(self) -> np.ndarray:
        """Original ids, from a model if there is one that has them, else from the data."""
        for run in self.runs:
            try:
                ids = self.model(run.seed).saved.user_ids
            except UserError:
                continue
            if ids is not None:
                return np.array(ids, dtype=object)
        config = self._origin.config(self.runs[0])
        return load_stream(config.source, config.stream, config.features).user_tokens.astype(str).astype(object)


# Against other methods, as the command ``compare``


def shared_changes(run: Run, origin: Origin, method: str, backbone: str) -> dict[str, Any]:
    """The settings of stream, clients, server, evaluation, backbone and attack in which a run differs from its
    defaults: what another method on its backbone must have too, to be compared with it, but for what it ignores."""
    dataset, registry = origin.dataset(run), origin.registry
    known = registry.get("backbone", backbone).cls
    changes = changed_settings(registry, run.meta, dataset)
    of_stream = {f.name: changes[f.name] for f in fields(StreamSettings) if f.name in changes}
    parts = resolve(registry, method, backbone, dataset, [("shared", of_stream)])
    ignored = without_effect(parts, known, registry.get("method", method).cls).keys() - inactive(parts).keys()
    attack = None if "attack" in ignored else attack_of(registry, changes.get("attack", "none"))
    classes = (*CORE_SETTINGS, known.Settings, *([attack.cls.Settings] if attack else []))
    shared = {f.name for cls in classes for f in fields(cls)} - ignored
    return {name: value for name, value in changes.items() if name in shared}


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
    chosen = Tuned.of(tuned, origin.records)
    runs = matching(load_runs(origin.records, warned), origin.registry, spec, chosen)
    if not runs:
        settings = {**(chosen.settings(method, backbone, origin.dataset(run)) if chosen else {}), **settings}
        raise UserError(f"no record in {origin.records} of {spec.title} on {spec.backbone}, {run.meta['dataset']}.\n"
                        f"Make it with: {origin.call(spec, settings, {each.seed for each in beside})}")
    return runs


def against(mine: tuple[str, Sequence[Run]], others: dict[str, Sequence[Run]], metric: str,
            blocks: Sequence[int] | None) -> pd.DataFrame:
    """The first method against each of the others, one row per other method; the columns are those of
    ``Results.compare``. Errors as of ``against_each``."""
    name, runs = mine
    owner = {run.hash: "these results" for run in runs}
    for other, of_other in others.items():
        for run in of_other:
            if (first := owner.setdefault(run.hash, other)) != other:
                raise UserError(f"compare: {first} and {other} are the same runs; leave one of them out.")
    rows = []
    mine_named = f"{name} (these results)"  # so that a variant of the method does not take its place
    for c in against_each({mine_named: runs, **others}, mine_named, metric, blocks):
        by_seed = {f"seed_{what}": getattr(c.seeds, what, None) for what in ("difference", "t", "p")}
        rows.append({"against": c.other, "difference": c.users.difference, "low": c.users.low, "high": c.users.high,
                     "t": c.users.t, "p": c.users.p, "p_holm": c.p_holm, "p_sign_flip": c.users.p_permutation,
                     "d_z": c.users.effect, "users": c.users.n, "users_left_out": c.users_left_out,
                     "seeds": seed_text(c.common), "seeds_left_out": seed_text(c.left_out), **by_seed})
    return pd.DataFrame(rows)
