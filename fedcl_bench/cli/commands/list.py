"""``list``: methods, backbones and datasets."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...errors import UserError, unknown
from .common import add_plugins


def add(commands) -> None:
    """Declare the command."""
    listing = commands.add_parser("list", help="show methods, backbones and datasets, or one in full",
                                  description="Show all methods, backbones and datasets, or one in full.")
    listing.add_argument("name", nargs="?", help="a method, backbone or dataset; recbole: all of RecBole's models, and "
                         "whether they can be backbones (takes a minute); recbole:NAME: one of them")
    listing.add_argument("--out", type=Path, metavar="FILE",
                         help="with recbole: also write the table to FILE (Markdown)")
    add_plugins(listing)


def run(args: argparse.Namespace) -> int:
    from ...data.source import config_file, configured, dataset_name, load_config, spelled
    from ...runs.config import CORE_SETTINGS
    from ...runs.registry import RECBOLE, discover
    from ..show import show_dataset, show_listing, show_plugin

    if args.name == "recbole":
        return _recbole(args.out)
    if args.out is not None:
        raise UserError("--out has no effect without `list recbole`; leave it out.")
    registry = discover(args.plugins)
    if args.name is None:
        show_listing(registry, {name: load_config(name) for name in configured()})
        return 0
    plugins = [plugin for (_, name), plugin in registry.plugins.items() if name == args.name]
    plugins = plugins or [plugin for (_, name), plugin in registry.plugins.items() if name.lower() == args.name.lower()]
    dataset = spelled(args.name)
    if args.name.lower().startswith(RECBOLE):
        plugins = [registry.get("backbone", args.name)]
    if plugins:
        for plugin in plugins:
            show_plugin(plugin, CORE_SETTINGS)
    elif path := config_file(dataset):
        show_dataset(dataset_name(dataset), load_config(dataset), path)
    elif args.name in registry.broken:
        raise UserError(f"'{args.name}' cannot be loaded: {registry.broken[args.name]}")
    else:
        raise unknown("method, backbone or dataset", args.name, [n for _, n in registry.plugins] + list(configured()))
    return 0


def _recbole(out: Path | None) -> int:
    from ...reports.pages import write_page
    from ...testing.recbole_survey import markdown, survey
    from ..show import show_survey

    surveyed = survey()
    show_survey(surveyed)
    if out is not None:
        write_page(out, markdown(surveyed))
        print(f"written: {out}")
    return 0
