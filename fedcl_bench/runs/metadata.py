"""What plugin files hold, from a cache: names, titles and references without importing PyTorch.

Whenever plugins are imported (``registry.discover``), what ``list`` shows of each file is written to one JSON file of
the user's cache folder, with the digest of the file's content. It is used as long as that content stays. A file that
could not be imported has no entry, so that its error is always that of today.
"""

from __future__ import annotations

import ast
import functools
import glob
import hashlib
import importlib.metadata
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Iterable, Mapping

import msgspec
from msgspec import Struct

from ..core.errors import UserError, unknown
from ..core.files import shipped, write_atomically

ENTRY_POINTS = "fedcl_bench.plugins"
RECBOLE = "recbole:"  # before a RecBole model's name: see backbone.py
NO_BACKBONE = "none"  # that methods are on which rank without one
OWN_METRICS = Path(__file__).resolve().parents[1] / "evaluation" / "metrics.py"


class Metadata(Struct, frozen=True):
    """A plugin as ``list`` shows it."""

    kind: str  # ``method``, ``backbone``, ``metric`` or ``attack``
    name: str
    title: str
    reference: str
    reimplementation: bool  # written without its authors' code


class _File(Struct):
    """What was imported from a file."""

    digest: str  # of its content and what it imports from beside it
    plugins: list[Metadata]


@functools.cache
def shipped_folders() -> tuple[Path, ...]:
    """``plugins`` and its folders, each of which holds plugins of one sort; a folder of tests is none."""
    plugins = shipped("plugins")
    return plugins, *sorted(file.parent for file in plugins.glob("*/__init__.py"))


def plugin_files(folder: Path) -> list[Path]:
    """The plugin files of a folder, sorted: not those that begin with ``_``, and not pytest's."""
    return [path for path in sorted(folder.glob("*.py"))
            if not path.stem.startswith(("_", "test_")) and path.stem != "conftest"]


def helpers_of(path: Path, content: bytes) -> dict[Path, bytes]:
    """The files beside a plugin's, which has this content, that it imports as ``from ._name import ...`` or ``from .
    import _name``, and those that they import, each behind what it imports itself. Raises UserError if one is not
    there, or might be a plugin."""
    found, seen = dict[Path, bytes](), set[str]()

    def look(file: Path, source: bytes) -> None:
        if not re.search(rb"^[ \t]*from[ \t]*\.", source, re.MULTILINE):  # quicker than to parse all files
            return
        for node in ast.walk(ast.parse(source, str(file))):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            for name in [node.module] if node.module else [alias.name for alias in node.names]:
                helper = path.with_name(f"{name}.py")
                if node.level > 1 or not name.startswith("_") or not helper.is_file():
                    raise UserError(f"it imports {'.' * node.level}{name}, accepted: files beside it whose names begin "
                                    f"with _, as from ._shared import ...")
                if name not in seen:
                    seen.add(name)
                    of_helper = helper.read_bytes()
                    look(helper, of_helper)
                    found[helper] = of_helper

    look(path, content)
    return found


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def entry_points() -> importlib.metadata.EntryPoints:
    """The plugins that installed packages name."""
    return _entry_points(tuple((path, os.stat(path).st_mtime_ns) for path in sys.path if os.path.exists(path)))


@functools.lru_cache(1)
def _entry_points(places: tuple[tuple[str, int], ...]) -> importlib.metadata.EntryPoints:
    """Of these folders as they are now: a file of every installed package is read."""
    return importlib.metadata.entry_points(group=ENTRY_POINTS)


def _cache() -> Path:
    """The cache's file: in ``$FEDCL_BENCH_CACHE``, or else in the user's folder for caches. Raises RuntimeError for a
    user without a home."""
    if own := os.environ.get("FEDCL_BENCH_CACHE"):
        return Path(own) / "plugins.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcl_bench" / "plugins.json"


def _files() -> dict[str, _File]:
    """The cache's content by file; none where it is absent or cannot be read."""
    try:
        return msgspec.json.decode(_cache().read_bytes(), type=dict[str, _File])
    except (OSError, RuntimeError, msgspec.MsgspecError):  # RecursionError is a RuntimeError
        return {}


