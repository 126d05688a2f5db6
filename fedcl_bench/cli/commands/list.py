"""Show all methods, backbones, metrics, attacks and datasets, or one in full."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from rich.console import Console

from ...core.errors import UserError, unknown
from ...core.settings import as_text, describe, flat
from ...data.source import (atomic_files, config_file, configured, dataset_name, file_there, load_config,
                            parts_of, spelled)
from ...runs.metadata import NO_BACKBONE, RECBOLE, Metadata, read_all, unknown_plugin
from .. import add_options, settings_of

if TYPE_CHECKING:
    from ...runs.registry import Plugin, Registry

_SHOPS = "online-retail-ffmsr+amazon-pantry"
say = Console(highlight=False, soft_wrap=True, markup=False).print


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a method, backbone, metric, attack or dataset; recbole: all of "
                        "RecBole's models, and whether they can be backbones; recbole:NAME: one of them")
    parser.add_argument("--all", action="store_true", help="of a plugin every setting that its runs have")
    parser.add_argument("--with", dest="partner", metavar="NAME",
                        help="the backbone (method) with which a method (backbone) is run (default: one that fits)")
    add_options(parser, set="show what runs with this setting take, as stream=static; repeatable")
    parser.add_argument("--dataset", metavar="NAME", help="on which it is run (default: one that fits)")
    add_options(parser, "plugins")


def run(args: argparse.Namespace) -> None:
    name, folders = args.name, args.plugins
    if name == "recbole":
        return _recbole_models()
    plugins = read_all(folders) if all(folder.is_dir() for folder in folders) else None
    if name is None:
        return _everything(folders, plugins)
    if plugins is not None:  # a wrong name is answered before PyTorch is imported
        known = [*(plugin.name for plugin in plugins), *configured(), *atomic_files()]
        anywhere = name.lower() in map(str.lower, known) or name.lower().startswith(RECBOLE)
        if not anywhere and config_file(spelled(name)) is None:
            raise unknown_plugin("method, backbone, metric, attack or dataset", name, known)
    return _in_full(name, args)


def _everything(folders: list[Path], plugins: list[Metadata] | None) -> None:
    """One line per method, backbone, metric, attack and dataset; plugins that cannot be loaded with their error.
    ``plugins``: None where importing them must tell."""
    broken = {}
    if plugins is None:
        from ...runs.registry import discover

        registry = discover(folders)
        plugins, broken = registry.metadata(), registry.broken
    titles = {name: load_config(name).title for name in configured()}
    titles |= {name: str(path) for name, path in atomic_files().items() if name not in titles}
    groups = {f"{kind}s": {plugin.name: plugin.title + " [re-implementation]" * plugin.reimplementation
                           for plugin in sorted(plugins, key=lambda plugin: plugin.name) if plugin.kind == kind}
              for kind in ("method", "backbone", "metric", "attack")} | {"datasets": titles, "cannot be loaded": broken}
    groups["methods"][f"{RECBOLE}NAME"] = "bound: RecBole's own Pop, ItemKNN, EASE, BPR, LightGCN or SASRec on all data"
    groups["backbones"][f"{RECBOLE}NAME"] = "RecBole's own models; `list recbole` shows which"
    width = 2 + max(16, *(len(name) for lines in groups.values() for name in lines))
    for heading, lines in groups.items():
        if lines:
            say(heading, style="bold")
        for name, text in lines.items():
            say(f"  {name:<{width}}{text}")
    say("\n`list NAME` shows one of them in full.")


def _in_full(name: str, args: argparse.Namespace) -> None:
    from ...runs.registry import discover

    registry = discover(args.plugins)
    plugins = [plugin for (_, known), plugin in registry.plugins.items() if known == name]
    plugins = plugins or [plugin for (_, known), plugin in registry.plugins.items() if known.lower() == name.lower()]
    if name.lower().startswith(RECBOLE):
        plugins = [registry.get(kind, name) for kind in ("method", "backbone") if registry.knows(kind, name)] \
            or [registry.get("backbone", name)]
    asked = {"--all": args.all, "--with": args.partner, "--dataset": args.dataset, "--set": args.assignments}
    if any(asked.values()) and (not plugins or plugins[0].kind == "metric"):
        option = next(option for option, value in asked.items() if value)
        raise UserError(f"{option}: has an effect on methods and backbones, and '{name}' is none; leave it out.")
    for part in map(spelled, parts_of(args.dataset) if args.dataset else ()):
        if not (config_file(part) or file_there(part, None)):
            raise unknown("dataset", part, {**configured(), **atomic_files()})
    for plugin in plugins:
        _metric(plugin) if plugin.kind == "metric" else _plugin(registry, plugin, args)
    if plugins:
        return
    dataset = spelled(name)
    path = config_file(dataset) or file_there(dataset, None)
    if not path:
        raise registry.unknown("method, backbone, metric, attack or dataset", name,
                               [*(n for _, n in registry.plugins), *configured(), *atomic_files()])
    _dataset(dataset, path)


def _plugin(registry: Registry, plugin: Plugin, args: argparse.Namespace) -> None:
    """A plugin's reference and settings, and what else its runs take other than by default; or every setting."""
    from ...runs.config import CORE_SETTINGS, STREAM_AMBIGUITIES, Layers, origins, resolve

    say(f"{plugin.kind} {plugin.name}: {plugin.cls.title}", style="bold")
    say(f"{plugin.cls.reference}\n{plugin.path}")
    cls, (method, backbone, dataset) = plugin.cls, _cell(registry, plugin)
    if args.partner:
        method, backbone = (method, args.partner) if plugin.kind != "backbone" else (args.partner, backbone)
    cell = method, backbone, spelled(args.dataset) if args.dataset else dataset
    overrides: Layers = [("--set", settings_of(args))]
    if plugin.kind == "attack":
        overrides.insert(0, ("list", {"attack": plugin.name}))
    if plugin.kind == "backbone" and plugin.name.startswith(RECBOLE):
        from ...recbole import domain_facts

        of_users, of_domains = _by_users(plugin.name), domain_facts.status(plugin.name[len(RECBOLE):])
        say(f"trained by users: {of_users}\ntrained by domains: {of_domains or 'no, it is not sequential'}")
        if of_users.startswith("refused") and not of_domains.startswith("yes"):
            return
    values = flat(resolve(registry, *cell, overrides))
    whence = origins(registry.get("method", cell[0]).cls, registry.get("backbone", cell[1]).cls, cell[2], overrides)
    _settings(f"settings of {plugin.name}", cls.Settings, values, whence)
    for settings in CORE_SETTINGS:
        _settings(settings.__doc__.splitlines()[0], settings, values, whence, brief=not args.all)
    if declared := {**cls.ambiguities, **STREAM_AMBIGUITIES.get(values["stream"], {})}:
        say("\nread differently by paper and code (`sensitivity` varies them)", style="bold")
    for name, readings in declared.items():
        say(f"  {name}: " + ", ".join(f"{as_text(value)} ({whose})" for value, whose in readings.items()))
    say(f"\nValues are those of {cell[0]} on {cell[1]}, {cell[2]}"
        + ("" if args.all else "; --all shows every setting") + ". Change one with --set NAME=VALUE.")


