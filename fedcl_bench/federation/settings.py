"""What a server can be set to, without what it does: tables resolve settings without loading the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ..core.settings import holds, setting
from ..data.settings import NOT_IN_EPOCHS

if TYPE_CHECKING:
    from ..data.stream import Step
    from ..stats.clip_noise import Protection
    from .aggregators import Aggregator, ServerOptimiser
    from .client_sampling import Attendance


class Disclosure(NamedTuple):
    """A setting that tells the server something of clients' data beside their uploads, which no clipping and noise of
    uploads protects."""

    name: str
    value: str  # with which it does so
    learns: str  # what the server learns, as a clause
    accepted: str  # what clipping goes with instead
    needs: str = ""  # a condition on another setting without which it is inactive, if there is one


WEIGHTED = "aggregator=mean|norm_bound"  # these read ``weighting``
DISCLOSURES = (
    Disclosure("weighting", "interactions", "weights tell the server how many interactions a client has",
               "weighting=uniform", needs=WEIGHTED),
    Disclosure("availability", "activity", "how often a client takes part tells the server how many interactions it "
               "has", "availability=always or day"),
    Disclosure("cold_start", "popularity", "the server gets exact counts of the items that clients train on",
               "cold_start=fold_in or mean", needs="fold_in"),
    Disclosure("cold_items", "popularity", "the server gets exact counts of the items that clients train on",
               "cold_items=none or similar"))


@dataclass(frozen=True)
class FederationSettings:
    """What the server does (F3CRec, section 5.1 and its released code)."""

    rounds: int = setting(100, "most rounds per block", low=1)
    patience: int = setting(30, "rounds without a better validation metric before a block ends; 0: it never ends early",
                            low=0)
    evaluate_every: int = setting(1, "rounds from one validation to the next; a block's last round is always "
                                  "validated. Patience still counts rounds, and a block ends early only in a validated "
                                  "one", low=1)
    best_round: str = setting("first", "of rounds with the same validation metric the first (F3CRec) or the latest "
                              "(PFedRec, GPFedRec) counts as the best", choices=("first", "latest"))
    client_ratio: float = setting(1.0, "share of the clients with data that take part in a round", above=0.0, high=1.0,
                                  only_if=NOT_IN_EPOCHS)
    availability: str = setting("always", "which clients can be asked: always all; by day, each in 12 of 24 rounds; by "
                                "activity, the more often the more interactions it has",
                                choices=("always", "day", "activity"), only_if=NOT_IN_EPOCHS)
    client_dropout: float = setting(0.0, "probability that a client fails after its training: it has received the "
                                    "model, and what it trained is lost", low=0.0, below=1.0, only_if=NOT_IN_EPOCHS)
    stragglers: float = setting(0.0, "probability that a client ends a round before its last local epoch", low=0.0,
                                high=1.0, only_if="local_epochs!=1")
    upload_noise: float = setting(0.0, "scale of the noise on every uploaded number: b of Laplace noise, the standard "
                                  "deviation of Gaussian", low=0.0, only_if=NOT_IN_EPOCHS)
    upload_mechanism: str = setting("laplace", "distribution of that noise, and with it the norm of upload_clip: L1 "
                                    "with laplace, L2 with gaussian", choices=("laplace", "gaussian"),
                                    only_if="upload_noise or upload_clip")
    upload_clip: float = setting(0.0, "a client's change of all public parameters in a round is scaled down to this "
                                 "norm; 0: never. With noise it bears a formal guarantee", low=0.0,
                                 only_if=NOT_IN_EPOCHS)
    weighting: str = setting("uniform", "all clients count alike in the mean, or by their training interactions",
                             choices=("uniform", "interactions"),
                             only_if=("topology=federated", WEIGHTED))
    aggregator: str = setting("mean", "what the server makes of the clients' changes: their mean; of each number the "
                              "median, or the mean without the trimmed_share largest and smallest, of those who sent "
                              "it, times their share; Krum; or the mean of changes of bounded norm",
                              choices=("mean", "median", "trimmed_mean", "krum", "norm_bound"),
                              only_if=(*NOT_IN_EPOCHS, "aggregator!=mean"))
    trimmed_share: float = setting(0.1, "share of the largest, and of the smallest, that trimmed_mean leaves out",
                                   low=0.0, below=0.5, only_if="aggregator=trimmed_mean")
    krum_malicious: int = setting(1, "f, clients of a round that may be malicious; more than 2 f + 2 must take part",
                                  low=0, only_if="aggregator=krum")
    krum_selected: int = setting(1, "m, how many changes Krum takes the mean of; from 2 on it is Multi-Krum", low=1,
                                 only_if="aggregator=krum")
    norm_bound: float = setting(1.0, "largest norm of a client's change, as a multiple of the round's median norm",
                                above=0.0, only_if="aggregator=norm_bound")
    attack: str = setting("none", "an attack by malicious clients (see list)", only_if=(*NOT_IN_EPOCHS, "attack!=none"))
    malicious: float = setting(0.05, "malicious clients, as a share of the users with data in a block: they are added "
                               "to these, or some of these, as the attack says", low=0.0, only_if="attack!=none")
    attack_blocks: int = setting(0, "blocks, from the first on, in which malicious clients take part; 0: all", low=0,
                                 only_if="attack!=none")
    server_optimiser: str = setting("none", "what the server makes of the clients' mean change: it adds it (none: "
                                    "FedAvg) or takes it for the gradient of momentum (FedAvgM), adam, yogi or adagrad "
                                    "(Reddi et al., Algorithm 2); anew in every block",
                                    choices=("none", "momentum", "adam", "yogi", "adagrad"),
                                    only_if=("topology=federated", "server_optimiser!=none"))
    server_optimiser_lr: float = setting(1.0, "its learning rate eta; adam, yogi and adagrad need less, as 0.01",
                                         above=0.0, only_if="server_optimiser!=none")
    server_momentum: float = setting(0.9, "share of its momentum that it keeps from round to round: the beta of "
                                     "FedAvgM, beta_1 of the others (of adagrad 0 in its paper)", low=0.0, below=1.0,
                                     only_if="server_optimiser!=none")
    server_beta2: float = setting(0.99, "beta_2, the same of squares", low=0.0, below=1.0,
                                  only_if="server_optimiser=adam|yogi")
    server_epsilon: float = setting(0.001, "tau, their degree of adaptivity: added to the root of squares, and what "
                                    "that begins with", above=0.0, only_if="server_optimiser=adam|yogi|adagrad")
    reset_private: bool = setting(False, "clients with data in a block start it from untrained private parameters "
                                  "(personal item tables stay), as the released FedNCF and PFedRec code of F3CRec does",
                                  only_if=NOT_IN_EPOCHS)
    init_from: str = setting("last", "a block starts from the previous one's last round (released code) or its best "
                             "validation round", choices=("last", "best"), only_if=NOT_IN_EPOCHS)
    precision: str = setting("float32", "floating-point numbers of the training", choices=("float32", "float64"))
    init: str = setting("server", "all clients begin the first round with the server's random public parameters "
                        "(Algorithm 1 of FCUCR), or each with its own (FCUCR's released code)",
                        choices=("server", "per_client"), only_if=("stream=sessions", "topology!=central"))
    fold_in: int = setting(0, "of a user who is new in a block, how many training interactions the client knows when "
                           "it arrives, after the block's training; 0: new users take part in it", low=0,
                           only_if="stream=blocks")
    fold_in_rounds: int = setting(20, "rounds of local training in which a new user fits its private parameters to "
                                  "them, the public ones frozen; and of those in which new items are fitted", low=1,
                                  only_if=("fold_in or cold_items=fold_in", "cold_start=fold_in or cold_items=fold_in"))
    cold_start: str = setting("fold_in", "what new users get: such a fit; the mean of their items' public vectors as "
                              "vector of their own; or the most popular items",
                              choices=("fold_in", "mean", "popularity"), only_if="fold_in")
    cold_items: str = setting("none", "of items that are new in a block: they take part in its training (none), or "
                              "arrive after it and are ranked by untrained rows, the mean row of the items with the "
                              "most similar texts, that of all items by popularity, rows that the server has those "
                              "clients fit that know them, or those of the method",
                              only_if=("stream=blocks", "cold_items!=none"),
                              choices=("none", "untrained", "similar", "popularity", "fold_in", "method"))
    similar_items: int = setting(10, "how many items with similar texts", low=1, only_if="cold_items=similar")
    tested_round: str = setting("best", "the model tested is that of the best validation round, or of the last round",
                                choices=("best", "last"), only_if="stream=sessions|domains")

    @property
    def attendance(self) -> Attendance:
        from .client_sampling import Attendance

        return Attendance(self.client_ratio, self.availability, self.client_dropout, self.stragglers, self.fold_in > 0)

    @property
    def optimiser(self) -> ServerOptimiser | None:
        """What makes a step of the mean change; None: it is added."""
        from .aggregators import ServerOptimiser

        return None if self.server_optimiser == "none" else ServerOptimiser(self)

    @property
    def single_updates(self) -> Aggregator | None:
        """What the server makes of clients' single changes; None: their mean, or what the method does."""
        from .aggregators import Aggregator

        return None if self.aggregator == "mean" else Aggregator(self)

    @property
    def protection(self) -> Protection:
        """What clients do to their uploads."""
        from ..stats.clip_noise import Protection

        return Protection(self.upload_clip, self.upload_noise, self.upload_mechanism)

    @property
    def disclosures(self) -> list[Disclosure]:
        return [each for each in DISCLOSURES if getattr(self, each.name) == each.value
                and (not each.needs or holds(each.needs, self))]

    def as_known(self, step: Step) -> Step:
        """A step as its clients know it in its rounds: of new users their first interactions alone (``fold_in``), and
        none with new items where these arrive later (``cold_items``)."""
        step = truncated_for_new_users(step, self.fold_in)
        if self.cold_items == "none" or step.index == 0:
            return step
        return replace(step, train=step.train.where(step.train.values < step.old_items))


def truncated_for_new_users(step: Step, fold_in: int) -> Step:
    """A step as its clients know it: of a new user the first ``fold_in`` training interactions; 0: all."""
    if fold_in == 0 or step.index == 0:
        return step
    limits = step.train.lengths.clone()
    limits[step.old_users:].clamp_(max=fold_in)
    return replace(step, train=step.train.at_most(limits))
