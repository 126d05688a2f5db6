"""What a sequential backbone is: an encoder of item sequences that every client trains.

It maps a client's left-padded sequence of items to a representation at every position (FCUCR's module f_phi). The logit
of item i after position l is the inner product of the representation at l, or of what a method makes of it, with the
item's row. All its parameters are public: the item table, and dense ones that every client has its own copy of while it
trains. The first dimension of everything is clients.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import draws
from .backbone import Backbone, BackboneSettings
from .draws import Tables
from .layers import ITEM
from .settings import setting
from .sizes import SIZES


@dataclass(frozen=True)
class Start:
    """How the entries of a parameter start: N(0, std^2), U(-bound, bound), or all equal to ``value``.

    Attributes:
        shape: of the parameter; of one row for an item table.
        std, bound: at most one of them is not 0; if both are, the entries are ``value``.
    """

    shape: tuple[int, ...]
    std: float = 0.0
    bound: float = 0.0
    value: float = 0.0

    def draw(self, keys: Tensor) -> Tensor:
        """float64 of shape (n, *shape) from n stream keys (see ``draws.client_keys``)."""
        index = torch.arange(math.prod(self.shape), device=keys.device)
        if self.std > 0.0:
            entries = draws.normals(keys[:, None], index) * self.std
        elif self.bound > 0.0:
            entries = (2.0 * draws.uniform(draws.bits(keys[:, None], index)) - 1.0) * self.bound
        else:
            entries = torch.full((len(keys), len(index)), self.value, dtype=torch.float64, device=keys.device)
        return entries.view(len(keys), *self.shape)

    def without_rows(self, fewer: int) -> "Start":
        """The same without some of the rows, which only count for the variance."""
        return replace(self, shape=(self.shape[0] - fewer, *self.shape[1:]))


def xavier(*shape: int) -> Start:
    """Glorot's normal start of a matrix: variance 2 / (rows + columns)."""
    return Start(shape, std=math.sqrt(2.0 / sum(shape)))


def zeros(*shape: int) -> Start:
    return Start(shape)


def norm_start(name: str, size: int) -> dict[str, Start]:
    """A layer normalisation's start: the identity."""
    return {f"{name}.weight": Start((size,), value=1.0), f"{name}.bias": zeros(size)}


def linear_start(name: str, inputs: int, outputs: int) -> dict[str, Start]:
    """A linear layer's start in FCUCR's released code: Glorot's for the matrix; its loop over the parameters fails on
    vectors and leaves the bias at PyTorch's U(-1/sqrt(inputs), 1/sqrt(inputs))."""
    return {f"{name}.weight": xavier(outputs, inputs), f"{name}.bias": Start((outputs,), bound=inputs ** -0.5)}


@dataclass(frozen=True)
class SequentialSettings(BackboneSettings):
    """Settings every sequential backbone has, with the values of FCUCR's released code."""

    lr: float = setting(0.1, "learning rate of all parameters", above=0.0, search=(0.001, 0.003, 0.01, 0.03, 0.1))
    dim: int = setting(50, "length d of item vectors and representations", low=1)
    max_length: int = setting(15, "a sequence's last max_length items are encoded", low=1)
    dropout: float = setting(0.2, "share of entries that dropout sets to zero", low=0.0, high=0.9)


@dataclass(frozen=True)
class Sequence:
    """The sequences of C clients besides their items.

    Attributes:
        real: whether a position holds an item (True) or is padding, bool of shape (C, L); padding comes first.
        times: of the items, float64 of shape (C, L); 0 at padding.
    """

    real: Tensor
    times: Tensor


_CALLS = 32  # a call's numbers begin at its own times 2 to the power of this


