"""Choose settings on validation data; see docs/first-run.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...core.errors import UserError
from ...core.files import shipped
from .. import CELLS, POOL, add_options, interrupted, print_json, where_of, seed, seeds, settings_of, whole

MAIN_TABLE = 2  # of both papers: the comparison of all methods on all backbones and datasets

EXAMPLES = """\
examples:
  run_bench.py tune --methods ft,reg,kd,f3crec --backbones fedmf
  run_bench.py tune --methods f3crec --backbones fedmf --budget 12 --seeds 1 --sampler random
  run_bench.py tune --paper f3crec --datasets ml-100k        every method and backbone of the paper
  run_bench.py tune --paper f3crec --datasets ml-100k --dry-run                  what would be tried
  run_bench.py grid --methods ft,f3crec --backbones fedmf --seeds 5 --tuned      runs with what was chosen

FT searches the backbone's settings (the learning rate); all other methods take those over and search their own
(`list NAME` shows the values). Every method has the same budget of client-updates, and only validation data is looked
at. The better third of the points is tried on all seeds. The same command goes on after Ctrl-C.
Exit status: 0 all tuned, 1 a search failed, 2 something to fix in the command or the data, 130 interrupted.
"""


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *CELLS, paper="the methods and backbones of a paper's table",
                table=f"numbers of the tables, as 2 or 2,3; repeatable (default: {MAIN_TABLE})")
    parser.add_argument("--budget", type=whole(1, 100_000), default=24, metavar="N",
                        help="client-updates per method, backbone and dataset: as many as N trials of FT's default "
                             "settings take on all seeds (default: 24)")
    parser.add_argument("--seeds", type=seeds, default=2, metavar="K",
                        help="seeds of a trial; only the better third of the points gets past the first (default: 2)")
    parser.add_argument("--sampler", choices=("tpe", "random", "grid"), default="tpe",
                        help="which points are tried if there are more than the budget: Optuna's TPE, random ones "
                             "without repetition, or only whole grids (refused if larger than the budget; default: "
                             "tpe)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N",
                        help="first seed of trials, and seed of the sampler (default: 0)")
    parser.add_argument("--batch", type=whole(1, 1024), default=4, metavar="N",
                        help="runs of a search at a time; which points are tried depends on it, and not on --jobs "
                             "(default: 4)")
    add_options(parser, set="a setting of all trials, which is then not searched; repeatable")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="folder of what is chosen (default: my-tuned/ in the results folder)")
    parser.add_argument("--shipped", action="store_true",
                        help="for maintainers: write the settings that the suite ships (results/tuned of the checkout, "
                             "or a folder of it with --out)")
    parser.add_argument("--again", action="store_true", help="search again even if an equal search was done")
    parser.add_argument("--dry-run", action="store_true",
                        help="show which searches there are and how much of each is done")
    add_options(parser, *POOL, "quiet", "json")


def _folders(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Where to write what is chosen, and where to look up what it lacks; raises UserError if shipped settings would be
    written without being asked to, or there are none."""
    from ...runs.specs import MY_TUNED, SHIPPED_TUNED, shipped_tuned

    ours = shipped(str(SHIPPED_TUNED))
    if args.shipped:
        if not ours.is_dir():
            raise UserError("--shipped: this installation is not a checkout, so it has no shipped settings to write; "
                            "leave it out.")
        return args.out or (SHIPPED_TUNED if SHIPPED_TUNED.resolve() == ours else ours), None
    folder = args.out or args.results / MY_TUNED
    if folder.resolve().is_relative_to(ours.resolve()):
        raise UserError(f"{folder}: holds settings that the suite ships; choose another folder, or add --shipped to "
                        f"write them.")
    return folder, None if args.out else shipped_tuned()


def run(args: argparse.Namespace) -> int:
    from ...data.source import dataset_name, load_config
    from ...experiments import tune
    from ...experiments.grid import GridPart
    from ...experiments.search import Combination, Effort
    from ...runs.config import unknown_plugin_notes
    from ...runs.registry import discover
    from ...runs.specs import parse_method, spelled_spec
    from ..grid_view import show_outlook, show_tuned, workers

    if args.table and not args.paper:
        raise UserError("--table is a paper's; say which with --paper.")
    part = GridPart(args.methods, args.backbones, args.datasets, paper=args.paper,
                    tables=tuple(args.table or [MAIN_TABLE]) if args.paper else ())
    if own := [text for text in args.methods or () if parse_method(text)[1]]:
        raise UserError(f"tune: found {own[0]}, accepted: names of methods; what is not to be searched belongs to "
                        f"--set.")
    registry = discover(args.plugins)
    specs = [spelled_spec(registry, spec, args.data_dir) for spec in part.specs()]
    combinations = [Combination(spec.method, spec.backbone, spec.dataset) for spec in specs]
    for dataset in dict.fromkeys(spec.dataset for spec in specs):
        for text in unknown_plugin_notes(dataset_name(dataset), load_config(dataset), registry):
            print(text, file=sys.stderr)
    folder, below = _folders(args)
    effort = Effort(args.budget, args.seeds, args.sampler, args.seed, args.batch, settings_of(args))
    tuning = tune.Tuning(registry, effort, folder, args.results, args.data_dir, args.again, below, where_of(args))
    for text in tune.notes(tuning, combinations):
        print(text, file=sys.stderr)
    if args.dry_run:
        rows = tune.outlook(tuning, combinations)
        if args.json:
            print_json([{**row.search.head(), "runs": row.runs, "spent": row.spent, "kept": row.status == "kept"}
                        for row in rows])
        else:
            show_outlook(rows)
        return 0
    with workers(args) as pool:
        results = tune.tune(tuning, combinations, pool.run)
    files = [str(tuning.kept_file(result.combination)) for result in results]
    if args.json:
        print_json({"results": [{"status": result.status, "error": result.error or None, "file": file,
                                 **result.combination._asdict(), **result.content}
                                for result, file in zip(results, files)]})
    else:
        show_tuned(results, files)
    statuses = {result.status for result in results}
    if "stopped" in statuses:
        return interrupted()
    return 1 if "failed" in statuses else 0
