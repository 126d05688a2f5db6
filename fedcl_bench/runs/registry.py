"""Finding plugins: files in ``plugins/`` and ``--plugins DIR``, and the entry-point group ``fedcl_bench.plugins``.

A plugin that cannot be imported is listed with its error and fails only when chosen. Two plugins of one name are an
error at once, because nobody could tell which of them made a number.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Iterable

from ..backbone import Backbone
from ..errors import Misfit, UserError
from ..files import shipped
from ..method import Method
from .cards import ENTRY_POINTS, RECBOLE, plugin_files, unknown_plugin
from .identity import identity, identity_of

_BASES = {"method": Method, "backbone": Backbone}


@dataclass(frozen=True)
class Plugin:
    """A method or backbone that can be run.

    Attributes:
        kind: ``method`` or ``backbone``.
        digest: what stands for the plugin's code in run hashes (see ``identity.py``).
    """

    kind: str
    name: str
    cls: type
    path: Path
    digest: str


@dataclass
class Registry:
    """All plugins found; ``broken`` maps the name of a file that cannot be imported to its error."""

    plugins: dict[tuple[str, str], Plugin] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    def names(self, kind: str) -> list[str]:
        return sorted(name for k, name in self.plugins if k == kind)

    def knows(self, kind: str, name: str) -> bool:
        """Whether ``get`` finds it."""
        try:
            return (kind, self.spelled(kind, name)) in self.plugins or (
                kind == "backbone" and name.lower().startswith(RECBOLE) and bool(spelled(name)))
        except UserError:
            return False

    def spelled(self, kind: str, name: str) -> str:
        """A name in the plugin's spelling, whatever its case; as it is if that is not one plugin's."""
        if (kind, name) in self.plugins:
            return name
        alike = [known for k, known in self.plugins if k == kind and known.lower() == name.lower()]
        return alike[0] if len(alike) == 1 else name

    def get(self, kind: str, name: str) -> Plugin:
        """The plugin of this kind and name, whatever its case.

        Raises:
            UserError: if there is none (naming the nearest) or its file cannot be imported.
        """
        name = self.spelled(kind, name)
        if (kind, name) in self.plugins:
            return self.plugins[kind, name]
        if kind == "backbone" and name.lower().startswith(RECBOLE):
            return _recbole(spelled(name))
        for file in (name, name.replace("-", "_")):
            if file in self.broken:
                raise UserError(f"{kind} '{name}' cannot be loaded: {self.broken[file]}")
        raise unknown_plugin(kind, name, self.names(kind))

    def reimplemented(self, method: str) -> bool:
        """Whether a method is marked wherever it is shown, as it was written without its authors' code; False for a
        method that is not installed."""
        plugin = self.plugins.get(("method", method))
        return plugin is not None and plugin.cls.reimplementation

    def is_recommender(self, name: str) -> bool:
        """Whether what stands in the place of a method is a backbone: a federated recommender, alone."""
        return ("method", name) not in self.plugins and ("backbone", name) in self.plugins

    def naming(self, error: Misfit) -> UserError:
        """The error with the names of the plugins that would do instead."""
        names = [name for name in self.names(error.kind) if error.fits(self.get(error.kind, name).cls)]
        return UserError(f"{error}\n{error.kind.capitalize()}s that fit: {', '.join(names) or 'none is installed'}.")

    def _add(self, module: ModuleType, digest: str, path: Path) -> None:
        for value in list(vars(module).values()):
            for kind, base in _BASES.items():
                if not (inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
                        and "name" in vars(value)):
                    continue
                other = self.plugins.get((kind, value.name))
                if other:
                    raise UserError(f"two {kind} plugins are named '{value.name}': {other.path} and {path}.\n"
                                    f"Rename one of them.")
                self.plugins[kind, value.name] = Plugin(kind, value.name, value, path, digest)


@functools.cache
def _recbole(name: str) -> Plugin:
    """RecBole's model as a backbone; imported when asked for, as RecBole takes a second or two."""
    from ..recbole import backbone

    cls = backbone.backbone_class(name.removeprefix(RECBOLE))
    return Plugin("backbone", name, cls, Path(backbone.__file__), backbone.digest(identity))


def spelled(backbone: str) -> str:
    """A backbone's name; of a RecBole model as RecBole writes it. Raises UserError if RecBole has no such model."""
    if not backbone.lower().startswith(RECBOLE):
        return backbone
    from ..recbole.models import find

    return RECBOLE + find(backbone[len(RECBOLE):])


def _import_file(path: Path) -> tuple[ModuleType, str]:
    """The module of a file as it is now, and what stands for its code in run hashes.

    The module's name carries the content's hash, so that an edited file is another module. Python's own cache is not
    asked: it takes a file of the same size and second for the one that it compiled.
    """
    content = path.read_bytes()
    digest = hashlib.blake2b(str(path).encode() + b"\0" + content, digest_size=10).hexdigest()
    name = f"fedcl_bench_plugin_{digest}_{path.stem}"
    if name not in sys.modules:
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
        sys.modules[name] = module  # dataclasses look their module up while it is being executed
        try:
            exec(compile(content, str(path), "exec"), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name], identity_of(importlib.util.decode_source(content))


def _packaged_identity(module: ModuleType) -> str:
    """What stands for the code of an installed package's module in run hashes.

    Raises:
        UserError: if its file was edited after a registry first had it. Only a new Python process has the new code.
    """
    path = Path(module.__file__)
    now = identity(path)
    if _packaged.setdefault(module, now) != now:
        raise UserError(f"{path}: was edited after this Python process had imported it, so its runs would be of the old "
                        f"code.\nStart Python anew.")
    return now


_packaged: dict[ModuleType, str] = {}  # the identity with which a module first came


def load_file(registry: Registry, path: Path) -> None:
    """Add a file's plugins. Raises whatever its code raises, and UserError for a name that is taken."""
    registry._add(*_import_file(path), path)


def discover(folders: Iterable[Path] = ()) -> Registry:
    """Load all plugins: the shipped ones, those in ``folders``, and those of installed packages.

    Every ``*.py`` of a folder is a plugin, but for those that begin with ``_`` and pytest's own (``test_*.py`` and
    ``conftest.py``).

    Raises:
        UserError: if a folder does not exist or two plugins have one name.
    """
    registry = Registry()
    folders = [shipped("plugins"), *map(Path, folders)]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--plugins: '{folder}' is not a folder.")
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        for path in plugin_files(folder):
            try:
                loaded = _import_file(path)
            except Exception as error:  # whatever a plugin's code raises belongs in `list`, not in a traceback
                registry.broken[path.stem] = f"{path}: {type(error).__name__}: {error}"
                continue
            registry._add(*loaded, path)
    packaged: dict[str, ModuleType] = {}  # several entry points may name classes of one module
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            target = entry.load()
        except Exception as error:
            registry.broken[entry.name] = f"entry point {entry.value}: {type(error).__name__}: {error}"
            continue
        module = target if isinstance(target, ModuleType) else sys.modules[target.__module__]
        packaged[module.__name__] = module
    for module in packaged.values():
        registry._add(module, _packaged_identity(module), Path(module.__file__))
    return registry
