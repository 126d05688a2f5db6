"""Show all methods, backbones, metrics and datasets, or one in full."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import UserError
from . import add_options

if TYPE_CHECKING:
    from ...runs.metadata import Metadata


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("name", nargs="?", help="a method, backbone, metric or dataset; recbole: all of RecBole's "
                        "models, and whether they can be backbones; recbole:NAME: one of them")
    add_options(parser, "plugins")


def run(args: argparse.Namespace) -> int:
    from ...data.source import beside, config_file, configured, spelled
    from ...runs.metadata import RECBOLE, read_all, unknown_plugin

    if args.name == "recbole":
        _show_recbole_models()
        return 0
    plugins = read_all(args.plugins) if all(folder.is_dir() for folder in args.plugins) else None
    if args.name is None:
        return _listing(args.plugins, plugins)
    known = [*([] if plugins is None else (plugin.name for plugin in plugins)), *configured(), *beside()]
    anywhere = args.name.lower() in map(str.lower, known) or args.name.lower().startswith(RECBOLE)
    if plugins is not None and not anywhere and config_file(spelled(args.name)) is None:
        raise unknown_plugin("method, backbone, metric or dataset", args.name, known)
    return _in_full(args.name, args.plugins)


def _listing(folders: list[Path], plugins: list[Metadata] | None) -> int:
    """One line per method, backbone, metric and dataset; plugins that cannot be loaded with their error.

    Args:
        plugins: None where importing them must tell.
    """
    from rich.console import Console

    from ...data.source import beside, configured, load_config
    from ...runs.metadata import RECBOLE

    broken = {}
    if plugins is None:
        from ...runs.registry import discover

        registry = discover(folders)
        plugins, broken = registry.metadata(), registry.broken
    titles = {name: load_config(name).title for name in configured()}
    titles |= {name: str(path) for name, path in beside().items() if name not in titles}
    groups = {f"{kind}s": {plugin.name: plugin.title + " [re-implementation]" * plugin.reimplementation
                           for plugin in sorted(plugins, key=lambda plugin: plugin.name) if plugin.kind == kind}
              for kind in ("method", "backbone", "metric")} | {"datasets": titles, "cannot be loaded": broken}
    groups["backbones"][f"{RECBOLE}NAME"] = "RecBole's own models; `list recbole` shows which"
    width = 2 + max(16, *(len(name) for lines in groups.values() for name in lines))
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for heading, lines in groups.items():
        if lines:
            console.print(heading, style="bold")
        for name, text in lines.items():
            console.print(f"  {name:<{width}}{text}", markup=False)
    console.print("\n`list NAME` shows one of them in full.", markup=False)
    return 0


def _in_full(name: str, folders: list[Path]) -> int:
    from ...data.source import beside, config_file, configured, dataset_name, file_there, load_config, spelled
    from ...runs.config import CORE_SETTINGS
    from ...runs.metadata import unknown_plugin
    from ...runs.registry import RECBOLE, discover
    from ..show import show_dataset, show_metric, show_plugin

    registry = discover(folders)
    plugins = [plugin for (_, known), plugin in registry.plugins.items() if known == name]
    plugins = plugins or [plugin for (_, known), plugin in registry.plugins.items() if known.lower() == name.lower()]
    if name.lower().startswith(RECBOLE):
        plugins = [registry.get("backbone", name)]
    if plugins:
        for plugin in plugins:
            show_metric(plugin) if plugin.kind == "metric" else show_plugin(plugin, CORE_SETTINGS)
        return 0
    if name in registry.broken:
        raise UserError(f"'{name}' cannot be loaded: {registry.broken[name]}")
    dataset = spelled(name)
    path = config_file(dataset) or file_there(dataset, None)
    if not path:
        raise unknown_plugin("method, backbone, metric or dataset", name,
                             [*(n for _, n in registry.plugins), *configured(), *beside()])
    show_dataset(dataset_name(dataset), load_config(dataset), path)
    return 0


def _show_recbole_models() -> None:
    """Which RecBole models can be backbones."""
    from rich.console import Console

    from ...recbole import client_facts, domain_facts
    from ...recbole.models import names

    console = Console(highlight=False, soft_wrap=True, markup=False)
    for name, kind in names().items():
        by_domains = f"; by domains: {domain_facts.status(name)}" if kind == "sequential" else ""
        console.print(f"  {name:<12}{kind:<12}{client_facts.status(name)}{by_domains}")
    console.print("\n`list recbole:NAME` shows a model's settings.")
