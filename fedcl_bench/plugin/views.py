"""What a method sees of clients before, while and after they train; ``training/`` implements it.

A view shows C clients at once: the first dimension of every tensor is clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
        loss: in ``end_local``, the mean of each client's losses in its local batches, (C,); no server knows it.
    """

    users: Tensor
    private: Tables
    dense: Tables
    draw: DrawKey
    kept: dict[str, Tensor]
    loss: Tensor

    @abstractmethod
    def known(self, n_users: int) -> Tensor:
        """Positions of the clients that were among the first ``n_users``; looked up once a round, as a GPU has to be
        waited for."""

    @abstractmethod
    def upload(self, name: str, value: Tensor) -> None:
        """Send each client's row of ``value`` (C, ...) to the server, which gets it in ``Method.end_round``.

        Numbers of a floating type are sent with the noise on uploads, whole numbers as they are.

        Raises:
            PluginError: if ``Method.uploads`` does not declare it, or with another shape, or if it is a private
                parameter.
        """


class ClientUpdates(ABC):
    """What the N participants of a round have changed of the public parameters, each client's upload by itself, as its
    change against what it downloaded. All of it but ``chunks`` is in ascending order of clients, and nothing depends on
    how they were trained together.

    A client sends what it changed: of an item table the rows that it looked up, and the change of all others is 0. With
    ``upload_noise`` it sends all of them, with noise on each number; ``upload_clip`` has scaled them before.

    Attributes:
        users: ids, (N,), ascending.
        weights: of each client in the mean (setting ``weighting``), float64 of shape (N,).
        uploads: what the clients sent besides (see ``Method.uploads``), each (N, ...).
    """

    users: Tensor
    weights: Tensor
    uploads: Tables

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
        """What a function makes of each number of the public parameters by itself.

        Args:
            function: of the changes (N, n) of some n numbers, its own to write to, and whether each client sent them,
                bool (N, n), which is all of dense parameters; it gives (n,). It is called on several threads.
        """


class LocalBatch(Local):
    """What a method sees of C clients in one local batch on lists of items."""

    @property
    @abstractmethod
    def scores(self) -> Tensor:
        """Logits of the local rows that the batch scores, (C, n), differentiable."""

    @abstractmethod
    def replay_scores(self, clients: Tensor) -> Tensor:
        """Logits of the method's ``replayed_items`` for some clients, differentiable.

        Args:
            clients: positions in ``users``, shape (K,).

        Returns:
            Shape (K, n).
        """

    @abstractmethod
    def all_scores(self, clients: Tensor) -> Tensor:
        """Logits of all items under the current local models of some clients, not differentiable.

        Args:
            clients: positions in ``users``, shape (K,).

        Returns:
            Shape (K, items).
        """

    @abstractmethod
    def ranks(self, clients: Tensor, items: Tensor) -> Tensor:
        """1-based ranks of some items among all under the current local models of some clients, as 1 + the number of
        items that score higher. Many clients are scored in pieces, so that memory stays bounded.

        Args:
            clients: positions in ``users``, shape (K,).
            items: int64 of shape (K, n).

        Returns:
            int64 of shape (K, n).
        """


class LocalSessions(Local):
    """What a method sees of C clients that train a sequential backbone; its draws' ``batch`` is the epoch.

    Attributes:
        sequence: of the session they train on; next_sequence: of the one that comes next, if the method
            ``encodes_next_session``.
        session: the number of that session among all training sessions, shape (C,).
        features: the encoder's representations in the latest forward pass, (C, L, d), differentiable.
        recommendation: the recommendation loss of that pass, shape (C,).
    """

    sequence: Sequence
    next_sequence: Sequence | None
    session: Tensor
    features: Tensor | None
    recommendation: Tensor | None

    @abstractmethod
    def encode(self) -> Tensor:
        """Representations of the session under the clients' present models without dropout: (C, L, d)."""

    @abstractmethod
    def encode_next(self, dropout: bool = True) -> Tensor:
        """Representations of each client's next session under its present model: (C, L, d)."""
