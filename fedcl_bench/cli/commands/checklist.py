"""Answer the questions of a reproducibility checklist (as of ACM TORS and RecSys) from records.

What no record knows is marked as to be answered by the authors.
"""

from __future__ import annotations

import argparse
from typing import Any, Mapping

from .. import add_options, tuned_of, whole_runs

EXAMPLES = """\
examples:
  run_bench.py checklist                                             of all records in ./results
  run_bench.py checklist --methods ft,my-method --datasets ml-100k --tuned --format latex > appendix.tex
"""


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "records")
    add_options(parser, methods="only the runs of these, as ft,kd (default: all that have records)",
                backbones="only these, as fedmf; repeatable", datasets="only these, as ml-100k; repeatable",
                tuned="also say how the settings that `tune` wrote into DIR were searched")
    parser.add_argument("--format", choices=("md", "latex"), default="md", help="Markdown (default), or LaTeX")
    add_options(parser, "plugins")


def run(args: argparse.Namespace) -> None:
    from ...reports.checklist import Answered, answers, as_latex, as_markdown
    from ...runs.registry import discover

    registry = discover(args.plugins)
    chosen = {kind: [name if kind == "dataset" else registry.get(kind, name).name for name in names]
              for kind in ("method", "backbone", "dataset") if (names := getattr(args, f"{kind}s"))}

    def asked(head: Mapping[str, Any]) -> bool:
        return all(head[kind] in names for kind, names in chosen.items())
    parts = answers(Answered(*whole_runs(args.records, asked), registry, tuned_of(args)))
    print((as_latex if args.format == "latex" else as_markdown)(parts), end="")
