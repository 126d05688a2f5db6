"""IFedRec: cold items have its network's rows, and nobody knows of them before they arrive."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import ITEM, build, federation
from torch import nn

from fedcl_bench import LocalSettings, UserError
from fedcl_bench.evaluation.metrics import EvaluationSettings
from fedcl_bench.federation.loop import run
from fedcl_bench.testing.worlds import growing_stream, with_item_features
from fedcl_bench.toolbox.server_module import ServerModule


@pytest.fixture(scope="module")
def stream():
    """Two new items in the second and in the third block."""
    return with_item_features(growing_stream(users=30, items=40))


def ends(registry, stream, method="ifedrec", backbone="biasmf", **settings):
    f = federation(registry, stream, build(registry, "method", method), build(registry, "backbone", backbone, dim=4),
                   local=LocalSettings(batch_size=20, negatives=2), patience=0, rounds=2,
                   evaluation=EvaluationSettings(topk=(5,), valid_metric="ndcg@5"), **settings)
    f.check()
    return f, [p for p in run(f) if p.trained]


def test_cold_items_have_the_networks_rows(registry, stream):
    """Those of the round's network, which in the rounds is trained on the items before them."""
    f, found = ends(registry, stream, cold_items="method")
    step = stream.steps[-1]
    state, public = found[-1].server_state, found[-1].model.public
    inner = torch.relu(stream.item_features @ state["network/0.weight"].T + state["network/0.bias"])
    rows = torch.tanh(inner @ state["network/2.weight"].T + state["network/2.bias"])
    assert len(state[f"rows of {ITEM}"]) == step.old_items
    new = torch.cat([table[step.old_items:].flatten(1) for table in public.values()], 1)
    torch.testing.assert_close(new, rows[step.old_items:])
    torch.testing.assert_close(state[f"rows of {ITEM}"], rows[:step.old_items, :4])
    other = ends(registry, with_item_features(stream, step.old_items, seed=8), cold_items="method")[1][-1]
    for name, table in public.items():
        assert torch.equal(table[:step.old_items], other.model.public[name][:step.old_items])
        assert not torch.equal(table[step.old_items:], other.model.public[name][step.old_items:])
    sent = {row["bytes_down"] - row["bytes_up"] for row in found[0].curve}  # r beside q
    assert sent == {4 * sum(table.numel() for table in found[0].model.public.values())}


def test_what_is_refused(registry, stream):
    with pytest.raises(UserError, match="cold_items': found method, .* with method 'ft', which makes no rows"):
        ends(registry, stream, "ft", cold_items="method")
    with pytest.raises(UserError, match="'ifedrec' reads features of items, which are not there"):
        ends(registry, replace(stream, item_features=None))


@pytest.mark.parametrize("optimiser", [partial(torch.optim.Adam, lr=0.1),
                                       partial(torch.optim.SGD, lr=0.1, momentum=0.5)])
def test_a_servers_module_goes_on_where_it_was(optimiser):
    """Three times one step is three steps, with what the optimiser remembers; earlier states stay as they were."""
    module = ServerModule("net", lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), optimiser)
    inputs = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(net):
        return (net(inputs) - 1.0).square().mean()
    start = state = module.start(3, inputs)
    before = {name: value.clone() for name, value in start.items()}
    for _ in range(3):
        state = module.train(state, loss)
    at_once = module.train(start, loss, 3)
    assert state.keys() == at_once.keys() and all(torch.equal(state[name], at_once[name]) for name in state)
    assert all(torch.equal(start[name], value) for name, value in before.items())
    assert loss(module.load(state)).item() < loss(module.load(start)).item()
    other = module.start(4, inputs)
    assert not torch.equal(start["net/0.weight"], other["net/0.weight"])
