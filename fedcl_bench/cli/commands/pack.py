"""``pack``: compact records for publication."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import Extend, add_results, names, say_tuned
from .paper import add_settings, add_tables, chosen_tables, command_line, make_source

EXAMPLES = """\
examples:
  run_bench.py pack --out results/published/f3crec --paper f3crec --table 2 --tuned     the runs of Table 2
  run_bench.py pack --out results/published/all                                         every finished run
  run_bench.py tables --records results/published/f3crec                                tables from them

Compact records hold every run's settings, metrics, rounds and per-user N@20 and R@20, but no model. Packing again adds
runs; the same runs always give the same bytes. The analysis per item, larger than all the rest, is kept only for the
runs of tables that show it (Table 7 of f3crec).
"""


def add(commands) -> None:
    """Declare the command."""
    pack = commands.add_parser("pack", help="write compact records for publication", epilog=EXAMPLES,
                               formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                               description="Write finished runs as compact records: a few small files for git.")
    pack.add_argument("--out", type=Path, required=True, metavar="DIR",
                      help="folder of compact records, made or added to")
    add_results(pack)
    add_tables(pack, "all tables of --paper; without --paper, every finished run")
    pack.add_argument("--figure", type=names, action=Extend, default=(), metavar="A,B",
                      help="also the runs of these figures of the paper, as 4 or early,k; repeatable")
    add_settings(pack)


def run(args: argparse.Namespace) -> int:
    from ...core.errors import UserError
    from ...experiments import papers
    from ...reports.selection import find
    from ...records.published import INDEX, write

    if not args.paper and (option := next((name for name in ("table", "figure", "datasets", "backbones")
                                           if getattr(args, name)), None)):
        raise UserError(f"--{option} has no effect without --paper, as --paper f3crec.")
    source = make_source(args, args.results)
    runs = list(source.runs)
    paper, tables = chosen_tables(args)
    if args.paper:
        chosen = args.datasets, args.backbones
        specs = list(dict.fromkeys([*papers.specs(paper, [table.number for table in tables], *chosen),
                                    *papers.figure_specs(paper, args.figure, *chosen)]))
        say_tuned(source.tuned, specs)
        runs_of = [find(source, spec)[0] for spec in specs]
        runs = [run for spec_runs in runs_of for run in spec_runs]
        print(f"{sum(map(bool, runs_of))} of the {len(specs)} combinations of these tables and figures have records")
        if not runs:
            raise UserError("nothing to pack; `run_bench.py tables` with the same options says why.")
    per_item = {run.hash for table in tables if "item_rank_change" in table.metrics for spec in table.specs()
                for run in find(source, spec)[0]}
    index = write(args.out, runs, command_line("pack", args, source, out=args.out), lambda run: run.hash in per_item)
    files = index["files"].values()
    total, count = sum(file["bytes"] for file in files), sum(file["runs"] for file in files)
    print(f"{args.out / INDEX}: {count} runs in {len(files)} files, {total / 1e6:.2f} MB, "
          f"{total / count / 1e3:.1f} kB per run")
    return 0
