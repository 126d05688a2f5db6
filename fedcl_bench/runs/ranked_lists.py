"""Users' ranked lists as TREC run files, with the items to find as qrels and their origin as ir_metadata.

From them ``ir-measures``, ``ranx`` and other tools of information retrieval compute metrics without the suite. A list
is as long as the longest of ``topk``. Scores are places counted from the end, as the metrics know no more of a list
than its order; items of equal score are in the order that the metrics take them in. In streams of sessions with sampled
candidates, which may repeat, lists are those under full ranking.
"""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Iterable, Sequence
from urllib.parse import quote

import numpy as np
import torch
import yaml

from ..core.errors import UserError
from ..core.files import sweep, write_atomically
from ..data.stream import Stream
from ..evaluation.ranking import UserScores
from ..evaluation.session_ranking import FULL
from ..federation.parts import Progress
from .config import RunConfig
from .summary import environment

METADATA = "ir_metadata.yaml"


@dataclass(frozen=True)
class RankedListWriter:
    """Writes what a run's tests have ranked; ``folder``: of its files: ``trainedT-testedS.run.gz`` of every test,
    ``testedS.qrels.gz``, ``ir_metadata.yaml``."""

    folder: Path
    config: RunConfig
    stream: Stream

    def write(self, trained: int, tested: int, scores: UserScores) -> None:
        """Write the lists of a test, best item first, and the items to find. Raises OSError if the files cannot be
        written. ``trained``, ``tested``: numbers of blocks, or of domains' blocks, as records have them; ``scores``:
        with lists, (n, K): of the items of the test's domain, if there are domains."""
        users, items = self._names(scores.users), _words(self._items(tested))
        found_in, to_find = self._to_find(tested, scores)
        lists = scores.lists.cpu()
        if self.stream.units()[tested].sessions:
            prefix = FULL if any(name.startswith(FULL) for name in scores.values) else ""
            lists = in_order_of_metrics(lists, to_find, scores.values[f"{prefix}mrr@{lists.shape[1]}"].cpu())
        lists = lists.numpy()
        row, place = (lists >= 0).nonzero()
        self._write(f"trained{trained}-tested{tested}.run", zip(
            users[row], repeat("Q0"), items[lists[row, place]], place + 1, lists.shape[1] - place,
            repeat(self.config.name)))
        self._write(f"tested{tested}.qrels", ((users[row], 0, items[item], 1)
                                              for row, item in zip(found_in.tolist(), to_find.tolist())))

    def finish(self) -> None:
        """Say where the lists come from, once all of them are there."""
        sweep(self.folder)
        write_atomically(self.folder / METADATA, self._metadata().encode())

    def require(self, progress: Progress, record: Path) -> None:
        """Raise UserError if the lists of a test so far are not there, as those of a record that was begun without."""
        if not all((self.folder / f"trained{trained}-tested{tested}.run.gz").is_file()
                   for trained, tested, _ in progress.tests):
            raise UserError(f"--save-lists: {record} was begun without, so lists of its first blocks are missing.\n"
                            f"Begin it again with --rerun.")

    def _write(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        text = "".join(" ".join(map(str, row)) + "\n" for row in rows)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / METADATA).unlink(missing_ok=True)  # of lists that are written again
        write_atomically(self.folder / f"{name}.gz", gzip.compress(text.encode(), mtime=0))

    def _names(self, users: torch.Tensor) -> np.ndarray:
        """What users are called, or sessions where one party holds all."""
        if len(self.stream.user_tokens) == 1:
            return users.cpu().numpy().astype(str)
        return _words(self.stream.user_tokens[users.cpu().numpy()])

    def _items(self, tested: int) -> np.ndarray:
        """The ids of the items that a test ranks: all, or those of its domain."""
        if not self.stream.domains:
            return self.stream.item_tokens
        items = self.stream.domains[tested % self.stream.per_step].items
        return self.stream.item_tokens[items.start:items.stop]

    def _to_find(self, tested: int, scores: UserScores) -> tuple[torch.Tensor, torch.Tensor]:
        """Items to find, by the row of their list, each once."""
        step = self.stream.units()[tested]
        if step.sessions:  # one item per session, in their order; of a sample, those of its users
            items = step.sessions["test"].targets()
            of_all = len(items.values) == len(scores.users)
            items = items.values if of_all else items.part(scores.users.cpu()).values
            return torch.arange(len(items)), items.cpu()
        row, item = step.test.select(scores.users.cpu())
        return torch.unique(torch.stack([row, item.cpu()]), dim=1).unbind()

    def _metadata(self) -> str:
        """Where the lists come from, in the words of ir_metadata (https://www.ir-metadata.org), each line a comment so
        that the file may stand before a run file's first line."""
        c, here = self.config, environment(self.config.device)
        packages = [f"{name}=={here[name]}" for name in ("fedcl_bench", "torch", "recbole", "numpy", "pandas", "scipy")]
        content = {
            "schema-version": 0.1,
            "platform": {"hardware": {"cpu": {"model": here["processor"], "number of cores": here["cores"]}},
                         "operating system": {"kernel": here["system"]},
                         "software": {"libraries": {"python": packages}}},
            "research goal": {"evaluation": {"reported measures": [f"ndcg_cut_{k}" for k in c.evaluation.topk]}},
            "implementation": {"source": {"lang": ["python"]}},
            "data": {"test collection": {"name": c.source.name, "source": c.source.fingerprint,
                                         "qrels": "testedS.qrels.gz"}},
            "method": {"automatic": True, "retrieval": [{"name": f"{c.method.name} on {c.backbone.name}",
                                                         "seed": c.seed, "hash": c.hash, **c.settings}]},
        }
        lines = yaml.safe_dump(content, sort_keys=False, allow_unicode=True).splitlines()
        return "".join(f"# {line}\n" for line in ["ir_metadata.start", *lines, "ir_metadata.end"])


def folder_of(run: str, results: Path) -> Path:
    """Where the lists of a run of this name are."""
    return results / "lists" / run


def has_lists(folder: Path) -> bool:
    """Whether all lists of a run are in their folder."""
    return (folder / METADATA).is_file()


def require_lists(record: Path, folder: Path) -> None:
    """Raise UserError if a finished record has not all lists in their folder."""
    if not has_lists(folder):
        raise UserError(f"--save-lists: {record} is finished, and its run wrote no lists, or not all ({folder}).\n"
                        f"Run it again with --rerun.")


def _words(tokens: np.ndarray) -> np.ndarray:
    """Ids as words: TREC's files are separated by spaces, so spaces in an id are percent-encoded."""
    return np.array([re.sub(r"[\s%]", lambda found: quote(found[0]), token) for token in tokens.astype(str)])


def in_order_of_metrics(lists: torch.Tensor, to_find: torch.Tensor, reciprocal: torch.Tensor) -> torch.Tensor:
    """Lists of sessions, (n, K), with the item to find, (n,), where the metrics rank it: behind all others of its
    score. ``reciprocal``: 1 / rank, 0 where it is not among the first K, (n,)."""
    length = lists.shape[1]
    place = torch.where(reciprocal > 0, (1 / reciprocal).round().long() - 1, length)[:, None]
    found, column = lists == to_find[:, None], torch.arange(length, device=lists.device)
    others = lists.gather(1, found.to(torch.int8).argsort(dim=1, stable=True))
    others[:, -1].masked_fill_(found.any(1), -1)
    moved = others.gather(1, (column - (column > place).long()).clamp_(min=0))
    return torch.where(column == place, to_find[:, None], moved)
