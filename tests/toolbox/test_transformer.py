"""The Transformer of domains' recommenders against RecBole's own, and the adapter of texts against plain loops."""

import pytest
import torch

from fedcl_bench import SIZES, Histories, UserError
from fedcl_bench.toolbox.transformer import (ExpertDropout, MoEAdapter, TransformerEncoder, TransformerSettings,
                                             by_length, normal_start)

_SIZES = TransformerSettings(dim=12, layers=3, heads=3, inner_size=7)
# RecBole's name of each part of a layer.
_RECBOLES = {"query": "multi_head_attention.query", "key": "multi_head_attention.key",
             "value": "multi_head_attention.value", "out": "multi_head_attention.dense",
             "norm": "multi_head_attention.LayerNorm", "inner": "feed_forward.dense_1",
             "outer": "feed_forward.dense_2", "ffn_norm": "feed_forward.LayerNorm"}


@pytest.fixture
def twins():
    """An encoder of ours and RecBole's with its weights, in float64, and a batch of histories."""
    from recbole.model.layers import TransformerEncoder as RecBoles
    torch.manual_seed(3)
    ours = TransformerEncoder(_SIZES).double()
    with torch.no_grad():
        for value in ours.parameters():
            value.add_(torch.randn_like(value) * 0.3)
    theirs = RecBoles(_SIZES.layers, _SIZES.heads, _SIZES.dim, _SIZES.inner_size).double()
    theirs.load_state_dict({f"layer.{k}.{_RECBOLES[part]}.{kind}": value for name, value in ours.named_parameters()
                            for _, k, part, kind in [name.split(".")]})
    lengths = torch.tensor([5, 1, 3, 4])
    return ours.eval(), theirs.eval(), torch.randn(4, 5, _SIZES.dim, dtype=torch.float64), lengths


def test_encoder_is_recboles(twins):
    ours, theirs, x, lengths = twins
    real = torch.arange(5) < lengths[:, None]
    seen = torch.tril(real[:, None, None].expand(-1, -1, 5, -1))
    expected = theirs(x, torch.where(seen, 0.0, -10000.0).double())[-1]
    torch.testing.assert_close(ours.last(x, lengths), expected[torch.arange(4), lengths - 1], rtol=1e-12, atol=1e-12)


def test_starts_are_recboles():
    encoder = TransformerEncoder(TransformerSettings())
    assert encoder.layers[1].query.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert not encoder.layers[0].inner.bias.any() and encoder.layers[0].norm.weight.eq(1).all()
    table = torch.nn.Embedding(300, 50)
    normal_start(table)
    assert table.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="'heads': found 7, accepted: a divisor of dim=300"):
        TransformerEncoder(TransformerSettings(heads=7))


def _adapter(dropout=0.2):
    torch.manual_seed(5)
    adapter = MoEAdapter(6, 4, experts=3, dropout=dropout).double()
    with torch.no_grad():
        for value in adapter.parameters():
            value.copy_(torch.randn_like(value))
    return adapter


def test_noise_of_gates_has_its_deviation_and_is_for_training():
    adapter = _adapter(dropout=0.0)
    x = torch.randn(6, dtype=torch.float64).expand(200_000, 6)
    logits = adapter.gates(x).log()
    deviation = torch.nn.functional.softplus(x[0] @ adapter.noise) + 0.01
    # Differences of logits are free of what softmax subtracts.
    expected = (deviation[0] ** 2 + deviation[1] ** 2).sqrt()
    assert (logits[:, 0] - logits[:, 1]).std().item() == pytest.approx(expected.item(), rel=0.01)
    adapter.eval()
    assert torch.equal(adapter.gates(x[:1]), adapter.gates(x[:1]))


@pytest.mark.parametrize("share, dtype", [(0.2, torch.float32), (0.5, torch.float64), (1e-3, torch.float32),
                                          (0.0, torch.float32), (1.0 - 1e-9, torch.float32)])
