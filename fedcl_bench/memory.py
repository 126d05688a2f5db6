"""Process memory: keeping freed blocks, and reading the peak."""

from __future__ import annotations

import ctypes
import functools
import resource
import sys

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
    """The most memory this process has held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
