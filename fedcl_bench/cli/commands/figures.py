"""Draw figures for print, from finished runs."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Callable

from ...core.errors import UserError, require_known
from .. import (DRAWN, OF_RECORDS, Extend, add_options, check_formats, names, save_figure, say_tuned,
                settings_of, source_of)

if TYPE_CHECKING:
    from ...reports.paper_figures import Drawn, FigureJob
    from ...records.store import Run

EXAMPLES = """\
examples:
  run_bench.py figures                                        everything that the records in ./results allow
  run_bench.py figures --figure 3 --records results/published/f3crec --tuned --format pdf
  run_bench.py figures --figure 4 --datasets ml-100k         its runs: grid --paper f3crec --figure 4 --datasets ml-100k
  run_bench.py figures --paper fcucr --figure 2a,2bc,k         its runs: grid --paper fcucr --figure 2a,2bc,k
  run_bench.py figures --figure forgetting,curves --methods ft,f3crec --backbones fedmf --datasets ml-100k

figures of f3crec:
  3            improvement over FT per method, dataset and backbone, with the paper's numbers
  4            sensitivity of F3CRec to eps, lambda_kd and beta
  forgetting   R[t,s], the metric on block s after block t, per method
  curves       the validation metric over the rounds
  cd           average ranks and critical difference over all datasets x backbones

figures of fcucr (its Figures 3-10 are k, lambda and noise, per dataset):
  early        2a: how well each client's first session is predicted after every round
  probability  2b, 2c: predicted probability of the test targets, with and without prototype transfer
  k            sensitivity to the number of retrieved prototypes
  lambda       sensitivity to the weight of self-distillation
  noise        noise on received prototypes, with the ε it stands for
  curves       the validation metric over the rounds

figures of ffmsr:
  5, 6, 7      sensitivity to K (clusters), a (text_layers) and t (federated_rounds), per domain
  table3 to 7  the table of that number: a dot per line and domain

What has no record is named, with the command that makes it, and left empty. docs/tables.md says how to read them.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--paper", default="f3crec", metavar="NAME",
                        help="whose figures, labels and printed numbers: f3crec (default), fcucr or ffmsr")
    parser.add_argument("--figure", type=names, action=Extend, metavar="A,B",
                        help="which, as 3,cd; repeatable (default: all)")
    add_options(parser, "backbones", "datasets", methods="methods, as ft,f3crec; repeatable",
                set="take the runs with this setting; repeatable",
                metric="default: ndcg@20; of fcucr, hit@10; of ffmsr, recall@10; where no record has it, that of their "
                       "validation")
    add_options(parser, "records", tuned=OF_RECORDS)
    add_options(parser, *DRAWN, "plugins")


def _present(kind: str, asked: tuple[str, ...] | None, paper: ModuleType, runs: list[Run]) -> list[str]:
    """The datasets or backbones to draw: those asked for, or the paper's of which there are records, or any other."""
    there = {run.head[kind] for run in runs}
    known = paper.DATASETS if kind == "dataset" else paper.BACKBONES
    require_known(kind, asked or (), {*known, *there})
    return list(dict.fromkeys(asked)) if asked else [name for name in known if name in there] or sorted(there)


def _metric(job: FigureJob, runs: list[Run]) -> str:
    """The paper's, or where no record to draw has it the one that chose their best rounds, if that is one."""
    heads = [run.head for run in runs if run.head["method"] in job.methods and run.head["dataset"] in job.datasets
             and run.head["backbone"] in job.backbones]
    chose = {head["settings"]["valid_metric"] for head in heads}
    if len(chose) != 1 or any(job.paper.METRIC in head["metrics"] for head in heads):
        return job.paper.METRIC
    return chose.pop()


def run(args: argparse.Namespace) -> None:
    from ...experiments import papers
    from ...reports.paper_figures import MAKERS, FigureJob
    from ...reports.selection import FOOTNOTE
    from ...runs.registry import discover
    from ...runs.specs import RunSpec

    check_formats(args.format)
    paper = papers.get(args.paper)
    makers = MAKERS[args.paper]
    asked = [paper.FIGURE_ALIASES.get(name, name) for name in args.figure or ("all",)]
    require_known("figure", asked, [*makers, *paper.FIGURE_ALIASES, "all"])
    wanted = list(makers) if "all" in asked else list(dict.fromkeys(asked))
    registry = discover(args.plugins)
    source = source_of(args, registry, assignments=tuple(settings_of(args).items()))
    named = args.methods or (method for method in paper.METHODS if method in registry.names("method"))
    methods = list(dict.fromkeys(registry.get("method", method).name for method in named))
    job = FigureJob(paper, args.paper, source, args.records, methods,
                    _present("backbone", args.backbones, paper, source.runs),
                    _present("dataset", args.datasets, paper, source.runs), args.metric or "")
    if not args.metric:
        job = replace(job, metric=_metric(job, source.runs))
    written, messages = _draw_all({name: makers[name] for name in wanted}, job, args)
    say_tuned(source.tuned, (RunSpec(*names) for names in product(methods, job.backbones, job.datasets)))
    for line in messages:
        print(line)
    if any(registry.reimplemented(method) for method in methods):
        print(FOOTNOTE)
    for path in written:
        print(path)


def _draw_all(makers: dict[str, Callable[[FigureJob], Drawn]], job: FigureJob,
              args: argparse.Namespace) -> tuple[list[Path], list[str]]:
    """Draw and save figures; the files, and what is to be said of records that are not there. Raises UserError if no
    figure can be drawn, or a file cannot be written."""
    from ...reports.paper_figures import Skip

    written, skipped = [], []
    notes: dict[str, None] = {}  # each once, though several figures have it
    for name, make in makers.items():
        try:
            for drawn in make(job):
                if isinstance(drawn, str):
                    notes[drawn] = None
                else:
                    written += save_figure(*drawn, args.out, args.format)
        except Skip as error:
            skipped.append(f"{'figure ' if name.isdecimal() else ''}{name}: not drawn: {error}")
    if not written:
        raise UserError("figures: " + "\n".join(skipped))
    return written, [*notes, *skipped]
