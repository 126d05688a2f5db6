"""Who a domain's users are, where their publisher says so: which user of one domain is which of another.

Beside ``NAME.inter`` lies ``NAME.overlap``, tab-separated with the header ``user_id:token person:token`` and a row per
user. Users of two domains with the same person are one. No run reads it but with ``known_users``.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.text import quoted
from ..files.recbole_files import read_table
from ..source import DatasetSource, persons_beside
from ..stream import Stream
from ..files.table_reader import line_of

_HEADER = ("user_id:token", "person:token")


def persons_file(inter: bytes, persons: str) -> bytes:
    """The ``.overlap`` file of all users of an ``.inter`` file, in its order, whose ids are those of ``persons``."""
    lines = inter.decode().splitlines()[1:]
    users = dict.fromkeys(line.partition("\t")[0] for line in lines)
    return ("\t".join(_HEADER) + "\n" + "".join(f"{user}\t{persons}:{user}\n" for user in users)).encode()


def read_persons(inter: Path) -> dict[str, str]:
    """User to person, as the file beside an ``.inter`` file says; empty if there is none; raises UserError for a file
    that is no such table, or a user or person that is there twice."""
    path = persons_beside(inter)
    if not path.exists():
        return {}
    columns = [field.partition(":")[0] for field in _HEADER]
    frame = read_table(path, dict.fromkeys(columns, "token")).to_pandas().astype(object)
    for column in columns:
        if (again := frame[column].duplicated()).any():
            row = int(np.argmax(again))
            raise UserError(f"{path}, line {line_of(path, row + 2)}: found {column.removesuffix('_id')} "
                            f"{quoted(frame[column][row])} again, accepted: each once.\nMake it anew with `data "
                            f"convert`, or remove it where nobody is known.")
    return dict(zip(*(frame[column] for column in columns)))


def shared_users(source: DatasetSource, stream: Stream) -> dict[tuple[int, int], Tensor]:
    """For each two domains of a stream, by their numbers, which users of the one are users of the other too: int64
    (shared, 2), each numbered from 0 in its domain, in the order of the first domain's users. Domains of which nothing
    is known share nobody. Raises UserError as ``read_persons``."""
    user_of: list[dict[str, int]] = []  # by person, of each domain
    for part, domain in zip(source.parts, stream.domains):
        persons = read_persons(part.path)
        tokens = (stream.user_tokens[user].removeprefix(f"{part.name}:") for user in domain.users)
        user_of.append({persons[token]: user for user, token in enumerate(tokens) if token in persons})
    pairs = {(a, b): [(user, user_of[b][person]) for person, user in user_of[a].items() if person in user_of[b]]
             for a, b in itertools.combinations(range(len(user_of)), 2)}
    return {pair: torch.tensor(users, dtype=torch.int64).reshape(-1, 2) for pair, users in pairs.items()}


def known_users(source: DatasetSource, stream: Stream) -> dict[tuple[int, int], Tensor]:
    """``shared_users``; raises UserError also if there is nobody."""
    shared = shared_users(source, stream)
    if not any(map(len, shared.values())):
        names = " and ".join(domain.name for domain in stream.domains)
        raise UserError(f"setting 'known_users': found true, but no user of {names} is known to be the same; accepted: "
                        f"false, or domains whose NAME.overlap files have persons in common (see: data "
                        f"{source.name}).")
    return shared
