"""FFMSR against its equations in plain NumPy, in float64, and the numbers of its card."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from domain_oracle import affine, batch_of, normalised, softmax, transformer
from helpers import build

from fedcl_bench.toolbox.clustering import ALGORITHMS
from fedcl_bench.toolbox.quantisation import of_texts
from fedcl_bench.plugin.silo import DomainData
from fedcl_bench.rng import DrawKey
from fedcl_bench.toolbox.text_fusion import CENTROIDS

ITEMS, LAYERS, WIDTH = 7, 3, 6
SMALL = {"dim": 4, "max_length": 6, "layers": 2, "heads": 2, "inner_size": 5, "experts": 3, "dropout": 0.0,
         "attention_dropout": 0.0, "adapter_dropout": 0.0, "filter_dropout": 0.0, "input_dropout": 0.0}
EQUATIONS = {"fusion_layers": 2, "positions": "after_filters", "similarity": "dot", "item_vectors": "plain",
             "orthogonality": "products"}
RELEASED = {"padding_row": True}
ABLATIONS = ["semantic-fusion", "adaptation-filter", "encoder-filter", "orthogonality", "gate"]
WORLDS = [{}, EQUATIONS, {"layer_adapters": "each", "max_length": 5}, {"cluster_loss": False}, {"filter_layers": 0},
          *({"without": part, **RELEASED} for part in ABLATIONS),
          *({**EQUATIONS, "without": part} for part in ABLATIONS),
          *({"without": "fourier", "connects": axis} for axis in ("dimensions", "positions")),
          RELEASED, *({name: value} for name, value in EQUATIONS.items())]
HISTORIES = [[3, 1, 4], [2], [6, 5, 3, 5, 0]]
TARGETS = [1, 6, 0]


def make(registry, seed=0, **options):
    """A module in which no parameter is zero."""
    torch.manual_seed(seed)
    data = DomainData(3, ITEMS, torch.randn(ITEMS, LAYERS, WIDTH), (torch.zeros(0), torch.zeros(4)))
    module = build(registry, "backbone", "ffmsr", **{**SMALL, **options}).module(data).double()
    with torch.no_grad():
        for value in module.state_dict().values():
            value.add_(0.4 * torch.randn_like(value))
    return module.eval()


def batch():
    return batch_of(*HISTORIES)


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


def leaky(x):
    return np.where(x > 0, x, 0.01 * x)


class Oracle:
    """The equations, item by item and position by position."""

    def __init__(self, module):
        self.p = {name: value.detach().numpy() for name, value in module.state_dict().items()}
        self.s, self.encodings = module.settings, module.texts.encodings.numpy()
        self.ids = self.p["items.weight"]
        if self.s.padding_row:
            self.ids = np.vstack([self.ids, np.zeros(self.s.dim)])
        self.items = [self.item(i) for i in range(len(self.ids))]

    def adapter(self, name, x):
        weight, bias, gate = (self.p[f"{name}.{part}"] for part in ("weight", "bias", "gate"))
        return sum(g * (x - b) @ w for g, b, w in zip(softmax(x @ gate), bias, weight))

    def item(self, i):
        """(w_ij, t_i, f_i, e'_i, mixed encodings)"""
        e = self.ids[i]
        texts = [self.adapter(f"texts.adapters.{j if self.s.layer_adapters == 'each' else 0}", x)
                 for j, x in enumerate(self.encodings[i])]
        odds = []
        for text in texts:
            x = leaky(affine(np.concatenate([e, text]), self.p, "texts.weigh.0"))
            if self.s.fusion_layers == 3:
                x = leaky(affine(x, self.p, "texts.weigh.2"))
            odds.append(affine(x, self.p, f"texts.weigh.{2 * self.s.fusion_layers - 2}")[0])
        weights = softmax(np.array(odds))
        clustered = None
        if self.s.without != "semantic-fusion":
            received = self.p[CENTROIDS][i] if i < ITEMS else np.zeros(WIDTH)
            clustered = self.adapter("clusters.adapter", received)
        gate = 1.0 if self.s.without == "gate" else sigmoid(self.p["gate.weight"][0] @ e)
        return SimpleNamespace(weights=weights, text=sum(w * t for w, t in zip(weights, texts)), clustered=clustered,
                               gated=gate * e, id=e, mixed=sum(w * x for w, x in zip(weights, self.encodings[i])))

    def filtered(self, name, x):
        """Eqs. (12)-(14) by the definition of the discrete Fourier transform, with conjugate upper frequencies; or a
        fully connected layer."""
        if self.s.without == "fourier":
            if self.s.connects == "positions":
                return np.array([affine(column, self.p, f"{name}.linear") for column in x.T]).T
            return np.array([affine(row, self.p, f"{name}.linear") for row in x])
        length, weight = len(x), self.p[f"{name}.weight"] @ np.array([1.0, 1.0j])
        result = np.zeros(x.shape)
        for k in range(length):
            y = sum(x[n] * np.exp(-2j * math.pi * k * n / length) for n in range(length))
            y = y * (weight[k] if k <= length // 2 else weight[length - k].conj())
            for n in range(length):
                result[n] += (y * np.exp(2j * math.pi * k * n / length)).real / length
        return result

    def represented(self, history):
        length, zeros = self.s.max_length, np.zeros(self.s.dim)
        at = [self.items[i] for i in history]
        at += [self.items[-1] if self.s.padding_row else None] * (length - len(history))
        v = np.array([zeros if item is None else item.gated + item.text for item in at])
        if self.s.without != "semantic-fusion":
            f = np.array([zeros if item is None else item.clustered for item in at])
            v = v + (f if self.s.without == "adaptation-filter" else self.filtered("clusters.filter", f))
        if self.s.positions == "before_filters":
            v = np.array([normalised(row, self.p, "norm") for row in v + self.p["positions.weight"]])
        for k in range(0 if self.s.without == "encoder-filter" else self.s.filter_layers):
            y = v + self.filtered(f"filters.{k}.filter", v)
            v = np.array([normalised(row, self.p, f"filters.{k}.norm") for row in y])
        if self.s.positions == "after_filters":
            v = v + self.p["positions.weight"]
        return transformer(list(v[:len(history)]), self.p, "encoder", self.s.layers, self.s.heads)  # looks back only

    def logits(self, history):
        h, result = self.represented(history), []
        for item in self.items:
            to_find = item.id + item.text
            if self.s.item_vectors == "gated":
                to_find = item.gated + item.text
                if item.clustered is not None:
                    gate = sigmoid(self.p["cluster_gate.weight"][0] @ item.clustered)
                    to_find = to_find + gate * item.clustered
            if self.s.similarity == "cosine":
                result.append(h @ to_find / np.linalg.norm(h) / np.linalg.norm(to_find) / self.s.temperature)
            else:
                result.append(h @ to_find)
        return np.array(result)

    def orthogonality(self, name):
        vectors = [getattr(item, name) for item in self.items]
        if self.s.orthogonality == "products":
            return sum(abs(t @ e) for t, e in zip(vectors, self.ids))
        correlated = np.zeros((self.s.dim, self.s.dim))
        for t, e in zip(vectors, self.ids):
            correlated += np.outer(t / (np.linalg.norm(t) + 1e-6), e / (np.linalg.norm(e) + 1e-6))
        return (correlated ** 2).mean()

    def loss(self, stage):
        loss = -np.mean([math.log(softmax(self.logits(history))[target])
                         for history, target in zip(HISTORIES, TARGETS)])
        if self.s.without != "orthogonality":
            loss += self.orthogonality("text")
            if stage == "finetune" and self.s.cluster_loss and self.s.without != "semantic-fusion":
                loss += self.orthogonality("clustered")
        return loss


@pytest.mark.parametrize("options", WORLDS, ids=str)
def test_network_follows_the_equations(registry, options):
    module = make(registry, **options)
    oracle = Oracle(module)
    expected = np.array([oracle.logits(history)[:ITEMS] for history in HISTORIES])
    np.testing.assert_allclose(module.scores(batch()).detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    for module.stage in ("pretrain", "finetune"):
        loss = module.loss(batch(), torch.tensor(TARGETS)).item()
        assert loss == pytest.approx(oracle.loss(module.stage), rel=1e-10)
    if options.get("without") != "semantic-fusion":
        sent = np.array([item.mixed for item in oracle.items[:ITEMS]])
        np.testing.assert_allclose(module.semantics().detach().numpy(), sent, rtol=1e-10)


def test_no_gradient_passes_the_fusion_to_ids(registry):
    module = make(registry)
    module.texts(module.items.weight).square().sum().backward()
    assert module.items.weight.grad is None
    assert all(value.grad.abs().sum() > 0 for name, value in module.texts.named_parameters()
               if not name.endswith("noise"))
    loss = module.loss(batch(), torch.tensor(TARGETS))
    loss.backward()
    assert module.items.weight.grad.abs().sum(1).ne(0).all()
    unreached = {name for name, value in module.named_parameters() if value.grad is None}
    assert unreached == {"texts.adapters.0.noise", "clusters.adapter.noise"}  # noise is for training


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "adapter_dropout", "filter_dropout",
                                  "input_dropout"])
def test_each_dropout_acts_in_training_alone(registry, name):
    module = make(registry, **{name: 0.5})
    with torch.no_grad():  # as good as no noise in the gates
        for adapter in (module.texts.adapters[0], module.clusters.adapter):
            adapter.gate.zero_()
            adapter.weight.copy_(adapter.weight[:1].expand_as(adapter.weight))
            adapter.bias.copy_(adapter.bias[:1].expand_as(adapter.bias))
    samples, quiet = batch(), make(registry)
    assert torch.equal(module.scores(samples), module.scores(samples))
    quiet.load_state_dict(module.state_dict())
    torch.testing.assert_close(quiet.train().scores(samples), quiet.scores(samples))
    module.train()
    assert not torch.allclose(module.scores(samples), module.scores(samples))


def test_coded_texts_are_means_of_their_codes_vectors(registry):
    torch.manual_seed(0)
    backbone = build(registry, "backbone", "ffmsr", **{**SMALL, "text": "pq", "codes": 3, "code_values": 4,
                                                       "padding_row": True})
    data = DomainData(3, ITEMS, torch.randn(ITEMS, LAYERS, WIDTH), (torch.zeros(0), torch.zeros(4)))
    data, = backbone.prepared([data])
    module, quantiser = backbone.module(data), of_texts(data.features[:, -1], 3, 4)
    assert torch.equal(data.codes, quantiser.encode(data.features[:, -1])) and backbone.exchanges == frozenset()
    assert module.rows == ("items.weight",) and not any("clusters" in name for name in module.state_dict())
    vectors = module.texts(module.items.weight)
    expected = [sum(module.texts.table[4 * k + code] for k, code in enumerate(codes)) / 3 for codes in data.codes]
    torch.testing.assert_close(vectors, torch.stack([*expected, torch.zeros(4)]))
    module.loss(batch(), torch.tensor(TARGETS)).backward()
    assert module.texts.table.grad.any(1).sum() == len((data.codes + 4 * torch.arange(3)).unique())


# The method.


def test_uploads_of_training_have_noise_and_of_evaluation_none(registry):
    module = make(registry, adapter_dropout=0.3).train()
    with torch.no_grad():
        noisy, quiet = (build(registry, "method", "ffmsr", upload_mode=mode) for mode in ("training", "evaluation"))
        first, second = (noisy.upload(module, DrawKey(1, 0))["semantics"] for _ in range(2))
        assert not torch.allclose(first, second)
        first, second = (quiet.upload(module, DrawKey(1, 0))["semantics"] for _ in range(2))
        assert torch.equal(first, second) and module.training
        assert torch.equal(first, module.eval().semantics())


@pytest.mark.parametrize("clustering", ALGORITHMS)
def test_server_gives_every_item_its_clusters_centroid(registry, clustering):
    method = build(registry, "method", "ffmsr", clusters=2, centroid="plain", clustering=clustering)
    uploads = [{"semantics": torch.tensor([[0.0, 0.0], [9.0, 9.0]])},
               {"semantics": torch.tensor([[10.0, 9.0], [0.0, 2.0], [1.0, 1.0]])}]
    first, second = method.aggregate(uploads, torch.tensor([0.5, 0.5]), DrawKey(3, 0, 1))
    low, high = [1 / 3, 1.0], [9.5, 9.0]
    torch.testing.assert_close(first[CENTROIDS], torch.tensor([low, high]))
    torch.testing.assert_close(second[CENTROIDS], torch.tensor([high, low, low]))


def test_stages_are_as_many_rounds_as_set_and_then_alone(registry):
    first, second = build(registry, "method", "ffmsr", federated_rounds=3).stages()
    assert (first.rounds, first.exchanges, second.rounds, second.exchanges) == (3, True, None, False)
    assert second.new_optimiser and not second.from_best
    assert not build(registry, "method", "ffmsr", keep_optimiser=True).stages()[1].new_optimiser
