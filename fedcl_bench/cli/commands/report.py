"""Write one self-contained HTML page of all records of a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.files import write_atomically
from .. import add_options, whole_runs, writing

EXAMPLES = """\
examples:
  run_bench.py report                                        ./results as report.html
  run_bench.py report --records results/published/f3crec --out f3crec.html

The page is one file that loads nothing. It has a leaderboard to sort and filter, curves over rounds, R[t,s], forgetting
against learning, accuracy against bytes and time, differences per user, tests, settings, environments and commands.
docs/tables.md says how to read it.
"""


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "records", tuned="methods are tested if both have these settings, as with default ones "
                "(without DIR: as `compare --tuned` finds them)")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE",
                        help="default: ./report.html")
    parser.add_argument("--title", metavar="TEXT", help="heading of the page (default: the name of the folder)")
    add_options(parser, "plugins")


def run(args: argparse.Namespace) -> None:
    from ...reports.html import LIMIT, report
    from ...runs.registry import discover
    from ...runs.specs import Tuned

    runs, failed = whole_runs(args.records)
    title = args.title or args.records.resolve().name
    content = report(runs, discover(args.plugins), title, args.plugins, failed,
                     Tuned.of(args.tuned or True, args.records)).encode(errors="backslashreplace")
    with writing(args.out, "use --out FILE"):
        write_atomically(args.out, content)
    print(args.out)
    print(f"{len(runs)} runs, {len(content) / 1e6:.1f} MB; open it in a browser."
          + (f" It is larger than {LIMIT // 1_000_000} MB, as there are many runs." if len(content) > LIMIT else ""))
