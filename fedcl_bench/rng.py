"""Counter-based random numbers.

Every draw is a hash of (seed, purpose, step, round, client, ..., index), so it does not depend on the order in which
clients are trained, on how they are chunked, or on what was drawn before: a resumed run draws what the uninterrupted
one would have drawn, and no client's draws depend on another client.

The generator is SplitMix64 (Steele, Lea & Flood, OOPSLA 2014): the ``i``-th number of the stream with key ``k`` is
``mix(k + (i + 1) * GAMMA)`` modulo 2^64. Keys are chained the same way. PyTorch has no unsigned 64-bit arithmetic, so
tensors hold the same bits as signed integers, whose products and sums wrap alike.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from .kernels import ops
from .core.parallel import in_order
from .core.tuning import SIZES

Tables = dict[str, Tensor]

GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical (not arithmetic) shift to the right."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_in_place(z: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 bit patterns of any shape; overwrites ``z``."""
    if ops.serve(z) and z.is_contiguous():
        try:
            ops.mixed(z)
            return z
        except RuntimeError:  # inside torch.func.vmap a tensor has no address
            pass
    z.bitwise_xor_(_shift(z, 30)).mul_(_signed(_MIX1))
    z.bitwise_xor_(_shift(z, 27)).mul_(_signed(_MIX2))
    return z.bitwise_xor_(_shift(z, 31))


def mix(z: int) -> int:
    """SplitMix64's finaliser on one unsigned 64-bit number."""
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def key(seed: int, purpose: str, *counters: int) -> int:
    """The stream key of (seed, purpose, counters), an unsigned 64-bit number."""
    name = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")
    state = mix((seed + GAMMA) & _MASK)
    for counter in (name, *counters):
        state = mix((state + GAMMA * ((counter + 1) & _MASK)) & _MASK)
    return state


_names: ContextVar[Tensor | None] = ContextVar("names", default=None)


@contextmanager
def global_client_ids(numbers: Tensor | None) -> Iterator[None]:
    """Within the block, client ``c`` draws as client ``numbers[c]``: some of a run's clients, numbered without gaps,
    draw what they draw among all of them. None: every client draws by its own number.

    Args:
        numbers: int64, ascending, shape (clients,).
    """
    token = _names.set(numbers)
    try:
        yield
    finally:
        _names.reset(token)


def names_of(clients: range) -> list[range]:
    """By which numbers clients draw (see ``named``), as one or more ranges."""
    numbers = _names.get()
    if numbers is None:
        return [clients]
    drawn_by = numbers[clients.start:clients.stop]
    ends = (drawn_by.diff() != 1).nonzero().flatten() + 1
    parts = torch.tensor_split(drawn_by, ends.cpu()) if len(drawn_by) else ()
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts] or [range(0)]


def names(clients: Tensor) -> Tensor:
    """The numbers by which clients draw (see ``named``), int64."""
    numbers = _names.get()
    return clients if numbers is None else numbers[clients]


def client_keys(base: int, clients: Tensor) -> Tensor:
    """One stream key per client: ``key(..., client)`` for every id in ``clients`` (int64, any shape)."""
    return row_keys(base, names(clients))


def row_keys(base: int, rows: Tensor) -> Tensor:
    """One stream key per row of a table, as ``client_keys`` of what is no client."""
    return _mix_in_place((rows + 1) * _signed(GAMMA) + _signed(base))


def bits(keys: Tensor, index: Tensor) -> Tensor:
    """Number ``index`` of each stream as int64 bit patterns; shapes broadcast."""
    return _mix_in_place((index + 1) * _signed(GAMMA) + keys)


def integers(pattern: Tensor, high: int | Tensor) -> Tensor:
    """Integers uniform on 0..high-1 (high < 2^31, a number or a tensor that broadcasts) from the upper 32 bits."""
    return _shift(pattern, 32).mul_(high).bitwise_right_shift_(32)


def uniform(pattern: Tensor) -> Tensor:
    """float64 uniform on (0, 1), 53 bits."""
    return (_shift(pattern, 11).double() + 0.5) * 2.0 ** -53


def sort_keys(pattern: Tensor) -> Tensor:
    """Non-negative int64 whose order is a uniformly random permutation."""
    return _shift(pattern, 1)


