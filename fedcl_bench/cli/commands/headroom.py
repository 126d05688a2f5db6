"""Say what there is to gain: shares of the headroom between a reference and a bound, with intervals, and costs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING

from ...core.errors import UserError
from .. import (DRAWN, OF_RECORDS, add_methods, add_options, check_formats, left_out, methods_of, print_json,
                save_figure, say_tuned, settings_of, tuned_of, where_of)

if TYPE_CHECKING:
    from ...reports.headroom import HeadroomRow

EXAMPLES = """\
examples:
  run_bench.py headroom f3crec kd joint-warm frozen popularity --backbone fedmf
  run_bench.py headroom f3crec --backbones fedmf,fedncf,pfedrec --datasets ml-100k,ml-latest-small --tuned \\
      --records results/published/bounds
  run_bench.py headroom ft --reference frozen --bound central-joint --backbone fedmf

share of headroom = (method - reference) / (bound - reference), of means over users, each averaged over the blocks after
the first. Its interval is a bootstrap over users and seeds. "no headroom": the interval of the bound's own gain reaches
down to 0, so that nothing can be said to be left to gain. The runs must be finished: nothing is run here.
"""


def add(parser: argparse.ArgumentParser) -> None:
    add_methods(parser, "methods, and other bounds")
    parser.add_argument("--reference", default="ft", metavar="METHOD", help="what methods are to improve (default: ft)")
    parser.add_argument("--bound", metavar="METHOD", help="what can be reached (default: joint, of sessions central)")
    add_options(parser, backbones="backbones, as fedmf,fedncf; repeatable",
                datasets="datasets, as ml-100k; repeatable (default: ml-100k)")
    add_options(parser, "metric", "records", set="take the runs with this setting; repeatable", tuned=OF_RECORDS)
    parser.add_argument("--figure", action="store_true", help="also draw the gains, a panel per backbone and dataset")
    add_options(parser, *DRAWN, "json", "plugins")


def run(args: argparse.Namespace) -> int:
    from ...records.store import load_all
    from ...reports.headroom import headroom_rows
    from ...reports.selection import Source, checked_spec, find_all
    from ...runs.registry import discover
    from ...runs.specs import RunSpec, expected_settings

    registry, datasets = discover(args.plugins), args.datasets or ("ml-100k",)
    if args.backbones is None:
        raise UserError(f"--backbone is missing. Known: {', '.join(registry.names('backbone'))}.")
    check_formats(args.format)
    changes, tuned = settings_of(args), tuned_of(args)
    if args.bound is None:
        first = checked_spec(registry, RunSpec.of(args.reference, args.backbones[0], datasets[0]), changes, tuned)
        args.bound = "central" if expected_settings(registry, first)["stream"] == "sessions" else "joint"
    if args.reference == args.bound:
        raise UserError(f"--bound: found {args.bound}, which is the reference too; accepted: another method.")
    names = list(dict.fromkeys([args.reference, args.bound, *methods_of(args)]))
    cells = {cell: {name: checked_spec(registry, RunSpec.of(name, *cell), changes, tuned) for name in names}
             for cell in product(args.backbones, datasets)}
    recorded, failed = load_all(args.records, left_out())
    source, tables = Source(recorded, registry, tuned, where=where_of(args), failed=failed), {}
    metric = args.metric
    say_tuned(tuned, [spec for specs in cells.values() for spec in specs.values()])
    for cell, specs in cells.items():
        found = find_all(source, specs.values(), args.records)
        runs = {name: found[spec] for name, spec in specs.items()}
        metric = metric or runs[args.reference][0].head["settings"]["valid_metric"]
        tables[cell] = headroom_rows(runs, args.reference, args.bound, metric)
    if args.figure:
        _draw(args, tables, names, metric)
    if args.json:
        print_json({"reference": args.reference, "bound": args.bound, "metric": metric, "cells": [
            {"backbone": backbone, "dataset": dataset, "rows": [asdict(row) for row in rows]}
            for (backbone, dataset), rows in tables.items()]})
        return 0
    for (backbone, dataset), rows in tables.items():
        _show(f"{metric} on {backbone}, {dataset}", rows, args.reference)
    print(f"Gains over {args.reference}, and shares of what {args.bound} gains, with 95 % intervals over users and "
          f"seeds. LA: learning, mean of R[t, t].")
    given_up = {name: registry.gives_up(spec.method, dict(spec.settings))
                for name, spec in next(iter(cells.values())).items()}
    if bounds := [f"{name} ({', '.join(which)})" for name, which in given_up.items() if which]:
        print(f"These give up a constraint on purpose (docs/constraints.md): {', '.join(bounds)}.")
    return 0


def _draw(args: argparse.Namespace, tables: dict[tuple[str, str], list[HeadroomRow]], names: list[str], metric: str
          ) -> None:
    from ...reports import draw

    datasets = dict.fromkeys(dataset for _, dataset in tables)
    rows = [[(f"{backbone}, {dataset}", {row.method: row.against for row in tables[backbone, dataset]
                                         if row.method != args.reference}) for dataset in datasets]
            for backbone in args.backbones]
    figure = draw.gains(rows, args.bound, draw.looks({name: name for name in names}),
                        f"Gain over {args.reference} in {metric}, 95 % intervals; band: interval of {args.bound}")
    for path in save_figure("headroom", figure, args.out, args.format):
        print(path, file=sys.stderr)


def _show(title: str, rows: list[HeadroomRow], reference: str) -> None:
    from ...runs.specs import seed_text
    from ..show import amount, print_table

    lines = []
    for row in rows:
        gain, share = ("", "") if row.against is None else (
            _interval(row.against.gain, "+.4f"),
            _interval(row.against.share, ".2f") if row.against.share else "no headroom")
        lines.append((row.method, f"{row.mean:.4f}", gain, share, f"{row.continual['LA']:.4f}",
                      f"{row.continual['forgetting']:.4f}", amount(row.sent), f"{row.seconds:.0f}",
                      seed_text(row.seeds), str(row.users)))
    print(title)
    print_table(("method", "mean", f"gain over {reference}", "share of headroom", "LA", "forgetting", "sent", "seconds",
                 "seeds", "users"), lines)


def _interval(values: tuple[float, float, float], how: str) -> str:
    value, low, high = (format(each, how) for each in values)
    return f"{value} ({low} … {high})"
