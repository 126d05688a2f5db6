"""The numeric checks of the method cards of the other backbones, and of RLP2 and SPP."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import ITEM, USER, build, federation, finish, grown, one_step, same_tables, train_once
from synthetic import small_interactions, small_stream

from fedcl_bench import Backbone, BackboneSettings, LocalSettings, Snapshot, UserError, pair_keys
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.data.stream import build_static
from fedcl_bench.rng import DrawKey
from fedcl_bench.evaluation.ranking import RankingTask, rank_all
from fedcl_bench.federation.parameter_growth import grow
from fedcl_bench.federation.loop import run
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.runs.config import make_config
from fedcl_bench.testing.worlds import ragged

LN2 = math.log(2.0)
COMMON, PERSONAL = "item_commonality.weight", "item_personality.weight"
ITEM_BIAS, USER_BIAS, GLOBAL_BIAS = "item_bias.weight", "user_bias.weight", "global_bias"


@pytest.fixture(scope="module")
def stream():
    return small_stream()


def initial(backbone, users, items, dtype=torch.float64):
    step = one_step(ragged(*[[] for _ in range(users)]), items)
    return grown(backbone, step, dtype=dtype)


class Starts(Method):
    """FT that keeps the private parameters with which clients begin block 1, as (users, parameters) of each chunk."""

    def __init__(self):
        super().__init__(NoSettings())
        self.seen = []

    def local_loss(self, batch):
        if (batch.draw.step, batch.draw.round, batch.draw.batch) == (1, 0, 0):
            self.seen.append((batch.users, {name: values.detach().clone() for name, values in batch.private.items()}))


# All ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, public, private, dense", [
    ("fedncf", {ITEM}, {USER, "predictor.0.weight", "predictor.0.bias"}, set()),
    ("pfedrec", {ITEM}, {"score.weight", "score.bias"}, set()),
    ("fedrap", {COMMON}, {PERSONAL, "score.weight", "score.bias"}, set()),
    ("ncf", {"item_gmf.weight", "item_mlp.weight"}, {"user_gmf.weight", "user_mlp.weight"}, {"mlp", "output"}),
    ("biasmf", {ITEM, ITEM_BIAS}, {USER, USER_BIAS, GLOBAL_BIAS}, set())])
def test_what_is_shared_and_what_stays_at_the_client(registry, name, public, private, dense):
    """Clients of the three federated backbones start alike; the tutorial's user and global biases are private."""
    model = initial(build(registry, "backbone", name), 3, 5)
    assert set(model.public) == public and set(model.private) == private
    assert {key.split(".")[0] for key in model.dense} == dense
    if name in ("fedncf", "pfedrec", "fedrap"):
        assert all(torch.equal(table[0], row) for table in model.private.values() for row in table)


# FedNCF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedncf", "pfedrec"])
def test_private_parameters_are_reset_or_kept(registry, ml100k, name):
    """In code mode (the default) block 1 starts every client with data in it, old or new, from the server's initial
    values; in the paper's mode all keep theirs. Users without data keep theirs in both."""
    step = ml100k.steps[1]
    for reset, settings in ((True, {}), (False, {"reset_private": False})):
        starts = Starts()
        f = replace(make_config(registry, "ft", name, "ml-100k",
                                overrides=[("test", {"rounds": 1, **settings})]).federation(ml100k), method=starts)
        points = iter(run(f))
        before = next(p for p in points if p.trained).best.model.private
        after = next(p for p in points if p.step == 1 and p.round == 1).model.private
        fresh = {key: table.float() for key, table in f.backbone.new_rows(0, range(step.n_users), range(0))[1].items()}
        present = step.train.lengths > 0
        old = torch.arange(step.n_users) < step.old_users
        for key in after:
            table = after[key].clone()  # users without data are as the block found them
            for users, private in starts.seen:
                table[users] = private[key]
            kept = old & ~present if reset else old
            assert torch.equal(table[~kept], fresh[key][~kept])
            assert torch.equal(table[kept], before[key][kept[:step.old_users]])
            trained = (ml100k.steps[0].train.lengths > 0).nonzero().flatten()
            assert (before[key][trained] != fresh[key][trained]).flatten(1).any(1).all()  # block 0 had moved them
        assert (present & old).any() and (present & ~old).any() and (old & ~present).any()


# PFedRec -----------------------------------------------------------------------------------------------------------


