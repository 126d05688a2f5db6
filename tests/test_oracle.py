"""Engine == oracle: after a round, batched clients equal clients trained one by one on full tables."""

import statistics
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from helpers import build, federation, grown, module_of, same_clients, same_tables, strategy_of, threads, train_round

from fedcl_bench import SIZES, LocalSettings, Snapshot, UserError
from fedcl_bench.training.strategies import Strategy
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.rng import DrawKey
from fedcl_bench.federation import round as rounds
from fedcl_bench.federation.aggregators import Aggregator
from fedcl_bench.federation.settings import FederationSettings
from fedcl_bench.federation.cold_start import cold_start_of
from fedcl_bench.federation.parameter_growth import grow
from fedcl_bench.federation.server import aggregate
from fedcl_bench.federation.settings import truncated_for_new_users
from fedcl_bench.kernels import ops
from fedcl_bench.core.parallel import workers
from fedcl_bench.runs.config import make_config
from fedcl_bench.training.sampling import Needs, make_chunks
from fedcl_bench.stats.clip_noise import OPEN

ITEM = "item_embedding.weight"
SEED, ROUND, KEPT = 3, 4, {}

# Name, settings of the backbone, settings of the local training.
BACKBONES = {
    "fedmf": ("fedmf", dict(lr=0.5, dim=16), {}),
    "fedncf": ("fedncf", dict(lr=0.01, dim=8), {}),
    "fedncf-hidden": ("fedncf", dict(lr=0.01, dim=6, hidden=(12, 8)), {}),
    "pfedrec": ("pfedrec", dict(lr=0.02, dim=8), {}),
    "pfedrec-local": ("pfedrec", dict(lr=0.02, dim=8, eval_item_table="local"), {}),
    "fedrap": ("fedrap", dict(lr=0.1, lr_items=5.0, dim=6, l2=1e-3, schedule="tanh", mu=0.05), {}),
    "fedrap-touched": ("fedrap", dict(lr=0.1, lr_items=5.0, dim=6, l2=0.0, schedule="tanh", mu=0.05), {}),
    "fedrap-tolerance": ("fedrap", dict(lr=0.1, lr_items=5.0, dim=6, l2=1e-3, mu=0.05, sparsity="l2"),
                         dict(local_epochs=4, tolerance=0.05)),
    "gpfedrec": ("gpfedrec", dict(lr=0.01, dim=6, hidden=(12, 10)), {}),
    "gpfedrec-code": ("gpfedrec", dict(lr=0.01, dim=6, hidden=(), graph_sign="code", graph_neighbours=3,
                                        lr_offset="none"), {}),
    "biasmf": ("biasmf", dict(lr=0.01, dim=8), dict(optimiser="adam")),
    "ncf": ("ncf", dict(lr=0.01, dim=6, hidden=(7, 5)), dict(optimiser="adam")),
    "ncf-sigmoid": ("ncf", dict(lr=0.1, dim=6, hidden=(7,), output="sigmoid"), {}),
}
METHODS = {"ft": ("ft", {}), "reg": ("reg", {"lambda_reg": 1e-4}),
           "reg-mean": ("reg", {"lambda_reg": 0.1, "reg_reduction": "mean"}), "kd": ("kd", {"lambda_kd": 0.5}),
           "f3crec": ("f3crec", {"lambda_kd": 0.5, "eps": 0.0005}), "rlp2": ("rlp2", {}),
           "spp": ("spp", {"lambda_replay": 0.5}),
           "ifedrec": ("ifedrec", {"align_weight": 3.0, "network_steps": 2, "network_hidden": (6,)})}
ALL_METHODS = {**METHODS, "fedprox": ("fedprox", {"prox_mu": 1e-3}),
               "ader": ("ader", {"lambda_kd": 0.5, "exemplars": 7})}
LOCAL = {"batch512x1": dict(batch_size=512, local_epochs=1), "batch512x3": dict(batch_size=512, local_epochs=3),
         "batch48x1": dict(batch_size=48, local_epochs=1), "batch20x2": dict(batch_size=20, local_epochs=2)}


@pytest.fixture(scope="module")
def stream(registry):
    """A part of ML-100K's pairs of users and items, with light and heavy clients, new users and a new item."""
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", {"k_core": 60})])
    return load_stream(config.source, config.stream)


