"""Memory: keeping freed blocks, reading the process's peak, and how much there is."""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@functools.cache
def keep_freed_blocks() -> None:
    """Let glibc keep freed memory instead of returning it to the system at once. A round allocates the same few
    megabytes again and again; getting fresh pages for them each time costs a third of a round. Blocks of 256 MiB, whose
    pages are a small part of what is done with them, go back. Does nothing on other C libraries."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    mallopt(_M_MMAP_THRESHOLD, 1 << 28) or mallopt(_M_MMAP_THRESHOLD, 1 << 25)  # older ones take no more


def give_back_freed_blocks() -> None:
    """Return freed memory to the system, where ``keep_freed_blocks`` has kept some that nothing of the same size will
    need again. Does nothing on other C libraries."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        pass


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
    """Give freed memory back and count the peak anew, so that a process can say the peak of its second run. Does
    nothing on systems that cannot; the peak is then that of all the process's runs."""
    gc.collect()
    give_back_freed_blocks()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


@dataclass(frozen=True)
class Available:
    """Memory that can still be had."""

    bytes: int  # how much
    limit: str  # what ends it, in words


def available(device: torch.device, root: Path = Path("/")) -> Available | None:
    """Memory left on a device: of a GPU what is free on it; otherwise the least of what the system can give without
    swapping, and what each of the process's control groups and its limit of addresses (``ulimit -v``) still allow. None
    where the system does not say. ``root``: where ``proc`` and ``sys`` are."""
    if device.type == "cuda":
        import torch
        free = torch.cuda.mem_get_info(device)[0]
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Available(free + held, "free on the GPU")
    limits = []
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            limits.append(Available(int(line.split()[1]) << 10, "available on this machine"))
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names, base = ("memory.max", "memory.current", ""), root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if (left := _left_in(group, *names)) is not None:
                limits.append(left)
            if group == base:
                break
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        for line in _lines(root / "proc/self/statm"):
            left = max(most - int(line.split()[0]) * resource.getpagesize(), 0)
            limits.append(Available(left, f"of this process's limit of {in_gib(most)}, see ulimit -v"))
    return min(limits, key=lambda left: left.bytes, default=None)


def _left_in(group: Path, limit: str, used: str, prefix: str) -> Available | None:
    """What a control group still allows, counting files it only keeps in memory as free, also those that were read
    several times, as a prepared stream; None without a limit. ``prefix``: of the names of its statistics."""
    cached = [f"{prefix}{which}_file" for which in ("inactive", "active")]
    most, now = ("".join(_lines(group / name)).strip() for name in (limit, used))
    if not (most.isdecimal() and now.isdecimal()):  # none, or "max"
        return None
    files = sum(int(line.split()[1]) for line in _lines(group / "memory.stat") if line.split()[0] in cached)
    left = max(int(most) - int(now) + files, 0)
    return Available(left, f"of this process's limit of {in_gib(int(most))}")


def in_gib(number: float) -> str:
    """Bytes for people: in GiB, or in MiB where these would be a hundredth or none."""
    return f"{number / (1 << 30):.2f} GiB" if number >= 10 << 20 else f"{number / (1 << 20):.2f} MiB"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