def read_all(folders: Iterable[Path] = ()) -> list[Metadata] | None:
    """All plugins and the suite's own metrics from the cache; None if importing must tell what there is. ``folders``:
    besides the shipped ones."""
    if entry_points():  # plugins of installed packages
        return None
    files, found = _files(), list[Metadata]()
    several = dict.fromkeys(Path(folder).resolve() for folder in (*shipped_folders(), *folders))
    for path in [OWN_METRICS, *(path for folder in several for path in plugin_files(folder))]:
        file = files.get(str(path))
        if file is None or file.digest != _digest_now(path):
            return None
        found += file.plugins
    return found if len({(plugin.kind, plugin.name) for plugin in found}) == len(found) else None


def _digest_now(path: Path) -> str:
    """The digest of a plugin file as it is; empty if what it imports is not there."""
    content = path.read_bytes()
    try:
        return digest(b"".join([content, *(helpers_of(path, content) if path != OWN_METRICS else {}).values()]))
    except (UserError, SyntaxError, ValueError):
        return ""


def keep(files: Mapping[Path, tuple[str, list[Metadata]]]) -> None:
    """Write what files hold to the cache where that is new; without a folder that can be written, nothing is kept.
    ``files``: by path, the digest of the content that was imported, and its plugins."""
    known, new = _files(), {str(path): _File(*file) for path, file in files.items()}
    if all(known.get(path) == file for path, file in new.items()):
        return
    there = {path: file for path, file in known.items() if os.path.exists(path)}
    with suppress(OSError, RuntimeError, UserError):
        _cache().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_cache(), msgspec.json.format(msgspec.json.encode(there | new)))


def unknown_plugin(kind: str, name: str, known: Iterable[str]) -> UserError:
    """As ``unknown``; of a plugin in a folder below this one, how to load it, and of RecBole's models their names."""
    named = re.compile(rf"^\s+name\s*=\s*[\"']{re.escape(name)}[\"']", re.IGNORECASE | re.MULTILINE)
    for path in sorted(Path().glob(f"*/{glob.escape(name.lower().replace('-', '_'))}.py")):
        if named.search(path.read_text(encoding="utf-8", errors="replace")):
            return UserError(f"unknown {kind} '{name}'.\n{path} has one of this name; load it with --plugins "
                             f"{path.parent}.")
    from ..recbole.client_facts import TABLE

    if model := next((model for model in TABLE if model.lower() == name.lower()), None):
        return UserError(f"unknown {kind} '{name}'.\nRecBole's model is {RECBOLE}{model}; `list {RECBOLE}{model}` says "
                         f"whether clients can train it, or one party with everybody's data (a method).")
    return unknown(kind, name, known)


def refuse_typos(method: str | None, backbone: str | None, folders: Iterable[Path] = ()) -> None:
    """Answer a wrong or absent name of a run's method or backbone before anything slow is imported.

    Does nothing where the cache does not say which names there are; the registry answers then. Raises UserError for a
    name that no plugin has in any spelling, naming the nearest, or for one that is absent."""
    if not all(Path(folder).is_dir() for folder in folders) or (known := read_all(folders)) is None:
        return
    names = {kind: sorted(plugin.name for plugin in known if plugin.kind == kind) for kind in ("method", "backbone")}
    spelled = {kind: {name.lower() for name in of_kind} for kind, of_kind in names.items()}
    if method is not None and (method.lower() in spelled["backbone"] or method.lower().startswith(RECBOLE)):
        return  # a federated recommender, which needs no method, or a RecBole model
    if method is not None and method.lower() not in spelled["method"]:
        raise unknown_plugin("method", method, names["method"])
    if backbone is not None and backbone.lower() not in spelled["backbone"] \
            and not backbone.lower().startswith(RECBOLE):
        raise unknown_plugin("backbone", backbone, names["backbone"])
    if method is None:  # which may need no backbone
        raise missing("method", names["method"])


def missing(kind: str, known: Iterable[str]) -> UserError:
    return UserError(f"--{kind} is missing. Known: {', '.join(known)}.\nThe main job is: "
                     f"run_bench.py --method f3crec --backbone fedmf")
