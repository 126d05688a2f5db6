"""Training of a client that holds many users' sessions, as session recommenders are trained in their own papers.

It holds all sessions, or is a domain. A sample is a beginning of a session, whose last item is to be predicted among
all items, or all of its domain. A mini-batch is many samples that share all parameters, and one optimiser takes a step
for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Callable, Iterator, Sequence as Several

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding

from ..plugin import checks
from ..data.stream import Prefixes, Sessions
from ..rng import DrawKey, Tables
from ..plugin.backbone import ITEM
from ..plugin.state import Snapshot
from ..plugin.local_settings import LocalSettings
from ..plugin.sequential import Dropout, Sequence, SequentialBackbone, SessionBackbone, SessionVectors, Targets
from ..core.tuning import SIZES
from .mini_batches import MiniBatches, Point
from .session_trainer import window


def samples_at(backbone: SequentialBackbone, samples: Sessions | Prefixes, chosen: Tensor) -> tuple[Tensor, Sequence]:
    """``window`` of some samples, without columns that are padding in all of them, unless the backbone ``pads``."""
    items, sequence = window(samples, chosen, backbone.settings.max_length)
    if backbone.pads:
        return items, sequence
    first = sequence.real.shape[1] - int(sequence.real.sum(1).max())
    return items[:, first:], Sequence(sequence.real[:, first:], sequence.times[:, first:], sequence.items[:, first:])


def encode(backbone: SequentialBackbone, model: Snapshot, sequence: Sequence, dropout: Dropout,
           derived: Tables | None = None) -> SessionVectors:
    """What the backbone makes of samples that share all parameters, differentiable with respect to them.

    Args:
        derived: what it makes of the parameters before an epoch (see ``SequentialBackbone.derive``).
    """
    count, table = len(sequence.real), model.public[ITEM]
    clients = {name: value.expand(count, *value.shape) for name, value in model.dense.items()}
    memory = {name: value.expand(count, *value.shape[1:]) for name, value in model.memory.items()}
    memory |= {name: value.expand(count, *value.shape) for name, value in (derived or {}).items()}
    inputs = embedding(sequence.items.clamp(min=0), table) * sequence.real.unsqueeze(2)
    more = backbone.more_items(memory, sequence)
    inputs = inputs if more is None else torch.cat([inputs, embedding(more, table)], 1)
    return backbone.session_vectors(clients | memory, inputs, sequence, dropout)


def score(backbone: SequentialBackbone, session: SessionVectors, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of all items, a group of samples with similar numbers of vectors at a time.

    Args:
        rows: of all items, (items, d).

    Yields:
        (which samples, (n,); their scores, (n, items)).
    """
    order = session.mask.sum(1).argsort(stable=True)
    vectors, mask = session.vectors, session.mask
    if type(backbone).session_scores is SequentialBackbone.session_scores:  # which looks at the last position alone
        vectors, mask = vectors[:, -1:], mask[:, -1:]
    # Looked up at once, as the gradient of each look-up is as large as all vectors.
    pieces = (each.split(SIZES.central_scored) for each in (order, vectors[order], mask[order]))
    for chosen, vectors, mask in zip(*pieces):
        if not backbone.positionwise:  # whose score may be of the last position, whatever the mask
            used = mask.any(0)
            vectors, mask = vectors[:, used], mask[:, used]
        scores = backbone.session_scores(vectors, mask, rows)
        checks.check_tensor(backbone, "session_scores", scores, (len(chosen), len(rows)),
                              "(C, n): a score per client and item")
        yield chosen, scores


@dataclass(frozen=True)
class SampleSet:
    """Samples and the items that each of them predicts its last one among.

    Attributes:
        samples: whose items are numbered from 0.
        rows: those of its items in the item tables; None: all.
        memory: what the backbone remembers of these samples' sessions.
    """

    samples: Prefixes
    rows: slice | None = None
    memory: Tables = field(default_factory=dict)


@dataclass(frozen=True)
class _Task:
    """A part of an epoch's samples, and what the backbone makes of its items' rows before the epoch."""

    part: SampleSet
    derived: Tables


