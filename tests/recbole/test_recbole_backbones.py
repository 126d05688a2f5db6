"""RecBole's models as backbones: equal to a plain loop over copies of RecBole's own models, however they are called."""

import copy
import random
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, build, federation, grown, one_step, ragged, same_tables, script, threads, train_round
from recbole.data.interaction import Interaction

from fedcl_bench.plugin.backbone import OwnBatch
from fedcl_bench.cli import main
from fedcl_bench.rng import DrawKey
from fedcl_bench.core.errors import UserError
from fedcl_bench.evaluation.metrics import EvaluationSettings
from fedcl_bench.federation.loop import run
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.plugin.state import score_users
from fedcl_bench.core.parallel import workers
from fedcl_bench.recbole import client_facts, domain_facts, models
from fedcl_bench.recbole.keyed_random import Keyed
from fedcl_bench.recbole.parameters import Law
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.checkpoints import load_progress, save_progress
from fedcl_bench.runs.specs import RunSpec, tuned_file
from fedcl_bench.training.sampling import Needs, draw_negatives, make_chunks
from fedcl_bench.plugin.local_settings import LocalSettings
from fedcl_bench.testing.worlds import growing_stream, session_log, session_stream

SEED = 3
# Small sizes and no dropout: (settings of the backbone, RecBole's field names of a sample).
SMALL = {
    "BPR": dict(dim=6),
    "NeuMF": dict(dim=6, model="{mlp_hidden_size: [8, 4], dropout_prob: 0.0}"),
    "MultiDAE": dict(model="{mlp_hidden_size: [9], latent_dimension: 6, dropout_prob: 0.0}"),
    "CDAE": dict(dim=6, model="{corruption_ratio: 0.0}"),
    "ENMF": dict(dim=6, model="{dropout_prob: 0.0}"),
    "FISM": dict(dim=6),
    "SimpleX": dict(dim=6),
    "SASRec": dict(dim=8, max_length=7, model="{n_layers: 1, inner_size: 16, hidden_dropout_prob: 0.0, "
                   "attn_dropout_prob: 0.0}"),
    "GRU4Rec": dict(dim=6, max_length=7, model="{dropout_prob: 0.0}"),
    "SHAN": dict(dim=6, max_length=7),
    "TransRec": dict(dim=6, max_length=7),
    "HRM": dict(dim=6, max_length=7, model="{dropout_prob: 0.0}"),
}


def backbone_of(registry, name, **settings):
    cls = registry.get("backbone", f"recbole:{name}").cls
    return cls(cls.Settings(**{**SMALL.get(name, {}), **settings}))


def start(backbone, step, scale=0.3):
    """A model whose every parameter has its initial value and noise, so that nothing is zero by chance."""
    generator = torch.Generator().manual_seed(5)
    model = grown(backbone, step, SEED)
    kinds = {kind: {name: table + scale * torch.randn(table.shape, generator=generator, dtype=torch.float64)
                    for name, table in getattr(model, kind).items()} for kind in ("public", "private", "dense")}
    return replace(model, **kinds)


@pytest.fixture(scope="module")
def step():
    """5 clients, two of them with equally many items and one with a single one, and 19 items."""
    return one_step(ragged([3, 1, 4, 15, 9], [2, 6, 5], [17, 18], [8, 7, 16], [11]), 19)


def one_round(backbone, step, model, settings, chunk_elements=1 << 20, alone=False):
    if alone:
        backbone._caller.facts = replace(backbone.facts, loss_alone="a test", score_alone="a test")
    users = (step.train.lengths > 0).nonzero().flatten()
    own = backbone.own_samples(settings)
    chunks = make_chunks(step, users, settings, 6,
                         Needs(whole_tables=True, sampler=own, chunk_elements=chunk_elements))
    after, loss, *_ = train_round(chunks, model, backbone, Method(NoSettings()), settings, SEED, 1, 2)
    return after, loss, chunks


class Config(dict):
    """RecBole's configuration has None for what nobody set."""

    def __missing__(self, key):
        return None


@contextmanager
def in_double():
    """RecBole's models make tensors of the default precision."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def without_dropout(module):
    """SimpleX has a rate that no setting changes."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return module


