"""What long work shows on standard error: a run's blocks and rounds, and bars for data."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TaskID, TextColumn

from ..training.strategies import Strategy, meaning_of
from ..data.stream import Stream
from ..plugin.silo import Stage
from ..federation.parts import STAGE, Progress
from ..core.clock import EveryMinute, duration
from ..core.text import for_terminal
from ..runs.config import RunConfig


class Display:
    """A progress bar per block with the validation metric and the time left; a line per finished block. Without a
    terminal there is a line of progress a minute instead of the bar.

    The time left assumes that every block uses all its rounds, so it is an upper bound. ``verbose`` also says how
    clients are trained. ``clock`` gives seconds.
    """

    def __init__(self, config: RunConfig, quiet: bool = False, verbose: bool = False,
                 clock: Callable[[], float] = time.perf_counter):
        self._config, self._quiet, self._verbose, self._clock = config, quiet, verbose, clock
        self._due, self._start = EveryMinute(clock), clock()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        self._bar = Bar(TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
                        TextColumn("{task.fields[status]}"), console=self._console, transient=True,
                        refresh_per_second=5, disable=quiet or not self._console.is_terminal)
        self._task = self._block = self._told = None
        self._began, self._first = 0.0, 0

    def __enter__(self) -> "Display":
        self._bar.start()
        if not self._quiet:
            c = self._config
            self._console.print(f"{c.method.name} on {c.backbone.name}, {c.source.name}, seed {c.seed}")
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def warn(self, message: str) -> None:
        self._console.print(f"  {for_terminal(message)}")

    def note(self, message: str) -> None:
        if not self._quiet:
            self._console.print(f"  {for_terminal(message)}")

    @contextmanager
    def counting(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar for work before the first round; yields what is to be called with the number of things done."""
        task = self._bar.add_task(f"  {label}", total=total, status="")

        def advance(count: int) -> None:
            self._bar.update(task, advance=count)
            self._report(task)
        yield advance
        self._bar.remove_task(task)

    def _report(self, task: TaskID) -> None:
        """Where there is no bar, a line a minute with what it would show and the time since the beginning."""
        if self._quiet or self._console.is_terminal or not self._due():
            return
        shown = self._bar.tasks[self._bar.task_ids.index(task)]
        most = "at most " * (task == self._task)  # rounds may end early
        parts = [f"{shown.description}: {shown.completed:.0f} of {most}{shown.total:.0f}", shown.fields["status"],
                 f"{duration(self._clock() - self._start)} elapsed"]
        self._console.print(", ".join(filter(None, parts)))

    def update(self, stream: Stream, progress: Progress) -> None:
        """Show the state within or after a round, and a line when a block or all domains have ended."""
        if self._quiet or not (progress.fraction_done or progress.curve):
            return
        self._advance(stream, progress)
        if self._task is not None and not progress.trained:  # the end of a block has a line of its own
            self._report(self._task)

    def _advance(self, stream: Stream, progress: Progress) -> None:
        step, metric = progress.step, self._config.evaluation.valid_metric
        if progress.fraction_done:
            best = f", best validation {progress.best_value:.4f}" if progress.curve and not stream.domains else ""
            return self._show(stream, progress, f"round {progress.round + 1}: {progress.fraction_done:.0%}{best}")
        if not (progress.round or progress.trained):
            return
        units = range(step * stream.per_step, (step + 1) * stream.per_step)
        last = {row["step"]: row["valid"] for row in progress.curve if not math.isnan(row["valid"])}
        if stream.domains:
            stage = f"{self._stage(progress.curve[-1]).name}: " if len(self._config.stages) > 1 else ""
            text = f"{stage}validation {metric} " + ", ".join(
                f"{part.name} {last[unit]:.4f}" for unit, part in zip(units, stream.domains) if unit in last)
        else:
            text = f"validation {metric} {last[step]:.4f}, best {progress.best_value:.4f}" if step in last else \
                "not validated yet"
        self._show(stream, progress, text)
        for unit in units if progress.trained else ():
            name = stream.name_of(unit) if stream.domains else f"block {unit}"
            self._ended(name.removeprefix("domain ").replace("'", ""), progress, unit)

    def _show(self, stream: Stream, progress: Progress, status: str) -> None:
        """The bar of a block or of all domains, which begins with its first round, with the time left at its end."""
        step, rounds = progress.step, self._config.rounds
        if self._block != step:
            self._block, self._began = step, self._clock()
            self._first = progress.round - (not progress.fraction_done)
            if self._task is not None:
                self._bar.remove_task(self._task)
            several = not stream.domains or len(stream.steps) > 1
            name = f"block {step} of 0-{len(stream.steps) - 1}" if several else "domains"
            self._task = self._bar.add_task(f"  {name}", total=rounds, status="")
        about = 0 if stream.domains else step  # the topology is said once
        if self._verbose and self._told != about and (stream.domains or len(progress.strategies) > step):
            self._told = about
            if stream.domains:
                said = f"topology {self._config.stream.topology}: {Strategy.DOMAINS.meaning}"
            else:
                strategy = progress.strategies[step]
                said = f"block {step}: clients are trained '{strategy}' ({meaning_of(strategy)})"
            self._console.print(f"  {said}")
        done = progress.round - self._first
        if done > 1:
            later = sum(s.interactions for s in stream.steps[step + 1:]) / stream.steps[step].interactions
            left = (self._clock() - self._began) / (done - 1) * (rounds - progress.round + rounds * later)
            status += f", at most {duration(left)} left"
        self._bar.update(self._task, completed=progress.round, status=status)

    def _stage(self, row: Mapping[str, Any]) -> Stage:
        return self._config.stages[row.get(STAGE, 0)]

    def _ended(self, name: str, progress: Progress, step: int) -> None:
        server = self._config.server
        rows = [row for row in progress.curve if row["step"] == step]
        best = progress.best_round(step, server.best_round)
        seconds = sum(row["train_seconds"] + row["evaluate_seconds"] for row in rows)
        stages = Counter(self._stage(row).name for row in rows)
        parts = f" ({', '.join(f'{stage} {count}' for stage, count in stages.items())})" if len(stages) > 1 else ""
        self._console.print(f"  {name}: {len(rows)} rounds{parts} in {seconds:.1f} s, best validation "
                            f"{self._config.evaluation.valid_metric} {rows[best - 1]['valid']:.4f} in round {best}"
                            + ("; tested is the last" if server.tested_round == "last" else ""))
