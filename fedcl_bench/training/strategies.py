"""The one decision how clients are trained, made once per step; protocol, rounds and records ask its answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Mapping, NamedTuple

import torch

from ..plugin.backbone import Backbone
from ..plugin.history import HistoryBackbone
from ..plugin.method import Method
from ..plugin.state import Snapshot
from ..kernels import ops
from ..core.tuning import SIZES
from ..plugin.local_settings import LocalSettings
from ..plugin.sequential import SequentialBackbone, SessionBackbone
from ..stats.clip_noise import OPEN, Protection


class Strategy(Enum):
    """How clients are trained; ``docs/architecture.md`` says when, and ``choose_strategy`` what it gains."""

    ROWS = "rows", "the item rows a client looks up"
    WHOLE = "whole", "all item rows at every client"
    LAZY_DECAY = "at rest", "the rows a client looks up, and one factor for all others"
    FACTORED = "factored", "no copies of item rows: updates are kept as outer products"
    FUSED = "fused", "the whole round of a chunk is one compiled call"
    HISTORIES = "histories", "the item rows of a client's history, and of the last layer updates as outer products"
    SESSIONS = "sessions", "the item rows of a session, or all of them, and the encoder"
    COMPILED_SOFTMAX = "sessions", "the encoder, and all item rows by compiled kernels"
    CENTRAL = "central", "one party holds all data and trains on mini-batches"
    DOMAINS = "domains", "mini-batches of a domain's histories, or of all domains' with topology=central"

    def __init__(self, recorded: str, meaning: str):
        self.recorded = recorded  # what records call it
        self.meaning = meaning


def meaning_of(recorded: str) -> str:
    """What a strategy in a record comes to, for people."""
    return next(strategy.meaning for strategy in Strategy if strategy.recorded == recorded)


class FusedLayout(NamedTuple):
    """The parameters of a backbone whose clients' rounds are one call each."""

    # Names of the item table, of the private parameter that item rows are multiplied with, and of the one that is
    # added, or None.
    item: str
    vector: str
    constant: str | None
    # Of the groups of parameters that take their steps one after the other in a local batch, whether the private ones
    # (1), item rows (2) or both (3) are in it.
    turns: tuple[int, ...]


@dataclass(frozen=True)
class Training:
    """What the clients of a step have in common when they train."""

    backbone: Backbone
    method: Method  # the one that acts in the step
    settings: LocalSettings
    strategy: Strategy
    protection: Protection = OPEN  # of uploads
    own_start: bool = False  # clients draw the public parameters they begin the first round with (``init=per_client``)
    frozen: str = ""  # which parameters stay as they are, besides dense ones: ``public`` or ``private``; empty: none
    epochs: int = 0  # local ones, of clients that are no stragglers
    keeps: bool = False  # whether each client's changes of public parameters are kept, for a server that looks at them

    def rates(self, model: Snapshot, round_: int, batch: int) -> Mapping[str, float]:
        """The learning rates of the backbone's parameters; arguments as of ``Backbone.learning_rates``."""
        rates = self.backbone.learning_rates(model.n_items, round_, batch)
        return {**rates, **dict.fromkeys([*getattr(model, self.frozen), *model.dense], 0.0)} if self.frozen else rates

    @cached_property
    def personal(self) -> set[str]:
        """Names of the tables with a row per user and item."""
        return set(self.backbone.new_personal(0, range(0)))

    @property
    def holds_whole(self) -> bool:
        """Whether a chunk has memory for all item rows of each of its clients."""
        return self.strategy is Strategy.WHOLE or (
            self.strategy is Strategy.LAZY_DECAY and self.backbone.keeps_local_tables)

    @property
    def samples_only(self) -> bool:
        """Whether nothing looks at logits of other items than a local batch's."""
        return self.backbone.usual_loss and not self.method.adds_scores()

    def unnumbered(self, model: Snapshot) -> bool:
        """Whether nothing in a local batch depends on its number in the round: no draw of the method, and no rate,
        which is asked for as many as are kept apart."""
        return self.samples_only and all(
            self.rates(model, round_, 0) == self.rates(model, round_, batch)
            for round_ in range(2) for batch in range(1, SIZES.most_updates))

    @cached_property
    def by_hand(self) -> bool:
        """Whether a local batch of ``LAZY_DECAY`` is ``Backbone.sgd_step``: where the backbone has one that means what
        its other hooks do, and the method adds nothing. It may know one learning rate for public and private tables."""
        return (not self.frozen and self.backbone.overrides("sgd_step")
                and _defines(self.backbone, "sgd_step",
                             over=("score", "loss", "regulariser", "learning_rates", "groups"))
                and not (self.method.adds_scores() or self.method.overrides("new_private")))


