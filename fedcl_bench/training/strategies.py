"""The one decision how clients are trained, made once per step; protocol and rounds ask its answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Mapping, NamedTuple

import torch

from ..plugin.backbone import Backbone
from ..plugin.method import Method
from ..plugin.state import Snapshot
from ..kernels import ops
from ..plugin.local_settings import LocalSettings
from ..plugin.sequential import SequentialBackbone
from ..stats.clip_noise import OPEN, Protection

# What each way comes to, for people.
MEANING = {"fused": "the whole round of a chunk is one compiled call",
           "factored": "no copies of item rows: updates are kept as outer products",
           "at rest": "the rows a client looks up, and one factor for all others",
           "whole": "all item rows at every client",
           "rows": "the item rows a client looks up",
           "sessions": "the item rows of a session, and the encoder",
           "central": "one client holds all sessions and trains on mini-batches of their prefixes",
           "domains": "mini-batches of a domain's histories, or of all domains' with topology=central"}


class Layout(NamedTuple):
    """The parameters of a backbone whose clients' rounds are one call each (way ``fused``).

    Attributes:
        item, vector, constant: names of the item table, of the private parameter that item rows are multiplied with,
            and of the one that is added, or None.
        turns: of the groups of parameters that take their steps one after the other in a local batch, whether the
            private ones (1), item rows (2) or both (3) are in it.
    """

    item: str
    vector: str
    constant: str | None
    turns: tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """How the clients of a step are trained.

    Attributes:
        name: of the way, as in the table of ``choose_way``.
        holds_whole: a chunk has memory for all item rows of each of its clients.
        samples_only: nothing looks at logits of other items than a local batch's.
        by_hand: at rest, a local batch is ``Backbone.sgd_step``.
        layout: of the parameters, if ``fused``.
    """

    name: str
    holds_whole: bool = False
    samples_only: bool = False
    by_hand: bool = False
    layout: Layout | None = None

    @cached_property
    def factored(self) -> bool:
        """Whether clients are trained without copies of item rows, where that is less work."""
        return self.name in ("fused", "factored")

    @cached_property
    def fused(self) -> bool:
        """Whether the whole round of such clients is one call."""
        return self.name == "fused"

    @cached_property
    def at_rest(self) -> bool:
        """Whether clients of whole tables hold the rows that they look up."""
        return self.name == "at rest"


@dataclass(frozen=True)
class Training:
    """What the clients of a step have in common when they train.

    Attributes:
        method: the one that acts in the step.
        protection: of uploads. own_start: clients draw the public parameters they begin the first round with
            (``init=per_client``).
        frozen: public parameters stay as the server sent them.
    """

    backbone: Backbone
    method: Method
    settings: LocalSettings
    way: Way
    protection: Protection = OPEN
    own_start: bool = False
    frozen: bool = False

    def rates(self, model: Snapshot, round_: int, batch: int) -> Mapping[str, float]:
        """The learning rates of the backbone's parameters; arguments as of ``Backbone.learning_rates``."""
        rates = self.backbone.learning_rates(model.n_items, round_, batch)
        return {**rates, **dict.fromkeys([*model.public, *model.dense], 0.0)} if self.frozen else rates

    @cached_property
    def personal(self) -> set[str]:
        """Names of the tables with a row per user and item."""
        return set(self.backbone.new_personal(0, range(0)))


