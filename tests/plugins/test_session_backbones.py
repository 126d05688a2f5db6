"""Backbones that represent a session as a whole: they equal modules of one client, and the numbers of their cards."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import build, module_of
from oracle import stream
from session_oracle import ITEM, clicked_together, entmax, left_padded, single_client
from session_oracle import k_means as plain_k_means
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fedcl_bench import rng
from fedcl_bench.toolbox import item_graphs
from fedcl_bench.training.tiled_softmax import TiledSoftmax
from fedcl_bench.training.session_trainer import clients_at_once, window
from fedcl_bench.toolbox.clustering import k_means
from fedcl_bench.data.stream import Sessions
from fedcl_bench.rng import DrawKey
from fedcl_bench.core.errors import UserError
from fedcl_bench.plugin.sequential import Dropout, Sequence, SessionVectors, Targets
from fedcl_bench.core.tuning import SIZES

N_ITEMS, LENGTHS, LONGEST, SEED = 40, (2, 5, 9, 14), 8, 7
SMALL = {"miasrec": {"dim": 6, "max_length": LONGEST, "heads": 2, "inner_size": 7, "dropout": 0.0,
                     "session_dropout": 0.0, "item_dropout": 0.0},
         "dmi-gnn": {"dim": 6, "max_length": LONGEST, "global_dropout": 0.0, "graph_neighbours": 4, "long_session": 3.0,
                     "diversity": 0.5},
         "hearint": {"dim": 6, "max_length": LONGEST, "dropout": 0.0, "p": 1.0, "clusters": 7, "graph_neighbours": 4}}
CHOICES = [("miasrec", {}), ("miasrec", {"loss": "bce", "mean_token": "apart", "max_repeat": 3, "layers": 1}),
           ("dmi-gnn", {}), ("dmi-gnn", {"graph_neighbours": 0, "loss": "bce"}),
           ("dmi-gnn", {"patterns": "extractors", "interests": 1, "loss": "bce"}),
           ("hearint", {}), ("hearint", {"p": 0.0, "loss": "bce", "buckets": "quarters"}),
           ("hearint", {"long_view": "items", "temporal_positions": False, "graph_neighbours": 0, "loss": "bce"}),
           ("miasrec", {"selection": "entmax"}), ("miasrec", {"selection": "sparsemax", "loss": "bce"})]
EACH = pytest.mark.parametrize("name, options", CHOICES, ids=str)


def make(registry, name, **options):
    return build(registry, "backbone", name, **{**SMALL[name], **options})


class World:
    """Clients with a session, an item table and dense parameters each, and their loss in the engine's terms."""

    def __init__(self, backbone, seed=1):
        generator = torch.Generator().manual_seed(seed)
        items = [torch.randint(0, 12 if n > 5 else N_ITEMS, (n,), generator=generator) for n in LENGTHS]
        self.backbone, self.clients = backbone, len(LENGTHS)
        self.sessions = Sessions(torch.arange(self.clients + 1), torch.tensor([0, *LENGTHS]).cumsum(0),
                                 torch.cat(items), torch.arange(sum(LENGTHS)).double())
        d = backbone.settings.dim
        self.table = torch.randn(self.clients, N_ITEMS, d, generator=generator, dtype=torch.float64).requires_grad_()
        self.dense = {name: (0.4 * torch.randn(self.clients, *value.shape, generator=generator,
                                               dtype=torch.float64)).requires_grad_()
                      for name, value in backbone.new_dense(0).items()}
        self.items, self.sequence = window(self.sessions, torch.arange(self.clients), LONGEST)
        negatives = torch.randint(0, N_ITEMS, (self.clients, LONGEST), generator=generator)
        self.sampled = torch.cat([self.items, negatives.where(self.sequence.real, self.items[:, :1])], 1)
        step = SimpleNamespace(sessions={"train": self.sessions}, n_users=self.clients, n_items=N_ITEMS,
                               train=SimpleNamespace(lengths=torch.tensor(LENGTHS)))
        self.memory = backbone.remember(step, {})
        self.derived = {name: value.expand(self.clients, *value.shape) for name, value in
                        backbone.derive({ITEM: self.table[0].detach()}, DrawKey(SEED, 0)).items()}
        self.more = backbone.more_items(self.memory, self.sequence)

    def rows(self, items=None):
        items = self.sampled if items is None else items
        return self.table.gather(1, items.unsqueeze(2).expand(-1, -1, self.table.shape[2]))

    def vectors(self, dropout=None):
        inputs = self.rows()[:, :LONGEST] * self.sequence.real.unsqueeze(2)
        inputs = inputs if self.more is None else torch.cat([inputs, self.rows(self.more)], 1)
        return self.backbone.session_vectors({**self.dense, **self.memory, **self.derived}, inputs, self.sequence,
                                             dropout or Dropout(torch.arange(self.clients)))

    def loss(self):
        """Each client's, with the scores of all items made at once."""
        session = self.vectors()
        scores = None
        if self.backbone.whole_tables:
            scores = self.backbone.session_scores(session.vectors, session.mask, self.table)
        return self.backbone.session_loss(session, Targets(self.rows(), self.sampled, self.sequence.real, scores,
                                                           Dropout()))

    def module(self, client):
        module = single_client(self.backbone.name, self.backbone.settings, N_ITEMS).double()
        start, end = self.sessions.start[client:client + 2].tolist()
        module.graph = clicked_together([self.sessions.items[start:end].tolist()],
                                        getattr(self.backbone.settings, "graph_neighbours", 0))
        if self.derived:
            module.clusters = plain_k_means(self.table[0].detach(), self.backbone.settings.clusters,
                                      self.backbone.settings.kmeans_iterations,
                                      stream(SEED, "clusters of items", 0, 0, 0))
        return module.load({ITEM: self.table[client]}, {name: value[client] for name, value in self.dense.items()})

    def asked(self, client):
        """(sequence, times, positives, negatives) as the module's rows."""
        start, end = self.sessions.start[client:client + 2].tolist()
        items = self.sessions.items[start:end].tolist()
        seq, times = left_padded(items[:-1], [0.0] * (len(items) - 1), LONGEST)
        real = seq > 0
        positives, negatives = ((some + 1) * real for some in self.sampled[client, 1:].split(LONGEST))
        return seq, times, positives, negatives


