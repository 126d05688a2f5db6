"""What a file of the suite's own must hold, as checks put together from plain functions; JSON files are read here.

A check takes a value and the name of its field, and raises ``Wrong`` for what does not fit. What a file of another
version, a damaged one or somebody else's holds therefore never reaches the code that uses it.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, Callable, Mapping

from .errors import Corrupt
from .text import for_terminal, quoted

Check = Callable[[Any, str], None]
_HUGE = 2 ** 100  # whole numbers beyond are no floating-point numbers
_DEEPEST = 6  # of values that nothing more is known of
_LONGEST = 80  # characters of a field's name that are shown


class Wrong(Exception):
    """A value that does not fit: its field, what was there, what is accepted."""

    def __init__(self, field: str, value: Any, accepted: str):
        name = for_terminal(" ".join(field.split()))
        name = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"
        super().__init__(f"field '{name}': found {_said(value)}, accepted: {accepted}" if field else
                         f"found {_said(value)}, accepted: {accepted}")


def _said(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Mapping):
        return f"a mapping of {len(value)}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return "nothing" if value is None else " ".join(quoted(value).split())


def text(value: Any, field: str) -> None:
    """Any text that can be written."""
    try:
        if isinstance(value, str):
            value.encode()
            return
    except UnicodeEncodeError:  # half of a character
        pass
    raise Wrong(field, value, "a text")


def flag(value: Any, field: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise Wrong(field, value, "true or false")


def number(value: Any, field: str) -> None:
    """Any number; nan stands for what was not measured, and a metric of the user's own may be infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > _HUGE and isinstance(value, int):
        raise Wrong(field, value, "a number")


def whole(low: int = 0, high: int = 2 ** 63 - 1) -> Check:
    """A whole number in a range."""
    def check(value: Any, field: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Wrong(field, value, f"a whole number from {low} to {high}")
    return check


def one_of(*values: Any) -> Check:
    """One of a few values."""
    def check(value: Any, field: str) -> None:
        if not any(type(value) is type(known) and value == known for known in values):
            raise Wrong(field, value, " or ".join(map(repr, values)))
    return check


def or_none(known: Check) -> Check:
    """Nothing, or what fits."""
    def check(value: Any, field: str) -> None:
        if value is not None:
            known(value, field)
    return check


def lists(known: Check, length: int | None = None) -> Check:
    """A list of what fits, of any length or of one."""
    def check(value: Any, field: str) -> None:
        if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
            raise Wrong(field, value, "a list" if length is None else f"a list of {length}")
        for i, each in enumerate(value):
            known(each, f"{field}[{i}]")
    return check


def mapping(known: Check, of: str = "a mapping") -> Check:
    """Names to what fits."""
    def check(value: Any, field: str) -> None:
        if not isinstance(value, dict):
            raise Wrong(field, value, of)
        for name, each in value.items():
            if not isinstance(name, str):
                raise Wrong(field, name, "names that are texts")
            known(each, _below(field, name))
    return check


def _below(field: str, name: object) -> str:
    return f"{field}.{name}" if field else str(name)


def fields_of(needed: Mapping[str, Check], others: Mapping[str, Check] | None = None) -> Check:
    """A mapping with all ``needed`` fields, some of the ``others``, and no more; any more if there are no others."""
    def check(value: Any, field: str) -> None:
        if not isinstance(value, dict):
            raise Wrong(field, value, f"a mapping with {', '.join(needed)}")
        for name, known in needed.items():
            if name not in value:
                raise Wrong(_below(field, name), None, "this field, which is missing")
            known(value[name], _below(field, name))
        for name, each in value.items() if others is not None else ():
            if name in others:
                others[name](each, _below(field, name))
            elif name not in needed:
                raise Wrong(_below(field, name), each, "no field of this name")
    return check


def plain(value: Any, field: str, depth: int = 0) -> None:
    """Texts, numbers, flags and nothing, and lists and mappings of them that are not deep."""
    if depth > _DEEPEST:
        raise Wrong(field, value, f"lists and mappings at most {_DEEPEST} deep")
    if isinstance(value, str):
        text(value, field)
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            plain(each, f"{field}[{i}]", depth + 1)
    elif isinstance(value, dict):
        mapping(lambda each, name: plain(each, name, depth + 1))(value, field)
    elif not (value is None or isinstance(value, (bool, int, float))):
        raise Wrong(field, value, "text, numbers, lists and mappings")


def fitting(value: Any, check: Check, where: str, cure: str) -> Any:
    """The value; raises Corrupt, with the place it comes from and the cure, unless the check passes."""
    try:
        check(value, "")
    except Wrong as error:
        raise Corrupt(f"{where}: {error}", cure) from None
    return value


def read_bytes(path: Path, cure: str) -> bytes:
    """A file's content.

    Raises:
        Corrupt: if it is no file or cannot be read. FileNotFoundError: if nothing is there.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise Corrupt(f"{path}: is no file, but a folder or a device", cure)
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read ({error.strerror})", cure) from None


def read_json(path: Path, check: Check, cure: str) -> Any:
    """The content of a JSON file that fits; raises as ``read_bytes``."""
    return parsed_json(read_bytes(path, cure), check, str(path), cure)


def parsed_json(content: bytes | str, check: Check, where: str, cure: str) -> Any:
    """A JSON text that fits; raises Corrupt."""
    try:
        value = json.loads(content if isinstance(content, str) else content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:80]
        raise Corrupt(f"{where}: is no JSON text ({' '.join(said.split())})", cure) from None
    return fitting(value, check, where, cure)