def choose_way(backbone: Backbone, method: Method, model: Snapshot, settings: LocalSettings, sessions: bool) -> Way:
    """How to train clients, asked once per step.

    ========  =================================================  ====================================  ==============
    way       when                                               what it skips                         gain of a round
    ========  =================================================  ====================================  ==============
    fused     ``factor_names``, SGD, the usual loss, no hook of  one call per chunk does all batches   2.2 x factored
              the method, compiled kernels (FedMF, PFedRec)
    factored  ``factors``, SGD, one public table, no penalty on  copies of item rows: updates are      3.9 x rows
              rows, blocks or the static stream (FedNCF)         kept as outer products
    at rest   ``whole_tables`` and ``rest_follows``, SGD         rows no sample names: one factor      5 x whole
              (FedRAP, GPFedRec)                                 per client stands for them
    whole     ``whole_tables`` otherwise                         nothing                               --
    rows      all other lists                                    item rows that a client does not      --
                                                                 look up
    sessions  a sequential backbone                              the same                              --
    ========  =================================================  ====================================  ==============

    All give the numbers of ``rows`` or ``whole`` up to the order of sums. ``benchmarks/README.md`` says how the gains
    were measured.

    Args:
        model: the parameters as they lie at the start of the step, or a model of one user and one item like it.
        sessions: clients train on their next session in each round.
    """
    if isinstance(backbone, SequentialBackbone):
        return Way("sessions")
    samples_only = not sessions and backbone.usual_loss and not method.overrides("local_loss")
    if not sessions and _is_factored(backbone, method, model, settings):
        layout = _layout_of(backbone, method, model, settings) if samples_only else None
        return Way("factored" if layout is None else "fused", samples_only=samples_only, layout=layout)
    if _rests(backbone, method, settings):
        return Way("at rest", backbone.keeps_local_tables, samples_only, _is_by_hand(backbone, method))
    return Way("whole" if backbone.whole_tables else "rows", backbone.whole_tables, samples_only)


def _is_factored(backbone: Backbone, method: Method, model: Snapshot, settings: LocalSettings) -> bool:
    """Whether logits are inner products with the one public item table, nothing else reads item rows, and updates are
    multiples of gradients."""
    first = torch.zeros(1, dtype=torch.int64, device=next(model.tables()).device)
    return (settings.optimiser == "sgd" and len(model.public) == 1 and not backbone.whole_tables
            and backbone.factors(model.clients(first)) is not None and _defines(backbone, "factors", over=("score",))
            and not backbone.overrides("regulariser") and backbone.weight_decay == 0.0 and not method.penalises_rows)


def _layout_of(backbone: Backbone, method: Method, model: Snapshot, settings: LocalSettings) -> Layout | None:
    """The layout of parameters that a compiled round can train; None where something else has a say in it."""
    (item, table), = model.public.items()
    if (backbone.factor_names is None or backbone.overrides("factors") or not ops.serve(table) or model.dense
            or model.served or model.memory or settings.tolerance > 0.0 or settings.negative_draw != "repeated"
            or backbone.pull(model.n_items) > 0.0 or any(value.dtype != table.dtype for value in model.private.values())
            or any(map(method.overrides, ("begin_local", "end_local", "replayed_items", "uploads")))):
        return None
    vector, constant = backbone.factor_names
    private, sizes = set(model.private), {vector: table.shape[1], **({} if constant is None else {constant: 1})}
    if private != set(sizes) or any(model.private[name][0].numel() != size for name, size in sizes.items()):
        return None
    turns = []
    for group in map(set, backbone.groups([*model.private, item])):
        if not group or group & private not in (set(), private):
            return None
        turns.append((1 if group & private else 0) + (2 if item in group else 0))
    return Layout(item, vector, constant, tuple(turns))


def _rests(backbone: Backbone, method: Method, settings: LocalSettings) -> bool:
    """Whether updates are multiples of gradients, no other term concerns all rows, and no hook of the method sees whole
    personal tables."""
    sees = backbone.new_personal(0, range(0)) and any(
        map(method.overrides, ("begin_local", "local_loss", "replayed_items", "end_local")))
    return (backbone.whole_tables and backbone.rest_follows and settings.optimiser == "sgd"
            and not sees and not method.penalises_rows and backbone.own_samples(settings) is None
            and not (backbone.serves_tables and backbone.weight_decay > 0.0))


def _is_by_hand(backbone: Backbone, method: Method) -> bool:
    """Whether the backbone has an ``sgd_step`` that means what its other hooks do, and the method adds nothing."""
    return (backbone.overrides("sgd_step")
            and _defines(backbone, "sgd_step", over=("score", "loss", "regulariser", "learning_rates", "groups"))
            and not any(map(method.overrides, ("local_loss", "new_private"))))


def _defines(backbone: Backbone, hook: str, over: tuple[str, ...]) -> bool:
    """Whether the class with the last word on ``hook`` has it on the hooks ``over`` too, or derives from those that do:
    a subclass that redefines only one of the latter means something else."""
    def owner(name: str) -> type:
        return next(cls for cls in type(backbone).__mro__ if name in vars(cls))
    return all(issubclass(owner(hook), owner(name)) for name in over)
