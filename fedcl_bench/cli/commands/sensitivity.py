"""How far each reading of a paper moves a metric, and a method's lead over another; see results/ambiguities.md."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Sequence

from ...core.errors import UserError, unknown
from ...data.source import dataset_name
from .. import (DRAWN, POOL, add_methods, add_options, check_formats, methods_of, print_json, save_figure, say_tuned,
                seeds, settings_of, tuned_of, writing)

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


def add(parser: argparse.ArgumentParser) -> None:
    add_methods(parser, "one, with settings of its own as f3crec:eps=0.01")
    parser.add_argument("--backbone", metavar="NAME", required=True, help="as fedmf")
    parser.add_argument("--dataset", metavar="NAME", default="ml-100k",
                        help="name, or path of atomic files (default: ml-100k)")
    parser.add_argument("--against", metavar="METHOD", default="ft",
                        help="the method over which the lead is taken (default: ft)")
    parser.add_argument("--seeds", type=seeds, default=3, metavar="K", help="run K seeds (default: 3)")
    add_options(parser, metric="default: that of the validation, ndcg@20 on blocks and hit@10 on other streams",
                set="change a setting of all runs; repeatable. `list METHOD` shows the names")
    add_options(parser, "tuned", *POOL, "device", *DRAWN, "dry-run", "quiet", "json")


def run(args: argparse.Namespace) -> int:
    from ...experiments import grid
    from ...experiments.sensitivity import cases
    from ...runs.config import resolve_device
    from ...runs.registry import discover
    from ..grid_view import show_outcomes, show_plan, status_of, workers

    check_formats(args.format)
    registry, tuned = discover(args.plugins), tuned_of(args)
    proposed, against = _specs(registry, args, tuned)
    metric = _metric(registry, proposed, tuned, args.metric)
    for task in grid.make_tasks(registry, filter(None, (proposed, against)), [0], args.data_dir, tuned):
        if task.config.misfit:
            raise UserError(task.config.misfit)
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
        return show_plan(every, args, {"cases": [{"setting": case.setting, "default": case.default, "here": case.other}
                                                 for case in planned]})
    with workers(args) as pool:
        outcomes = pool.run(every)
    status = status_of(outcomes)
    if status == 130:
        return status
    if status and not args.json:
        show_outcomes(outcomes, args, sum(o.took or 0.0 for o in outcomes))
    _show(_measured(planned, tasks, args.results, metric), args, metric, left_out)
    return status


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
    from ...reports.selection import checked_spec
    from ...runs.specs import RunSpec, spelled_spec

    method, *others = methods_of(args)
    if others:
        raise UserError(f"sensitivity: found {method} and {others[0]}, accepted: one method.")
    specs = (spelled_spec(registry, RunSpec.of(text, args.backbone, args.dataset), args.data_dir)
             for text in (method, args.against))
    proposed, against = (checked_spec(registry, spec, settings_of(args), tuned) for spec in specs)
    return proposed, None if proposed == against else against


def _measured(planned: Sequence[Case], tasks: dict[RunSpec, list[Task]], results: Path, metric: str) -> list[Effect]:
    """The effects that the finished runs show; raises UserError for a metric that they lack, or if the default case has
    no run."""
    from ...experiments.grid import state
    from ...reports.frame import check_metric
    from ...reports.sensitivity_table import effects
    from ...records.store import load_record

    runs = {spec: [load_record(task.record(results).folder) for task in of_spec
                   if state(task, results).status == "finished"] for spec, of_spec in tasks.items()}
    check_metric([run for of_spec in runs.values() for run in of_spec], metric)
    measured = effects({case: (runs[case.proposed], runs[case.against] if case.against else []) for case in planned},
                    metric)
    if not measured[0].seeds:
        raise UserError("sensitivity: no seed of the runs with default settings finished, so nothing can be compared; "
                        "take others with --set.")
    return measured


def _show(measured: Sequence[Effect], args: argparse.Namespace, metric: str, left_out: Sequence[str]) -> None:
    from ...experiments.papers import label
    from ...reports import sensitivity_table
    from ..show import print_table

    case = measured[0].case
    names = case.proposed.method, case.proposed.backbone, dataset_name(case.proposed.dataset)
    called, against = label(metric), label(case.against.method) if case.against else ""
    notes = sensitivity_table.notes(measured, range(args.seeds), left_out)
    method, backbone, dataset = map(label, names)
    drawn = sensitivity_table.figure(measured, called, against,
                                     f"{method} on {backbone}, {dataset}: settings read otherwise")
    file = "-".join(("sensitivity", *names, metric)).replace("@", "").replace(":", "-")
    written = save_figure(file, drawn, args.out, args.format)
    for kind, text in (("md", sensitivity_table.markdown(measured, called, against, notes)),
                       ("csv", sensitivity_table.csv_text(measured, metric))):
        written.append(args.out / f"{file}.{kind}")
        with writing(written[-1]):
            written[-1].write_text(text, encoding="utf-8")
    if args.json:
        print_json({"metric": metric, "cases": [sensitivity_table.as_json(effect) for effect in measured],
                    "notes": notes, "files": list(map(str, written))})
        return
    head, *lines = sensitivity_table.rows(measured, called, against)
    print_table(head, lines)
    print(*notes, *written, sep="\n")