class Epoch(MiniBatches):
    """One pass over all samples; the parameters and the state that it goes on from are not written to.

    Args:
        model: the parameters at the point.
        point, draw: as for ``MiniBatches``.
    """

    def __init__(self, backbone: SequentialBackbone, settings: LocalSettings, model: Snapshot, point: Point,
                 draw: DrawKey):
        public, dense = ({name: value.detach().clone().requires_grad_() for name, value in kind.items()}
                         for kind in (model.public, model.dense))
        self.backbone, self.model = backbone, replace(model, public=public, dense=dense)
        self._tasks: list[_Task] = []
        super().__init__(settings, public | dense, backbone.learning_rates(model.n_items, draw.round), point, draw)

    def trained(self) -> Snapshot:
        """The parameters after the batches so far."""
        return replace(self.model, **{
            kind: {name: value.detach() for name, value in getattr(self.model, kind).items()}
            for kind in ("public", "dense")})

    def batches(self, parts: Several[SampleSet], before: Snapshot) -> Iterator[float]:
        """Train on the samples of all parts in random order; yields after each batch the share that is done.

        Args:
            before: the parameters before the epoch.
        """
        for each in parts:
            received = {name: table.detach() for name, table in _rows(before.public, each).items()}
            self._tasks.append(_Task(each, self.backbone.derive(received, self.draw)))
        return self.passed([len(each.samples.end) for each in parts], parts[0].samples.end.device)

    def batch_loss(self, pieces, draw):
        losses = [self._losses(self._tasks[number], *piece, draw) for number, piece in pieces.items()]
        loss = torch.cat(losses).mean()
        checks.require_gradient(self.backbone, loss)
        return loss

    def _losses(self, task: _Task, chosen: Tensor, numbers: Tensor, draw: DrawKey) -> Tensor:
        """The loss of each sample of a batch that is of one part, in some order, (n,).

        Args:
            chosen: numbers of the samples in the part; numbers: theirs in the batch.
        """
        model = replace(self.model, public=_rows(self.model.public, task.part), memory=task.part.memory)
        table = model.public[ITEM]
        factor = Dropout(draw.clients("dropout of items", numbers.new_zeros(1))).of_rows(
            torch.arange(len(table), device=table.device), table.shape[1], self.backbone.candidate_dropout, table.dtype)
        rows = table if factor is None else table * factor[0]
        loss, losses = _loss_of(self.backbone, table), []
        for group in self._groups(task.part.samples, chosen):
            items, sequence = samples_at(self.backbone, task.part.samples, chosen[group])
            session = encode(self.backbone, model, sequence, Dropout(draw.clients("dropout", numbers[group])),
                             task.derived)
            losses += [loss(SessionVectors(session.vectors[part], session.mask[part],
                                           {name: term[part] for name, term in session.terms.items()}),
                            items[part], sequence.real[part], scores)
                       for part, scores in score(self.backbone, session, rows)]
        return torch.cat(losses)

    def _groups(self, samples: Prefixes, chosen: Tensor) -> Several[Tensor]:
        """The samples of a batch by their number in it, those of similar lengths together, so that little is padding;
        all at once where they are few, or the backbone ``pads``."""
        if self.backbone.pads or len(chosen) <= SIZES.central_encoded:
            return [torch.arange(len(chosen), device=chosen.device)]
        lengths = samples.end[chosen] - samples.first[chosen]
        return lengths.argsort(stable=True).split(SIZES.central_encoded)


def _rows(public: Tables, part: SampleSet) -> Tables:
    """The rows of a part's items."""
    return public if part.rows is None else {name: table[part.rows] for name, table in public.items()}


def _loss_of(backbone: SequentialBackbone, table: Tensor
             ) -> Callable[[SessionVectors, Tensor, Tensor, Tensor], Tensor]:
    """The loss of samples, (C,), given their vectors, items, what of these is real, and scores of all items.

    It is a session backbone's own, which knows no negatives here; of others the cross-entropy of the last item.
    """
    if not isinstance(backbone, SessionBackbone):
        return lambda session, items, real, scores: cross_entropy(scores, items[:, -1], reduction="none")
    return lambda session, items, real, scores: backbone.session_loss(
        session, Targets(embedding(items, table), items, real, scores, Dropout()))
