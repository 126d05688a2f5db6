"""What a run's hash knows of code: an edited plugin never meets a record of its former self, a tidied one still does.

The digest of a file's code enters the hash of every run that uses it. Shipped files change without changing a number,
when a module moves or a name gets better. ``identities.yaml`` maps the digest of their present code to the digest that
stands in the hashes of published records. Any other file, a user's edited copy of a shipped one included, is known by
the digest of its code alone.

``python -m fedcl_bench.runs.identity`` says which shipped files differ from their row; with ``--same-numbers`` it
writes the new digests down. That is for whoever has checked that the numbers are the same.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import sys
import tokenize
from pathlib import Path
from typing import Iterator

import yaml

TABLE = Path(__file__).with_name("identities.yaml")
_HEADING = """\
# Shipped code by file: the digest that stands in run hashes, and the digest of the present code with the same numbers.
# Written by `python -m fedcl_bench.runs.identity --same-numbers`.
"""


def code_digest(path: Path) -> str:
    """Hash of a Python file's lines without comments, docstrings and blank lines; the same on every Python version."""
    return _digest(path.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=256)
def _digest(source: str) -> str:
    lines = source.splitlines()
    for token in () if "#" not in source else tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in _with_bodies(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) \
                and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            if not lines[text.lineno - 1][:text.col_offset].strip():  # on lines of its own
                lines[text.lineno - 1:text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.blake2b(code.encode(), digest_size=16).hexdigest()


def _with_bodies(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all that lie in it and hold statements; expressions, which are most nodes, hold no docstrings."""
    yield node
    for part in ("body", "handlers", "cases", "orelse", "finalbody"):
        below = getattr(node, part, ())
        for child in below if isinstance(below, list) else ():
            yield from _with_bodies(child)


def identity(path: Path) -> str:
    """What stands for a file's code in run hashes: its published digest if this is shipped code, or else its own."""
    return identity_of(path.read_text(encoding="utf-8"))


def identity_of(source: str) -> str:
    """``identity`` of a file's text."""
    digest = _digest(source)
    return _published().get(digest, digest)


@functools.cache
def _published() -> dict[str, str]:
    return {row["code"]: row["identity"] for row in table().values()}


def table() -> dict[str, dict[str, str]]:
    """Rows of ``identities.yaml``: by file, ``identity`` and ``code``."""
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))


def shipped_code() -> dict[str, Path]:
    """Shipped files whose code enters run hashes, by the names they have in the table."""
    from ..core.files import shipped
    from ..recbole.adapter import code_files

    files = {path.name: path for path in sorted(shipped("plugins").glob("*.py")) if path.stem != "__init__"}
    return files | {f"recbole/{path.name}": path for path in (*code_files(), *code_files(domains=True))}


def changed() -> list[str]:
    """Names of shipped files whose present code is not that of their row, or that have none."""
    rows = table()
    return [name for name, path in shipped_code().items() if rows.get(name, {}).get("code") != code_digest(path)]


def record_same_numbers() -> None:
    """Write down the present code of all shipped files as giving the numbers of their published digests."""
    rows, files = table(), shipped_code()
    new = {name: {"identity": rows.get(name, {}).get("identity") or code_digest(path), "code": code_digest(path)}
           for name, path in files.items()}
    TABLE.write_text(_HEADING + yaml.safe_dump(new, sort_keys=True), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--same-numbers"]:
        record_same_numbers()
    elif sys.argv[1:]:
        sys.exit(__doc__)
    print("\n".join(changed()) or "All shipped code is that of its row.")
