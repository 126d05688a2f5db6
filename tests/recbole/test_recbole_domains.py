"""RecBole's models as modules of domains: equal to RecBole's own trainer on the same batches and to its evaluation.
FFMSR's fusion and filters in them (its Table 5): against RecBole's own model that is given e + t as its table and
filtered histories."""

import builtins
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import by_domain, executed, lay_shop, recbole_config
from recbole.data.interaction import Interaction
from recbole.utils import init_seed
from torch import nn
from torch.nn.utils import parametrize

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.evaluation.metrics import DEFAULT
from fedcl_bench.evaluation.session_ranking import Ranking, rank_by_module
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.federation.loop import run
from fedcl_bench.plugin.silo import DomainData, Histories
from fedcl_bench.recbole import models
from fedcl_bench.recbole.domain_facts import READS_TEXT, DomainFacts
from fedcl_bench.recbole.domain_modules import (MASKED, PRETRAIN, SameTarget, TextTable, configuration,
                                                of_ids, of_similar_lengths)
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.checkpoints import read_model
from fedcl_bench.testing import check_plugin
from fedcl_bench.testing.report import assert_passed

WIDTH, SEED = 6, 5
LONG = pytest.mark.long
NO_DROPOUT = {"SASRec": ("hidden_dropout_prob", "attn_dropout_prob"), "BERT4Rec": ("hidden_dropout_prob",
              "attn_dropout_prob"), "FDSA": ("hidden_dropout_prob", "attn_dropout_prob"), "S3Rec": (
              "hidden_dropout_prob", "attn_dropout_prob"), "GRU4Rec": ("dropout_prob",), "GRU4RecF": ("dropout_prob",),
              "SASRecF": ("hidden_dropout_prob", "attn_dropout_prob"), "NARM": ("dropout_probs",)}
SMALL = {"max_length": WIDTH, "dim": 8, "batch_size": 16, "rounds": 2, "topk": [3, 5], "valid_metric": "recall@3",
         "topology": "local"}


@pytest.fixture
def shops(tmp_path_factory, monkeypatch):
    """A folder with the data of two shops, laid once."""
    folder = tmp_path_factory.getbasetemp() / "shops"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    for number, shop, users, items in () if Path("data").exists() else ((1, "books", 20, 15), (2, "games", 12, 11)):
        lay_shop(shop, number, users, items)
        Path(f"data/{shop}/{shop}.item").write_text("item_id:token\ttitle:token_seq\n" + "".join(
            f"i{k}\t{shop} number {k} colour {k % 3}\n" for k in range(items)))


def without_dropout(name: str, **more) -> str:
    values = {key: [0.0, 0.0] if key.endswith("s") else 0.0 for key in NO_DROPOUT.get(name, ())} | more
    return str(values).replace("'", "")


def configured(registry, name, method="ft", **settings):
    of_text = {"encoder": "tfidf", "text_dim": 4} if name in READS_TEXT else {}
    return make_config(registry, method, f"recbole:{name}", "books+games", 0, [("test", {**SMALL, **of_text,
                                                                                         **settings})])


_streams: dict = {}


def federation_of(config):
    """A run's parts over the shops, whose streams are loaded once."""
    key = repr((config.source, config.stream, config.features))
    if key not in _streams:
        _streams[key] = load_stream(config.source, config.stream, config.features)
    return config.federation(_streams[key])


def module_of(registry, name, data: DomainData, **settings):
    """A module of RecBole's model of a domain."""
    backbone = federation_of(configured(registry, name, **settings)).backbone
    torch.manual_seed(SEED)
    return backbone.module(data)


def made_up(n_items=30, users=9, features=True) -> DomainData:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 8, (users,), generator=generator)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return DomainData(users, n_items, torch.randn(n_items, 2, 5, generator=generator) if features else None,
                      (torch.randint(n_items, (int(bounds[-1]),), generator=generator), bounds))


def some_batch(data: DomainData, size=8, longest=WIDTH) -> tuple[Histories, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, longest + 1, (size,), generator=generator)
    items = torch.randint(data.n_items, (size, longest), generator=generator)
    return (Histories(items.masked_fill(torch.arange(longest) >= lengths[:, None], -1), lengths,
                      torch.arange(size) % data.n_users), torch.randint(data.n_items, (size,), generator=generator))


def recbole_parameters(module) -> dict[str, torch.Tensor]:
    """A module's parameters as RecBole's model has them, by RecBole's names."""
    values = {}
    for p in module.design.parameters:
        where, _, leaf = p.name.rpartition(".")
        values[p.name] = getattr(module.model.get_submodule(where), leaf).detach()
    return values