def test_pfedrec_local_and_global_tables(registry):
    """The table that clients are evaluated with changes what is measured after round 1, and nothing of the training."""
    stream = build_static(small_interactions(), StreamSettings(stream="static"), "small")
    local, shared = (finish(federation(registry, stream, build(registry, "method", "ft"), rounds=1, backbone=build(
        registry, "backbone", "pfedrec", eval_item_table=table))) for table in ("local", "global"))
    assert torch.equal(local.model.public[ITEM], shared.model.public[ITEM])
    assert local.curve[0]["loss"] == shared.curve[0]["loss"] and local.curve[0]["valid"] != shared.curve[0]["valid"]
    assert not torch.equal(local.tests[0][2].values["ndcg@20"], shared.tests[0][2].values["ndcg@20"])
    # A client's own copy is what it uploaded, before the mean.
    torch.testing.assert_close(local.model.local[ITEM].mean(0), local.model.public[ITEM], atol=1e-4, rtol=1e-4)


# GPFedRec ----------------------------------------------------------------------------------------------------------


def test_gpfedrec_server(registry):
    """R = A^L Q for each client, and the mean of R for all."""
    q = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 4.0]], dtype=torch.float64).unsqueeze(2)
    for layers in (1, 3):
        public, served = build(registry, "backbone", "gpfedrec", graph_layers=layers).serve({ITEM: q})
        assert served[ITEM].squeeze(2).tolist() == [[2, 0], [2, 0], [0, 4]]
        torch.testing.assert_close(public[ITEM], served[ITEM].mean(0))
    swapped = build(registry, "backbone", "gpfedrec", graph_sign="code").serve({ITEM: q})[1][ITEM].squeeze(2)
    assert swapped.tolist() == [[0, 4], [0, 4], [2, 0]]
    back = build(registry, "backbone", "gpfedrec", graph_sign="code", graph_layers=2).serve({ITEM: q})[1][ITEM]
    assert back.squeeze(2).tolist() == [[2, 0], [2, 0], [0, 4]]


def test_gpfedrec_never_climbs(registry):
    with pytest.raises(UserError, match="'lr_eta': found 1, accepted: above 1 with lr_offset=code"):
        build(registry, "backbone", "gpfedrec", lr_eta=1.0)
    assert build(registry, "backbone", "gpfedrec", lr_eta=1.0, lr_offset="none").learning_rates(1000)[USER] == 0.1


# FedRAP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule, rounds", [
    ("fixed", {0: 1.0, 50: 1.0}), ("tanh", {0: 0.0, 10: 0.7616}), ("sin", {0: 0.5, 16: 0.9998, 47: 0.0}),
    ("square", {0: 0.0, 4: 0.0, 5: 1.0, 9: 1.0, 10: 0.0}), ("frac", {0: 1.0, 9: 0.1})])
def test_fedrap_weights_of_a_round(registry, schedule, rounds):
    backbone = build(registry, "backbone", "fedrap", schedule=schedule, lambda_apart=2.0, mu=3.0)
    for round_, share in rounds.items():
        assert backbone.weights(round_) == pytest.approx((2.0 * share, 3.0 * share), abs=1e-3)


# RLP2 --------------------------------------------------------------------------------------------------------------

def same_run(a, b):
    same_tables(a.model, b.model)
    same_tables(a.best.model, b.best.model)
    for row, other in zip(a.curve, b.curve, strict=True):
        assert (row["loss"], row["valid"]) == (other["loss"], other["valid"])
    for (*_, scores), (*_, others) in zip(a.tests, b.tests, strict=True):
        assert all(torch.equal(values, others.values[metric]) for metric, values in scores.values.items())


@pytest.mark.parametrize("name, of_backbone", [("fedmf", {}), ("ncf", {"dim": 8, "hidden": (8,)})])
def test_lambda_zero_is_ft(registry, stream, name, of_backbone):
    """Methods with weight 0 are FT, bit by bit: tables, curve and every user's test scores; with a weight not."""
    def whole(method, **settings):
        backbone = build(registry, "backbone", name, **of_backbone)
        local = LocalSettings(optimiser="adam" if backbone.pairwise else "sgd", batch_size=32)
        return finish(federation(registry, stream, build(registry, "method", method, **settings), backbone, rounds=2,
                                 local=local, init_from="best"))
    stream = replace(stream, steps=stream.steps[:3])  # from the third block on methods use two before it
    ft = whole("ft")
    same_run(whole("rlp2", lambda_error=0.0), ft)
    same_run(whole("reg", lambda_reg=0.0), ft)
    same_run(whole("spp", lambda_replay=0.0), ft)
    same_run(whole("spp", stable_items=0, plastic_items=0), ft)
    for of_lists in ({}, {"top_n": 20, "eps": 0.001}):
        same_run(whole("f3crec", lambda_kd=0.0, beta=0.0, **of_lists), ft)
    for method, settings in (("f3crec", {}), ("rlp2", {"lambda_error": 0.5}), ("spp", {"lambda_replay": 0.5})):
        with pytest.raises(AssertionError):
            same_run(whole(method, **settings), ft)


