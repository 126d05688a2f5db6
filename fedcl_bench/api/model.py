"""The model of one finished run, and what it recommends."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Mapping

import numpy as np
import pandas as pd
import torch

from ..data.datasets import load_stream
from ..data.stream import Stream
from ..rng import DrawKey
from ..core.settings import LARGEST
from ..core.errors import Corrupt, UserError, unknown
from ..evaluation.session_ranking import SessionTask, needs_session, scores_after, session_scores
from ..federation.cold_start import ranks_by
from ..federation.cross_silo import CrossSilo
from ..federation.parts import Federation
from ..plugin.state import Snapshot, score_users
from ..runs.config import RunConfig
from ..runs.checkpoints import SavedModel, read_model
from ..records.store import Run, describe
from .arguments import as_whole, in_python
from .origin import Origin


def saved_model(run: Run) -> SavedModel:
    """What a run's ``model.pt`` holds; raises UserError if it is not there or has changed."""
    try:
        return read_model(run.path)
    except Corrupt as error:
        raise UserError(f"{describe(run.meta)}: no model: {error.wrong}.\nCompact records have none; of others, delete "
                        f"the record and run it again.") from None


def holds_all_sessions(settings: Mapping[str, Any]) -> bool:
    """Whether a run's only client holds all sessions, so that sessions are tested and no users."""
    return settings.get("stream") == "sessions" and settings.get("topology") == "central"


