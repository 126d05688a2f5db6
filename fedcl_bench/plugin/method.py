"""What a method is: that which makes a federated recommender continual.

A method knows no backbone. It may add to every client's local loss, change the server's aggregation, and carry state
from one step of the stream to the next. Everything it keeps is in ``client_state`` (private, one row per user, never
uploaded) and ``server_state``, so that checkpoints and privacy checks see it. The base class is FT: it does nothing.

One object plays every client and the server, so each hook says whose it is. A client's hook may use that client's data,
private parameters and ``client_state``, what the server sent it, and nothing of other clients; the server's may use
public parameters, ``server_state`` and declared uploads. ``run_bench.py check`` tests that a method keeps to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterable, Mapping

from torch import Tensor

from .backbone import Backbone
from .local_settings import OPTIMISERS
from ..rng import DrawKey, Tables
from .state import Snapshot

if TYPE_CHECKING:
    from ..data.stream import Ragged, TrainingStep
    from .views import ClientUpdates, Local, LocalBatch, LocalSessions


@dataclass(frozen=True)
class NoSettings:
    """A method without settings of its own."""


@dataclass(frozen=True)
class Encoding:
    """What a sequential backbone's encoder made of C clients' sequences."""

    users: Tensor  # ids, shape (C,)
    clients: Tables  # private parameters and own copies of dense public ones, each (C, ...)
    features: Tensor  # representations at every position, (C, L, d)
    real: Tensor  # whether a position stands for an item, (C, L)
    purpose: str  # ``train``; or ``valid``, ``test`` or ``early`` (a client's first training session) in an evaluation
    draw: DrawKey  # key of the method's own random numbers
    # In an evaluation, for methods whose clients send a query: the representations with ``query_dropout``.
    queries: Tensor | None = None
    # Sends the clients' queries, (C, n), with the noise on uploads, to the server, which answers by
    # ``Method.answer_queries``.
    ask: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Pull:
    """What a parameter is kept near: weight / 2 times the squared distance to it is added to each client's loss."""

    weight: float
    # Of a public item table rows (n, ...), of another public parameter one like it, of a private one a row per user
    # (users, ...); later items and users are free. None, of public ones: what the server sent at the round's start.
    to: Tensor | None = None


@dataclass(frozen=True)
class SoftTargets:
    """Lists of items whose scores clients train to probabilities besides their samples: each client's loss gets
    ``weights`` times the cross-entropy of its list's scores to ``targets``."""

    items: Tensor  # a list of each of the first n users, int64 of shape (n, N); later users have none
    targets: Tensor  # probabilities, (n, N)
    weights: Tensor | float  # of each user, (n,), or of all
    chosen: Tensor | None = None  # which items of the lists take part, bool of shape (n, N); None: all
    reduction: str = "mean"  # over the items that take part, or ``sum``
    # eps of F3CRec's adaptive replay memory, which draws anew in every local batch how many of a list's items, and
    # which, take part (``toolbox/distillation.py``); None: all that are chosen do.
    eps: float | None = None


