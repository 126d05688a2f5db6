"""What a backbone is: the recommender that every client trains.

A backbone says which parameters are public and which private, how those of new users and items start, how a batch of
clients is scored, and in which order the local optimiser takes the parameters. It knows nothing of methods, rounds of
the server or blocks. The first dimension of everything it sees is clients.

There are four kinds of parameters, each a dictionary of tensors by name:

- public item tables, one row per item, aggregated by the server (``new_rows``);
- public dense parameters without item rows, aggregated too (``new_dense``);
- private parameters, one row per user, never uploaded (``new_rows``);
- personal item tables, one row per user and item, never uploaded (``new_personal``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Iterable, Mapping

import torch
from torch import Tensor

from ..rng import DrawKey, Tables
from ..kernels.functional import dot, weighted_bce
from .local_settings import LocalSettings, OwnSamples
from ..core.settings import setting

if TYPE_CHECKING:
    from ..data.stream import TrainingStep

USER, ITEM = "user_embedding.weight", "item_embedding.weight"


@dataclass(frozen=True)
class OwnBatch:
    """One local batch of C clients that have equally many positives, or of lists that are padded with their first item
    (``OwnSamples.as_set``), for a backbone with a loss of its own."""

    users: Tensor  # ids, (C,)
    positives: Tensor  # all training items of the client, in time order, (C, P)
    negatives: Tensor  # those of the first positive first, (C, P k)
    chosen: Tensor  # numbers of the samples in the batch, (C, b)
    draw: DrawKey  # key of the batch's random numbers
    done: int  # local batches of each client in the block before this one, had it taken part in all rounds


@dataclass(frozen=True)
class BackboneSettings:
    """Settings every backbone has."""

    lr: float = setting(1.0, "learning rate of the private parameters", above=0.0)


class Backbone:
    """Base class of backbones.

    Subclasses set ``name``, ``title``, ``reference`` and ``Settings`` and implement ``new_rows``, ``score`` (or
    ``factors``) and ``learning_rates``; the other methods have defaults.

    Attributes:
        defaults: values of the run's other settings that belong to this backbone's paper; a dataset's config and the
            user lie over them.
        static_defaults, session_defaults: the same for the static stream, or a stream of sessions, only.
        central_defaults: the same with ``topology=central``, and of domains.
        ignored: the run's settings that have no effect with this backbone, and why; a user who sets one is told.
        ambiguities: settings that a paper and its code read differently (see ``Method``).
        factor_names: for a backbone whose logits are inner products of item rows and a private parameter, plus a
            private constant: the names of the two, or of the first and None. ``factors`` follows from them.
        pairwise: a sample is a positive with one of its negatives, and ``pair_loss`` is minimised instead of ``loss``.
        explicit: it predicts ratings: a sample is a positive with its rating, no negatives are drawn, ``loss`` gets the
            ratings as labels, and tests have the errors of the predictions. May be a property of its settings.
        whole_tables: a client trains all item rows, not only those it looks up: needed if a term of the loss or
            weight decay concerns all of them. An attribute of the class or of the instance.
        keeps_local_tables: after its round a client keeps its own trained copy of the public item tables.
        scores_local_tables: it is evaluated with that copy. Both are attributes of the class or of the instance.
        serves_tables: the server makes item tables for each client (see ``serve``).
        rest_follows: with ``whole_tables``, rows that are in none of a client's local batches move by ``weight_decay``
            and ``pull`` alone; it then trains the others only (see ``training/lazy_decay.py``).
        needs_features, features: as a method's (see ``Method``).
        weight_decay: added times the parameter to every gradient; needs ``whole_tables``.
        sends_gradients: public parameters move by SGD whatever the setting ``optimiser`` is, so that what clients send
            are sums of gradients.
    """

    kind: ClassVar[str] = "backbone"
    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str] = ""
    Settings: ClassVar[type] = BackboneSettings
    defaults: ClassVar[Mapping[str, Any]] = {}
    static_defaults: ClassVar[Mapping[str, Any]] = {}
    session_defaults: ClassVar[Mapping[str, Any]] = {}
    central_defaults: ClassVar[Mapping[str, Any]] = {}
    ignored: ClassVar[Mapping[str, str]] = {}
    ambiguities: ClassVar[Mapping[str, Mapping[Any, str]]] = {}
    for_domains: ClassVar[bool] = False
    needs_features: ClassVar[bool] = False
    factor_names: ClassVar[tuple[str, str | None] | None] = None
    features: Tensor | None = None
    pairwise: bool = False
    explicit: bool = False
    whole_tables: bool = False
    keeps_local_tables: bool = False
    scores_local_tables: bool = False
    serves_tables: bool = False
    rest_follows: bool = False
    weight_decay: float = 0.0
    sends_gradients: ClassVar[bool] = False

    def __init__(self, settings: BackboneSettings):
        self.settings = settings

    def overrides(self, hook: str) -> bool:
        """Whether the backbone has a hook of its own of this name."""
        return getattr(type(self), hook) is not getattr(Backbone, hook)

    def new_rows(self, seed: int, users: range, items: range) -> tuple[Tables, Tables]:
        """Initial (public, private) rows, float64, of items and users first seen in a block. A row's values may depend
        on the seed and its own id only, so a table does not depend on when it grew."""
        raise NotImplementedError

    def new_dense(self, seed: int) -> Tables:
        """Initial public parameters without item rows, float64."""
        return {}

    def new_personal(self, seed: int, items: range) -> Tables:
        """Initial rows of personal item tables, float64, shape (items, ...): the same for every client."""
        return {}

    def groups(self, names: list[str]) -> list[list[str]]:
        """The parameters in the order of a local batch's updates; each group sees the update of the one before.
        ``names``: all parameters' names."""
        return [names]

    def score(self, clients: Tables, rows: Tables) -> Tensor:
        """Logits of each client's own items. ``clients``: private parameters, personal tables and the clients' own
        copies of dense public parameters, each of shape (C, ...). ``rows``: public item rows of those clients, each of
        shape (C, n, ...); with ``whole_tables`` all items in order. Personal tables have the same rows. Returns (C, n).
        """
        vectors, constants = self._factors(clients)
        products = dot(vectors, next(iter(rows.values())))
        return products if constants is None else products + constants

    def factors(self, clients: Tables) -> tuple[Tensor, Tensor | None] | None:
        """For a backbone whose logits are inner products with its only public table: each client's vector, (C, d), and
        what it adds to every logit, (C, 1) or None. ``score`` and ``score_all`` follow from them, and clients are
        trained without copies of item rows (see ``training/factored.py``). ``clients``: as for ``score``."""
        if self.factor_names is None:
            return None
        vector, constant = self.factor_names
        return clients[vector].flatten(1), None if constant is None else clients[constant].flatten(1)

    @property
    def usual_loss(self) -> bool:
        """Whether samples are scored one by one and ``loss`` is the base class's."""
        return not self.overrides("loss") and not self.pairwise

    def _factors(self, clients: Tables) -> tuple[Tensor, Tensor | None]:
        if (factors := self.factors(clients)) is None:
            raise NotImplementedError(f"backbone '{self.name}' has neither score() nor factors()")
        return factors

    def score_all(self, clients: Tables, public: Tables) -> Tensor:
        """Logits of all items for C clients under one public table, shape (C, items)."""
        if (factors := self.factors(clients)) is not None:
            vectors, constants = factors
            table = next(iter(public.values())).T
            return vectors @ table if constants is None else torch.addmm(constants, vectors, table)
        count = len(next(iter(clients.values())))
        return self.score(clients, {name: table.expand(count, *table.shape) for name, table in public.items()})

    def keys(self, clients: Tables, rows: Tables) -> Tensor:
        """A representation of each (client, item) pair, for methods that look up similar pairs: shape (C, n, k).
        Arguments as for ``score``."""
        return torch.cat([table.flatten(2) for table in rows.values()], dim=2)

    def learning_rates(self, n_items: int, round_: int = 0, batch: int = 0) -> Mapping[str, float]:
        """The learning rate of every parameter by name. ``n_items``: items known in the block; ``round_``, ``batch``:
        rounds done in the block, and local batches done in the round."""
        raise NotImplementedError

    def loss(self, scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Recommendation loss of each client over one local batch: mean binary cross-entropy on logits. ``scores``,
        ``labels``: shape (C, n); labels are 1 for positives and 0 for sampled negatives, or ratings (``explicit``).
        ``weights``: shape (C, n); a sample's share of its batch's mean. An item drawn twice has twice the weight.
        Returns (C,)."""
        return weighted_bce(scores, labels, weights)

    def pair_loss(self, positive: Tensor, negative: Tensor, weights: Tensor) -> Tensor:
        """Recommendation loss over pairs, for ``pairwise`` backbones: mean of -log sigmoid(positive - negative).
        ``positive``, ``negative``: logits of the two items of each pair, shape (C, n); ``weights``: shape (C, n); a
        pair's share of its batch's mean. Returns (C,) (Bayesian personalised ranking, Rendle et al., UAI 2009)."""
        return (torch.nn.functional.softplus(negative - positive) * weights).sum(1)

    def own_samples(self, settings: LocalSettings) -> OwnSamples | None:
        """How samples are made of positives, for a backbone whose loss is ``own_loss``; None: scores and ``loss``. Such
        a backbone needs ``whole_tables``. Its clients are trained in groups with equally many positives."""
        return None

    def own_loss(self, clients: Tables, rows: Tables, batch: OwnBatch) -> Tensor:
        """The whole recommendation loss of each client over one local batch, shape (C,), instead of ``score`` and
        ``loss``. ``clients``, ``rows``: as for ``score``, all items in order, without what clients remember."""
        raise NotImplementedError

    def remember(self, step: TrainingStep, memory: Tables) -> Tables:
        """What every client carries besides parameters: integer tables, each (users, ...), made at the start of a step.
        They are not trained and never uploaded; ``score`` finds them among ``clients``. ``memory``: of the step before,
        with a row per user known there."""
        return {}

    def notes(self) -> Iterable[str]:
        """Sentences that the user should read before a run."""
        return ()

    def regulariser(self, clients: Tables, rows: Tables, weights: Tensor, served: Tables, round_: int) -> Tensor | None:
        """A term of the backbone's own added to each client's loss: shape (C,), or None. ``clients``, ``rows``,
        ``weights``: as for ``score`` and ``loss``; ``served``: the tables the server made for each of the clients (see
        ``serve``), each (C, items, ...); with ``rest_follows``, of the same items as ``rows``; ``round_``: rounds done
        in the block."""
        return None

    def pull(self, n_items: int) -> float:
        """How strongly a client's public item rows are held near those that the server made for it (see ``serve``): the
        loss gets half of it times the squared distance, summed over all rows. Needs ``whole_tables``."""
        return 0.0

    def sgd_step(self, clients: Tables, rows: Tables, labels: Tensor, weights: Tensor, rates: Tables,
                 round_: int) -> Tensor:
        """One local batch under SGD with all gradients by hand. Optional; with ``rest_follows`` it is used where the
        loss is of ``score``, ``loss`` and ``regulariser`` alone, and must do what they and ``weight_decay`` do.
        ``clients``, ``rows``: as for ``score``; changed in place; ``labels``, ``weights``, ``round_``: as for ``loss``
        and ``regulariser``; ``rates``: learning rates by name, each (C,); 0 where a client sits the batch out. Returns
        each client's loss before the step, (C,)."""
        raise NotImplementedError

    def serve(self, uploads: Tables) -> tuple[Tables, Tables] | None:
        """A server that looks at each upload instead of at their mean only. ``uploads``: the participants' public item
        tables, each (N, items, ...); not to be written. Returns None (the server averages), or (public tables, tables
        served to each participant, each (N, items, ...))."""
        return None

    def diagnostics(self, public: Tables) -> dict[str, float]:
        """Numbers worth logging after every round."""
        return {}
