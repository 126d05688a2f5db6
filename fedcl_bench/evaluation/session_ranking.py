"""Ranking the last item of a session, given the items before it.

Each user has one to find, that of its validation or test session, which is ranked among sampled items, and among all of
them beside that (protocol of FCUCR). A domain, or one client that holds all, ranks the last item of each of its
sessions among all. Of equal scores the item to find comes last, so that a model that scores everything alike finds
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding

from .. import rng
from ..plugin import checks
from ..plugin.backbone import ITEM, Backbone
from ..training.session_trainer import input_rows, window
from ..training.silo_modules import histories
from ..training.silo_samples import SequentialModule
from ..data.stream import Ragged, Sessions, Step
from ..rng import DrawKey
from ..plugin.method import Encoding, Method
from ..plugin.metric import Catalogue, Metric, RankedLists
from ..plugin.state import Snapshot, score_pairs
from ..kernels.ops import highest
from ..core.parallel import even_pieces, in_order
from ..training.sampling import Others, padded
from ..plugin.sequential import OUTPUT, Dropout, Sequence, SequentialBackbone
from ..plugin.silo import DomainModule
from ..core.tuning import SIZES
from ..stats.clip_noise import OPEN, Protection, upload_key
from .metrics import DEFAULT, EvaluationSettings, measure
from .ranking import UserScores, finite_scores, scores_alone

FULL = "all:"  # before the name of a metric under full ranking, beside sampled candidates


@dataclass(frozen=True)
class SessionRanking:
    """Where the items to find were ranked."""

    scores: UserScores
    probabilities: Tensor  # sigmoid of the logit of each user's item, float64, in the order of ``scores.users``
    negatives: Tensor | None  # the same of its first sampled item, which may be that to find; None without samples


def draw_session_candidates(step: Step, purpose: str, settings: EvaluationSettings, seed: int,
                            round_: int) -> Tensor | None:
    """The sampled items of every user for a purpose (``valid``, ``test`` or ``early``): uniform with replacement over
    the items it does not train on, int64 of shape (users, sampled_candidates); None if all items are ranked.

    The same in every round and for every method, unless ``candidate_draw=redraw``.
    """
    if settings.candidates == "all":
        return None
    drawn = rng.key(seed, f"session candidates of {purpose}", step.index,
                      1 + round_ if settings.candidate_draw == "redraw" else 0)
    number = torch.arange(settings.sampled_candidates, device=step.train.values.device)
    parts = []
    for users in torch.arange(step.n_users, device=number.device).split(SIZES.session_users):
        others = Others.of(padded(step.train, users), step.n_items)
        keys = rng.client_keys(drawn, users)[:, None]
        parts.append(others.at(rng.integers(rng.bits(keys, number), others.count)))
    return torch.cat(parts)


def repeated_note(step: Step, settings: EvaluationSettings) -> str:
    """A sentence if a user's sampled items are more than there are, so that most stand in its list several times; else
    empty."""
    if not step.sessions or settings.candidates == "all" or settings.sampled_candidates < step.n_items:
        return ""
    return (f"{settings.sampled_candidates} sampled items are drawn with replacement from {step.n_items}, and each "
            f"counts as often as it is drawn; metrics with {FULL} rank every item once.")


@dataclass(frozen=True)
class SessionTask:
    """Which item each user is to find, among which."""

    step: Step
    purpose: str  # ``valid`` or ``test``: the last item of that session; ``early``: of the first training session
    topk: Iterable[int]  # list lengths
    candidates: Tensor | None  # sampled items of every user (see ``draw_session_candidates``); None: all items
    draw: DrawKey  # of the method's random numbers
    metrics: tuple[Metric, ...] = DEFAULT  # what is said of the lists
    # With it the lists under full ranking are kept. With sampled candidates the same metrics are taken under full
    # ranking too, named with ``all:`` in front; those of items only there.
    catalogue: Catalogue | None = None
    # Asks the server if it is elsewhere (see ``Method.answer_queries``); None: it is here.
    answer_queries: Callable[[Tensor, Tensor], Tensor] | None = None
    evaluated: Tensor | None = None  # whether each user is ranked for, bool of shape (users,); None: all are

    @property
    def users(self) -> Tensor:
        """The users who are ranked for, ascending."""
        there = self.sessions.count > 0
        return (there if self.evaluated is None else there & self.evaluated).nonzero().flatten()

    @property
    def ranks_all(self) -> bool:
        """Whether the scores of all items are needed."""
        return self.catalogue is not None or self.candidates is None

    @property
    def sessions(self) -> Sessions:
        return self.step.sessions["train" if self.purpose == "early" else self.purpose]


def rank_sessions(backbone: Backbone, method: Method, model: Snapshot, task: SessionTask,
                  protection: Protection = OPEN) -> SessionRanking:
    """Rank the item to find of every user; ``protection`` has noise for what clients send for their own evaluation."""
    topk, candidates, users = sorted(set(task.topk)), task.candidates, task.users
    sequential = isinstance(backbone, SequentialBackbone)

    @torch.no_grad()  # holds per thread
    def rank(users: Tensor) -> tuple[Tensor | None, ...]:
        """Each (n, ...): items before the one to find among the candidates and among all; its probability and that of
        the first candidate; the list."""
        ids = None if candidates is None else candidates[users]
        if not len(users):  # of a node whose users are not evaluated; plugins are not asked
            empty, of_all = users.double(), users if task.ranks_all else None
            return (None if ids is None else users, of_all, empty, None if ids is None else empty,
                    None if of_all is None or task.catalogue is None else users.new_empty(0, topk[-1]))
        target, wanted, others, every = _logits(backbone, method, model, task, protection, users, ids)
        sampled, negative, whole, items = None, None, None, None
        if ids is not None:
            # `not below` counts what is no number against the model.
            sampled = (~(others < wanted) & (ids != target)).sum(1)
            negative = torch.sigmoid(others[:, 0].double())
        if every is not None and task.ranks_all:
            whole = (~(every < every.gather(1, target))).sum(1) - 1
            items = None if task.catalogue is None else highest(every, topk[-1])
        return sampled, whole, torch.sigmoid(wanted.double()).squeeze(1), negative, items

    # Scores of all items take more memory, and those of a set of vectors so many times that.
    at_once = SIZES.session_users if task.ranks_all or not sequential else 4 * SIZES.session_users
    at_once = max(1, at_once // scores_per_item(backbone))
    parts = zip(*in_order(rank, even_pieces(users, at_once), users.device))
    sampled, whole, probabilities, negatives, items = (None if part[0] is None else torch.cat(part) for part in parts)
    scores = {} if sampled is None else measure(task.metrics, ranked_lists(sampled, topk), topk)
    if whole is not None:
        of_all = measure(task.metrics, ranked_lists(whole, topk, items, task.catalogue), topk)
        scores |= of_all if sampled is None else {FULL + name: values for name, values in of_all.items()}
    return SessionRanking(UserScores(users, scores, items), probabilities, negatives)


def scores_per_item(backbone: Backbone) -> int:
    """How many numbers a user's score of an item is made of that other users do not share."""
    if not isinstance(backbone, SequentialBackbone):
        return 1
    if backbone.private_output:
        return backbone.settings.dim + 1
    return 1 if backbone.inner_products else backbone.n_vectors


