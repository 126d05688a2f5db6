"""Verify a submission to the leaderboard: its files, records and rows, one seed again, and its plugins in full."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...api.stopping import stop_between_rounds
from .. import add_options, interrupted, print_json

if TYPE_CHECKING:
    from ...records.store import Run
    from ...runs.config import RunConfig

EXAMPLES = """\
examples:
  run_bench.py verify results/leaderboard/f3crec
  run_bench.py verify results/leaderboard/mine --data-dir data --json

what is asked, in this order; the first that does not hold ends it, with exit status 1:
  files       they have the digests that were submitted, and there is no other
  settings    runs have the hashes that their settings, the data here, and the plugins give
  means       those of the records are the means over their users
  rows        what the page shows follows from the records
  again       the digest of the records draws a backbone, a dataset and a seed; all its runs are made again. On the
              machine of the records they must be the same to 1e-6. Another processor or version of PyTorch rounds
              differently, which acts like another seed: there the mean must lie within the 99 % prediction interval
              of the submission's seeds, and the output says so. That sees less; repeat it on such a machine
  check       `check --full` of the method and of the plugins in the submission; the longest, some minutes

Nothing is fetched or kept: the runs are made in a temporary folder. Plugins of the submission are imported and run, so
verify what you would run. Exit status: 0 all holds, 1 refused, 2 no submission, or its data are not here.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a submission, as results/leaderboard/NAME")
    add_options(parser, "data-dir", "quiet", "json")


def run(args: argparse.Namespace) -> int:
    from ...api.seeds import Execution, run_seeds
    from ...leaderboard.verify import verify
    from ...records.store import load_record
    from ...runs.config import resolve_device
    from ...runs.runner import Interrupted

    found = []
    try:
        with stop_between_rounds() as stop, tempfile.TemporaryDirectory() as results:
            def rerun(config: RunConfig) -> Run:
                config = replace(config, device=resolve_device("auto") if config.device == "cuda" else config.device)
                execution = Execution(Path(results), stop, quiet=args.quiet or args.json)
                return load_record(Path(run_seeds([config], [], execution)[0]["record"]))
            for step, evidence in verify(args.folder, args.data_dir, rerun):
                found.append({"step": step, "evidence": evidence})
                if not args.json:
                    print(f"  holds  {step}: {evidence}", flush=True)
        passed = _check(args, found)
    except (Interrupted, KeyboardInterrupt):
        return interrupted("nothing was changed, and nothing is kept; give the command again.")
    if args.json:
        print_json({"verified": passed, "steps": found})
    elif passed:
        print(f"{args.folder}: verified")
    else:
        print(f"run_bench.py: {args.folder}: refused, as a plugin does not pass its check.", file=sys.stderr)
    return 0 if passed else 1


def _check(args: argparse.Namespace, found: list[dict[str, str]]) -> bool:
    """Whether the method and all plugins of the submission pass their check, with every partner."""
    from ...leaderboard.submission import PLUGINS, read, registry_of
    from ...testing import check_plugin
    from ...testing.report import CheckDisplay

    registry, folder = registry_of(args.folder), (args.folder / PLUGINS).resolve()
    chosen = [plugin for plugin in registry.plugins.values() if plugin.path.parent == folder]
    if (method := registry.get("method", read(args.folder).method)) not in chosen:
        chosen.append(method)
    passed = True
    for plugin in chosen:
        with CheckDisplay(plugin, quiet=args.quiet or args.json) as display:
            report = check_plugin(registry, plugin, full=True, watch=display.add)
        if not args.json:
            display.conclude(report)
        found.append({"step": f"check: {plugin.name}", "evidence": f"{len(report.failures)} properties fail"})
        passed &= report.passed
    return passed