def test_a_share_is_dropped_at_random(share, dtype):
    """Each number by itself, rows and columns alike, and the mean stays what it was."""
    torch.manual_seed(3)
    x = torch.full((2001, 503), 2.0, dtype=dtype)
    drop = ExpertDropout(share, 2, x)
    (kept, other), scale = drop.dropped(x), drop.scale
    assert kept.dtype == dtype and kept.shape == x.shape and set(kept.unique().tolist()) <= {0.0, 2.0}
    zeros = (kept == 0).double()
    rounded = min(round(share * 65536), 65535) / 65536
    deviation = (rounded * (1.0 - rounded)) ** 0.5
    assert abs(rounded - share) < 2e-5 and scale == pytest.approx(1.0 / (1.0 - rounded))
    assert abs(zeros.mean().item() - rounded) <= 4.0 * deviation / x.numel() ** 0.5
    if share in (0.2, 0.5):
        for axis in (0, 1):
            spread = deviation / x.shape[axis] ** 0.5
            assert (zeros.mean(axis) - rounded).abs().max() <= 6.0 * spread
        flat = zeros.flatten()  # numbers that come from one word are independent too
        for gap in (1, 2, 3, 4):
            together = (flat[gap:] * flat[:-gap]).mean().item()
            assert together == pytest.approx(share ** 2, abs=4.0 * share / flat.numel() ** 0.5)
        assert not torch.equal(kept, other) and not torch.equal(kept, ExpertDropout(share, 1, x).dropped(x)[0])
    torch.manual_seed(3)
    again = ExpertDropout(share, 2, x)
    parts = torch.cat([again.dropped(part, first) for first, part in ((0, x[:700]), (700, x[700:]))], 1)
    assert torch.equal(parts, torch.stack([kept, other]))


def test_rows_go_through_the_experts_in_pieces_to_the_same_numbers(monkeypatch):
    """In training too: outputs and gradients, and each expert's dropout is of its own."""
    adapter, x = _adapter(dropout=0.3), torch.randn(5, 3, 6, dtype=torch.float64, requires_grad=True)

    def numbers(rows):
        monkeypatch.setattr(SIZES, "adapted", rows)
        torch.manual_seed(1)
        outputs = adapter(x)
        return [outputs, *torch.autograd.grad(outputs.square().sum(), [x, *adapter.parameters()])]

    torch.manual_seed(1)
    gates = adapter.gates(x).flatten(0, 1)
    drop = ExpertDropout(0.3, 3, x.flatten(0, 1))
    copies = drop.dropped(x.flatten(0, 1).detach()) * drop.scale
    expected = sum(gates[:, k:k + 1] * (copies[k] - adapter.bias[k]) @ adapter.weight[k] for k in range(3))
    whole = numbers(100)
    torch.testing.assert_close(whole[0].flatten(0, 1), expected)
    for pieces in (1, 4):
        torch.testing.assert_close(numbers(pieces), whole)


def test_pieces_of_one_length_are_encoded_as_the_whole_batch():
    torch.manual_seed(0)
    lengths = torch.randint(1, 9, (300,))
    items = torch.randint(0, 20, (300, 9)).where(torch.arange(9) < lengths[:, None], -1)
    batch, encoder = Histories(items, lengths, torch.arange(300)), TransformerEncoder(_SIZES).double().eval()
    table, seen = torch.randn(21, _SIZES.dim, dtype=torch.float64), []

    def encode(piece):
        seen.append(piece)
        return encoder.last(table[piece.items], piece.lengths) + piece.users.unsqueeze(1)

    whole = encoder.last(table[items], lengths) + torch.arange(300)[:, None]
    torch.testing.assert_close(by_length(batch, encode), whole)
    assert len(seen) == 3 and all(piece.items.shape[1] == piece.lengths.max() for piece in seen)
    assert seen[0].items.shape[1] < seen[-1].items.shape[1] == 8
