"""S-KNN: a session is continued as the sessions that are most similar to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedcl_bench import Method, setting


@dataclass(frozen=True)
class SKNNSettings:
    k: int = setting(100, "most similar sessions that count", low=1, search=(50, 100, 500, 1000, 1500))
    sample: int = setting(1000, "latest sessions with an item of the present one, among which they are looked for; "
                          "0: all", low=0, search=(500, 1000, 2500, 5000, 0))


class SKNN(Method):
    """s(i) = the sum of sim(s, n) over the ``k`` training sessions n with item i that are most similar to the present
    one s, where sim(s, n) = |s & n| / sqrt(|s| |n|) of their sets of items. Of equally similar ones the later counts.
    """

    name = "sknn"
    numbers = 1
    title = "bound: sessions continued as everybody's most similar training sessions"
    reference = ("Jannach and Ludewig, When Recurrent Neural Networks meet the Neighborhood for Session-Based "
                 "Recommendation, RecSys 2017")
    Settings = SKNNSettings
    first_step = 0
    trains = "nobody"
    needs_backbone = False
    gives_up = {"F1": "one party ranks for everybody", "F4": "and holds all sessions"}

    def begin_round(self, step, round_, backbone):
        sessions = step.sessions["train"]
        latest_last = sessions.times[sessions.start[1:] - 1].argsort(stable=True)
        rows = sessions.rows().part(latest_last)
        held = replace(rows, values=sessions.items[rows.values]).distinct()
        self.server_state = {"start": held.indptr, "items": held.values}

    def rescore_session(self, users, scores, before, model, backbone):
        start, items = self.server_state["start"], self.server_state["items"]
        size, before = start.diff().double(), before.distinct()
        session = torch.arange(len(size), device=items.device).repeat_interleave(start.diff())
        held = torch.sparse_coo_tensor(torch.stack([session, items]), size.new_ones(len(items)),
                                       (len(size), scores.shape[1]), check_invariants=False)
        present = size.new_zeros(scores.shape[1], len(users))
        present[before.values, before.owners] = 1.0
        shared = (held @ present).flip(0)  # (sessions, n), the latest first
        similar = shared / (size.flip(0)[:, None] * before.lengths).sqrt()
        if self.settings.sample:
            similar[(shared > 0.0).cumsum(0) > self.settings.sample] = 0.0
        similar, order = similar.sort(dim=0, descending=True, stable=True)
        similar[self.settings.k:] = 0.0
        return (held.T @ torch.empty_like(similar).scatter_(0, order, similar).flip(0)).T.to(scores)
