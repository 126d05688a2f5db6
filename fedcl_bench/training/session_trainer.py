"""Local training on sessions: in a round each client trains a sequential backbone on its next one.

Inputs are a session's items but the last, targets its items but the first, both the last ``max_length`` of them; every
target has one sampled negative. Where the loss concerns all items (``whole_tables``), each client has a copy of the
whole item table, and fewer clients are trained at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from .. import rng
from ..kernels import ops
from ..plugin import checks, views
from ..data.stream import Sessions, Step, TrainingStep
from ..rng import DrawKey, Tables
from ..plugin.backbone import ITEM
from ..plugin.method import Encoding
from ..plugin.state import Snapshot, with_trailing_dims
from ..core.parallel import even_pieces
from .sampling import Others, padded
from ..plugin.sequential import OUTPUT, Dropout, Sequence, SequentialBackbone, Targets
from ..core.tuning import SIZES
from .chunk_trainer import ChunkTrainer, Slots, TrainerView, row_penalties
from .optimisers import BETA1, stacked_optimiser
from .strategies import Strategy, Training


@dataclass(frozen=True)
class SessionChunk:
    """Clients trained together on one session each."""

    users: Tensor  # int64 ids, shape (C,)
    sessions: Sessions  # all training sessions
    others: Others  # the items each client never trains on: what negatives are drawn from
    batches: int = 1  # local batches per epoch: a session is one


def clients_at_once(backbone: SequentialBackbone, n_items: int) -> int:
    """The most clients of a chunk."""
    each = sum(math.prod(start.shape) for start in backbone.dense_starts().values())
    most = SIZES.chunk_parameters
    if backbone.whole_tables:
        most = SIZES.chunk_tables
        each += n_items * sum(math.prod(start.shape) for start in backbone.item_starts(n_items).values())
        each += n_items * (backbone.settings.dim + 1) * backbone.private_output
    return max(1, min(SIZES.chunk_sessions, most // max(each, 1)))


def make_session_chunks(step: Step, users: Tensor, chunk_clients: int = SIZES.chunk_sessions) -> list[SessionChunk]:
    """Group a round's participants, each of whom has at least one training session, into chunks of equal size."""
    return [SessionChunk(group, step.sessions["train"], Others.of(padded(step.train, group), step.n_items))
            for group in even_pieces(users, chunk_clients)]


