"""Sequential encoders: how they start and what they drop; tests/test_session_oracle.py has their numbers."""

import math

import oracle
import pytest
import torch
from helpers import build, module_of
from session_oracle import ITEM, single_client

from fedcl_bench import Dropout, Sequence, Start, rng, xavier

ENCODERS = pytest.mark.parametrize("name, options", [
    ("gru4rec", {}), ("sasrec", {}), ("sasrec", {"architecture": "recbole"}), ("tisasrec", {})],
    ids=["gru4rec", "sasrec", "recbole", "tisasrec"])
N_ITEMS = 40


def test_dropout_draws_are_those_of_the_published_generator():
    """Entry e of call c is decided by 16 bits of number e // 4 + c 2^32 of the client's stream."""
    users, share = torch.tensor([5, 2]), 0.2
    dropout = Dropout(rng.client_keys(rng.key(3, "dropout", 1), users))
    threshold = round(share * 65536)
    for call in range(3):
        found = dropout(torch.ones(2, 3, 7, dtype=torch.float64), share)
        for user, entries in zip(users.tolist(), found.flatten(1).tolist()):
            number = oracle.stream(3, "dropout", 1, user)
            words = [number(e // 4 + (call << 32)) >> 16 * (e % 4) & 0xFFFF for e in range(21)]
            # The 16 bits are read as a signed number, so that half of the values count from the middle.
            assert entries == [0.0 if (word + 32768) % 65536 < threshold else 65536 / (65536 - threshold)
                               for word in words]


@ENCODERS
def test_starts_are_those_of_the_released_training_script(registry, name, options):
    """Glorot's normal start of every matrix of the whole model, padding rows counted; vectors as PyTorch makes them."""
    torch.manual_seed(0)
    backbone = build(registry, "backbone", name, layers=2, **options)
    starts = {**backbone.item_starts(N_ITEMS), **backbone.dense_starts()}
    module = single_client(name, backbone.settings, N_ITEMS)
    bounded = set()
    for key, (parameter, cut) in module.names.items():
        whole, start = module.get_parameter(parameter), starts.pop(key)
        assert cut(whole).shape == ((N_ITEMS, *start.shape) if key == ITEM else start.shape)
        if whole.dim() > 1:
            inputs, outputs = torch.nn.init._calculate_fan_in_and_fan_out(whole)
            assert start.std == math.sqrt(2.0 / (inputs + outputs)) and start.bound == 0.0
        elif start.bound:
            assert start.bound == 50 ** -0.5 and start.std == 0.0
            assert 0.9 * start.bound < whole.abs().max() <= start.bound
            bounded.add(key)
        else:
            assert start.std == 0.0 and (whole == start.value).all()
    assert not starts
    ffn = {f"{k}.ffn.{n}.bias" for k in (0, 1) for n in (0, 1)}
    projections = {f"{k}.{what}.bias" for k in (0, 1) for what in ("query", "key", "value")}
    assert bounded == {"sasrec": set() if options else ffn, "gru4rec": {"out.bias"},
                       "tisasrec": ffn | projections}[name]


def test_starts_as_drawn():
    """xavier(16, 50) without its first row has the deviation of the whole matrix, .174; every client draws its own."""
    keys = rng.client_keys(rng.key(0, "init"), torch.arange(40))
    normal = xavier(16, 50).without_rows(1).draw(keys)
    assert normal.shape == (40, 15, 50)
    assert normal.square().mean().sqrt().item() == pytest.approx(math.sqrt(2 / 66), rel=4 / math.sqrt(2 * 30_000))
    bounded = Start((500,), bound=0.1).draw(keys)
    assert 0.0999 < bounded.abs().max() < 0.1
    assert bounded.mean().abs() < 4 * 0.1 / math.sqrt(3 * 20_000)
    assert len(torch.cat([normal.flatten(), bounded.flatten()]).unique()) == 50_000
    torch.testing.assert_close(xavier(16, 50).without_rows(1).draw(keys[[7, 3]]), normal[[7, 3]], rtol=0, atol=0)


def intervals(registry, times, span=256):
    """Of one session after two positions of padding."""
    real = torch.tensor([[False, False, *[True] * len(times)]])
    sequence = Sequence(real, torch.tensor([[0.0, 0.0, *times]], dtype=torch.float64), real.long())
    return module_of(registry, "backbone", "tisasrec").intervals(sequence, span)[0].tolist()


def test_intervals(registry):
    """Times 0, 10, 30 are 1, 2, 4 in units of the shortest gap; padding is at 0; equal times have the unit 1."""
    assert intervals(registry, [0, 10, 30]) == [[0, 0, 1, 2, 4], [0, 0, 1, 2, 4], [1, 1, 0, 1, 3], [2, 2, 1, 0, 2],
                                                [4, 4, 3, 2, 0]]
    assert intervals(registry, [0, 10, 30], span=2) == [[0, 0, 1, 2, 2], [0, 0, 1, 2, 2], [1, 1, 0, 1, 2],
                                                        [2, 2, 1, 0, 2], [2, 2, 2, 2, 0]]
    for times in ([9, 9, 9], [0, 0, 0]):
        assert intervals(registry, times)[2:] == [[1, 1, 0, 0, 0]] * 3
    assert intervals(registry, [5.0]) == [[0, 0, 1], [0, 0, 1], [1, 1, 0]]
    assert intervals(registry, [100, 102, 102, 105])[-1] == [3, 3, 2, 1, 1, 0]  # 2.5 is rounded to the even 2
    assert intervals(registry, [1.4e9, 1.4e9 + 1, 1.4e9 + 3600])[2:] == [[1, 1, 0, 1, 256], [2, 2, 1, 0, 256],
                                                                         [256, 256, 256, 256, 0]]
