"""Options and behaviour of the commands that rebuild a paper from records: tables, pack."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Mapping

from . import common
from .common import Extend, LeftOut, add_data_dir, add_plugins, add_set, add_tuned, names

if TYPE_CHECKING:
    from ...experiments.papers import PaperTable
    from ...reports.selection import Source
    from ...runs.specs import RunSpec


def _table_numbers(text: str) -> tuple[int | str, ...]:
    for part in text.split(","):
        if part != "all" and not re.fullmatch("[0-9]{1,3}", part):
            raise argparse.ArgumentTypeError(f"found '{part}', accepted: the number of a table, or all")
    return tuple(part if part == "all" else int(part) for part in text.split(","))


def add_tables(parser: argparse.ArgumentParser, default: str) -> None:
    """``--paper`` and ``--table``; ``default`` says in words what is taken without them."""
    parser.add_argument("--paper", metavar="NAME", help="whose tables: f3crec (default), fcucr or ffmsr"
                        if default == "all" else "only the runs that this paper's tables need, as f3crec")
    parser.add_argument("--table", nargs="+", action=Extend, type=_table_numbers, metavar="N",
                        help=f"numbers of tables, as 2 3 or 2,3, or all (default: {default})")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Which records belong to a table, and options of their places."""
    add_tuned(parser)
    add_set(parser, "of runs with this setting changed; repeatable, for all rows of a table")
    for kind, example in (("dataset", "ml-100k,lastfm-2k"), ("backbone", "fedmf")):
        parser.add_argument(f"--{kind}s", f"--{kind}", type=names, action=Extend, metavar="A,B",
                            help=f"only these, as {example}; repeatable")
    add_plugins(parser)


def add_records(parser: argparse.ArgumentParser) -> None:
    """``--records`` and ``--data-dir``."""
    common.add_records(parser)
    add_data_dir(parser)


def chosen_tables(args: argparse.Namespace) -> tuple[str, list[PaperTable]]:
    """The paper and its tables; UserError for an unknown paper, table, dataset or backbone."""
    from ...core.errors import UserError, unknown
    from ...experiments.papers import get, select

    paper = args.paper or "f3crec"
    numbers = args.table or ["all"]
    tables = select(paper, get(paper).TABLES if "all" in numbers else numbers)
    for kind in ("datasets", "backbones"):
        known = {name for table in tables for name in getattr(table, kind) if name}
        for name in getattr(args, kind) or () if known else ():
            if name not in known:
                error = unknown(f"{kind[:-1]} of these tables of {paper}", name, known)
                raise UserError(f"{error} A table of any records has --rows, --columns or --methods, and no --table.")
    return paper, tables


def make_source(args: argparse.Namespace, records: Path, needs_runs: bool = True) -> Source:
    """Where the tables' numbers come from, as the options say: the runs are those of the folder ``records``."""
    from ...reports.selection import Source
    from ...runs.registry import discover
    from ...runs.specs import Tuned, Where
    from ...records.store import load_all
    from ...core.settings import parse_assignments

    assignments = parse_assignments(args.assignments, "--set")
    data_dir = getattr(args, "data_dir", None)
    where = Where.of_records(records, args.plugins, data_dir)
    runs, failed = load_all(records, LeftOut()) if needs_runs else ([], [])
    return Source(runs, discover(args.plugins), Tuned.of(args.tuned, records, where), tuple(assignments.items()),
                  lambda dataset: statistics_of(dataset, data_dir, assignments), where,
                  failed)


def specs_of(tables: Iterable[PaperTable], args: argparse.Namespace) -> list[RunSpec]:
    """The runs of these tables, of the datasets and backbones that the options choose."""
    return [spec for table in tables if table.row_spec for spec in table.specs()
            if (args.datasets is None or spec.dataset in args.datasets)
            and (args.backbones is None or spec.backbone in args.backbones)]


def statistics_of(dataset: str, data_dir: Path | None, assignments: Mapping[str, Any]) -> Mapping[str, list]:
    """Statistics of a dataset that is on this machine; UserError if it is not."""
    from dataclasses import fields

    from ...data.datasets import load_stream, statistics
    from ...data.recbole_files import bundled
    from ...data.source import locate
    from ...data.stream import StreamSettings
    from ...core.errors import UserError
    from ...runs.config import layers
    from ...core.settings import assemble

    known = {field.name for field in fields(StreamSettings)}
    chosen = [(origin, {name: value for name, value in layer.items() if name in known})
              for origin, layer in layers(dataset, [("--set", assignments)])]
    settings = assemble([StreamSettings], chosen, dataset)[0]
    try:
        source = locate(dataset, data_dir, settings)
    except UserError:
        if bundled(dataset) is None:
            raise
        source = locate(dataset, None, settings)  # --data-dir is for the datasets that are not bundled with RecBole
    return statistics(load_stream(source, settings))


def command_line(name: str, args: argparse.Namespace, source: Source, **places: Path) -> str:
    """A command as it was given, without what is of this machine: absolute paths lose their folders."""
    def text(path: Path) -> str:
        return path.name if path.is_absolute() else path.as_posix()
    words = ["run_bench.py", name]
    for option, path in places.items():
        words += [f"--{option}", text(path)]
    if args.paper:
        words += ["--paper", args.paper]
    if args.table:
        words += ["--table", *map(str, args.table)]
    for figure in getattr(args, "figure", None) or ():
        words += ["--figure", figure]
    for option in ("datasets", "backbones"):
        if getattr(args, option):
            words += [f"--{option}", ",".join(getattr(args, option))]
    if source.tuned:
        words += ["--tuned", *(text(Path(folder)) for folder in source.tuned.words[1:])]
    return " ".join([*words, *(f"--set {assignment}" for assignment in args.assignments)])
