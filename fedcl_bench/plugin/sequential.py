"""What a sequential backbone is: an encoder of item sequences that every client trains.

It maps a client's left-padded sequence of items to vectors, and scores items against them. There are two kinds:

- A ``SequentialBackbone`` has a representation at every position (FCUCR's module f_phi). The logit of item i after
  position l is the inner product of the representation at l, or of what a method makes of it, with the item's row.
- A ``SessionBackbone`` represents the session as a whole by a set of vectors, and pools an item's scores over them.

Its parameters are public: the item table, and dense ones that every client has its own copy of while it trains. With
``output_embedding=private`` a client also has rows of its own, which items are scored against. The first dimension of
everything is clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from .. import rng
from .backbone import ITEM, Backbone, BackboneSettings
from ..rng import DrawKey, Tables
from ..kernels.functional import Pooling, cosine_pool, target_logits
from ..core.settings import setting


@dataclass(frozen=True)
class Start:
    """How the entries of a parameter start: N(0, std^2), U(-bound, bound), or all equal to ``value``."""

    shape: tuple[int, ...]  # of the parameter; of one row for an item table
    # At most one of them is not 0; if both are, the entries are ``value``
    std: float = 0.0
    bound: float = 0.0
    value: float = 0.0

    def draw(self, keys: Tensor) -> Tensor:
        """float64 of shape (n, *shape) from n stream keys (see ``rng.client_keys``)."""
        index = torch.arange(math.prod(self.shape), device=keys.device)
        if self.std > 0.0:
            entries = rng.normals(keys[:, None], index).mul_(self.std)
        elif self.bound > 0.0:
            entries = (2.0 * rng.uniform(rng.bits(keys[:, None], index)) - 1.0) * self.bound
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


OUTPUT = "output_embedding.weight"


@dataclass(frozen=True)
class EncoderSettings(BackboneSettings):
    """Settings every sequential backbone has, with the values of FCUCR's released code."""

    lr: float = setting(0.1, "learning rate of all parameters", above=0.0, search=(0.001, 0.003, 0.01, 0.03, 0.1))
    dim: int = setting(50, "length d of item vectors and representations", low=1)
    max_length: int = setting(15, "a sequence's last max_length items are encoded", low=1)
    dropout: float = setting(0.2, "share of entries that dropout sets to zero", low=0.0, high=0.9)


@dataclass(frozen=True)
class SequentialSettings(EncoderSettings):
    """Settings of a backbone whose scores are inner products."""

    output_embedding: str = setting("tied", "what scores an item: its public row (tied: FCUCR's released code), or a "
                                    "row and a constant that each client has of its own and never uploads (private: "
                                    "a head over all items)", choices=("tied", "private"),
                                    only_if=("stream=sessions", "topology!=central"))


@dataclass(frozen=True)
class Sequence:
    """The sequences of C clients besides the rows of their items."""

    real: Tensor  # whether a position holds an item (True) or is padding, bool of shape (C, L); padding comes first
    times: Tensor  # of the items, float64 of shape (C, L); 0 at padding
    items: Tensor  # their ids, int64 of shape (C, L); -1 at padding


@dataclass(frozen=True)
class SessionVectors:
    """What a sequential backbone makes of C clients' sequences."""

    vectors: Tensor  # (C, M, d): one per position (M = L), or a set of them for each session
    mask: Tensor  # which of a client's vectors count, bool of shape (C, M)
    terms: Tables = field(default_factory=dict)  # what else of the forward pass the loss needs, each (C, ...), by name


@dataclass(frozen=True)
class Targets:
    """What C clients' sequences are to predict, and the clients' own item rows to do it with."""

    # Of the session's L + 1 items, of which all but the first are targets, and of L negatives, (C, 2 L + 1, d),
    # differentiable. With private output rows these, as long as ``with_constant`` makes vectors.
    rows: Tensor
    items: Tensor  # ids of those, (C, 2 L + 1)
    real: Tensor  # which positions have a target, bool of shape (C, L)
    # ``session_scores`` of all items in order, with ``candidate_dropout``, (C, items), differentiable; None without
    # ``whole_tables``.
    scores: Tensor | None
    dropout: "Dropout"  # of the same forward pass