def clipped(gradients: list[Tensor | None], norm: float) -> list[Tensor | None]:
    """Gradients, each (C, ...), scaled down so that the L2 norm of all of a client's together is at most ``norm``."""
    squares = sum(gradient.flatten(1).square().sum(1) for gradient in gradients if gradient is not None)
    factors = (norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    return [None if gradient is None else gradient * with_trailing_dims(factors, gradient) for gradient in gradients]


def window(sessions: Sessions, chosen: Tensor, length: int) -> tuple[Tensor, Sequence]:
    """The last ``length`` + 1 items of some sessions, and what the encoder sees of them as an input sequence. Returns
    (items of shape (C, length + 1), padded in front with the session's first item; the sequence of the first ``length``
    of them)."""
    items, times, real = sessions.tail(chosen, length + 1)
    inputs = real[:, :-1]
    return items, Sequence(inputs, times[:, :-1] * inputs, items[:, :-1].where(inputs, -1))


def with_negatives(items: Tensor, real: Tensor, others: Others, keys: Tensor) -> Tensor:
    """Items (C, L + 1) of a ``window`` and then a negative for every target, drawn with ``keys`` (C,): (C, 2 L + 1)."""
    position = torch.arange(real.shape[1], device=items.device)
    negatives = others.at(rng.integers(rng.bits(keys[:, None], position), others.count))
    return torch.cat([items, torch.where(real, negatives, items[:, :1])], 1)


def session_losses(backbone: SequentialBackbone, tables: Tables, step: TrainingStep, chosen: Tensor, draw: DrawKey
                   ) -> Tensor:
    """The losses of some training sessions under one set of parameters, (n,): each is that of a client which trains on
    the session. For backbones whose loss is of samples. ``tables``: the public parameters, item tables and dense ones;
    ``chosen``: numbers of sessions, (n,); ``draw``: key of the round; negatives and dropout are each session's own."""
    sessions, length = step.sessions["train"], backbone.settings.max_length
    items, sequence = window(sessions, chosen, length)
    owners = torch.searchsorted(sessions.of_user, chosen, right=True) - 1
    negatives, dropped = (rng.row_keys(rng.key(draw.seed, f"{name} of sessions", draw.step, draw.round), chosen)
                          for name in ("negatives", "dropout"))
    sampled = with_negatives(items, sequence.real, Others.of(padded(step.train, owners), step.n_items), negatives)
    rows, dropout = embedding(sampled, tables[ITEM]), Dropout(dropped)
    clients = {name: table.expand(len(chosen), *table.shape) for name, table in tables.items() if name != ITEM}
    session = backbone.session_vectors(clients, rows[:, :length] * sequence.real.unsqueeze(2), sequence, dropout)
    return backbone.session_loss(session, Targets(rows, sampled, sequence.real, None, dropout))


def input_rows(backbone: SequentialBackbone, model: Snapshot, users: Tensor, sequence: Sequence) -> Tensor:
    """The item rows that ``session_vectors`` reads of some users' sequences under the server's table: (C, L + n, d)."""
    real = sequence.real
    rows = embedding(sequence.items.clamp(min=0), model.public[ITEM]) * real.unsqueeze(2)
    memory = {name: table[users] for name, table in model.client_context.items()}
    more = backbone.more_items(memory, sequence)
    return rows if more is None else torch.cat([rows, embedding(more, model.public[ITEM])], 1)


@dataclass(frozen=True)
class Replays:
    """The sessions that C clients replay: those that there are, end to end."""

    seen: views.Replayed  # as methods see them
    # Whose each is, its place among the client's, and its number, (P,)
    owner: Tensor
    column: Tensor
    number: Tensor
    sequence: Sequence  # of them as inputs

    @staticmethod
    def of(sessions: Sessions, users: Tensor, numbers: Tensor, length: int, instead: Tensor) -> "Replays | None":
        """Of a method's ``replayed_sessions``, (C, K), in as few columns as hold them; None if there are none.
        ``instead``: items that each client holds, (C,), in the place of those of sessions that are not there."""
        owner, column = (numbers >= 0).nonzero().T
        if not len(owner):
            return None
        numbers = numbers[:, :int(column.max()) + 1]
        chosen = numbers[owner, column]
        found, sequence = window(sessions, sessions.of_user[users[owner]] + chosen, length)
        items = instead[:, None, None].expand(*numbers.shape, length + 1).index_put((owner, column), found)
        real = torch.zeros_like(items[:, :, 1:], dtype=torch.bool).index_put((owner, column), sequence.real)
        return Replays(views.Replayed(numbers, items, real), owner, column, chosen, sequence)


class SessionView(TrainerView, views.LocalSessions):
    """``views.LocalSessions`` of a trainer's clients."""

    def __init__(self, trainer: "SessionTrainer"):
        super().__init__(trainer, trainer.draw)
        self.sequence, self.next_sequence, self.session = trainer.sequence, trainer.next_sequence, trainer.session
        self.items = trainer.items
        self.replayed = None if trainer.replays is None else trainer.replays.seen
        self.features: Tensor | None = None

    def encode(self) -> Tensor:
        slots, length, samples = self._trainer.slots.sample, self.sequence.real.shape[1], self._trainer.sampled.shape[1]
        more = [slots[:, samples:]] if slots.shape[1] > samples else []
        return self._encoded(slots[:, :length], self.sequence, Dropout(), *more)

    def encode_next(self, dropout: bool = True) -> Tensor:
        trainer = self._trainer
        keys = self.draw.clients("dropout of the next session", self.users) if dropout else None
        following = trainer.slots.replay[:, :self.next_sequence.real.shape[1]]
        return self._encoded(following, trainer.next_sequence, Dropout(keys))

    def replay(self, dropout: bool = True) -> Tensor:
        trainer, backbone, replays = self._trainer, self._trainer.backbone, self._trainer.replays
        keys, real = None, replays.sequence.real
        if dropout:
            keys = rng.bits(self.draw.clients("dropout of replayed sessions", self.users)[replays.owner],
                            replays.number)
        rows = trainer.inputs(trainer.replayed_slots)
        rows = rows.view(*replays.seen.items.shape, -1)[replays.owner, replays.column, :-1]
        clients = {name: table[replays.owner] for name, table in {**trainer.clients, **trainer.client_context}.items()
                   if name not in trainer.personal}
        vectors = backbone.session_vectors(clients, rows * real.unsqueeze(2), replays.sequence, Dropout(keys)).vectors
        empty = vectors.new_zeros(*replays.seen.sessions.shape, *vectors.shape[1:])
        return empty.index_put((replays.owner, replays.column), vectors)

    def replay_scores(self, vectors: Tensor) -> Tensor:
        trainer, backbone = self._trainer, self._trainer.backbone
        own = {OUTPUT: trainer.private[OUTPUT]} if backbone.private_output else {ITEM: trainer.rows[ITEM]}
        (rows,) = trainer.gather(trainer.replayed_slots, own).values()
        return backbone.with_constant(vectors) @ rows.transpose(1, 2)

    @torch.no_grad()
    def _encoded(self, slots: Tensor, sequence: Sequence, dropout: Dropout, *more: Tensor) -> Tensor:
        """``more``: slots of more items, which follow the session's."""
        trainer = self._trainer
        inputs = torch.cat([trainer.inputs(slots) * sequence.real.unsqueeze(2), *map(trainer.inputs, more)], 1)
        clients = {**self.dense, **trainer.client_context, **trainer.derived}
        return trainer.backbone.session_vectors(clients, inputs, sequence, dropout).vectors


class SessionTrainer(ChunkTrainer):
    """Local training of one chunk on the session of a round. ``derived``: what every client makes of what it received
    (see ``SequentialBackbone.derive``)."""

    def __init__(self, chunk: SessionChunk, model: Snapshot, training: Training, draw: DrawKey,
                 derived: Tables | None = None):
        length, sessions, users = training.backbone.settings.max_length, chunk.sessions, chunk.users
        now = sessions.in_round(users, draw.round)
        self.session = now - sessions.of_user[users]
        self.items, self.sequence = window(sessions, now, length)
        keys = rng.client_keys(rng.key(draw.seed, "negatives", draw.step, draw.round), users)
        others, self.next_sequence = [], None
        if training.method.encodes_next_session:
            following, self.next_sequence = window(sessions, sessions.in_round(users, draw.round + 1), length)
            others.append(following[:, :-1])
        self.replays, numbers = None, training.method.replayed_sessions(users, draw)
        if numbers is not None:
            checks.check_sessions(training.method, numbers, sessions.count[users], draw.round)
            self.replays = Replays.of(sessions, users, numbers, length, self.items[:, 0])
        if self.replays is not None:
            others.append(self.replays.seen.items.flatten(1))
        replayed = torch.cat(others, 1) if others else None
        layout = Slots.whole if training.backbone.whole_tables else Slots.touched
        self.sampled = with_negatives(self.items, self.sequence.real, chunk.others, keys)
        memory = {name: table[users] for name, table in model.client_context.items()}
        more = training.backbone.more_items(memory, self.sequence)
        looked_up = self.sampled if more is None else torch.cat([self.sampled, more], 1)
        slots = layout(looked_up, length + 1, replayed, model.n_items)
        self.compiled = training.strategy is Strategy.COMPILED_SOFTMAX
        super().__init__(users, slots, model, training, draw)
        self.derived = {name: table.expand(len(users), *table.shape) for name, table in (derived or {}).items()}
        self.tables: ops.CosineTables | None = None
        self.looked_up: Tensor | None = None  # rows of the samples in the latest forward pass

    @property
    def replayed_slots(self) -> Tensor:
        """Where the items of the replayed sessions are, (C, K (L + 1))."""
        items = self.replays.seen.items
        return self.slots.replay[:, self.slots.replay.shape[1] - items.shape[1] * items.shape[2]:]

    def inputs(self, slots: Tensor) -> Tensor:
        """Item rows at slots (C, n): (C, n, d)."""
        rows = self.rows[ITEM]
        return self.gather(slots)[ITEM] if rows.is_contiguous() else embedding(slots, rows[0])

    def _own_copies(self):
        if not self.compiled:
            return super()._own_copies()
        return {name: table.expand(len(self.users), *table.shape) for name, table in self.model.public.items()}

    def upload_first(self) -> Tables:
        """What the method uploads before training, each (C, ...)."""
        self.method.before_training(SessionView(self))
        checks.check_sent(self.method, self.declared, self.uploads)
        return self.uploads

    def train(self) -> Tensor:
        """Run all local epochs, each one batch: the whole session. Leaves the trained parameters in ``rows``,
        ``private`` and ``dense``, in ``moved`` what the public ones changed by (all of them, if the clients began with
        their own), and in ``replaced`` the private ones. Returns each client's loss averaged over the epochs, shape
        (C,)."""
        local = SessionView(self)  # not kept here: in a circle they would live until Python looks for such
        self.method.begin_local(local)
        self.penalties = row_penalties(self.method, self.rows)
        loss = local.loss = self._epochs(local)
        self.method.end_local(local)
        held = self.own_rows
        self.replaced = {name: values for name, values in self.private.items() if name not in held}
        for name, rows in held.items():
            self.moved[name] = (rows - self._rows_held(self.personal[name])) * self.slots.first_copy.unsqueeze(2)
        for name in self.dense:
            self.moved[name] = self.dense[name] if name in self.moved else self.dense[name] - self.model.dense[name]
        for name, rows in self.rows.items():
            self.moved[name] = self._moved(name, rows)
        return loss

    def _moved(self, name: str, rows: Tensor) -> Tensor:
        """What the clients' item rows changed by, (C, slots, ...); they themselves if the clients began with their
        own."""
        sent = self.model.public[name]
        if self.all_rows:
            return rows if name in self.moved else rows.sub_(sent)
        if name not in self.moved:
            rows = rows - embedding(self.slots.items, sent)
        return rows * self.slots.first_copy.unsqueeze(2)

    def _epochs(self, local: SessionView) -> Tensor:
        """Update all parameters in place; returns as ``train``."""
        parameters, step = dict(self.clients) if self.compiled else {**self.clients, **self.rows}, None
        rates = {**dict.fromkeys(parameters, self.backbone.settings.lr),
                 **self.backbone.learning_rates(self.n_items, self.draw.round)}
        if self.compiled:
            betas = BETA1, self.settings.adam_beta2
            self.tables = ops.CosineTables(self.rows[ITEM], rates[ITEM], betas, self.settings.adam_eps)
        total = torch.zeros(len(self.users), dtype=torch.float64, device=self.users.device)
        for epoch in range(self.settings.local_epochs):
            for value in parameters.values():
                value.requires_grad_()
            loss = self._loss(local, epoch)
            checks.require_gradient(self.backbone, loss)
            gradients = self._gradients(loss, parameters)
            if self.pulls:
                made = {name: torch.zeros_like(value) if gradient is None else gradient
                        for (name, value), gradient in zip(parameters.items(), gradients)}
                with torch.no_grad():
                    gradients = list(self._with_pulls(made, parameters).values())
            if self.backbone.gradient_norm > 0.0:
                gradients = clipped(gradients, self.backbone.gradient_norm)
            if epoch == self.draw.round == 0:
                of_scores = [self.tables.of_scores] if self.tables else []  # move all item rows
                checks.check_moved(self.backbone, "encode", [*gradients, *of_scores], parameters.values(), self.users)
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
        rows = self.inputs(self.slots.sample)  # of the session's items, of the negatives, and of more items
        if self.compiled:  # they are cut off, and take their step by ``step_held``
            rows = rows.detach().requires_grad_()
        self.looked_up = rows
        dropout = Dropout(local.draw.clients("dropout", self.users))
        inputs, samples = rows[:, :length] * real.unsqueeze(2), self.sampled.shape[1]
        if rows.shape[1] > samples:  # those of more items come last
            rows, more = rows.split([samples, rows.shape[1] - samples], 1)
            inputs = torch.cat([inputs, more], 1)
        clients = {**self.clients, **self.client_context, **self.derived}
        session = self.backbone.session_vectors(clients, inputs, self.sequence, dropout)
        hook, vectors, meaning = "encode", length, "(C, L, d): one vector per position"
        if not self.backbone.positionwise:
            hook, vectors, meaning = "session_vectors", self.backbone.n_vectors, "(C, M, d): M vectors of the session"
        shape = len(real), vectors, self.backbone.settings.dim
        checks.check_tensor(self.backbone, hook, session.vectors, shape, meaning)
        local.features = session.vectors
        outputs = self.method.represent(Encoding(self.users, self.clients, local.features, real, "train", local.draw))
        checks.check_tensor(self.method, "represent", outputs, shape, meaning)
        outputs = self.backbone.with_constant(outputs)
        scores = self._all_scores(outputs, session.mask, dropout) if self.all_rows else None
        if self.backbone.private_output:
            rows = self.gather(self.slots.sample[:, :samples], {OUTPUT: self.private[OUTPUT]})[OUTPUT]
        targets = Targets(rows, self.sampled, real, scores, dropout)
        loss = local.loss = self.backbone.session_loss(replace(session, vectors=outputs), targets)
        checks.check_tensor(self.backbone, "session_loss", loss, (len(real),), "(C,): one number per client")
        extra = self.method.local_loss(local)
        if extra is not None:
            checks.check_tensor(self.method, "local_loss", extra, (len(real),), "(C,): one number per client")
            loss = loss + extra
        return loss + self._penalty()

    def _all_scores(self, outputs: Tensor, mask: Tensor, dropout: Dropout) -> Tensor:
        """Scores of all items by the clients' own tables, (C, items), for a loss that concerns every item."""
        backbone = self.backbone
        table = self.private[OUTPUT] if backbone.private_output else self.rows[ITEM]
        if self.tables is not None:
            self.tables.score(backbone.pooling(outputs, mask), dropout.keys, backbone.candidate_dropout)
            return self.tables.scores
        factor = dropout.of_rows(torch.arange(self.n_items, device=mask.device), table.shape[2],
                                 backbone.candidate_dropout, table.dtype)
        scores = backbone.session_scores(outputs, mask, table if factor is None else table * factor)
        checks.check_tensor(backbone, "session_scores", scores, table.shape[:2], "(C, n): a score per client and item")
        return scores

    def _gradients(self, loss: Tensor, parameters: Tables) -> list[Tensor | None]:
        """Gradients of the summed losses with respect to all parameters; a compiled table takes its step here."""
        own = self.tables
        if own is None:
            return list(torch.autograd.grad(loss.sum(), list(parameters.values()), allow_unused=True))
        of_scores, = torch.autograd.grad(loss.sum(), [own.scores], retain_graph=True, allow_unused=True,
                                         materialize_grads=True)
        of_vectors = own.step(of_scores, self.slots.sample)
        of_rows, *gradients = torch.autograd.grad(
            [loss.sum(), own.vectors], [self.looked_up, *parameters.values()], [None, of_vectors], allow_unused=True)
        own.step_held(torch.zeros_like(self.looked_up) if of_rows is None else of_rows)
        self.rows[ITEM] = own.table
        return gradients