def _settings(title: str, cls: type, values: Mapping[str, Any], whence: Mapping[str, str], brief: bool = False) -> None:
    """The settings of a class: each one's value, where that comes from, and what it means; ``brief``: only those that
    have another value than by default, without what they mean."""
    rows = []
    for name, default, space, text in describe(cls):
        value = as_text(values[name]) or "(none)"
        if value != default or not brief:
            source = whence.get(name, "--set reading")
            rows.append((name, value, f"   ({source}; else {default})" if value != default else "", text, space))
    if rows:
        say(f"\n{title}", style="bold")
    for name, value, differs, text, space in rows:
        say(f"  {name} = {value}{differs}")
        if not brief:
            say(f"      {text}\n      {space}", style="dim")


def _by_users(backbone: str) -> str:
    """Whether clients of one user each can train a model of RecBole; empty for other backbones."""
    from ...recbole import client_facts

    return client_facts.status(backbone[len(RECBOLE):]) if backbone.startswith(RECBOLE) else ""


def _cell(registry: Registry, plugin: Plugin) -> tuple[str, str, str]:
    """A method, backbone and dataset that the plugin goes with, to say what its runs take."""
    from ...federation.compatibility import check_classes
    from ...plugin.method import Method
    from ...plugin.sequential import SequentialBackbone

    def fits(method: str, backbone: str) -> bool:
        try:
            check_classes(registry.get("backbone", backbone).cls, registry.get("method", method).cls)
        except UserError:
            return False
        return True

    if plugin.kind == "attack":
        return "ft", "fedmf", "ml-100k"
    if plugin.kind == "backbone":
        same = registry.knows("method", plugin.name) and registry.get("method", plugin.name).cls.needs_backbone
        method = plugin.name if same and fits(plugin.name, plugin.name) else "ft"
        backbone, of_sessions = plugin.name, issubclass(plugin.cls, SequentialBackbone)
    else:
        method, of_sessions = plugin.name, any(getattr(plugin.cls, hook, None) is not getattr(Method, hook)
                                               for hook in ("represent", "new_private", "rescore_session"))
        usual = [NO_BACKBONE] * (not plugin.cls.needs_backbone) + [method, "sasrec" if of_sessions else "fedmf"]
        backbone = next(name for name in [*usual, *registry.names("backbone")]
                        if registry.knows("backbone", name) and fits(method, name))
    of_domains = plugin.cls.for_domains or _by_users(backbone).startswith("refused") \
        or registry.get("backbone", backbone).cls.for_domains
    return method, backbone, _SHOPS if of_domains else "xing" if of_sessions else "ml-100k"