def _logits(backbone: Backbone, method: Method, model: Snapshot, task: SessionTask, protection: Protection,
            users: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The item to find (n, 1), its logit (n, 1), those of the candidates ``ids``, and of all items if needed.

    Of a sequential backbone they are of item rows and what it makes of the items before. Those of another depend on no
    items before, unless the method's do.
    """
    if isinstance(backbone, SequentialBackbone):
        return _sequential_logits(backbone, method, model, task, protection, users, ids)
    sessions = task.sessions
    target = window(sessions, sessions.of_user[users], 1)[0][:, -1:]
    if not task.ranks_all and scores_alone(backbone, method, model.n_items, ids.shape[1]):
        # At once, so that equal rows score alike.
        scores = score_pairs(backbone, model, users, torch.cat([target, ids], 1))
        checks.require_finite_scores(backbone, "score", scores, users)
        wanted, others = scores.tensor_split([1], 1)
        return target, wanted, others, None
    whole = Ragged(sessions.start, sessions.items).part(sessions.of_user[users])
    every = finite_scores(backbone, method, model, users, whole.at_most(whole.lengths - 1))
    return target, every.gather(1, target), None if ids is None else every.gather(1, ids), every


def _sequential_logits(backbone: SequentialBackbone, method: Method, model: Snapshot, task: SessionTask,
                       protection: Protection, users: Tensor, ids: Tensor | None
                       ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    sessions = task.sessions
    items, sequence = window(sessions, sessions.of_user[users], backbone.settings.max_length)
    target, vectors, mask = items[:, -1:], *_vectors(backbone, method, model, task, protection, users, sequence)
    own, table = model.private.get(OUTPUT), model.public[ITEM]

    def rows(ids: Tensor) -> Tensor:
        return embedding(ids, table) if own is None else own[users[:, None], ids]

    def score(rows: Tensor) -> Tensor:
        scores = backbone.session_scores(vectors, mask, rows)
        checks.check_tensor(backbone, "session_scores", scores, (len(users), rows.shape[-2]),
                            "(C, n): a score per client and item")
        return scores

    wanted, others = score(rows(target)), None if ids is None else score(rows(ids))
    every = score(table if own is None else own[users]) if task.ranks_all else None
    hook = "encode" if backbone.positionwise else "session_vectors"
    maker = (method, "represent") if method.overrides("represent") else (backbone, hook)
    for scores in (wanted, others, every):
        if scores is not None:
            checks.require_finite_scores(*maker, scores, users)
    return target, wanted, others, every


def _vectors(backbone: SequentialBackbone, method: Method, model: Snapshot, task: SessionTask, protection: Protection,
             users: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """What users' next items are scored with, and which of it counts (see ``SessionVectors``)."""
    draw, purpose = task.draw, task.purpose
    private = {name: table for name, table in model.private.items() if name != OUTPUT}
    clients = replace(model, private=private).clients(users)
    rows = input_rows(backbone, model, users, sequence)
    session = backbone.session_vectors(clients, rows, sequence, Dropout())
    if backbone.positionwise:  # what stands for no item may be nan
        checks.require_finite_scores(backbone, "encode", session.vectors[:, -1], users)
    queries = None
    if method.query_dropout is not None:
        dropout = Dropout(draw.clients(f"dropout of {purpose}", users)) if method.query_dropout else Dropout()
        queries = backbone.session_vectors(clients, rows, sequence, dropout).vectors

    def ask(sent: Tensor) -> Tensor:
        key = upload_key(draw.seed, f"the query of {purpose}", draw.step, draw.round)
        return (task.answer_queries or method.answer_queries)(protection.noisy(key, users, sent), users=users)

    encoding = Encoding(users, clients, session.vectors, sequence.real, purpose, draw, queries, ask)
    return backbone.with_constant(method.represent(encoding)), session.mask


def needs_session(backbone: Backbone, method: Method, step: Step) -> bool:
    """Whether what users rank by depends on a session."""
    return bool(step.sessions) and (isinstance(backbone, SequentialBackbone) or method.overrides("rescore_session"))


def session_scores(backbone: Backbone, method: Method, model: Snapshot, task: SessionTask, users: Tensor,
                   protection: Protection = OPEN) -> Tensor:
    """Logits of all items after what each user's session of the task begins with: (n, items). Arguments as of
    ``rank_sessions``; each of the users must have a session."""
    return _logits(backbone, method, model, task, protection, users, None)[3]


def ranked_lists(rank: Tensor, topk: list[int], items: Tensor | None = None, catalogue: Catalogue | None = None
           ) -> RankedLists:
    """Lists with one item to find, which ``rank`` items are before."""
    hits = rank[:, None] == torch.arange(topk[-1], device=rank.device)
    return RankedLists(hits, torch.ones_like(rank), items, catalogue)


@dataclass(frozen=True)
class Ranking:
    """How sessions are ranked."""

    topk: Iterable[int]  # list lengths
    metrics: Iterable[Metric]
    catalogue: Catalogue | None = None  # with it, metrics of items are among them
    mask_history: bool = False  # items before the one to find are not ranked, unless they are it


@torch.no_grad()
def rank_by_module(backbone: Backbone, module: DomainModule, step: Step, split: str, ranking: Ranking) -> UserScores:
    """Metrics of each session of a domain's split, by its number."""
    sessions, hook = step.sessions[split], "scores"
    if isinstance(module, SequentialModule):
        hook = "encode" if backbone.positionwise else "session_vectors"
    topk = sorted(set(ranking.topk))
    order = sessions.lengths.argsort(stable=True)  # so that little is padding
    ranks = torch.empty_like(order)
    lists = None if ranking.catalogue is None else order.new_empty(len(order), topk[-1])
    history = Ragged(sessions.start, sessions.items)
    with module.ranking():
        for chosen in order.split(SIZES.central_ranked):
            to_find, parts = scores_after(backbone, module, step, split, chosen)
            for part, scores in parts:
                checks.require_finite_scores(backbone, hook, scores, chosen[part])
                wanted = scores.gather(1, to_find[part, None])
                if ranking.mask_history:
                    scores[history.select(chosen[part])] = -torch.inf
                    scores.scatter_(1, to_find[part, None], wanted)
                ranks[chosen[part]] = (~(scores < wanted)).sum(1) - 1
                if lists is not None:
                    lists[chosen[part]] = highest(scores, topk[-1])
    numbers = torch.arange(len(order), device=order.device)
    values = measure(ranking.metrics, ranked_lists(ranks, topk, lists, ranking.catalogue), topk)
    return UserScores(numbers, values, lists)


@torch.no_grad()
def scores_after(backbone: Backbone, module: DomainModule, step: Step, split: str, chosen: Tensor
                 ) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
    """The items to find after some sessions of a domain's split, (n,), and scores of all of its items: which of the
    sessions, (m,), and theirs, (m, items), a part of them at a time."""
    sessions = step.sessions[split]
    module.eval()
    if isinstance(module, SequentialModule):
        return module.scores_after(sessions, chosen)
    batch, wanted = histories(sessions, chosen, backbone.settings.max_length, module.fixed_length)
    scores = module.scores(batch)
    checks.check_tensor(backbone, "scores", scores, (len(chosen), step.n_items), "(B, items): of all of the domain")
    return wanted, iter([(torch.arange(len(chosen), device=chosen.device), scores)])