@pytest.fixture(autouse=True)
def small_blocks(registry, monkeypatch):
    """GPFedRec's server multiplies several blocks of clients and of columns."""
    module = module_of(registry, "backbone", "gpfedrec")
    monkeypatch.setattr(module, "CLIENTS", 3)
    monkeypatch.setattr(module, "COLUMNS", 500)


def some_clients(step, count=5):
    """Old, new, light and heavy clients of a block."""
    lengths = step.train.lengths
    users = (lengths > 0).nonzero().flatten()
    by_size = users[lengths[users].argsort(stable=True)]
    picked = by_size[torch.linspace(0, 0.9 * len(by_size), count).long()]
    assert (picked < step.old_users).any() and (picked >= step.old_users).any()
    return picked.sort().values


def noisy(model, generator, scale):
    """Every parameter plus normal noise."""
    return Snapshot(*({name: table + scale * torch.randn(table.shape, generator=generator, dtype=torch.float64)
                       .to(table.dtype) for name, table in getattr(model, kind).items()}
                      for kind in ("public", "private", "dense", "local", "personalised")))


def tables(step, backbone, dtype, scale=0.3):
    """A previous model and the grown model that block 1 starts from; they differ, as with init_from=last."""
    key = backbone.name, backbone.settings, dtype, scale
    if key not in KEPT:
        KEPT.clear()  # but for the latest, which the next test often has too
        generator = torch.Generator().manual_seed(11)
        before = replace(step, n_users=step.old_users, n_items=step.old_items, old_users=0, old_items=0)
        previous = noisy(grown(backbone, before, SEED, dtype), generator, scale)
        start = noisy(previous, generator, 0.1 * scale)
        KEPT[key] = previous, grow(start, backbone, SEED, step, dtype, torch.device("cpu"))
    return KEPT[key]


def old_part(model, step):
    """The rows that were there before the step."""
    return Snapshot({name: table[:step.old_items] for name, table in model.public.items()},
                    {name: table[:step.old_users, :step.old_items] if name in oracle.PERSONAL else
                     table[:step.old_users] for name, table in model.private.items()}, model.dense)


def method_and_oracle(registry, name, stream, previous, model, backbone, settings):
    """The method after block 0, and the oracle's term for it."""
    step = stream.steps[1]
    method = build(registry, "method", name, **settings)
    s = method.settings
    method.end_step(stream.steps[0], previous, backbone, torch.arange(step.old_users), DrawKey(SEED, 0))
    if name == "spp":
        # Two steps in a row, so that both proxies are in use.
        first = Snapshot(previous.public, previous.private, previous.dense)
        method.begin_step(step, grow(previous, backbone, SEED, step, torch.float64, torch.device("cpu")), backbone)
        method.begin_step(step, model, backbone)
        start = old_part(model, step)
        teachers = {"stability": oracle.average(first, start, s.stability),
                    "plasticity": oracle.average(first, start, s.plasticity)}
        seen = {u: set(step.train.of(u).tolist()) | set(stream.steps[0].train.of(u).tolist())
                for u in range(step.old_users)}
        return method, oracle.proxies(start, teachers, {"stability": s.stable_items, "plasticity": s.plastic_items},
                                      seen, s.lambda_replay, s.proxy_top, s.rank_eps, s.anneal)
    if name == "ifedrec":
        method.features = torch.randn(step.n_items, 5, generator=torch.Generator().manual_seed(5))
        method.server_state = method.new_server_state(SEED, old_part(model, step).public)
        rows = {key: method.server_state[f"rows of {key}"] for key in model.public}
        assert all(len(table) == step.old_items < step.n_items for table in rows.values())
        return method, oracle.aligned(rows, s.align_weight)
    method.begin_step(step, model, backbone)
    if name == "ader":
        before, now = ([each.train.of(u).tolist() for u in range(step.old_users)] for each in (stream.steps[0], step))
        return method, oracle.exemplar_distillation(
            previous, before, now, step.old_items / step.n_items, s.lambda_kd, s.exemplars,
            lambda user, item: previous.private["user_embedding.weight"][user] * previous.public[ITEM][item])  # FedMF
    local = backbone.scores_local_tables
    return method, {
        "fedprox": lambda: oracle.proximal(model, s.prox_mu),
        "ft": lambda: oracle.nothing, "rlp2": lambda: oracle.nothing,
        "reg": lambda: oracle.reg(previous, s.lambda_reg, s.reg_reduction),
        "kd": lambda: oracle.distillation(previous, s.lambda_kd, s.top_n, local=local),
        "f3crec": lambda: oracle.distillation(previous, s.lambda_kd, s.top_n, s.eps, local)}[name]()


