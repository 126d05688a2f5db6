"""Process memory: keeping freed blocks, and reading the peak."""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@functools.cache
def keep_freed_blocks() -> None:
    """Let glibc keep freed memory instead of returning it to the system at once.

    A round allocates the same few megabytes again and again; getting fresh pages for them each time costs a third of
    a round. Does nothing on other C libraries.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)


def peak_mib() -> float:
    """The most memory this process has held since it began, or since ``reset_peak``, in MiB."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / (1 << 10)
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def reset_peak() -> None:
    """Give freed memory back and count the peak anew, so that a process can say the peak of its second run.

    Does nothing on systems that cannot; the peak is then that of all the process's runs.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError, TypeError):
        pass
