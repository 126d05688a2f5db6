"""Say what there is to gain: shares of the headroom between a reference and a bound, with intervals, and costs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from math import isnan
from typing import TYPE_CHECKING

from ...core.errors import UserError
from .. import (DRAWN, OF_RECORDS, add_methods, add_options, backbones_of, check_formats, found_by_cell, methods_of,
                print_json, save_figure, settings_of)

if TYPE_CHECKING:
    from ...reports.comparison import HeadroomRow

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


def run(args: argparse.Namespace) -> None:
    from ...reports.comparison import headroom_rows
    from ...reports.notes import given_up
    from ...reports.selection import checked_spec
    from ...runs.registry import discover
    from ...runs.specs import RunSpec, expected_settings

    registry = discover(args.plugins)
    check_formats(args.format)
    if args.bound is None:
        first = RunSpec.of(args.reference, backbones_of(args, registry)[0], (args.datasets or ("ml-100k",))[0])
        first = checked_spec(registry, first, settings_of(args))
        args.bound = "central" if expected_settings(registry, first)["stream"] == "sessions" else "joint"
    if args.reference.lower() == args.bound.lower():
        raise UserError(f"--bound: found {args.bound}, which is the reference too; accepted: another method.")
    names = list(dict.fromkeys([args.reference, args.bound, *methods_of(args)]))
    specs, runs = found_by_cell(args, registry, names)
    metric = args.metric or next(iter(runs.values()))[args.reference][0].head["settings"]["valid_metric"]
    tables = {cell: headroom_rows(of_cell, args.reference, args.bound, metric) for cell, of_cell in runs.items()}
    if args.figure:
        _draw(args, tables, names, metric)
    if args.json:
        print_json({"reference": args.reference, "bound": args.bound, "metric": metric, "cells": [
            {"backbone": backbone, "dataset": dataset, "rows": [asdict(row) for row in rows]}
            for (backbone, dataset), rows in tables.items()]})
        return
    for (backbone, dataset), rows in tables.items():
        _show(f"{metric} on {backbone}, {dataset}", rows, args.reference)
    print(f"Gains over {args.reference}, and shares of what {args.bound} gains, with 95 % intervals over users and "
          f"seeds. LA: learning, mean of R[t, t].")
    alone = {row.method for rows in tables.values() for row in rows if row.against and len(row.seeds) == 1}
    if alone:
        print(f"{', '.join(sorted(alone))}: one seed in common, so the interval is over users alone.")
    for note in given_up(registry, specs):
        print(note)


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
        forgetting = row.continual["forgetting"]
        lines.append((row.method, f"{row.mean:.4f}", gain, share, f"{row.continual['LA']:.4f}",
                      "–" if isnan(forgetting) else f"{forgetting:.4f}", amount(row.sent), f"{row.seconds:.0f}",
                      seed_text(row.seeds), str(row.users)))
    print(title)
    print_table(("method", "mean", f"gain over {reference}", "share of headroom", "LA", "forgetting", "sent", "seconds",
                 "seeds", "users"), lines)


def _interval(values: tuple[float, float, float], how: str) -> str:
    value, low, high = (format(each, how) for each in values)
    return f"{value} ({low} … {high})"