def compare(registry, stream, backbone_case, method_case, local, dtype=torch.float64, tolerance=1e-9, weighted=False,
            layout="rows", robust="", **changes):
    name, settings, training = BACKBONES[backbone_case]
    backbone = build(registry, "backbone", name, **{**settings, **changes})
    step = stream.steps[1]
    previous, model = tables(step, backbone, dtype)
    method_name, method_settings = ALL_METHODS[method_case]
    method, added = method_and_oracle(registry, method_name, stream, previous, model, backbone, method_settings)
    users = some_clients(step, 6 if robust else 5)
    train = LocalSettings(**{**local, **training})
    inner = layout != "rows"
    assert not inner or strategy_of(backbone, method, model, train) in (Strategy.FACTORED, Strategy.FUSED)
    chunks = make_chunks(step, users, train, 16, Needs(backbone.pairwise, backbone.whole_tables, inner=inner))
    assert {(chunk.inner, chunk.dense) for chunk in chunks} == {(inner, layout == "all items")}
    weights = step.train.lengths.to(dtype) if weighted else None
    aggregator = Aggregator(FederationSettings(
        aggregator=robust, trimmed_share=0.2, krum_malicious=1, krum_selected=2, norm_bound=0.8)) if robust else None
    after, _, _ = train_round(chunks, model, backbone, method, train, SEED, 1, ROUND, weights, aggregator=aggregator)

    plain = oracle.Round(seed=SEED, step=1, round=ROUND, backbone=name, settings=backbone.settings, negatives=4,
                         optimiser=train.optimiser, epochs=train.local_epochs, batch_size=train.batch_size,
                         tolerance=train.tolerance, weighted=weighted)
    lists = {int(u): step.train.of(int(u)).tolist() for u in users}
    mean, uploads, private = plain.run(lists, model, added)
    if robust:
        sent = {key: model.public.get(key, model.dense.get(key)) for key in mean}
        updates = {user: {key: upload[key] - sent[key] for key in sent} for user, upload in uploads.items()}
        weight = {user: len(items) if weighted else 1.0 for user, items in lists.items()}
        change = {"median": lambda: oracle.of_senders(updates, model.public, statistics.median),
                  "trimmed_mean": lambda: oracle.of_senders(updates, model.public, oracle.trimmed_mean(0.2)),
                  "krum": lambda: oracle.multi_krum(updates, 1, 2),
                  "norm_bound": lambda: oracle.norm_bounded(updates, weight, 0.8)}[robust]()
        assert any(float((mean[key] - sent[key] - change[key]).abs().max()) > 1e-4 for key in sent)
        mean = {key: sent[key] + change[key] for key in sent}

    def close(ours, expected):
        torch.testing.assert_close(ours, expected.reshape(ours.shape), atol=tolerance, rtol=tolerance)
    moved = 0.0
    for key, expected in mean.items():
        ours = after.public.get(key, after.dense.get(key))
        close(ours, expected)
        moved = max(moved, float((ours - model.public.get(key, model.dense.get(key))).abs().max()))
    assert moved > 1e-4  # the round did something
    same_clients(after.private, private, tolerance)
    others = torch.ones(len(step.train.lengths), dtype=torch.bool).index_fill(0, users, False)
    for key, table in after.private.items():
        assert torch.equal(table[others], model.private[key][others])
    for key, table in after.local.items():  # each client's own trained copy, whole
        for user in uploads:
            close(table[user], uploads[user][key])

    answer = aggregate(backbone, after, users, OPEN, DrawKey(SEED, 1, ROUND))
    if backbone.serves_tables:
        s = backbone.settings
        mean_table, served = oracle.graph_server([uploads[int(u)][ITEM] for u in users], s.graph_sign,
                                                 s.graph_neighbours, s.graph_threshold)
        close(answer.public[ITEM], mean_table)
        for user, table in zip(users.tolist(), served):
            close(answer.personalised[ITEM][user], table)
    if method_name == "ifedrec":
        state = method.server_state
        network = oracle.AttributeNetwork(*((state[f"network/{layer}.weight"], state[f"network/{layer}.bias"])
                                            for layer in (0, 2)), method.settings.network_lr)
        for public in (model.public, answer.public):  # in two rounds
            method.aggregate(public)
            rows = network.fit(method.features.to(dtype), torch.cat([table.flatten(1) for table in public.values()], 1),
                               method.settings.network_steps)
        close(torch.cat([method.server_state[f"rows of {key}"].flatten(1) for key in public], 1), rows)
    if method_name == "f3crec":
        for key, table in method.aggregate(answer.public).items():
            if table.dim() == 2:
                close(table, oracle.temporal_mean(answer.public[key], previous.public[key], method.settings.beta))


