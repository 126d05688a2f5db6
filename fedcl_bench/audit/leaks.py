"""Which information of validation and test reaches training or ranking, and what it is worth alone.

Every channel is measured by a predictor that uses it and nothing else, on the test items of a stream and by the metric
of its validation. Items between which a channel says nothing stand in random order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..core.errors import UserError
from ..core.settings import assemble
from ..data.items import tfidf
from ..data.datasets import load_stream, split_rows
from ..data.items.features import SIMILAR_DIM, text_vectors, texts_of
from ..data.items.item_texts import item_file
from ..data.files.recbole_files import Interactions
from ..data.settings import StreamSettings
from ..data.source import DatasetSource, locate, spelled
from ..data.stream import Ragged, Step, Stream
from ..evaluation.metrics import EvaluationSettings
from ..evaluation.ranking import RankingTask, draw_candidates, rank_all
from ..evaluation.session_ranking import SessionTask, draw_session_candidates, rank_sessions
from ..plugin.backbone import ITEM, Backbone
from ..plugin.method import Method, NoSettings
from ..plugin.metric import Metric
from ..plugin.state import Snapshot
from ..rng import DrawKey
from ..runs.config import CORE_SETTINGS, layers, refuse_inactive, with_known_metrics
from ..runs.registry import discover

DRAWS = 3  # random orders of items that score alike, whose mean is told
RANKINGS = 20  # random rankings: their mean is chance, and the best is what a choice on the test makes of it
SHIPPED = Path(__file__).parent / "leaks.json"
_RELEASED = {"stream": "static", "negative_pool": "untouched"}
PAPERS: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    # Protocol to dataset, settings, and what is open in released code besides.
    "F3CRec: blocks": ("ml-100k", {}, ()),
    "FCUCR: sessions": ("xing", {}, ()),
    "PFedRec, GPFedRec: static": ("ml-100k", _RELEASED, ()),
    "FedRAP: static": ("ml-100k", {**_RELEASED, "candidate_lists": "shared", "min_interactions": 10}, ("choice",)),
    "static, as here": ("ml-100k", {"stream": "static"}, ()),
    "FFMSR: domains": ("online-retail-ffmsr+amazon-pantry", {}, ("choice",))}

Predictor = Callable[[Tensor], Tensor]  # ids of n users to scores of all items, (n, items)


@dataclass(frozen=True)
class Channel:
    """A way for information of validation or test."""

    name: str
    on: bool | None  # whether it is open in these settings; None: depends on the backbone or on times not known
    alone: float | None  # the metric of a predictor that uses it and nothing else; None: there is nothing to measure
    how: str  # in words


@dataclass(frozen=True)
class Audit:
    """The channels of a stream; what chance reaches by its metric, and items by their ``training`` interactions."""

    dataset: str
    settings: Mapping[str, Any]
    metric: str
    chance: float
    training: float
    channels: tuple[Channel, ...]


@dataclass(frozen=True)
class Times:
    """When a unit's interactions were."""

    items: Tensor  # of those trained on, in order of time
    times: Tensor
    first: Tensor  # of each user's first item to find; infinite without one
    tied: Ragged  # items to find with the time of something that is known of the user


class _Scorer(Backbone):
    """Scores users by a predictor."""

    name, whole_tables = "a predictor", True

    def __init__(self, predictor: Predictor):
        self.predictor = predictor

    def score_all(self, clients, public):
        return self.predictor(clients["user"])


