"""Data of real clients that are domains: a table of interactions and vectors of items' texts at each.

The table has a row per interaction, with the columns ``domain``, ``user``, ``item`` and ``timestamp``, as it stands in
the domain's file. Blocks and splits, and the numbers of users and items, are made of it as in a simulation.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Sequence
from zipfile import BadZipFile

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..core.errors import UserError, unknown
from ..data.datasets import domain_rows
from ..data.streams.domain_streams import build_domains
from ..data.items.features import silent
from ..data.items.item_texts import item_file
from ..data.files.recbole_files import SPLITS, Interactions
from ..data.source import DatasetSource
from ..data.stream import DomainPart, Sessions, Step, Stream, starts_of
from .client_files import FEDERATION, ClientData, Published, deal, read_table

FEATURES = "features.npz"  # beside the table


def deal_all(published: Published, source: DatasetSource, stream: Stream, names: Sequence[Tensor], out: Path
             ) -> list[Path]:
    """``client_files.deal``, and what items' texts are made of; of domains, ``names`` are the numbers of each client's.
    """
    if not stream.domains:
        tables = deal(published, stream, names, out)
        texts = item_file(out / "server" / FEDERATION)  # of all items, which the server publishes
        texts.unlink(missing_ok=True)  # of other data that were dealt there
        if (described := item_file(source.path)).is_file():
            shutil.copyfile(described, texts)
        return tables
    every = domain_rows(source, published.stream)

    def table(_: Stream, numbers: Tensor) -> pd.DataFrame:
        return pd.concat([pd.DataFrame({"domain": name, "user": rows.user_tokens[rows.user],
                                        "item": rows.item_tokens[rows.item], "timestamp": rows.time})
                          for name, rows in (every[number] for number in numbers.tolist())])
    tables = deal(published, stream, names, out, table)
    for path, numbers in zip(tables, names):
        (path.parent / FEATURES).unlink(missing_ok=True)  # of another run
        if stream.features:
            np.savez(path.parent / FEATURES, **{stream.domains[number].name: stream.features[number].numpy()
                                                for number in numbers.tolist()})
    return tables


def read_domains(path: Path, published: Published) -> ClientData:
    """A client's table as its part of the stream, whose ``names`` are the numbers of its domains. Raises UserError for
    a file that is none, a missing column, and a domain that the federation does not have, or has of another size."""
    frame, parts, streams = read_table(path), published.parts, {}
    if missing := [name for name in ("domain", "timestamp") if name not in frame]:
        raise UserError(f"{path}: no column {' and no column '.join(missing)}; found: {', '.join(frame)}.")
    known = [part.name for part in parts]
    for name, rows in frame.groupby("domain", sort=False):
        if name not in known:
            raise unknown("domain", str(name), known)
        streams[known.index(name)] = _stream(path, rows, parts[known.index(name)], published)
    numbers = sorted(streams)
    steps = []
    for t, (n_users, n_items, interactions) in enumerate(published.steps):
        here = [(parts[number], streams[number].steps[t]) for number in numbers]
        sessions = {split: _joined([(part, step.sessions[split]) for part, step in here], n_users)
                    for split in here[0][1].sessions}
        size = n_users, n_items
        steps.append(Step.of_sessions(t, size, size if t else (0, 0), interactions, sessions))
    tokens = [np.concatenate([getattr(streams[number], kind) if number in streams else np.full(len(ids), "")
                              for number, ids in enumerate(getattr(part, ids) for part in parts)])
              for kind, ids in (("user_tokens", "users"), ("item_tokens", "items"))]
    return ClientData(Stream(tuple(steps), *tokens, domains=parts, features=_features(path, parts, numbers)),
                      torch.tensor(numbers), published.steps[-1][0], 0)


def _stream(path: Path, rows: pd.DataFrame, part: DomainPart, published: Published) -> Stream:
    (user, users), (item, items) = (pd.factorize(rows[column].to_numpy(str)) for column in ("user", "item"))
    data = Interactions(user, item, rows["timestamp"].to_numpy(float), users, items)
    stream = build_domains([(part.name, data)], published.stream)
    [own] = stream.domains
    for what in ("users", "items", "interactions"):
        ours, theirs = getattr(own, what), getattr(part, what)
        if ours != theirs if what == "interactions" else len(ours) != len(theirs):
            found, wanted = (sum(each) if what == "interactions" else len(each) for each in (ours, theirs))
            raise UserError(f"{path}: found {found} {what} of domain '{part.name}', accepted: {wanted}, as the "
                            f"federation was made with.")
    return stream


def _joined(of_domains: Sequence[tuple[DomainPart, Sessions]], n_users: int) -> Sessions:
    """Sessions of some domains' users, by the numbers of all domains."""
    count = torch.zeros(n_users, dtype=torch.int64)
    for part, sessions in of_domains:
        count[part.users.start:part.users.stop] = sessions.count
    lengths = torch.cat([sessions.lengths for _, sessions in of_domains])
    items = torch.cat([sessions.items + part.items.start for part, sessions in of_domains])
    times = torch.cat([sessions.times for _, sessions in of_domains])
    return Sessions(starts_of(count), starts_of(lengths), items, times)


