"""Backbones that represent a session as a whole: numbers of their cards; tests/test_session_oracle.py has those of
rounds."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import build
from session_oracle import ITEM, clicked_together

from fedcl_bench import Dropout, Sequence, UserError
from fedcl_bench.toolbox import item_graphs
from fedcl_bench.training.session_trainer import clients_at_once, window
from fedcl_bench.data.stream import Sessions
from fedcl_bench.rng import DrawKey

N_ITEMS, LONGEST, SEED = 40, 8, 7
SMALL = {"miasrec": {"dim": 6, "max_length": LONGEST, "heads": 2, "inner_size": 7, "dropout": 0.0,
                     "session_dropout": 0.0, "item_dropout": 0.0},
         "dmi-gnn": {"dim": 6, "max_length": LONGEST, "global_dropout": 0.0, "graph_neighbours": 4, "long_session": 3.0,
                     "diversity": 0.5},
         "hearint": {"dim": 6, "max_length": LONGEST, "dropout": 0.0, "p": 1.0, "clusters": 7, "graph_neighbours": 4}}


def make(registry, name, **options):
    return build(registry, "backbone", name, **{**SMALL[name], **options})


# MiaSRec


def test_heads_that_do_not_divide_the_vectors(registry):
    with pytest.raises(UserError, match="setting 'heads': found 3, accepted: a divisor of dim=100"):
        build(registry, "backbone", "miasrec", heads=3)


# DMI-GNN


def test_neighbours_are_of_a_clients_own_sessions(registry):
    """User 0: 1 2 1 3 5 | 2 1; user 1: 1 5. Within 3 positions, in both directions, the most frequent first."""
    neighbours = item_graphs.neighbours
    items, start, user = np.array([1, 2, 1, 3, 5, 2, 1, 1, 5]), np.array([0, 5, 7, 9]), np.array([0, 0, 1])
    found = {}
    for owner, item, rank, near, count in zip(*neighbours(items, start, user, 2)):
        assert len(found.setdefault((owner, item), [])) == rank
        found[owner, item].append((near, count))
    own = clicked_together([[1, 2, 1, 3, 5], [2, 1]], 2)
    assert own == {1: [(2, 3), (3, 2)], 2: [(1, 3), (3, 1)], 3: [(1, 2), (2, 1)], 5: [(1, 1), (2, 1)]}
    assert found == {**{(0, item): near for item, near in own.items()}, (1, 1): [(5, 1)], (1, 5): [(1, 1)]}


def test_a_graph_without_edges_and_items_it_has_not_seen(registry):
    """One client clicked one item alone, and its graph is empty; its session may have other items all the same."""
    backbone = make(registry, "dmi-gnn", dropout=1.0)
    sessions = Sessions(torch.tensor([0, 1]), torch.tensor([0, 3]), torch.tensor([4, 4, 4]), torch.arange(3.0))
    memory = backbone.remember(SimpleNamespace(sessions={"train": sessions}, n_users=1, n_items=N_ITEMS,
                                               train=SimpleNamespace(lengths=torch.tensor([3]))), {})
    assert (memory["graph items"] == 0).all()
    _, sequence = window(Sessions(sessions.of_user, sessions.start, torch.tensor([7, 4, 8]), sessions.times),
                         torch.tensor([0]), LONGEST)
    more = backbone.more_items(memory, sequence)
    assert (more == 4).all()  # its own last input
    dense = {name: torch.randn(1, *value.shape) for name, value in backbone.new_dense(0).items()}
    inputs = torch.cat([torch.randn(1, LONGEST, 6) * sequence.real.unsqueeze(2), torch.randn(1, more.shape[1], 6)], 1)
    dropped, whole = (backbone.session_vectors({**dense, **memory}, inputs, sequence, dropout).vectors
                      for dropout in (Dropout(torch.tensor([3])), Dropout()))
    assert bool(dropped.isfinite().all()) and not torch.equal(dropped, whole)
    assert not torch.equal(whole, backbone.session_vectors({**dense, **memory}, torch.cat(
        [-inputs[:, :LONGEST], inputs[:, LONGEST:]], 1), sequence, Dropout()).vectors)
    unread = torch.cat([inputs[:, :LONGEST], -inputs[:, LONGEST:]], 1)
    assert torch.equal(whole, backbone.session_vectors({**dense, **memory}, unread, sequence, Dropout()).vectors)


# HearInt


def test_views_of_a_session_by_hand(registry):
    """Clusters 2, 1, 2, 1, 0, of which 0 and 1 are near each other, and 2 is near no other."""
    near = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)[None]
    items = torch.tensor([[-1, -1, 5, 3, 5, 8, 6]])
    clusters = torch.tensor([[0, 0, 0, 1, 0, 2, 0, 0, 1]])  # of items 3, 5, 6 and 8: 1, 2, 0, 1
    sequence = Sequence(items >= 0, torch.zeros(1, 7), items)
    clients = {"near": near, "clusters": clusters, "positions": torch.zeros(1, 7, 6)}
    node = item_graphs.first_positions(items, items >= 0)
    # By items, clusters 1 and 2 are equally frequent, so 1 is taken. Otherwise padding, 3, 5, 6 and 8 go by clusters
    # 0, 0, 2, 1 and 2 of the first positions.
    for long_view, expected in (("items", [3, 8, 6]), ("positions", [3, 6])):
        backbone = make(registry, "hearint", long_view=long_view)
        short, long = backbone.views(clients, sequence, node, Dropout(torch.tensor([4])))
        assert items[short].tolist() == [3, 8, 6] and items[long].tolist() == expected
        whole = Sequence(*(part[:, 2:] for part in (sequence.real, sequence.times, items)))  # without padding
        _, of_whole = backbone.views({**clients, "positions": clients["positions"][:, 2:]}, whole, node[:, 2:] - 2,
                                     Dropout(torch.tensor([4])))
        assert torch.equal(long[:, 2:], of_whole) is not backbone.pads
    sequence = Sequence(*(part.expand(2000, 7) for part in (sequence.real, sequence.times, items)))
    clients["positions"] = clients["positions"].expand(2000, 7, 6)
    views = make(registry, "hearint", p=0.4).views(clients, sequence, node.expand(2000, 7), Dropout(torch.arange(2000)))
    for view, expected in zip(views, ([0, 0, 0.6, 1, 0.6, 1, 1], [0, 0, 0.6, 1, 0.6, 0.6, 1])):
        assert view.double().mean(0).tolist() == pytest.approx(expected, abs=0.05)
    apart, together = (view[:, [2, 4]] for view in views)  # of the same item
    assert bool((apart[:, 0] != apart[:, 1]).any()) and torch.equal(together[:, 0], together[:, 1])


def test_hearint_without_a_graph_and_with_items_it_has_not_seen(registry):
    """A client that clicked one item alone; a session of one click; more clusters than items; all clicks left out."""
    backbone = make(registry, "hearint", clusters=1000)
    sessions = Sessions(torch.tensor([0, 1]), torch.tensor([0, 3]), torch.tensor([4, 4, 4]), torch.arange(3.0))
    memory = backbone.remember(SimpleNamespace(sessions={"train": sessions}, n_users=1), {})
    assert not memory["graph pairs"].any()
    table = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    derived = {name: value[None] for name, value in backbone.derive({ITEM: table}, DrawKey(SEED, 0)).items()}
    assert derived["near"].shape == (1, 9, 9) and derived["clusters"].sort().values[0].tolist() == list(range(9))
    dense = {name: torch.randn(1, *value.shape) for name, value in backbone.new_dense(0).items()}
    for items in ([7, 8], [4, 4, 4], list(range(9))):
        _, sequence = window(Sessions(sessions.of_user, torch.tensor([0, len(items)]), torch.tensor(items),
                                      torch.arange(len(items)).double()), torch.tensor([0]), LONGEST)
        rows = table[sequence.items.clamp(min=0)] * sequence.real.unsqueeze(2)
        for dropout in (Dropout(), Dropout(torch.tensor([3]))):
            session = backbone.session_vectors({**dense, **memory, **derived}, rows, sequence, dropout)
            scores = backbone.session_scores(session.vectors, session.mask, table)
            assert bool(scores.isfinite().all()) and scores.unique().numel() == 9


def test_clients_of_a_chunk(registry):
    """As many as keep a chunk's parameters below 2^24 numbers, or with item tables 2^25, and 256 at most."""
    n_items, dim = 24_390, 100
    assert clients_at_once(build(registry, "backbone", "sasrec"), n_items) == 256
    backbones = {loss: build(registry, "backbone", "miasrec", loss=loss) for loss in ("bce", "cross_entropy")}
    dense = sum(value.numel() for value in backbones["bce"].new_dense(0).values())
    assert clients_at_once(backbones["bce"], n_items) == (1 << 24) // dense == 81
    assert clients_at_once(backbones["cross_entropy"], n_items) == (1 << 25) // (dense + n_items * dim) == 12
