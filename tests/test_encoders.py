"""Sequential encoders: they equal ordinary single-client modules, look back only, and drop entries by client."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import build, module_of
from session_oracle import ITEM, MODULES, left_padded

from fedcl_bench import draws
from fedcl_bench.sequential import Dropout, Sequence
from fedcl_bench.stream import Sessions

NAMES = sorted(MODULES)
N_ITEMS, LENGTHS = 40, (1, 5, 15, 23)


def sessions(generator):
    """One session per client, of the lengths above, with repeated items and, in part, equal times."""
    items = [torch.randint(0, N_ITEMS, (n,), generator=generator) for n in LENGTHS]
    times = [torch.randint(0, 400, (n,), generator=generator).double().cumsum(0) for n in LENGTHS]
    times[1][:] = 7.0
    times[3][4:10] = times[3][4]
    start = torch.tensor([0, *LENGTHS]).cumsum(0)
    return Sessions(torch.arange(len(LENGTHS) + 1), start, torch.cat(items), torch.cat(times))


def encode(backbone, public, dense, some, dropout=None, users=None):
    """The representations of ``some`` sessions under every client's own item table and dense parameters."""
    users = torch.arange(len(some.lengths)) if users is None else users
    items, times, real = some.tail(some.of_user[users], backbone.settings.max_length)
    rows = public[users].gather(1, items.unsqueeze(2).expand(*items.shape, public.shape[2])) * real.unsqueeze(2)
    return backbone.encode({name: value[users] for name, value in dense.items()}, rows, Sequence(real, times * real),
                           dropout or Dropout())


def parameters(backbone, clients, generator):
    """Item tables (C, items, d) and dense parameters, other ones for every client."""
    public = torch.randn(clients, N_ITEMS, backbone.settings.dim, generator=generator, dtype=torch.float64)
    dense = {name: 0.4 * torch.randn(clients, *value.shape, generator=generator, dtype=torch.float64)
             for name, value in backbone.new_dense(0).items()}
    return public, dense


@pytest.mark.parametrize("settings", [dict(layers=1), dict(layers=2, dim=6, max_length=15)])
@pytest.mark.parametrize("name", NAMES)
def test_equals_a_single_client_module(registry, name, settings):
    """Outputs and all gradients, in float64."""
    generator = torch.Generator().manual_seed(1)
    more = {"gru4rec": dict(hidden_size=9), "tisasrec": dict(time_span=20)}.get(name, {}) if "dim" in settings else {}
    backbone = build(registry, "backbone", name, dropout=0.0, **settings, **more)
    some = sessions(generator)
    public, dense = parameters(backbone, len(LENGTHS), generator)
    target = torch.randn(len(LENGTHS), 15, backbone.settings.dim, generator=generator, dtype=torch.float64)
    for tensor in (public, *dense.values()):
        tensor.requires_grad_()
    found = encode(backbone, public, dense, some)
    gradients = torch.autograd.grad((found * target).sum(), [public, *dense.values()])
    for c, n in enumerate(LENGTHS):
        module = MODULES[name](backbone.settings, N_ITEMS).double()
        module.load({ITEM: public[c]}, {key: value[c] for key, value in dense.items()})
        rows = slice(some.start[c], some.start[c + 1])
        expected = module(*left_padded(some.items[rows].tolist(), some.times[rows].tolist(), 15))
        torch.testing.assert_close(found[c], expected, rtol=1e-9, atol=1e-9)
        (expected * target[c]).sum().backward()
        for (key, grad), ours in zip({ITEM: None, **dense}.items(), gradients):
            torch.testing.assert_close(ours[c], module.gradients()[key], rtol=1e-8, atol=1e-8, msg=lambda m: f"{key}: {m}")
