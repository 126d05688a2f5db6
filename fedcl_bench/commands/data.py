"""``data``: a dataset's statistics."""

from __future__ import annotations

import argparse

from .common import add_dataset


def add(commands) -> None:
    """Declare the command."""
    data = commands.add_parser("data", help="show a dataset's blocks and compare them with the expected counts",
                               description="Show a dataset's blocks in the layout of F3CRec's Table 1 and compare them "
                                           "with the counts in its config.")
    data.add_argument("name", help="dataset")
    add_dataset(data)


def run(args: argparse.Namespace) -> int:
    from ..config import CORE_SETTINGS, refuse_idle
    from ..datasets import load_config, load_stream, locate
    from ..report import show_statistics
    from ..settings import assemble, parse_assignments
    from ..stream import statistics

    config = load_config(args.name)
    changes = parse_assignments(args.assignments, "--set")
    settings = assemble(CORE_SETTINGS, [(f"dataset_configs/{args.name}.yaml", config.settings), ("--set", changes)],
                        "data")[0]
    refuse_idle(settings, [("--set", changes)])
    source = locate(args.name, args.data_dir, settings)
    stream = load_stream(source, settings)
    return show_statistics(source, settings, statistics(stream), config.expected if not changes else {})
