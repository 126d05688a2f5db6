"""Compiled inner loops for the processor (``kernels.c``), and PyTorch's own operations where there are none.

The C compiler of the machine makes them when they are first needed, in about a second, and keeps them in the user's
cache by their source and processor. Without a compiler, on a GPU, or with ``FEDCL_BENCH_KERNELS=0`` the callers do the
same in PyTorch: integers to the bit, floating-point numbers up to rounding. Calls release Python's lock, so that
threads run side by side.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "kernels_real.h"))
# No contraction of products and sums: results do not depend on the processor.
_FLAGS = "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"
_NATIVE = "-march=native", "-mcpu=native", ""  # for this processor, as far as the compiler can
SWITCH = "FEDCL_BENCH_KERNELS"


class NoKernels(Exception):
    """Why there are none."""


def _processor() -> str:
    """What decides which instructions may be used."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))
    except OSError:
        return platform.processor()


def _compiler() -> str:
    found = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        raise NoKernels("no C compiler found (cc, gcc or clang, or the environment variable CC)")
    if platform.system() == "Darwin" and subprocess.run(["xcode-select", "-p"], capture_output=True).returncode:
        raise NoKernels("no C compiler found: install Apple's with `xcode-select --install`")  # cc would open a window
    return found


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcl_bench"


