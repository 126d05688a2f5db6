"""What a metric is: a number for each user's ranked list.

The five metrics of hits that every run records, and those of items, are in ``evaluation/metrics.py``; a plugin adds
others. A metric is asked for every list length of a run, of validation as of tests, and its mean over users is
reported. ``run_bench.py check`` tests that a metric keeps to what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Catalogue:
    """What is known of the items of a run when lists are judged, over all of its clients and up to the step trained."""

    counts: Tensor  # training interactions of each item, float64 of shape (items,)
    owners: Tensor  # users who have trained on each item, however often, float64 of shape (items,)
    users: float  # how many users there are
    # Each item's row of the first public item table, (items, d); tables of more dimensions are flattened.
    vectors: Tensor


@dataclass(frozen=True)
class RankedLists:
    """The lists of n users, all of length K."""

    hits: Tensor  # whether the item at each rank is one to find, bool of shape (n, K)
    relevant: Tensor  # number of items to find of each user, int64 of shape (n,), at least 1
    # The items, best first, int64 of shape (n, K), -1 where fewer are ranked; only for metrics with ``of_items``, else
    # None.
    items: Tensor | None = None
    catalogue: Catalogue | None = None  # what is known of the items; with ``items``

    @property
    def k(self) -> int:
        """The length K."""
        return int(self.hits.shape[1])

    def top(self, k: int) -> RankedLists:
        """The first k places of every list."""
        return replace(self, hits=self.hits[:, :k], items=None if self.items is None else self.items[:, :k])

    def without_items(self) -> RankedLists:
        """What a metric of hits sees."""
        return replace(self, items=None, catalogue=None)


class Metric:
    """Base class of metrics. The docstring of a metric is its formula; more is better wherever metrics are compared.

    Attributes:
        name: what stands before ``@K``: lower-case letters, digits, ``-`` and ``_``.
        title: one line, for ``list``.
        reference: its source.
        of_items: whether ``values`` looks at ``items`` and ``catalogue``. Such a metric is taken in tests alone, and
            cannot choose the best round.
    """

    kind = "metric"
    name: str
    title: str
    reference = ""
    of_items = False

    def values(self, lists: RankedLists) -> Tensor:
        """The value of each user's list, finite, floating, of shape (n,). A user's value depends on its own list alone.
        """
        raise NotImplementedError
