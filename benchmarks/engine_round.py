"""The local training of a round and what the server makes of it, as the loop does them, for timing them alone."""

from __future__ import annotations

from fedcl_bench.federation import server
from fedcl_bench.federation.round import Work, train_clients


def engine_round(chunks, model, users, training, key):
    """The model after a round of these chunks, whose clients are ``users``."""
    sums = train_clients([Work(training, chunks)], model, key)
    model, _ = server.mean(sums, model, training.backbone, key.seed)
    return server.aggregate(training.backbone, model, users, training.protection, key)