_CALLS = 32  # a call's numbers begin at its own times 2 to the power of this
_OF_ROWS = 1 << 52  # and those of item rows here, beyond all calls


class Dropout:
    """Dropout whose draws are keyed by client: none depends on which other clients are trained beside it. Calls are
    numbered, so those of one forward pass differ; make a new object for each. A hash of 64 bits decides about four
    entries, so the share of zeros is a multiple of 2^-16. ``keys``: one stream key per client, int64 of shape (C,);
    None: nothing is dropped, as in evaluation."""

    def __init__(self, keys: Tensor | None = None):
        self.keys, self._calls = keys, 0

    def __call__(self, x: Tensor, share: float) -> Tensor:
        """x of shape (C, ...) with entries set to 0 at this rate and the others scaled up."""
        threshold = round(share * 65536)
        if self.keys is None or threshold == 0:
            return x
        entries = x[0].numel()
        index = torch.arange(-(-entries // 4), device=x.device) + (self._calls << _CALLS)
        self._calls += 1
        pattern = rng.bits(self.keys[:, None], index).view(torch.int16)[:, :entries]
        return x * _factor(pattern, threshold, x.dtype).view(x.shape)

    def of_rows(self, items: Tensor, dim: int, share: float, dtype: torch.dtype) -> Tensor | None:
        """What item rows (C, n, d) are to be multiplied with; an item's factors are the same in each call, whatever the
        other items. None: nothing is dropped. ``items``: ids of the rows, (n,) or (C, n)."""
        threshold = round(share * 65536)
        if self.keys is None or threshold == 0:
            return None
        words = -(-dim // 4)
        index = (items * words + _OF_ROWS).unsqueeze(-1) + torch.arange(words, device=items.device)
        pattern = rng.bits(self.keys[:, None, None], index).view(torch.int16)[..., :dim]
        return _factor(pattern, threshold, dtype)


def _factor(pattern: Tensor, threshold: int, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies entries with: 0, or what makes up for those."""
    # 0 or 1 as pattern >= threshold - 32768 says, which PyTorch compares several times as slowly as it subtracts
    factor = pattern.to(dtype).sub_(threshold - 32769).clamp_(0.0, 1.0)
    return factor.mul_(65536.0 / max(65536.0 - threshold, 1.0))  # all are 0 at a share of 1


class SequentialBackbone(Backbone):
    """Base class of sequential backbones.

    Subclasses set ``name``, ``title``, ``reference`` and ``Settings`` and implement ``dense_starts`` and ``encode``.

    Attributes:
        positionwise: it has a representation at every position, made of the items up to there.
        inner_products: scores are inner products with its representations; methods that work on these need it.
        pads: padding changes what is made of a sequence, as FCUCR's SASRec attends to it, so it is not cut off where
            all sequences are short.
        candidate_dropout: dropout of item rows as the loss scores them, with ``whole_tables`` or in a loss of its own.
        gradient_norm: the gradient of a local batch is scaled down to this L2 norm, over all of a client's parameters;
            0: never.
    """

    positionwise: ClassVar[bool] = True
    inner_products: ClassVar[bool] = True
    gradient_norm: float = 0.0
    pads: bool = True
    candidate_dropout: float = 0.0
    Settings: ClassVar[type] = SequentialSettings
    settings: EncoderSettings
    defaults = {"optimiser": "adam", "adam_beta2": 0.98, "local_epochs": 4, "init": "per_client"}
    central_defaults = {"optimiser": "adam", "adam_beta2": 0.999, "lr": 0.001, "max_length": 50}
    ignored = {**dict.fromkeys(("batch_size", "tolerance", "negative_pool", "negative_draw"),
                               "with a sequential backbone, which trains on one session as a whole, with one negative "
                               "per target, in every local epoch"),
               **dict.fromkeys(("reset_private", "init_from"),
                               "with a sequential backbone, whose stream of sessions has one step")}

    def dense_starts(self) -> dict[str, Start]:
        """How every public parameter without item rows starts."""
        raise NotImplementedError

    def encode(self, clients: Tables, inputs: Tensor, sequence: Sequence, dropout: Dropout) -> Tensor:
        """Representations at every position; position l must depend on positions up to l only. ``clients``: the
        clients' own copies of the dense parameters, each (C, ...); ``inputs``: item rows, (C, L, d); zero at padding;
        ``sequence``: padding and times; ``dropout``: call it as ``dropout(x, share)`` wherever the model drops entries.
        Returns (C, L, d)."""
        raise NotImplementedError

    def derive(self, public: Tables, draw: DrawKey) -> Tables:
        """What every client makes of the item tables it received before it trains, as clusters of items. It is the same
        for all clients and made once a round; ``session_vectors`` finds it among ``clients`` in training alone, each
        (C, ...). ``public``: as the server sent them, also where clients then start with their own
        (``init=per_client``); ``draw``: key of the round."""
        return {}

    @property
    def n_vectors(self) -> int:
        """M: how many vectors ``session_vectors`` makes of a sequence."""
        return self.settings.max_length

    def more_items(self, memory: Tables, sequence: Sequence) -> Tensor | None:
        """Items besides the sequences' own whose rows ``session_vectors`` reads, as neighbours in a graph. ``memory``:
        what the clients remember (see ``remember``), each (C, ...). Returns int64 ids of shape (C, n), or None."""

    def session_vectors(self, clients: Tables, inputs: Tensor, sequence: Sequence, dropout: Dropout) -> SessionVectors:
        """The vectors that items are scored with. ``clients``: as for ``encode``, what the clients remember, and in
        training what they derive; ``inputs``: item rows, (C, L, d), zero at padding; after them those of
        ``more_items``, (C, L + n, d); ``sequence``, ``dropout``: as for ``encode``."""
        return SessionVectors(self.encode(clients, inputs, sequence, dropout), sequence.real)

    def session_scores(self, vectors: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """What items are ranked by after the whole sequence: inner products with the last position's vector. The score
        of an item may depend on its own row only, and not on vectors that are not in the mask. ``vectors``, ``mask``:
        as in ``SessionVectors``; ``rows``: of each client's items, (C, n, d), or of items that are the same for all
        clients, (n, d). Returns (C, n)."""
        output = vectors[:, -1]
        return output @ rows.T if rows.dim() == 2 else torch.bmm(rows, output.unsqueeze(2)).squeeze(2)

    def session_loss(self, session: SessionVectors, targets: Targets) -> Tensor:
        """Recommendation loss of each client, (C,): the mean cross-entropy of the targets plus that of one negative
        each, over the positions that have one (FCUCR)."""
        positive, negative = target_logits(session.vectors, targets.rows)
        each = softplus(-positive) + softplus(negative)
        return (each * targets.real).sum(1) / targets.real.sum(1)

    def item_starts(self, n_items: int) -> dict[str, Start]:
        """How a row of each public item table starts: Glorot's over the whole table with its padding row."""
        dim = self.settings.dim
        return {ITEM: Start((dim,), std=math.sqrt(2.0 / (n_items + 1 + dim)))}

    def new_rows(self, seed: int, users: range, items: range) -> tuple[Tables, Tables]:
        ids = torch.arange(items.start, items.stop)
        return {name: start.draw(rng.row_keys(rng.key(seed, f"init {name}"), ids))
                for name, start in self.item_starts(items.stop).items()}, {}

    @property
    def private_output(self) -> bool:
        """Whether items are scored against rows of each client's own."""
        return isinstance(self.settings, SequentialSettings) and self.settings.output_embedding == "private"

    def with_constant(self, vectors: Tensor) -> Tensor:
        """Vectors (C, M, d) as item rows are scored with: with a 1 for the constant of a private row, (C, M, d + 1)."""
        return pad(vectors, (0, 1), value=1.0) if self.private_output else vectors

    def new_personal(self, seed: int, items: range) -> Tables:
        """Private output rows (items, d + 1), the constant last. They start as a linear layer from d numbers to all
        items (see ``linear_start``), alike at all clients."""
        if not self.private_output:
            return {}
        dim, ids = self.settings.dim, torch.arange(items.start, items.stop)
        keys = rng.row_keys(rng.key(seed, f"init {OUTPUT}"), ids)
        starts = Start((dim,), std=math.sqrt(2.0 / (items.stop + dim))), Start((1,), bound=dim ** -0.5)
        constants = rng.row_keys(rng.key(seed, "init output_embedding.bias"), ids)
        return {OUTPUT: torch.cat([starts[0].draw(keys), starts[1].draw(constants)], 1)}

    def new_dense(self, seed: int) -> Tables:
        server = torch.zeros(1, dtype=torch.int64)
        return {name: start.draw(rng.row_keys(rng.key(seed, f"init {name}"), server))[0]
                for name, start in self.dense_starts().items()}

    def learning_rates(self, n_items: int, round_: int = 0, batch: int = 0) -> Mapping[str, float]:
        own = self.new_personal(0, range(0))
        return dict.fromkeys([*self.item_starts(n_items), *self.dense_starts(), *own], self.settings.lr)


@dataclass(frozen=True)
class SessionSettings(EncoderSettings):
    """Settings of every backbone that represents sessions as a whole."""

    dim: int = setting(100, "length d of item vectors and representations", low=1)
    loss: str = setting("cross_entropy", "of a session's last item: cross-entropy over all items (released codes), "
                        "for which each client trains the whole item table; or binary cross-entropy with one negative "
                        "(bce), as FCUCR trains its own backbones", choices=("cross_entropy", "bce"))


class SessionBackbone(SequentialBackbone):
    """Base class of backbones that represent a session by a set of vectors.

    The session without its last item is the input, and the last item is the target. Subclasses implement
    ``dense_starts``, ``session_vectors`` and ``pooling`` or ``session_scores``; the other hooks have defaults.

    Attributes:
        scale: logits of the loss are so many times the scores.
    """

    positionwise = False
    inner_products = False
    pads = False
    Settings = SessionSettings
    settings: SessionSettings
    scale: float = 1.0

    def __init__(self, settings: SessionSettings):
        super().__init__(settings)
        self.whole_tables = settings.loss == "cross_entropy"

    def session_vectors(self, clients: Tables, inputs: Tensor, sequence: Sequence, dropout: Dropout) -> SessionVectors:
        raise NotImplementedError

    def pooling(self, vectors: Tensor, mask: Tensor) -> Pooling:
        """How cosines of vectors and item rows make a score (see ``functional.cosine_pool``); arguments as for
        ``session_scores``."""
        raise NotImplementedError

    @property
    def pooled(self) -> bool:
        """Whether scores are those of ``pooling``, of all items with compiled kernels."""
        return type(self).session_scores is SessionBackbone.session_scores

    def session_scores(self, vectors: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        return cosine_pool(*self.pooling(vectors, mask), rows)

    def session_term(self, session: SessionVectors, targets: Targets) -> Tensor | None:
        """A term of the backbone's own added to each client's loss: (C,), or None."""
        return None

    def session_loss(self, session: SessionVectors, targets: Targets) -> Tensor:
        """Cross-entropy of the last item among all items, or among itself and one negative, and ``session_term``."""
        length = targets.real.shape[1]
        if self.whole_tables:
            assert targets.scores is not None  # where tables are whole
            logits, last = targets.scores * self.scale, targets.items[:, length, None]
            loss = logits.logsumexp(1) - logits.gather(1, last).squeeze(1)
        else:
            pair = [length, 2 * length]
            rows, items = targets.rows[:, pair], targets.items[:, pair]
            factor = targets.dropout.of_rows(items, rows.shape[2], self.candidate_dropout, rows.dtype)
            rows = rows if factor is None else rows * factor
            logits = self.session_scores(session.vectors, session.mask, rows) * self.scale
            loss = softplus(-logits[:, 0]) + softplus(logits[:, 1])
        term = self.session_term(session, targets)
        return loss if term is None else loss + term
