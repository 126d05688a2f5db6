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

from ..core.errors import UserError
from ..core.text import quoted
from ..core.schema import read_bytes
from .source import DatasetSource, persons_beside
from .stream import Stream

_HEADER = ("user_id:token", "person:token")
_CURE = "Make it anew with `data convert`, or remove it where nobody is known."


def persons_file(inter: bytes, persons: str) -> bytes:
    """The ``.overlap`` file of all users of an ``.inter`` file, in its order, whose ids are those of ``persons``."""
    lines = inter.decode().splitlines()[1:]
    users = dict.fromkeys(line.partition("\t")[0] for line in lines)
    return ("\t".join(_HEADER) + "\n" + "".join(f"{user}\t{persons}:{user}\n" for user in users)).encode()


def read_persons(inter: Path) -> dict[str, str]:
    """User to person, as the file beside an ``.inter`` file says; empty if there is none.

    Raises:
        UserError: for another header, a row of other than two fields that are not empty, or a user or person that is
            there twice.
    """
    path = persons_beside(inter)
    try:
        header, *lines = read_bytes(path, _CURE).decode().splitlines() or [""]
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no text ({error.reason} at byte {error.start:,}).\n{_CURE}") from None
    if tuple(header.split("\t")) != _HEADER:
        raise UserError(f"{path}, line 1: found {quoted(header)}, accepted: {' and '.join(_HEADER)}, with a tab "
                        f"between them.\n{_CURE}")
    persons: dict[str, str] = {}
    known: set[str] = set()
    for number, line in enumerate(lines, start=2):
        fields = line.split("\t")
        if len(fields) != 2 or not all(fields):
            raise UserError(f"{path}, line {number}: found {quoted(line)}, accepted: a user and a person, with a tab "
                            f"between them.\n{_CURE}")
        user, person = fields
        if user in persons or person in known:
            what = f"user {quoted(user)}" if user in persons else f"person {quoted(person)}"
            raise UserError(f"{path}, line {number}: found {what} again, accepted: each once.\n{_CURE}")
        persons[user] = person
        known.add(person)
    return persons


def shared_users(source: DatasetSource, stream: Stream) -> dict[tuple[str, str], np.ndarray]:
    """For each two domains of a stream, the numbers of those users of the one who are also users of the other: int64
    (shared, 2), in the order of the first domain's users. Domains of which nothing is known share nobody.

    Raises:
        UserError: as ``read_persons``.
    """
    numbers: dict[str, dict[str, int]] = {}
    for part, domain in zip(source.parts, stream.domains):
        persons = read_persons(part.path)
        tokens = (stream.user_tokens[user].removeprefix(f"{part.name}:") for user in domain.users)
        numbers[part.name] = {persons[token]: user for user, token in zip(domain.users, tokens) if token in persons}
    pairs = {(a, b): [(user, numbers[b][person]) for person, user in numbers[a].items() if person in numbers[b]]
             for a, b in itertools.combinations(numbers, 2)}
    return {names: np.array(users, dtype=np.int64).reshape(-1, 2) for names, users in pairs.items()}


def known_users(source: DatasetSource, stream: Stream) -> dict[tuple[int, int], Tensor]:
    """``shared_users`` as ``Stream.known`` has them.

    Raises:
        UserError: as ``read_persons``, or if no user of any two domains is known to be the same.
    """
    shared = shared_users(source, stream)
    if not any(map(len, shared.values())):
        names = " and ".join(domain.name for domain in stream.domains)
        raise UserError(f"setting 'known_users': found true, but no user of {names} is known to be the same; accepted: "
                        f"false, or domains whose NAME.overlap files have persons in common (see: data "
                        f"{source.name}).")
    first = torch.tensor([domain.users.start for domain in stream.domains])
    pairs = itertools.combinations(range(len(stream.domains)), 2)
    return {pair: torch.from_numpy(users) - first[list(pair)] for pair, users in zip(pairs, shared.values())}
