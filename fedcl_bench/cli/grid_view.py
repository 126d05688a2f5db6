"""What grids and searches show: a live table and a line per run on standard error, the result on standard output."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any, Callable, Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..data.source import dataset_name
from ..api.stopping import stop_between_rounds
from ..core.settings import as_text
from ..core.clock import EveryMinute, duration
from ..core.text import for_terminal
from ..experiments.grid import Outcome, Task, planned
from ..experiments.pool import Folders, GridState, Pool, PoolWatch, Running
from ..experiments.tune import Result
from ..runs.specs import seed_text
from ..stats.significance import ALIKE
from . import cores, interrupted, print_json, where_of
from .show import print_table


def _left(board: GridState) -> str:
    left = board.time_left()
    return f", about {duration(left)} left" if left and (board.running or board.waiting) else ""


def _counts(board: GridState) -> str:
    failed = board.count("failed", "error", "busy")
    return (f"{board.count('finished')} of {board.tasks} done, {len(board.running)} running, "
            + (f"{failed} failed, " if failed else "") + f"{len(board.waiting)} waiting")


def _at(running: Running) -> str:
    step, steps, round_, rounds = running.at or (0, 0, 0, 0)
    return f"block {step} of 0-{steps - 1}, round {round_} of at most {rounds}" if running.at else "starting"


class GridView:
    """The live table where standard error is a terminal, else a line of progress a minute; a line per run that ends
    everywhere. ``clock`` gives monotonic seconds."""

    def __init__(self, quiet: bool = False, clock: Callable[[], float] = time.monotonic):
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        self._quiet, self._clock, self._start = quiet, clock, clock()
        self._live = Live(console=self._console, transient=True, auto_refresh=False)
        self._shows = not quiet and self._console.is_terminal
        self._due = EveryMinute(clock)
        self._shown = 0.0

    def __enter__(self) -> "GridView":
        if self._shows:
            self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._shows:
            self._live.stop()

    def note(self, message: str) -> None:
        if not self._quiet:
            self._console.print(for_terminal(message))

    def warn(self, message: str) -> None:
        self._console.print(for_terminal(message))

    def ended(self, outcome: Outcome, board: GridState) -> None:
        number = f"{len(board.outcomes):>{len(str(board.tasks))}}/{board.tasks}"
        what = f"{outcome.took:.1f} s" if outcome.status == "finished" else first_line(outcome.error)
        self.note(f"{number} {outcome.status}: {outcome.task.label}: {what}{_left(board)}")

    def show(self, board: GridState) -> None:
        """Draw the table anew, at most four times a second; without a terminal a line a minute."""
        if not self._shows:
            if board.running and self._due():
                runs = "".join(f"; {running.task.label}: {_at(running)}" for running in board.running)
                self.note(f"{_counts(board)}, {duration(self._clock() - self._start)} elapsed{_left(board)}{runs}")
            return
        if self._clock() - self._shown < 0.25:
            return
        self._shown = self._clock()
        table = Table(box=None, show_header=False, pad_edge=False)
        for running in board.running:
            table.add_row("  " + running.task.label, _at(running), duration(self._clock() - running.began))
        self._live.update(Group(Text(_counts(board) + _left(board)), table), refresh=True)


@contextmanager
def workers(args: argparse.Namespace) -> Iterator[Pool]:
    """What does the runs of a command, in processes or with ``--ray`` on a cluster, with the progress on standard
    error; it ends their rounds after Ctrl-C."""
    folders = Folders(args.results, args.data_dir, args.plugins, getattr(args, "save_lists", False))
    jobs, crew = args.jobs or cores(), None
    with ExitStack() as stack:
        if getattr(args, "ray", None):
            from ..experiments import cluster, ray_crew

            joined = stack.enter_context(cluster.joined(args.ray, cores()))
            crew = stack.enter_context(ray_crew.crew(joined, args.threads, args.results))
            jobs = args.jobs or max(1, joined.cores // args.threads)
            folders = replace(folders, results=args.results.absolute(), data_dir=args.data_dir
                              and args.data_dir.absolute(), plugins=[folder.absolute() for folder in args.plugins])
        view = stack.enter_context(GridView(args.quiet))
        stop = stack.enter_context(stop_between_rounds())
        watch = PoolWatch(view.show, view.ended, view.warn, stop)
        yield stack.enter_context(Pool(folders, jobs, args.threads, watch, crew))


def status_of(outcomes: Sequence[Outcome]) -> int:
    """The exit status of a command that did runs; says so if the user stopped them."""
    statuses = {outcome.status for outcome in outcomes}
    if statuses & {"stopped", "waiting"}:
        return interrupted()
    return 1 if statuses - {"finished"} else 0


def first_line(text: str) -> str:
    return for_terminal((text.splitlines() or [""])[0])


def show_plan(tasks: Sequence[Task], args: argparse.Namespace, about: dict[str, Any] | None = None) -> int:
    """What ``--dry-run`` shows: a row per run but for its seed, with the seeds that have a record, failed, and are
    still to be run; then what cannot be run, and why. With ``--json`` all runs, under ``runs`` beside ``about`` if that
    is given; exit status 0."""
    states = [planned(task, args.results) for task in tasks]
    if args.json:
        runs = [{"method": t.spec.method, "backbone": t.spec.backbone, "dataset": t.spec.dataset,
                 "seed": t.config.seed, "settings": t.config.settings, "hash": t.config.hash, "state": s.status}
                for t, s in zip(tasks, states)]
        print_json(runs if about is None else {**about, "runs": runs})
        return 0
    rows: dict[tuple, dict[str, list[int]]] = {}
    for task, its in zip(tasks, states):
        spec = task.spec
        settings = ", ".join(f"{name}={as_text(value)}" for name, value in spec.settings)
        row = rows.setdefault((spec.method, spec.backbone, spec.dataset, settings), {})
        row.setdefault(its.status, []).append(task.config.seed)
    print_table(("method", "backbone", "dataset", "settings", "finished", "failed", "interrupted", "to run"),
                [(method, backbone, dataset_name(dataset), settings,
                  *(seed_text(seeds.get(name, ())) for name in ("finished", "failed", "interrupted", "missing")))
                 for (method, backbone, dataset, settings), seeds in rows.items()])
    count = Counter(its.status for its in states)
    lacking = f", {count['incompatible']} that cannot be run" if count["incompatible"] else ""
    print(f"{len(tasks)} runs: " + ", ".join(f"{count[name]} {name}" for name in ("finished", "failed", "interrupted"))
          + f", {count['missing']} to run{lacking}. The columns on the right are seeds.")
    for why in dict.fromkeys(first_line(its.error) for its in states if its.status == "incompatible"):
        print(f"cannot be run: {why}")
    return 0


def show_outcomes(outcomes: Sequence[Outcome], args: argparse.Namespace, seconds: float) -> None:
    """Counts, then every run that did not finish with its reason and the command that does it alone."""
    done = [outcome for outcome in outcomes if outcome.status == "finished"]
    print(f"{len(done)} of {len(outcomes)} runs finished, {sum(outcome.new for outcome in done)} of them now, "
          f"in {duration(seconds)}.")
    for outcome in outcomes:
        if outcome.status in ("failed", "error", "busy"):
            status = {"failed": "failed" if outcome.new else "failed before", "busy": "busy elsewhere"}.get(
                outcome.status, "did not finish")
            print(f"{status}: {outcome.task.label}\n{indent(for_terminal(outcome.error), '  ')}\n"
                  f"  alone: {outcome.task.command(where_of(args))}")
    if any(outcome.status == "failed" and not outcome.new for outcome in outcomes):
        print("Runs that failed before are run again with --retry-failed.")


def as_json(outcomes: Sequence[Outcome], results: Path, seconds: float) -> dict[str, Any]:
    runs = []
    for outcome in outcomes:
        spec, config = outcome.task.spec, outcome.task.config
        runs.append({"method": spec.method, "backbone": spec.backbone, "dataset": config.source.name,
                     "seed": config.seed, "settings": config.settings, "hash": config.hash,
                     "status": outcome.status, "new": outcome.new,
                     "seconds": outcome.seconds, "error": outcome.error or None,
                     "record": str(outcome.task.record(results).folder)})
    statuses = ("finished", "failed", "error", "busy", "stopped", "waiting")
    return {"runs": runs, "seconds": seconds,
            "counts": {status: sum(o.status == status for o in outcomes) for status in statuses}}


def show_outlook(rows: Sequence[Result]) -> None:
    """A row per search: what it searches, with the number of values, the runs it has, and the share of its budget that
    they took."""
    lines = []
    for row in rows:
        head, search = row.search.head(), row.search
        searched = ", ".join(f"{name} ({len(values)})" for name, values in search.space.items())
        fixed = ", ".join(f"{name}={as_text(value)}" for name, value in search.fixed.items())
        done = ("?", "?") if row.runs is None else (str(row.runs), f"{row.spent:.0%}")
        lines.append((head["method"], head["backbone"], head["dataset"], searched, fixed, str(search.points), *done,
                      "as before" if row.status == "kept" else ""))
    print_table(("method", "backbone", "dataset", "searched", "fixed", "points", "runs done", "spent", ""), lines)
    new, effort = [row for row in rows if row.status != "kept"], rows[0].search.effort
    print(f"Searches: {len(new)} to do, {len(rows) - len(new)} done before and kept. The budget of each is the "
          f"client-updates of {effort.budget} trials of FT on {effort.seeds} seed{'s' * (effort.seeds > 1)}. "
          f"`list NAME` shows the values."
          + (" ?: the points hang on what is tried before." if any(row.runs is None for row in rows) else ""))


def show_tuned(results: Sequence[Result], files: Sequence[str]) -> None:
    """What was chosen for every combination, from how many points, and where it is kept."""
    lines = []
    for result in results:
        c, content = result.combination, result.content
        if content:
            chosen = ", ".join(f"{name}={as_text(value)}" for name, value in content["settings"].items())
            mark, updates = " = FT" if content.get("ft_in_effect") else "", content["client_updates"]
            lines.append((c.method, c.backbone, dataset_name(c.dataset), chosen, f"{content['value']:.4f}{mark}",
                          f"{content['ft_value']:.4f}" if "ft_value" in content else "", str(len(content["trials"])),
                          str(content["grid_points"]), f"{updates['spent'] / updates['budget']:.0%}",
                          "as before" if result.status == "kept" else ""))
    print_table(("method", "backbone", "dataset", "chosen", "validation", "FT", "tried", "of points", "spent", ""),
                lines)
    done = [(result, file) for result, file in zip(results, files) if result.content]
    if done:
        print(f"validation: {done[0][0].content['objective']}; FT: of FT with the same backbone settings.\n"
              f"spent: of the budget of client-updates, which is the same for all methods on a backbone and dataset.")
    if any(result.content.get("ft_in_effect") for result, _ in done):
        print(f"= FT: no block's validation is {ALIKE:.4f} away from FT's on any seed: FT in effect.")
    for result, file in done:
        print(f"settings: {file}")
    for result in results:
        if not result.content:
            print(f"{result.status}: {result.combination}\n  {first_line(result.error)}")