class Dropout:
    """Dropout whose draws are keyed by client: none depends on which other clients are trained beside it.

    Calls are numbered, so those of one forward pass differ; make a new object for each. A hash of 64 bits decides about
    four entries, so the share of zeros is a multiple of 2^-16.

    Args:
        keys: one stream key per client, int64 of shape (C,); None: nothing is dropped, as in evaluation.
        ahead: the entries per client of a pass's calls, as far as they are known: if they are few, their
            numbers are drawn at once.

    Attributes:
        entries: the entries per client of the calls so far.
    """

    def __init__(self, keys: Tensor | None = None, ahead: tuple[int, ...] = ()):
        few = keys is not None and 0 < sum(ahead) <= SIZES.dropped
        self.keys, self.ahead, self.entries = keys, ahead if few else (), ()
        self._patterns = _patterns(keys, 0, ahead) if few else []

    def __call__(self, x: Tensor, share: float) -> Tensor:
        """x of shape (C, ...) with entries set to 0 at this rate and the others scaled up."""
        threshold = round(share * 65536)
        if self.keys is None or threshold == 0:
            return x
        call, entries = len(self.entries), x[0].numel()
        self.entries += (entries,)
        scale = 65536.0 / (65536.0 - threshold)
        pattern = (self._patterns[call] if self.ahead[call:call + 1] == (entries,) else
                   _patterns(self.keys, call, (entries,))[0])
        # 0 or 1 as pattern >= threshold - 32768 says, which PyTorch compares several times as slowly as it subtracts
        factor = pattern.to(x.dtype).sub_(threshold - 32769).clamp_(0.0, 1.0)
        return x * factor.mul_(scale).view(x.shape)


def _patterns(keys: Tensor, call: int, entries: tuple[int, ...]) -> list[Tensor]:
    """For each of some calls of a pass, the first of which is number ``call``: int16 of shape (C, entries)."""
    words = [-(-number // 4) for number in entries]
    index = _word_index(call, tuple(words), keys.device)
    every = draws.bits(keys[:, None], index).view(torch.int16).split([4 * number for number in words], dim=1)
    return [pattern[:, :number] for pattern, number in zip(every, entries)]


@functools.lru_cache(maxsize=64)
def _word_index(call: int, words: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the words of consecutive calls stand in a client's stream."""
    return torch.cat([torch.arange(number, device=device) + (k << _CALLS) for k, number in enumerate(words, call)])


class SequentialBackbone(Backbone):
    """Base class of sequential backbones.

    Subclasses set ``name``, ``title``, ``reference`` and ``Settings`` and implement ``dense_starts`` and ``encode``.
    """

    Settings = SequentialSettings
    defaults = {"optimiser": "adam", "adam_beta2": 0.98, "local_epochs": 4, "init": "per_client"}
    ignored = {**dict.fromkeys(("batch_size", "tolerance", "negative_pool", "negative_draw"),
                               "with a sequential backbone, which trains on one session as a whole, with one negative "
                               "per target, in every local epoch"),
               **dict.fromkeys(("reset_private", "init_from"),
                               "with a sequential backbone, whose stream of sessions has one step")}

    def dense_starts(self) -> dict[str, Start]:
        """How every public parameter without item rows starts."""
        raise NotImplementedError

    def encode(self, clients: Tables, inputs: Tensor, sequence: Sequence, dropout: Dropout) -> Tensor:
        """Representations at every position; position l must depend on positions up to l only.

        Args:
            clients: the clients' own copies of the dense parameters, each (C, ...).
            inputs: item rows, (C, L, d); zero at padding.
            sequence: padding and times.
            dropout: call it as ``dropout(x, share)`` wherever the model drops entries.

        Returns:
            (C, L, d).
        """
        raise NotImplementedError

    def item_starts(self, n_items: int) -> dict[str, Start]:
        """How a row of each public item table starts: Glorot's over the whole table with its padding row."""
        dim = self.settings.dim
        return {ITEM: Start((dim,), std=math.sqrt(2.0 / (n_items + 1 + dim)))}

    def new_rows(self, seed, users, items):
        ids = torch.arange(items.start, items.stop)
        return {name: start.draw(draws.client_keys(draws.key(seed, f"init {name}"), ids))
                for name, start in self.item_starts(items.stop).items()}, {}

    def new_dense(self, seed):
        server = torch.zeros(1, dtype=torch.int64)
        return {name: start.draw(draws.client_keys(draws.key(seed, f"init {name}"), server))[0]
                for name, start in self.dense_starts().items()}

    def learning_rates(self, n_items, round_=0, batch=0):
        return dict.fromkeys([*self.item_starts(n_items), *self.dense_starts()], self.settings.lr)
