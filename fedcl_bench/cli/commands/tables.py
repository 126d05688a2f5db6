"""``tables``: a paper's tables, or one of your own, from records."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .common import Extend, add_by, names, say_tuned
from .paper import add_records, add_settings, add_tables, chosen_tables, make_source, specs_of

if TYPE_CHECKING:
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

With --rows, --columns, --metrics, --methods, --by or --against the table is your own, of all records or of those named.
A cell shows our mean ± standard deviation over seeds and, in parentheses, what the paper prints. Bold is best,
underlined second, * significant by the paper's rule, † a re-implementation. Nothing is filled in: cells without a
record are named below the table with the command that makes it. docs/tables.md says how records are found.
"""


def add(commands) -> None:
    """Declare the command."""
    tables = commands.add_parser("tables", help="rebuild a paper's tables, or make your own, from records",
                                 epilog=EXAMPLES,
                                 formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                 description="Rebuild a paper's tables from records alone, beside the printed numbers, "
                                             "or make a table of your own.")
    add_tables(tables, "all")
    add_records(tables)
    add_settings(tables)
    tables.add_argument("--add", type=names, action=Extend, default=(), metavar="A,B",
                        help="also show these methods, which the paper does not have, in its comparison of methods "
                             "(Table 2); repeatable")
    _add_layout(tables)
    tables.add_argument("--format", choices=("text", "md", "latex", "csv", "all"),
                        help="drawn, Markdown, LaTeX with booktabs, one line per cell, or the last three (default: "
                             "text in a terminal, else md)")
    tables.add_argument("--out", type=Path, metavar="DIR",
                        help="write tableN.md, .tex and .csv here instead of printing")


def _add_layout(tables: argparse.ArgumentParser) -> None:
    """The options of a table of one's own."""
    own = tables.add_argument_group("a table of your own")
    dimensions = "method, backbone, dataset, metric, block"
    own.add_argument("--rows", type=names, action=Extend, metavar="A,B",
                     help=f"what runs down, of {dimensions} (default: method)")
    own.add_argument("--columns", type=names, action=Extend, metavar="A,B",
                     help="what runs across (default: backbone,dataset); metrics come last if not named")
    own.add_argument("--metrics", "--metric", type=names, action=Extend, metavar="A,B",
                     help="as ndcg@20,recall@20 (default: the one that the runs were validated on)")
    own.add_argument("--methods", "--method", metavar="A,B",
                     help="with settings of their own as f3crec:without=arm (default: all that have records)")
    add_by(own, "of groups of users or items in place of all users")
    own.add_argument("--against", metavar="METHOD", help="mark what differs significantly from this method")


def run(args: argparse.Namespace) -> int:
    from ...core.errors import UserError
    from ...core.files import write_atomically
    from ...reports.render import FORMATS, RENDERERS

    own = any(getattr(args, name) for name in ("rows", "columns", "metrics", "methods", "against", "by"))
    built = [_own_table(args)] if own else _paper_tables(args)
    chosen = args.format or ("text" if args.out is None and sys.stdout.isatty() else "md")
    formats = list(FORMATS) if chosen == "all" else [chosen]
    for i, table in enumerate(built):
        for j, name in enumerate(formats):
            if args.out is None:
                text = _drawn(table) if name == "text" else RENDERERS[name](table)
                print(("\n" if i or j else "") + text, end="")
                continue
            path = args.out / f"table{table.number or ''}.{FORMATS.get(name, 'txt')}"
            try:
                args.out.mkdir(parents=True, exist_ok=True)
                write_atomically(path, RENDERERS[name](table).encode(errors="backslashreplace"))
            except OSError as error:
                raise UserError(f"{path}: cannot be written ({error.strerror}).") from None
            print(path)
    return 0


def _drawn(table: Table) -> str:
    """The table for standard output: as wide as the terminal and with its bold face, or as wide as it is."""
    from ...reports.render import terminal

    if not sys.stdout.isatty():
        return terminal(table)
    return terminal(table, color="NO_COLOR" not in os.environ, width=shutil.get_terminal_size().columns)


def _own_table(args: argparse.Namespace) -> Table:
    """The table that the options lay out."""
    from ...core.errors import UserError
    from ...reports.any_table import Layout, build_any, split_methods

    if args.table or args.add:
        given = "--table" if args.table else "--add"
        raise UserError(f"{given}: belongs to the tables of a paper, and --rows, --columns, --metrics, --methods, --by "
                        f"and --against to one of your own.\nLeave {given} out, and name methods with --methods.")
    source = make_source(args, args.records)
    layout = Layout(args.rows or (tuple(d for d in ("method",) if d not in (args.columns or ()))),
                    args.columns or tuple(d for d in ("backbone", "dataset") if d not in (args.rows or ())),
                    split_methods(args.methods) if args.methods else (), args.backbones or (), args.datasets or (),
                    args.metrics or (), args.against, args.paper, args.by)
    return build_any(layout, source)


def _paper_tables(args: argparse.Namespace) -> list[Table]:
    """The tables of a paper that are asked for."""
    from ...core.errors import UserError, unknown
    from ...reports.tables import build

    paper, chosen = chosen_tables(args)
    source = make_source(args, args.records, needs_runs=any(table.row_spec for table in chosen))
    for method in args.add:
        if method not in source.registry.names("method"):
            raise unknown("method (--add)", method, source.registry.names("method"))
        if any(method in table.rows for table in chosen):
            raise UserError(f"--add: found '{method}', which the tables of {paper} have already; leave it out.")
    if args.add and not any(table.lead for table in chosen):
        raise UserError("--add has no effect without a table that compares methods: --table 2.")
    say_tuned(source.tuned, specs_of(chosen, args))
    return [table for definition in chosen
            if (table := build(paper, definition, source, args.datasets, args.backbones, args.add))]