@dataclass(frozen=True)
class Unit:
    """A step of a stream, or a domain's part of one, and what predictors look at."""

    step: Step
    past: Sequence[Step]  # it and the steps before it
    candidates: Mapping[str, Tensor | None]  # sampled for ``valid`` and ``test``; None where all items are ranked
    times: Times | None
    texts: Tensor | None  # vectors of the items' texts, (items, d)

    def value(self, predictor: Predictor | None, metric: Metric, k: int, draw: int) -> float:
        """The metric of a predictor with one random order of items that score alike; None: of that order."""
        step, items, name = self.step, torch.arange(self.step.n_items), f"{metric.name}@{k}"

        def scores(users: Tensor) -> Tensor:
            keys = rng.client_keys(rng.key(draw, "scores alike", step.index), users)
            order = rng.uniform(rng.bits(keys[:, None], items))
            return order if predictor is None else predictor(users).double() + 1e-6 * order
        model = Snapshot({ITEM: items[:, None]}, {"user": torch.arange(step.n_users)})
        if step.sessions:
            task = SessionTask(step, "test", [k], self.candidates["test"], DrawKey(0, step.index, 0), (metric,))
            return rank_sessions(_Scorer(scores), Method(NoSettings()), model, task).scores.mean(name)
        drawn = self.candidates["test"]
        task = RankingTask(step.test, [step.train, step.valid], [k],
                           None if drawn is None else drawn[step.test.lengths > 0], [metric])
        return rank_all(_Scorer(scores), None, model, task).mean(name)

    def counts(self, *splits: str) -> Tensor:
        """Interactions of every item in some splits of all steps so far."""
        return sum(torch.bincount(step.split(split).values, minlength=self.step.n_items)
                   for step in self.past for split in splits)

    def missing(self, least: int) -> Tensor:
        """How many interactions an item must have beside those that were trained on so far, if it is known because it
        has so many at ``least``."""
        return (least - self.counts("train")).clamp(min=0)

    def predictors(self, least: int) -> dict[str, Predictor | None]:
        """By channel, and of training interactions; None where there is nothing to look at."""
        lists = [drawn[drawn >= 0] for drawn in self.candidates.values() if drawn is not None]
        step, times, texts = self.step, self.times, self.texts
        return {
            "training": self._same(self.counts("train")),
            "negatives": partial(self._marked, step.valid, step.test),
            "candidates": self._same(-torch.bincount(torch.cat(lists), minlength=step.n_items)) if lists else None,
            "popularity": self._same(self.counts("train", "valid", "test")),
            "catalogue": self._same(self.missing(least)),
            "ids": self._same(-torch.arange(step.n_items)),
            "ties": times and partial(self._marked, times.tied),
            "later": times and self._later,
            "texts": None if texts is None else self._same(texts @ texts.mean(0))}

    def _same(self, scores: Tensor) -> Predictor:
        return lambda users: scores.expand(len(users), -1)

    def _marked(self, *lists_and_users: Any) -> Tensor:
        *lists, users = lists_and_users
        scores = torch.zeros(len(users), self.step.n_items)
        for each in lists:
            scores[each.select(users)] = 1.0
        return scores

    def _later(self, users: Tensor) -> Tensor:
        after = torch.searchsorted(self.times.times, self.times.first[users], right=True).tolist()
        return torch.stack([torch.bincount(self.times.items[row:], minlength=self.step.n_items) for row in after])


def audit(dataset: str, changes: Mapping[str, Any], data_dir: Path | None = None,
          released: Sequence[str] = ()) -> Audit:
    """All channels of a dataset's stream under changed settings; ``released`` ones are open in another program than
    this one. Raises UserError for wrong settings and files; where one client holds all sessions, histories are masked
    or the metric is an error of ratings."""
    name, overrides = spelled(dataset, data_dir), [("--set", changes)]
    settings = of_stream, _, _, evaluation = assemble(CORE_SETTINGS, layers(name, overrides), "leaks")
    refuse_inactive(settings, overrides)
    registry = discover()
    evaluation = with_known_metrics(registry, evaluation)
    by, at, k = evaluation.valid_metric.partition("@")
    for found, is_so in (("topology=central", of_stream.topology_in_effect == "central"),
                         ("mask_history=true", evaluation.mask_history), (f"valid_metric={by}", not at)):
        if is_so:
            raise UserError(f"leaks: found {found}, accepted: clients that are users or domains, all items to rank, "
                            f"and a metric as ndcg@20.")
    metric = registry.get("metric", by).cls()
    source = locate(name, data_dir, of_stream)
    stream = load_stream(source, of_stream)
    units = _units(source, stream, of_stream, evaluation)
    for number, unit in enumerate(units):
        if not len(unit.step.test.values):
            raise UserError(f"{stream.name_of(number)} has no test interaction, so nothing can be measured; use fewer "
                            f"blocks (--set blocks=N), or a split file that has some in every block.")
    units = units[stream.per_step:] or units  # whose mean a run tells
    every = [unit.predictors(_least(of_stream)) for unit in units]

    def alone(name: str) -> float | None:
        values = [unit.value(each[name], metric, int(k), draw) for unit, each in zip(units, every)
                  for draw in range(DRAWS) if each[name] is not None]
        return float(np.mean(values)) if values else None
    luck = np.mean([[unit.value(None, metric, int(k), draw) for draw in range(RANKINGS)] for unit in units], 0)
    channels = tuple(
        Channel(name, name in released or on, float(luck.max()) if name == "choice" else alone(name), how)
        for name, on, how in _channels(settings, stream, units))
    return Audit(source.name, dict(changes), evaluation.valid_metric, float(luck.mean()), alone("training"), channels)


def _least(settings: StreamSettings) -> int:
    """How many interactions an item has that is known."""
    return 1 if settings.split_file else max(1, settings.k_core)


