"""Time for people: how long something took, and whether a line of progress is due."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Callable

REPORT_EVERY = 60.0  # seconds between lines of progress where there is no terminal, as in logs of a cluster


_IMPORTED = time.perf_counter()


def since_start() -> float:
    """Seconds since this process began; since this module was imported where the system does not say."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED


class EveryMinute:
    """Whether a minute has passed since it was last so, or since the beginning; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._last = clock, clock()

    def __call__(self) -> bool:
        due = self._clock() - self._last >= REPORT_EVERY
        self._last = self._clock() if due else self._last
        return due


def duration(seconds: float) -> str:
    """Seconds as 1:02:03, 2:03 or 0:03."""
    minutes, rest = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