class Pipeline:
    """RecBole's dataset, loaders, model and trainer of one shop."""

    def __init__(self, name, of_model=None, **values):
        with recbole_config():
            from recbole.config import Config
            from recbole.data import create_dataset, data_preparation
            from recbole.utils import get_model, get_trainer

            config = Config(model=name, dataset="books", config_dict={
                "data_path": "data", "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
                "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full", "group_by": "user"},
                "use_gpu": False, "checkpoint_dir": "saved", "state": "ERROR", **values})
            self.dataset = create_dataset(config)
            self.train, _, self.test = data_preparation(config, self.dataset)
            if of_model is not None:
                torch.manual_seed(of_model)
            self.model = get_model(name)(config, self.train.dataset)
            torch.autograd.set_detect_anomaly(False)  # RecBole switches it on
            self.trainer = get_trainer(config["MODEL_TYPE"], name)(config, self.model)

    def fit(self) -> list[Interaction]:
        """Train as RecBole does; returns the batches in their order."""
        batches, loss = [], self.model.calculate_loss
        self.model.calculate_loss = lambda interaction: (batches.append(interaction), loss(interaction))[1]
        with recbole_config():
            self.trainer.fit(self.train, None, verbose=False, saved=False)
        return batches

    def evaluate(self) -> dict[str, float]:
        with recbole_config():
            return dict(self.trainer.evaluate(self.test, load_best_model=False))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["SASRec", "BERT4Rec", "FEARec", "GRU4Rec", pytest.param("NARM", marks=LONG)])
def test_training_and_test_are_those_of_recboles_trainer(registry, shops, monkeypatch, name):
    """All parameters after two epochs of the same batches from the same start, and all metrics of the test."""
    for alias in ("bool", "int", "float"):  # of NumPy's former names, which RecBole's evaluation reads
        monkeypatch.setattr(np, alias, getattr(builtins, alias), raising=False)
    model = without_dropout(name)
    f = federation_of(configured(registry, name, model=model if name != "FEARec" else "", dim=0, lr=0.01))
    domain = CrossSilo(f).domains[0]
    module = domain.module.train()
    values = {key: [0.0, 0.0] if key.endswith("s") else 0.0 for key in NO_DROPOUT.get(name, ())}
    init_seed(SEED, True)
    recbole = Pipeline(name, epochs=2, train_neg_sample_args=None, train_batch_size=16,
                       MAX_ITEM_LIST_LENGTH=WIDTH, topk=[3, 5], metrics=["Recall", "NDCG", "MRR"], learning_rate=0.01,
                       valid_metric="Recall@3", metric_decimal_place=12, **values)
    if name == "FEARec":  # part of its dropout is fixed at 0.1
        for part in (*module.modules(), *recbole.model.modules()):
            if isinstance(part, nn.Dropout):
                part.p = 0.0
    tokens = [token.partition(":")[2] for token in f.stream.item_tokens[:domain.step.n_items]]
    ids = torch.tensor([recbole.dataset.token2id("item_id", token) for token in tokens])  # RecBole's, of our numbers
    number = torch.full((len(ids) + 1,), -1).scatter(0, ids, torch.arange(len(ids)))
    start = dict(recbole.model.named_parameters())
    _take_over(module, start, ids)
    batches = recbole.fit()
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
    for sent in batches:
        if name == "BERT4Rec":
            _use_masks(module, sent, ids, number)
        batch = Histories(number[sent["item_id_list"]], sent["item_length"], sent["user_id"] - 1)
        optimiser.zero_grad()
        module.loss(batch, number[sent["item_id"]]).backward()
        optimiser.step()
    assert len(batches) == 2 * -(-len(domain.samples.end) // 16)
    for key, value in recbole_parameters(module).items():
        if key.endswith("key.bias"):  # has no gradient, as softmax does not see it; Adam takes rounding for one
            continue
        expected = dict(recbole.model.named_parameters())[key].detach()
        if key in _item_tables(module):
            order = torch.cat([torch.zeros(1, dtype=torch.int64), ids, torch.arange(len(ids) + 1, len(expected))])
            expected = expected[order]
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=2e-4)  # a step is up to 1e-2
    scores = rank_by_module(f.backbone, module, domain.step, "test", Ranking([3, 5], DEFAULT, None, False))
    for metric, value in recbole.evaluate().items():
        assert scores.mean(metric) == pytest.approx(value, abs=1e-9), metric


