"""``list``: methods, backbones, metrics and datasets."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError
from .common import add_plugins

if TYPE_CHECKING:
    from ...runs.cards import Card


def add(commands) -> None:
    """Declare the command."""
    listing = commands.add_parser("list", help="show methods, backbones, metrics and datasets, or one in full",
                                  description="Show all methods, backbones, metrics and datasets, or one in "
                                              "full.")
    listing.add_argument("name", nargs="?", help="a method, backbone, metric or dataset; recbole: all of RecBole's "
                         "models, and whether they can be backbones; recbole:NAME: one of them")
    add_plugins(listing)


def run(args: argparse.Namespace) -> int:
    from ...data.source import beside, config_file, configured, spelled
    from ...runs.cards import RECBOLE, read_all, unknown_plugin

    if args.name == "recbole":
        from ..listing import show_recbole_models

        show_recbole_models()
        return 0
    # Files of --plugins are imported, to say whether they can be; of the shipped ones reading the text is enough.
    cards = None if args.plugins else read_all()
    if args.name is None:
        return _listing(args.plugins, cards)
    known = [*([] if cards is None else (card.name for card in cards)), *configured(), *beside()]
    anywhere = args.name.lower() in map(str.lower, known) or args.name.lower().startswith(RECBOLE)
    if cards is not None and not anywhere and config_file(spelled(args.name)) is None:
        raise unknown_plugin("method, backbone, metric or dataset", args.name, known)
    return _in_full(args.name, args.plugins)


def _listing(folders: list[Path], cards: list[Card] | None) -> int:
    """All plugins and datasets; the plugins are loaded where ``cards`` is None."""
    from ...data.source import beside, configured, load_config
    from ..listing import cards_of, show_listing

    broken = {}
    if cards is None:
        from ...runs.registry import discover

        registry = discover(folders)
        cards, broken = cards_of(registry), registry.broken
    titles = {name: load_config(name).title for name in configured()}
    mine = {name: str(path) for name, path in beside().items() if name not in titles}
    show_listing(cards, {**titles, **mine}, broken)
    return 0


def _in_full(name: str, folders: list[Path]) -> int:
    from ...data.source import beside, config_file, configured, dataset_name, file_there, load_config, spelled
    from ...runs.config import CORE_SETTINGS
    from ...runs.cards import unknown_plugin
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
