"""Make the folder of a submission to the leaderboard: records, plugin, tuned settings, and who submits them."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from ...core.errors import Corrupt
from .. import OF_RECORDS, add_options, say_tuned, settings_of, source_of

EXAMPLES = """\
examples:
  run_bench.py grid --methods mine,ft,joint --backbones fedmf --seeds 5 --plugins DIR        the runs of a submission
  run_bench.py submit --method mine --plugins DIR --author "Jane Roe" --out results/leaderboard/mine
  run_bench.py submit --method f3crec --records my-results --tuned --author "Jane Roe" --out results/leaderboard/f3crec
  run_bench.py verify results/leaderboard/mine                                what the pull request will be asked

The folder of records must have runs of the method and of FT, with the same settings and seeds, at least 3; those of
`joint`, if they are there, tell the share of headroom. Every backbone and dataset of the method is a row, unless
--backbone and --dataset choose. Runs that failed, did not end, have several settings, or are of other plugin code than
today's are refused. The page of the board is written anew beside the folder. Commit all of it, and open a pull request.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", required=True, metavar="NAME",
                        help="what is submitted; with settings of its own as f3crec:without=arm")
    parser.add_argument("--author", required=True, metavar="NAME", help="who submits, as the page shows it")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR",
                        help="folder of the submission, as results/leaderboard/NAME, made or replaced")
    add_options(parser, "records", backbones="only these, as fedmf; repeatable",
                datasets="only these, as ml-100k; repeatable", tuned=OF_RECORDS,
                set="of runs with this setting, of FT too; repeatable")
    add_options(parser, "data-dir", plugins="also load the plugin files of this folder; those that the runs use become "
                                            "part of the submission; repeatable")


def run(args: argparse.Namespace) -> None:
    from ...data.source import dataset_name, spelled
    from ...leaderboard import board, submission
    from ...runs.registry import discover
    from ...runs.specs import RunSpec, parse_method

    board.refuse_others(args.out.parent)
    damaged: list[Corrupt] = []
    changes, registry = settings_of(args), discover(args.plugins)
    source = source_of(args, registry, say=damaged.append, assignments=tuple(changes.items()))
    backbones = args.backbones and [registry.spelled("backbone", name) for name in args.backbones]
    datasets = args.datasets and [dataset_name(spelled(name, args.data_dir)) for name in args.datasets]
    cells = submission.select(source, args.method, {"backbone": backbones, "dataset": datasets}, changes, args.records)
    if damaged:
        raise damaged[0]
    specs = [RunSpec(name, *place) for place, runs_of in cells.items() for name in runs_of]
    say_tuned(source.tuned, specs)
    method = registry.get("method", parse_method(args.method)[0]).name
    made = submission.write(
        args.out, cells, source, {"method": method, "title": args.method, "author": args.author},
        shlex.join(("run_bench.py", "submit", "--method", args.method)))
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {len(made.rows)} row{'s' * (len(made.rows) > 1)}, {len(made.files) + 1} files, "
          f"{size / 1e3:.0f} kB")
    for path in board.write_pages(args.out.parent):
        print(path)
    print(f"Now: run_bench.py verify {shlex.quote(str(args.out))}")