def _item_tables(module) -> set[str]:
    return {p.name for p in module.design.parameters if p.follows == "items"}


@torch.no_grad()
def _take_over(module, start, ids) -> None:
    """Let a module begin with RecBole's initial values, its items' rows in our order."""
    own = dict(module.named_parameters())
    for p in module.design.parameters:
        value = start[p.name]
        if not p.follows:
            own[f"model.{p.name}"].copy_(value)
            continue
        where, _, leaf = p.name.rpartition(".")
        prefix = ".".join(filter(None, ("model", where, "parametrizations", leaf)))
        own[f"{prefix}.original0"].copy_(value[ids])
        own[f"{prefix}.original1"].copy_(torch.cat([value[:1], value[len(ids) + 1:]]))


def _use_masks(module, sent, ids, number) -> None:
    """Let BERT4Rec's next batch be masked as RecBole's loader has done it."""
    to_ours = torch.cat([torch.zeros(1, dtype=torch.int64), number[1:] + 1, torch.tensor([len(ids) + 1])])
    fields = {key: to_ours[sent[key]] for key in ("Mask_item_id_list", "Pos_item_id", "Neg_item_id")}

    def masked(stub, interaction):
        interaction.update(Interaction({**fields, MASKED: sent[MASKED]}))
        return interaction

    module.transform = masked


@pytest.mark.parametrize("name", ["SASRec", "FDSA", *(pytest.param(name, marks=LONG)
                                                      for name in ("GRU4Rec", "NARM", "SRGNN"))])
def test_histories_of_similar_lengths_together_are_the_same_batch(registry, shops, name):
    """Loss and gradients; where all are as long nothing is divided."""
    data = made_up()
    module = module_of(registry, name, data, model=without_dropout(name)).train()
    assert module.design.divides and not module.fixed_length
    batch, targets = some_batch(data, size=24)
    groups = of_similar_lengths(batch.lengths)
    assert len(groups) == 6 and torch.cat(groups).sort().values.tolist() == list(range(24))
    assert of_similar_lengths(torch.full((24,), WIDTH))[0].tolist() == list(range(24))
    results = []
    for divides in (True, False):
        module.design = replace(module.design, facts=DomainFacts(divides=divides))
        module.zero_grad()
        loss = module.loss(batch, targets)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)])
    for divided, whole in zip(*results, strict=True):
        torch.testing.assert_close(divided, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["RepeatNet", "SRGNN", *(pytest.param(name, marks=LONG) for name in (
    "CORE", "GCSAN", "LightSANs", "NextItNet", "SINE", "STAMP"))])
def test_other_models_learn_in_domains(registry, shops, name):
    """Their loss goes down, and their item tables are cut without padding."""
    f = federation_of(configured(registry, name, dim=8, rounds=3, lr=0.01))
    *_, progress = run(f)
    losses = [row["loss"] for row in progress.curve if row["step"] == 0]
    assert losses[-1] < losses[0]
    assert {len(table) for table in progress.model.public.values()} == {15, 11}


def test_a_run_is_the_same_anew_whatever_was_drawn_before(registry, shops):
    """BERT4Rec's masks come from Python's generator."""
    results = []
    for _ in range(2):
        random.random(), np.random.rand(), torch.rand(1)
        f = federation_of(configured(registry, "BERT4Rec"))
        states = random.getstate(), np.random.get_state()[1].tobytes()
        *_, progress = run(f)
        assert (random.getstate(), np.random.get_state()[1].tobytes()) == states
        results.append(progress.model)
    for kind in ("public", "dense"):
        first, second = (getattr(result, kind) for result in results)
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_a_second_view_has_the_same_target_and_another_history():
    """Each of those that differ is as likely; where there is none, the view is an equal one."""
    items = [0, 1, 2, 3, 1, 2, 0, 1, 2, 4, 2, 5, 2, 6, 7, 6, 7]
    bounds = torch.tensor([0, 3, 6, 9, 11, 13, 15, 17])
    same_target = SameTarget((torch.tensor(items), bounds), 4)
    positions = [position for user in range(7) for position in range(int(bounds[user]) + 1, int(bounds[user + 1]))]
    history = {p: tuple(items[max(int(bounds[bounds <= p].max()), p - 4):p]) for p in positions}
    for position in positions:
        samples = torch.full((600,), position)
        torch.manual_seed(position)
        drawn = same_target.draw(same_target.histories(samples)[0], torch.tensor(items)[samples]).tolist()
        others = [p for p in positions if items[p] == items[position] and history[p] != history[position]]
        if not others:
            assert {history[p] for p in drawn} == {history[position]} and {items[p] for p in drawn} == {items[position]}
            continue
        counts = {p: drawn.count(p) for p in others}
        assert sum(counts.values()) == 600 and min(counts.values()) > 0.6 * 600 / len(others)
    rows, lengths = same_target.histories(torch.tensor([2, 10]))
    assert rows.tolist() == [[1, 2, 0, 0], [5, 0, 0, 0]] and lengths.tolist() == [2, 1]