def with_memory(registry, keys, errors, **settings):
    """RLP2 whose clients remember these (keys (users, m, d), errors (users, m))."""
    method = build(registry, "method", "rlp2", **settings)
    method.client_state = {"keys": torch.as_tensor(keys).double(), "errors": torch.as_tensor(errors).double(),
                           "filled": torch.ones(len(errors), len(errors[0]), dtype=torch.bool)}
    return method


def test_rlp2_mask_comes_after_the_correction(registry):
    """A masked item is not ranked, however much its error raises it; the item that the error lowers is not masked."""
    backbone = build(registry, "backbone", "fedmf", dim=4)
    model = Snapshot({ITEM: torch.eye(4).double()}, {USER: torch.tensor([[0.4, 0.3, 0.2, 0.1]]).double()})
    keys = pair_keys(backbone, model, torch.tensor([0]), torch.arange(4)[None])
    torch.testing.assert_close(keys[0], torch.diag(model.private[USER][0]))  # FedMF's key of (u, i) is p_u * q_i
    method = with_memory(registry, keys, [[1.0, -1.0, -1.0, 1.0]], lambda_error=10.0, neighbours=1)
    alone = rank_all(backbone, None, model, RankingTask(ragged([3]), [ragged([0])], [1, 2, 3]))
    assert [float(alone.values[f"hit@{k}"]) for k in (1, 2, 3)] == [0, 0, 1]
    found = rank_all(backbone, method, model, RankingTask(ragged([3]), [ragged([0])], [1, 2, 3]))
    assert [float(found.values[f"hit@{k}"]) for k in (1, 2, 3)] == [1, 1, 1]
    masked = rank_all(backbone, method, model, RankingTask(ragged([0, 1]), [ragged([0])], [4]))
    assert float(masked.values["recall@4"]) == 0.5


def remembered(method, user):
    filled = method.client_state["filled"][user]
    return method.client_state["errors"][user][filled].tolist(), method.client_state["keys"][user][filled].tolist()


def test_rlp2_memory_is_fifo_and_bounded(registry, stream):
    """3 errors a block and 5 places: the newest block's 3 and the 2 newest of those before. Users without data in a
    block keep theirs, new users have nothing until their first block."""
    backbone = build(registry, "backbone", "fedmf", dim=4)
    models = {}
    before = Snapshot({}, {})
    for step in stream.steps:
        before = models[step.index] = grow(before, backbone, 0, step, torch.float64, torch.device("cpu"))

    def add(method, t):
        trained = (stream.steps[t].train.lengths > 0).nonzero().flatten()
        method.end_step(stream.steps[t], models[t], backbone, trained, DrawKey(0, t))
        return set(trained.tolist())
    method = build(registry, "method", "rlp2", memory=5, errors=3)
    history, alone = {}, {}
    for t, step in enumerate(stream.steps):
        alone[t] = build(registry, "method", "rlp2", memory=5, errors=3)
        present = add(alone[t], t)
        add(method, t)
        for user in present:
            errors, keys = remembered(alone[t], user)
            assert len(errors) == 3 and [abs(e) for e in errors] == sorted((abs(e) for e in errors), reverse=True)
            old = history.get(user, ([], []))
            history[user] = (errors + old[0])[:5], (keys + old[1])[:5]
        for user in range(step.n_users):
            assert remembered(method, user) == history.get(user, ([], []))
    assert method.client_state["errors"].shape == (stream.steps[-1].n_users, 5)
    assert any(len(errors) == 5 for errors, _ in history.values())


# SPP ---------------------------------------------------------------------------------------------------------------


class Replay:
    """What SPP sees of a local batch: the clients, and their scores of the replayed items."""

    def __init__(self, users, round_, scores):
        self.users, self.draw, self.scores = torch.tensor(users), DrawKey(0, 1, round_), torch.tensor(scores).double()

    def replay_scores(self, clients):
        return self.scores[clients]


def table(scores):
    """A FedMF snapshot of length-1 vectors whose user u has the logits ``scores[u]`` x (item's row): p_u = 1."""
    return Snapshot({ITEM: torch.as_tensor(scores).double()[:, None]}, {USER: torch.ones(1, 1, dtype=torch.float64)})