def _features(path: Path, parts: Sequence[DomainPart], numbers: Sequence[int]) -> tuple[Tensor, ...]:
    """Vectors of the texts of the client's items; of other domains none. Raises UserError if they are not those of its
    domains."""
    file = path.parent / FEATURES
    if not file.is_file():
        return ()
    try:
        with np.load(file) as arrays:
            own = {number: torch.from_numpy(arrays[parts[number].name]) for number in numbers}
    except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise UserError(f"{file}: has no vectors of the domains in {path.name} ({error}); `fedcl-bench data deal` "
                        f"writes both.") from None
    for number, vectors in own.items():
        items = len(parts[number].items)
        if vectors.ndim != 3 or len(vectors) != items:
            raise UserError(f"{file}: found vectors of shape {tuple(vectors.shape)} for domain '{parts[number].name}', "
                            f"accepted: ({items}, layers, dim), a row per item.")
    nothing = own[numbers[0]][:0]
    return tuple(own.get(number, nothing) for number in range(len(parts)))


def domain_sizes(stream: Stream, numbers: Tensor) -> dict[str, np.ndarray]:
    """What a client says of its domains' data: how many interactions each has in every block and split, and knows of
    blocks before; and of the vectors of its items how many are zero, and their shape."""
    here = numbers.tolist()
    said = {f"{step.index}/{split}": [len(stream.domains[number].of(step).split(split).values) for number in here]
            for step in stream.steps for split in SPLITS}
    for step in stream.steps[1:]:
        said[f"{step.index}/known"] = [len(stream.domains[number].of(step).sessions["known"].items) for number in here]
    if stream.features:
        said["features"] = [(silent(vectors), *vectors.shape[1:]) for vectors in map(stream.features.__getitem__, here)]
    return {name: np.array(values) for name, values in said.items()}


def stream_of_domains(published: Published, sizes: Sequence[tuple[Tensor, dict[str, np.ndarray]]]) -> Stream:
    """A stream of which only these sizes are known: all is of each domain's first user; ``sizes``: of each client the
    numbers of its domains and what it says of them."""
    parts, steps = published.parts, []
    for t, (n_users, n_items, interactions) in enumerate(published.steps):
        sessions = {}
        for split in (*SPLITS, *(["known"] if t else ())):
            lengths = torch.zeros(len(parts), dtype=torch.int64)
            for numbers, said in sizes:
                lengths[numbers] = torch.tensor(said[f"{t}/{split}"])
            sessions[split] = _of_first_users(parts, lengths, n_users, split in ("train", "known"))
        size = n_users, n_items
        steps.append(Step.of_sessions(t, size, size if t else (0, 0), interactions, sessions))
    tokens = (np.array([f"{part.name}:{n}" for part in parts for n in range(len(getattr(part, kind)))])
              for kind in ("users", "items"))
    shapes = {number: shape for numbers, said in sizes if "features" in said
              for number, shape in zip(numbers.tolist(), said["features"].tolist())}
    features = tuple((torch.arange(len(part.items)) >= zero).float()[:, None, None].expand(len(part.items), layers, dim)
                     for part, (zero, layers, dim) in zip(parts, map(shapes.get, range(len(parts))))) if shapes else ()
    return Stream(tuple(steps), *tokens, domains=parts, features=features)


def _of_first_users(parts: Sequence[DomainPart], lengths: Tensor, n_users: int, one: bool) -> Sessions:
    """So many interactions of each domain: as ``one`` session, or each as one."""
    count = torch.zeros(n_users, dtype=torch.int64)
    count[[part.users.start for part in parts]] = torch.ones_like(lengths) if one else lengths
    return sessions_of_sizes(count, lengths if one else torch.ones(int(lengths.sum()), dtype=torch.int64))


def sessions_of_sizes(count: Tensor, lengths: Tensor) -> Sessions:
    """Sessions of which only their number at each user and their lengths are known."""
    rows = int(lengths.sum())
    return Sessions(starts_of(count), starts_of(lengths), torch.zeros(rows, dtype=torch.int64),
                    torch.zeros(rows, dtype=torch.float64))
