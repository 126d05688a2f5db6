"""Finding plugins: the shipped files in the folders of ``plugins/``, those in ``--plugins DIR``, and the entry-point
group ``fedcl_bench.plugins``.

A file is imported when one of its names is asked for, and all are for a list of names. One that cannot be imported is
listed with its error and fails only when chosen. To ask for a name that two plugins have is an error, because nobody
could tell which of them made a number.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterable, Iterator, Mapping

from ..plugin.attack import Attack
from ..plugin.backbone import Backbone
from ..core.errors import Incompatible, UserError
from ..evaluation import metrics
from ..plugin.method import Method, NoSettings
from ..plugin.metric import Metric
from ..core.text import ACCEPTED, LONGEST_OF_PLUGIN, for_terminal, is_safe, quoted
from ..core.settings import describe
from .import_guard import nothing_else_changes
from .metadata import (NO_BACKBONE, OWN_METRICS, RECBOLE, Metadata, digest, entry_points, helpers_of, keep, missing,
                       plugin_files, shipped_folders, unknown_plugin)
from .plugin_errors import at_import, words

BASES = {"method": Method, "backbone": Backbone, "metric": Metric, "attack": Attack}
_STATEMENTS = [f"{part}{number}" for part, most in (("F", 7), ("C", 3), ("E", 4), ("P", 1))
               for number in range(1, most + 1)]  # of docs/constraints.md
_METRIC_NAME = r"[a-z][a-z0-9]*([-_][a-z0-9]+)*"  # nothing that NAME@K or all:NAME@K could be taken for


@dataclass(frozen=True)
class Plugin:
    """A method or backbone that can be run, a metric or an attack."""

    kind: str  # ``method``, ``backbone``, ``metric`` or ``attack``
    name: str
    cls: type
    path: Path
    # What stands for its code in run hashes. Of a shipped plugin the integer that it carries, which is raised with any
    # number that it changes; of a RecBole model also RecBole's version; of any other plugin the digest of its file and
    # helpers. None for the suite's own metrics, which count as the engine (``core/version.py``).
    numbers: int | str | None
    helpers: tuple[Path, ...] = ()  # the files beside its own that it imports

    def of_domains(self) -> "Plugin":
        """What stands for it where clients are domains: itself, but for a RecBole model."""
        return _recbole(self.name, domains=True) if self.name.startswith(RECBOLE) else self


@functools.lru_cache(1000)
def _names_in(content: bytes) -> frozenset[str]:
    """The names that a file's plugins may have, in lower case, without importing it."""
    found = re.findall(rb"^[ \t]+name\b[^=\n]*=\s*[\"']([^\"'\n]*)[\"']", content, re.MULTILINE)
    return frozenset(name.decode(errors="replace").lower() for name in found)


def numbers_of(cls: type, path: Path, content: bytes) -> int | str:
    """What stands for the code of a plugin's file in run hashes; in a clone one's own may lie beside shipped ones."""
    carried = vars(cls).get("numbers") if path.resolve().parent in shipped_folders() else None
    return digest(content) if carried is None else carried


