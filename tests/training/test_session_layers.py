"""Layers of session clients, written in few passes: they equal PyTorch's own, with gradients, client by client."""

import gc

import pytest
import torch
from helpers import build, grown, train_round

from fedcl_bench import LocalSettings
from fedcl_bench.training.chunk_trainer import ChunkTrainer
from fedcl_bench.training.optimisers import stacked_optimiser
from fedcl_bench.training.session_trainer import make_session_chunks
from fedcl_bench.kernels.functional import attention
from fedcl_bench.core.parallel import even_pieces
from fedcl_bench.testing.worlds import session_log, session_stream

C, N, D = 3, 5, 4


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def same(found, expected, inputs):
    """Values and, for one random direction, gradients."""
    direction = randn(*found.shape)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(*(torch.autograd.grad((out * direction).sum(), inputs) for out in (found, expected))):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("per_client", [False, True])
def test_attention_weights(per_client):
    scores = (100.0 * randn(C, 1, N, N)).requires_grad_()  # of a size whose exponential overflows
    masked = torch.ones(N, N, dtype=torch.bool).triu(1)
    if per_client:
        masked = masked | (torch.arange(N) < torch.arange(C)[:, None, None, None]) & ~torch.eye(N, dtype=torch.bool)
    found = attention(scores, masked, 0.5)
    assert bool((found[masked.expand_as(found)] == 0.0).all())
    same(found, (0.5 * scores).masked_fill(masked, -torch.inf).softmax(3), [scores])


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_local_optimisers(optimiser, dtype):
    """On parameters of several rates, one of which has no gradient at times."""
    settings, steps = LocalSettings(optimiser, adam_beta2=0.98, adam_eps=1e-4), 4
    rates = {"a": 0.1, "b": 0.2, "c": 0.1}
    start = {name: randn(C, 7 + k, D).to(dtype) for k, name in enumerate(rates)}
    gradients = [{name: 10.0 ** (3 * k - 6) * randn(k + 1, *value.shape)[k]
                  for name, value in start.items()} for k in range(steps)]
    found = {name: value.clone() for name, value in start.items()}
    step = stacked_optimiser(found, rates, settings)
    for k, of_all in enumerate(gradients):
        step([None if name == "c" and k % 2 == 0 else of_all[name].to(dtype) for name in found])
    for name, value in start.items():
        expected = value.to(torch.float64, copy=True).requires_grad_()
        kind = torch.optim.Adam([expected], rates[name], (0.9, 0.98), 1e-4) if optimiser == "adam" else torch.optim.SGD(
            [expected], rates[name])
        for k, of_all in enumerate(gradients):
            expected.grad = of_all[name] if name != "c" or k % 2 else torch.zeros_like(expected)
            kind.step()
        near = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(found[name].double(), expected.detach(), rtol=near, atol=near)
        assert found[name].grad is None and not torch.equal(found[name], value)


@pytest.mark.parametrize("number, at_most, sizes", [
    (877, 256, [220, 219, 219, 219]), (64, 256, [64]), (65, 256, [33, 32]), (3, 1, [1, 1, 1]), (5, 2, [2, 1, 1, 1]),
    (0, 4, [0])])
def test_even_pieces(number, at_most, sizes):
    pieces = even_pieces(torch.arange(number), at_most)
    assert [len(piece) for piece in pieces] == sizes
    assert torch.cat(list(pieces)).tolist() == list(range(number))


def test_a_chunk_is_freed_with_its_round(registry):
    """At once, not when Python next looks for circles: its parameters, gradients and moments are most of the memory."""
    step = session_stream(session_log(40), 40).steps[0]
    backbone, method = build(registry, "backbone", "sasrec", dim=6, max_length=5), build(registry, "method", "fcucr")
    model = grown(backbone, step, 5, torch.float32, method)
    method.begin_round(step, 0, backbone)
    gc.collect()
    gc.disable()
    try:
        train_round(make_session_chunks(step, torch.arange(step.n_users)), model, backbone, method,
                    LocalSettings("adam"), 5, 0, 0)
        assert not [entry for entry in gc.get_objects() if issubclass(type(entry), ChunkTrainer)]
    finally:
        gc.enable()
