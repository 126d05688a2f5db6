"""Block 0 as a file of tables, so that runs, and other programs, can start from the same model.

The file is NumPy's ``.npz`` without pickled objects:

- ``user_ids``, ``item_ids``  original ids as text, in the order of the rows
- ``public/NAME``             public item tables, (items, ...)
- ``private/NAME``            each client's own parameters, (users, ...)
- ``dense/NAME``              public parameters without item rows
- ``start/NAME``              optional: private parameters of one client, (...), as every new client begins with them,
                              and with ``reset_private`` every client of a block

Names and shapes are those of the backbone's tables in ``model.pt``. The order of the ids is free, and ids that block 0
does not know are left out. An imported file is kept as ``shared/base-NAME.npz`` of a results folder, where NAME is the
hash of its arrays. The setting ``base_model`` is that name, so it stands for the numbers in the run's hash.
"""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Mapping, Sequence

import numpy as np
import torch

from ..backbone import Backbone
from ..data.archives import arrays_of
from ..draws import Tables
from ..errors import UserError
from ..federation.growth import grow
from ..federation.parts import Federation
from ..files import write_atomically
from ..model import Snapshot
from ..schema import read_bytes
from .config import SHARED

KINDS, START = ("public", "private", "dense"), "start"
_NAME = "[0-9a-f]{16}"
_CURE = "docs/records.md has the format; `base export` writes it."


def file_of(results: Path, name: str) -> Path:
    """Where an imported base is kept."""
    return results / SHARED / f"base-{name}.npz"


def common_start(backbone: Backbone, seed: int, model: Snapshot) -> Tables:
    """The private parameters that every new client begins with, where they are the same for all: those of
    ``model.start``, or else the backbone's."""
    drawn = {name: rows for name, rows in backbone.new_rows(seed, range(2), range(0))[1].items()
             if torch.equal(rows[0], rows[1])}
    return {**{name: rows[0].to(model.private[name]) for name, rows in drawn.items()}, **model.start}


def export(path: Path, model: Snapshot, user_ids: Sequence[str], item_ids: Sequence[str]) -> None:
    """Write a base.

    Raises:
        UserError: for a backbone whose clients hold or are served tables of their own.
    """
    if model.local or model.served or model.memory:
        raise UserError("base export: clients of this backbone hold item tables or a memory of their own, which a base "
                        "has not; accepted: a backbone such as fedmf, fedncf or pfedrec.")
    arrays = {f"{kind}/{name}": table.cpu().numpy() for kind in (*KINDS, START)
              for name, table in getattr(model, kind).items()}
    buffer = io.BytesIO()
    np.savez(buffer, user_ids=np.asarray(user_ids, dtype=str)[:model.n_users],
             item_ids=np.asarray(item_ids, dtype=str)[:model.n_items], **arrays)
    write_atomically(path, buffer.getvalue())


def keep(path: Path, results: Path) -> str:
    """Copy a base into a results folder; its name, the value of ``base_model``. Raises UserError if it is none."""
    try:
        content = read_bytes(path, _CURE)
    except FileNotFoundError:
        raise UserError(f"{path}: is not there; make it with `base export`.") from None
    arrays = arrays_of(content, str(path), _CURE)
    for ids in ("user_ids", "item_ids"):
        if ids not in arrays or arrays[ids].dtype.kind != "U" or arrays[ids].ndim != 1:
            raise UserError(f"{path}: '{ids}' is missing or is no list of texts; docs/records.md has the format.")
    name = _hash(arrays)
    (results / SHARED).mkdir(parents=True, exist_ok=True)
    write_atomically(file_of(results, name), content)
    return name


def load(federation: Federation, results: Path) -> Snapshot:
    """The model that ``base_model`` names, with its rows in the stream's order.

    Raises:
        UserError: if there is no such file, or it does not fit the backbone or block 0.
    """
    name = federation.server.base_model
    path = file_of(results, name)
    if not re.fullmatch(_NAME, name) or not path.exists():
        raise UserError(f"setting 'base_model': found '{name}', accepted: what `base import FILE` prints; {results} "
                        f"has no base of this name.")
    arrays, stream = arrays_of(read_bytes(path, _CURE), str(path), _CURE), federation.stream
    if _hash(arrays) != name:
        raise UserError(f"{path}: is not what was imported under this name; import it again.")
    step = stream.steps[0]
    rows = {"private": _rows(arrays["user_ids"], stream.user_tokens[:step.n_users], "user", path),
            "public": _rows(arrays["item_ids"], stream.item_tokens[:step.n_items], "item", path)}
    fresh = grow(Snapshot({}, {}), federation.backbone, federation.seed, step,
                 getattr(torch, federation.server.precision), federation.device)
    tables = {kind: {name: _table(arrays, f"{kind}/{name}", rows.get(kind), table, path)
                     for name, table in getattr(fresh, kind).items()} for kind in KINDS}
    return replace(fresh, **tables, start=_start(arrays, federation.backbone.new_rows(0, range(1), range(0))[1],
                                                 fresh.private, path))


def _hash(arrays: Mapping[str, np.ndarray]) -> str:
    """The name of a base: of its arrays, as the bytes of the file hold the time of writing too."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _rows(ids: np.ndarray, wanted: Sequence, kind: str, path: Path) -> torch.Tensor:
    """Where the rows of block 0 are in the file."""
    row_of = {identity: row for row, identity in enumerate(ids.tolist())}
    missing = [str(identity) for identity in wanted if str(identity) not in row_of]
    if missing or len(row_of) != len(ids):
        fault = f"{len(missing)} {kind}s of block 0 are not in it, as {missing[0]}" if missing else \
            f"it has the same {kind} twice"
        raise UserError(f"{path}: {fault}; accepted: every {kind} of block 0 once, with the ids of the data.")
    return torch.tensor([row_of[str(identity)] for identity in wanted])


def _start(arrays: Mapping[str, np.ndarray], rows: Tables, private: Tables, path: Path) -> Tables:
    """What the file says that new clients begin with; ``rows``: what the backbone does, each (1, ...)."""
    given = [name.partition("/")[2] for name in arrays if name.startswith(f"{START}/")]
    for name in given:
        if name not in rows:
            raise UserError(f"{path}: the table '{START}/{name}' is none of this backbone's; accepted: "
                            f"{', '.join(f'{START}/{known}' for known in sorted(rows)) or 'none'}.")
    return {name: _table(arrays, f"{START}/{name}", None, private[name][0], path) for name in given}


def _table(arrays: Mapping[str, np.ndarray], name: str, rows: torch.Tensor | None, like: torch.Tensor,
           path: Path) -> torch.Tensor:
    """A table of the file in the form of the backbone's own."""
    if name not in arrays or arrays[name].dtype.kind != "f":
        raise UserError(f"{path}: the table '{name}' is missing or holds no numbers; it has "
                        f"{', '.join(sorted(arrays))}.")
    table = torch.from_numpy(arrays[name])
    if rows is not None:
        table = table[rows] if len(table) > int(rows.max()) else table[:0]
    if table.shape != like.shape or not bool(table.isfinite().all()):
        raise UserError(f"{path}: the table '{name}' is {tuple(arrays[name].shape)}, accepted: finite numbers, for "
                        f"block 0 {tuple(like.shape)}.")
    return table.to(like)
