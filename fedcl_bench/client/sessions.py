"""Local training on sessions: in a round each client trains a sequential backbone on its next one.

Inputs are a session's items but the last, targets its items but the first, both the last ``max_length`` of them; every
target has one sampled negative.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from .. import contract, draws, views
from ..data.stream import Sessions, Step
from ..draws import DrawKey
from ..functional import target_logits
from ..layers import ITEM
from ..method import Encoding
from ..model import Snapshot
from ..parallel import even_pieces
from ..sampling import Others, padded
from ..sequential import Dropout, Sequence
from ..sizes import SIZES
from .base import ChunkTrainer, Slots, TrainerView, row_penalties
from .optim import stacked_optimiser
from .ways import Training


@dataclass(frozen=True)
class SessionChunk:
    """Clients trained together on one session each.

    Attributes:
        users: int64 ids, shape (C,).
        sessions: all training sessions.
        others: the items each client never trains on: what negatives are drawn from.
        batches: local batches per epoch: a session is one.
    """

    users: Tensor
    sessions: Sessions
    others: Others
    batches: int = 1

    def part(self, clients: slice) -> "SessionChunk":
        """Some of the clients; what they draw and train on is the same."""
        return replace(self, users=self.users[clients], others=self.others.part(clients))


def make_session_chunks(step: Step, users: Tensor, chunk_clients: int = SIZES.chunk_sessions) -> list[SessionChunk]:
    """Group a round's participants, each of whom has at least one training session, into chunks of equal size."""
    listed = len(users) * step.n_items <= SIZES.listed_others
    return [SessionChunk(group, step.sessions["train"], Others.of(padded(step.train, group), step.n_items, listed))
            for group in even_pieces(users, chunk_clients)]


def window(sessions: Sessions, chosen: Tensor, length: int) -> tuple[Tensor, Sequence]:
    """The last ``length`` + 1 items of some sessions, and what the encoder sees of them as an input sequence.

    Returns:
        (items of shape (C, length + 1), padded in front with the session's first item; the sequence of the first
        ``length`` of them).
    """
    items, times, real = sessions.tail(chosen, length + 1)
    inputs = real[:, :-1]
    return items, Sequence(inputs, times[:, :-1] * inputs)


def session_loss(positive: Tensor, negative: Tensor, real: Tensor) -> Tensor:
    """Recommendation loss: mean cross-entropy of the targets plus that of their negatives, over real positions.

    Args:
        positive, negative: logits, (C, L); real: bool, (C, L).

    Returns:
        Shape (C,).
    """
    each = torch.nn.functional.softplus(-positive) + torch.nn.functional.softplus(negative)
    return (each * real).sum(1) / real.sum(1)


class SessionView(TrainerView, views.LocalSessions):
    """``views.LocalSessions`` of a trainer's clients."""

    def __init__(self, trainer: "SessionTrainer"):
        super().__init__(trainer, trainer.draw)
        self.sequence, self.session = trainer.sequence, trainer.session
        self.features: Tensor | None = None
        self.recommendation: Tensor | None = None

    def encode(self) -> Tensor:
        trainer = self._trainer
        inputs = trainer.inputs(trainer.slots.sample[:, :self.sequence.real.shape[1]])
        return self._encoded(inputs, self.sequence, Dropout())

    def encode_next(self, dropout: bool = True) -> Tensor:
        trainer = self._trainer
        keys = self.draw.clients("dropout of the next session", self.users) if dropout else None
        return self._encoded(trainer.inputs(trainer.slots.replay), trainer.next_sequence,
                             Dropout(keys, trainer.dropped))

    @torch.no_grad()
    def _encoded(self, inputs: Tensor, sequence: Sequence, dropout: Dropout) -> Tensor:
        return self._trainer.backbone.encode(self.dense, inputs * sequence.real.unsqueeze(2), sequence, dropout)