def _build(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    compiler, said = _compiler(), ""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # others may be at it at the same time
        made = Path(folder) / target.name
        for native in _NATIVE:
            command = [*compiler.split(), *_FLAGS, *filter(None, [native]), str(_SOURCES[0]), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                os.replace(made, target)
                return
            said = said or done.stderr.strip()
    raise NoKernels(f"{compiler} failed: {said[-500:]}")


@functools.cache
def _loaded() -> ctypes.CDLL | NoKernels:
    if os.environ.get(SWITCH, "") == "0":
        return NoKernels(f"switched off by {SWITCH}=0")
    if platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        return NoKernels(f"not tried on {platform.machine()}")
    try:
        parts = [*(source.read_bytes() for source in _SOURCES), " ".join(_FLAGS).encode(), _processor().encode()]
        target = _cache() / f"kernels-{hashlib.blake2b(b'|'.join(parts), digest_size=12).hexdigest()}.so"
        try:
            return ctypes.CDLL(str(target))
        except OSError:  # not there, or not whole
            _build(target)
            return ctypes.CDLL(str(target))
    except NoKernels as why:
        return why
    except (OSError, RuntimeError) as error:
        return NoKernels(str(error))


def why_not() -> str | None:
    """Why there are no compiled kernels here; None: there are."""
    found = _loaded()
    return str(found) if isinstance(found, NoKernels) else None


def serve(tensor: Tensor) -> bool:
    """Whether there are kernels for tensors like this one."""
    return tensor.device.type == "cpu" and why_not() is None


def _call(name: str, *arguments: Tensor | int | None) -> int:
    """A function of ``kernels.c``; tensors, which have to be contiguous, are passed by address and numbers as int64."""
    passed = []
    for argument in arguments:
        if isinstance(argument, int):
            passed.append(ctypes.c_int64(argument))
        elif argument is None:
            passed.append(ctypes.c_void_p())
        elif argument.is_contiguous():
            passed.append(ctypes.c_void_p(argument.data_ptr()))
        else:
            raise ValueError(f"{name}: a tensor of shape {tuple(argument.shape)} is not contiguous")
    return getattr(_loaded(), name)(*passed)


def _real(name: str, tensor: Tensor) -> str:
    return f"{name}_{ {torch.float32: 'float', torch.float64: 'double'}[tensor.dtype]}"


def negatives(keys: Tensor, own: Tensor, others: Tensor, listed: Tensor | None, start: Tensor | None,
              gaps: Tensor | None, positives: Tensor, n: int) -> Tensor:
    """The first ``own`` of ``n`` draws from each client's other items, then its first positive.

    Args:
        keys: of the clients' streams, shape (C,).
        own: how many each needs, shape (C,).
        others, listed, start, gaps: ``count``, ``items``, ``start`` and ``gaps`` of ``sampling.Others``.
        positives: shape (C, P).

    Returns:
        int64 of shape (C, n).
    """
    result = positives.new_empty(len(keys), n)
    _call("negatives", keys, own, others, listed, start, None if gaps is None else gaps.contiguous(),
          0 if gaps is None else gaps.shape[1], positives, positives.shape[1], len(keys), n, result)
    return result


def group(keys: Tensor, shift: Tensor, first: int, valid: Tensor, slots: Tensor | None, size: int) -> Tensor:
    """Each client's samples, or their slots, by local batch: the b-th of ``size`` is that of the b-th smallest keys.

    Args:
        keys: of the clients' streams, shape (C,). A sample's own key is number j of the stream, for the j-th sample of
            the chunk, j + ``shift`` (C,) from number ``first`` on.
        valid: which samples are a client's own, shape (C, n).
        slots: of the samples, int64 of shape (C, n); None: their numbers.

    Returns:
        int32 of shape (C, n), padded with -1; within a local batch, in the order of samples.

    Raises:
        MemoryError: if there is none.
    """
    result = torch.empty(valid.shape, dtype=torch.int32)
    if _call("group", keys, shift, first, valid.contiguous(), None if slots is None else slots.contiguous(), len(keys),
             valid.shape[1], size, result):
        raise MemoryError(f"no memory to shuffle {valid.shape[1]:,} samples")
    return result


def batch_weights(order: Tensor, start: int, end: int, share: Tensor, n_slots: int) -> Tensor:
    """Slots' weights in a local batch: ``share`` (C,) for each time that they stand in columns ``start`` to ``end`` of
    ``order`` (see ``group``): shape (C, n_slots)."""
    result = share.new_empty(len(order), n_slots)
    _call(_real("batch_weights", share), order, start, min(end, order.shape[1]), share, len(order), order.shape[1],
          n_slots, result)
    return result


def first_slots(items: Tensor, n_items: int) -> Tensor:
    """As ``trainer.first_slots``."""
    result = torch.empty_like(items, memory_format=torch.contiguous_format)
    _call("first_slots", items.contiguous(), *items.shape, torch.full((n_items,), -1, dtype=torch.int32), result)
    return result


def weighted_bce(scores: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """As ``functional.weighted_bce``, in single precision: (losses of shape (C,), their slopes of shape (C, n))."""
    loss, slopes = scores.new_empty(len(scores)), torch.empty_like(scores, memory_format=torch.contiguous_format)
    _call("weighted_bce", scores.contiguous(), targets.contiguous(), weights.contiguous(), *scores.shape, loss, slopes)
    return loss, slopes


def row_products(table: Tensor, items: Tensor, vectors: Tensor, constants: Tensor | None) -> Tensor:
    """Inner products of each client's vector, (C, d), with rows ``items`` (C, n) of a table, plus constants (C,)."""
    result = table.new_empty(items.shape)
    _call(_real("row_products", table), table, items, vectors.contiguous(), constants, *items.shape, table.shape[1],
          result)
    return result


def row_sums(table: Tensor, items: Tensor, factors: Tensor) -> Tensor:
    """Sums of rows ``items`` (C, n) of a table, times ``factors`` (C, n): shape (C, d)."""
    result = table.new_empty(len(items), table.shape[1])
    _call(_real("row_sums", table), table, items, factors.contiguous(), *items.shape, table.shape[1], result)
    return result


def add_products(table: Tensor, items: Tensor, factors: Tensor, vectors: Tensor) -> None:
    """Add each client's vector, (C, d), times ``factors`` (C, n) to rows ``items`` (C, n) of a table, in order."""
    _call(_real("add_products", table), table, items, factors.contiguous(), vectors.contiguous(), *items.shape,
          table.shape[1])