class History:
    """What RecBole's dataset tells a model of one user; written from RecBole's documentation."""

    def __init__(self, items, n_items, length):
        self.items, self.user_num, self.item_num, self.length = items, 2, n_items + 1, length

    def num(self, field):
        return {"user_id": 2, "item_id": self.item_num}[field]

    def history_item_matrix(self, value_field=None, max_history_len=None):
        ids = torch.zeros(2, len(self.items), dtype=torch.int64)
        ids[1] = torch.tensor(self.items)
        return ids, (ids > 0).double(), torch.tensor([0, len(self.items)])


def oracle_model(name, backbone, items, n_items, negatives, model, user):
    """RecBole's model of one user, built by RecBole's own constructor, with this client's parameters."""
    config = Config({**models.defaults(name), "USER_ID_FIELD": "user_id", "ITEM_ID_FIELD": "item_id",
              "NEG_PREFIX": "neg_", "LABEL_FIELD": "label", "LIST_SUFFIX": "_list",
              "ITEM_LIST_LENGTH_FIELD": "item_length", "MAX_ITEM_LIST_LENGTH": backbone.settings.max_length,
              "INVERSE_ITEM_SEQ": "Inverse_item_id_list", "device": "cpu", "require_pow": False,
              "train_neg_sample_args": {"sample_num": negatives}, **backbone.settings.hyper_parameters()})
    dataset = History([i + 1 for i in items], n_items, backbone.settings.max_length)
    with in_double():
        module = models.model_class(name)(config, dataset).double()
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key in model.private:  # the second row of the dimension that has two
                parameter.zero_()
                axis = list(parameter.shape).index(2)
                parameter.select(axis, 1).copy_(model.private[key][user].reshape(parameter.select(axis, 1).shape))
            elif key in model.public:
                axis = list(parameter.shape).index(n_items + 1)
                shape = parameter.select(axis, 0).shape
                parameter.select(axis, 0).copy_(model.dense[f"{key}[padding]"].reshape(shape))
                for item in range(n_items):
                    parameter.select(axis, item + 1).copy_(model.public[key][item].reshape(shape))
            else:
                parameter.copy_(model.dense[key])
    return module