def normal_rows(seed: int, purpose: str, first_row: int, rows: int, columns: int) -> Tensor:
    """Standard normal float64 of shape (rows, columns); row ``i`` depends only on ``first_row + i``.

    So a table that grows later has the rows it would have had from the start.
    """
    if not rows:  # asks only how long rows are, which may be too long to make
        return torch.empty(0, columns, dtype=torch.float64)
    keys = row_keys(key(seed, purpose), torch.arange(first_row, first_row + rows))
    return normals(keys[:, None], torch.arange(columns))


def normals(keys: Tensor, index: Tensor) -> Tensor:
    """Standard normal float64, number ``index`` (m,) of each stream: keys (n, 1), or shapes that broadcast."""
    if keys.shape[1:] != (1,) or index.dim() != 1 or len(keys) * len(index) <= SIZES.normals:
        return _box_muller(keys, index)
    result = torch.empty(len(keys), len(index), dtype=torch.float64, device=keys.device)
    pieces = keys.split(max(1, SIZES.normals // len(index)))
    drawn = in_order(lambda piece: _box_muller(piece, index), pieces, keys.device)
    for part, numbers in zip(result.split(len(pieces[0])), drawn):
        part.copy_(numbers)
    return result


def _box_muller(keys: Tensor, index: Tensor) -> Tensor:
    """Each from two uniform numbers (Box & Muller, 1958)."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(bits(keys, 2 * index))))
    return radius * torch.cos(2.0 * math.pi * uniform(bits(keys, 2 * index + 1)))


def uniform_values(seed: int, purpose: str, shape: tuple[int, ...], bound: float) -> Tensor:
    """float64 of the given shape, uniform on (-bound, bound)."""
    pattern = bits(torch.tensor(_signed(key(seed, purpose))), torch.arange(math.prod(shape)))
    return ((2.0 * uniform(pattern) - 1.0) * bound).view(shape)


def mean_laplace(seed: int, step: int, round_: int, name: str, shape: tuple[int, ...], scale: float,
                 uploads: int) -> Tensor:
    """The mean of ``uploads`` independent Laplace(0, scale) tables, float64, without drawing each of them.

    A Laplace variable is the difference of two exponentials, so the sum of N of them is the difference of two
    Gamma(N) variables: two draws per entry instead of N, with exactly the same law.
    """
    philox = np.random.Philox(key=key(seed, "upload noise " + name, step, round_))
    gamma = np.random.Generator(philox).standard_gamma(uploads, size=(2, *shape))
    return torch.from_numpy((gamma[0] - gamma[1]) * (scale / uploads))


def mean_gaussian(seed: int, step: int, round_: int, name: str, shape: tuple[int, ...], scale: float,
                  uploads: int) -> Tensor:
    """The mean of ``uploads`` independent N(0, scale^2) tables, float64: it is N(0, scale^2 / uploads)."""
    philox = np.random.Philox(key=key(seed, "upload noise " + name, step, round_))
    return torch.from_numpy(np.random.Generator(philox).standard_normal(shape) * (scale / math.sqrt(uploads)))


def laplace(base: int, clients: Tensor, shape: tuple[int, ...], scale: float) -> Tensor:
    """Independent Laplace(0, scale) float64 of shape (C, *shape), keyed by ``base`` (see ``key``) and each client."""
    index = torch.arange(math.prod(shape), device=clients.device)
    centred = uniform(bits(client_keys(base, clients)[:, None], index)) - 0.5
    return (-scale * centred.sign() * torch.log1p(-2.0 * centred.abs())).view(len(clients), *shape)


def gaussian(base: int, clients: Tensor, shape: tuple[int, ...], scale: float) -> Tensor:
    """Independent N(0, scale^2) float64 of shape (C, *shape), keyed by ``base`` (see ``key``) and each client."""
    index = torch.arange(math.prod(shape), device=clients.device)
    return (scale * normals(client_keys(base, clients)[:, None], index)).view(len(clients), *shape)


@dataclass(frozen=True)
class DrawKey:
    """Names the random numbers of one local batch, round or step: a method's draws are keyed by it and the client."""

    seed: int
    step: int
    round: int = 0
    batch: int = 0

    def clients(self, purpose: str, users: Tensor) -> Tensor:
        """One stream key per user; feed them to ``rng.bits``."""
        return client_keys(key(self.seed, purpose, self.step, self.round, self.batch), users)