def _metric(plugin: Plugin) -> None:
    from ...evaluation.metrics import OF_EVERY_RUN

    cls = plugin.cls
    say(f"metric {plugin.name}: {cls.title}", style="bold")
    say("\n".join(filter(None, (" ".join((cls.__doc__ or "no formula: it has no docstring").split()), cls.reference,
                                str(plugin.path)))))
    uses = "In every run, as NAME@K for every K of topk." if cls in OF_EVERY_RUN else \
        f"In the tests of runs with --set extra_metrics={plugin.name}."
    say(f"\n{uses}" + ("" if cls.of_items else f" It can choose the best round: --set valid_metric={plugin.name}@20."))


def _dataset(dataset: str, path: Path) -> None:
    """A dataset's config; ``path`` is its YAML file, or the data of one that has none."""
    name, config = dataset_name(dataset), load_config(dataset)
    say(f"dataset {name}: {config.title or 'your own'}", style="bold")
    settings = {"settings": config.settings,
                **{f"settings for {plugin}": values for plugin, values in {**config.backbone_settings,
                                                                           **config.method_settings}.items()},
                **{f"search of {plugin}": values for plugin, values in config.search.items()}}
    texts = {"source": config.source, "licence": config.licence, "notes": config.notes,
             **{label: ", ".join(f"{k}={v}" for k, v in values.items()) for label, values in settings.items()},
             "file" if path.suffix == ".inter" else "config":
                 f"{path}, without a YAML file" if path.suffix == ".inter" else str(path)}
    for label, text in texts.items():
        if text:
            say(f"{label}: {text}")
    parts = "sessions" if config.settings.get("stream") == "sessions" else "blocks"
    say(f"`data {name}` shows its {parts}" + (f"; `data download {name}` gets it." if config.raw.url else "."))


def _recbole_models() -> None:
    from ...recbole import client_facts, domain_facts, pooled
    from ...recbole.models import names

    for name, kind in names().items():
        by_domains = f"; by domains: {domain_facts.status(name)}" if kind == "sequential" else ""
        say(f"  {name:<12}{kind:<12}{client_facts.status(name)}{by_domains}")
    say(f"\nAs methods RecBole trains these on everybody's data so far: {', '.join(pooled.KINDS)}.\n"
        f"`list recbole:NAME` shows a model's settings.")
