"""PFCR against plain loops in float64: what a domain sends, the prompts, the stages, and what each setting changes."""

import copy
import math
import re
from dataclasses import replace

import domain_oracle as oracle
import numpy as np
import pytest
import torch
from helpers import build, module_of

from fedcl_bench.rng import DrawKey
from fedcl_bench.core.errors import UserError

SMALL = {"dim": 4, "heads": 2, "inner_size": 5, "max_length": 6, "codes": 3, "centroids": 5}
STILL = {"dropout": 0.0, "attention_dropout": 0.0}
TABLE = "content.code_table"


def make(registry, backbone=(), **options):
    torch.manual_seed(2)
    method = build(registry, "method", "pfcr", **{"prompts": 6, "prompt_heads": 2, **options})
    of = build(registry, "backbone", "vqrec", **{**SMALL, **dict(backbone)})
    codes = torch.randint(5, (oracle.N_ITEMS, 3), generator=torch.Generator().manual_seed(3))
    return method, method.module(of, replace(oracle.world(), codes=codes))


def in_stage(method, module, name):
    """The module as the engine prepares it for a stage."""
    stage = next(stage for stage in method.stages() if stage.name == name)
    for parameter, value in module.named_parameters():
        value.requires_grad_(parameter.startswith(stage.trained) if stage.trained else True)
    module.stage = name
    return module


def attended(query, p, heads):
    """Multi-head attention of one query over the prompts, as PyTorch's own module starts and names it."""
    weights, biases = np.split(p["attention.in_proj_weight"], 3), np.split(p["attention.in_proj_bias"], 3)
    q = weights[0] @ query + biases[0]
    keys, values = ([weights[n] @ prompt + biases[n] for prompt in p["prompts"]] for n in (1, 2))
    return oracle.affine(*oracle.attention([q], keys, values, heads, causal=False), p, "attention.out_proj")


def expected_scores(module, batch, prompt):
    p, codes = oracle.arrays(module), module.content.codes.tolist()
    vectors = [np.mean([p[TABLE][part][code] for part, code in enumerate(of_item)], 0) for of_item in codes]
    rows = []
    for history in oracle.each_history(batch):
        parts = [oracle.represent(history, vectors, p, "content.history", 2, 2)]
        if prompt in ("full", "ids"):
            xs = [oracle.normalised(p["items"][item] + p["content.history.positions"][at], p, "norm")
                  for at, item in enumerate(history)]
            parts.insert(0, oracle.transformer(xs, p, "encoder", 2, 2))
        if prompt != "ids":
            parts.insert(0, attended(parts[-1], p, 2))
        wanted = sum(parts) if prompt == "light" else oracle.normalised(
            oracle.affine(np.concatenate(parts), p, "joint"), p, "norm")
        rows.append([oracle.cosine(wanted, vector) for vector in vectors])
    return np.array(rows) / 0.07


@pytest.mark.parametrize("prompt", ["full", "light", "context", "ids"])
def test_prompted_scores_and_loss_are_those_of_plain_loops(registry, prompt):
    method, module = make(registry, prompt=prompt)
    in_stage(method, oracle.spread(module), "prompt_finetune").eval()
    batch, targets = oracle.samples()
    expected = expected_scores(module, batch, prompt)
    np.testing.assert_allclose(module.scores(batch).detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    assert module.loss(batch, targets).item() == pytest.approx(oracle.cross_entropy(expected, targets), rel=1e-9)


def test_before_prompts_it_scores_as_its_content(registry):
    method, module = make(registry)
    oracle.spread(module).eval()
    batch, _ = oracle.samples()
    for stage in ("fed_pretrain", "single_train"):
        in_stage(method, module, stage)
        assert torch.equal(module.scores(batch), module.content.scores(batch))
        assert torch.equal(module.item_vectors(), module.content.vectors())


def test_stages_are_the_authors(registry):
    method, _ = make(registry)
    first, second, third = method.stages()
    assert (first.rounds, first.exchanges, first.from_best) == (10, True, False)
    assert (second.rounds, second.exchanges, second.from_best, second.new_optimiser) == (None, False, False, True)
    assert (third.rounds, third.exchanges, third.from_best, third.new_optimiser) == (None, False, True, True)
    assert [stage.name for stage in make(registry, single_train=False)[0].stages()] == ["fed_pretrain",
                                                                                       "prompt_finetune"]
    assert make(registry, federated_rounds=3)[0].stages()[0].rounds == 3


@pytest.mark.parametrize("prompt", ["full", "light", "context", "ids"])
def test_each_stage_trains_what_it_says(registry, prompt):
    """Gradients reach all parameters that the stage names, and none other."""
    method, module = make(registry, prompt=prompt)
    oracle.spread(module).train()
    batch, targets = oracle.samples()
    content = {name for name, _ in module.named_parameters() if name.startswith("content.")}
    tuned = {name for name, _ in module.named_parameters()} - content | {TABLE}
    for stage, trained in (("fed_pretrain", content), ("single_train", content), ("prompt_finetune", tuned)):
        in_stage(method, module, stage)
        module.zero_grad()
        module.loss(batch, targets).backward()
        reached = {name for name, value in module.named_parameters() if value.grad is not None and value.grad.any()}
        assert reached == trained
    assert (module.rows == ("items",)) is (prompt in ("full", "ids"))
    assert "content.permutation" not in content


def trained_epoch(method, module, batches):
    """Two steps of Adam; returns what a plain loop gives as the table before and the sum of its gradients."""
    in_stage(method, module, "fed_pretrain").train()
    other, start = copy.deepcopy(module), module.content.code_table.detach().clone()
    optimisers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (module, other)]
    total = 0
    for batch, targets in batches:
        for each, optimiser in zip((module, other), optimisers):
            optimiser.zero_grad()
            each.loss(batch, targets).backward()
            if each is other:
                total = total + other.content.code_table.grad.clone()
            optimiser.step()
    return start, total


