"""RLP2's memories, beside what the oracle covers."""

from __future__ import annotations

import torch
from helpers import build, one_step

from fedcl_bench.rng import DrawKey
from fedcl_bench.federation.parameter_growth import grow
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.training.sampling import LaterChunk, make_chunks
from fedcl_bench.plugin.local_settings import LocalSettings
from fedcl_bench.core.tuning import SIZES
from fedcl_bench.testing.worlds import ragged


def test_memories_of_clients_that_are_looked_at_later(registry, monkeypatch):
    """A block with very many interactions is not held in chunks; the memories are those of one that is."""
    step = one_step(ragged(range(3), range(5), range(2, 9)), 40)
    backbone = build(registry, "backbone", "fedmf", dim=4)
    model = grow(Snapshot({}, {}), backbone, 0, step, torch.float32, torch.device("cpu"),
                 build(registry, "method", "rlp2"))
    states = []
    for kept in (SIZES.kept_positives, 0):
        monkeypatch.setattr(SIZES, "kept_positives", kept)
        assert isinstance(make_chunks(step, torch.arange(3), LocalSettings(), 1)[0], LaterChunk) == (kept == 0)
        method = build(registry, "method", "rlp2")
        method.end_step(step, model, backbone, torch.arange(3), DrawKey(0, 0))
        states.append(method.client_state)
    assert states[0].keys() == states[1].keys() and states[0]["filled"].any()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
