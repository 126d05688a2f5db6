"""``list``: methods, backbones and datasets."""

from __future__ import annotations

import argparse

from ..errors import UserError, unknown
from .common import add_plugins


def add(commands) -> None:
    """Declare the command."""
    listing = commands.add_parser("list", help="show methods, backbones and datasets, or one in full",
                                  description="Show all methods, backbones and datasets, or one in full.")
    listing.add_argument("name", nargs="?", help="a method, backbone or dataset")
    add_plugins(listing)


def run(args: argparse.Namespace) -> int:
    from ..config import CORE_SETTINGS
    from ..datasets import configured, load_config
    from ..registry import discover
    from ..report import show_dataset, show_listing, show_plugin

    registry = discover(args.plugins)
    if args.name is None:
        show_listing(registry, {name: load_config(name) for name in configured()})
        return 0
    found = [plugin for (kind, name), plugin in registry.plugins.items() if name == args.name]
    if found:
        for plugin in found:
            show_plugin(plugin, CORE_SETTINGS)
    elif args.name in configured():
        show_dataset(args.name, load_config(args.name), configured()[args.name])
    elif args.name in registry.broken:
        raise UserError(f"'{args.name}' cannot be loaded: {registry.broken[args.name]}")
    else:
        raise unknown("method, backbone or dataset", args.name, [n for _, n in registry.plugins] + list(configured()))
    return 0
