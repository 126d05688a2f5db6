"""Write finished runs as compact records: a few small files for git."""

from __future__ import annotations

import argparse
import re
import shlex
from contextlib import suppress
from pathlib import Path

from ...core.errors import UserError
from .. import Extend, add_options, names, say_tuned
from .tables import add_settings, add_tables, chosen_tables, make_source

EXAMPLES = """\
examples:
  run_bench.py pack --out results/published/f3crec --paper f3crec --table 2 --tuned     the runs of Table 2
  run_bench.py pack --out results/published/all                                         every finished run
  run_bench.py tables --records results/published/f3crec                                tables from them

Compact records hold every run's settings, rounds and metrics, those of papers per user, but no model. Packing again
adds runs; the same runs always give the same bytes. The analysis per item, larger than all the rest, is kept only for
the runs of tables that show it (Table 7 of f3crec).
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR",
                        help="folder of compact records, made or added to")
    add_options(parser, "records")
    add_tables(parser, "all tables of --paper; without --paper, every finished run")
    parser.add_argument("--figure", type=names, action=Extend, default=(), metavar="A,B",
                        help="also the runs of these figures of the paper, as 4 or early,k; repeatable")
    add_settings(parser)


def run(args: argparse.Namespace) -> None:
    from ...experiments import papers
    from ...reports.selection import find
    from ...records.published import INDEX, write

    if not args.paper and (option := next((name for name in ("table", "figure", "datasets", "backbones")
                                           if getattr(args, name)), None)):
        raise UserError(f"--{option} has no effect without --paper, as --paper f3crec.")
    source = make_source(args)
    runs = list(source.runs)
    paper, tables = chosen_tables(args)
    if args.paper:
        specs = papers.specs(paper, [table.number for table in tables], args.figure, args.datasets, args.backbones)
        say_tuned(source.tuned, specs)
        runs_of = [find(source, spec)[0] for spec in specs]
        runs = [run for spec_runs in runs_of for run in spec_runs]
        print(f"{sum(map(bool, runs_of))} of the {len(specs)} combinations of these tables and figures have records")
        if not runs:
            raise UserError("nothing to pack; `run_bench.py tables` with the same options says why.")
    if not any(run.intact for run in runs):
        raise UserError(f"nothing to pack: no record in {args.records} is whole.")
    per_item = set[str]()
    for spec in (spec for table in tables if "item_rank_change" in table.metrics for spec in table.specs()):
        with suppress(UserError):  # of several records of a seed
            per_item |= {run.hash for run in find(source, spec)[0]}
    # The command as it was given, without the folders of this machine.
    words = (re.sub("(^|=)/.*/", r"\1", word) for word in args.words)
    index = write(args.out, runs, shlex.join(("run_bench.py", *words)), lambda run: run.hash in per_item)
    files = index["files"].values()
    total, count = sum(file["bytes"] for file in files), sum(file["runs"] for file in files)
    print(f"{args.out / INDEX}: {count} runs in {len(files)} files, {total / 1e6:.2f} MB, "
          f"{total / count / 1e3:.1f} kB per run")
