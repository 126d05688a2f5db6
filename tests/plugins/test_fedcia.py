"""FedCIA: a round is local training of one's own, and steps that torch's autograd and SGD take one client at a time."""

import pytest
import torch
from helpers import ITEM, USER, build, federation

from fedcl_bench import LocalSettings, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.rng import mean_laplace
from fedcl_bench.testing.worlds import growing_stream

N = 3  # steps


def parts(registry, method, inner=None, **settings):
    stream, method = growing_stream(), build(registry, "method", method, **settings)
    inner = inner or build(registry, "backbone", "fedmf", lr=0.5, dim=4, init_std=0.3)
    return federation(registry, stream, method, method.trained_backbone(inner, stream.steps[-1].n_users), 0, 1,
                      LocalSettings(batch_size=8), precision="float64")


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_round_equals_autograd(registry, noise):
    alone = next(run(parts(registry, "alone", own_rate=2.0)))  # trains alike, from the same start
    found = next(run(parts(registry, "fedcia", own_rate=2.0, align_steps=N, align_lr=0.02, align_decay=0.1,
                           similarity_noise=noise)))
    users = parts(registry, "alone").stream.steps[0].train.lengths.nonzero().flatten().tolist()
    tables = alone.model.private[ITEM]
    mean = sum(tables[user] @ tables[user].T for user in users) / len(users)
    if noise:
        mean = mean + mean_laplace(0, 0, 0, "similarity", tuple(mean.shape), noise, len(users))
    moved = 0.0
    for user, start in enumerate(tables):
        table = torch.nn.Parameter(start.clone())
        optimiser = torch.optim.SGD([table], lr=0.02, weight_decay=0.1)
        for _ in range(N if user in users else 0):
            optimiser.zero_grad()
            torch.norm(table @ table.T - mean, p=2).backward()
            optimiser.step()
        torch.testing.assert_close(found.model.private[ITEM][user], table.detach(), atol=1e-9, rtol=1e-9)
        moved = max(moved, float((table.detach() - start).abs().max()))
    assert moved > 1e-3
    torch.testing.assert_close(found.model.private[USER], alone.model.private[USER])
    n_items = len(tables[0])
    assert found.curve[0]["bytes_up"] == found.curve[0]["bytes_down"] == 8 * n_items ** 2


def test_backbones_without_inner_products_are_refused(registry):
    with pytest.raises(UserError, match="'fedcia' compares items by inner products of their rows, which 'fedrap' has"):
        parts(registry, "fedcia", build(registry, "backbone", "fedrap"))
