"""RecGURU: its networks and losses against plain loops in float64, both players' gradients, and its stages."""

import math

import numpy as np
import pytest
import torch
from domain_oracle import affine, attention, batch_of, each_history, histories_of, normalised
from helpers import build, module_of
from torch.nn import functional as F

from fedcl_bench.plugin.silo import DomainData

SMALL = dict(dim=4, heads=2, head_size=3, layers=2, inner_size=5, max_length=5, dropout=0.0,
             reconstruction_negatives=3, bpr_negatives=2)
ITEMS = {0: 7, 1: 6}


BATCHES = [(batch_of([0, 1, 6], [3]), torch.tensor([2, 5])), (batch_of([5, 5], [1, 2, 3, 4], [0]),
                                                             torch.tensor([0, 3, 2]))]


def make(registry, stage, histories=None, known=({}, {}), **settings):
    """The modules of two domains in float64, tied, without the discriminator's dropout."""
    backbone, modules = build(registry, "backbone", "recguru", **SMALL | settings), []
    torch.manual_seed(6)
    for number, items in ITEMS.items():
        of_users = histories[number] if histories else (torch.zeros(0), torch.zeros(4))
        data = DomainData(3, items, None, of_users, number=number, count=2, known=known[number])
        modules.append(backbone.module(data).double())
        modules[-1].stage = stage
    for name in ("encoder", "decoders", "recommenders", "discriminator", "marks"):
        setattr(modules[1], name, getattr(modules[0], name))
    for value in modules[0].parameters():
        torch.nn.init.normal_(value, std=0.6)
    modules[0].discriminator.eval()
    return backbone, modules


class Oracle:
    """One sample at a time, from a module's parameters."""

    def __init__(self, module):
        self.s, self.number = module.s, module.number
        self.p = {name: value.detach().numpy() for name, value in module.named_parameters()}

    def placed(self, vectors):
        d = self.s.dim
        for i, vector in enumerate(vectors):
            angles = [i / 10_000 ** (2 * (j // 2) / d) for j in range(d)]
            yield vector + np.array([math.sin(a) if j % 2 == 0 else math.cos(a) for j, a in enumerate(angles)])

    def stack(self, name, vectors, causal, user=None):
        x, p = list(self.placed(vectors)), self.p
        for k in range(self.s.layers):
            block = f"{name}.blocks.{k}"
            asked = ([affine(row, p, f"{block}.attention.{part}") for row in x] for part in ("query", "key", "value"))
            result = []
            for now, mixed in zip(x, attention(*asked, self.s.heads, causal)):
                row = now + affine(mixed, p, f"{block}.attention.out")
                row = normalised(row, p, f"{block}.attention.norm", 1e-8)
                if user is not None:
                    row = row + affine(affine(user, p, f"{block}.value"), p, f"{block}.out")
                    row = normalised(row, p, f"{block}.user_norm", 1e-8)
                hidden = affine(row, p, f"{block}.inner")
                hidden = 0.5 * hidden * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden ** 3)))
                result.append(normalised(row + affine(hidden, p, f"{block}.outer"), p, f"{block}.norm", 1e-8))
            x = result
        return x

    def user(self, history):
        vectors = [*self.p["items"][history], self.p["marks"][self.number, 1]]
        return self.stack("encoder", vectors, False)[-1]

    def decoded(self, kind, history):
        number = 0 if kind == "decoders" and self.s.shared_decoder else self.number
        vectors = [self.p["marks"][self.number, 0], *self.p["items"][history]]
        return self.stack(f"{kind}.{number}", vectors, True, self.user(history))


