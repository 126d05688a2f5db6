"""A sequential backbone at a client that holds many users' sessions, as in session recommenders' own papers.

A sample is a beginning of a session, whose last item is to be predicted among all items, or all of its domain. A
mini-batch is many samples that share all parameters, and one optimiser takes a step for each.
"""

from __future__ import annotations

from typing import Iterator, Sequence as Several

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding

from ..plugin import checks
from ..data.stream import Prefixes, Sessions
from ..rng import DrawKey, Tables
from ..plugin.backbone import ITEM
from ..plugin.state import Snapshot
from ..plugin.silo import DomainModule
from ..plugin.sequential import Dropout, Sequence, SequentialBackbone, SessionBackbone, SessionVectors, Targets
from ..core.tuning import SIZES
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
    """What the backbone makes of samples that share all parameters, differentiable with respect to them. ``derived``:
    what it makes of the parameters before an epoch (see ``SequentialBackbone.derive``)."""
    count, table = len(sequence.real), model.public[ITEM]
    clients = {name: value.expand(count, *value.shape) for name, value in model.dense.items()}
    memory = {name: value.expand(count, *value.shape[1:]) for name, value in model.client_context.items()}
    memory |= {name: value.expand(count, *value.shape) for name, value in (derived or {}).items()}
    inputs = embedding(sequence.items.clamp(min=0), table) * sequence.real.unsqueeze(2)
    more = backbone.more_items(memory, sequence)
    inputs = inputs if more is None else torch.cat([inputs, embedding(more, table)], 1)
    return backbone.session_vectors(clients | memory, inputs, sequence, dropout)


def score(backbone: SequentialBackbone, session: SessionVectors, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of all items, given their rows, (items, d), for a group of samples with similar numbers of vectors at a
    time. Yields (which samples, (n,); their scores, (n, items))."""
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


class SequentialModule(DomainModule):
    """A sequential backbone as the module of one domain: its parameters, and what it makes of the domain's samples.
    ``start``: the parameters to begin with, and what the backbone remembers of the domain's sessions, as of one client.
    """

    def __init__(self, backbone: SequentialBackbone, start: Snapshot):
        super().__init__()
        self.backbone, self.client_context, self.rows = backbone, start.client_context, tuple(start.public)
        # What the backbone makes of the items' rows before an epoch (see ``SequentialBackbone.derive``).
        self.derived: Tables = {}
        for name, value in start.sent.items():
            self._parameters[name] = nn.Parameter(value.detach().clone())  # names may have dots

    def get(self, name: str) -> nn.Parameter:
        """A parameter by its name."""
        return self._parameters[name]

    def model(self) -> Snapshot:
        """Its parameters as they are now."""
        return Snapshot({name: self._parameters[name] for name in self.rows}, {},
                        {name: value for name, value in self._parameters.items() if name not in self.rows},
                        client_context=self.client_context)

    def losses(self, samples: Prefixes, chosen: Tensor, numbers: Tensor, draw: DrawKey) -> Tensor:
        """The loss of each of some samples of a batch, in some order, (n,). ``chosen``: which of the domain's samples;
        ``numbers``: theirs in the batch."""
        backbone, model = self.backbone, self.model()
        table = model.public[ITEM]
        factor = Dropout(draw.clients("dropout of items", numbers.new_zeros(1))).of_rows(
            torch.arange(len(table), device=table.device), table.shape[1], backbone.candidate_dropout, table.dtype)
        rows = table if factor is None else table * factor[0]
        losses = []
        for group in self._groups(samples, chosen):
            items, sequence = samples_at(backbone, samples, chosen[group])
            session = encode(backbone, model, sequence, Dropout(draw.clients("dropout", numbers[group])), self.derived)
            for part, scores in score(backbone, session, rows):
                if not isinstance(backbone, SessionBackbone):  # whose loss is its own, and knows no negatives here
                    losses.append(cross_entropy(scores, items[part, -1], reduction="none"))
                    continue
                vectors = SessionVectors(session.vectors[part], session.mask[part],
                                         {name: term[part] for name, term in session.terms.items()})
                losses.append(backbone.session_loss(vectors, Targets(
                    embedding(items[part], table), items[part], sequence.real[part], scores, Dropout())))
        return torch.cat(losses)

    def scores_after(self, sessions: Sessions, chosen: Tensor) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
        """The items to find after some sessions, and scores of all items, as ``score`` yields them."""
        items, sequence = samples_at(self.backbone, sessions, chosen)
        model = self.model()
        return items[:, -1], score(self.backbone, encode(self.backbone, model, sequence, Dropout()), model.public[ITEM])

    def item_vectors(self) -> Tensor:
        return self.model().item_vectors

    def _groups(self, samples: Prefixes, chosen: Tensor) -> Several[Tensor]:
        """The samples of a batch by their number in it, those of similar lengths together, so that little is padding;
        all at once where they are few, or the backbone ``pads``."""
        if self.backbone.pads or len(chosen) <= SIZES.central_encoded:
            return [torch.arange(len(chosen), device=chosen.device)]
        lengths = samples.end[chosen] - samples.first[chosen]
        return lengths.argsort(stable=True).split(SIZES.central_encoded)
