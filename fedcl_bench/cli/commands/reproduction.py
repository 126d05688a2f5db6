"""``reproduction``: the pages that say what of a paper is reproduced, and the one over all papers."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import UserError
from .common import LeftOut, say_tuned
from .paper import (add_records, add_settings, add_tables, chosen_tables, command_line, make_source, specs_of,
                    statistics_of)

if TYPE_CHECKING:
    from ...experiments.papers import Reading
    from ...reports.tables import Source

EXAMPLES = """\
examples:
  run_bench.py reproduction --records results/published/f3crec --tuned       writes results/pages/reproduction.md
  run_bench.py reproduction --datasets ml-100k --table 2 --out page.md
  run_bench.py reproduction --paper fcucr --records results/published/fcucr  writes results/pages/reproduction-fcucr.md
  run_bench.py reproduction --overview --records results/published           writes results/pages/standing.md

Every printed number is set beside ours with its standing: reproduced, direction reproduced, not reproduced, open (with
the reason), or data not available. The page says at its top what these mean. --overview writes one page for all papers
from all folders of published records: a figure with a square per number, the counts, the reasons, and which differences
could have been seen; beside it .svg and .csv. The index results/pages/README.md has the counts of all pages there.
"""


def add(commands) -> None:
    """Declare the command."""
    page = commands.add_parser("reproduction", help="write the page that says which printed numbers are reproduced",
                               description="Write the reproduction page of a paper from records.", epilog=EXAMPLES,
                               formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_tables(page, "all")
    add_records(page)
    add_settings(page)
    page.add_argument("--overview", action="store_true",
                      help="one page for all papers; --records is the folder that holds the published ones")
    page.add_argument("--out", type=Path, metavar="FILE",
                      help="the page (default: results/pages/reproduction.md; of fcucr, reproduction-fcucr.md; of "
                           "--overview, standing.md)")


def run(args: argparse.Namespace) -> int:
    from ...experiments import papers
    from ...reports.pages import FOLDER, write_page
    from ...reports.reproduction import page

    if args.overview:
        return _overview(args)
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


def _overview(args: argparse.Namespace) -> int:
    from ...experiments.papers import PAPERS
    from ...core.files import write_atomically
    from ...reports import overview
    from ...reports.draw import save
    from ...reports.pages import FOLDER, STANDING, write_page

    for option in ("paper", "table", "tuned", "assignments", "datasets", "backbones"):
        if getattr(args, option):
            name = {"assignments": "set"}.get(option, option)
            raise UserError(f"--overview is of all papers, tables and published records; leave --{name} out.")
    out = args.out or FOLDER / STANDING
    everything = [entry for paper in PAPERS
                  for entry in overview.entries(paper, lambda reading: _source(args, reading))]
    chosen = overview.deciding(everything)
    picture, table = out.with_suffix(".svg"), out.with_suffix(".csv")
    name = args.records.name if args.records.is_absolute() else args.records.as_posix()
    text = overview.page(everything, f"run_bench.py reproduction --overview --records {name}", picture.name, table.name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save(overview.figure(chosen), picture)
        write_atomically(table, overview.csv_text(chosen).encode())
        write_page(out, text)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}).") from None
    print(out, picture, table, sep="\n")
    return 0


def _source(args: argparse.Namespace, reading: Reading) -> Source:
    """The published records of a reading, with its settings."""
    from ...reports.tables import Source
    from ...runs.registry import discover
    from ...runs.specs import Tuned
    from ...records.store import load_runs

    folder = None if reading.tuned is None else args.records.parent / "tuned" / reading.tuned
    tuned = None if folder is None else Tuned((folder,), ("--tuned", str(folder)))
    return Source(load_runs(args.records / reading.folder, LeftOut()), discover(args.plugins), tuned, reading.settings,
                  lambda dataset: statistics_of(dataset, args.data_dir, dict(reading.settings)))
