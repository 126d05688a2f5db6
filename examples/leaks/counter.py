"""A recommender that learns nothing: it ranks first what a client was never given as a negative.

    python run_bench.py --method counter --plugins examples/leaks --set stream=static
    python run_bench.py --method counter --plugins examples/leaks --set stream=static --set negative_pool=untouched

The first comes out at chance. In the second, negatives are drawn from items that the client has in no split, so that
the item to find is never one, and every other candidate is sooner or later: docs/leaks.md.
"""

import torch

from fedcl_bench import ITEM, Backbone, rng

DRAWN = "drawn"


class Counter(Backbone):
    """s(u, i) = -lr (how often i was a negative of u) / (samples of a local batch). Nothing that is sent moves, and of
    positives nothing is learned."""

    name = "counter"
    numbers = 1
    title = "counts each client's own negatives and learns nothing"
    reference = "docs/leaks.md"
    static_defaults = {"batch_size": 100_000}

    def new_rows(self, seed, users, items):
        return {ITEM: torch.zeros(len(items), 1, dtype=torch.float64)}, {}

    def new_personal(self, seed, items):
        """Next to nothing, so that the order of items drawn equally often is random and not that of their ids."""
        return {DRAWN: 1e-6 * rng.normal_rows(seed, DRAWN, items.start, len(items), 1)}

    def score(self, clients, rows):
        return (clients[DRAWN] + 0.0 * rows[ITEM]).squeeze(2)

    def loss(self, scores, labels, weights):
        """Its gradient is each negative's share of the batch, which a step of SGD takes off its score."""
        return (scores * weights * (1.0 - labels)).sum(1)

    def learning_rates(self, n_items, round_=0, batch=0):
        return {DRAWN: self.settings.lr, ITEM: self.settings.lr}
