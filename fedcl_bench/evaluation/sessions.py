"""Ranking the last item of a session (protocol of FCUCR).

Each user has one item to find: the last of its validation or test session, given the items before it. It is ranked
among sampled items, and among all of them beside that. Of equal scores the item to find comes last, so that a model
that scores everything alike finds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

import torch
from torch import Tensor
from torch.nn.functional import embedding

from .. import draws
from ..backbone import Backbone
from ..client.sessions import window
from ..data.stream import Step
from ..draws import DrawKey
from ..layers import ITEM
from ..method import Encoding, Method
from ..model import Snapshot, score_pairs, score_users
from ..parallel import even_pieces, in_order
from ..sampling import Others, padded
from ..sequential import Dropout, SequentialBackbone
from ..sizes import SIZES
from ..stats.clip_noise import OPEN, Protection, upload_key
from .ranking import EvaluationSettings, UserScores, list_metrics, scores_alone

FULL = "all:"  # before the name of a metric under full ranking, beside sampled candidates


@dataclass(frozen=True)
class Found:
    """What became of the items to find.

    Attributes:
        scores: metrics of each user's list.
        probabilities: sigmoid of the logit of each user's item, float64, in the order of ``scores.users``.
    """

    scores: UserScores
    probabilities: Tensor


def draw_session_candidates(step: Step, purpose: str, settings: EvaluationSettings, seed: int,
                            round_: int) -> Tensor | None:
    """The sampled items of every user: uniform with replacement over the items it does not train on.

    The same in every round and for every method, unless ``candidate_draw=redraw``.

    Args:
        purpose: ``valid``, ``test`` or ``early``.

    Returns:
        int64 of shape (users, sampled_candidates); None if all items are ranked.
    """
    if settings.candidates == "all":
        return None
    drawn = draws.key(seed, f"session candidates of {purpose}", step.index,
                      1 + round_ if settings.candidate_draw == "redraw" else 0)
    number = torch.arange(settings.sampled_candidates, device=step.train.values.device)
    listed = step.n_users * step.n_items <= SIZES.listed_others
    parts = []
    for users in torch.arange(step.n_users, device=number.device).split(SIZES.session_users):
        others = Others.of(padded(step.train, users), step.n_items, listed)
        keys = draws.client_keys(drawn, users)[:, None]
        parts.append(others.at(draws.integers(draws.bits(keys, number), others.count)))
    return torch.cat(parts)


def _sequential_scores(backbone: SequentialBackbone, model: Snapshot, inputs: Tensor, sequence, users: Tensor,
                       method: Method, purpose: str, draw: DrawKey, protection: Protection) -> Tensor:
    """What the logits of users' next items are inner products with, (n, d)."""
    clients = model.clients(users)
    rows = embedding(inputs, model.public[ITEM]) * sequence.real.unsqueeze(2)
    features = backbone.encode(clients, rows, sequence, Dropout())
    queries = None
    if method.encodes_next_session:
        queries = backbone.encode(clients, rows, sequence, Dropout(draw.clients(f"dropout of {purpose}", users)))
        key = upload_key(draw.seed, f"the query of {purpose}", draw.step, draw.round)
        queries = protection.noisy(key, users, queries)
    return method.represent(Encoding(users, clients, features, purpose, draw, queries))[:, -1]


def rank_sessions(backbone: Backbone, model: Snapshot, step: Step, purpose: str, topk: Iterable[int], method: Method,
                  candidates: Tensor | None, draw: DrawKey, full: bool = False,
                  protection: Protection = OPEN) -> Found:
    """Rank every user's item to find.

    Args:
        model: the tables to score with.
        purpose: ``valid`` or ``test``: the last item of that session; ``early``: of the first training session.
        topk: list lengths.
        candidates: sampled items of every user (see ``draw_session_candidates``); None: all items.
        draw: key of the method's random numbers.
        full: with sampled candidates, add the same metrics under full ranking, named with ``all:`` in front.
        protection: its noise is on what clients send for their own evaluation.
    """
    topk = sorted(set(topk))
    sessions = step.sessions["train" if purpose == "early" else purpose]
    users = (sessions.count > 0).nonzero().flatten()
    sequential = isinstance(backbone, SequentialBackbone)
    length = backbone.settings.max_length if sequential else 1

    @torch.no_grad()  # holds per thread
    def rank(some: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        items, sequence = window(sessions, sessions.of_user[some], length)
        target = items[:, -1:]
        ids = None if candidates is None else candidates[some]
        every = others = None
        if sequential:
            output = _sequential_scores(backbone, model, items[:, :-1], sequence, some, method, purpose, draw,
                                        protection)
            table = model.public[ITEM]

            def score(ids: Tensor) -> Tensor:
                return torch.bmm(embedding(ids, table), output.unsqueeze(2)).squeeze(2)

            wanted, others = score(target), None if ids is None else score(ids)
            every = output @ table.T if full or ids is None else None
        elif ids is not None and not full and scores_alone(backbone, method, model.n_items, ids.shape[1]):
            # At once, so that equal rows score alike.
            wanted, others = score_pairs(backbone, model, some, torch.cat([target, ids], 1)).tensor_split([1], 1)
        else:
            every = method.rescore(some, score_users(backbone, model, some), model, backbone)
            wanted, others = every.gather(1, target), None if ids is None else every.gather(1, ids)
        result = {}
        if ids is not None:
            # `not below` counts what is no number against the model.
            above = ~(others < wanted) & (ids != target)
            result = _metrics(above.sum(1), topk)
        if every is not None and (full or ids is None):
            above = ~(every < every.gather(1, target))
            whole = _metrics(above.sum(1) - 1, topk)
            result |= whole if ids is None else {FULL + name: values for name, values in whole.items()}
        return result, torch.sigmoid(wanted.double()).squeeze(1)

    # Scores of all items take more memory.
    at_once = SIZES.session_users if full or candidates is None or not sequential else 4 * SIZES.session_users
    parts = list(in_order(rank, even_pieces(users, at_once), users.device))
    return Found(UserScores(users, {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}),
                 torch.cat([probability for _, probability in parts]))


def _metrics(rank: Tensor, topk: list[int]) -> dict[str, Tensor]:
    """Metrics of lists with one item to find, which ``rank`` items are before."""
    hits = rank[:, None] == torch.arange(topk[-1], device=rank.device)
    return list_metrics(hits, torch.ones_like(rank), topk)