def _channels(settings: Sequence[Any], stream: Stream, units: Sequence[Unit]) -> list[tuple[str, bool | None, str]]:
    """Name, whether it is open, and how it leaks, with what the stream has of it."""
    of_stream, local, server, evaluation = settings
    lists, least = not stream.steps[0].sessions, _least(of_stream)
    rare, timed = int((units[-1].missing(least) > 0).sum()), bool(units[0].times) or None
    tested, tied = (sum(len(each.values) for each in lists) for lists in (
        [unit.step.test for unit in units], [unit.times.tied for unit in units if unit.times]))
    return [
        ("negatives", not stream.domains and local.negative_pool == "untouched",
         "with negative_pool=untouched no item of a client's validation or test is drawn; what never is, is to be "
         "found"),
        ("candidates", not stream.domains and evaluation.candidates == "sampled",
         "an item is no candidate of who has it in any split (static) or trains on it (sessions): what seldom is one, "
         "is popular, in the test too"),
        ("popularity", False, "counts over all splits; cold_start and cold_items=popularity count training "
                              "interactions alone"),
        ("catalogue", lists or bool(stream.domains) or least > 1,
         f"items are known that all splits of all blocks have, at least {least} times (k_core); {rare:,} have fewer "
         f"training interactions, so the others are held out or come later"),
        ("ids", lists, "items are numbered by first appearance in any split, and of equal scores the smaller number "
                       "wins; in sessions and domains the item to find loses"),
        ("ties", timed and of_stream.tie_order != "random" and of_stream.inc_split != "random",
         f"{tied:,} of {tested:,} items to find have the time of something known of the user; unless tie_order=random, "
         f"the order of the file says which comes last (the predictor is told)" if timed else "times are not known"),
        ("later", timed, "clients train on what happens after another's item to find: popularity from then on"),
        ("texts", None if stream.domains else server.cold_items == "similar",
         "vectors of texts are fitted on all items, also on those that nobody trains on: similarity to their mean. "
         "Features that a plugin reads (needs_features) are fitted on the items of the first block"),
        ("choice", False, f"a round or setting is chosen on the test, not on validation: the best of {RANKINGS} random "
                          f"rankings")]


def _units(source: DatasetSource, stream: Stream, of_stream: StreamSettings, evaluation: EvaluationSettings
           ) -> list[Unit]:
    rows = None if of_stream.split_file or stream.steps[0].sessions else split_rows(source, of_stream)
    units, result, texts = stream.units(), [], []
    if all(item_file(part.path).is_file() for part in source.parts or (source,)):
        texts = [torch.from_numpy(tfidf.encode(each, SIMILAR_DIM)[:, 0]) for each in texts_of(source, stream).values()
                 ] or [text_vectors(source, stream)]
    for number, step in enumerate(units):
        candidates = {} if stream.domains else {
            split: draw_session_candidates(step, split, evaluation, 0, 0) if step.sessions else
            draw_candidates(step, evaluation, 0).get(split) for split in ("valid", "test")}
        times = _session_times(step) if step.sessions else rows and _times(step, *rows)
        result.append(Unit(step, [step] if stream.domains else units[:number + 1], {"test": None, **candidates}, times,
                           texts[number % stream.per_step][:step.n_items] if texts else None))
    return result


def _times(step: Step, rows: Interactions, block: np.ndarray) -> Times:
    """Of a block, or the static stream; rows are in time order."""
    now = block == step.index
    train, test = now & (rows.split == 0), now & (rows.split == 2)
    known = {*zip(rows.user[now & ~test], rows.time[now & ~test])}
    order = np.flatnonzero(test)[np.argsort(rows.user[test], kind="stable")]  # as in step.test
    tied = torch.tensor([pair in known for pair in zip(rows.user[order], rows.time[order])], dtype=torch.bool)
    first = np.full(step.n_users, np.inf)
    np.minimum.at(first, rows.user[test], rows.time[test])
    return Times(*map(torch.from_numpy, (rows.item[train], rows.time[train], first)), step.test.where(tied))


def _session_times(step: Step) -> Times:
    """Of sessions, of which the item to find is each one's last."""
    train, test = step.sessions["train"], step.sessions["test"]
    order, last = train.times.argsort(stable=True), test.start[1:] - 1
    first = torch.full((step.n_users,), torch.inf, dtype=train.times.dtype)
    first[test.count > 0] = test.times[last]
    tied = test.times[last] == test.times[last - 1]
    return Times(train.items[order], train.times[order], first, step.test.where(tied))


def papers(data_dir: Path | None) -> list[dict[str, str]]:
    """The protocols of papers as rows of a number per channel, in parentheses if closed, in brackets if it depends."""
    rows = []
    for protocol, (dataset, changes, released) in PAPERS.items():
        found = audit(dataset, changes, data_dir, released)
        alone = {each.name: "–" if each.alone is None else f"{each.alone:.3f}" for each in found.channels}
        rows.append({"protocol": protocol, "dataset": found.dataset, "metric": found.metric,
                     "chance": f"{found.chance:.3f}", "training": f"{found.training:.3f}",
                     **{each.name: {True: "{}", False: "({})", None: "[{}]"}[each.on].format(alone[each.name])
                        for each in found.channels}})
    return rows


def shipped_papers() -> list[dict[str, str]]:
    """What ``papers`` gave when it was last written down."""
    return json.loads(SHIPPED.read_text(encoding="utf-8"))
