"""What a method sees of clients before, while and after they train; ``training/`` implements it.

A view shows C clients at once: the first dimension of every tensor is clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Callable, Iterator

from torch import Tensor

from ..rng import DrawKey, Tables
from .sequential import Sequence


class Local(ABC):
    """What a method sees of C clients before and after they train.

    Attributes:
        users: ids, shape (C,).
        private: the clients' private parameters, each (C, ...), differentiable.
        dense: their copies of public parameters without item rows, each (C, ...), differentiable.
        draw: key of the method's own random numbers.
        kept: what the method keeps of these clients from one of its hooks to the next in the same round.
        loss: (C,). In ``local_loss``, each client's recommendation loss in this local batch, to which the method's
            term is added; differentiable, so that a term of ``(weight - 1) * loss`` weighs it anew. In ``end_local``,
            the mean of each client's losses in its local batches, terms of the method included. No server knows it.
        moved: in ``local_loss``, by how much each client has moved its public parameters since the server sent them
            (with ``init=per_client`` in the first round, since it drew them), each (C, ...), differentiable: of an item
            table the rows that the client holds, in any order, with 0 at repeated ones. Raises PluginError of a method
            that does not declare ``sees_rows``.
        changes: in ``end_local``, what training added to public parameters, by name, and where. Of item tables
            (C, n, ...) and the items, (C, n); an item may be listed twice, all but once with 0. With None for the items
            they are all of them, or the parameter has none, (C, ...). With a basis (``Method.row_basis``) what was
            added to A, (C, n, r).
        step_sizes: in ``end_local``, on lists of items: the learning rates of every parameter summed over the client's
            local batches, each (C,). By plain SGD it has moved by minus that times the mean of its gradients.
    """

    users: Tensor
    private: Tables
    dense: Tables
    draw: DrawKey
    kept: dict[str, Tensor]
    loss: Tensor
    moved: Tables
    changes: dict[str, tuple[Tensor, Tensor | None]]
    step_sizes: Tables

    @abstractmethod
    def known(self, n_users: int) -> Tensor:
        """Positions of the clients that were among the first ``n_users``; looked up once a round, as a GPU has to be
        waited for."""

    @abstractmethod
    def upload(self, name: str, value: Tensor) -> None:
        """Send each client's row of ``value`` (C, ...) to the server, which gets it in ``Method.end_round``. Numbers of
        a floating type are sent with the noise on uploads, whole numbers as they are. Raises PluginError if
        ``Method.uploads`` does not declare it, or with another shape, or if it is a private parameter."""

    @abstractmethod
    def add(self, name: str, value: Tensor | tuple[Tensor, Tensor], items: Tensor | None = None) -> None:
        """In ``end_local``: send each client's row of ``value``, of which the server is given the sum over all clients
        (see ``Method.sums``). ``value``: (C, *shape), or with ``items`` those of its rows that are not 0, (C, n, ...);
        or, without ``items``, a pair of matrices, (C, n, k) and (C, k, m), with all n rows, whose products (C, n, m)
        need not be made then; ``items``: which rows these are, int64 of shape (C, n); rows of one index are added up.
        Raises PluginError if ``Method.sums`` does not declare it, or with another shape."""


class ClientUpdates(ABC):
    """What the N participants of a round have changed of the public parameters, each client's upload by itself, as its
    change against what it downloaded. All of it but ``chunks`` is in ascending order of clients, and nothing depends on
    how they were trained together.

    A client sends what it changed: of an item table the rows that it looked up, and the change of all others is 0. With
    ``upload_noise``, weight decay or a penalty on all rows (``row_penalty``, ``pull``) it sends all of them;
    ``upload_clip`` has scaled them before the noise.

    Attributes:
        users: ids, (N,), ascending.
        weights: of each client in the mean (setting ``weighting``), float64 of shape (N,).
        uploads: what the clients sent besides (see ``Method.uploads``), each (N, ...).
        sent: the public parameters that the clients had downloaded, item tables and dense ones.
        draw: key of the round's random numbers.
    """

    users: Tensor
    weights: Tensor
    uploads: Tables
    sent: Tables
    draw: DrawKey

    @abstractmethod
    def chunks(self) -> Iterator[tuple[Tensor, Tables]]:
        """Some clients after the other, so that memory stays bounded: their positions among the N, (C,), and their
        changes of every public parameter, each (C, ...). It can be asked for several times in a round."""

    @abstractmethod
    def norms(self) -> Tensor:
        """The L2 norm of each client's whole change, float64 of shape (N,)."""

    @abstractmethod
    def products(self) -> Tensor:
        """The inner products of all pairs of clients' whole changes, float64 of shape (N, N)."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor) -> Tables:
        """The sum of all changes, each client's times its factor, (N,)."""

    @abstractmethod
    def coordinatewise(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tables:
        """What a function makes of each number of the public parameters by itself. ``function``: of the changes (N, n)
        of some n numbers, its own to write to, and whether each client sent them, bool (N, n), which is all of dense
        parameters; it gives (n,). It is called on several threads."""


class LocalBatch(Local):
    """What a method sees of C clients in one local batch on lists of items.

    ``scores``, ``labels``, ``weights`` and ``mask`` have the same n columns. A client with fewer samples than others
    has *padded* columns among them; rows of replayed items and of samples of other local batches may be there too. All
    of these have mask False, weight 0 and label 0, and their scores mean nothing: multiply by ``weights``, or by
    ``mask``, before taking a sum over columns. A client may have no sample in a local batch: divide by no sum of them
    without ``clamp``.

    Attributes:
        scores: logits of the local rows that the batch scores, (C, n), differentiable.
        labels: what the scores are trained to: 1 for positives, 0 for negatives, of explicit feedback the rating;
            (C, n). Raises UserError of a backbone that makes samples of its own (RecBole's), as ``weights`` and
            ``mask`` do.
        weights: what each score counts in the client's loss, (C, n): pointwise losses are the mean over samples, so the
            sum over columns is 1, and an item that is drawn twice counts twice. Of a pairwise loss, the sum of the
            weights of the pairs that the score is in, so that positives and negatives sum to 1 each.
        items: of which item each score is, int64 of shape (C, n).
        rows: the clients' own public item rows that the scores are made of, each (C, n, ...), differentiable. Raises
            PluginError of a method that does not declare ``sees_rows``.
        moved_items: of which item each row of ``moved`` is, int64 of shape (C, m).
    """

    scores: Tensor
    labels: Tensor
    weights: Tensor
    items: Tensor
    rows: Tables
    moved_items: Tensor

    @property
    def mask(self) -> Tensor:
        """Whether a column is a sample of the client's in this batch, bool of shape (C, n)."""
        return self.weights > 0.0

    @abstractmethod
    def replay_scores(self, clients: Tensor) -> Tensor:
        """Logits of the method's ``replayed_items`` for some clients, differentiable. ``clients``: positions in
        ``users``, shape (K,). Returns shape (K, n)."""

    @abstractmethod
    def all_scores(self, clients: Tensor) -> Tensor:
        """Logits of all items under the current local models of some clients, not differentiable. ``clients``:
        positions in ``users``, shape (K,). Returns shape (K, items)."""

    @abstractmethod
    def ranks(self, clients: Tensor, items: Tensor) -> Tensor:
        """1-based ranks of some items among all under the current local models of some clients, as 1 + the number of
        items that score higher. Many clients are scored in pieces, so that memory stays bounded. ``clients``: positions
        in ``users``, shape (K,); ``items``: int64 of shape (K, n). Returns int64 of shape (K, n)."""


@dataclass(frozen=True)
class Replayed:
    """The sessions that C clients replay, at most K each."""

    sessions: Tensor  # their numbers among the client's training sessions, (C, K); -1: a client has fewer
    items: Tensor  # the last L + 1 of each, padded in front with its first, (C, K, L + 1)
    real: Tensor  # at which of the first L positions there is one, which the next position's follows, (C, K, L)


class LocalSessions(Local):
    """What a method sees of C clients that train a sequential backbone; its draws' ``batch`` is the epoch.

    Attributes:
        sequence: of the session they train on; next_sequence: of the one that comes next, if the method
            ``encodes_next_session``.
        items: the last L + 1 items of the session they train on, padded in front with its first, (C, L + 1).
        replayed: the sessions that the method replays (``Method.replayed_sessions``); None if there are none.
        session: the number of that session among the client's training sessions, shape (C,).
        features: the encoder's representations in the latest forward pass, (C, L, d), differentiable.
    """

    sequence: Sequence
    next_sequence: Sequence | None
    items: Tensor
    replayed: Replayed | None
    session: Tensor
    features: Tensor | None

    @abstractmethod
    def encode(self) -> Tensor:
        """Representations of the session under the clients' present models without dropout: (C, L, d)."""

    @abstractmethod
    def encode_next(self, dropout: bool = True) -> Tensor:
        """Representations of each client's next session under its present model, of a backbone that remembers nothing
        of its clients: (C, L, d)."""

    @abstractmethod
    def replay(self, dropout: bool = True) -> Tensor:
        """Representations of the replayed sessions under the clients' present models, differentiable, (C, K, M, d) with
        M vectors of each session; 0 where a client has fewer sessions."""

    @abstractmethod
    def replay_scores(self, vectors: Tensor) -> Tensor:
        """Logits of the items of the replayed sessions, as they stand there, under the clients' present models.
        ``vectors``: (C, n, d). Returns (C, n, K (L + 1)), differentiable."""
