"""Arguments of the Python interface: what is wrong with them, and messages in its words."""

from __future__ import annotations

import re
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, Iterable, Iterator

from ..core.errors import RunFailed, UserError
from ..core.settings import LARGEST_SEED
from ..core.text import quoted

_ARGUMENTS = {"data-dir": "data_dir", "seed": "first_seed", **{name: name for name in (
    "method", "backbone", "dataset", "results", "plugins", "device", "blocks")}}
# An option, and the space before its value: a word for one as DIR, or a device.
_OPTION = re.compile(rf"--set (?=\S)|--({'|'.join(_ARGUMENTS)})\b(?![-\w])( (?=[A-Z]|cpu|cuda))?")


@contextmanager
def in_python() -> Iterator[None]:
    """Errors that name options of the command line name arguments instead; commands that they suggest stay."""
    def argument(found: re.Match[str]) -> str:
        return f"{_ARGUMENTS[found[1]]}{'=' if found[2] else ''}" if found[1] else ""
    try:
        yield
    except (UserError, RunFailed) as error:
        error.args = ("\n".join(line if "run_bench.py" in line else _OPTION.sub(argument, line)
                                for line in str(error).split("\n")),)
        raise


def check_texts(call: str, **names: Any) -> None:
    """Raise UserError for a name that is there and no text."""
    for name, value in names.items():
        if not isinstance(value, (str, type(None))):
            raise UserError(f"{call}: found {name}={quoted(value)}, accepted: a text.")


def as_dataset(call: str, value: Any) -> str:
    if not isinstance(value, (str, Path)):
        raise UserError(f"{call}: found dataset={quoted(value)}, accepted: a name, as 'ml-100k', or a path.")
    return str(value)


def as_path(call: str, name: str, value: Any) -> Path:
    if not isinstance(value, (str, Path)):
        raise UserError(f"{call}: found {name}={quoted(value)}, accepted: the path of a folder.")
    return Path(value).expanduser()


def as_paths(call: str, name: str, values: Any) -> list[Path]:
    """Of one path or several."""
    several = [values] if isinstance(values, (str, Path)) or not isinstance(values, Iterable) else values
    return [as_path(call, name, value) for value in several]


def as_whole(call: str, name: str, value: Any, low: int, high: int = LARGEST_SEED) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
        raise UserError(f"{call}: found {name}={quoted(value)}, accepted: a whole number from {low} to {high}.")
    return int(value)
