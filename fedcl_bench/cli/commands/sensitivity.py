"""``sensitivity``: which ambiguities of a paper a result hangs on."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Sequence

from ...core.errors import UserError, unknown
from .common import (add_device, add_drawn, add_pool, add_quiet, add_set, add_tuned_runs, check_formats, cores,
                     interrupted, results_where, save_figure, say_tuned, seeds, stop_between_rounds, writing)

if TYPE_CHECKING:
    from ...experiments.grid import Task
    from ...experiments.sensitivity import Case
    from ...reports.sensitivity_table import Effect
    from ...runs.registry import Registry
    from ...runs.specs import RunSpec, Tuned

EXAMPLES = """\
examples:
  run_bench.py sensitivity f3crec --backbone fedncf
  run_bench.py sensitivity f3crec --backbone fedmf --seeds 5 --dry-run         what would be run
  run_bench.py sensitivity f3crec:lambda_kd=0.01 --backbone fedmf --tuned --metric recall@20
  run_bench.py sensitivity fcucr --backbone sasrec --dataset xing --data-dir DIR --format svg

Every setting that the paper and its code read differently is changed alone; `ambiguities` of a method and a backbone
name them (results/ambiguities.md). The runs are ordinary records: finished ones are not repeated, Ctrl-C lets the
running rounds end and saves, and the same command goes on from there.
Exit status: 0 all done, 1 a run failed or is busy elsewhere, 2 something to fix in the command or the data,
130 interrupted.
"""


def add(commands) -> None:
    """Declare the command."""
    sensitivity = commands.add_parser(
        "sensitivity", help="vary every setting that a paper and its code read differently, and draw what it moves",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        description="How far each reading of a paper moves a metric, and a method's lead over another; see "
                    "results/ambiguities.md.")
    sensitivity.add_argument("method", metavar="METHOD", help="with settings of its own as f3crec:eps=0.01")
    sensitivity.add_argument("--backbone", metavar="NAME", required=True, help="as fedmf")
    sensitivity.add_argument("--dataset", metavar="NAME", default="ml-100k",
                             help="name, or path of atomic files (default: ml-100k)")
    sensitivity.add_argument("--against", metavar="METHOD", default="ft",
                             help="the method over which the lead is taken (default: ft)")
    sensitivity.add_argument("--seeds", type=seeds, default=3, metavar="K", help="run K seeds (default: 3)")
    sensitivity.add_argument("--metric", metavar="NAME@K",
                             help="default: that of the validation, ndcg@20 on blocks and hit@10 on other streams")
    add_set(sensitivity, "change a setting of all runs; repeatable. `list METHOD` shows the names")
    add_tuned_runs(sensitivity)
    add_pool(sensitivity)
    add_device(sensitivity)
    add_drawn(sensitivity)
    sensitivity.add_argument("--dry-run", action="store_true", help="show which runs there are and which have records")
    add_quiet(sensitivity)


def run(args: argparse.Namespace) -> int:
    from ...experiments import grid
    from ...experiments.sensitivity import cases
    from ...runs.config import resolve_device
    from ...runs.registry import discover
    from ...runs.specs import Tuned
    from ...experiments.pool import Pool
    from ..grid_view import View, show_outcomes, show_tasks

    check_formats(args.format)
    registry = discover(args.plugins)
    tuned = Tuned.of(args.tuned, args.results, results_where(args))
    proposed, against = _specs(registry, args, tuned)
    metric = _metric(registry, proposed, tuned, args.metric)
    planned, left_out = cases(registry, proposed, against, tuned)
    if len(planned) == 1:
        raise UserError(f"sensitivity: neither {proposed.method} nor {proposed.backbone} names ambiguities that have "
                        f"an effect here; see `ambiguities` in docs/plugins.md.")
    device = resolve_device(args.device or "cpu")
    tasks = {spec: grid.make_tasks(registry, [spec], range(args.seeds), args.data_dir, tuned, device)
             for case in planned for spec in case.specs}
    every = grid.merged(tasks.values())
    say_tuned(tuned, tasks, args.quiet)
    if args.dry_run:
        _show_plan(planned, every, args, show_tasks)
        return 0
    with View(args.quiet) as view, stop_between_rounds() as stop, \
            Pool(args.results, args.data_dir, args.plugins, args.jobs or cores(), args.threads, view.show, view.ended,
                 view.warn, stop) as pool:
        outcomes = pool.run(every)
    statuses = {outcome.status for outcome in outcomes}
    if statuses & {"stopped", "waiting"}:
        return interrupted()
    if statuses != {"finished"} and not args.json:
        show_outcomes(outcomes, [o.task.command(args.results, args.data_dir, args.plugins) for o in outcomes],
                      sum(o.took or 0.0 for o in outcomes))
    _show(_measured(planned, tasks, args.results, metric), args, metric, left_out)
    return 1 if statuses - {"finished"} else 0


def _metric(registry: Registry, proposed: RunSpec, tuned: Tuned | None, asked: str | None) -> str:
    """The metric to look at. Raises UserError, before anything is run, for one that the runs will not have."""
    from ...evaluation.metrics import OF_EVERY_RUN
    from ...experiments.sensitivity import settings_of

    settings = settings_of(registry, proposed, tuned)
    names = [*(cls.name for cls in OF_EVERY_RUN), *settings["extra_metrics"]]
    known = {f"{ranked}{name}@{k}" for ranked in ("", "all:") for name in names for k in settings["topk"]}
    metric = asked or settings["valid_metric"]
    if metric not in known | {settings["valid_metric"]}:
        raise unknown("metric", metric, (name for name in known if not name.startswith("all:")))
    return metric


def _specs(registry: Registry, args: argparse.Namespace, tuned: Tuned | None) -> tuple[RunSpec, RunSpec | None]:
    """The runs of the method and of the one it is compared with, or None if that is the same."""
    from ...reports.selection import checked_spec, parse_method
    from ...runs.specs import RunSpec, spelled_spec
    from ...core.settings import parse_assignments

    common = parse_assignments(args.assignments, "--set")
    both = []
    for text in (args.method, args.against):
        method, settings = parse_method(text)
        spec = spelled_spec(registry, RunSpec(method, args.backbone, args.dataset, settings), args.data_dir)
        both.append(checked_spec(registry, spec, common, tuned))
    return both[0], None if both[0] == both[1] else both[1]


def _show_plan(planned: Sequence[Case], tasks: Sequence[Task], args: argparse.Namespace, show_tasks) -> None:
    from ...experiments.grid import state

    states = [state(task, args.results) for task in tasks]
    if args.json:
        runs = [{"method": t.spec.method, "seed": t.config.seed, "settings": t.config.settings, "hash": t.config.hash,
                 "state": s.name} for t, s in zip(tasks, states)]
        cases = [{"setting": case.setting, "default": case.default, "here": case.other} for case in planned]
        json.dump({"cases": cases, "runs": runs}, sys.stdout)
        print()
    else:
        show_tasks(tasks, states)


def _measured(planned: Sequence[Case], tasks: dict[RunSpec, list[Task]], results: Path, metric: str) -> list[Effect]:
    """The effects that the finished runs show.

    Raises:
        UserError: for a metric that they lack, or if the default case has no run.
    """
    from ...experiments.grid import state
    from ...reports.frame import check_metric
    from ...reports.sensitivity_table import effects
    from ...records.store import load_record

    runs = {spec: [load_record(task.record(results).folder) for task in of_spec
                   if state(task, results).name == "finished"] for spec, of_spec in tasks.items()}
    check_metric([run for of_spec in runs.values() for run in of_spec], metric)
    measured = effects({case: (runs[case.proposed], runs[case.against] if case.against else []) for case in planned},
                    metric)
    if not measured[0].seeds:
        raise UserError("sensitivity: no seed of the runs with default settings finished, so nothing can be compared; "
                        "take others with --set.")
    return measured


def _show(measured: Sequence[Effect], args: argparse.Namespace, metric: str, left_out: Sequence[str]) -> None:
    """Write figure and tables, and print the table with the files' paths."""
    from ...data.source import dataset_name
    from ...experiments.papers import label
    from ...reports import sensitivity_table
    from ..show import plain_table, print_table

    case = measured[0].case
    names = case.proposed.method, case.proposed.backbone, dataset_name(case.proposed.dataset)
    called, against = label(metric), label(case.against.method) if case.against else ""
    notes = sensitivity_table.notes(measured, range(args.seeds), left_out)
    method, backbone, dataset = map(label, names)
    drawn = sensitivity_table.figure(measured, called, against,
                                     f"{method} on {backbone}, {dataset}: one setting changed")
    file = "-".join(("sensitivity", *names, metric)).replace("@", "").replace(":", "-")
    written = save_figure(file, drawn, args.out, args.format)
    for kind, text in (("md", sensitivity_table.markdown(measured, called, against, notes)),
                       ("csv", sensitivity_table.csv_text(measured, metric))):
        written.append(args.out / f"{file}.{kind}")
        with writing(written[-1]):
            written[-1].write_text(text, encoding="utf-8")
    if args.json:
        json.dump({"metric": metric, "cases": [sensitivity_table.as_json(effect) for effect in measured],
                   "notes": notes, "files": list(map(str, written))}, sys.stdout, allow_nan=False)
        print()
        return
    head, *lines = sensitivity_table.rows(measured, called, against)
    table = plain_table(*head)
    for line in lines:
        table.add_row(*line)
    print_table(table)
    print(*notes, *written, sep="\n")
