"""The one decision how clients are trained, made once per step."""

from __future__ import annotations

from dataclasses import dataclass

from ..backbone import Backbone
from ..method import Method
from ..model import Snapshot
from ..sampling import LocalSettings
from ..sequential import SequentialBackbone
from ..stats.clip_noise import OPEN, Protection
from .at_rest import holds_whole, is_partial
from .factored import is_inner, scores_samples_only
from .fused import is_one_call


@dataclass(frozen=True)
class Way:
    """How the clients of a step are trained.

    Attributes:
        name: of the way, as in the table of ``choose_way``.
        holds_whole: a chunk has memory for all item rows of each of its clients.
        samples_only: nothing looks at logits of other items than a local batch's.
    """

    name: str
    holds_whole: bool = False
    samples_only: bool = False

    @property
    def factored(self) -> bool:
        """Whether clients are trained without copies of item rows, where that is less work."""
        return self.name in ("fused", "factored")

    @property
    def fused(self) -> bool:
        """Whether a chunk's whole round is then one call."""
        return self.name == "fused"

    @property
    def at_rest(self) -> bool:
        return self.name == "at rest"


@dataclass(frozen=True)
class Training:
    """What the clients of a step have in common when they train.

    Attributes:
        method: the one that acts in the step.
        protection: of uploads. own_start: clients draw the public parameters they begin the first round with
            (``init=per_client``).
    """

    backbone: Backbone
    method: Method
    settings: LocalSettings
    way: Way
    protection: Protection = OPEN
    own_start: bool = False

    @property
    def personal(self) -> set[str]:
        """Names of the tables with a row per user and item."""
        return set(self.backbone.new_personal(0, range(0)))


def choose_way(backbone: Backbone, method: Method, model: Snapshot, settings: LocalSettings, sessions: bool) -> Way:
    """How to train clients.

    Args:
        model: the parameters as they lie at the start of the step, or a model of one user and one item like it.
        sessions: clients train on their next session in each round.
    """
    if isinstance(backbone, SequentialBackbone):
        return Way("sessions")
    samples_only = not sessions and scores_samples_only(backbone, method)
    if not sessions and is_inner(backbone, method, model, settings):
        return Way("fused" if is_one_call(backbone, method, model, settings) else "factored",
                   samples_only=samples_only)
    if is_partial(backbone, method, model, settings):
        return Way("at rest", holds_whole(backbone, method, model, settings), samples_only)
    return Way("whole" if backbone.whole_tables else "rows", backbone.whole_tables, samples_only)
