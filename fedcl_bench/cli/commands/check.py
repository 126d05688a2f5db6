"""Run a method or backbone with its partners, a metric on lists, or an attack, and say of each property whether it
holds, with the evidence. Exit status 1 if one does not."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ...core.errors import UserError
from .. import Extend, add_options, names, print_json

if TYPE_CHECKING:
    from ...runs.registry import Plugin, Registry

EXAMPLES = """\
examples:
  run_bench.py check f3crec                        with a few partners, about half a minute
  run_bench.py check mymethod --plugins DIR --full with every backbone it goes with, and on a slice of ML-100K
  run_bench.py check fedmf --with ft,reg           a backbone with these methods
  run_bench.py check recbole:NeuMF                 a model of RecBole as a backbone
  run_bench.py check mymetric --plugins DIR        a metric
  run_bench.py check --all --full                  every plugin

what is tried, on small streams in which users and items are new in later steps:
  correct     it runs; clients trained together, alone and in another order give the same; threads, processes,
              random states and a server apart from its clients change nothing; killed anywhere and resumed it ends
              the same; every parameter and setting is used
  federated   (a) what other clients have, and who has which number, does not change what a client uploads; (b) uploads
              are public parameters and declared statistics that do not tell items or private parameters; (c) the
              server acts on those alone
  continual   (d) past blocks can be deleted; (e) validation, test and future data never reach training
  both        whole runs, a process each, in worlds that differ in such data (`run --honest` does it on real data)
  a metric    finite numbers, one per user, of that user's list alone; the same each time
  an attack   without malicious clients nothing changes, with them the model does; threads, random states, resuming
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a method, backbone, metric or attack")
    parser.add_argument("--all", action="store_true", help="every plugin found")
    parser.add_argument("--with", dest="partners", type=names, action=Extend, default=(), metavar="A,B",
                        help="the backbones (methods) to try a method (backbone) with")
    parser.add_argument("--full", action="store_true",
                        help="with every partner, and on a slice of ML-100K (default: a few partners)")
    add_options(parser, "plugins", "json")


def run(args: argparse.Namespace) -> int:
    import torch

    from ...runs.registry import RECBOLE, discover
    from ...testing import check_plugin
    from ...testing.report import CheckDisplay

    if (args.name is None) == (not args.all):
        raise UserError("check: found " + ("a name and --all" if args.all else "no name") +
                        ", accepted: a method, backbone, metric or attack, or --all.\nAs: run_bench.py check f3crec")
    registry = discover(args.plugins)
    if args.all:
        chosen = list(registry.plugins.values())
    elif args.name.lower().startswith(RECBOLE):
        chosen = _of_recbole(registry, args.name)
    else:
        chosen = [plugin for (kind, name), plugin in registry.plugins.items()
                  if name == registry.spelled(kind, args.name)]
    if not chosen:
        raise registry.unknown("method, backbone, metric or attack", args.name, [name for _, name in registry.plugins])
    reports = []
    torch.set_num_threads(1)  # its runs are small (``core.parallel.threads_for``)
    for plugin in chosen:
        with CheckDisplay(plugin, quiet=args.json) as board:
            reports.append(check_plugin(registry, plugin, full=args.full, watch=board.add, partners=args.partners))
        if not args.json:
            board.conclude(reports[-1])
    if args.json:
        print_json([report.as_json() for report in reports])
    return 0 if all(report.passed for report in reports) else 1


def _of_recbole(registry: Registry, name: str) -> list[Plugin]:
    """What can be checked of a RecBole model: as a backbone of clients of one user each or of domains, as a method."""
    plugin = registry.get("backbone", name)
    usable = [registry.get("method", name)] if registry.knows("method", name) else []
    for each in (plugin, plugin.of_domains()):
        try:
            each.cls(each.cls.Settings())
        except UserError:
            continue
        usable.append(each)
    return usable or [plugin]
