"""What long work shows on standard error: a run's blocks and rounds, and bars for data."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn

from ..training.strategies import Strategy, meaning_of
from ..data.stream import Stream
from ..federation.parts import Progress
from ..core.text import for_terminal
from ..runs.config import RunConfig


class Display:
    """A progress bar per block with the validation metric and the time left; a line per finished block.

    The time left assumes that every block uses all its rounds, so it is an upper bound. ``verbose`` also says how
    clients are trained.
    """

    def __init__(self, config: RunConfig, quiet: bool = False, verbose: bool = False):
        self._config, self._quiet, self._verbose = config, quiet, verbose
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        self._bar = Bar(TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
                        TextColumn("{task.fields[status]}"), console=self._console, transient=True,
                        refresh_per_second=5, disable=quiet or not self._console.is_terminal)
        self._task = self._block = None

    def __enter__(self) -> "Display":
        self._bar.start()
        if not self._quiet:
            c = self._config
            self._console.print(f"{c.method.name} on {c.backbone.name}, {c.source.name}, seed {c.seed}")
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def warn(self, message: str) -> None:
        """Show a line even when quiet."""
        self._console.print(f"  {for_terminal(message)}")

    def note(self, message: str) -> None:
        """Show a line unless quiet."""
        if not self._quiet:
            self._console.print(f"  {for_terminal(message)}")

    @contextmanager
    def counting(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar for work before the first round; yields what is to be called with the number of things done."""
        task = self._bar.add_task(f"  {label}", total=total, status="")
        yield lambda count: self._bar.update(task, advance=count)
        self._bar.remove_task(task)

    def update(self, stream: Stream, progress: Progress) -> None:
        """Show the state after a round; does nothing for the call after a whole step."""
        if progress.fraction_done:
            return self._update_round(progress)
        if stream.domains:
            return self._update_domains(stream, progress)
        if self._quiet or not progress.curve or (progress.round == 0 and not progress.trained):
            return
        step, rounds = progress.step, self._config.server.rounds
        metric = self._config.evaluation.valid_metric
        if self._block != step:
            self._block, self._began, self._first = step, time.perf_counter(), progress.round - 1
            if self._task is not None:
                self._bar.remove_task(self._task)
            if self._verbose:
                way = progress.ways[step]
                self._console.print(f"  block {step}: clients are trained '{way}' ({meaning_of(way)})")
            self._task = self._bar.add_task(f"  block {step} of 0-{len(stream.steps) - 1}", total=rounds, status="")
        done = progress.round - self._first
        per_round = (time.perf_counter() - self._began) / max(done - 1, 1) if done > 1 else 0.0
        size = stream.steps[step].interactions
        later = sum(s.interactions for s in stream.steps[step + 1:]) / size
        left = per_round * (rounds - progress.round + rounds * later)
        valid = [row["valid"] for row in progress.curve if row["step"] == step and not math.isnan(row["valid"])]
        self._bar.update(self._task, completed=progress.round, status=(
            (f"validation {metric} {valid[-1]:.4f}, best {progress.best_value:.4f}" if valid else "not validated yet")
            + (f", at most {int(left) // 60}:{int(left) % 60:02d} left" if left else "")))
        if progress.trained:
            seconds = sum(row["train_seconds"] + row["evaluate_seconds"] for row in progress.curve
                          if row["step"] == step)
            self._console.print(f"  block {step}: {progress.round} rounds in {seconds:.1f} s, "
                                f"best validation {metric} {progress.best_value:.4f} "
                                f"in round {progress.best_round(step, self._config.server.best_round)}"
                                + ("; tested is the last" if self._config.server.tested_round == "last" else ""))

    def _update_domains(self, stream: Stream, progress: Progress) -> None:
        """Show the state of all domains after a round, and each one's best round when all have ended."""
        if self._quiet or not progress.curve or (progress.round == 0 and not progress.trained):
            return
        self._begin_domains(progress.step)
        metric, first = self._config.evaluation.valid_metric, progress.step * stream.per_step
        last = {row["step"]: row["valid"] for row in progress.curve if not math.isnan(row["valid"])}
        self._bar.update(self._task, completed=progress.round, status=f"validation {metric} " + ", ".join(
            f"{part.name} {last[unit]:.4f}" for unit, part in enumerate(stream.domains, first) if unit in last))
        for unit in range(first, first + stream.per_step) if progress.trained else ():
            rows = [row for row in progress.curve if row["step"] == unit]
            best = progress.best_round(unit, self._config.server.best_round)
            seconds = sum(row["train_seconds"] + row["evaluate_seconds"] for row in rows)
            name = stream.name_of(unit).removeprefix("domain ").replace("'", "")
            self._console.print(f"  {name}: {len(rows)} rounds in {seconds:.1f} s, best validation {metric} "
                                f"{rows[best - 1]['valid']:.4f} in round {best}"
                                + ("; tested is the last" if self._config.server.tested_round == "last" else ""))

    def _begin_domains(self, step: int) -> None:
        if self._block == step:
            return
        if self._verbose and self._block is None:
            self._console.print(f"  topology {self._config.stream.topology}: {Strategy.DOMAINS.meaning}")
        self._block, self._began, self._first = step, time.perf_counter(), 0
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("  domains", total=self._config.server.rounds, status="")

    def _update_round(self, progress: Progress) -> None:
        """Show how far a long round has come."""
        if self._quiet:
            return
        step, rounds = progress.step, self._config.server.rounds
        if self._config.stream.of_domains:
            self._begin_domains(step)
        if self._block != step:
            self._block, self._began, self._first = step, time.perf_counter(), progress.round
            self._task = self._bar.add_task(f"  block {step}", total=rounds, status="")
        one = progress.curve and not self._config.stream.of_domains  # is validated
        best = f", best validation {progress.best_value:.4f}" if one else ""
        self._bar.update(self._task, completed=progress.round, status=f"round {progress.round + 1}: "
                         f"{progress.fraction_done:.0%}{best}")
