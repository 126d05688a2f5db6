"""The seeds of one ``run``: the stream that they share, their execution, and their mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from ..data.datasets import load_stream, thin_note
from ..data.features import Callbacks, notes as notes_of
from ..data.stream import Stream
from ..federation import cold_start
from ..federation.parts import Federation, Progress
from ..runs.config import RunConfig, inactive_notes
from ..runs.logs import RunLog, Target
from ..runs.runner import Engine, Watch, execute
from ..runs.specs import Layers
from .progress_bars import Display


class SharedStream:
    """The stream of all seeds, loaded and checked for the first of them that is not finished yet.

    Args:
        check: raises UserError if the run cannot be done by what does it.
    """

    def __init__(self, config: RunConfig, check: Callable[[Federation], None] | None = None):
        self.config, self.check = config, check
        self.stream: Stream | None = None

    def load(self, note: Callable[[str], None], hearing: Callbacks = Callbacks()) -> Stream:
        """The stream; ``note`` is told, the first time, what all seeds have in common.

        Raises:
            UserError: if the dataset cannot be read, or does not fit the method, the backbone or the shards.
        """
        if self.stream is None:
            self.stream = load_stream(self.config.source, self.config.stream, self.config.features, hearing)
            federation = self.config.federation(self.stream)
            self.config.check(federation)
            if self.check is not None:
                self.check(federation)
            users = federation.server.attendance.of(self.stream.steps[0], federation.seed, 0).users
            for text in (*federation.backbone.notes(), *federation.method.notes(len(users)),
                         *cold_start.notes(federation), *notes_of(self.stream),
                         thin_note(self.stream, self.config.stream)):
                if text:
                    note(text)
        return self.stream


@dataclass(frozen=True)
class Execution:
    """How seeds are run; no number depends on it.

    Attributes:
        results, stop, rerun: as for ``execute`` and its ``Watch``.
        quiet, verbose: as for ``Display``. logs: as ``runs/logs.py`` makes them of ``--log``.
        engine_of: makes what trains a run, given its configuration and where to warn.
    """

    results: Path
    stop: Callable[[], bool]
    rerun: bool = False
    quiet: bool = False
    verbose: bool = False
    logs: Sequence[Target] = ()
    engine_of: Callable[[RunConfig, Callable[[str], None]], Engine] = lambda config, warn: Engine()


def run_seeds(configs: Sequence[RunConfig], overrides: Layers, stream: SharedStream,
              execution: Execution) -> list[dict[str, Any]]:
    """Run every seed, or take its record, with progress on standard error.

    Args:
        configs: of one combination, one per seed.
        overrides: what the user set, for notes on settings without effect.

    Returns:
        What ``execute`` returns, per seed; its errors too.
    """
    return [_run(config, overrides, stream, execution, notes=config is configs[0]) for config in configs]


def _run(config: RunConfig, overrides: Layers, stream: SharedStream, execution: Execution, notes: bool
         ) -> dict[str, Any]:
    """One run with its progress.

    Args:
        notes: say which settings are without effect.
    """
    with Display(config, execution.quiet, execution.verbose) as display, RunLog(config, execution.logs) as log:
        for text in inactive_notes(config, overrides) if notes else ():
            display.note(text)

        def update(loaded: Stream, progress: Progress) -> None:
            display.update(loaded, progress)
            log.update(progress)

        watch = Watch(update, display.warn, display.note, execution.stop)
        engine = execution.engine_of(config, display.warn)
        hearing = Callbacks(display.warn, display.counting)
        done = execute(config, lambda: stream.load(display.note, hearing), execution.results, watch,
                       rerun=execution.rerun, engine=engine)
        log.finish(Path(done["record"]))
    return done


def combined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several seeds as one result: means and sample standard deviations (0 for a single seed)."""
    def deviation(values: Iterable[float]) -> float:
        values = list(values)
        return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0

    metrics = {}
    for name in results[0]["metrics"]:
        blocks = np.array([result["metrics"][name]["per_block"] for result in results])
        averages = [result["metrics"][name]["avg_incremental"] for result in results]
        several = averages[0] is not None
        metrics[name] = {"per_block": blocks.mean(0).tolist(), "per_block_std": [deviation(b) for b in blocks.T],
                         "avg_incremental": float(np.mean(averages)) if several else None,
                         "avg_incremental_std": deviation(averages) if several else None}
    first = results[0]
    means = {name: _mean_of([result[name] for result in results])
             for name in ("continual", "rounds", "seconds", "lists", "groups") if all(name in r for r in results)}
    common = ("method", "backbone", "dataset", "device", "settings", "tested", "environment", "record", "seed")
    return {**means, **{key: first[key] for key in common}, "metrics": metrics,
            "seeds": [result["seed"] for result in results],
            "peak_memory_mib": max(result["peak_memory_mib"] for result in results),
            "reused": all(result["reused"] for result in results), "runs": results}


def _mean_of(parts: list[Any]) -> Any:
    """The mean of numbers at the same place of nested mappings and lists; None where one of them is None."""
    if isinstance(parts[0], Mapping):
        return {name: _mean_of([part[name] for part in parts]) for name in parts[0]}
    if isinstance(parts[0], list):
        return [_mean_of(list(values)) for values in zip(*parts)]
    return None if any(part is None for part in parts) else float(np.mean(parts))
