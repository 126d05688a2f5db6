"""What a backbone is: the recommender that every client trains.

A backbone says which parameters are public (item rows, aggregated by the server) and which are private (one row per
client, never uploaded), how rows of new users and items start, and how a batch of clients is scored. It knows nothing
of methods, rounds or blocks. The first dimension of everything it sees is clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Mapping

from torch import Tensor

from .functional import weighted_bce
from .settings import setting

Tables = dict[str, Tensor]


@dataclass(frozen=True)
class BackboneSettings:
    """Settings every backbone has."""

    lr: float = setting(1.0, "learning rate of the private parameters", above=0.0)


class Backbone:
    """Base class of backbones.

    Subclasses set ``name``, ``title``, ``reference`` and ``Settings`` and implement ``new_rows``, ``score``,
    ``score_all`` and ``learning_rates``. Parameters are dictionaries of tensors by name: ``public`` holds tables with
    one row per item, ``private`` tables with one row per user.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str] = ""
    Settings: ClassVar[type] = BackboneSettings

    def __init__(self, settings: BackboneSettings):
        self.settings = settings

    def new_rows(self, seed: int, users: range, items: range) -> tuple[Tables, Tables]:
        """Initial (public, private) rows, float64, of items and users first seen in a block.

        A row's values may depend on the seed and its own id only, so a table does not depend on when it grew.
        """
        raise NotImplementedError

    def score(self, private: Tables, rows: Tables) -> Tensor:
        """Logits of each client's own items.

        Args:
            private: parameters of C clients, each of shape (C, ...).
            rows: public item rows of those clients, each of shape (C, n, ...).

        Returns:
            Tensor of shape (C, n).
        """
        raise NotImplementedError

    def score_all(self, private: Tables, public: Tables) -> Tensor:
        """Logits of all items for C clients under one public table, shape (C, items)."""
        raise NotImplementedError

    def learning_rates(self, n_items: int) -> Mapping[str, float]:
        """The learning rate of every parameter by name, when ``n_items`` items are known."""
        raise NotImplementedError

    def loss(self, scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Recommendation loss of each client over one local batch: mean binary cross-entropy on logits.

        Args:
            scores, labels: shape (C, n); labels are 1 for positives and 0 for sampled negatives.
            weights: shape (C, n); a sample's share of its batch's mean. An item drawn twice has twice the weight.

        Returns:
            Tensor of shape (C,).
        """
        return weighted_bce(scores, labels, weights)
