"""Run a list of runs in parallel processes; see docs/first-run.md."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from ...core.errors import UserError
from ...core.settings import parse_assignments
from .. import CELLS, POOL, Extend, add_options, names, print_json, say_tuned, seed, settings_of, tuned_of

if TYPE_CHECKING:
    from ...experiments.grid import Task

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


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *CELLS, seeds="run K seeds (default: 1)")
    parser.add_argument("--first-seed", type=seed, metavar="N", help="the first of them (default: 0)")
    add_options(parser, set="change a setting of all runs; repeatable. `list METHOD` shows the names")
    parser.add_argument("--vary", action="append", default=[], metavar="NAME=V1,V2,...",
                        help="run with each of these values; repeatable, for every combination")
    parser.add_argument("--file", type=Path, metavar="FILE",
                        help="YAML file with the same names; the command line wins")
    add_options(parser, paper="the runs that a paper needs; with --table or --figure",
                table="numbers of tables, as 2 or 2,3; repeatable")
    parser.add_argument("--figure", type=names, action=Extend, metavar="A,B",
                        help="figures, as 4 or early,k (`figures --help` lists them); repeatable")
    add_options(parser, "tuned", *POOL, "device", ray="spread the runs")
    parser.add_argument("--save-lists", action="store_true",
                        help="also write each run's ranked lists, as `run --save-lists` does")
    parser.add_argument("--retry-failed", action="store_true",
                        help="run those again whose record says that they failed")
    add_options(parser, "dry-run", "quiet", "json")


def _grid_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of ``grid.GridPart`` that the command line names."""
    given = {name: getattr(args, name) for name in ("methods", "backbones", "datasets", "seeds", "first_seed", "paper")}
    given["tables"], given["figures"] = (tuple(numbers) if numbers else None for numbers in (args.table, args.figure))
    given["set"] = settings_of(args) or None
    vary: dict[str, tuple[str, ...]] = {}
    for (name, values), in (parse_assignments([text], "--vary").items() for text in args.vary):
        parts = tuple(value.strip() for value in values.split(","))
        if not all(parts):
            raise UserError(f"--vary: found '{name}={values}', accepted: NAME=V1,V2, as --vary eps=0.001,0.002.")
        if name in (given["set"] or {}):
            raise UserError(f"--vary: found '{name}', which --set gives too, accepted: one of the two.")
        vary[name] = (*vary.get(name, ()), *parts)
    given["vary"] = vary or None
    return {name: value for name, value in given.items() if value is not None}


def _refuse_runs_without_lists(tasks: Sequence[Task], results: Path) -> None:
    """Raise UserError if there are finished runs whose lists were not written, which no other run could add."""
    from ...experiments.grid import state
    from ...runs.ranked_lists import folder_of, has_lists

    lacking = [task for task in tasks
               if state(task, results).status == "finished" and not has_lists(folder_of(task.config.name, results))]
    if lacking:
        raise UserError(f"--save-lists: {lacking[0].record(results).folder} is finished, and its run wrote no lists, "
                        f"or not all, as {len(lacking)} of {len(tasks)} runs.\nUse another --results DIR, or delete "
                        f"their folders.")


def run(args: argparse.Namespace) -> int:
    from ...experiments import grid
    from ...runs.config import resolve_device
    from ...runs.registry import discover
    from ..grid_view import as_json, show_outcomes, show_plan, status_of, workers

    began = time.perf_counter()
    parts = grid.read_parts(args.file, _grid_fields(args))
    registry, tuned, device = discover(args.plugins), tuned_of(args), resolve_device(args.device or "cpu")
    tasks = grid.merged(
        grid.make_tasks(registry, part.specs(), range(part.first_seed, part.first_seed + part.seeds), args.data_dir,
                        tuned, device) for part in parts)
    say_tuned(tuned, [task.spec for task in tasks], args.quiet)
    if args.dry_run:
        return show_plan(tasks, args)
    if args.save_lists:
        _refuse_runs_without_lists(tasks, args.results)
    with workers(args) as pool:
        outcomes = pool.run(tasks, args.retry_failed)
    seconds = time.perf_counter() - began
    if args.json:
        print_json(as_json(outcomes, args.results, seconds))
    else:
        show_outcomes(outcomes, args, seconds)
    return status_of(outcomes)
