"""MergeRec against plain loops in float64: the merged model, TIES, the loss on pseudo-users and the learned weights."""

import math

import domain_oracle as oracle
import numpy as np
import pytest
import torch
from helpers import build, module_of
from test_unisrec import SMALL, adapted

from fedcl_bench import rng
from fedcl_bench.rng import DrawKey

ADAM = 0.9, 0.999, 1e-8


def made(registry, **options):
    """The method, and of two domains their trained modules and what they send, in float64."""
    torch.manual_seed(2)
    method = build(registry, "method", "mergerec", **options)
    method.backbone = build(registry, "backbone", "unisrec", ids=False, **SMALL)
    modules, start = [], None
    for number, n_items in enumerate((oracle.N_ITEMS, 8)):
        module = method.module(method.backbone, oracle.world(seed=number, n_items=n_items)).double()
        start = start or {name: value.clone() for name, value in module.content.named_parameters()}
        with torch.no_grad():
            for name, value in module.content.named_parameters():
                value.copy_(start[name])
            module.enter_stage("alone")
        oracle.spread(module, seed=number).eval().stage = "merged"
        modules.append(module)
    with torch.no_grad():
        uploads = [method.upload(module, DrawKey(0, 0, 0)) for module in modules]
    return method, modules, start, uploads


def flat(tables):
    return np.concatenate([value.detach().numpy().ravel() for value in tables.values()])


def aggregated(method, uploads):
    left, right = method.aggregate(uploads, torch.tensor([0.5, 0.5], dtype=torch.float64), DrawKey(3, 0, 7))
    assert left is right
    return left


def changes_of(modules, start):
    return np.stack([flat(dict(module.content.named_parameters())) - flat(start) for module in modules])


@pytest.mark.parametrize("weight, expected", [(0.0, 0.5), (0.2, 0.2)])
def test_a_merge_adds_what_each_domain_has_learned(registry, weight, expected):
    method, modules, start, uploads = made(registry, learning_steps=0, initial_weight=weight)
    download = aggregated(method, uploads)
    assert [*download] == [f"content.{name}" for name in start] and "content.texts" not in uploads[0]
    np.testing.assert_allclose(flat(download), flat(start) + expected * changes_of(modules, start).sum(0), rtol=1e-12)


def test_ties_keeps_the_largest_of_the_elected_sign(registry):
    method, modules, start, uploads = made(registry, learning_steps=0, merging="ties", ties_density=0.3)
    changes, merged = changes_of(modules, start), flat(start)
    count = int(0.3 * len(merged))
    kept = [{int(at): change[at] for at in np.argsort(-abs(change))[:count]} for change in changes]
    for at in range(len(merged)):
        there = [each[at] for each in kept if at in each]
        sign = 1 if sum(there) >= 0 else -1
        elected = [value for value in there if value * sign > 0]
        merged[at] += sum(elected) / max(len(elected), 1)
    assert len(set(kept[0]) & set(kept[1])) > 10  # so that signs are in conflict somewhere
    np.testing.assert_allclose(flat(aggregated(method, uploads)), merged, rtol=1e-12, atol=1e-12)


def cosines(texts, p, item, candidates):
    """Of a pseudo-user who has had one item."""
    wanted = oracle.represent([0], [adapted(texts[item], p)], p, "history", 2, 2)
    return np.array([oracle.cosine(wanted, vector) for vector in candidates])


def vectors(texts, p):
    return [adapted(text, p) for text in texts]


def loss_of(weights, start, modules, steps, s):
    """Of one step's pseudo-users, by the merged model with these weights; candidates are those of the first."""
    names, changes = [*start], changes_of(modules, start)

    def merged(at):
        whole, p, first = flat(start) + at @ changes, {}, 0
        for name in names:
            p[name] = whole[first:first + start[name].numel()].reshape(start[name].shape)
            first += start[name].numel()
        return p
    total, t = 0.0, s.distillation_temperature
    for number, items in steps.items():
        texts = modules[number].content.texts.numpy()
        own, candidates = oracle.arrays(modules[number].content), vectors(texts, merged(np.array([0.5, 0.5])))
        for item in items.tolist():
            wanted = cosines(texts, own, item, vectors(texts, own))
            given = cosines(texts, merged(weights), item, candidates)
            teacher, student = oracle.softmax(wanted / t), oracle.softmax(given / t)
            total += -math.log(oracle.softmax(given)[wanted.argmax()])
            total += s.distillation * t * t * float(teacher @ np.log(teacher / student))
    return total / s.pseudo_users


def test_weights_are_learned_on_pseudo_users(registry):
    """Two steps of Adam by gradients from differences. The mean of the domains' vectors is where they begin."""
    method, modules, start, uploads = made(registry, learning_steps=2, pseudo_users=5, weights_lr=0.05,
                                           distillation=20.0, distillation_temperature=0.5)
    s, plugin = method.settings, module_of(registry, "method", "mergerec")
    key = rng.key(3, "pseudo-users", 7)
    weights, (first, second, eps) = np.array([0.5, 0.5]), ADAM
    mean, square, losses = np.zeros(2), np.zeros(2), []
    for step, chosen in enumerate(plugin.pseudo_users([oracle.N_ITEMS, 8], s, key), 1):
        gradient = np.array([(loss_of(weights + d, start, modules, chosen, s)
                              - loss_of(weights - d, start, modules, chosen, s)) / 2e-5 for d in np.eye(2) * 1e-5])
        mean, square = first * mean + (1 - first) * gradient, second * square + (1 - second) * gradient ** 2
        weights = weights - s.weights_lr * (mean / (1 - first ** step)) / (
            np.sqrt(square / (1 - second ** step)) + eps)
        losses.append(gradient)
    assert step == 2 and abs(weights - 0.5).min() > 0.01 and all(abs(gradient).min() > 1e-3 for gradient in losses)
    np.testing.assert_allclose(flat(aggregated(method, uploads)), flat(start) + weights @ changes_of(modules, start),
                               rtol=1e-5, atol=1e-6)


def test_pseudo_users_are_all_items_in_turn(registry):
    method, plugin = build(registry, "method", "mergerec", learning_steps=12, pseudo_users=3), module_of(
        registry, "method", "mergerec")
    steps = list(plugin.pseudo_users([11, 7], method.settings, 5))
    assert len(steps) == 12 and all(sum(map(len, step.values())) == 3 for step in steps)
    items = [(number, item) for step in steps for number, chosen in step.items() for item in chosen.tolist()]
    everything = {(number, item) for number, size in enumerate((11, 7)) for item in range(size)}
    assert set(items[:18]) == set(items[18:]) == everything and items[:18] != items[18:] != sorted(items[18:])


def test_before_the_merge_models_are_averaged(registry):
    method, modules, _, _ = made(registry, federated_rounds=3)
    assert [(stage.name, stage.rounds, stage.exchanges, stage.trains, stage.from_best) for stage in method.stages()] \
        == [("together", 3, True, True, False), ("alone", None, False, True, False), ("merged", 1, True, False, True)]
    assert [stage.name for stage in made(registry)[0].stages()] == ["alone", "merged"]
    for module in modules:
        module.stage = "together"
    with torch.no_grad():
        uploads = [method.upload(module, DrawKey(0, 0, 0)) for module in modules]
    parameters = [flat(dict(module.content.named_parameters())) for module in modules]
    np.testing.assert_allclose(flat(aggregated(method, uploads)), np.mean(parameters, 0), rtol=1e-12)
