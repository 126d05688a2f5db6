"""``tune``: search for settings on validation data."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ...errors import UserError
from .common import (add_cells, add_paper, add_pool, add_quiet, add_set, cores, interrupted, results_where,
                     seed, stop_between_rounds, whole)

MAIN_TABLE = 2  # of both papers: the comparison of all methods on all backbones and datasets

EXAMPLES = """\
examples:
  run_bench.py tune --methods ft,reg,kd,f3crec --backbones fedmf
  run_bench.py tune --methods f3crec --backbones fedmf --budget 24 --sampler tpe
  run_bench.py tune --paper f3crec --datasets ml-100k        every method and backbone of the paper
  run_bench.py tune --paper f3crec --datasets ml-100k --dry-run                  what would be tried
  run_bench.py grid --methods ft,f3crec --backbones fedmf --seeds 5 --tuned      runs with what was chosen

FT searches the backbone's settings (the learning rate); all other methods take those over and search their own
(`list NAME` shows the values). Every method has the same number of trials, and only validation data is looked at.
Exit status: 0 all tuned, 1 a search failed, 2 something to fix in the command or the data, 130 interrupted.
"""


def add(commands) -> None:
    """Declare the command."""
    tune = commands.add_parser("tune", help="choose settings on validation data, with an equal budget for every method",
                               epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
                               allow_abbrev=False, description="Choose settings on validation data; see docs/grid.md.")
    add_cells(tune)
    add_paper(tune, "the methods and backbones of a paper's table",
              f"numbers of the tables, as 2 or 2,3; repeatable (default: {MAIN_TABLE})")
    tune.add_argument("--budget", type=whole(1, 100_000), default=12, metavar="N",
                      help="trials per method, backbone and dataset (default: 12)")
    tune.add_argument("--sampler", choices=("random", "grid", "tpe"), default="random",
                      help="which points are tried if there are more than the budget: random ones without repetition, "
                           "only whole grids (refused if larger than the budget), or Optuna's TPE (default: random)")
    tune.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of trials and sampler (default: 0)")
    add_set(tune, "a setting of all trials, which is then not searched; repeatable")
    tune.add_argument("--tuned", type=Path, metavar="DIR",
                      help="folder of what is chosen (default: my-tuned/ in the results folder)")
    tune.add_argument("--shipped", action="store_true",
                      help="for maintainers: write the settings that the suite ships (results/tuned of the checkout, "
                           "or a folder of it with --tuned)")
    tune.add_argument("--again", action="store_true", help="search again even if an equal search was done")
    tune.add_argument("--dry-run", action="store_true",
                      help="show which trials there are and how many of them have records")
    add_pool(tune)
    add_quiet(tune)


def _folders(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Where to write what is chosen, and where to look up what it lacks.

    Raises:
        UserError: if shipped settings would be written without being asked to, or there are none.
    """
    from ...files import shipped
    from ...runs.specs import MY_TUNED, SHIPPED_TUNED, shipped_tuned

    ours = shipped(str(SHIPPED_TUNED))
    if args.shipped:
        if not ours.is_dir():
            raise UserError("--shipped: this installation is not a checkout, so it has no shipped settings to write; "
                            "leave it out.")
        return args.tuned or (SHIPPED_TUNED if SHIPPED_TUNED.resolve() == ours else ours), None
    folder = args.tuned or args.results / MY_TUNED
    if folder.resolve().is_relative_to(ours.resolve()):
        raise UserError(f"{folder}: holds settings that the suite ships; choose another folder, or add --shipped to "
                        f"write them.")
    return folder, None if args.tuned else shipped_tuned()


def run(args: argparse.Namespace) -> int:
    from ...experiments import tune
    from ...experiments.grid import Part
    from ...runs.registry import discover
    from ...runs.specs import spelled_spec
    from ...settings import parse_assignments
    from ...workers.pool import Pool
    from ..grid_view import View, show_outlook, show_tuned

    tune.require_sampler(args.sampler)
    if args.table and not args.paper:
        raise UserError("--table is a paper's; say which with --paper.")
    part = Part(args.methods, args.backbones, args.datasets, paper=args.paper,
                tables=tuple(args.table or [MAIN_TABLE]) if args.paper else ())
    registry = discover(args.plugins)
    specs = [spelled_spec(registry, spec, args.data_dir) for spec in part.specs()]
    combinations = [tune.Combination(spec.method, spec.backbone, spec.dataset) for spec in specs]
    effort = tune.Effort(args.budget, args.sampler, args.seed, args.jobs, parse_assignments(args.assignments, "--set"))
    folder, below = _folders(args)
    tuning = tune.Tuning(registry, effort, folder, args.results, args.data_dir, args.again, below, results_where(args))
    if args.dry_run:
        rows = tune.outlook(tuning, combinations)
        if args.json:
            json.dump([{**row.search.head(), "trials": row.trials, "finished": row.finished, "kept": row.kept}
                       for row in rows], sys.stdout, allow_nan=False)
            print()
        else:
            show_outlook(rows)
        return 0
    with View(args.quiet) as view, stop_between_rounds() as stop, \
            Pool(args.results, args.data_dir, args.plugins, args.jobs or cores(), args.threads, view.show, view.ended,
                 view.warn, stop) as pool:
        results = tune.tune(tuning, combinations, pool.run)
    files = [str(tuning.kept_file(result.combination)) for result in results]
    if args.json:
        json.dump({"results": [{"status": result.status, "error": result.error or None, "file": file,
                                **vars(result.combination), **result.content}
                               for result, file in zip(results, files)]}, sys.stdout, allow_nan=False)
        print()
    else:
        show_tuned(results, files)
    statuses = {result.status for result in results}
    if "stopped" in statuses:
        return interrupted()
    return 1 if "failed" in statuses else 0