def test_contrast_is_that_of_recboles_fearec(registry, shops):
    """Where every target has one other sample or none, RecBole's own draws can be no others."""
    data = DomainData(3, 7, None, (torch.tensor([0, 1, 2, 3, 1, 2, 5, 6]), torch.tensor([0, 3, 6, 8])))
    module = module_of(registry, "FEARec", data, model="{contrast: us_x, hidden_dropout_prob: 0.0, "
                       "attn_dropout_prob: 0.0}").eval()
    samples = [1, 2, 4, 5, 7]
    histories, lengths = module.same_target.histories(torch.tensor(samples))
    targets = data.histories[0][samples]
    inter_feat = {"item_id": targets + 1, "item_id_list": histories, "item_length": lengths}
    config = configuration("FEARec", {"hidden_size": 8, "contrast": "us_x", "hidden_dropout_prob": 0.0,
                                      "attn_dropout_prob": 0.0}, WIDTH)
    bare = models.model_class("FEARec")(config, SimpleNamespace(num=lambda field: 8, inter_feat=inter_feat)).eval()
    assert not bare.load_state_dict(recbole_parameters(module), strict=False).unexpected_keys  # a block has two names
    batch = Histories(histories - 1, lengths, torch.tensor([0, 0, 1, 1, 2]))
    expected = bare.calculate_loss(Interaction({"item_id_list": histories, "item_length": lengths,
                                                "item_id": targets + 1}))
    torch.testing.assert_close(module.loss(batch, targets), expected)
    bare.lmd_sem = 0.0  # the contrast is part of it
    assert not torch.isclose(expected, bare.calculate_loss(Interaction({
        "item_id_list": histories, "item_length": lengths, "item_id": targets + 1})))


def test_a_batch_without_a_masked_item_has_no_loss(registry, shops):
    """RecBole counts no mask at the first position; of histories of one item its loss is 0 / 0."""
    data = made_up()
    module = module_of(registry, "BERT4Rec", data).train()
    loss = module.loss(*some_batch(data, longest=1))
    loss.backward()
    assert loss == 0.0 and all((p.grad == 0.0).all() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["FDSA", "GRU4RecF", pytest.param("SASRecF", marks=LONG)])
def test_features_are_adapted_texts(registry, shops, name):
    """ReLU(W t + b) of the last layer's vector, and of zeros at padding; they are not carried, their adapter is."""
    data = made_up()
    module = module_of(registry, name, data, model=without_dropout(name)).eval()
    layer = module.model.feature_embed_layer
    weight, bias = (value.detach().numpy() for value in layer.adapter[0].parameters())
    ids = torch.tensor([[3, 1, 0]])
    texts = np.stack([data.features[2, -1].numpy(), data.features[0, -1].numpy(), np.zeros(5)])
    sparse, dense = layer(None, ids)
    np.testing.assert_allclose(sparse["item"][0, :, 0].detach(), np.maximum(texts @ weight.T + bias, 0.0), rtol=1e-5)
    assert dense == {"item": None} and not any("text" in key for key in module.state_dict())
    batch, targets = some_batch(data)
    before = module.scores(batch)
    module.loss(batch, targets).backward()
    assert layer.adapter[0].weight.grad.abs().sum() > 0 and abs(float(weight.std()) - (0.02 if name != "GRU4RecF" else
                                                                                       (2 / 13) ** 0.5)) < 0.15
    layer.text[1:] = layer.text[1:].flip(0)
    assert not torch.allclose(module.scores(batch), before)


