"""Write a run as an app for a deployment of Flower that is there already."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ...core.errors import UserError

EXAMPLES = """\
examples:
  run_bench.py export flower app --method f3crec --backbone fedmf --federation clients/server --clients 3
  run_bench.py client --data interactions.csv --folder /srv/fedcl --listen           at each node, and
  flower-supernode --superlink HOST:9092 --node-config 'socket="/srv/fedcl/socket"'
  flwr run app                                                                       then, at the server

The words after DIR are those of `run`. The server writes the record into the results folder of this one.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("flower",), help="of deployment")
    parser.add_argument("out", type=Path, metavar="DIR", help="where to write the app")
    parser.add_argument("run_words", nargs=argparse.REMAINDER, metavar="...", help="the run: options of `run`")


def run(args: argparse.Namespace) -> None:
    from ...deployment.flower_app import AT_GRID, export
    from ..main import parse
    from .run import configured_run

    if any(word.startswith("--engine") for word in args.run_words):
        raise UserError("export: found --engine, accepted: the words of `run` without it.")
    config = configured_run(parse(["run", *args.run_words, "--engine", f"flower:{AT_GRID}"]))
    export(args.out, args.run_words, f"{config.method.name} on {config.backbone.name}, {config.source.name}")
    print(f"wrote: {args.out}")


def serve(grid: Any, words: str, folder: str) -> None:
    """Be the server of an app: do the run that its words (JSON) name, in the folder where it was exported."""
    from ...deployment.flower_app import AT_GRID, use_grid
    from ..main import main

    os.chdir(folder)
    use_grid(grid)
    if status := main(["run", *json.loads(words), "--engine", f"flower:{AT_GRID}", "--quiet"]):
        raise RuntimeError(f"the run ended with status {status}")
