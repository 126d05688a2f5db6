"""``data``: a dataset's statistics, and getting datasets: conversion and download."""

from __future__ import annotations

import argparse
import difflib
import sys
import tempfile
from pathlib import Path

from ..errors import UserError, unknown
from .common import add_dataset

ACTIONS = ("show", "convert", "download")

EXAMPLES = """\
examples:
  run_bench.py data ml-100k                                      block statistics (short for: data show ml-100k)
  run_bench.py data download ml-latest-small                     fetch from the publisher and convert into ./data
  run_bench.py data convert hetrec2011-ml --raw ~/hetrec         from a folder of the publisher's files
  run_bench.py data convert lastfm-2k --raw ~/hetrec2011-lastfm-2k.zip --out ~/atomic
  run_bench.py data lastfm-2k --data-dir ~/atomic                its statistics, from there
  run_bench.py data xing --set session_from=gap --set session_split=last     with sessions cut and split anew
"""


def with_action(arguments: list[str]) -> list[str]:
    """The words after ``data`` with the action spelled out: ``NAME`` alone is short for ``show NAME``."""
    if arguments and arguments[0] in (*ACTIONS, "-h", "--help"):
        return arguments
    if (len(arguments) > 1 and not any(word.startswith("-") for word in arguments[:2])
            and difflib.get_close_matches(arguments[0], ACTIONS)):
        raise unknown("data command", arguments[0], ACTIONS)
    return ["show", *arguments]


def add(commands) -> None:
    """Declare the command."""
    data = commands.add_parser("data", help="show a dataset's blocks or sessions; convert or download datasets",
                               epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
                               description="Show a dataset's blocks or sessions, convert the publisher's files, or "
                                           "download them.")
    actions = data.add_subparsers(dest="action", metavar="{" + ",".join(ACTIONS) + "}", required=True)
    show = actions.add_parser("show",
                              help="show a dataset's blocks or sessions and compare them with the expected counts",
                              description="Show a dataset's blocks in the layout of F3CRec's Table 1, or its sessions "
                                          "in that of FCUCR's, and compare them with the counts in its config.")
    show.add_argument("name", help="dataset")
    add_dataset(show)
    convert = actions.add_parser("convert", help="turn the publisher's files into atomic files",
                                 description="Check a publisher's raw files (checksums where published, format, number "
                                             "of rows, users and items) and write OUT/NAME/NAME.inter, and NAME.item "
                                             "where items are described. `list NAME` says where to get them.")
    convert.add_argument("name", help="dataset")
    convert.add_argument("--raw", required=True, type=Path, metavar="DIR",
                         help="folder of the publisher's files, or the publisher's zip")
    download = actions.add_parser("download", help="fetch the publisher's files and convert them",
                                  description="Fetch a dataset from its publisher, then do as `data convert`. By using "
                                              "it you accept the publisher's terms: `list NAME` names them.")
    download.add_argument("name", help="dataset")
    for parser in (convert, download):
        parser.add_argument("--out", type=Path, default=Path("data"), metavar="DIR",
                            help="where to write NAME/NAME.inter (default: ./data, where datasets are looked for)")
        parser.add_argument("--force", action="store_true", help="replace atomic files that differ")
        parser.add_argument("--any-checksum", action="store_true",
                            help="warn instead of stopping if a file is not the published one byte for byte; rows, "
                                 "users and items are still counted")


def run(args: argparse.Namespace) -> int:
    try:
        return {"show": _show, "convert": _convert, "download": _download}[args.action](args)
    except KeyboardInterrupt:
        print("run_bench.py: interrupted; no file is half written, the same command starts again.", file=sys.stderr)
        return 130


def _show(args: argparse.Namespace) -> int:
    from ..config import CORE_SETTINGS, layers, refuse_idle
    from ..datasets import load_config, load_stream, locate, statistics
    from ..report import show_statistics
    from ..settings import assemble, parse_assignments

    config = load_config(args.name)
    changes = parse_assignments(args.assignments, "--set")
    parts = assemble(CORE_SETTINGS, layers(args.name, [("--set", changes)]), "data")
    refuse_idle(parts, [("--set", changes)])
    settings = parts[0]
    source = locate(args.name, args.data_dir, settings)
    stream = load_stream(source, settings)
    return show_statistics(source, settings, statistics(stream), config.expected if not changes else {})


def _convert(args: argparse.Namespace) -> int:
    return _report(args, args.raw)


def _download(args: argparse.Namespace) -> int:
    from ..archives import fetch
    from ..convert import FORMATS
    from ..datasets import load_config

    if args.name not in FORMATS:
        raise unknown("dataset", args.name, FORMATS)
    config = load_config(args.name)
    then = f"run_bench.py data convert {args.name} --raw"
    if not config.raw.url:
        raise UserError(f"dataset '{args.name}' cannot be downloaded freely; get it from {config.source}\n"
                        f"Then run: {then} DIR{_out(args, '--out')}")
    file = config.raw.url.rsplit("/", 1)[-1]
    with tempfile.TemporaryDirectory(prefix="fedcl_bench-") as folder:
        fetch(config.raw.url, Path(folder) / file,
              f"Fetch it by hand, then run: {then} {file}{_out(args, '--out')}")
        return _report(args, Path(folder) / file, config.raw.url)


def _out(args: argparse.Namespace, option: str) -> str:
    return "" if args.out == Path("data") else f" {option} {args.out}"


def _report(args: argparse.Namespace, raw: Path, label: str = "") -> int:
    """Convert and say what was done; ``label`` as for ``convert``."""
    from ..convert import convert

    done = convert(args.name, raw, args.out, args.force, args.any_checksum, label=label)
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    counts = done.counts
    print(f"{args.name}: {counts['rows']:,} rows of {counts['users']:,} users and {counts['items']:,} items"
          + (f"; {counts['titles']:,} titles" if "titles" in counts else ""))
    if done.interactions < counts["rows"]:
        print(f"{done.interactions:,} interactions without repeated rows and those that name no item")
    for check in done.checks:
        print(check)
    for path in done.files:
        print(f"{'wrote' if done.changed else 'already there'}: {path}")
    needed = "".join(f" --set {name}={value}" for name, value in done.settings.items())
    print(f"next: run_bench.py data {args.name}{_out(args, '--data-dir')}{needed}")
    return 0
