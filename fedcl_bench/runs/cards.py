"""What plugin files say of themselves, read from their text: names, titles and references without importing PyTorch.

A file is read only if its text settles which classes it has. Whether its code runs is not known then, so ``list``
reads the shipped files, which are tested against what importing gives, and imports all others.
"""

from __future__ import annotations

import ast
import builtins
import functools
import glob
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator

from ..errors import UserError, unknown
from ..exports import MODULES
from ..files import shipped

ENTRY_POINTS = "fedcl_bench.plugins"
RECBOLE = "recbole:"  # before a RecBole model's name: see backbone.py
MAIN_JOB = "The main job is: run_bench.py --method f3crec --backbone fedmf"
OWN_METRICS = Path(__file__).resolve().parents[1] / "evaluation" / "metrics.py"
_ROOTS = {("fedcl_bench.method", "Method"): "method", ("fedcl_bench.backbone", "Backbone"): "backbone",
          ("fedcl_bench.metric", "Metric"): "metric"}
_FIELDS = {"name": str, "title": str, "reference": str, "reimplementation": bool}
_PLAIN = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Card:
    """A plugin as ``list`` shows it.

    Attributes:
        kind: ``method``, ``backbone`` or ``metric``.
        reimplementation: written without its authors' code.
    """

    kind: str
    name: str
    title: str
    reference: str
    reimplementation: bool
    path: Path


class _Unsettled(Exception):
    """The text does not settle which plugins the file has."""


def plugin_files(folder: Path) -> list[Path]:
    """The plugin files of a folder, sorted: not those that begin with ``_``, and not pytest's."""
    return [path for path in sorted(folder.glob("*.py"))
            if not path.stem.startswith(("_", "test_")) and path.stem != "conftest"]


def read_cards(path: Path) -> list[Card] | None:
    """The plugins of a file, by its text; None if only importing it can tell."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for statement in tree.body:
            _check_plain(statement)
        return [card for node in tree.body if isinstance(node, ast.ClassDef) and (card := _card(tree, node, path))]
    except (OSError, SyntaxError, ValueError, _Unsettled):
        return None


def _check_plain(statement: ast.stmt) -> None:
    """Raise _Unsettled for a statement of a module that could make or change classes unseen."""
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    plain = text or isinstance(statement, _PLAIN)
    starred = isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names)
    calls = isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Call)
    if not plain or starred or calls:
        raise _Unsettled


def _card(tree: ast.Module, node: ast.ClassDef, path: Path) -> Card | None:
    """A class's card; None if it is no plugin: of no such base, or without a name of its own."""
    values = {name: value for name, value in _assigned(node) if name in _FIELDS}
    kinds = {_kind(tree, base) for base in node.bases} - {None}
    if not kinds or "name" not in values:
        return None
    # What is not written here is inherited: from the suite's classes the defaults, from others it would be looked for.
    local = any(isinstance(base, ast.Name) and base.id in _classes(tree) for base in node.bases)
    if len(kinds) > 1 or node.decorator_list or local or "title" not in values:
        raise _Unsettled
    read = {"reference": "", "reimplementation": False,
            **{name: ast.literal_eval(value) for name, value in values.items()}}
    if not all(isinstance(read[name], kind) for name, kind in _FIELDS.items()):
        raise _Unsettled
    return Card(kinds.pop(), path=path, **read)


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and getattr(statement, "value", None) is not None:
                yield target.id, statement.value


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _kind(tree: ast.Module, base: ast.expr) -> str | None:
    """``method``, ``backbone`` or ``metric`` if a base class is one, followed through this file and the suite's."""
    if isinstance(base, ast.Attribute):  # torch.nn.Module and the like; of the suite only names are followed
        root = base.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id == "fedcl_bench":
            raise _Unsettled
        return None
    if not isinstance(base, ast.Name):
        raise _Unsettled
    if node := _classes(tree).get(base.id):
        return next((kind for parent in node.bases if (kind := _kind(tree, parent))), None)
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == base.id:
                    return _kind_of_import(statement, alias.name)
    if hasattr(builtins, base.id):
        return None
    raise _Unsettled