@dataclass
class Registry:
    """All plugins found, and the suite's own metrics."""

    # The plugins of files imported so far, and the suite's own metrics.
    loaded: dict[tuple[str, str], Plugin] = field(default_factory=lambda: {
        ("metric", cls.name): Plugin("metric", cls.name, cls, OWN_METRICS, None) for cls in metrics.SHIPPED})
    failed: dict[str, str] = field(default_factory=dict)  # the errors of those that cannot be used, by name
    # The files not yet imported, and their content when they were found.
    waiting: dict[Path, bytes] = field(default_factory=dict)
    _doubled: dict[tuple[str, str], str] = field(default_factory=dict)  # what is wrong with a name that two have
    _digests: dict[Path, str] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)

    @property
    def plugins(self) -> dict[tuple[str, str], Plugin]:
        """All plugins, by kind and name. Raises UserError if two have one name."""
        self._load(self.waiting)
        if self._doubled:
            raise UserError(next(iter(self._doubled.values())))
        return self.loaded

    @property
    def broken(self) -> dict[str, str]:
        """The names of all files that cannot be used, and why."""
        self._load(self.waiting)
        return self.failed

    def _load(self, paths: Iterable[Path]) -> None:
        """Import these files; when all are, what they hold is kept for ``metadata.read_all``."""
        for path in list(paths):
            content = self.waiting.pop(path)
            try:
                helpers = helpers_of(path, content)
                module = _import_file(path, content, helpers)
            except (Exception, SystemExit) as error:  # whatever a plugin's code raises belongs in `list`
                self.failed[path.stem] = at_import(error, path)
                continue
            content = b"".join([content, *helpers.values()])
            self._add(module, content, path, tuple(helpers))
            self._digests[path] = digest(content)
        if self._digests and not self.waiting and not self._doubled:
            files = {OWN_METRICS: digest(OWN_METRICS.read_bytes()), **self._digests}
            self._digests = {}
            keep({path: (of_file, self.metadata(path)) for path, of_file in files.items()
                  if path.stem not in self.failed})

    def _find(self, kind: str, name: str) -> Plugin | None:
        """A plugin, after the files are imported that give a plugin this name in any case; all, if none seems to.
        Raises UserError if two have the name."""
        if name and self.waiting and name not in self._asked:
            self._asked.add(name)
            self._load([path for path, content in self.waiting.items() if name.lower() in _names_in(content)])
            if not any(name.lower() == known.lower() for _, known in self.loaded) \
                    and not name.lower().startswith(RECBOLE):
                self._load(self.waiting)
        if (kind, name) in self._doubled:
            raise UserError(self._doubled[kind, name])
        return self.loaded.get((kind, name))

    def names(self, kind: str) -> list[str]:
        return sorted(name for k, name in self.plugins if k == kind)

    def knows(self, kind: str, name: str) -> bool:
        """Whether ``get`` finds it."""
        try:
            return (kind, self.spelled(kind, name)) in self.loaded or spelled(name, kind).startswith(RECBOLE)
        except UserError:
            return False

    def spelled(self, kind: str, name: str) -> str:
        """A name in the plugin's spelling, whatever its case; as it is if that is not one plugin's."""
        if self._find(kind, name):
            return name
        alike = [known for k, known in self.loaded if k == kind and known.lower() == name.lower()]
        return alike[0] if len(alike) == 1 else name

    def get(self, kind: str, name: str) -> Plugin:
        """The plugin of this kind and name, whatever its case. Raises UserError if there is none (naming the nearest)
        or its file cannot be imported."""
        name = self.spelled(kind, name)
        if plugin := self._find(kind, name):
            return plugin
        if kind in ("method", "backbone") and name.lower().startswith(RECBOLE):
            return _recbole(spelled(name, kind), kind)
        raise self.unknown(kind, name, self.names(kind))

    def unknown(self, kind: str, name: str, known: Iterable[str]) -> UserError:
        """The error for a name that nothing has: perhaps it is that of a file that cannot be used. ``kind``: what was
        asked for, in words; ``known``: the names that there are."""
        for file in (name, name.replace("-", "_")):
            if file in self.broken:
                return UserError(f"{kind} '{name}' cannot be loaded: {self.broken[file]}")
        error = unknown_plugin(kind, name, dict.fromkeys(known))
        if not self.broken:
            return error
        first, *others = self.broken.values()
        more = f"\nSo are {len(others)} others; `list` shows them." if others else ""
        return UserError(f"{error}\nNot loaded: {first}{more}")

    def reimplemented(self, method: str) -> bool:
        """Whether a method is marked wherever it is shown, as it was written without its authors' code; False for a
        method that is not installed."""
        plugin = self._find("method", method)
        return plugin is not None and plugin.cls.reimplementation

    def gives_up(self, method: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The statements of docs/constraints.md that a method with these settings gives up; its own are not known of
        one that is not installed."""
        own = self.get("method", method).cls.gives_up if self.knows("method", method) else {}
        return tuple({**own, **of_aggregator(settings)})

    def pair(self, method: str | None, backbone: str | None) -> tuple[str, str]:
        """A run's method and backbone in their spelling; a federated recommender as the method is FT on it. Raises
        UserError if one of the two is missing, or another backbone stands beside a federated recommender."""
        if method and not self.knows("method", method) and self._find("backbone", self.spelled("backbone", method)):
            method = self.spelled("backbone", method)
            if backbone and self.spelled("backbone", backbone) != method:
                raise UserError(f"method '{method}' is a backbone and stands for method ft on it; found backbone "
                                f"'{backbone}' beside it, leave one of the two out.")
            return "ft", method
        if method and not backbone:
            backbone = self.backbone_for(method, "")
        for kind, name in (("method", method), ("backbone", backbone)):
            if not name:
                raise missing(kind, self.names(kind))
        return self.spelled("method", method), self.backbone_for(method, backbone)

    def backbone_for(self, method: str, backbone: str) -> str:
        """What a method's run is on, in its spelling, if this backbone was asked for: ``none`` if it needs none. Raises
        UserError if it needs one and ``none`` was asked for."""
        if not self.get("method", method).cls.needs_backbone:
            return NO_BACKBONE
        if (name := self.spelled("backbone", backbone)) == NO_BACKBONE:
            known = ", ".join(each for each in self.names("backbone") if each != NO_BACKBONE)
            raise UserError(f"method '{method}' needs a backbone; found {NO_BACKBONE}, accepted: {known}.")
        return name

    @contextmanager
    def naming(self, goes: Callable[[type], bool] = lambda cls: True) -> Iterator[None]:
        """Whatever is ``Incompatible`` inside is said with the names of the plugins that would do instead; ``goes``:
        with the run's stream."""
        try:
            yield
        except Incompatible as error:
            fitting = {name: cls for name in self.names(error.kind)
                       if name != NO_BACKBONE and error.fits(cls := self.get(error.kind, name).cls)}
            names = [name for name, cls in fitting.items() if goes(cls)] or fitting  # of those that need another stream
            names = [f"{name} (with other settings)" if f"'{name}'" in str(error) else name for name in names]
            raise Incompatible(f"{error}\n{error.kind.capitalize()}s that fit: "
                               f"{', '.join(names) or 'none is installed'}.", error.kind, error.fits) from None

    def metadata(self, path: Path | None = None) -> list[Metadata]:
        """What ``list`` shows of all plugins, or of a file's."""
        return [Metadata(plugin.kind, plugin.name, plugin.cls.title, plugin.cls.reference,
                         bool(getattr(plugin.cls, "reimplementation", False)))
                for plugin in self.plugins.values() if path in (None, plugin.path)]

    def _add(self, module: ModuleType, content: bytes, path: Path, helpers: tuple[Path, ...] = ()) -> None:
        for found in _plugins_in(module, content, path, helpers):
            if isinstance(found, str):
                self.failed[path.stem] = found
                continue
            key = found.kind, found.name
            if (other := self.loaded.setdefault(key, found)) is not found:
                self._doubled[key] = (f"two {found.kind} plugins are named '{found.name}': {other.path} and {path}.\n"
                                      f"Rename one of them.")


@functools.lru_cache(1000)  # many registries may come of the same modules
def _plugins_in(module: ModuleType, content: bytes, path: Path, helpers: tuple[Path, ...]
                ) -> tuple[Plugin | str, ...]:
    """The plugins of a module; of one that cannot be used, why."""
    found: list[Plugin | str] = []
    for value in list(vars(module).values()):
        for kind, base in BASES.items():
            if not (inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
                    and "name" in vars(value)):
                continue
            if reason := _unfit(kind, value):
                found.append(f"{path}, line {_line_of(value)}: {kind} {value.__name__}: {reason}.")
            else:
                found.append(Plugin(kind, value.name, value, path, numbers_of(value, path, content), helpers))
    return tuple(found)


def of_aggregator(settings: Mapping[str, Any]) -> dict[str, str]:
    """What a run's setting ``aggregator`` gives up, with how."""
    kind = settings.get("aggregator", "mean")
    return {} if kind == "mean" else {"F7": f"the server looks at each client's change, for aggregator={kind}"}


def _unfit(kind: str, cls: type) -> str:
    """Why a class is no plugin that can be used, in words; empty if it is one. Its name becomes part of paths, commands
    and tables."""
    if not is_safe(cls.name, LONGEST_OF_PLUGIN):
        return f"its name is {quoted(cls.name)}, accepted: at most {LONGEST_OF_PLUGIN} {ACCEPTED}"
    if kind == "metric" and not re.fullmatch(_METRIC_NAME, cls.name):
        return (f"its name is {quoted(cls.name)}, accepted: lower-case letters, digits and, between them, - and _, "
                f"with a letter first")
    for attribute in ("title", "reference"):
        text = getattr(cls, attribute, None)
        if not isinstance(text, str) or for_terminal(text) != text or attribute == "title" and not text.strip():
            return f"its {attribute} is {'missing' if text is None else quoted(text)}, accepted: a printable text"
    try:
        texts = [text for name, values in getattr(cls, "ambiguities", {}).items() for text in (name, *values.values())]
        if not all(for_terminal(text) == text for text in texts):
            return "its ambiguities hold a text that cannot be printed"
    except (AttributeError, TypeError):
        return "its ambiguities are no mapping of settings to {value: whose reading it is}"
    if kind == "method" and (lacking := _undeclared(cls)):
        return lacking
    if wrong := _called_otherwise(cls):
        return wrong
    try:
        describe(getattr(cls, "Settings", NoSettings))
    except Exception as error:  # of fields without `setting`, of types that none of them may have, of names unknown
        return f"its Settings cannot be read ({words(error)}), accepted: a dataclass of fields setting(...)"
    return ""


def _called_otherwise(cls: type) -> str:
    """Which hook does not take what the suite calls it with, in words; empty if none."""
    def takes(hook: Any) -> list[str]:
        return [name for name, each in inspect.signature(hook).parameters.items() if each.kind is not each.KEYWORD_ONLY]

    own = [owner for owner in cls.__mro__ if owner.__module__.partition(".")[0] != "fedcl_bench"]
    base = next(owner for owner in cls.__mro__ if owner not in own)
    for name, hook in ((name, hook) for owner in own for name, hook in vars(owner).items()):
        called = getattr(base, name, None)
        if not name.startswith("_") and inspect.isfunction(hook) and inspect.isfunction(called):
            try:
                inspect.signature(hook).bind(*takes(called))
            except TypeError:
                return f"its {name} takes {', '.join(takes(hook))}; accepted: {', '.join(takes(called))}"
    return ""


def _undeclared(cls: type[Method]) -> str:
    """What a method that trains or aggregates by more than others know leaves unsaid; empty if nothing."""
    if cls.trains not in ("clients", "server", "nobody"):
        return f"its trains is {quoted(cls.trains)}, accepted: clients, server or nobody"
    if cls.trains == "server" and cls.central_round is Method.central_round:
        return "its server trains, so it needs central_round"
    for hook, called, needed in (("central_round", cls.trains == "server", "trains = 'server'"),
                                 ("aggregate_sums", cls.sums is not Method.sums, "sums"),
                                 ("receive", cls.sums is not Method.sums, "sums")):
        if not called and getattr(cls, hook) is not getattr(Method, hook):
            return f"it has {hook}, which nothing calls without {needed}"
    for gives_up, name, what in ((cls.trains == "server", "F4", "its server trains on everybody's data"),
                                 (cls.history, "C1", "it trains on the data of earlier blocks"),
                                 (cls.aggregate_updates is not Method.aggregate_updates, "F7",
                                  "its server sees each client's update")):
        if gives_up and name not in cls.gives_up:
            return f"{what}, so its gives_up must say how it gives up {name} (docs/constraints.md)"
    if unknown := [name for name in cls.gives_up if name not in _STATEMENTS]:
        return f"its gives_up names {quoted(unknown[0])}, accepted: {', '.join(_STATEMENTS)} (docs/constraints.md)"
    return ""


def _line_of(cls: type) -> int:
    try:
        return inspect.findsource(cls)[1] + 1
    except (OSError, TypeError):  # made by a call, not by a statement
        return 1


@functools.cache
def _recbole(name: str, kind: str = "backbone", domains: bool = False) -> Plugin:
    """RecBole's model as a backbone or method; imported when asked for, as RecBole takes a second or two."""
    from ..recbole import adapter, pooled

    module, made = (adapter, adapter.backbone_class) if kind == "backbone" else (pooled, pooled.method_class)
    cls = made(name.removeprefix(RECBOLE))
    if domains:
        from ..recbole.domain_backbone import domain_backbone_class

        cls = domain_backbone_class(cls.Settings.NAME, cls)
    numbers = f"{cls.numbers} of RecBole {importlib.metadata.version('recbole')}"
    return Plugin(kind, name, cls, Path(module.__file__), numbers)


def spelled(name: str, kind: str = "backbone") -> str:
    """A backbone's or method's name; of a RecBole model as RecBole writes it. Raises UserError if there is none."""
    if not name.lower().startswith(RECBOLE) or kind == "metric":
        return name
    from ..recbole import models, pooled

    of_methods = ("RecBole model (as a method)", pooled.KINDS) if kind == "method" else ()
    return RECBOLE + models.find(name[len(RECBOLE):], *of_methods)


def _import_file(path: Path, content: bytes, helpers: Mapping[Path, bytes]) -> ModuleType:
    """The module of a file with this content, after its helpers, which are its package's. The modules' names carry the
    contents' hash, so that an edited file is another module. Python's own cache is not asked: it takes a file of the
    same size and second for the one that it compiled. Of several threads one imports it: the others would find a module
    whose classes are not there yet."""
    package = f"fedcl_bench_plugin_{digest(b''.join([bytes(path), content, *helpers.values()]))}"
    name = f"{package}_{path.stem}"
    with _importing:
        if name in sys.modules:
            return sys.modules[name]
        before = set(sys.modules)
        try:
            sys.modules[package] = parent = ModuleType(package)
            parent.__path__ = []
            with nothing_else_changes():
                for file, source in helpers.items():
                    setattr(parent, file.stem, _executed(f"{package}.{file.stem}", file, source, package))
                return _executed(name, path, content, package)
        except BaseException:
            for made in {each for each in sys.modules if each.startswith(package)} - before:
                del sys.modules[made]
            raise


def _executed(name: str, path: Path, content: bytes, package: str) -> ModuleType:
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
    module.__package__ = package
    sys.modules[name] = module  # dataclasses look their module up while it is being executed
    exec(compile(content, str(path), "exec"), vars(module))
    return module


def _content_of(module: ModuleType) -> bytes:
    """The file of an installed package's module, and behind it all others of the package, which it may import. Raises
    UserError if one was edited after a registry first had it. Only a new Python process has the new code."""
    path, top = Path(module.__file__), sys.modules[module.__name__.partition(".")[0]]
    others = [file for folder in getattr(top, "__path__", ()) for file in sorted(Path(folder).rglob("*.py"))]
    content = b"".join(file.read_bytes() for file in dict.fromkeys([path, *others]))
    if _packaged.setdefault(module, content) != content:
        raise UserError(f"{path}: {'a file of its package' if others else 'it'} was edited after this Python process "
                        f"had imported it, so its runs would be of the old code.\nStart Python anew.")
    return content


_packaged: dict[ModuleType, bytes] = {}  # the content with which a module and its package first came
_importing = threading.RLock()


def discover(folders: Iterable[Path] = ()) -> Registry:
    """Find all plugins: the shipped ones, those in ``folders``, and those of installed packages.

    Every ``*.py`` of a folder is a plugin, but for those that begin with ``_`` and pytest's own (``test_*.py`` and
    ``conftest.py``). Raises UserError if a folder does not exist."""
    registry = Registry()
    folders = [*shipped_folders(), *map(Path, folders)]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--plugins: '{folder}' is not a folder.")
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        for path in plugin_files(folder):
            try:
                registry.waiting[path] = path.read_bytes()
            except OSError as error:
                registry.failed[path.stem] = f"{path}: cannot be read ({error.strerror})"
    packaged: dict[str, ModuleType] = {}  # several entry points may name classes of one module
    for entry in entry_points():
        try:
            target = entry.load()
        except (Exception, SystemExit) as error:
            registry.failed[entry.name] = f"entry point {entry.value}: {words(error)}"
            continue
        module = target if isinstance(target, ModuleType) else sys.modules[target.__module__]
        packaged[module.__name__] = module
    for module in packaged.values():
        registry._add(module, _content_of(module), Path(module.__file__))
    return registry
