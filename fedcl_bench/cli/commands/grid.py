"""``grid``: many runs in parallel processes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...core.errors import UserError
from .common import (Extend, add_cells, add_device, add_paper, add_pool, add_quiet, add_ray, add_set, add_tuned_runs,
                     cores, interrupted, names, results_where, say_tuned, seed, seeds, stop_between_rounds)

EXAMPLES = """\
examples:
  run_bench.py grid --methods ft,reg,kd,f3crec --backbones fedmf --seeds 5
  run_bench.py grid --methods f3crec --backbones fedmf --vary eps=0.001,0.002,0.004 --vary lambda_kd=0.01,0.1
  run_bench.py grid --paper f3crec --table 2 --datasets ml-100k --seeds 5 --tuned     the missing cells of a table
  run_bench.py grid --paper fcucr --table 2,3 --datasets xing --data-dir DIR --seeds 5 --set init=server
  run_bench.py grid --file grid.yaml --dry-run                                        what would be run
  run_bench.py grid --file grid.yaml --ray 10.0.0.1:6379                              on a Ray cluster

A grid file holds the same names, and under `grids` a list of grids for which the names beside it are defaults:
  backbones: [fedmf]
  seeds: 5
  grids:
    - {methods: [ft, reg]}
    - {methods: [f3crec], vary: {without: [none, cc, sc]}}

Finished runs are never repeated. Ctrl-C lets the running rounds end and saves; the same command goes on from there.
Exit status: 0 all done, 1 a run failed or is busy elsewhere, 2 something to fix in the command or the data,
130 interrupted.
"""


def add(commands) -> None:
    """Declare the command."""
    grid = commands.add_parser("grid", help="run methods x backbones x datasets x seeds x settings in parallel",
                               epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
                               allow_abbrev=False, description="Run a list of runs in parallel processes; see "
                                                               "docs/first-run.md.")
    add_cells(grid)
    grid.add_argument("--seeds", type=seeds, metavar="K", help="run K seeds (default: 1)")
    grid.add_argument("--first-seed", type=seed, metavar="N", help="the first of them (default: 0)")
    add_set(grid, "change a setting of all runs; repeatable. `list METHOD` shows the names")
    grid.add_argument("--vary", action="append", default=[], metavar="NAME=V1,V2,...",
                      help="run with each of these values; repeatable, for every combination")
    grid.add_argument("--file", type=Path, metavar="FILE", help="YAML file with the same names; the command line wins")
    add_paper(grid, "the runs that a paper needs; with --table or --figure",
              "numbers of tables, as 2 or 2,3; repeatable")
    grid.add_argument("--figure", type=names, action=Extend, metavar="A,B",
                      help="figures, as 4 or early,k (`figures --help` lists them); repeatable")
    add_tuned_runs(grid)
    add_pool(grid)
    add_device(grid)
    add_ray(grid, "the runs")
    grid.add_argument("--retry-failed", action="store_true", help="run those again whose record says that they failed")
    grid.add_argument("--dry-run", action="store_true", help="show which runs there are and which have records")
    add_quiet(grid)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of ``grid.Part`` that the command line names."""
    from ...core.settings import parse_assignments

    given = {name: getattr(args, name) for name in ("methods", "backbones", "datasets", "seeds", "first_seed", "paper")}
    given["tables"], given["figures"] = (tuple(numbers) if numbers else None for numbers in (args.table, args.figure))
    given["set"] = parse_assignments(args.assignments, "--set") or None
    vary: dict[str, tuple[str, ...]] = {}
    for (name, values), in (parse_assignments([text], "--vary").items() for text in args.vary):
        parts = tuple(value.strip() for value in values.split(","))
        if not all(parts):
            raise UserError(f"--vary: found '{name}={values}', accepted: NAME=V1,V2, as --vary eps=0.001,0.002.")
        vary[name] = (*vary.get(name, ()), *parts)
    given["vary"] = vary or None
    return {name: value for name, value in given.items() if value is not None}


def run(args: argparse.Namespace) -> int:
    from ...experiments import grid
    from ...runs.config import resolve_device
    from ...runs.registry import discover
    from ...runs.specs import Tuned
    from ...experiments.pool import Pool
    from ..grid_view import View, as_json, show_outcomes, show_tasks

    began = time.perf_counter()
    parts = grid.read_parts(args.file, _given(args))
    registry = discover(args.plugins)
    tuned = Tuned.of(args.tuned, args.results, results_where(args))
    device = resolve_device(args.device or "cpu")
    tasks = grid.merged(
        grid.make_tasks(registry, part.specs(), range(part.first_seed, part.first_seed + part.seeds), args.data_dir,
                        tuned, device) for part in parts)
    say_tuned(tuned, [task.spec for task in tasks], args.quiet)
    if args.dry_run:
        states = [grid.state(task, args.results) for task in tasks]
        if args.json:
            json.dump([{"method": t.spec.method, "backbone": t.spec.backbone, "dataset": t.spec.dataset,
                        "seed": t.config.seed, "settings": t.config.settings, "hash": t.config.hash,
                        "state": s.name} for t, s in zip(tasks, states)], sys.stdout)
            print()
        else:
            show_tasks(tasks, states)
        return 0
    with ExitStack() as stack:
        results, data_dir, plugins, jobs, crew = args.results, args.data_dir, args.plugins, args.jobs or cores(), None
        if args.ray:
            from ...experiments import cluster, ray_crew
            joined = stack.enter_context(cluster.joined(args.ray, cores()))
            crew = stack.enter_context(ray_crew.crew(joined, args.threads, results))
            jobs = args.jobs or max(1, joined.cores // args.threads)
            results, data_dir = results.absolute(), data_dir and data_dir.absolute()
            plugins = [folder.absolute() for folder in plugins]
        view = stack.enter_context(View(args.quiet))
        stop = stack.enter_context(stop_between_rounds())
        pool = stack.enter_context(Pool(results, data_dir, plugins, jobs, args.threads, view.show, view.ended,
                                        view.warn, stop, crew))
        outcomes = pool.run(tasks, args.retry_failed)
    seconds = time.perf_counter() - began
    if args.json:
        json.dump(as_json(outcomes, args.results, seconds), sys.stdout, allow_nan=False)
        print()
    else:
        show_outcomes(outcomes, [o.task.command(args.results, args.data_dir, args.plugins) for o in outcomes], seconds)
    statuses = {outcome.status for outcome in outcomes}
    if statuses & {"stopped", "waiting"}:
        return interrupted()
    return 1 if statuses - {"finished"} else 0