def plain_s3rec(module, data):
    """RecBole's S3Rec with attributes written out, whose attribute of item i is number i, and the module's weights."""
    n_ids = data.n_items + 1
    dataset = SimpleNamespace(num=lambda field: n_ids + (field == "text"), item_num=n_ids,
                              get_item_feature=lambda: {"text": torch.arange(n_ids) + 1})
    bare = models.model_class("S3Rec")(module.model_config, dataset)
    bare.feature_embedding = TextTable(of_ids(data.features), 8)
    bare.load_state_dict({**recbole_parameters(module)}, strict=True)
    return bare.train()


def test_pretraining_is_that_of_recboles_s3rec(registry, shops):
    """Loss and gradients of its four tasks, given items as attributes and the same masks and segments."""
    data = made_up()
    module = module_of(registry, "S3Rec", data, model=without_dropout("S3Rec")).train()
    module.model_config = configuration("S3Rec", {"hidden_size": 8, "hidden_dropout_prob": 0.0,
                                                  "attn_dropout_prob": 0.0}, WIDTH)
    module.stage = PRETRAIN
    bare = plain_s3rec(module, data)
    batch, targets = some_batch(data)
    torch.manual_seed(4)
    loss = module.loss(batch, targets)
    torch.manual_seed(4)
    random.seed(int(torch.randint(1 << 32, ())))
    expected = bare.calculate_loss(Interaction({"item_id_list": batch.items + 1, "item_length": batch.lengths}))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-3)
    loss.backward()
    expected.backward()
    theirs = dict(bare.named_parameters())
    for key in ("feature_embedding.adapter.0.weight", "aap_norm.weight", "mip_norm.bias", "map_norm.weight",
                "sp_norm.weight", "trm_encoder.layer.0.feed_forward.dense_1.weight"):
        torch.testing.assert_close(module.get_parameter(f"model.{key}").grad, theirs[key].grad, rtol=1e-3, atol=1e-3)


def test_runs_read_texts_and_tables_know_them(registry, shops, capsys):
    """From the items' texts to a table of the record, by commands."""
    settings = [part for key, value in {**SMALL, "topk": 3, "encoder": "tfidf", "text_dim": 4}.items()
                for part in ("--set", f"{key}={value}")]
    assert main(["run", "--method", "ft", "--backbone", "recbole:FDSA", "--dataset", "books+games", *settings]) == 0
    capsys.readouterr()
    assert main(["tables", "--methods", "ft", "--backbones", "recbole:FDSA", "--rows", "backbone", "--columns", "block",
                 "--metrics", "recall@3", "--datasets", "books+games", *settings]) == 0
    assert "| recbole:FDSA |" in capsys.readouterr().out


@LONG
@pytest.mark.parametrize("name", ["BERT4Rec", "FEARec", "S3Rec"])
def test_check_runs_models_in_double_precision(registry, name):
    """For which RecBole's code is not written."""
    plugin = registry.get("backbone", f"recbole:{name}").of_domains()
    assert_passed(check_plugin(registry, plugin, process=False, only=["resumes"]))


@pytest.mark.parametrize("name,settings,message", [
    ("HGN", {}, "backbone 'recbole:HGN' keeps a vector of every user .*domains"),
    ("BPR", {}, "no sequential recommender"),
    ("SASRec", {"private": "item_*"}, "setting 'private': found 'item_\\*', accepted: none in a stream of domains"),
    ("SASRec", {"model": "{n_layer: 1}"}, "Did you mean 'n_layers'"),
    ("S3Rec", {"model": "{train_stage: finetune}"}, "train_stage"),
    ("SASRec", {"dim": 7}, r"cannot be built: ValueError.*\(settings 'dim', 'max_length' and 'model' are part of it\)"),
    ("BERT4Rec", {"max_length": 4}, "'max_length': found 4, accepted: so many items that mask_ratio=0.2 of"),
    ("SASRec", {"model": "{n_layers: 0}"}, "its loss fails: IndexError")])
def test_what_cannot_be_trained_by_domains_is_said(registry, shops, name, settings, message):
    with pytest.raises(UserError, match=message):
        federation_of(configured(registry, name, **settings))


def test_a_domains_run_has_the_code_of_domains_and_other_streams_name_domains(registry, shops, capsys):
    of_domains = configured(registry, "SASRec")
    of_clients = make_config(registry, "ft", "recbole:SASRec", "ml-100k")
    assert of_domains.backbone.name == of_clients.backbone.name
    assert of_domains.settings["lr"] == 0.001 and of_clients.settings["lr"] == 0.1
    assert main(["run", "--method", "ft", "--backbone", "recbole:fdsa"]) == 2
    assert "can train it: name two or more datasets, as in --dataset A+B" in capsys.readouterr().err


