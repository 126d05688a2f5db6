"""CCDR: layers and losses against plain loops in float64, where gradients go, and which items share a category."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from domain_oracle import batch_of, histories_of
from helpers import build, module_of

from fedcl_bench.plugin.silo import DomainData

USERS = {"a": ([0, 1, 2, 1], [3, 1], [4]), "b": ([0, 2, 2], [1, 0, 3])}
CODES = {"a": [0, 1, 1, -1, 2, 0], "b": [1, 0, 3, 1]}
SMALL = dict(dim=3, categories=5, link_negatives=4, dropout=0.0)


def domain(name):
    codes = torch.tensor(CODES[name])[:, None]
    return DomainData(len(USERS[name]), len(codes), None, histories_of(USERS[name]), codes)


BATCHES = {"a": (batch_of([0, 1], [3], [4, 1, 0]), torch.tensor([2, 1, 5])),
           "b": (batch_of([0, 2], [1]), torch.tensor([3, 1]))}


def make(registry, *names, **settings):
    """Modules in float64, tied as those of pooled domains."""
    backbone, modules = build(registry, "backbone", "ccdr", **SMALL | settings), []
    torch.manual_seed(4)
    for name in names:
        modules.append(backbone.module(domain(name)).double())
        modules[-1].categories = modules[0].categories
    return backbone, modules


def oracle_view(module, name):
    """Items and categories, every neighbour looked at."""
    users, codes = USERS[name], CODES[name]
    items, categories = module.items.detach().numpy(), module.categories.detach().numpy()
    neighbours = {("user", u): [("item", i) for i in set(user)] for u, user in enumerate(users)}
    neighbours |= {("item", i): [("user", u) for u, user in enumerate(users) if i in user]
                   + [("category", c) for c in (codes[i],) if c >= 0] for i in range(len(codes))}
    neighbours |= {("category", c): [("item", i) for i, code in enumerate(codes) if code == c]
                   for c in range(len(categories))}
    layer = {("item", i): row for i, row in enumerate(items)} | {("category", c): row
                                                                 for c, row in enumerate(categories)}
    layer |= {node: np.mean([layer[n] for n in neighbours[node]], 0) for node in neighbours if node[0] == "user"}
    total = dict(layer)
    for _ in range(2):
        layer = {node: np.mean([layer[n] for n in near], 0) if near else 0 * items[0]
                 for node, near in neighbours.items()}
        total = {node: total[node] + layer[node] for node in total}
    return tuple(np.stack([total[kind, i] / 3 for i in range(count)])
                 for kind, count in (("item", len(items)), ("category", len(categories))))


def test_layers_average_all_neighbours_in_an_evaluation(registry):
    for name in "ab":
        _, (module,) = make(registry, name)
        items, categories = oracle_view(module, name)
        view = module.eval().view()
        assert view.items.detach().numpy() == pytest.approx(items, rel=1e-12)
        assert view.categories.detach().numpy() == pytest.approx(categories, rel=1e-12)
        scores = module.scores(BATCHES[name][0])
        for row, history in zip(scores, BATCHES[name][0].items):
            user = np.mean([items[i] for i in history.tolist() if i >= 0], 0)
            assert row.detach().numpy() == pytest.approx(items @ user, rel=1e-12)


def test_in_training_a_layer_looks_at_so_many_neighbours_on_average(registry):
    graph = module_of(registry, "backbone", "ccdr").Graph
    size = 400
    star = graph(torch.zeros(size, dtype=torch.int64), torch.arange(1, size + 1),
                 torch.tensor([size, *[1] * size]))
    torch.manual_seed(0)
    vectors = torch.eye(size + 1, dtype=torch.float64)
    looked = [(star.mean(vectors, 25)[0] > 0).sum().item() for _ in range(200)]
    assert abs(np.mean(looked) - 25) < 4 * 5 / math.sqrt(200)
    mean = star.mean(vectors, 25)[0]
    assert mean.sum() == pytest.approx(1) and len(mean[mean > 0].unique()) == 1
    assert torch.equal(star.mean(vectors, 400), star.mean(vectors))
    _, (module,) = make(registry, "a", neighbours=(1, 1))
    assert not torch.equal(module.view().items, module.view().items)


def test_link_loss_and_contrast_are_their_sums(registry):
    plugin = module_of(registry, "backbone", "ccdr")
    torch.manual_seed(0)
    ones, others, apart = (torch.randn(n, 3, dtype=torch.float64) for n in (4, 4, 6))

    def sigmoid(a, b):
        return 1 / (1 + math.exp(-float(a @ b)))

    expected = np.mean([-math.log(sigmoid(a, b)) - sum(math.log(1 - sigmoid(a, c)) for c in apart)
                        for a, b in zip(ones, others)])
    assert float(plugin.link_loss(ones, others, apart)) == pytest.approx(expected, rel=1e-12)
    excluded = torch.zeros(4, 4, dtype=torch.bool)
    excluded[0, 2] = excluded[2, 0] = True
    for mask in (None, excluded):
        terms = []
        for i, a in enumerate(ones):
            cosines = [math.exp(float(a @ b / a.norm() / b.norm()) / 0.2) for j, b in enumerate(others)
                       if mask is None or not mask[i, j]]
            own = math.exp(float(a @ others[i] / a.norm() / others[i].norm()) / 0.2)
            terms.append(-math.log(own / sum(cosines)))
        assert float(plugin.contrast(ones, others, 0.2, mask)) == pytest.approx(np.mean(terms), rel=1e-12)


def joint(registry, seed=3, **settings):
    backbone, modules = make(registry, "a", "b", **settings)
    torch.manual_seed(seed)
    batches, targets = zip(*(BATCHES[name] for name in "ab"))
    return backbone, modules, backbone.joint_loss(modules, batches, targets)


@pytest.mark.parametrize("intra", ["contrast", "link"])
def test_the_joint_loss_is_the_sum_of_its_terms(registry, monkeypatch, intra):
    """With neighbours enough for all, so that views do not vary, and known draws of candidates and partners."""
    plugin = module_of(registry, "backbone", "ccdr")
    drawn, draw, partners, partner = [], torch.multinomial, [], plugin.CCDRModule.of_category
    monkeypatch.setattr(torch, "multinomial", lambda *args, **kw: drawn.append(draw(*args, **kw)) or drawn[-1])
    monkeypatch.setattr(plugin.CCDRModule, "of_category",
                        lambda self, asked: partners.append(partner(self, asked)) or partners[-1])
    weights = dict(intra_weight=0.7, category_weight=0.4, neighbour_weight=0.3)
    _, modules, loss = joint(registry, temperature=0.3, intra=intra, **weights)
    views = [oracle_view(module, name) for module, name in zip(modules, "ab")]
    as_tensor = torch.from_numpy
    expected = 0.0
    for (items, _), name, candidates in zip(views, "ab", drawn):
        batch, targets = BATCHES[name]
        users = np.stack([np.mean([items[i] for i in row.tolist() if i >= 0], 0) for row in batch.items])
        once = sorted(set(targets.tolist()))
        own = plugin.link_loss(as_tensor(users), as_tensor(items[targets]), as_tensor(items[candidates]))
        ends = as_tensor(items[once]), as_tensor(items[once])
        own += 0.7 * (plugin.contrast(*ends, 0.3) if intra == "contrast" else
                      plugin.link_loss(*ends, as_tensor(items[candidates])))
        expected += own * len(targets) / 5
    shared = [0, 1]  # have items in both domains
    for a, b in ((0, 1), (1, 0)):
        expected += 0.2 * plugin.contrast(as_tensor(views[a][1][shared]), as_tensor(views[b][1][shared]), 0.3)
        own = [i for i in sorted(set(BATCHES["ab"[a]][1].tolist())) if CODES["ab"[a]][i] in shared]
        kinds = [CODES["ab"[a]][i] for i in own]
        assert [CODES["ab"[b]][i] for i in partners[a].tolist()] == kinds
        alike = torch.tensor([[i != j and kinds[i] == kinds[j] for j in range(len(own))] for i in range(len(own))])
        expected += 0.15 * plugin.contrast(as_tensor(views[a][0][own]), as_tensor(views[b][0][partners[a]]), 0.3, alike)
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-10)


def test_terms_across_domains_reach_both_and_nothing_else_does(registry):
    plugin = module_of(registry, "backbone", "ccdr")
    alone = {"category_weight": 0.0, "neighbour_weight": 0.0}
    _, modules, _ = joint(registry, **alone)
    batch, targets = BATCHES["a"]
    modules[0].within(modules[0].view(), batch, targets).backward()
    assert modules[0].items.grad.any() and modules[0].categories.grad.any() and modules[1].items.grad is None
    for weights in ({"category_weight": 1.0, "neighbour_weight": 0.0}, {"category_weight": 0.0}):
        _, modules = make(registry, "a", "b", **weights)
        plugin.between(modules, [m.view() for m in modules], [BATCHES[n][1] for n in "ab"]).backward()
        assert all(module.items.grad.any() for module in modules)


def test_an_item_of_a_category_is_drawn_from_all_of_them(registry):
    _, (module,) = make(registry, "b")
    torch.manual_seed(0)
    drawn = module.of_category(torch.tensor([1] * 400 + [3]))
    assert set(drawn[:400].tolist()) == {0, 3} and 150 < (drawn[:400] == 0).sum() < 250 and drawn[400] == 2
    assert module.has_category.tolist() == [True, True, False, True, False]


def test_a_batch_of_one_domain_has_no_terms_across(registry):
    backbone, (module,) = make(registry, "a")
    values = []
    for loss in (lambda: backbone.joint_loss([module], *([each] for each in BATCHES["a"])),
                 lambda: module.loss(*BATCHES["a"])):
        torch.manual_seed(1)
        values.append(float(loss().detach()))
    assert values[0] == values[1]


def test_categories_are_clusters_of_all_domains_texts(registry):
    torch.manual_seed(0)
    kinds = torch.randn(3, 1, 8)
    said = {"a": [0, 1, 1, -1, 2, 0], "b": [1, 2, 2, 0]}
    domains = [replace(domain(name), codes=None, features=torch.stack(
        [kinds[k] * (1 + 0.1 * i) + 0.01 * torch.randn(1, 8) if k >= 0 else torch.zeros(1, 8)
         for i, k in enumerate(said[name])])) for name in "ab"]
    prepared = build(registry, "backbone", "ccdr", categories=3).prepared(domains)
    labels = [data.codes[:, 0].tolist() for data in prepared]
    assert labels[0][3] == -1
    pairs = {(k, label) for name, found in zip("ab", labels) for k, label in zip(said[name], found) if k >= 0}
    assert len(pairs) == 3 and len({label for _, label in pairs}) == 3