def after_blocks(registry, starts, **settings):
    """SPP at the start of block len(starts), blocks 1, 2, ... having started from ``starts`` (logits of one user)."""
    method, backbone = build(registry, "method", "spp", **settings), build(registry, "backbone", "fedmf", dim=1)
    for t, scores in enumerate(starts, start=1):
        step, previous = (one_step(ragged([]), len(scores), index=i, old_users=1, old_items=len(scores))
                          for i in (t, t - 1))
        method.end_step(previous, table(scores), backbone, torch.tensor([0]), DrawKey(0, t - 1))
        method.begin_step(step, table(scores), backbone)
    return method


def test_spp_reductions(registry):
    """Two items of each proxy, all different: their cross-entropies are averaged, or summed as in CCD."""
    starts = [[3.0, 2.0, 0.0, 0.0], [0.0, 0.0, 3.0, 2.0]]
    mean, total = (after_blocks(registry, starts, stability=1.0, plasticity=0.0, proxy_top=2, stable_items=2,
                                plastic_items=2, lambda_replay=1.0, replay_reduction=reduction)
                   for reduction in ("mean", "sum"))
    assert sorted(mean.replayed_items(torch.tensor([0]), DrawKey(0, 1))[0].tolist()) == [0, 1, 2, 3]
    batch = Replay([0], 0, [[0.0] * 4])
    assert float(mean.local_loss(batch)) == pytest.approx(LN2)
    assert float(total.local_loss(batch)) == pytest.approx(4 * LN2)


# BiasMF and NCF (tutorial) -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings", [
    LocalSettings(optimiser="adam", batch_size=7, local_epochs=5), LocalSettings()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_biases_that_cancel_never_move(registry, settings, dtype):
    """User bias and global bias cancel in every pair: they stay exactly where they are, under Adam too."""
    backbone = build(registry, "backbone", "biasmf", lr=0.1, init_std=1.0)
    model = initial(backbone, 5, 40, dtype)
    private = {**model.private, USER_BIAS: torch.linspace(-1, 1, 5).to(dtype)[:, None],
               GLOBAL_BIAS: torch.full((5, 1), 0.3, dtype=dtype)}
    lists = [list(range(k, 40, 5))[:n] for k, n in zip(range(5), (8, 7, 5, 3, 1))]
    after, _, _ = train_once(backbone, replace(model, private=private), ragged(*lists), settings)
    assert torch.equal(after.private[USER_BIAS], private[USER_BIAS])
    assert torch.equal(after.private[GLOBAL_BIAS], private[GLOBAL_BIAS])
    assert (after.private[USER] != private[USER]).any(1).all()


# Any backbone ------------------------------------------------------------------------------------------------------


class Aliased(Backbone):
    """s(u, i) = q_i + (a_u + b_u): the two private numbers have one gradient, in one tensor."""

    def learning_rates(self, n_items, round_=0, batch=0):
        return {ITEM: 1.0, "a": 0.5, "b": 0.25, "c": 1.0}

    def score(self, clients, rows):
        return rows[ITEM].squeeze(2) + torch.tanh(clients["a"] + clients["b"]) + 0.0 * clients["c"].sum(1, keepdim=True)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_parameters_with_one_gradient_tensor(optimiser, decay):
    """Autograd returns the same tensor for terms of a sum, and an expanded number for a sum over a row; every parameter
    still gets its own step."""
    backbone = Aliased(BackboneSettings())
    backbone.weight_decay = decay
    private = {"a": torch.tensor([[0.2]]), "b": torch.tensor([[-0.1]]), "c": torch.ones(1, 3)}
    model = Snapshot({ITEM: torch.zeros(10, 1)}, {name: value.double() for name, value in private.items()})
    model = replace(model, public={ITEM: model.public[ITEM].double()})
    after, _, _ = train_once(backbone, model, ragged([3]), LocalSettings(optimiser=optimiser))
    t = math.tanh(0.1)
    gradient = (1 / (1 + math.exp(-t)) - 0.2) * (1 - t * t)  # 5 samples, one positive
    for name, value in private.items():
        own = (0.0 if name == "c" else gradient) + decay * value.double()
        step = own if optimiser == "sgd" else own.sign() * (own != 0)
        torch.testing.assert_close(after.private[name], value.double() - backbone.learning_rates(10)[name] * step,
                                   atol=1e-6, rtol=1e-6)