class Method:
    """Base class of methods; every hook does nothing.

    Attributes:
        first_step: the first step on which the method acts. Runs of methods with first_step 1 share block 0.
        acts_in_sessions: with a sequential backbone it also acts in a stream of sessions, in its one step, whatever
            first_step says.
        reimplementation: the method's code was never released and this follows its description; results say so.
        encodes_next_session: with a sequential backbone, clients also encode the session that comes next.
        query_dropout: whether there is dropout in the representations of a session that clients send as a query in an
            evaluation; None: they send none.
        uploads_first: clients upload in ``before_training``, and the server answers, before they train instead of
            after; for sequential backbones.
        sees_rows: the method reads ``batch.moved`` or ``batch.rows`` or has a ``gradient_correction``, and so clients
            hold copies of their item rows.
        optimisers: the local optimisers that it goes with.
        needs_sequential: the method works on what a sequential backbone makes of a session; None: on either kind.
        ambiguities: settings of its runs, its own or others, that a paper and its code read differently: by name, each
            value with whose reading it is. The command ``sensitivity`` takes them one at a time.
        trains: who trains in a step: ``clients``; ``server``, which holds all data and trains in ``central_round``;
            or ``nobody``, and a step has one round.
        history: the step's training data are those of all steps up to it, each user's in time order. ``begin_step`` and
            ``begin_round`` see them in ``step.train``; what is ranked and masked stays the block's.
        restarts: every step starts from untrained parameters.
        ignored: settings that have no effect with this method, and why; a user who sets one is told. Where no client
            ever trains these are also all of local training and of uploads.
        topology: of a stream of domains, what the method stands for.
        needs_backbone: False for a method that ranks without one; its runs are on the backbone ``none``.
        reads_logits: it takes scores for logits of positives and negatives, so that it goes with no backbone that
            predicts ratings; a method that adds a term of scores to the loss does so without saying it.
        gives_up: the statements of docs/constraints.md that the method gives up on purpose, as ``C1`` of one that says
            how much there is to gain, each with how. Results say so; ``check`` and ``--honest`` leave them out.
        needs_features: it reads ``features``; its settings are an ``ItemFeatureSettings``, too.
        features: of a method that needs them, those of the stream's items, float32 of shape (items, d), the same at
            clients and server. Items that arrive later are behind those of a step: take as many rows as tables have.
        noise_drawn_at_once: the noise that clients put on what they send is drawn for all of them together, as
            ``upload_noise`` is; real clients cannot run such a method.
        broadcasts: what names in ``server_state`` begin with that the server sends to all clients with the public
            parameters; results count it.
        client_state: tensors with one row per user, by name. When a step begins, the answers of ``end_round`` get rows
            for its new users; what the method keeps itself does not.
        server_state: tensors the server keeps, by name.
    """

    kind: ClassVar[str] = "method"
    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str] = ""
    Settings: ClassVar[type] = NoSettings
    first_step: ClassVar[int] = 1
    acts_in_sessions: ClassVar[bool] = False
    reimplementation: ClassVar[bool] = False
    encodes_next_session: ClassVar[bool] = False
    query_dropout: ClassVar[bool | None] = None
    uploads_first: ClassVar[bool] = False
    sees_rows: bool = False
    optimisers: ClassVar[tuple[str, ...]] = OPTIMISERS
    needs_sequential: ClassVar[bool | None] = False
    ambiguities: ClassVar[Mapping[str, Mapping[Any, str]]] = {}
    for_domains: ClassVar[bool] = False
    trains: ClassVar[str] = "clients"
    history: ClassVar[bool] = False
    restarts: ClassVar[bool] = False
    ignored: ClassVar[Mapping[str, str]] = {}
    topology: ClassVar[str] = ""
    needs_backbone: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = False
    gives_up: ClassVar[Mapping[str, str]] = {}
    needs_features: ClassVar[bool] = False
    noise_drawn_at_once: bool = False
    broadcasts: ClassVar[tuple[str, ...]] = ()
    features: Tensor | None = None

    def __init__(self, settings: Any):  # an object of the class's own Settings
        self.settings = settings
        self.client_state: dict[str, Tensor] = {}
        self.server_state: dict[str, Tensor] = {}

    def overrides(self, hook: str) -> bool:
        """Whether the method has a hook of its own of this name."""
        return getattr(type(self), hook) is not getattr(Method, hook)

    @property
    def broadcast(self) -> Tables:
        """What the server sends besides parameters."""
        return {name: table for name, table in self.server_state.items() if name.startswith(self.broadcasts)}

    def trained_backbone(self, backbone: Backbone, clients: int) -> Backbone:
        """The backbone as the method's clients train it, of all clients so many. Raises Incompatible."""
        return backbone

    def check(self, step: TrainingStep) -> None:
        """Before the run: raise UserError if a setting does not fit the data; ``step`` is the first."""

    def uploads(self, backbone: Backbone, round_: int) -> Mapping[str, tuple[int, ...]]:
        """What each participant sends in a round besides public parameters: its shape by name (see ``Local.upload``). A
        run's record says so, and a client that sends anything else is an error."""
        return {}

    def sums(self, backbone: Backbone, n_items: int) -> Mapping[str, tuple[int, ...]]:
        """What each participant sends in place of its changes of public parameters, and of which the server sees
        nothing but the sum over all participants: the sum's shape by name (see ``Local.add``). Empty: it sends its
        changes, which are averaged. A run's record counts these bytes. Sums are not weighted. ``n_items``: items known
        in the block."""
        return {}

    def row_basis(self, name: str, width: int, draw: DrawKey) -> Tensor | None:
        """At the clients: what changes of the rows of public table ``name``, (items, width), are made of. Clients train
        A in rows + A B, from A = 0 in every round, B as it is. Of backbones on lists of items. ``draw``: key of the
        round's random numbers; the server has the same. Returns B, (r, width), the same for all clients; or None, and
        rows are trained freely."""

    def begin_step(self, step: TrainingStep, model: Snapshot, backbone: Backbone) -> None:
        """Before the first round of a step, from ``first_step`` on, but not of step 0; at clients and server.
        ``model``: what the step starts from, with rows for its new users and items; before ``reset_private``."""

    def new_private(self, seed: int, users: range, backbone: Backbone) -> Tables:
        """Initial private parameters that the method adds at new clients, float64, each (users, ...). They are trained
        with the backbone's, at ``lr``, and never uploaded."""
        return {}

    def new_server_state(self, seed: int, public: Tables) -> Tables:
        """What ``server_state`` holds before the method first acts, as the parameters of a module that the server
        trains (see ``toolbox/server_module.py``). ``public``: untrained item tables of the step's items, or those of
        the step before with rows for new ones."""
        return {}

    def new_item_rows(self, items: range, public: Tables) -> Tables:
        """At the server, with ``cold_items=method``: rows of the public tables for items that arrive after a step's
        training, each (new items, ...). ``public``: the tables after a round, of all items before them."""
        raise NotImplementedError(f"method '{self.name}' has no new_item_rows()")

    def begin_round(self, step: TrainingStep, round_: int, backbone: Backbone) -> None:
        """Before the local training of a round, at the clients. Chunks of clients are trained on several threads, and
        their hooks may write their own clients' rows of state: a tensor that is written in place must be cloned here
        first, as checkpoints hold the old one."""

    def central_round(self, step: TrainingStep, model: Snapshot, backbone: Backbone, draw: DrawKey
                      ) -> tuple[Snapshot, float]:
        """With ``trains = "server"``: a round in which one party that holds all data trains instead of the clients, as
        an epoch. What it remembers besides the model belongs into ``server_state``, as new tensors. ``model``: after
        the round before; not to be written to; ``draw``: key of the round's random numbers. Returns (the model after
        the round; the mean loss)."""
        return model, 0.0

    def before_training(self, local: LocalSessions) -> None:
        """With ``uploads_first``: what clients upload before the training of a round, with the parameters that the
        server sent. ``end_round`` has its answers ready for the training of the same round."""

    def begin_local(self, local: Local | LocalSessions) -> None:
        """Before clients train, with the parameters that the server sent."""

    def represent(self, encoding: Encoding) -> Tensor:
        """What a sequential backbone's logits are inner products with, (C, L, d): the features, or made of them. In
        training it is called once per local batch and its result is differentiated."""
        return encoding.features

    def end_local(self, local: Local | LocalSessions) -> None:
        """After clients have trained, with their trained parameters: the place for ``local.upload``."""

    def end_round(self, round_: int, users: Tensor, uploads: Tables) -> Tables:
        """At the server, after the aggregation of a round; with ``uploads_first`` before its training. ``users``: ids
        of the N participants, ascending; ``uploads``: what they sent besides public parameters (see ``uploads``), each
        (N, ...). Returns what it answers them, each (N, ...). Clients keep it in ``client_state`` by name, with a row
        of zeros for each client that has had none yet; those that are new in a step have theirs when it begins."""
        return {}

    def answer_queries(self, queries: Tensor, users: Tensor) -> Tensor:
        """At the server, in an evaluation: its answers to the queries of some clients (``Encoding.ask``), both (C, n).
        Of methods that ask nothing it is never called."""
        raise NotImplementedError(f"method '{self.name}' asks in an evaluation and has no answer_queries()")

    def replayed_items(self, users: Tensor, draw: DrawKey) -> Tensor | None:
        """Items, besides the batch's own, whose scores ``local_loss`` differentiates. ``users``: ids of C clients;
        ``draw``: key of the round's random numbers (its ``batch`` is 0). Returns int64 item ids of shape (C, n), or
        None."""

    def replayed_sessions(self, users: Tensor, draw: DrawKey) -> Tensor | None:
        """With a sequential backbone: sessions, besides the round's own, that clients encode too
        (``LocalSessions.replay``). ``users``: ids of C clients; ``draw``: key of the round's random numbers. Returns
        numbers of each client's training sessions, int64 of shape (C, K), each once, the fewer a client has with -1
        behind them; or None."""

    def local_loss(self, batch: LocalBatch | LocalSessions) -> Tensor | None:
        """Added to each client's recommendation loss in every local batch: shape (C,), or None. ``batch``: what clients
        score, with a sequential backbone their ``LocalSessions``."""

    def soft_targets(self) -> SoftTargets | None:
        """What clients distil in every local batch of a round, on lists of items; asked before clients train. It does
        what ``replayed_items`` and ``local_loss`` would with ``toolbox/distillation.py``, in less time: a row of each
        user's, of which a client sees its own."""

    def gradient_correction(self, local: Local, items: Tensor) -> Tables:
        """Before clients train, of methods with ``sees_rows``: what is added to their gradients in each local batch of
        the round. Of backbones on lists of items. ``items``: the items whose rows they hold, int64 of shape (C, n); one
        may be listed twice. Returns it by public parameter, (C, ...), of item tables (C, n, ...)."""
        return {}

    def row_penalty(self, name: str) -> Callable[[Tensor, Tensor], Tensor] | None:
        """A penalty on every row of public table ``name``, whether the client touches the row or not. Returns None, or
        a function of (rows of shape (C, n, ...), their item ids of shape (C, n)) that returns the penalty of each row,
        shape (C, n). It must be the same function for all clients: then rows no client touches move alike everywhere
        and are computed once."""

    def pull(self, name: str, private: bool) -> Pull | None:
        """What each client keeps a public or private parameter near in every local batch of a round; asked before
        clients train. It does what ``row_penalty`` and ``local_loss`` would with half a squared distance, in less time.
        The loss that is recorded is without it."""

    @classmethod
    def adds_scores(cls) -> bool:
        """Whether a term of scores may be added to the loss."""
        return cls.local_loss is not Method.local_loss or cls.soft_targets is not Method.soft_targets

    @property
    def penalises_rows(self) -> bool:
        """Whether ``row_penalty`` or ``pull`` may return something; known before the run, as it decides how clients are
        trained."""
        return self.overrides("row_penalty") or self.overrides("pull")

    def aggregate(self, public: Tables) -> Tables:
        """The server's item tables after plain averaging (and upload noise), to be broadcast in the next round. With
        ``cold_items`` they are without the rows of the step's new items, which ``begin_step`` sees."""
        return public

    def aggregate_dense(self, dense: Tables) -> Tables:
        """The same of the public parameters without item rows, as the layers of a predictor or an encoder; called after
        ``aggregate`` with all of them, if the backbone has any."""
        return dense

    def aggregate_updates(self, updates: ClientUpdates) -> Tables:
        """At the server, in place of the mean, of methods that look at single clients' uploads: the change of every
        public parameter, item tables and dense ones. ``aggregate`` and ``aggregate_dense`` are given the result. It is
        called only if it is overridden: a server that does so can do without secure aggregation only, which
        ``gives_up`` must say (F7)."""
        return updates.weighted_sum(updates.weights / updates.weights.sum())

    def aggregate_sums(self, sums: Tables, count: int, public: Tables, draw: DrawKey) -> Tables:
        """At the server, in place of the mean, of methods that declare ``sums``: the change of every public parameter,
        item tables and dense ones. ``aggregate`` is given the result. ``sums``: over the participants, who are
        ``count``; ``public``: all public parameters as they were sent to the clients; ``draw``: key of the round's
        random numbers."""
        raise NotImplementedError(f"method '{self.name}' declares sums() and has no aggregate_sums()")

    def receive(self, private: Tables, sums: Tables, count: int, draw: DrawKey) -> Tables:
        """At the participants, after the server's part of a round, of methods whose server sends them the ``sums``.
        ``private``: parameters of C clients after their training, each (C, ...); not to be written to. Returns those
        private parameters that are others now. It is called on several threads."""
        return {}

    def rescore(self, users: Tensor, scores: Tensor, model: Snapshot, backbone: Backbone) -> Tensor:
        """Scores to rank by, when a model is validated or tested. ``users``: ids of n users; ``scores``: logits of all
        items, shape (n, items). Returns others of that shape, all finite: nan or an infinity ends the run as failed."""
        return scores

    def rescore_session(self, users: Tensor, scores: Tensor, before: Ragged, model: Snapshot, backbone: Backbone
                        ) -> Tensor:
        """In a stream of sessions, with a backbone that is not sequential: it takes the place of ``rescore``.
        ``before``: of each of the users the items before the one to find in the session that is ranked, in order."""
        return scores

    def end_step(self, step: TrainingStep, model: Snapshot, backbone: Backbone, trained: Tensor, draw: DrawKey) -> None:
        """After a step, with the model of its best validation round; at clients and server. ``trained``: ids of the
        users with training data in the step; ``draw``: key of random numbers for this call."""

    def notes(self, participants: int) -> Iterable[str]:
        """Sentences that the user should read before a run, in whose first round so many clients take part."""
        return ()

    def privacy(self) -> Iterable[str]:
        """Sentences on what the method's own noise guarantees, kept in the record and shown with the result."""
        return ()

    def downloads_previous_model(self) -> bool:
        """Whether clients receive the previous step's best public tables once per step, besides those of each round."""
        return False


HOOKS = ("new_server_state", "begin_step", "new_private", "begin_round", "before_training", "begin_local", "represent",
         "end_local", "end_round", "answer_queries", "replayed_items", "replayed_sessions", "local_loss",
         "soft_targets", "gradient_correction", "row_penalty", "pull", "row_basis", "sums", "aggregate_sums", "receive",
         "aggregate_updates", "aggregate", "aggregate_dense", "new_item_rows", "rescore", "rescore_session", "end_step")


def does_something(method: Method | type[Method]) -> bool:
    """Whether a method, or a class of methods, differs from fine-tuning: by a hook of its own, or by what trains."""
    cls = method if isinstance(method, type) else type(method)
    return cls.trains != "clients" or cls.history or any(
        getattr(cls, hook) is not getattr(Method, hook) for hook in HOOKS)