def _kind_of_import(statement: ast.ImportFrom, name: str) -> str | None:
    module = statement.module or ""
    if statement.level in (1, 2) or module == "fedcl_bench":  # within the suite, or by what it shows outside
        module = f"fedcl_bench.{module if statement.level else MODULES.get(name, '')}"
    elif statement.level:
        raise _Unsettled
    if (module, name) in _ROOTS:
        return _ROOTS[module, name]
    if not module.startswith("fedcl_bench."):
        if module.split(".")[0] in ("torch", "dataclasses", "typing", "abc", "enum"):
            return None
        raise _Unsettled  # another package's class may be a plugin
    tree = _suite_module(module)
    return _kind(tree, ast.Name(name)) if name in _classes(tree) else None


@functools.cache
def _suite_module(name: str) -> ast.Module:
    """A module of the suite directly below the package, parsed and not imported."""
    path = Path(__file__).resolve().parents[1].joinpath(*name.split(".")[1:]).with_suffix(".py")
    if not path.is_file():
        raise _Unsettled
    return ast.parse(path.read_text(encoding="utf-8"))


def read_all(folders: Iterable[Path] = ()) -> list[Card] | None:
    """Cards of all plugins and of the suite's own metrics by the text of their files; None if importing must tell what
    there is.

    Args:
        folders: besides the shipped ones.
    """
    cards: dict[tuple[str, str], Card] = {}
    if importlib.metadata.entry_points(group=ENTRY_POINTS):  # plugins of installed packages
        return None
    several = dict.fromkeys(Path(folder).resolve() for folder in (shipped("plugins"), *folders))
    for path in [OWN_METRICS, *(path for folder in several for path in plugin_files(folder))]:
        of_file = read_cards(path)
        if of_file is None or any((card.kind, card.name) in cards for card in of_file):
            return None
        cards |= {(card.kind, card.name): card for card in of_file}
    return list(cards.values())


def unknown_plugin(kind: str, name: str, known: Iterable[str]) -> UserError:
    """As ``unknown``; of a plugin in a folder below this one, how to load it."""
    for path in sorted(Path().glob(f"*/{glob.escape(name.lower().replace('-', '_'))}.py")):
        if any(card.name.lower() == name.lower() for card in read_cards(path) or ()):
            return UserError(f"unknown {kind} '{name}'.\n{path} has one of this name; load it with --plugins "
                             f"{path.parent}.")
    return unknown(kind, name, known)


def refuse_typos(method: str | None, backbone: str | None, folders: Iterable[Path] = ()) -> None:
    """Answer a wrong or absent name of a run's method or backbone before anything slow is imported.

    Does nothing where the files' texts do not settle which names there are; the registry answers then.

    Raises:
        UserError: for a name that no plugin has in any spelling, naming the nearest, or for one that is absent.
    """
    cards = read_all(folders) if all(Path(folder).is_dir() for folder in folders) else None
    files = {path.stem for folder in folders for path in plugin_files(Path(folder))}
    if cards is None or any(name and name.replace("-", "_") in files for name in (method, backbone)):
        return  # the registry also says why a file of that name cannot be loaded
    names = {kind: sorted(card.name for card in cards if card.kind == kind) for kind in ("method", "backbone")}
    spelled = {kind: {name.lower() for name in known} for kind, known in names.items()}
    alone = method is not None and method.lower() in spelled["backbone"]  # a federated recommender without a method
    if method is not None and not alone and method.lower() not in spelled["method"]:
        raise unknown_plugin("method", method, names["method"])
    if backbone is not None and backbone.lower() not in spelled["backbone"] \
            and not backbone.lower().startswith(RECBOLE):
        raise unknown_plugin("backbone", backbone, names["backbone"])
    for kind, name in (("method", method), ("backbone", backbone or (method if alone else None))):
        if name is None:
            raise UserError(f"--{kind} is missing. Known: {', '.join(names[kind])}.\n{MAIN_JOB}")