BATCHES = [oracle.samples(seed=seed) for seed in (1, 2)]


def test_a_domain_sends_the_table_that_its_gradients_give(registry):
    method, module = make(registry, STILL.items(), server_lr=0.5)
    oracle.spread(module)
    for epoch in range(2):  # what was sent before does not come again
        start, total = trained_epoch(method, module, BATCHES)
        with torch.no_grad():
            upload = method.upload(module, DrawKey(1, 0, epoch))
        assert set(upload) == {TABLE} == set(method.sent)
        torch.testing.assert_close(upload[TABLE], start - 0.5 * total, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(module.content.code_table, start)


def test_it_sends_gradients_also_after_a_move(registry):
    """On another device parameters are other tensors; here they are made so by PyTorch's switch for it."""
    method, module = make(registry, STILL.items())
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        before = module.content.code_table
        module.to(torch.float64)
        assert module.content.code_table is not before
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    start, total = trained_epoch(method, module, BATCHES)
    torch.testing.assert_close(method.upload(module, DrawKey(1, 0))[TABLE], start - 0.001 * total)


def test_the_server_takes_a_step_with_the_weighted_sum(registry):
    """E - lr sum_c w_c G_c, by what the two domains send."""
    uploads, gradients, start = [], [], None
    for number in (0, 1):
        method, module = make(registry, STILL.items(), server_lr=0.5)
        start, total = trained_epoch(method, oracle.spread(module), BATCHES[number:])
        gradients.append(total)
        uploads.append(method.upload(module, DrawKey(1, 0)))
    left, right = method.aggregate(uploads, torch.tensor([0.25, 0.75], dtype=torch.float64), DrawKey(1, 0))
    assert set(left) == {TABLE} and left[TABLE].equal(right[TABLE])
    torch.testing.assert_close(left[TABLE], start - 0.5 * (0.25 * gradients[0] + 0.75 * gradients[1]))


def response(registry, ldp, value, count=200_000, **options):
    """What the server takes for so many equal numbers."""
    module = module_of(registry, "method", "pfcr")
    settings = module.PFCRSettings(**{"ldp": ldp, "ldp_clip": 0.5, "ldp_levels": 5, "ldp_epsilon": 1.0, **options})
    return module.responded(torch.full((count,), value, dtype=torch.float64), settings, 4)


@pytest.mark.parametrize("value", [-0.5, -0.31, 0.0, 0.25, 0.5, 3.0, -3.0])
def test_unbiased_response_has_the_mean_of_the_number(registry, value):
    sent = response(registry, "unbiased", value)
    kept = math.expm1(1.0) / (math.e + 4)
    assert len(sent.unique()) == 5
    np.testing.assert_allclose(sent.unique() * kept, [-0.5, -0.25, 0, 0.25, 0.5], atol=1e-12)
    error = sent.std().item() / math.sqrt(len(sent))
    assert sent.mean().item() == pytest.approx(min(max(value, -0.5), 0.5), abs=5 * error)


def test_released_response_is_the_codes(registry):
    """By the card: levels of .12 / 256, 256 of them, decoded as (level - .12) .12 / 256."""
    options = {"ldp_clip": 0.12, "ldp_levels": 256, "ldp_epsilon": 0.3}
    width = 0.12 / 256
    for value, level in ((-0.12, 0), (-0.06, 128), (0.0, 0), (0.06, 128)):  # upper levels wrap
        sent = response(registry, "released", value, **options)
        values, counts = torch.unique(sent, return_counts=True)
        assert values.max().item() == pytest.approx((255 - 0.12) * width)
        assert values[counts.argmax()].item() == pytest.approx((level - 0.12) * width)
        share = 1 / (math.exp(0.3) + 2)
        assert counts.max().item() / len(sent) == pytest.approx(share + (1 - share) / 256, abs=0.005)
        if not level:  # also where the gradient is 0, the table moves
            assert sent.mean().item() == pytest.approx(((1 - share) * 127.5 - 0.12) * width, rel=0.02)


@pytest.mark.parametrize("ldp", ["unbiased", "released"])
def test_ldp_is_drawn_by_domain_block_and_round(registry, ldp):
    method, module = make(registry, STILL.items(), ldp=ldp)
    sent = []
    for draw in (DrawKey(1, 0, 0), DrawKey(1, 0, 0), DrawKey(1, 0, 1), DrawKey(2, 0, 0), DrawKey(1, 1, 0)):
        each = oracle.spread(make(registry, STILL.items())[1])
        trained_epoch(method, each, BATCHES)
        sent.append(method.upload(each, draw)[TABLE])
    assert torch.equal(sent[0], sent[1]) and not any(torch.equal(sent[0], other) for other in sent[2:])


def test_privacy_says_the_budget_of_a_number(registry):
    """Of the released response, log(1 + (1 - q) k / q) with q = (e^eps + 1) / (e^eps + 2)."""
    assert list(make(registry)[0].privacy()) == []
    for ldp, said in (("unbiased", "has 0.3-local"), ("released", "has 4.7-local .* not 0.3 as stated")):
        sentence, = make(registry, ldp=ldp)[0].privacy()
        assert re.search(said, sentence)


def test_heads_must_divide_the_vectors(registry):
    with pytest.raises(UserError, match="'prompt_heads': found 3, accepted: a divisor of dim, which is 4"):
        make(registry, prompt_heads=3)
    make(registry, prompt_heads=3, prompt="ids")
