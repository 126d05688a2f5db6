"""Product quantisation: codes are the nearest centroids', errors only fall, and published codes are found again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import threads
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcl_bench.toolbox import quantisation
from fedcl_bench.toolbox.quantisation import Quantiser, fit
from fedcl_bench.core.errors import UserError


def normal(n: int, d: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation_of(d: int, seed: int = 2) -> torch.Tensor:
    return torch.linalg.qr(normal(d, d, seed))[0]


def error(quantiser: Quantiser, vectors: torch.Tensor) -> float:
    return float((vectors - quantiser.decode(quantiser.encode(vectors))).square().sum())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2 ** 31), st.integers(1, 30), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_codes_are_of_the_nearest_centroids(seed, n, m, width, k):
    """Of a rotation and centroids that were drawn, by plain loops."""
    d = m * width
    quantiser = Quantiser(normal(1, d, seed)[0], rotation_of(d, seed), normal(m * k, width, seed + 1).view(m, k, width))
    vectors = normal(n, d, seed + 2)
    found = quantiser.encode(vectors)
    for row, vector in enumerate(vectors.numpy()):
        rotated = [sum(axis * (vector - quantiser.mean.numpy())) for axis in quantiser.rotation.numpy()]
        for part in range(m):
            mine = np.array(rotated[part * width:(part + 1) * width])
            distance = [((mine - c) ** 2).sum() for c in quantiser.centroids[part].numpy()]
            assert found[row, part] == int(np.argmin(distance))
    decoded = quantiser.decode(found)
    assert torch.equal(quantiser.encode(decoded), found)
    for row in range(n):
        rotated = torch.cat([quantiser.centroids[part, found[row, part]] for part in range(m)])
        expected = sum(number * axis for number, axis in zip(rotated, quantiser.rotation)) + quantiser.mean
        torch.testing.assert_close(decoded[row], expected)


def test_a_rotation_is_found_where_parts_depend_on_each_other(monkeypatch):
    """Clusters along axes that were turned away: the error of OPQ is below half of that without a rotation."""
    generator = torch.Generator().manual_seed(3)
    corners = torch.randint(0, 2, (400, 8), generator=generator).double() * 10.0
    corners[:, 1::2] = corners[:, ::2]  # each pair of numbers has two values
    vectors = (corners + 0.1 * normal(400, 8)) @ rotation_of(8)
    turned = fit(vectors, 4, 2, 7)
    monkeypatch.setattr(quantisation, "_ROTATIONS", 0)
    plain = fit(vectors, 4, 2, 7)
    assert torch.equal(plain.rotation, torch.eye(8, dtype=torch.float64))
    torch.testing.assert_close(turned.rotation @ turned.rotation.T, torch.eye(8, dtype=torch.float64))
    assert error(turned, vectors) < 0.5 * error(plain, vectors)


def test_numbers_depend_on_the_key_and_on_no_threads():
    vectors, results = normal(5000, 8).float(), []
    for count in (1, 3):
        with threads(count):
            results.append(fit(vectors, 2, 16, 4))
    assert all(torch.equal(getattr(results[0], name), getattr(results[1], name)) for name in vars(results[0]))
    assert not torch.equal(fit(vectors, 2, 16, 5).centroids, results[0].centroids)


def test_codes_that_do_not_divide_the_vectors_are_refused():
    with pytest.raises(UserError, match="found 3 codes for vectors of 8 numbers, accepted: .* divides 8"):
        fit(normal(10, 8), 3, 4, 1)


@pytest.mark.parametrize("name", ["OR", "Pantry"])
def test_published_codes_are_found_again(shared, name):
    """VQ-Rec's indices, which faiss made: their decoded vectors have the same codes."""
    file = shared / "data/domains/vqrec-index" / f"{name}.npz"
    index = {part: torch.from_numpy(value) for part, value in np.load(file).items()}
    quantiser = Quantiser(index["coarse"] @ index["rotation"], index["rotation"], index["centroids"])
    published = index["codes"][:1000].long()
    assert torch.equal(quantiser.encode(quantiser.decode(published)), published)
