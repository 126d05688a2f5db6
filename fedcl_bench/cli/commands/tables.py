"""Rebuild a paper's tables from records alone, beside the printed numbers, or make a table of your own."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from ...core.errors import UserError, unknown
from ...core.files import write_atomically
from .. import OF_RECORDS, Extend, add_options, located, names, say_tuned, settings_of, source_of, writing

if TYPE_CHECKING:
    from ...experiments.papers import PaperTable
    from ...reports.selection import Source
    from ...reports.tables import Table

EXAMPLES = """\
examples:
  run_bench.py tables --table 2                                    the main comparison, from ./results
  run_bench.py tables --table 2 --datasets ml-100k --tuned         of runs with tuned settings
  run_bench.py tables --table 3 6 --format latex
  run_bench.py tables --paper fcucr --table 2,3,4,5 --datasets xing --set init=server   all clients starting alike
  run_bench.py tables --records results/published/f3crec --format all --out paper     files table1.md, table1.tex, ...
  run_bench.py tables --table 2 --add ewma --plugins DIR           with a method of your own beside the paper's
  run_bench.py tables --columns backbone,dataset --metrics ndcg@20,recall@20 --methods ft,kd,f3crec --against ft
  run_bench.py tables --rows method --columns dataset --metrics ndcg@20 --by new-users,worst-decile
  run_bench.py tables --methods ft,f3crec,f3crec:without=arm --backbones fedmf --columns dataset,block --format latex

Without --paper, --table and --add, or with --rows, --columns, --metrics, --methods, --by or --against, the table is
your own, of all records or of those named.
A cell shows our mean ± standard deviation over seeds and, in parentheses, what the paper prints. Bold is best,
underlined second, * significant by the paper's rule, † a re-implementation. Nothing is filled in: cells without a
record are named below the table with the command that makes it. docs/tables.md says how records are found.
"""


def add(parser: argparse.ArgumentParser) -> None:
    add_tables(parser, "all")
    add_options(parser, "records", "data-dir")
    add_settings(parser)
    parser.add_argument("--add", type=names, action=Extend, default=(), metavar="A,B",
                        help="also show these methods, which the paper does not have, in its comparison of methods "
                             "(Table 2); repeatable")
    own = parser.add_argument_group("a table of your own")
    dimensions = "method, backbone, dataset, metric, block"
    own.add_argument("--rows", type=names, action=Extend, metavar="A,B",
                     help=f"what runs down, of {dimensions} (default: method)")
    own.add_argument("--columns", type=names, action=Extend, metavar="A,B",
                     help="what runs across (default: backbone,dataset); metrics come last if not named")
    own.add_argument("--metrics", "--metric", type=names, action=Extend, metavar="A,B",
                     help="as ndcg@20,recall@20 (default: the one that the runs were validated on)")
    add_options(own, methods="with settings of their own as f3crec:without=arm (default: all that have records)",
                by="of groups of users or items in place of all users")
    own.add_argument("--against", metavar="METHOD", help="mark what differs significantly from this method")
    parser.add_argument("--format", choices=("text", "md", "latex", "csv", "all"),
                        help="drawn, Markdown, LaTeX with booktabs, one line per cell, or the last three (default: "
                             "text in a terminal, else md)")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="write tableN.md, .tex and .csv here instead of printing")


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
    add_options(parser, tuned=OF_RECORDS, set="of runs with this setting changed; repeatable, for all rows of a table",
                datasets="only these, as ml-100k,lastfm-2k; repeatable", backbones="only these, as fedmf; repeatable")
    add_options(parser, "plugins")


def chosen_tables(args: argparse.Namespace) -> tuple[str, list[PaperTable]]:
    """The paper and its tables; UserError for an unknown paper, table, dataset or backbone."""
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


def make_source(args: argparse.Namespace, needs_runs: bool = True) -> Source:
    from ...runs.registry import discover

    changes = settings_of(args)
    return source_of(args, discover(args.plugins), needs_runs, assignments=tuple(changes.items()), statistics=lambda
                     dataset: statistics_of(dataset, getattr(args, "data_dir", None), changes))


def statistics_of(dataset: str, data_dir: Path | None, assignments: Mapping[str, Any]) -> Mapping[str, list]:
    """Statistics of a dataset that is on this machine; UserError if it is not."""
    from ...data.datasets import load_stream, statistics
    from ...data.settings import StreamSettings

    known = {field.name for field in fields(StreamSettings)}
    source, settings = located(dataset, data_dir, {name: each for name, each in assignments.items() if name in known})
    return statistics(load_stream(source, settings))


def run(args: argparse.Namespace) -> None:
    from ...reports.render import FORMATS, RENDERERS, terminal

    own = not (args.paper or args.table or args.add) or any(
        getattr(args, name) for name in ("rows", "columns", "metrics", "methods", "against", "by"))
    built = [_own_table(args)] if own else _paper_tables(args)
    chosen = args.format or ("text" if args.out is None and sys.stdout.isatty() else "md")
    formats = list(FORMATS) if chosen == "all" else [chosen]
    for i, table in enumerate(built):
        for j, name in enumerate(formats):
            if args.out is None:
                text = terminal(table, "NO_COLOR" not in os.environ, shutil.get_terminal_size().columns) \
                    if name == "text" and sys.stdout.isatty() else RENDERERS[name](table)
                print(("\n" if i or j else "") + text, end="")
                continue
            path = args.out / f"table{table.number or ''}.{FORMATS.get(name, 'txt')}"
            with writing(path):
                write_atomically(path, RENDERERS[name](table).encode(errors="backslashreplace"))
            print(path)


def _own_table(args: argparse.Namespace) -> Table:
    from ...reports.any_table import Layout, build_any

    if args.table or args.add:
        given = "--table" if args.table else "--add"
        raise UserError(f"{given}: belongs to the tables of a paper, and --rows, --columns, --metrics, --methods, --by "
                        f"and --against to one of your own.\nLeave {given} out, and name methods with --methods.")
    source = make_source(args)
    layout = Layout(args.rows or (tuple(d for d in ("method",) if d not in (args.columns or ()))),
                    args.columns or tuple(d for d in ("backbone", "dataset") if d not in (args.rows or ())),
                    tuple(dict.fromkeys(args.methods or ())), args.backbones or (), args.datasets or (),
                    tuple(dict.fromkeys(args.metrics or ())), args.against, args.paper, args.by)
    return build_any(layout, source)


def _paper_tables(args: argparse.Namespace) -> list[Table]:
    from ...reports.tables import build

    paper, chosen = chosen_tables(args)
    source = make_source(args, needs_runs=any(table.row_spec for table in chosen))
    for method in args.add:
        if not source.registry.knows("method", method):
            raise unknown("method (--add)", method, source.registry.names("method"))
        if any(method in table.rows for table in chosen):
            raise UserError(f"--add: found '{method}', which the tables of {paper} have already; leave it out.")
    if args.add and not any(table.lead for table in chosen):
        raise UserError("--add has no effect without a table that compares methods: --table 2.")
    say_tuned(source.tuned, [spec for table in chosen for spec in table.specs()
                             if (args.datasets is None or spec.dataset in args.datasets)
                             and (args.backbones is None or spec.backbone in args.backbones)])
    return [table for definition in chosen
            if (table := build(paper, definition, source, args.datasets, args.backbones, args.add))]