MODELS = ["FDSA", "S3Rec"]


def pair(registry, name):
    """RecBole's model and the same with FFMSR's parts, whose other parameters are equal, in float64."""
    data = made_up()
    plain, whole = (module_of(registry, name, data, model=without_dropout(name), precision="float64", **more).double()
                    for more in ({}, {"semantics": True, "adapter_dropout": 0.0}))
    with torch.no_grad():
        for value in whole.parameters():
            value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
        whole.clusters.centroids.copy_(torch.randn(whole.clusters.centroids.shape,
                                                   generator=torch.Generator().manual_seed(3)))
        own = dict(whole.recommender.named_parameters())
        for parameter, value in plain.named_parameters():
            value.copy_(own[parameter])
    return data, plain.eval(), whole.eval()


def filtered(whole, items):
    """f~ of histories by transforms in NumPy, padded with zeros to the filter's length."""
    vectors = whole.clusters().detach().numpy()
    weight = torch.view_as_complex(whole.clusters.filter.weight).detach().numpy()
    result = np.zeros((*items.shape, vectors.shape[1]))
    for row, history in enumerate(items.tolist()):
        x = np.zeros((WIDTH, vectors.shape[1]))
        for place, item in enumerate(history):
            if 0 <= item < len(vectors):
                x[place] = vectors[item]
        y = np.fft.irfft(np.fft.rfft(x, axis=0) * weight, n=WIDTH, axis=0)
        result[row] = y[:items.shape[1]]
    return torch.from_numpy(result)


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_recboles_with_texts_in_the_table_and_clusters_in_the_history(registry, shops, name):
    data, plain, whole = pair(registry, name)
    batch, _ = some_batch(data)
    before = plain.scores(batch)
    e = plain.model.item_embedding.parametrizations.weight
    texts = whole.texts(e.original0)
    looked_up = []

    def with_clusters(_, numbers, rows):
        looked_up.append(numbers[0])
        return rows + filtered(whole, numbers[0] - 1)
    with torch.no_grad():
        e.original0.add_(texts)
    plain.model.item_embedding.register_forward_hook(with_clusters)
    torch.testing.assert_close(whole.scores(batch), plain.scores(batch), rtol=1e-9, atol=1e-9)
    assert len(looked_up) == 1 and not torch.allclose(before, plain.scores(batch), atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_only_lookups_of_a_history_have_clusters(registry, shops, name):
    """Those of targets and of negatives, as in S3Rec's pre-training, have none."""
    data, _, whole = pair(registry, name)
    table, seen, lookup = whole.recommender.model.item_embedding, [], whole._with_clusters
    with whole._called(), parametrize.cached():
        numbers = torch.tensor([[1, 2, 3]])
        torch.testing.assert_close(table(numbers), table.weight[numbers])
        rows, history = table.weight[numbers], table(numbers)
        whole._history = numbers
        torch.testing.assert_close(table(numbers) - rows, filtered(whole, numbers - 1))
        whole._history = None
        assert torch.equal(history, rows)
    if name == "S3Rec":
        table._forward_hooks.clear()
        table.register_forward_hook(lambda *args: seen.append(args[1][0] is whole._history) or lookup(*args))
        whole.train().stage = PRETRAIN
        whole.loss(*some_batch(data))
        assert sum(seen) == 4 and len(seen) == 6  # a history and three segments; items and negatives


@pytest.mark.parametrize("name", ["S3Rec", pytest.param("FDSA", marks=pytest.mark.long)])
def test_it_runs_under_ffmsr_and_not_without_the_parts(registry, shops, tmp_path, name):
    config = configured(registry, name, "ffmsr", topology="federated", semantics=True, federated_rounds=1, rounds=1,
                        clusters=4)
    config.check(federation_of(config))
    result = executed(config, tmp_path / "results")
    centroids = torch.cat(by_domain(read_model(Path(result["record"])).tables.public)["clusters.centroids"])
    assert len(centroids) == 26 and len(centroids.unique(dim=0)) == 4  # of both domains' items together
    assert result["privacy"]["uploaded"] == ["semantics"] and min(result["rounds"]) == 2
    with pytest.raises(UserError, match=f"exchanges semantics, which 'recbole:{name}' has none of with these"):
        config = configured(registry, name, "ffmsr", topology="federated")
        config.check(federation_of(config))
    assert configured(registry, name).inactive["fusion_layers"] == "without semantics"
    assert "fusion_layers" not in configured(registry, name, semantics=True).inactive
