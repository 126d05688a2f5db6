"""What streams differ in: what a round's participants train on, and how a model is validated and tested.

``Lists`` is for blocks and the static stream: clients train on all their items of a step, and a model is tested on the
step and every earlier one. ``SessionSteps`` is for streams of sessions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Sequence

import torch
from torch import Tensor

from ..training.session_trainer import SessionChunk, clients_at_once, make_session_chunks
from ..training.strategies import Strategy, Training
from ..data.stream import Ragged, Step
from ..rng import DrawKey
from ..evaluation.beyond_accuracy import Analysis, analyse_lists, analyse_sessions, catalogue_of, exposure
from ..evaluation.drift import NEGATIVE, TARGET
from ..evaluation.metrics import NDCG, RATING_ERRORS, Hit
from ..evaluation.ranking import RankingTask, UserScores, draw_candidates, had_in, rank_all, rating_errors
from ..evaluation.session_ranking import SessionRanking, SessionTask, draw_session_candidates, rank_sessions
from ..plugin.method import Method
from ..plugin.metric import Catalogue, Metric
from ..plugin.state import Snapshot
from ..training.sampling import Chunk, Needs, make_chunks
from ..plugin.sequential import SequentialBackbone
from .parameter_growth import row_width
from .parts import Federation

Tests = list[tuple[int, int, UserScores]]


class Lists:
    """A step of blocks, or the static stream; ``known``: it as its clients know it, ``method``: as it ranks."""

    changes_every_round = False

    def __init__(self, f: Federation, step: Step, known: Step, training: Training, method: Method):
        self.f, self.step, self.training, self.method = f, step, training, method
        self.known = known if f.server.cold_items == "none" or step.index == 0 else without_new_items(known)
        self.evaluated = f.evaluated(step)

    def chunks(self, users: Tensor, round_: int, model: Snapshot) -> list[Chunk]:
        """What the participants train on in a round; the same in every round unless they change."""
        return list_chunks(self.known, users, model, self.training)

    def lengths(self, round_: int) -> Tensor:
        """Interactions each user trains on in a round, shape (users,)."""
        return self.known.train.lengths

    def validate(self, model: Snapshot, round_: int) -> UserScores:
        f, by = self.f, self.f.evaluation.valid_metric
        if by in RATING_ERRORS:
            errors = rating_errors(f.backbone, model, self._valid)
            return UserScores(errors.users, {by: -errors.values[by]})  # the highest is best
        return rank_all(f.backbone, self.method, model, self._validation)

    @cached_property
    def _valid(self) -> Ragged:
        return self._to_find(self.step, "valid")

    @cached_property
    def _validation(self) -> RankingTask:
        metric, k = self.f.validation
        masks = [self.step.train, *self._had_before(self.step, "valid")]
        return RankingTask(self._valid, masks, [k], self._candidates(self.step, "valid", self._valid, masks), [metric])

    def _to_find(self, step: Step, split: str) -> Ragged:
        """The items to find of the users who are evaluated."""
        lists = step.split(split)
        return lists if self.evaluated is None else lists.where(self.evaluated[lists.owners])

    def _candidates(self, step: Step, split: str, to_find: Ragged, masks: Sequence[Ragged]) -> Tensor | None:
        """Sampled items, none of them masked, of the users with something to find; None if all items are ranked."""
        users = (to_find.lengths > 0).nonzero().flatten()
        return draw_candidates(step, self.f.evaluation, self.f.seed, users, masks).get(split)

    def test(self, model: Snapshot, round_: int) -> tuple[Tests, Analysis]:
        """Row R[t, .]: tests of a step's model on this and every earlier step. Candidates are all items accumulated up
        to the step just trained. Only that step's train and valid items are masked, also when an earlier step is tested
        (F3CRec's released code); with ``mask_history`` also what users had in the steps before the tested one."""
        f, step = self.f, self.step
        steps = [earlier.to(f.device) for earlier in f.stream.steps[:step.index + 1]]
        catalogue = catalogue_of(steps, model.item_vectors, f.population.all_reduce)
        of_items = any(metric.of_items for metric in f.metrics)
        to_find = [self._to_find(earlier, "test") for earlier in steps]
        masks = [[step.train, step.valid, *self._had_before(earlier, "test")] for earlier in steps]
        tests = [rank_all(f.backbone, self.method, model, RankingTask(
            wanted, masked, f.topk, self._candidates(earlier, "test", wanted, masked), f.metrics,
            catalogue if of_items or f.on_test or earlier is steps[-1] else None))
                 for earlier, wanted, masked in zip(steps, to_find, masks)]
        analysis = analyse_lists(steps, catalogue, tests[-1].users, tests[-1].lists[:, :max(f.evaluation.topk)],
                                 f.population.all_reduce)
        if f.attack is not None and f.attack.targets:
            analysis += exposure(f.backbone, model, steps, f.targets, self.method, self.evaluated)
        errors = [rating_errors(f.backbone, model, wanted).values if f.explicit else {} for wanted in to_find]
        return [(step.index, earlier.index, replace(scores, values={**scores.values, **more}))
                for earlier, scores, more in zip(steps, tests, errors)], analysis

    def _had_before(self, tested: Step, split: str) -> list[Ragged]:
        """With ``mask_history``, what each user had in the steps before ``tested``, but for items to find."""
        if not self.f.evaluation.mask_history:
            return []
        target = tested.split(split)
        lists = had_in((step.to(self.f.device) for step in self.f.stream.steps[:tested.index]), self.step)
        pairs = [of.owners * self.step.n_items + of.values for of in (lists, target)]
        return [lists.where(~torch.isin(*pairs))]

    def extra(self, model: Snapshot, round_: int) -> dict[str, float]:
        return {}


class SessionSteps:
    """A stream of sessions: every client trains on its next session in each round."""

    def __init__(self, f: Federation, step: Step, training: Training):
        self.f, self.step, self.training, self.method = f, step, training, training.method
        self.candidates: dict[str, Tensor | None] = {}
        self.validation, self.evaluated = f.validation, f.evaluated(step)
        # Sequences are looked up round by round; lists of items are made anew.
        self.changes_every_round = not isinstance(f.backbone, SequentialBackbone)

    def chunks(self, users: Tensor, round_: int, model: Snapshot) -> list[Chunk] | list[SessionChunk]:
        """The participants' next sessions: as sequences, or as lists of items for a backbone that is not sequential."""
        if isinstance(self.f.backbone, SequentialBackbone):
            return make_session_chunks(self.step, users, clients_at_once(self.f.backbone, self.step.n_items))
        sessions = self.step.sessions["train"]
        positives = sessions.as_lists(sessions.in_round(users, round_), self.step.n_users, users)
        return list_chunks(self.step, users, model, self.training, positives)

    def lengths(self, round_: int) -> Tensor:
        """Interactions of the session each user trains on in a round, shape (users,)."""
        sessions = self.step.sessions["train"]
        return sessions.lengths[sessions.in_round(torch.arange(self.step.n_users, device=self.f.device), round_)]

    def _rank(self, model: Snapshot, purpose: str, round_: int, topk: Sequence[int], metrics: Sequence[Metric],
              catalogue: Catalogue | None = None) -> SessionRanking:
        f = self.f
        if purpose not in self.candidates or f.evaluation.candidate_draw == "redraw":
            self.candidates[purpose] = draw_session_candidates(self.step, purpose, f.evaluation, f.seed, round_)
        task = SessionTask(self.step, purpose, topk, self.candidates[purpose],
                           DrawKey(f.seed, self.step.index, round_), tuple(metrics), catalogue,
                           partial(f.population.answer_queries, self.method), self.evaluated)
        return rank_sessions(f.backbone, self.method, model, task, self.training.protection)

    def validate(self, model: Snapshot, round_: int) -> UserScores:
        metric, k = self.validation
        return self._rank(model, "valid", round_, [k], [metric]).scores

    def test(self, model: Snapshot, round_: int) -> tuple[Tests, Analysis]:
        """The test sessions under the model of a round, the probabilities of each item to find and of a negative, and
        what the lists under full ranking are like."""
        f, t = self.f, self.step.index
        catalogue = catalogue_of([self.step], model.item_vectors, f.population.all_reduce)
        ranking = self._rank(model, "test", round_, f.topk, f.metrics, catalogue)
        scores = ranking.scores
        probabilities = {TARGET: ranking.probabilities, NEGATIVE: ranking.negatives}
        analysis = analyse_sessions(self.step, catalogue, scores, max(f.evaluation.topk), f.population.all_reduce)
        return ([(t, t, scores)],
                [*((t, kind, scores.users, values) for kind, values in probabilities.items() if values is not None),
                 *analysis])

    def extra(self, model: Snapshot, round_: int) -> dict[str, float]:
        if not self.f.evaluation.early_session:
            return {}
        _, k = self.validation
        scores = self._rank(model, "early", round_, [k], [Hit(), NDCG()]).scores
        return {f"early_{name}": self.f.population.mean(scores, name) for name in scores.values}


def list_chunks(step: Step, users: Tensor, model: Snapshot, training: Training, positives: Ragged | None = None
                 ) -> list[Chunk]:
    """Chunks of clients that train on lists: all their items of the step, or ``positives``."""
    backbone, settings, fused = training.backbone, training.settings, training.strategy is Strategy.FUSED
    needs = Needs(backbone.pairwise, training.holds_whole,
                  backbone.own_samples(settings) if positives is None else None,
                  fused or training.strategy is Strategy.FACTORED, training.samples_only or fused, fused,
                  training.method.penalises_rows, not fused and training.unnumbered(model))
    return make_chunks(step, users, settings, row_width(model, backbone), needs, positives)


def without_new_items(step: Step) -> Step:
    """A step in which negatives are drawn among the items of earlier ones."""
    splits = {name: step.split(name) for name in ("train", "valid", "test")}
    return replace(step, n_items=step.old_items, **{
        name: lists.where(lists.values < step.old_items) for name, lists in splits.items()})