@dataclass(frozen=True, eq=False)
class Model:
    """The model of one run after its last block, as it was tested."""

    run: Run
    saved: SavedModel  # the content of ``model.pt``
    origin: Origin

    @property
    def tables(self) -> Snapshot:
        """All parameters, PyTorch tensors: ``tables.public[name]`` is (items, ...), ``tables.private[name]`` (users,
        ...)."""
        return self.saved.tables

    @cached_property
    def user_ids(self) -> np.ndarray:
        """Original ids of the users, in the order of the tables' rows; (users,) of text."""
        return np.array(self.saved.user_ids, dtype=object).astype(str)

    @cached_property
    def item_ids(self) -> np.ndarray:
        """Original ids of the items, in the order of the tables' rows; (items,) of text."""
        return np.array(self.saved.item_ids, dtype=object).astype(str)

    @cached_property
    def config(self) -> RunConfig:
        """What made the run; warns if a plugin's code has changed since.

        Raises:
            UserError: if a plugin or the data is missing, or other data is there.
        """
        config, meta = self.origin.config(self.run), self.run.meta
        if meta["hash"] != config.hash:
            warnings.warn(f"{describe(meta)}: {meta['method']} or {meta['backbone']} has other code than the run was "
                          f"made with.", stacklevel=2)
        return config

    @cached_property
    def stream(self) -> Stream:
        """The run's data; raises as ``config``."""
        return load_stream(self.config.source, self.config.stream, self.config.features)

    def row(self, user: str | int) -> int:
        """The row of a user, by its original id; raises UserError for one that is not in the data, or if there are only
        sessions."""
        if holds_all_sessions(self.run.meta["settings"]):
            raise UserError(f"{describe(self.run.meta)}: with topology=central one party holds all sessions, and the "
                            f"model knows no users to score items for; its parameters are in `.tables`.")
        rows = np.flatnonzero(self.user_ids == str(user))
        if len(rows):
            return int(rows[0])
        if len(self.user_ids) <= 20:
            raise unknown("user", str(user), self.user_ids.tolist())
        raise UserError(f"unknown user '{user}'; the data has {len(self.user_ids):,}, as "  # near ids mean nothing
                        f"{', '.join(self.user_ids[:3])}.\nAll ids: `.model().user_ids`.")

    @in_python()
    def scores(self, user: str | int) -> np.ndarray:
        """Scores of all items for a user, as the model was tested: (items,), in the order of ``item_ids``.

        A sequential model scores what follows the user's test session without its last item. In a stream of domains,
        items of others than the user's have -inf.

        Raises:
            UserError: for an unknown user, one without test session, or data or plugins that are missing.
        """
        if self.stream.domains:
            return self._scores_in_domain(user)
        users = torch.tensor([self.row(user)])
        federation = self._federation
        step, backbone = self.stream.steps[-1], federation.backbone
        method = federation.acting_in(step)
        ranking = ranks_by(federation, step, method)
        method.client_state, method.server_state = dict(self.saved.client_state), dict(self.saved.server_state)
        with torch.no_grad():
            if needs_session(backbone, method, step):
                if not int(step.sessions["test"].count[users[0]]):
                    raise UserError(f"user '{user}' has no test session to recommend after; users with one are in "
                                    f"`.users`.")
                tested = "rounds" if self.config.server.tested_round == "last" else "best_round"
                key = DrawKey(self.run.seed, step.index, self.run.meta[tested][-1] - 1)
                task = SessionTask(step, "test", (1,), None, key)
                scores = session_scores(backbone, method, self.tables, task, users, federation.server.protection)
            else:
                scores = ranking.rescore(users, score_users(backbone, self.tables, users), self.tables, backbone)
        return scores[0].double().numpy()

    @property
    def _federation(self) -> Federation:
        return replace(self.config, device="cpu").federation(self.stream)  # where the tables were read to

    @cached_property
    def _silos(self) -> CrossSilo:
        """Of a stream of domains, untrained."""
        return CrossSilo(self._federation)

    def _scores_in_domain(self, user: str | int) -> np.ndarray:
        """``scores`` in a stream of domains, by the model of the user's."""
        row, backbone = self.row(user), self._silos.federation.backbone
        domain = next(domain for domain in self._silos.domains if row in domain.users)
        sessions = domain.step.sessions["test"]
        first, end = sessions.of_user[row - domain.users.start:][:2]
        if first == end:
            raise UserError(f"user '{user}' has too few items to be tested on; users who are tested are in `.users`.")
        scores = np.full(len(self.item_ids), -np.inf)
        domain.load(self.tables).stage = self._silos.stages[-1].name
        with torch.no_grad():
            _, ((_, of_items),) = scores_after(backbone, domain.module, domain.step, "test", first[None])
        scores[domain.rows] = of_items[0].double().numpy()
        return scores

    @in_python()
    def seen(self, user: str | int) -> np.ndarray:
        """Rows of the items that a user has in the data, but for its last test: ascending."""
        row, last, parts = self.row(user), self.stream.steps[-1], [torch.zeros(0, dtype=torch.int64)]
        for step in self.stream.steps:
            if row >= step.n_users:
                continue
            parts += [split.of(row) for split in (step.train, step.valid, *([step.test] if step is not last else []))]
            for split, sessions in step.sessions.items():
                first, end = (int(sessions.start[sessions.of_user[row + side]]) for side in (0, 1))
                parts.append(sessions.items[first:max(first, end - 1) if split == "test" else end])
        return torch.cat(parts).unique().numpy()

    def recommend(self, user: str | int, k: int = 10, mask_seen: bool = True) -> pd.DataFrame:
        """The best items for a user.

        Args:
            user: original id.
            k: items, at most.
            mask_seen: leave out what the user has in the data, but for its last test.

        Returns:
            The columns rank (from 1), item (original id) and score (a logit, or what the method ranks by).

        Raises:
            UserError: as ``scores``, and for k below 1.
        """
        k = as_whole("recommend", "k", k, 1, LARGEST)
        scores = self.scores(user)
        if mask_seen:
            scores[self.seen(user)] = -np.inf
        best = np.argsort(-scores, kind="stable")[:k]  # of equal scores the smaller row, as in tests
        best = best[np.isfinite(scores[best])]
        return pd.DataFrame({"rank": np.arange(1, len(best) + 1), "item": self.item_ids[best], "score": scores[best]})
