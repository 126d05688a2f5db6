"""What every peer trains on: a model's sizes and learning rates, and the items of each client."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Job:
    """Attributes:
        model: the module of this folder that has it: ``fedmf`` or ``sasrec``.
        dataset, data_dir: where the lists are from.
        lists: each client's items: those it has interactions with, or those of its session in their order.
        rounds: how many are asked for; epochs: of a client in each.
        negatives: for each interaction, or each position of a session.
    """

    model: str
    dataset: str
    data_dir: str
    lists: list
    rounds: int
    epochs: int
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
        return cls(lists=lists, rounds=int(sys.argv[2]), **numbers)

    def make(self):
        """The model."""
        return importlib.import_module(self.model).Model(self)

    def samples(self, rng: np.random.Generator, client: int) -> tuple[np.ndarray, ...]:
        """The arguments of the model's loss for what a client trains on in a round: arrays with a row a sample."""
        known = self.lists[client]
        return self._session(rng, known) if self.model == "sasrec" else self._interactions(rng, known)

    def _interactions(self, rng: np.random.Generator, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Items and labels, with negatives that the client does not have, in random order."""
        others = np.setdiff1d(np.arange(self.n_items), items)
        every = np.concatenate([items, rng.choice(others, self.negatives * len(items))])
        labels = (np.arange(len(every)) < len(items)).astype(np.float32)
        order = rng.permutation(len(every))
        return every[order], labels[order]

    def _session(self, rng: np.random.Generator, items: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One session: items, those that follow them, and negatives; padded on the left with 0."""
        length = importlib.import_module(self.model).LENGTH
        negatives = rng.integers(1, self.n_items + 1, len(items) - 1)
        return tuple(np.pad(row, (length - len(row), 0))[None] for row in (items[:-1], items[1:], negatives))