def every_two(*lists):
    """Tuples in which all pairs of the first two lists' entries occur, and those of others as often as they can; every
    entry occurs in the half that is not left to the long tests."""
    first, second, *others = map(list, lists)
    return [pytest.param(a, b, *(other[(i + j) % len(other)] for other in others),
                         marks=[pytest.mark.long] * ((i + j) // 2 % 2))
            for i, a in enumerate(first) for j, b in enumerate(second)]


@pytest.mark.parametrize("method, local, optimiser", every_two(METHODS, LOCAL, ["sgd", "adam"]))
def test_fedmf_round_equals_oracle(registry, stream, method, local, optimiser):
    changes = {} if optimiser == "sgd" else {"lr": 0.01, "item_lr": "plain"}
    compare(registry, stream, "fedmf", method, {**LOCAL[local], "optimiser": optimiser}, **changes)


@pytest.mark.parametrize("method, local, backbone", every_two(
    ["ft", "kd", "f3crec", "rlp2", "spp"], LOCAL, ["fedmf", "fedncf", "pfedrec"]))
def test_round_on_scores_of_all_items_equals_oracle(registry, stream, monkeypatch, backbone, method, local):
    monkeypatch.setattr(SIZES, "dense_items", 1 << 30)  # for light clients too
    monkeypatch.setattr(SIZES, "dense_items_compiled", 1 << 30)
    compare(registry, stream, backbone, method, LOCAL[local], layout="all items")
    if method == "ft":
        compare(registry, stream, backbone, method, LOCAL[local], layout="all items", weighted=True)


@pytest.mark.skipif(ops.why_not() is not None, reason=f"no compiled kernels: {ops.why_not()}")
@pytest.mark.parametrize("method, local, backbone", every_two(
    ["ft", "kd", "f3crec", "rlp2", "spp"], LOCAL, ["fedmf", "fedncf", "pfedrec"]))
def test_round_on_rows_read_in_place_equals_oracle(registry, stream, monkeypatch, backbone, method, local):
    monkeypatch.setattr(SIZES, "dense_items", 0)
    monkeypatch.setattr(SIZES, "dense_items_compiled", 0)
    monkeypatch.setattr(SIZES, "weighted_batches", 1 << 30)  # for heavy clients too
    monkeypatch.setattr(SIZES, "most_updates", 1 << 30)
    calls = []
    monkeypatch.setattr(ops, "inner_round", lambda *arguments, call=ops.inner_round:
                        calls.append(len(calls)) or call(*arguments))
    compare(registry, stream, backbone, method, LOCAL[local], layout="in place")
    fused = method != "spp" and backbone != "fedncf"
    assert bool(calls) == fused
    if method == "ft":  # then local batch by local batch
        compare(registry, stream, backbone, method, LOCAL[local], layout="in place", weighted=True)
        monkeypatch.setattr(rounds, "plan_of", lambda *_: None)
        compare(registry, stream, backbone, method, LOCAL[local], layout="in place")
        compare(registry, stream, backbone, method, LOCAL[local], layout="in place", weighted=True)


@pytest.mark.parametrize("backbone, local", list(zip(BACKBONES, ["batch512x1", "batch48x1"] * 7)))
def test_round_without_compiled_kernels_equals_oracle(registry, stream, monkeypatch, backbone, local):
    monkeypatch.setattr(ops, "why_not", lambda: "switched off")
    compare(registry, stream, backbone, "ft", LOCAL[local])
    if backbone in ("fedmf", "fedncf", "pfedrec"):
        monkeypatch.setattr(SIZES, "dense_items", 1 << 30)
        compare(registry, stream, backbone, "f3crec", LOCAL[local], layout="all items")


# Every second pair goes to the long tests. Variants of a backbone differ in its scores or its server, which F3CRec's
# loss and aggregation both go through.
@pytest.mark.parametrize("backbone, method, local, more", [
    *(pytest.param(backbone, method, "batch48x1", {}, marks=[pytest.mark.long] * ((i + j) % 2))
      for i, backbone in enumerate(("fedncf", "pfedrec", "fedrap", "gpfedrec", "biasmf", "ncf"))
      for j, method in enumerate(("ft", "f3crec", "kd", "reg", "rlp2", "spp"))),
    *((backbone, method, "batch48x1", {}) for backbone in ("fedncf-hidden", "pfedrec-local", "fedrap-tolerance",
                                                           "gpfedrec-code", "ncf-sigmoid")
      for method in ("reg-mean", "f3crec")),
    # over epochs
    ("fedncf", "f3crec", "batch512x3", {}), ("pfedrec", "f3crec", "batch20x2", {}),
    ("pfedrec-local", "f3crec", "batch512x3", {}), ("fedrap", "f3crec", "batch20x2", {}),
    ("gpfedrec", "f3crec", "batch512x3", {}), ("ncf", "f3crec", "batch512x3", {}),
    ("biasmf", "f3crec", "batch20x2", {}),
    ("fedmf", "ader", "batch512x1", {}), ("fedmf", "ader", "batch20x2", {}),
    ("fedmf", "fedprox", "batch48x1", {}), ("fedncf", "fedprox", "batch48x1", {}),
    ("fedrap", "fedprox", "batch512x3", {}), ("ncf-sigmoid", "fedprox", "batch20x2", {}),
    *(("fedrap-touched", "ft", local, {}) for local in ("batch48x1", "batch512x3", "batch20x2")),
    # weighted by interactions, and in single precision
    *((backbone, method, "batch512x1", {"weighted": True}) for backbone, method in (
        ("fedmf", "reg"), ("fedncf", "ft"), ("pfedrec", "reg"), ("biasmf", "ft"), ("ncf", "reg"))),
    *((backbone, method, "batch512x1", {"dtype": torch.float32, "tolerance": 1e-4})
      for method, backbone in zip(METHODS, ["fedmf", "fedncf", "pfedrec"] * 3))])
def test_round_equals_oracle(registry, stream, backbone, method, local, more):
    compare(registry, stream, backbone, method, LOCAL[local], **more)


def test_a_tolerance_where_all_rows_move(registry, stream):
    """Rows that clients do not look up move alike for all of them, so that none may end its round early; FedProx, and a
    single local epoch, move none so."""
    early = {"tolerance": 0.01, **LOCAL["batch512x3"]}
    for method in ("reg-mean", "ifedrec"):
        with pytest.raises(UserError, match=f"'tolerance': found 0.01, accepted: 0 with method '{method[:3]}.*' and "
                                            f"backbone 'fedmf'"):
            compare(registry, stream, "fedmf", method, early)
    compare(registry, stream, "fedmf", "fedprox", early)
    compare(registry, stream, "fedmf", "reg-mean", {**early, "local_epochs": 1})


@pytest.mark.parametrize("backbone, method, robust, more", [
    ("fedmf", "ft", "norm_bound", {}), ("fedmf", "reg", "median", {}), ("fedrap", "ft", "norm_bound", {}),
    ("ncf", "ft", "median", {}), ("pfedrec-local", "f3crec", "norm_bound", {"weighted": True}),
    ("ncf", "ft", "trimmed_mean", {}), ("fedmf", "f3crec", "trimmed_mean", {}), ("ncf", "ft", "krum", {}),
    ("fedrap", "kd", "krum", {})])
def test_aggregators_of_single_updates_equal_oracle(registry, stream, backbone, method, robust, more, monkeypatch):
    monkeypatch.setattr(SIZES, "compared", 1000)  # numbers of a table in several parts
    compare(registry, stream, backbone, method, LOCAL["batch48x1"], robust=robust, **more)


def test_every_path_of_the_engine_is_compared(stream):
    """The clients above include one batch, several weighted batches and several gathered ones."""
    step = stream.steps[1]
    chunks = make_chunks(step, some_clients(step), LocalSettings(batch_size=48), 16)
    batches = {chunk.batches for chunk in chunks}
    assert min(batches) == 1 and max(batches) > SIZES.weighted_batches
    assert any(1 < b <= SIZES.weighted_batches for b in batches)
    assert any(len(chunk.users) > 1 for chunk in chunks)


@pytest.mark.parametrize("backbone", [*(pytest.param(name, marks=pytest.mark.long) for name in ("fedmf", "pfedrec")),
                                      "fedncf", "biasmf"])
def test_error_memory_equals_oracle(registry, stream, backbone):
    """RLP2: the stored errors are the largest ones of the client's samples, and scores are corrected by them."""
    name, settings, _ = BACKBONES[backbone]
    backbone = build(registry, "backbone", name, **settings)
    step = stream.steps[1]
    previous, model = tables(step, backbone, torch.float64)
    method = build(registry, "method", "rlp2", memory=40, errors=16, neighbours=3)
    users = some_clients(stream.steps[1], 4)
    old = users[users < step.old_users]
    method.end_step(stream.steps[0], previous, backbone, old, DrawKey(SEED, 0))

    def key_of(client, item):
        values = dict(client.named_parameters())
        row = torch.cat([values[key][item] for key in previous.public])
        return (row * values["user_embedding.weight"][0]
                if name in ("fedmf", "biasmf") and len(row) == backbone.settings.dim
                else values["user_embedding.weight"][0] * values[ITEM][item] if name == "biasmf" else row)
    for user in old.tolist():
        positives = stream.steps[0].train.of(user).tolist()
        others = sorted(set(range(step.old_items)) - set(positives))
        number = oracle.stream(SEED, "negatives", 0, -1, user)
        negatives = {others[((number(j) >> 32) * len(others)) >> 32] for j in range(4 * len(positives))}
        client = oracle.load(name, backbone.settings, previous, user, torch.float64)
        p = torch.sigmoid(client(range(step.old_items))).detach()
        errors = {item: 1.0 - float(p[item]) for item in positives} | {item: -float(p[item]) for item in negatives}
        largest = sorted(errors, key=lambda item: -abs(errors[item]))[:16]
        kept = method.client_state["errors"][user][method.client_state["filled"][user]]
        assert sorted(kept.tolist()) == pytest.approx(sorted(errors[item] for item in largest), abs=1e-12)
        memory = [(key_of(client, item).detach(), errors[item]) for item in largest]
        expected = oracle.corrected(model, name, backbone.settings, user, memory, key_of, 0.1, 3, 1.0)
        one = torch.tensor([user])
        from fedcl_bench.plugin.state import score_users
        found = method.rescore(one, score_users(backbone, model, one), model, backbone)[0]
        assert found.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("backbone, local", [
    ("fedmf", "batch20x2"), ("fedncf", "batch512x1"), ("pfedrec-local", "batch512x1"), ("fedrap", "batch20x2"),
    ("fedrap-tolerance", "batch512x1"), ("gpfedrec", "batch512x1"), ("ncf", "batch20x2")])
def test_fold_in_of_new_users_equals_oracle(registry, stream, backbone, local):
    """Whatever their private parameters were before; nothing else changes."""
    k, rounds = 3, 2
    name, settings, training = BACKBONES[backbone]
    backbone = build(registry, "backbone", name, **settings)
    train = LocalSettings(**{**LOCAL[local], **training})
    f = federation(registry, stream, build(registry, "method", "ft"), backbone, SEED, local=train, fold_in=k,
                   fold_in_rounds=rounds, precision="float64")
    step = truncated_for_new_users(stream.steps[1], k)
    model = noisy(tables(step, backbone, torch.float64)[1], torch.Generator().manual_seed(5), 0.1)
    after = cold_start_of(f, step, model).with_arrivals(model)

    fresh = grown(backbone, replace(step, old_users=0, old_items=0), SEED).private
    start = replace(model, private={key: torch.cat([table[:step.old_users], fresh[key][step.old_users:]])
                                    for key, table in model.private.items()})
    some = range(step.old_users, step.n_users, 4)  # each trains alone
    lists = {user: stream.steps[1].train.of(user).tolist()[:k] for user in some}
    assert all(len(items) == k for items in lists.values()) and len(lists) > 5
    expected = oracle.fold_in([oracle.Round(
        seed=SEED, step=1, round=number, backbone=name, settings=backbone.settings, negatives=4,
        optimiser=train.optimiser, epochs=train.local_epochs, batch_size=train.batch_size, tolerance=train.tolerance,
        frozen={*model.public, *model.dense}) for number in range(rounds)], lists, start)
    for key, table in after.private.items():
        torch.testing.assert_close(table[some], expected[key][some], atol=1e-9, rtol=1e-9)
        assert torch.equal(table[:step.old_users], model.private[key][:step.old_users])
    assert max(float((table - start.private[key]).abs().max()) for key, table in after.private.items()) > 1e-4
    for kind in ("public", "dense", "client_context"):
        assert getattr(after, kind) is getattr(model, kind)
    for kind in ("local", "personalised"):
        for key, table in getattr(after, kind).items():
            assert torch.equal(table[:step.old_users], getattr(model, kind)[key][:step.old_users])
            assert torch.equal(table[step.old_users:], model.public[key].expand_as(table[step.old_users:]))


@pytest.mark.parametrize("backbone,method", [
    ("fedmf", "ft"), ("fedmf", "f3crec"), ("pfedrec", "reg"), ("ncf", "spp"), ("fedrap", "reg")])
def test_result_does_not_depend_on_chunks_or_threads(registry, stream, backbone, method):
    step = stream.steps[1]
    name, settings, training = BACKBONES[backbone]
    backbone = build(registry, "backbone", name, **settings)
    previous, model = tables(step, backbone, torch.float64, scale=0.1)
    method_name, method_settings = METHODS[method]
    method, _ = method_and_oracle(registry, method_name, stream, previous, model, backbone, method_settings)
    users = (step.train.lengths > 0).nonzero().flatten()
    users = users[::8] if name == "fedmf" else users[::16]
    train = LocalSettings(batch_size=64, **training)
    results = []
    for elements, number in ((1, 1), (1 << 14, 1), (1 << 19, 2), (1 << 14, 3)):
        chunks = make_chunks(step, users, train, backbone.settings.dim,
                             Needs(backbone.pairwise, backbone.whole_tables, chunk_elements=elements))
        with threads(number), workers():
            results.append((len(chunks), train_round(chunks, model, backbone, method, train, SEED, 1, 0)))
    assert results[0][0] == len(users) > results[1][0] >= results[2][0]
    one, three = results[1][1][0], results[3][1][0]  # the same chunks on one thread and on three: bit-identical
    same_tables(one, three)
    for _, (after, loss, _) in results[1:]:
        same_tables(after, results[0][1][0], 1e-11)
        assert loss == pytest.approx(results[0][1][1], abs=1e-11)


def test_upload_noise_has_the_law_of_a_mean_of_laplace_tables():
    """The two Gamma draws against N independent Laplace uploads: moments and Kolmogorov-Smirnov distance."""
    from scipy import stats

    from fedcl_bench import rng
    scale, uploads, shape = 0.3, 3, (400, 50)
    ours = rng.mean_laplace(SEED, 0, 0, ITEM, shape, scale, uploads).numpy().ravel()
    naive = np.random.default_rng(0).laplace(0.0, scale, size=(uploads, *shape)).mean(0).ravel()
    assert ours.std() == pytest.approx(np.sqrt(2 * scale ** 2 / uploads), rel=0.03)
    assert abs(ours.mean()) < 4 * ours.std() / np.sqrt(ours.size)
    assert stats.kurtosis(ours) == pytest.approx(3 / uploads, abs=0.25)  # of a mean of Laplace variables
    assert stats.ks_2samp(ours, naive).pvalue > 1e-3
    assert stats.ks_2samp(ours, np.random.default_rng(1).normal(0, ours.std(), ours.size)).pvalue < 1e-3
    again = rng.mean_laplace(SEED, 0, 1, ITEM, shape, scale, uploads).numpy().ravel()
    assert abs(np.corrcoef(ours, again)[0, 1]) < 0.03
    each = rng.laplace(rng.key(SEED, "a test", 0, 0), torch.arange(3), shape, scale).numpy().reshape(3, -1)
    assert all(stats.ks_1samp(row, stats.laplace(0, scale).cdf).pvalue > 1e-3 for row in each)
    assert abs(np.corrcoef(each)[0, 1]) < 0.03
