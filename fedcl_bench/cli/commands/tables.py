"""``tables``: a paper's tables, rebuilt from records."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import Extend, names, say_tuned
from .paper import add_records, add_settings, add_tables, chosen_tables, make_source, specs_of

EXAMPLES = """\
examples:
  run_bench.py tables --table 2                                    the main comparison, from ./results
  run_bench.py tables --table 2 --datasets ml-100k --tuned         of runs with tuned settings
  run_bench.py tables --table 3 6 --format latex
  run_bench.py tables --paper fcucr --table 2,3,4,5 --datasets xing --set init=server   FCUCR's, all clients starting alike
  run_bench.py tables --records results/published/f3crec --format all --out paper     files table1.md, table1.tex, ...
  run_bench.py tables --table 2 --add ewma --plugins DIR           with a method of your own beside the paper's

A cell shows our mean ± standard deviation over seeds and, in parentheses, what the paper prints. Bold is best,
underlined second, * significant by the paper's rule, † a re-implementation. Nothing is filled in: cells without a
record are named below the table with the command that makes it. docs/tables.md says how records are found.
"""


def add(commands) -> None:
    """Declare the command."""
    tables = commands.add_parser("tables", help="rebuild a paper's tables from records", epilog=EXAMPLES,
                                 formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                 description="Rebuild a paper's tables from records alone, beside the printed numbers.")
    add_tables(tables, "all")
    add_records(tables)
    add_settings(tables)
    tables.add_argument("--add", type=names, action=Extend, default=(), metavar="A,B",
                        help="also show these methods, which the paper does not have, in its comparison of methods "
                             "(Table 2); repeatable")
    tables.add_argument("--format", choices=("md", "latex", "csv", "all"), default="md",
                        help="Markdown, LaTeX with booktabs, one line per cell, or all three (default: md)")
    tables.add_argument("--out", type=Path, metavar="DIR",
                        help="write tableN.md, .tex and .csv here instead of printing")


def run(args: argparse.Namespace) -> int:
    from ...errors import UserError, unknown
    from ...files import write_atomically
    from ...reports.render import FORMATS, RENDERERS
    from ...reports.tables import build
    from ...runs.store import load_runs

    paper, chosen = chosen_tables(args)
    needs_runs = any(table.row_spec for table in chosen)
    source = make_source(args, load_runs(args.records) if needs_runs else [], args.records)
    for method in args.add:
        if method not in source.registry.names("method"):
            raise unknown("method (--add)", method, source.registry.names("method"))
        if any(method in table.rows for table in chosen):
            raise UserError(f"--add: found '{method}', which the tables of {paper} have already; leave it out.")
    if args.add and not any(table.lead for table in chosen):
        raise UserError("--add has no effect without a table that compares methods: --table 2.")
    formats = list(FORMATS) if args.format == "all" else [args.format]
    built = [table for definition in chosen
             if (table := build(paper, definition, source, args.datasets, args.backbones, args.add))]
    say_tuned(source.tuned, specs_of(chosen, args))
    for i, table in enumerate(built):
        for j, name in enumerate(formats):
            text = RENDERERS[name](table)
            if args.out is None:
                print(("\n" if i or j else "") + text, end="")
                continue
            path = args.out / f"table{table.number}.{FORMATS[name]}"
            try:
                args.out.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text.encode())
            except OSError as error:
                raise UserError(f"{path}: cannot be written ({error.strerror}).") from None
            print(path)
    return 0
