"""``base``: block 0 as a file, to be exchanged with other programs."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from ...errors import UserError
from .common import add_data_dir, add_device, add_plugins, add_results, add_set, add_tuned_runs, results_where, seed

EXAMPLES = """\
examples:
  run_bench.py base export --backbone fedmf --seed 0 --out base.npz      block 0 of a run that was made
  run_bench.py base import base.npz                                      prints its name
  run_bench.py --method f3crec --backbone fedmf --set base_model=NAME    a run that starts from it

The file holds named tables and the ids of their rows (docs/records.md), so another program can read or write it. With
base_model nobody trains in block 0: the model is validated and tested once, and block 1 starts from it.
"""


def add(commands) -> None:
    """Declare the command."""
    base = commands.add_parser("base", help="exchange block 0 with other programs, as a file of tables",
                               epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
                               description="Write block 0 of a run to a file of tables, or take one in.")
    actions = base.add_subparsers(dest="action", metavar="{export,import}", required=True)
    export = actions.add_parser("export", help="write the model that block 1 of a run starts from",
                                description="Write the model that block 1 of a run starts from: by init_from, that of "
                                            "block 0's last or best round. The run must have been made.")
    export.add_argument("--method", metavar="NAME", default="ft", help="any that acts from block 1 on (default: ft)")
    export.add_argument("--backbone", metavar="NAME", required=True, help="as fedmf")
    export.add_argument("--dataset", metavar="NAME", default="ml-100k", help="default: ml-100k")
    export.add_argument("--seed", type=seed, default=0, metavar="N", help="default: 0")
    export.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write, as base.npz")
    add_set(export, "a setting of the run; repeatable")
    add_tuned_runs(export)
    add_data_dir(export)
    add_results(export)
    add_plugins(export)
    add_device(export)
    take = actions.add_parser("import", help="keep such a file in the results folder, and print its name",
                              description="Keep such a file in the results folder, and print the name that the setting "
                                          "base_model takes.")
    take.add_argument("file", type=Path, metavar="FILE", help="as base.npz")
    add_results(take)


def run(args: argparse.Namespace) -> int:
    return {"export": _export, "import": _import}[args.action](args)


def _import(args: argparse.Namespace) -> int:
    from ...runs import bases

    print(bases.keep(args.file, args.results))
    return 0


def _export(args: argparse.Namespace) -> int:
    from ...data.datasets import load_stream
    from ...experiments.grid import make_tasks
    from ...runs import bases
    from ...runs.checkpoints import load_progress
    from ...runs.config import resolve_device
    from ...runs.registry import discover
    from ...runs.specs import RunSpec, Tuned
    from ...settings import parse_assignments

    settings = tuple(parse_assignments(args.assignments, "--set").items())
    spec = RunSpec(args.method, args.backbone, args.dataset, settings)
    tuned = Tuned.of(args.tuned, args.results, results_where(args))
    (task,) = make_tasks(discover(args.plugins), [spec], [args.seed], args.data_dir, tuned,
                         resolve_device(args.device or "cpu"))
    config = task.config
    stream = load_stream(config.source, config.stream)
    saved = load_progress(config.base_file(args.results), "cpu", config.federation(stream), config.base_hash)
    if saved is None:
        raise UserError(f"no block 0 of {task.label} in {args.results}.\nMake it with: "
                        f"{task.command(args.results, args.data_dir, args.plugins)}")
    progress = saved[0]
    model = progress.model if config.server.init_from == "last" else progress.best.model
    backbone = config.backbone.cls(config.backbone_settings)
    model = replace(model, start=bases.common_start(backbone, config.seed, model))
    try:
        bases.export(args.out, model, stream.user_tokens, stream.item_tokens)
    except OSError as error:
        raise UserError(f"{args.out}: cannot be written ({error.strerror}).") from None
    print(f"{args.out}: {model.n_users} users, {model.n_items} items, "
          f"{', '.join(f'{kind}/{name}' for kind in (*bases.KINDS, bases.START) for name in getattr(model, kind))}")
    return 0
