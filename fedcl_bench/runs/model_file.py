"""``model.pt`` of a record: the tables after the last block, the ids of their rows and the method's state."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..core.errors import Corrupt
from ..core.files import read_required, replacing, write_atomically
from ..federation.parts import Federation, Progress
from ..plugin.method import Method
from ..plugin.state import Snapshot
from ..records.record import MODEL, MODEL_SUM
from .checkpoints import digest_from, read_tensors

_CURE = "Delete the file: no table needs it. Running the record again makes it."


@dataclass(frozen=True)
class SavedModel:
    """What ``model.pt`` holds.

    Attributes:
        tables: after the last block, of its best round.
        user_ids, item_ids: original ids in the order of the tables' rows.
        client_state, server_state: the method's in that round, empty if it does not rank by them.
    """

    tables: Snapshot
    user_ids: list[str]
    item_ids: list[str]
    client_state: dict[str, torch.Tensor]
    server_state: dict[str, torch.Tensor]


def ranks_by_state(method: Method) -> bool:
    """Whether a method's state may change how a model ranks. Others' states are left out of models: they hold whole
    tables of the step before."""
    return any(map(method.overrides, ("rescore", "rescore_session", "represent")))


def write_model(folder: Path, progress: Progress, federation: Federation) -> None:
    """Write ``model.pt`` and its checksum to a run's folder."""
    best, stream, stateful = progress.best, federation.stream, ranks_by_state(federation.method)
    content = {**vars(best.model), "user_ids": stream.user_tokens.astype(str, copy=False).tolist(),
               "item_ids": stream.item_tokens.astype(str, copy=False).tolist(),
               "client_state": best.client_state if stateful else {},
               "server_state": best.server_state if stateful else {}}
    with replacing(folder / MODEL) as file:
        torch.save(content, file)
        checksum = digest_from(file, 0)
    write_atomically(folder / MODEL_SUM, f"{checksum.hex()}  {MODEL}\n".encode())


def read_model(folder: Path) -> SavedModel:
    """The model of a finished run's folder; raises Corrupt if the file was deleted or has changed."""
    content = _content(folder)
    try:
        tables = Snapshot(**{f.name: content.pop(f.name) for f in fields(Snapshot)})
        return SavedModel(tables, **content)
    except (AttributeError, KeyError, TypeError):
        raise Corrupt(f"{folder / MODEL}: is not a model of this version", _CURE) from None


def _content(folder: Path) -> Any:
    """What ``model.pt`` holds, if its checksum fits; raises Corrupt."""
    path = folder / MODEL
    if not path.is_file():
        raise Corrupt(f"{path}: is {'no file' if path.exists() else 'missing'}", _CURE)
    recorded = read_required(folder / MODEL_SUM, _CURE).split()
    try:
        with open(path, "rb") as file:
            if recorded[:1] != [digest_from(file, 0).hex().encode()]:
                raise Corrupt(f"{path}: its hash does not match its content", _CURE)
            file.seek(0)
            return read_tensors(file, path, "cpu")
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read ({error.strerror})", _CURE) from None