@pytest.mark.parametrize("settings", [{}, {"heads": 1}, {"shared_decoder": True}], ids=str)
def test_users_reconstruction_and_recommendation_are_as_written(registry, monkeypatch, settings):
    backbone, modules = make(registry, "reconstruct", **settings)
    drawn, draw = [], torch.randint
    monkeypatch.setattr(torch, "randint", lambda *args, **kw: drawn.append(draw(*args, **kw)) or drawn[-1])
    for module, (batch, targets) in zip(modules, BATCHES):
        oracle, module = Oracle(module), module.eval()
        users = module.users(batch)
        for row, history in zip(users, each_history(batch)):
            assert row.detach().numpy() == pytest.approx(oracle.user(history), rel=1e-6)
        items, terms = oracle.p["items"], []
        loss = float(module.reconstruction(batch, users).detach())
        others = iter(drawn.pop().tolist())
        for history in each_history(batch):
            for vector, item in zip(oracle.decoded("decoders", history), history):
                logits = [vector @ items[i] for i in (item, *next(others))]
                terms.append(math.log(sum(map(math.exp, logits))) - logits[0])
        assert loss == pytest.approx(np.mean(terms), rel=1e-6)
        loss = float(module.recommendation(batch, targets, users).detach())
        terms, scores = [], module.scores(batch).detach().numpy()
        for history, target, others, row in zip(each_history(batch), targets.tolist(), drawn.pop().tolist(), scores):
            all_scores = items @ oracle.decoded("recommenders", history)[-1]
            assert row == pytest.approx(all_scores, rel=1e-6)
            terms.append(-math.log(1 / (1 + math.exp(np.mean(all_scores[others]) - all_scores[target]))))
        assert loss == pytest.approx(np.mean(terms), rel=1e-6)


def discriminated(p, x):
    for k in (0, 3, 6):
        x = np.maximum(affine(x, p, str(k)), 0)
    return affine(x, p, "9")[0]


@pytest.mark.parametrize("adversary", ["wasserstein", "cross_entropy"])
def test_the_adversarial_loss_is_both_players(registry, monkeypatch, adversary):
    _, modules = make(registry, "align", adversary=adversary, penalty=0.3)
    plugin, discriminator = module_of(registry, "backbone", "recguru"), modules[0].discriminator
    torch.manual_seed(2)
    ones, others = torch.randn(3, 4).double().requires_grad_(), torch.randn(2, 4).double().requires_grad_()
    shares, draw = [], torch.rand
    monkeypatch.setattr(torch, "rand", lambda *args, **kw: shares.append(draw(*args, **kw)) or shares[-1])
    loss = plugin.adversarial(modules[0].s, discriminator, ones, others, 0)
    p = {name: value.detach().numpy() for name, value in discriminator.named_parameters()}
    first, second = ([discriminated(p, row) for row in users.detach().numpy()] for users in (ones, others))

    def entropy(logits, label):
        return np.mean([-math.log(1 / (1 + math.exp(-each if label else each))) for each in logits])

    if adversary == "wasserstein":
        players = np.mean(second) - np.mean(first), np.mean(first) - np.mean(second)
    else:
        players = entropy(first, 1) + entropy(second, 0), entropy(first, 0) + entropy(second, 1)
    norms = []
    for share, a, b in zip(shares[0].numpy(), ones.detach().numpy(), others.detach().numpy()):
        x, step = share * a + (1 - share) * b, 1e-6
        slope = [(discriminated(p, x + step * e) - discriminated(p, x - step * e)) / (2 * step) for e in np.eye(4)]
        norms.append((np.linalg.norm(slope) - 1) ** 2)
    assert float(loss.detach()) == pytest.approx(sum(players) + 0.3 * np.mean(norms), rel=1e-6)

    # The gradient is each player's own: users' of what they minimise, the discriminator's of its loss and the penalty.
    def entropies(logits, labels):
        return sum(F.binary_cross_entropy_with_logits(each, torch.full_like(each, label))
                   for each, label in zip(logits, labels))

    logits = [discriminator(users)[:, 0] for users in (ones, others)]
    wasserstein = logits[0].mean() - logits[1].mean()
    told, fooled = (-wasserstein, wasserstein) if adversary == "wasserstein" else (
        entropies(logits, (1.0, 0.0)), entropies(logits, (0.0, 1.0)))
    monkeypatch.setattr(torch, "rand", lambda *args, **kw: shares[0])
    told = told + 0.3 * plugin.gradient_penalty(discriminator, ones, others, 0)
    for leaves, expected in (([ones, others], fooled), (list(discriminator.parameters())[:-1], told)):
        for a, b in zip(torch.autograd.grad(loss, leaves, retain_graph=True),
                        torch.autograd.grad(expected, leaves, retain_graph=True)):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12) and a.any()


