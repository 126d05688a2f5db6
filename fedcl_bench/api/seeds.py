"""The seeds of one ``run``: the stream that they share, their execution, and their mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from ..core.parallel import threads_for
from ..data.datasets import events_note, load_stream, masked_note, thin_note
from ..data.items.features import Callbacks, notes as notes_of
from ..data.stream import Stream
from ..evaluation.ranking import few_candidates_note
from ..evaluation.session_ranking import repeated_note
from ..federation import cold_start
from ..federation.parts import Progress, numbers_at_once
from ..runs.config import RunConfig, setting_notes
from ..runs.logs import RunLog, Target
from ..runs.runner import Engine, RunOptions, Watch, execute
from ..runs.specs import Layers
from .progress_bars import Display


@dataclass
class Execution:
    """How the seeds of a run are run, and the stream that they share; no number depends on it."""

    # As for ``execute`` and its ``Watch``.
    results: Path
    stop: Callable[[], bool]
    rerun: bool = False
    save_lists: bool = False
    # As for ``Display``.
    quiet: bool = False
    verbose: bool = False
    logs: Sequence[Target] = ()  # as ``runs/logs.py`` makes them of ``--log``
    load_data: Callable[[RunConfig, Display], Stream] | None = None  # None: from the dataset's file
    # Makes what trains a run, given its configuration and where to warn.
    engine_of: Callable[[RunConfig, Callable[[str], None]], Engine] = lambda config, warn: Engine()
    threads: int | None = None  # of PyTorch; None: chosen by the size of the work
    stream: Stream | None = None  # loaded and checked for the first seed that is not finished yet

    def load(self, config: RunConfig, display: Display) -> Stream:
        """The stream of a configuration and of those that differ in their seed; what they have in common is noted the
        first time. Raises UserError if the dataset cannot be read, or does not fit the method or the backbone."""
        if self.stream is None:
            self.stream = self.load_data(config, display) if self.load_data else load_stream(
                config.source, config.stream, config.features, Callbacks(display.warn, display.counting))
            federation = config.federation(self.stream)
            config.check(federation)
            if self.threads is None:
                torch.set_num_threads(threads_for(numbers_at_once(federation), torch.get_num_threads()))
            users = federation.server.attendance.of(self.stream.steps[0], federation.seed, 0).users
            for text in (*federation.backbone.notes(), *federation.method.notes(len(users)),
                         *cold_start.notes(federation)):
                display.warn(text)
            for text in (*notes_of(self.stream), thin_note(self.stream, config.stream),
                         events_note(config.source, config.stream),
                         masked_note(self.stream) if self.load_data is None else "",  # a server knows sizes alone
                         repeated_note(self.stream.steps[0], config.evaluation),
                         few_candidates_note(self.stream.steps, config.evaluation)):
                if text:
                    display.note(text)
        return self.stream


def run_seeds(configs: Sequence[RunConfig], overrides: Layers, execution: Execution) -> list[dict[str, Any]]:
    """Run every seed of one combination, or take its record, with progress on standard error; what ``execute`` returns,
    per seed, and its errors. ``overrides``: what the user set, for notes on settings without effect."""
    def run(config: RunConfig) -> dict[str, Any]:
        with Display(config, execution.quiet, execution.verbose) as display, RunLog(config, execution.logs) as log:
            for text in setting_notes(config, overrides) if config is configs[0] else ():
                display.warn(text)

            def update(loaded: Stream, progress: Progress) -> None:
                display.update(loaded, progress)
                log.update(progress)

            done = execute(config, lambda: execution.load(configs[0], display), execution.results,
                           Watch(update, display.warn, display.note, execution.stop),
                           RunOptions(execution.rerun, execution.engine_of(config, display.warn), execution.save_lists))
            log.finish(Path(done["record"]))
        return done
    before = torch.get_num_threads()
    try:
        return [run(config) for config in configs]
    finally:
        torch.set_num_threads(before)


def combined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several seeds as one result: means and sample standard deviations (0 for a single seed)."""
    def deviation(values: Iterable[float]) -> float:
        values = list(values)
        return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0

    metrics = {}
    for name in (name for name in results[0]["metrics"] if all(name in result["metrics"] for result in results)):
        blocks = np.array([result["metrics"][name]["per_block"] for result in results])
        averages = [result["metrics"][name]["avg_incremental"] for result in results]
        several = averages[0] is not None
        metrics[name] = {"per_block": blocks.mean(0).tolist(), "per_block_std": [deviation(b) for b in blocks.T],
                         "avg_incremental": float(np.mean(averages)) if several else None,
                         "avg_incremental_std": deviation(averages) if several else None}
    first = results[0]
    means = {name: _mean_of([result[name] for result in results])
             for name in ("continual", "rounds", "stages", "seconds", "lists", "groups")
             if all(name in result for result in results)}
    common = ("method", "backbone", "dataset", "device", "settings", "tested", "environment", "record", "seed")
    return {**means, **{key: first[key] for key in common}, "metrics": metrics,
            "seeds": [result["seed"] for result in results],
            "peak_memory_mib": max(result["peak_memory_mib"] for result in results),
            "reused": all(result["reused"] for result in results), "runs": results}


def _mean_of(parts: list[Any]) -> Any:
    """The mean of numbers at the same place of nested mappings and lists, if all have it; None where one is None."""
    if isinstance(parts[0], Mapping):
        return {name: _mean_of([part[name] for part in parts]) for name in parts[0]
                if all(name in part for part in parts)}
    if isinstance(parts[0], list):
        return [_mean_of(list(values)) for values in zip(*parts)]
    return None if any(part is None for part in parts) else float(np.mean(parts))
