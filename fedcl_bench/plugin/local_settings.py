"""What a client does in a round: settings of local training, and what a backbone says of samples of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from torch import Tensor

from ..data.settings import IN_EPOCHS, NOT_IN_EPOCHS
from ..core.settings import setting

OPTIMISERS = ("sgd", "adam")


@dataclass(frozen=True)
class LocalSettings:
    """What a client does in a round (F3CRec, section 5.1 and its released code)."""

    optimiser: str = setting("sgd", "local optimiser, fresh in every round", choices=OPTIMISERS)
    adam_beta2: float = setting(0.999, "Adam's decay of squared gradients", above=0.0, below=1.0,
                                only_if="optimiser=adam")
    adam_eps: float = setting(1e-8, "what Adam adds to the root that it divides by", above=0.0,
                              only_if=("optimiser=adam", "adam_eps!=1e-08"))
    lr_later: float = setting(0.0, "lr from block 1 on, as F3CRec's released command line has it; 0: that of block 0",
                              low=0.0, only_if="stream=blocks")
    batch_size: int = setting(512, "samples per local batch", low=1)
    local_epochs: int = setting(1, "passes over a client's samples per round", low=1, only_if=NOT_IN_EPOCHS)
    tolerance: float = setting(0.0, "a client ends its round early when an epoch changes its loss by less than this "
                               "share (FedRAP); 0: never", low=0.0, only_if=NOT_IN_EPOCHS)
    repeated_positives: str = setting("every", "an item that a client has several times in a block is trained on in "
                                      "every row, or once (F3CRec's released code)", choices=("every", "once"),
                                      only_if="stream=blocks|static")
    negatives: int = setting(4, "negatives per positive, drawn once per round", low=1, only_if=NOT_IN_EPOCHS)
    negative_pool: str = setting("untrained", "negatives are items that the client does not train on in this block, or "
                                 "has in no split of it (released code of PFedRec, GPFedRec and FedRAP): untouched "
                                 "leaks test items", choices=("untrained", "untouched"),
                                 only_if=NOT_IN_EPOCHS)
    negative_draw: str = setting("repeated", "negatives of a positive are drawn with replacement, or all different",
                                 choices=("repeated", "distinct"), only_if=NOT_IN_EPOCHS)
    weight_decay: float = setting(0.0, "where a round is an epoch: the optimiser adds so much of a parameter to its "
                                  "gradient", low=0.0, only_if=IN_EPOCHS)
    lr_step: int = setting(0, "there, learning rates fall after every so many epochs; 0: never", low=0,
                           only_if=IN_EPOCHS)
    lr_decay: float = setting(0.1, "what they are then multiplied with", above=0.0, high=1.0, only_if="lr_step")

    @property
    def distinct(self) -> int:
        """How many negatives after the other, a positive's, are all different; 0: any may be drawn again."""
        return self.negatives if self.negative_draw == "distinct" else 0


@dataclass(frozen=True)
class OwnSamples:
    """How a backbone with a loss of its own makes samples of a client's positives."""

    of: Callable[[Tensor], Tensor]  # numbers of positives, int64, to numbers of samples per epoch
    per_batch: int  # samples in a local batch
    elements: tuple[int, int]  # numbers held in memory per sample, and per sample and item known
    # A client's only sample is the set of its positives, an item counted once: clients with different numbers of them
    # are trained together, short lists padded with their first item.
    as_set: bool = False