@EACH
def test_equals_a_single_client_module(registry, name, options):
    """Scores of all items, the loss and all its gradients, in float64."""
    world = World(make(registry, name, **options))
    session = world.vectors()
    scores = world.backbone.session_scores(session.vectors, session.mask, world.table)
    loss = world.loss()
    gradients = torch.autograd.grad(loss.sum(), [world.table, *world.dense.values()], allow_unused=True)
    for client in range(world.clients):
        module = world.module(client)
        seq, times, positives, negatives = world.asked(client)
        outputs = module(seq, times)
        torch.testing.assert_close(scores[client], module.scores(outputs), rtol=1e-9, atol=1e-9)
        expected = module.loss(outputs, positives, negatives)
        torch.testing.assert_close(loss[client], expected, rtol=1e-9, atol=1e-9)
        expected.backward()
        for (key, _), ours in zip({ITEM: None, **world.dense}.items(), gradients):
            parameter, cut = module.names[key]
            theirs = module.get_parameter(parameter).grad
            theirs = torch.zeros_like(world.dense[key][client]) if theirs is None else cut(theirs)
            ours = torch.zeros_like(theirs) if ours is None else ours[client]
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=lambda m: f"{key}: {m}")


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("tile", [1, 100, 1 << 20])
def test_scores_in_tiles_have_the_gradients_of_scores_at_once(registry, name, tile, monkeypatch):
    monkeypatch.setattr(SIZES, "tile", tile)
    world = World(make(registry, name))
    session = world.vectors()
    vectors = session.vectors.detach().requires_grad_()
    direction = torch.randn(world.clients, N_ITEMS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = world.backbone.session_scores(vectors, session.mask, world.table)
    theirs = torch.autograd.grad((expected * direction).sum(), [world.table, vectors])
    tiled = TiledSoftmax(world.backbone, vectors, session.mask, world.table, Dropout())
    torch.testing.assert_close(tiled.scores, expected, rtol=1e-12, atol=1e-12)
    of_scores, = torch.autograd.grad((tiled.scores * direction).sum(), [tiled.scores])
    for found, wanted in zip(tiled.gradients(of_scores), theirs):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_dropout_of_rows_belongs_to_client_and_item(monkeypatch):
    """Whoever else is scored, and in tiles of any size; another epoch, and so another key, drops others."""
    keys = rng.client_keys(rng.key(3, "dropout", 1), torch.tensor([5, 2]))
    items = torch.arange(3000)
    whole = Dropout(keys).of_rows(items, 7, 0.2, torch.float64)
    assert whole.shape == (2, 3000, 7)
    assert abs(float((whole == 0).double().mean()) - 0.2) < 4 * math.sqrt(0.16 / whole.numel())
    assert set(whole.unique().tolist()) == {0.0, 65536 / (65536 - round(0.2 * 65536))}
    chosen = torch.tensor([2999, 4, 4])
    assert torch.equal(Dropout(keys[1:]).of_rows(chosen, 7, 0.2, torch.float64)[0], whole[1, chosen])
    mine = torch.stack([chosen, chosen + 1 - 3 * (chosen > 100)])
    assert torch.equal(Dropout(keys).of_rows(mine, 7, 0.2, torch.float64)[0], whole[0, chosen])
    assert not torch.equal(Dropout(keys + 1).of_rows(items, 7, 0.2, torch.float64), whole)
    assert Dropout(keys).of_rows(items, 7, 0.0, torch.float64) is None
    assert Dropout().of_rows(items, 7, 0.2, torch.float64) is None


# MiaSRec


def test_a_session_of_one_item_has_two_tokens_of_equal_rows(registry):
    """The mean is the item itself; positions tell them apart."""
    world = World(make(registry, "miasrec"))
    vectors = world.vectors().vectors[0]  # one input
    assert world.sequence.real.sum(1)[0] == 1
    assert (vectors[:2].norm(dim=1) - 1).abs().max() < 1e-12 and not vectors[2:].any()
    assert not torch.allclose(vectors[0], vectors[1])
    with torch.no_grad():
        world.dense["positions"][0, 1] = world.dense["positions"][0, 0]
    same = world.vectors().vectors[0]
    torch.testing.assert_close(same[0], same[1], rtol=1e-12, atol=1e-12)


def test_only_the_best_score_counts_with_beta_1(registry):
    for beta, pool in ((1.0, lambda cosines: cosines.max(0).values), (0.0, lambda cosines: cosines.mean(0))):
        world = World(make(registry, "miasrec", beta_logit=beta))
        session = world.vectors()
        scores = world.backbone.session_scores(session.vectors, session.mask, world.table)
        for client in range(world.clients):
            real = session.vectors[client, :1 + int(world.sequence.real[client].sum())]
            cosines = cosine_similarity(real.unsqueeze(1), world.table[client].unsqueeze(0), dim=2)
            torch.testing.assert_close(scores[client], pool(cosines), rtol=1e-10, atol=1e-10)


def test_a_vector_that_left_the_set_scores_zero_and_is_not_in_the_mean(registry):
    backbone = make(registry, "miasrec", beta_logit=0.25)
    vectors = torch.tensor([[[1.0, 0, 0, 0, 0, 0], [0] * 6, [1, 1, 0, 0, 0, 0], [9] * 6]], dtype=torch.float64)
    vectors = normalize(vectors, dim=2)
    mask = torch.tensor([[True, True, True, False]])
    rows = torch.tensor([[-2.0, 0, 0, 0, 0, 0], [0, 3, 0, 0, 0, 0]], dtype=torch.float64)
    found = backbone.session_scores(vectors, mask, rows)[0].tolist()
    half = 0.5 ** 0.5
    assert found == pytest.approx([0.25 * 0.0 + 0.75 * (-1 - half) / 2, 0.25 * half + 0.75 * half / 2])


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_support_of_entmax(registry, alpha):
    support = module_of(registry, "backbone", "miasrec").support
    generator = torch.Generator().manual_seed(4)
    for size in (1, 2, 5, 16):
        scores = 2.0 * torch.randn(1, size, generator=generator, dtype=torch.float64)
        expected = entmax(scores[0], alpha) > 0
        mask = torch.ones(1, size + 2, dtype=torch.bool)
        mask[:, size:] = False
        found = support(torch.cat([scores, 100 + scores[:, :1], scores[:, :1]], 1), mask, alpha)
        assert found[0, :size].tolist() == expected.tolist() and not found[0, size:].any()
    assert support(torch.tensor([[3.0, 0.0, 0.0]]), torch.ones(1, 3, dtype=torch.bool), alpha).tolist() == [
        [True, False, False]]


def test_weights_have_no_gradient(registry):
    world = World(make(registry, "miasrec", selection="sparsemax"))
    left = (world.vectors().vectors != 0).any(2).sum(1)
    assert bool((left < 1 + world.sequence.real.sum(1)).any())  # vectors do leave
    gradients = torch.autograd.grad(world.loss().sum(), list(world.dense.values()), allow_unused=True)
    assert [name for name, found in zip(world.dense, gradients) if found is None] == ["importance.weight",
                                                                                      "importance.bias"]
    assert "importance.weight" not in make(registry, "miasrec").dense_starts()


def test_counts_of_repeated_items(registry):
    """Session 7, 0, 7, 7: the mean's token counts as item 0, or apart; counts end at 2."""
    for token, expected in (("first_item", [2, 2, 2, 2, 2]), ("apart", [1, 2, 2, 1, 2])):
        backbone = make(registry, "miasrec", mean_token=token)
        repeats = torch.tensor([[[1.0] * 6, [2.0] * 6]], dtype=torch.float64)
        found = backbone.repeat_vectors({"repeats": repeats}, torch.tensor([[7, 7, 0, 7, -1]]),
                                        torch.tensor([[True] * 5 + [False]]))
        assert found[0, :, 0].tolist() == [*expected, 0.0]


def test_heads_that_do_not_divide_the_vectors(registry):
    with pytest.raises(UserError, match="setting 'heads': found 3, accepted: a divisor of dim=100"):
        build(registry, "backbone", "miasrec", heads=3)


@pytest.mark.long
def test_miasrec_equals_the_released_code(registry, monkeypatch):
    """On random sessions, to 1e-5. FEDCL_BENCH_RELEASED names a folder with miasrec/miasrec.py of jin530/MiaSRec."""
    path = Path(os.environ.get("FEDCL_BENCH_RELEASED", "")) / "miasrec" / "miasrec.py"
    if not path.is_file():
        pytest.skip("no copy of the released code")
    real = lambda scores, alpha, dim: (scores > -1e15) / (scores > -1e15).sum(dim, keepdim=True)  # what alpha = -1 does

    def reverse(packed):
        values, lengths = pad_packed_sequence(packed, batch_first=True)
        for row, length in zip(values, lengths):
            row[:length] = row[:length].flip(0)
        return pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)

    monkeypatch.setitem(sys.modules, "entmax", SimpleNamespace(entmax_bisect=real))
    monkeypatch.setitem(sys.modules, "utils_seq", SimpleNamespace(reverse_packed_sequence=reverse))
    spec = importlib.util.spec_from_file_location("released_miasrec", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    world = World(make(registry, "miasrec"))
    s = world.backbone.settings
    config = dict(embedding_size=s.dim, n_layers=s.layers, n_heads=s.heads, inner_size=s.inner_size,
                  hidden_dropout_prob=0.0, attn_dropout_prob=0.0, hidden_act="gelu", layer_norm_eps=1e-12,
                  initializer_range=0.02, loss_type="CE", sess_dropout=0.0, item_dropout=0.0,
                  temperature=s.score_temperature, beta_logit=s.beta_logit, device="cpu", USER_ID_FIELD="user",
                  ITEM_ID_FIELD="item", LIST_SUFFIX="_list", ITEM_LIST_LENGTH_FIELD="length", NEG_PREFIX="neg_",
                  MAX_ITEM_LIST_LENGTH=LONGEST)
    sizes = SimpleNamespace(num=lambda field: N_ITEMS + 1, field2seqlen={"item_id_list": LONGEST})
    theirs = module.MIASREC(config, sizes).double()
    theirs.net.double()
    for client in range(world.clients):
        ours = world.module(client)
        with torch.no_grad():
            for name, (parameter, cut) in ours.names.items():
                cut(theirs.get_parameter(_released_name(parameter))).copy_(ours.view(name))
        seq, _, positives, _ = world.asked(client)
        batch = {theirs.ITEM_SEQ: seq[seq > 0][None], theirs.POS_ITEM_ID: positives[-1:]}
        session = world.vectors()
        scores = world.backbone.session_scores(session.vectors, session.mask, world.table)[client]
        torch.testing.assert_close(scores, theirs.full_sort_predict(batch)[0, 1:], rtol=1e-5, atol=1e-5)
        # Their softmax has the row of padding, whose score this adds.
        logits = theirs.full_sort_predict(batch)[0] / s.score_temperature
        padding = logits.logsumexp(0) - logits[1:].logsumexp(0)
        torch.testing.assert_close(world.loss()[client] + padding, theirs.calculate_loss(batch), rtol=1e-5, atol=1e-5)


def _released_name(parameter: str) -> str:
    """The released module's name of the oracle module's parameter."""
    for ours, theirs in (("items.", "item_embedding."), ("position.", "net.position_embedding."),
                         ("repeat.", "net.repeat_embedding."), ("norm.", "net.LayerNorm."),
                         ("encoder.", "net.trm_encoder."), ("highway.", "net.highway_fn.")):
        if parameter.startswith(ours):
            return theirs + parameter[len(ours):]
    raise KeyError(parameter)


# DMI-GNN


def test_patterns_of_long_sessions_are_kept_apart(registry):
    """K = 2, |cos| = .5, length 12, eta 8: sigmoid(.5 x 4) = .8808; a short session has less than .5."""
    backbone = make(registry, "dmi-gnn", interests=2, diversity=1.0, long_session=8.0)
    beta = torch.zeros(2, 2, 12, dtype=torch.float64)
    beta[:, 0, 0] = beta[:, 1, 0] = 1.0
    beta[:, 1, 1] = -(3.0 ** 0.5)
    terms = {"beta": beta, "length": torch.tensor([12.0, 4.0], dtype=torch.float64)}
    found = backbone.session_term(SessionVectors(beta, beta, terms), None)
    assert found.tolist() == pytest.approx([1 / (1 + math.exp(-2.0)), 1 / (1 + math.exp(2.0))])
    assert round(float(found[0]), 4) == 0.8808


def test_the_best_interest_is_each_items_own(registry):
    vectors = torch.tensor([[[2.0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [-9, -9, 0, 0, 0, 0]]])
    rows = torch.tensor([[3.0, 0, 0, 0, 0, 0], [0, 5, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0]])
    scores = make(registry, "dmi-gnn").session_scores(vectors, torch.ones(1, 3, dtype=torch.bool), rows)
    assert scores.tolist() == [[2.0, 1.0, 9.0]]


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


@pytest.mark.long
def test_dmi_gnn_equals_the_released_derivative(registry, monkeypatch):
    """Its scores and its own term with patterns=extractors, on random sessions, to 1e-5. FEDCL_BENCH_RELEASED names
    a folder with co-dmi-gnn/, a copy of the first commit of cxy13h/Co-DMI-GNN."""
    folder = Path(os.environ.get("FEDCL_BENCH_RELEASED", "")) / "co-dmi-gnn"
    if not (folder / "model.py").is_file():
        pytest.skip("no copy of the released code")
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *where, **how: x if where == ("cuda",) else to(x, *where, **how))
    monkeypatch.syspath_prepend(str(folder))
    model, utils = importlib.import_module("model"), importlib.import_module("utils")
    for name in ("model", "utils", "aggregator"):
        monkeypatch.delitem(sys.modules, name)
    world = World(make(registry, "dmi-gnn", patterns="extractors", graph_neighbours=2))
    s = world.backbone.settings
    for client in range(world.clients):
        start, end = world.sessions.start[client:client + 2].tolist()
        clicks = world.sessions.items[start:end].tolist()
        graph = clicked_together([clicks], 2)
        near = np.zeros((N_ITEMS + 1, 2)), np.zeros((N_ITEMS + 1, 2))
        for item, pairs in graph.items():  # as often as it takes to fill two places
            for table, place in zip(near, (0, 1)):
                table[item + 1] = [(pairs * 2)[n][place] + (place == 0) for n in (0, 1)]
        options = SimpleNamespace(batch_size=1, hiddenSize=s.dim, dropout_local=0.0, dropout_global=0.0, n_iter=1,
                                  n_sample=2, interests=s.interests, length=s.long_session, beta=s.diversity, alpha=0.2,
                                  activate="relu", dropout_gcn=0.0, lr=0.1, l2=0.0, lr_dc_step=3, lr_dc=0.1)
        theirs = model.DMIGNN(options, N_ITEMS + 1, *near).double()
        theirs.num = theirs.num.double()
        ours = {name: value[client].detach() for name, value in world.dense.items()}
        with torch.no_grad():
            theirs.embedding.weight[1:] = world.table[client]
            theirs.pos_embedding.weight[:LONGEST] = ours["positions"]
            for kind in range(4):
                getattr(theirs.local_agg, f"a_{kind}")[:, 0] = ours["edges"][kind]
            theirs.w_1.copy_(ours["mix.weight"].T)
            theirs.w_2.copy_(ours["weights"].T)
            layers = [ours[f"patterns.{n}.{what}"].view(s.interests, *[s.dim] * (1 + (what == "weight")))
                      for n in (0, 1) for what in ("weight", "bias")]
            for k, extractor in enumerate(theirs.interest_extractors):
                for value, parameter in zip(layers, extractor.parameters()):
                    parameter.copy_(value[k])
            for n in range(3):
                theirs.global_agg[0].get_parameter(f"w_{n + 1}").copy_(ours[f"near.{n}"].T)
        clicks = clicks[-LONGEST - 1:]
        data = utils.Data(([[item + 1 for item in clicks[:-1]]], [clicks[-1] + 1]))
        _, (scores, term, _) = model.forward(theirs, [part[None] for part in data[0]])
        session = world.vectors()
        found = world.backbone.session_scores(session.vectors, session.mask, world.table)[client]
        torch.testing.assert_close(found, scores[0], rtol=1e-5, atol=1e-5)
        own = world.backbone.session_term(session, None)[client]
        torch.testing.assert_close(own, term.double(), rtol=1e-5, atol=1e-5)


# HearInt


def test_views_leave_out_nothing_with_p_0_and_scores_are_cosines_times_13(registry):
    """p = 0: both views are the session, so training scores as evaluation does; a score lies in [-13, 13]."""
    for p in (0.0, 1.0):
        world = World(make(registry, "hearint", p=p, clusters=30))
        training, evaluation = world.vectors(), world.vectors(Dropout())
        assert torch.equal(training.vectors, evaluation.vectors) == (p == 0.0)
        scores = world.backbone.session_scores(training.vectors, training.mask, world.table)
        cosines = cosine_similarity(training.vectors, world.table, dim=2)
        torch.testing.assert_close(scores, 13.0 * cosines, rtol=1e-10, atol=1e-10)
        itself = world.backbone.session_scores(training.vectors, training.mask, -training.vectors)
        torch.testing.assert_close(itself, torch.full_like(itself, -13.0))


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
    sequence = Sequence(*(part.expand(2000, 7) for part in (sequence.real, sequence.times, items)))
    clients["positions"] = clients["positions"].expand(2000, 7, 6)
    views = make(registry, "hearint", p=0.4).views(clients, sequence, node.expand(2000, 7), Dropout(torch.arange(2000)))
    for view, expected in zip(views, ([0, 0, 0.6, 1, 0.6, 1, 1], [0, 0, 0.6, 1, 0.6, 0.6, 1])):
        assert view.double().mean(0).tolist() == pytest.approx(expected, abs=0.05)
    apart, together = (view[:, [2, 4]] for view in views)  # of the same item
    assert bool((apart[:, 0] != apart[:, 1]).any()) and torch.equal(together[:, 0], together[:, 1])


def test_buckets_of_shares(registry):
    """Counts 3, 2, 1 of 6 have shares .5, .33, .17; an only neighbour seen twice is in bucket 1 or 4."""
    sessions = Sessions(torch.tensor([0, 7]), torch.tensor([0, 2, 4, 6, 8, 10, 12, 16]),
                        torch.tensor([1, 2, 1, 2, 1, 2, 1, 3, 1, 3, 1, 4, 7, 8, 7, 8]), torch.arange(16.0))
    step = SimpleNamespace(sessions={"train": sessions}, n_users=1)
    pairs = torch.tensor([[1, 2, 1, 3, 1, 4, 1, 7, 8]])
    for buckets, only in (("released", 1), ("quarters", 4)):
        backbone = make(registry, "hearint", buckets=buckets)
        found = backbone._buckets(backbone.remember(step, {}), pairs)[0]
        assert found[:8].tolist() == [3, only, 2, only, 1, 4, 0, only]  # 1 2, 2 1, 1 3, 3 1, 1 4, 4 1, 1 7, 7 8
        assert found[8:].tolist() == [only, 3, only, 2, 4, 1, 0, only]  # the same the other way


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


@pytest.mark.long
def test_hearint_equals_the_released_code(registry, monkeypatch):
    """Scores and the loss in training, with what views may leave out left out, and in evaluation, on random sessions,
    to 1e-5. FEDCL_BENCH_RELEASED names a folder with hearint/, a copy of jarviswww/Code4HearInt."""
    folder = Path(os.environ.get("FEDCL_BENCH_RELEASED", "")) / "hearint"
    if not (folder / "model.py").is_file():
        pytest.skip("no copy of the released code")
    utils, source = ModuleType("utils"), (folder / "utils.py").read_text()
    exec(source.replace("reverse=True):  1\n", "reverse=True):\n"), utils.__dict__)  # which is no Python with that 1
    monkeypatch.setitem(sys.modules, "faiss", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "utils", utils)
    monkeypatch.syspath_prepend(str(folder))
    model = importlib.import_module("model")
    monkeypatch.delitem(sys.modules, "model")
    monkeypatch.setattr(torch, "rand", torch.ones)  # a draw of 1 leaves out what may be
    world = World(make(registry, "hearint"))
    s, table = world.backbone.settings, world.table.detach()
    clusters, centroids = k_means(table[0], s.clusters, s.kmeans_iterations, rng.key(SEED, "clusters of items", 0, 0))
    ours, whole = world.vectors(), world.vectors(Dropout())
    for client in range(world.clients):
        theirs = _released_hearint(model, s, table[client],
                                   {name: value[client].detach() for name, value in world.dense.items()})
        theirs.item_2cluster = torch.cat([torch.zeros(1, dtype=torch.int64), clusters])
        theirs.item_centroids = normalize(centroids, dim=1)
        start, end = world.sessions.start[client:client + 2].tolist()
        rows = [1 + item for item in world.sessions.items[start:end].tolist()]
        near, counts = [[0] * 4 for _ in range(N_ITEMS + 1)], [[0] * 4 for _ in range(N_ITEMS + 1)]
        for row, pairs in clicked_together([rows], s.graph_neighbours).items():
            for n, (near[row][n], counts[row][n]) in enumerate(pairs):
                pass
        frequencies = utils.frequencyAdj(N_ITEMS + 1, counts, near)
        rows = rows[-LONGEST - 1:]
        batch = [part[None] for part in utils.Data(([rows[:-1]], [rows[-1]]), frequencies, LONGEST)[0]]
        batch[3].diagonal(dim1=1, dim2=2)[batch[2].diagonal(dim1=1, dim2=2) == 1] = 4  # see docs/choices.md
        logits, contrast = model.forward(theirs, batch)
        scores = world.backbone.session_scores(ours.vectors, ours.mask, world.table)[client]
        torch.testing.assert_close(scores, logits[0], rtol=1e-5, atol=1e-5)
        loss = cross_entropy(logits, batch[0] - 1)
        torch.testing.assert_close(world.loss()[client], loss, rtol=1e-5, atol=1e-5)
        assert abs(float(contrast.detach())) < 1e-3
        scores = world.backbone.session_scores(whole.vectors, whole.mask, world.table)[client]
        assert theirs.predict(batch, N_ITEMS)[0].tolist() == scores.argsort(descending=True).tolist()


def _released_hearint(model, settings, table, dense):
    """The released module with our parameters, without dropout."""
    options = SimpleNamespace(embedding=settings.dim, posembedding=settings.dim, batchSize=1, temp=0.1, theta=0.2,
                              dropout_in=0.0, dropout_hid=0.0, category="cluster", layer=1, k=settings.clusters, p=0.4,
                              threshold=0.0, lr=0.1, lr_dc_step=1, lr_dc=0.6, dataset="any")
    module = model.HearInt(options, N_ITEMS + 1).double().eval()
    net, spatial, temporal = module.model, module.model.spatial_encoder_0, module.model.temporal_encoder_0
    # Its training reads a batch's second session where prediction reads frequencies (see docs/choices.md).
    net.forward = lambda rows, nodes, graphs, index, masks: net.predict(rows, nodes, *graphs, index, masks)
    layers = {"query": temporal.self_atten.q, "ffn.0": temporal.ff.fn1, "ffn.1": temporal.ff.fn2, "graphs": net.gnn_cat,
              "soft": net.glu1}
    with torch.no_grad():
        module.embedding.weight[1:] = table
        module.pos_embedding.weight[:LONGEST] = dense["positions"]
        for theirs, ours in enumerate((0, 2, 1, 3)):  # edges to itself, to the click before, after, both
            getattr(spatial.agg1, f"a_{theirs}")[:, 0] = dense["edges.session"][ours]
            getattr(spatial.agg2, f"a_{theirs}")[:, 0] = dense["edges.clicks"][theirs]
        for name, layer in layers.items():
            layer.weight.copy_(dense[f"{name}.weight"])
            layer.bias.copy_(dense[f"{name}.bias"])
        for name, parameter in (("soft.mix", net.w_1.T), ("soft.out", net.w_2.T), ("soft.mean", net.glu2.weight),
                                ("gate", net.cat.weight)):
            parameter.copy_(dense[name])
    return module


def test_clients_of_a_chunk(registry):
    """As many as keep a chunk's parameters below 2^24 numbers, or with item tables 2^25, and 256 at most."""
    n_items, dim = 24_390, 100
    assert clients_at_once(build(registry, "backbone", "sasrec"), n_items) == 256
    backbones = {loss: build(registry, "backbone", "miasrec", loss=loss) for loss in ("bce", "cross_entropy")}
    dense = sum(value.numel() for value in backbones["bce"].new_dense(0).values())
    assert clients_at_once(backbones["bce"], n_items) == (1 << 24) // dense == 81
    assert clients_at_once(backbones["cross_entropy"], n_items) == (1 << 25) // (dense + n_items * dim) == 12