def oracle_samples(kind, items, negatives, k):
    """A client's samples, each a dictionary of fields, in the order of the numbers that are shuffled."""
    items, negatives = [i + 1 for i in items], [i + 1 for i in negatives[:k * len(items)]]
    if kind == "point":
        return [dict(item_id=i, label=1.0) for i in items] + [dict(item_id=i, label=0.0) for i in negatives]
    if kind == "pair":
        return [dict(item_id=items[j // k], neg_item_id=negative) for j, negative in enumerate(negatives)]
    if kind == "group":
        return [dict(item_id=i, neg_item_id=negatives[j * k:(j + 1) * k]) for j, i in enumerate(items)]
    if kind == "user":
        return [{}]
    targets = [dict(item_id=items[t], prefix=items[:t]) for t in range(1, len(items))]
    if kind == "target":
        return targets
    return [dict(some, neg_item_id=negatives[t * k + j]) for t, some in enumerate(targets, start=1) for j in range(k)]


def oracle_batch(kind, some, length, k):
    """RecBole's batch of some samples."""
    fields = {"user_id": torch.ones(len(some), dtype=torch.int64)}
    for name in ("item_id", "label", "neg_item_id"):
        if some and name in some[0] and kind != "group":
            fields[name] = torch.tensor([sample[name] for sample in some])
    if "label" in fields:
        fields["label"] = fields["label"].double()
    if kind == "group":
        fields = {"user_id": torch.ones(len(some) * k, dtype=torch.int64),
                  "item_id": torch.tensor([sample["item_id"] for _ in range(k) for sample in some]),
                  "neg_item_id": torch.tensor([sample["neg_item_id"][j] for j in range(k) for sample in some])}
    if kind.startswith("target"):
        last = [sample["prefix"][-length:] for sample in some]
        fields["item_length"] = torch.tensor([len(part) for part in last])
        fields["item_id_list"] = torch.tensor([part + [0] * (length - len(part)) for part in last])
        fields["Inverse_item_id_list"] = torch.tensor([[0] * (length - len(part)) + part for part in last])
    return Interaction(fields)


def oracle_client(name, backbone, user, items, negatives, settings, model, n_items):
    """One client's local training with torch.optim on a copy of RecBole's model."""
    from oracle import stream

    kind = backbone.facts.samples
    module = copy.deepcopy(oracle_model(name, backbone, items, n_items, settings.negatives, model, user)).train()
    without_dropout(module)
    make = torch.optim.Adam if settings.optimiser == "adam" else torch.optim.SGD
    optimiser = make([p for p in module.parameters() if p.requires_grad], lr=backbone.settings.lr)
    samples = oracle_samples(kind, items, negatives, settings.negatives)
    size = max(1, settings.batch_size // settings.negatives) if kind == "group" else settings.batch_size
    with in_double():
        for epoch in range(settings.local_epochs):
            order = list(range(len(samples)))
            if len(samples) > size:
                number = stream(SEED, "shuffle", 1, 2, epoch, user)
                order.sort(key=lambda i: number(i) >> 1)
            for first in range(0, len(samples), size):
                some = [samples[i] for i in order[first:first + size]]
                loss = module.calculate_loss(oracle_batch(kind, some, backbone.settings.max_length, settings.negatives))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    return module


LOCAL = {"adam, many batches": LocalSettings(optimiser="adam", batch_size=4, negatives=2, local_epochs=2),
         "sgd, one batch": LocalSettings(batch_size=512, negatives=2, local_epochs=2)}


@pytest.mark.parametrize("name,local", [*((name, "adam, many batches") for name in SMALL), ("NeuMF", "sgd, one batch")])
def test_a_round_is_that_of_copies_of_recboles_model(registry, step, name, local):
    """After a round: private rows of every client, and the mean of everything public, as a loop makes them."""
    backbone, settings = backbone_of(registry, name, lr=0.02), LOCAL[local]
    build_model = backbone._caller.build
    backbone._caller.build = lambda *size, **device: without_dropout(build_model(*size, **device))
    model = start(backbone, step)
    after, _, chunks = one_round(backbone, step, model, settings)
    drawn = {user: row for chunk in chunks
             for user, row in zip(chunk.users.tolist(), draw_negatives(chunk, settings, SEED, 1, 2).tolist())}
    modules = {user: oracle_client(name, backbone, user, step.train.of(user).tolist(), drawn[user], settings, model,
                                   step.n_items) for user in range(5)}
    moved = 0.0
    for p in backbone.parameters:
        values = {user: dict(module.named_parameters())[p.name].detach() for user, module in modules.items()}
        if p.follows == "users":
            for user, value in values.items():
                torch.testing.assert_close(after.private[p.name][user],
                                           value.select(p.axis, 1).reshape(p.row), atol=1e-9, rtol=1e-9)
            continue
        mean = sum(values.values()) / len(values)
        if p.follows == "items":
            mean = mean.movedim(p.axis, 0)
            torch.testing.assert_close(after.dense[p.padding], mean[0].reshape(p.row), atol=1e-9, rtol=1e-9)
            mean = mean[1:].reshape(after.public[p.name].shape)
            moved = max(moved, float((mean - model.public[p.name]).abs().max()))
        ours = after.public[p.name] if p.follows == "items" else after.dense[p.name]
        torch.testing.assert_close(ours, mean, atol=1e-9, rtol=1e-9)
    assert moved > 1e-4


@pytest.mark.parametrize("name", SMALL)
def test_scores_are_recboles_own(registry, step, name):
    """Logits of all items, where RecBole's method ends in a sigmoid before it."""
    backbone = backbone_of(registry, name)
    model = start(backbone, step)
    ours = score_users(backbone, model, torch.arange(4))
    for user in range(4):
        items = step.train.of(user).tolist()
        module = oracle_model(name, backbone, items, step.n_items, 1, model, user).eval()
        length = backbone.settings.max_length
        part = [item + 1 for item in items[-length:]]
        fields = {"user_id": torch.ones(19, dtype=torch.int64), "item_id": torch.arange(1, 20),
                  "item_length": torch.full((19,), len(part)),
                  "item_id_list": torch.tensor([part + [0] * (length - len(part))]).expand(19, -1),
                  "Inverse_item_id_list": torch.tensor([[0] * (length - len(part)) + part]).expand(19, -1)}
        with in_double():
            theirs = module.predict(Interaction(fields)).detach()
        if name in ("NeuMF", "CDAE", "FISM"):
            theirs = torch.logit(theirs)
        torch.testing.assert_close(ours[user], theirs, atol=1e-8, rtol=1e-8)


WITH_DROPOUT = {"SimpleX": SMALL["SimpleX"],
                "NeuMF": dict(dim=6, model="{mlp_hidden_size: [8, 4], dropout_prob: 0.3}"),
                "MultiVAE": dict(model="{mlp_hidden_size: [9], latent_dimension: 6, anneal_cap: 0.5, "
                                       "total_anneal_steps: 20}"),
                "MacridVAE": dict(dim=6, model="{encoder_hidden_size: [9], kfac: 2}"),
                "GRU4Rec": dict(dim=6, max_length=7, model="{num_layers: 2}")}


class WeighsTwice(Method):
    """Doubles each client's loss, or asks for its samples' weights."""

    def local_loss(self, batch):
        return batch.weights.sum(1) if self.settings == "weights" else batch.loss


def test_a_method_can_weigh_the_loss_but_sees_no_samples(registry, step):
    settings = LocalSettings(optimiser="sgd", batch_size=4, negatives=2, local_epochs=1)

    def trained(method, lr):
        backbone = backbone_of(registry, "BPR", lr=lr)
        own = backbone.own_samples(settings)
        chunks = make_chunks(step, torch.arange(5), settings, 6, Needs(whole_tables=True, sampler=own))
        return train_round(chunks, start(backbone, step), backbone, method, settings, SEED, 1, 2)[0]
    for one, two in zip(trained(WeighsTwice("loss"), 0.1).tables(), trained(Method(NoSettings()), 0.2).tables(),
                        strict=True):
        torch.testing.assert_close(one, two)
    with pytest.raises(UserError, match="the backbone 'recbole:BPR' makes samples of its own.*use batch.loss"):
        trained(WeighsTwice("weights"), 0.1)


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_vectorised_equals_one_by_one_for_any_chunks_and_threads(registry, step, name):
    """With dropout and other draws: keyed by client, they depend neither on grouping nor on threads."""
    settings = LocalSettings(optimiser="adam", batch_size=4, negatives=2, local_epochs=2)
    cls = registry.get("backbone", f"recbole:{name}").cls
    found = []
    for alone, elements, number in ((False, 1 << 20, 1), (True, 1 << 20, 1), (False, 1, 2)):
        backbone = cls(cls.Settings(**WITH_DROPOUT[name]))
        assert backbone.facts.loss_alone == backbone.facts.score_alone == ""
        torch.manual_seed(len(found))  # the global generator has no say
        np.random.seed(len(found))
        random.seed(len(found))
        with threads(number), workers():
            after, loss, chunks = one_round(backbone, step, start(backbone, step), settings, elements, alone)
        assert len(chunks) == (5 if elements == 1 else 4)  # two clients have equally many items
        found.append([*after.tables(), torch.tensor(loss), score_users(backbone, after, torch.arange(5))])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-9, rtol=1e-9)


def test_keyed_operators_do_not_move_global_generators_and_have_their_law():
    count, base = 20000, torch.tensor(5)
    calls = {"dropout": lambda: torch.nn.functional.dropout(torch.ones(count), 0.3),
             "normal": lambda: torch.zeros(count).normal_(2.0, 3.0),
             "gumbel": lambda: torch.nn.functional.gumbel_softmax(torch.zeros(count, 2))[:, 0]}
    law = {"dropout": (1.0, (0.3 / 0.7) ** 0.5), "normal": (2.0, 3.0), "gumbel": (0.5, 12 ** -0.5)}
    state = torch.get_rng_state()
    for name, call in calls.items():
        with Keyed(base, torch.float32):
            first, second = call(), call()
        with Keyed(base, torch.float32):
            again = call()
        assert torch.equal(first, again) and not torch.equal(first, second)
        mean, std = law[name]
        assert abs(float(first.double().mean()) - mean) < 4 * std / count ** 0.5
        assert abs(float(first.double().std()) / std - 1) < 0.05
    assert torch.equal(state, torch.get_rng_state())


def test_private_makes_dense_and_item_parameters_private(registry, step):
    backbone = backbone_of(registry, "NeuMF", private="predict_layer.*, item_mf*")
    model = grown(backbone, step, SEED)
    assert set(model.public) == {"item_mlp_embedding.weight"}
    assert set(model.private) == {"user_mf_embedding.weight", "user_mlp_embedding.weight", "predict_layer.weight",
                                  "predict_layer.bias", "item_mf_embedding.weight", "item_mf_embedding.weight[padding]"}
    assert model.private["item_mf_embedding.weight"].shape == (5, 19, 6)
    assert not set(model.dense) & set(model.private)
    assert torch.equal(model.private["predict_layer.weight"][0], model.private["predict_layer.weight"][4])
    settings = LocalSettings(optimiser="adam", negatives=2)
    after, *_ = one_round(backbone, step, model, settings)
    alone, *_ = one_round(backbone_of(registry, "NeuMF", private="predict_layer.*, item_mf*"), step, model, settings,
                          alone=True)
    same_tables(after, alone, near=1e-9)
    table = after.private["item_mf_embedding.weight"]
    assert not torch.equal(table[0], table[1])  # personal tables part


def test_laws_of_initial_values_are_recognised():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(40000, generator=generator, dtype=torch.float64) * 0.2
    uniform = torch.rand(40000, generator=generator, dtype=torch.float64) * 0.6 - 0.3
    assert Law.of(torch.full((50,), 0.1)) == Law("constant", pytest.approx(0.1), 0.0)
    assert Law.of(normal) == Law("normal", 0.0, pytest.approx(0.2, rel=0.02))
    assert Law.of(uniform) == Law("uniform", 0.0, pytest.approx(0.3, rel=0.001))
    assert Law.of(normal + 1.0) == Law("normal", pytest.approx(1.0, abs=0.01), pytest.approx(0.2, rel=0.02))
    rows = Law("uniform", 1.0, 0.5).rows(0, "x", range(1000), (4,))
    assert rows.shape == (1000, 4) and 0.5 < float(rows.min()) < 0.502 and 1.498 < float(rows.max()) < 1.5


def small_federation(registry, stream, method, backbone, **settings):
    chosen = {"f3crec": {"top_n": 5, "lambda_kd": 0.5},
              "spp": {"proxy_top": 5, "stable_items": 2, "plastic_items": 2}}.get(method, {})
    return federation(registry, stream, build(registry, "method", method, **chosen), backbone, rounds=2,
                      local=LocalSettings(optimiser="adam", batch_size=16, negatives=2),
                      evaluation=EvaluationSettings(topk=(5,), valid_metric="ndcg@5"), **settings)


@pytest.mark.parametrize("name,method", [("FISM", "f3crec"), ("MultiDAE", "ft"), ("GRU4Rec", "spp")])
def test_blocks_bring_users_and_items_and_a_killed_run_goes_on(registry, tmp_path, name, method):
    stream = growing_stream(blocks=2)
    f = small_federation(registry, stream, method, backbone_of(registry, name))
    f.check()
    points = list(run(f))
    last, (base, later) = points[-1], stream.steps
    assert later.n_users > base.n_users and later.n_items > base.n_items
    assert last.model.n_items == later.n_items and last.model.n_users == later.n_users
    middle = next(p for p in points if p.step == 1 and p.round == 1 and not p.trained)
    save_progress(tmp_path / "checkpoint.pt", middle, 1.0)
    restored, _ = load_progress(tmp_path / "checkpoint.pt", "cpu", f)
    *_, again = run(small_federation(registry, stream, method, backbone_of(registry, name)), restored)
    same_tables(again.model, last.model)
    assert [row["valid"] for row in again.curve] == [row["valid"] for row in last.curve]


def test_clients_remember_their_own_items_of_their_latest_block(registry):
    base, later = growing_stream(blocks=2).steps
    backbone = backbone_of(registry, "FISM")
    first = backbone.remember(base, {})["history"]
    second = backbone.remember(later, {"history": first})["history"]
    for user in range(later.n_users):
        latest = later if int(later.train.lengths[user]) else base
        items = latest.train.of(user).tolist() if user < latest.n_users else []
        assert second[user].tolist() == [i + 1 for i in items] + [0] * (second.shape[1] - len(items))
    sequence = backbone_of(registry, "GRU4Rec").remember(base, {})["history"]
    assert sequence.shape == (base.n_users, 7)
    for user in range(base.n_users):
        items = [i + 1 for i in base.train.of(user).tolist()[-7:]]
        assert sequence[user].tolist() == items + [0] * (7 - len(items))
    assert backbone_of(registry, "BPR").remember(base, {}) == {}


def test_a_client_with_one_item_has_no_sequence_to_train_on(registry, step):
    backbone = backbone_of(registry, "GRU4Rec")
    only = one_step(ragged([3], [4]), 19)
    model = start(backbone, only)
    after, loss, _ = one_round(backbone, only, model, LocalSettings(optimiser="adam"))
    assert loss == 0.0
    same_tables(after, model)


def test_a_counter_of_the_model_is_the_clients_own(registry, step):
    """MultiVAE weighs a term by the batches so far: with anneal_cap above it, by those of the client in the block."""
    backbone = backbone_of(registry, "MultiVAE", model="{mlp_hidden_size: [9], latent_dimension: 6, dropout_prob: 0.0, "
                                                       "anneal_cap: 1.0, total_anneal_steps: 10}")
    model = start(backbone, step)
    chunk = make_chunks(step, torch.tensor([1, 3]), LocalSettings(), 6,
                        Needs(whole_tables=True, sampler=backbone.own_samples(LocalSettings())))[0]
    losses = []
    for done in (0, 4, 9, 30):
        batch = OwnBatch(chunk.users, chunk.positives, chunk.positives.repeat(1, 4),
                         torch.zeros(2, 1, dtype=torch.int64), DrawKey(0, 0), done)
        own = {name: value.expand(2, *value.shape) for name, value in {**model.dense}.items()}
        rows = {name: value.expand(2, *value.shape) for name, value in model.public.items()}
        losses.append(backbone.own_loss(own, rows, batch))
    step1, step2, capped = (losses[k] - losses[0] for k in (1, 2, 3))
    torch.testing.assert_close(step1 / 4, step2 / 9)  # linear in the client's own batches
    torch.testing.assert_close(step2, capped)  # 10 of 10 steps: the cap


def test_names_in_any_spelling_and_notes_of_one_by_one(registry):
    plugin = registry.get("backbone", "recbole:neumf")
    assert plugin.name == "recbole:NeuMF" and registry.get("backbone", "recbole:NeuMF") is plugin
    config = make_config(registry, "ft", "recbole:NEUMF", "ml-100k")
    assert config.name == f"ft-recbole-NeuMF-ml-100k-s0-{config.hash[:12]}"
    assert RunSpec("ft", "recbole:sasrec", "ml-100k").backbone == "recbole:SASRec"
    assert tuned_file(Path("t"), "ft", "recbole:BPR", "ml-100k") == Path("t/ml-100k-recbole-BPR-ft.json")
    alone, vectorised = backbone_of(registry, "HRM"), backbone_of(registry, "BPR")
    assert alone.notes() == ["recbole:HRM: one client at a time in training (Tensor.numpy) and scoring (Tensor.numpy), "
                             "as vmap does not take it; the numbers are the same."]
    assert vectorised.notes() == []


@pytest.mark.parametrize("settings,message", [
    (dict(model="{mlp_hiden: [3]}"), "Did you mean 'mlp_hidden_size'"),
    (dict(model="[3]"), "setting 'model': found '\\[3\\]', accepted: a mapping in braces"),
    (dict(model="{dropout_prob: [}"), "setting 'model'"),
    (dict(model="{mlp_hidden_size: many}"), "cannot be built: .*are part of it"),
    (dict(model="{mf_train: false, mlp_train: false}"), "its loss fails on one client: RuntimeError"),
    (dict(private="predict*,nothing*"), "setting 'private': found 'nothing\\*', accepted: .*item_mf_embedding.weight"),
    (dict(private="item_*"), "leaves no public item table")])
def test_bad_settings(registry, settings, message):
    cls = registry.get("backbone", "recbole:NeuMF").cls
    with pytest.raises(UserError, match=message):
        cls(cls.Settings(**settings))


def test_refused_models_idle_settings_and_streams_of_sessions_say_why(registry, capsys):
    for name, message in (("FEARec", "needs other users' interactions(?s:.*)--dataset A\\+B"),
                          ("EASE", "not trained by gradients(?s:.*)list recbole")):
        with pytest.raises(UserError, match=f"backbone 'recbole:{name}' .*{message}"):
            backbone_of(registry, name)
    with pytest.raises(UserError, match="unknown RecBole model 'neumff'.\nDid you mean 'NeuMF'"):
        registry.get("backbone", "recbole:neumff")
    for backbone, name in (("recbole:MultiDAE", "dim"), ("recbole:BPR", "max_length")):
        with pytest.raises(UserError, match=f"setting '{name}'.*has no effect"):
            make_config(registry, "ft", backbone, "ml-100k", overrides=[("--set", {name: "9"})])
    assert main.main(["list", "recbole:bpr"]) == 0
    assert "RecBole 1.2.0's general recommender BPR" in capsys.readouterr().out
    assert main.main(["list", "recbole"]) == 0
    assert "  SRGNN       sequential  one by one: Tensor.numpy; by domains: yes\n" in capsys.readouterr().out
    f = federation(registry, session_stream(session_log(30), 30), Method(NoSettings()), backbone_of(registry, "BPR"),
                   evaluation=EvaluationSettings(topk=(5,), valid_metric="ndcg@5"))
    f.method.name = "ft"
    with pytest.raises(UserError, match="backbone 'recbole:BPR' trains on blocks or the static stream"):
        f.check()


def test_importing_recboles_models_changes_nothing_of_the_process(registry):
    """A module of RecBole's switches anomaly detection on, and models draw from global generators."""
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    backbone_of(registry, "SASRec", model="{n_layers: 2}").new_dense(7)
    cls = registry.get("backbone", "recbole:SINE").cls
    cls(cls.Settings(dim=8, max_length=6)).new_dense(7)
    assert not torch.is_anomaly_enabled() and torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1] and np.random.get_state()[1].tolist() == state[2]


@pytest.fixture(scope="module")
def probe():
    return script("tools/probe_recbole")


def test_tables_have_all_models_and_the_page_has_the_tables(probe):
    """Hyper-parameters change facts: pairs with BPR's loss; and RepeatNet's second loss looks at numbers."""
    found = probe.all_models()
    assert [*client_facts.TABLE] == found["general"] + found["sequential"]
    assert [*domain_facts.TABLE] == found["sequential"]
    assert (ROOT / "results/pages/recbole-models.md").read_text(encoding="utf-8") == probe.page()
    table = client_facts.TABLE
    assert table["SASRec"].chosen({"loss_type": "BPR"}).samples == "target pair"
    assert table["RepeatNet"].chosen({"joint_train": False}).loss_alone == ""
    assert table["RepeatNet"].chosen({"joint_train": True}).loss_alone == "control flow that depends on data"


@pytest.mark.parametrize("names", [
    ("CDAE", "NeuMF", "LightGCN", "EASE", "RecVAE", "GRU4Rec", "HGN", "SASRecF", "BERT4Rec"),
    pytest.param(tuple(client_facts.TABLE), marks=pytest.mark.long)], ids=["some", "all"])
def test_rows_are_what_calling_the_models_shows(probe, names, tmp_path):
    for name in names:
        assert probe.of_clients(name) == client_facts.TABLE[name]
        if name in domain_facts.TABLE:
            assert probe.of_domains(name) == domain_facts.TABLE[name]
    for module in (client_facts, domain_facts):  # and are written as they stand
        copy = tmp_path / Path(module.__file__).name
        shutil.copy(module.__file__, copy)
        probe.write_table(copy, module.TABLE)
        assert copy.read_text(encoding="utf-8") == Path(module.__file__).read_text(encoding="utf-8")