class SessionTrainer(ChunkTrainer):
    """Local training of one chunk on the session of a round."""

    def __init__(self, chunk: SessionChunk, model: Snapshot, training: Training, draw: DrawKey):
        length, sessions, users = training.backbone.settings.max_length, chunk.sessions, chunk.users
        self.session = sessions.in_round(users, draw.round)
        self.items, self.sequence = window(sessions, self.session, length)
        keys = draws.client_keys(draws.key(draw.seed, "negatives", draw.step, draw.round), users)[:, None]
        position = torch.arange(length, device=users.device)
        negatives = chunk.others.at(draws.integers(draws.bits(keys, position), chunk.others.count))
        negatives = torch.where(self.sequence.real, negatives, self.items[:, :1])
        replayed = None
        if training.method.encodes_next_session:
            following, self.next_sequence = window(sessions, sessions.in_round(users, draw.round + 1), length)
            replayed = following[:, :-1]
        slots = Slots.touched(torch.cat([self.items, negatives], 1), length + 1, replayed, model.n_items)
        super().__init__(users, slots, model, training, draw)
        self.dropped: tuple[int, ...] = ()  # the entries that each dropout of a forward pass decides about

    def inputs(self, slots: Tensor) -> Tensor:
        """Item rows at slots (C, n): (C, n, d)."""
        return self.gather(slots)[ITEM]

    def train(self) -> Tensor:
        """Run all local epochs, each one batch: the whole session. Leaves the trained parameters in ``rows``,
        ``private`` and ``dense``, in ``moved`` what the public ones changed by (all of them, if the clients began with
        their own), and in ``replaced`` the private ones.

        Returns:
            Each client's loss averaged over the epochs, shape (C,).
        """
        local = SessionView(self)  # not kept here: in a circle they would live until Python looks for such
        self.method.begin_local(local)
        self.penalties = row_penalties(self.method, self.rows)
        loss = self._epochs(local)
        self.method.end_local(local)
        self.replaced = self.private
        for name in self.dense:
            self.moved[name] = self.dense[name] if name in self.moved else self.dense[name] - self.model.dense[name]
        for name, rows in self.rows.items():
            if name not in self.moved:
                rows = rows - embedding(self.slots.items, self.model.public[name])
            self.moved[name] = rows * self.slots.first_copy.unsqueeze(2)
        return loss

    def _epochs(self, local: SessionView) -> Tensor:
        """Update all parameters in place; returns as ``train``."""
        parameters, step = {**self.clients, **self.rows}, None
        rates = {**dict.fromkeys(parameters, self.backbone.settings.lr),
                 **self.backbone.learning_rates(self.n_items, self.draw.round)}
        total = torch.zeros(len(self.users), dtype=torch.float64, device=self.users.device)
        for epoch in range(self.settings.local_epochs):
            for value in parameters.values():
                value.requires_grad_()
            loss = self._loss(local, epoch)
            contract.require_gradient(self.backbone, loss)
            gradients = torch.autograd.grad(loss.sum(), list(parameters.values()), allow_unused=True)
            if epoch == self.draw.round == 0:
                contract.check_moved(self.backbone, "encode", gradients, parameters.values(), self.users)
            if step is None:
                if not self.starts_alone:  # all looked at the server's: fewer numbers to read in the first epoch
                    self.part_dense()
                    parameters |= self.dense
                step = stacked_optimiser(parameters, rates, self.settings)
            for value in parameters.values():
                value.requires_grad_(False)
            step(gradients)
            total += loss.detach()
            gradients = None  # their memory is the next epoch's
        return total / self.settings.local_epochs

    def _loss(self, local: SessionView, epoch: int) -> Tensor:
        """Each client's loss in an epoch, shape (C,)."""
        real, length = self.sequence.real, self.sequence.real.shape[1]
        local.draw = replace(self.draw, batch=epoch)
        rows = self.inputs(self.slots.sample)  # of the session's items, then of the negatives
        dropout = Dropout(local.draw.clients("dropout", self.users), self.dropped)
        local.features = self.backbone.encode(self.clients, rows[:, :length] * real.unsqueeze(2), self.sequence,
                                              dropout)
        self.dropped = dropout.entries
        shape, meaning = (len(real), length, self.backbone.settings.dim), "(C, L, d): one vector per position"
        contract.check_tensor(self.backbone, "encode", local.features, shape, meaning)
        outputs = self.method.represent(Encoding(self.users, self.clients, local.features, "train", local.draw))
        contract.check_tensor(self.method, "represent", outputs, shape, meaning)
        loss = local.recommendation = session_loss(*target_logits(outputs, rows), real)
        extra = self.method.local_loss(local)
        if extra is not None:
            contract.check_tensor(self.method, "local_loss", extra, (len(real),), "(C,): one number per client")
            loss = loss + extra
        return loss + self._penalty()
