"""What every peer trains on: clients' items and FedMF's sizes and learning rates."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Job:
    """Attributes:
        lists: each client's items, in which it has interactions.
        rounds: how many are asked for.
    """

    lists: list
    rounds: int
    n_items: int
    dim: int
    batch_size: int
    negatives: int
    user_rate: float
    item_rate: float

    @classmethod
    def read(cls) -> "Job":
        """That of the command line: a file and a number of rounds."""
        data = np.load(sys.argv[1])
        lists = np.split(data["items"], np.cumsum(data["lengths"])[:-1])
        numbers = {name: data[name].item() for name in cls.__dataclass_fields__ if name not in ("lists", "rounds")}
        return cls(lists, int(sys.argv[2]), **numbers)

    def samples(self, rng: np.random.Generator, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A round's items and labels of a client, with negatives that it does not have, in random order."""
        others = np.setdiff1d(np.arange(self.n_items), items)
        every = np.concatenate([items, rng.choice(others, self.negatives * len(items))])
        labels = (np.arange(len(every)) < len(items)).astype(np.float32)
        order = rng.permutation(len(every))
        return every[order], labels[order]