def choose_strategy(backbone: Backbone, method: Method, model: Snapshot, settings: LocalSettings,
                    sessions: bool) -> Strategy:
    """How to train clients, asked once per step. All strategies give the numbers of ``ROWS`` or ``WHOLE`` up to the
    order of sums.

    Gains are ratios of processor time of whole jobs without and with a strategy, validation included
    (``benchmarks/strategies.py``): FACTORED 2.3 x ROWS (FedNCF), and FUSED 1.5 x that (FedMF, PFedRec); LAZY_DECAY 2.9
    x WHOLE (FedRAP) or 1.2 x (GPFedRec); HISTORIES 2.7 x WHOLE (FedDAE); COMPILED_SOFTMAX 1.8 x SESSIONS (MIASRec).

    ``model``: the parameters as they lie at the start of the step, or a model of one user and one item like it;
    ``sessions``: clients train on their next session in each round.
    """
    if isinstance(backbone, SequentialBackbone):
        compiled = _compiles_softmax(backbone, method, settings, model)
        return Strategy.COMPILED_SOFTMAX if compiled else Strategy.SESSIONS
    if not sessions and not backbone.explicit and _is_factored(backbone, method, model, settings):
        fused = (backbone.usual_loss and not method.overrides("local_loss")
                 and fused_layout(backbone, method, model, settings) is not None)
        return Strategy.FUSED if fused else Strategy.FACTORED
    if _decays_lazily(backbone, method, settings):
        return Strategy.LAZY_DECAY
    if (isinstance(backbone, HistoryBackbone) and (settings.optimiser == "sgd" or backbone.sends_gradients)
            and not _sees_training(method) and type(backbone).own_loss is HistoryBackbone.own_loss
            and type(backbone).own_samples is HistoryBackbone.own_samples
            and not (backbone.weight_decay or backbone.serves_tables or backbone.keeps_local_tables)):
        return Strategy.HISTORIES
    return Strategy.WHOLE if backbone.whole_tables else Strategy.ROWS


def _is_factored(backbone: Backbone, method: Method, model: Snapshot, settings: LocalSettings) -> bool:
    """Whether logits are inner products with the one public item table, nothing else reads item rows, and updates are
    multiples of gradients."""
    first = torch.zeros(1, dtype=torch.int64, device=next(model.tables()).device)
    return (settings.optimiser == "sgd" and len(model.public) == 1 and not backbone.whole_tables
            and backbone.factors(model.clients(first)) is not None and _defines(backbone, "factors", over=("score",))
            and not backbone.overrides("regulariser") and backbone.weight_decay == 0.0 and not method.sees_rows
            and not (method.penalises_rows and (method.overrides("row_penalty") or settings.tolerance > 0.0)))


def fused_layout(backbone: Backbone, method: Method, model: Snapshot, settings: LocalSettings) -> FusedLayout | None:
    """The layout of parameters that a compiled round can train; None where something else has a say in it."""
    (item, table), = model.public.items()
    if (backbone.factor_names is None or backbone.overrides("factors") or not ops.serve(table) or model.dense
            or model.personalised or model.client_context or settings.tolerance > 0.0
            or backbone.pull(model.n_items) > 0.0
            or any(value.dtype != table.dtype for value in model.private.values())
            or any(map(method.overrides, ("begin_local", "end_local", "replayed_items", "uploads", "sums",
                                           "row_basis")))):
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
    return FusedLayout(item, vector, constant, tuple(turns))


def _compiles_softmax(backbone: SequentialBackbone, method: Method, settings: LocalSettings, model: Snapshot) -> bool:
    """Whether the clients' tables are ``ops.CosineTables``."""
    return (isinstance(backbone, SessionBackbone) and backbone.whole_tables and settings.optimiser == "adam"
            and backbone.pooled and backbone.gradient_norm == 0.0 and not method.penalises_rows and not method.sees_rows
            and len(model.public) == 1 and all(map(ops.serve, model.public.values())))


def _decays_lazily(backbone: Backbone, method: Method, settings: LocalSettings) -> bool:
    """Whether updates are multiples of gradients, no other term concerns all rows, and no hook of the method sees whole
    personal tables."""
    sees = backbone.new_personal(0, range(0)) and any(
        map(method.overrides, ("begin_local", "local_loss", "replayed_items", "end_local")))
    return (backbone.whole_tables and backbone.rest_follows and not backbone.explicit and settings.optimiser == "sgd"
            and not sees and not method.penalises_rows and not method.sees_rows
            and not any(map(method.overrides, ("sums", "row_basis")))
            and backbone.own_samples(settings) is None and not (backbone.serves_tables and backbone.weight_decay > 0.0))


def _sees_training(method: Method) -> bool:
    """Whether a hook of the method sees clients' parameters, rows or scores while they train."""
    return method.sees_rows or method.penalises_rows or any(map(method.overrides, (
        "begin_local", "local_loss", "soft_targets", "replayed_items", "end_local", "row_basis", "sums",
        "new_private")))


def _defines(backbone: Backbone, hook: str, over: tuple[str, ...]) -> bool:
    """Whether the class with the last word on ``hook`` has it on the hooks ``over`` too, or derives from those that do:
    a subclass that redefines only one of the latter means something else."""
    def owner(name: str) -> type:
        return next(cls for cls in type(backbone).__mro__ if name in vars(cls))
    return all(issubclass(owner(hook), owner(name)) for name in over)
