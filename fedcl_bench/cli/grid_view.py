"""What grids and searches show: a live table and a line per run on standard error, the result on standard output."""

from __future__ import annotations

import time
from pathlib import Path
from textwrap import indent
from typing import Any, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..data.source import dataset_name
from ..experiments.grid import Outcome, State, Task
from ..experiments.tune import ALIKE, Result
from ..core.text import for_terminal
from ..runs.specs import seed_text
from ..core.settings import as_text
from ..experiments.pool import Board
from .show import plain_table, print_table


def duration(seconds: float) -> str:
    """Seconds as 1:02:03, 2:03 or 0:03."""
    minutes, rest = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _left(board: Board) -> str:
    left = board.time_left()
    return f", about {duration(left)} left" if left and (board.running or board.waiting) else ""


class View:
    """The live table where standard error is a terminal; a line per run that ends everywhere."""

    def __init__(self, quiet: bool = False):
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        self._quiet = quiet
        self._live = Live(console=self._console, transient=True, auto_refresh=False)
        self._shows = not quiet and self._console.is_terminal
        self._shown = 0.0

    def __enter__(self) -> "View":
        if self._shows:
            self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._shows:
            self._live.stop()

    def note(self, message: str) -> None:
        """A line of text unless quiet."""
        if not self._quiet:
            self._console.print(for_terminal(message))

    def warn(self, message: str) -> None:
        """A line of text even when quiet."""
        self._console.print(for_terminal(message))

    def ended(self, outcome: Outcome, board: Board) -> None:
        """A line for a run that ended."""
        number = f"{len(board.outcomes):>{len(str(board.tasks))}}/{board.tasks}"
        what = f"{outcome.took:.1f} s" if outcome.status == "finished" else first_line(outcome.error)
        self.note(f"{number} {outcome.status}: {outcome.task.label}: {what}{_left(board)}")

    def show(self, board: Board) -> None:
        """Draw the table anew, at most four times a second."""
        if not self._shows or time.monotonic() - self._shown < 0.25:
            return
        self._shown = time.monotonic()
        failed = board.count("failed", "error", "busy")
        head = Text(f"{board.count('finished')} of {board.tasks} done, {len(board.running)} running, "
                    + (f"{failed} failed, " if failed else "") + f"{len(board.waiting)} waiting{_left(board)}")
        table = Table(box=None, show_header=False, pad_edge=False)
        for running in board.running:
            step, steps, round_, rounds = running.at or (0, 0, 0, 0)
            at = f"block {step} of 0-{steps - 1}, round {round_} of at most {rounds}" if running.at else "starting"
            table.add_row("  " + running.task.label, at, duration(time.monotonic() - running.began))
        self._live.update(Group(head, table), refresh=True)


def first_line(text: str) -> str:
    """The first line of a message, for a terminal."""
    return for_terminal((text.splitlines() or [""])[0])


def show_tasks(tasks: Sequence[Task], states: Sequence[State]) -> None:
    """A row per run but for its seed: which seeds have a record, which failed, which are still to be run."""
    rows: dict[tuple, dict[str, list[int]]] = {}
    for task, state in zip(tasks, states):
        spec = task.spec
        settings = ", ".join(f"{name}={as_text(value)}" for name, value in spec.settings)
        row = rows.setdefault((spec.method, spec.backbone, spec.dataset, settings), {})
        row.setdefault(state.name, []).append(task.config.seed)
    table = plain_table("method", "backbone", "dataset", "settings", "finished", "failed", "interrupted", "to run")
    for (method, backbone, dataset, settings), seeds in rows.items():
        table.add_row(method, backbone, dataset_name(dataset), settings, *(seed_text(seeds.get(name, ())) for name in (
            "finished", "failed", "interrupted", "missing")))
    print_table(table)
    counts = {name: sum(state.name == name for state in states) for name in ("finished", "failed", "interrupted")}
    print(f"{len(tasks)} runs: " + ", ".join(f"{count} {name}" for name, count in counts.items())
          + f", {len(tasks) - sum(counts.values())} to run. The columns on the right are seeds.")


def show_outcomes(outcomes: Sequence[Outcome], commands: Sequence[str], seconds: float) -> None:
    """Counts, then every run that did not finish with its reason and the command that does it alone."""
    done = [outcome for outcome in outcomes if outcome.status == "finished"]
    print(f"{len(done)} of {len(outcomes)} runs finished, {sum(outcome.new for outcome in done)} of them now, "
          f"in {duration(seconds)}.")
    for outcome, command in zip(outcomes, commands):
        if outcome.status in ("failed", "error", "busy"):
            status = {"failed": "failed" if outcome.new else "failed before", "busy": "busy elsewhere"}.get(
                outcome.status, "did not finish")
            print(f"{status}: {outcome.task.label}\n{indent(for_terminal(outcome.error), '  ')}\n  alone: {command}")
    if any(outcome.status == "failed" and not outcome.new for outcome in outcomes):
        print("Runs that failed before are run again with --retry-failed.")


def as_json(outcomes: Sequence[Outcome], results: Path, seconds: float) -> dict[str, Any]:
    """Every run and what became of it, JSON-ready."""
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
    table = plain_table("method", "backbone", "dataset", "searched", "fixed", "points", "runs done", "spent", "")
    for row in rows:
        head, search = row.search.head(), row.search
        searched = ", ".join(f"{name} ({len(values)})" for name, values in search.space.items())
        fixed = ", ".join(f"{name}={as_text(value)}" for name, value in search.fixed.items())
        done = ("?", "?") if row.runs is None else (str(row.runs), f"{row.spent:.0%}")
        table.add_row(head["method"], head["backbone"], head["dataset"], searched, fixed, str(search.points), *done,
                      "as before" if row.status == "kept" else "")
    print_table(table)
    new, effort = [row for row in rows if row.status != "kept"], rows[0].search.effort
    print(f"Searches: {len(new)} to do, {len(rows) - len(new)} done before and kept. The budget of each is the "
          f"client-updates of {effort.budget} trials of FT on {seed_words(effort.seeds)}. `list NAME` shows the values."
          + (" ?: the points hang on what is tried before." if any(row.runs is None for row in rows) else ""))


def seed_words(count: int) -> str:
    """A number of seeds, for people."""
    return "1 seed" if count == 1 else f"{count} seeds"


def show_tuned(results: Sequence[Result], files: Sequence[str]) -> None:
    """What was chosen for every combination, from how many points, and where it is kept."""
    table = plain_table("method", "backbone", "dataset", "chosen", "validation", "FT", "tried", "of points", "spent",
                        "")
    for result in results:
        c, content = result.combination, result.content
        if content:
            chosen = ", ".join(f"{name}={as_text(value)}" for name, value in content["settings"].items())
            mark, updates = " = FT" if content.get("ft_in_effect") else "", content["client_updates"]
            table.add_row(c.method, c.backbone, dataset_name(c.dataset), chosen, f"{content['value']:.4f}{mark}",
                          f"{content['ft_value']:.4f}" if "ft_value" in content else "", str(len(content["trials"])),
                          str(content["grid_points"]), f"{updates['spent'] / updates['budget']:.0%}",
                          "as before" if result.status == "kept" else "")
    print_table(table)
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