def reached(registry, stage, seed=1, **settings):
    backbone, modules = make(registry, stage, **settings)
    torch.manual_seed(seed)
    backbone.joint_loss(modules, *zip(*BATCHES)).backward()
    return {name.split(".")[0] for name, value in modules[0].named_parameters()
            if value.grad is not None and value.grad.any()}


def test_each_stage_trains_what_it_is_about(registry):
    assert reached(registry, "reconstruct") == {"encoder", "decoders", "marks", "items"}
    assert reached(registry, "align") == {"encoder", "decoders", "marks", "items", "discriminator"}
    assert reached(registry, "align", adversary_weight=0.0) == {"encoder", "decoders", "marks", "items"}
    everything = {"encoder", "decoders", "recommenders", "marks", "items"}
    assert reached(registry, "recommend") == everything
    assert reached(registry, "recommend", tuning_reconstructs=False) == {"recommenders", "marks", "items"}
    assert "encoder" in reached(registry, "recommend", tuning_reconstructs=False, fixed_encoder=False)


def joint(registry, stage, **settings):
    backbone, modules = make(registry, stage, **settings)
    torch.manual_seed(1)
    return float(backbone.joint_loss(modules, *zip(*BATCHES)).detach())


def test_domains_count_by_their_samples_and_their_number(registry):
    backbone, modules = make(registry, "reconstruct")
    torch.manual_seed(1)
    losses = [float(module.loss(*batch).detach()) for module, batch in zip(modules, BATCHES)]
    assert joint(registry, "reconstruct") == pytest.approx(2 * (2 * losses[0] + 3 * losses[1]) / 5, rel=1e-12)


# Training histories of three users of either domain, and who is who; user 1 of the second has none.
LISTS = {0: [[0, 6, 1], [3, 4], [2, 2, 5, 1, 0, 3]], 1: [[4, 0], [], [5, 1, 2]]}
TWINS = torch.tensor([[2, 0], [1, 2], [0, 1]])


def make_known(registry, stage):
    """As ``make``, of domains that know who their users are."""
    histories = {number: histories_of(lists) for number, lists in LISTS.items()}
    return make(registry, stage, histories, ({1: TWINS}, {0: TWINS.flip(1)}), adversary_weight=0.0)


def test_users_who_are_known_are_pulled_together(registry):
    """The whole training histories of the batch's users, each once, and the twins', where these have any."""
    _, modules = make_known(registry, "align")
    modules, pulled = [module.eval() for module in modules], module_of(registry, "backbone", "recguru").pulled
    first, second = (Oracle(module) for module in modules)
    terms = [first.user(LISTS[0][one][-5:]) - second.user(LISTS[1][other]) for one, other in ((1, 2), (2, 0))]
    for users, expected in (([2, 0, 1, 2], terms), ([1], terms[:1]), ([0], np.zeros(4))):
        loss = pulled(*modules, torch.tensor(users))
        assert float(loss.detach()) == pytest.approx(np.mean(np.square(expected)), rel=1e-5)
    loss = pulled(*modules[::-1], torch.tensor([0, 2]))
    assert float(loss.detach()) == pytest.approx(np.mean(np.square(terms)), rel=1e-5)
    loss = pulled(*modules, torch.tensor([1, 2]))
    assert all(each.any() for each in torch.autograd.grad(loss, [modules[0].items, modules[1].items, modules[0].marks]))


@pytest.mark.parametrize("stage", ["reconstruct", "align", "recommend"])
def test_the_pull_is_part_of_align_alone(registry, stage):
    pulled, losses = module_of(registry, "backbone", "recguru").pulled, []
    for backbone, modules in (make_known(registry, stage), make(registry, stage, adversary_weight=0.0)):
        torch.manual_seed(4)
        losses.append(float(backbone.joint_loss([module.eval() for module in modules], *zip(*BATCHES)).detach()))
    _, modules = make_known(registry, stage)
    added = float(pulled(*(module.eval() for module in modules), BATCHES[0][0].users).detach())
    assert added > 0.0 and losses[0] - losses[1] == pytest.approx(added if stage == "align" else 0.0, abs=1e-7)
