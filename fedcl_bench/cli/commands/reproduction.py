"""``reproduction``: the page that says what of a paper is reproduced."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from .common import say_tuned
from .paper import add_records, add_settings, add_tables, chosen_tables, command_line, make_source, specs_of

EXAMPLES = """\
examples:
  run_bench.py reproduction --records results/published/f3crec --tuned       writes results/pages/reproduction.md
  run_bench.py reproduction --datasets ml-100k --table 2 --out page.md
  run_bench.py reproduction --paper fcucr --records results/published/fcucr  writes results/pages/reproduction-fcucr.md

Every printed number is set beside ours with a status: reproduced, inconclusive, differs (with sign and size), or cannot
be checked (with the reason). The page says at its top what these mean. The index results/pages/README.md has the counts
of all pages there.
"""


def add(commands) -> None:
    """Declare the command."""
    page = commands.add_parser("reproduction", help="write the page that says which printed numbers are reproduced",
                               description="Write the reproduction page of a paper from records.", epilog=EXAMPLES,
                               formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_tables(page, "all")
    add_records(page)
    add_settings(page)
    page.add_argument("--out", type=Path, metavar="FILE",
                      help="the page (default: results/pages/reproduction.md; of fcucr, reproduction-fcucr.md)")


def run(args: argparse.Namespace) -> int:
    from ...errors import UserError
    from ...experiments import papers
    from ...reports.pages import FOLDER, write_page
    from ...reports.reproduction import page

    paper, tables = chosen_tables(args)
    source = make_source(args, args.records)
    say_tuned(source.tuned, specs_of(tables, args))
    # A page is published: its commands are to hold on any machine.
    general = replace(source, where=replace(source.where, data_dir=None))
    text = page(paper, tables, general, command_line("reproduction", args, source, records=args.records), args.datasets,
                args.backbones)
    out = args.out or FOLDER / papers.get(paper).PAGE
    try:
        write_page(out, text)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}).") from None
    print(out)
    return 0
