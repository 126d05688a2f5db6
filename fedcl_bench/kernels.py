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
from dataclasses import dataclass
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
            command = [*compiler.split(), *_FLAGS, *filter(None, [native]), str(_SOURCES[0]), "-o", str(made), "-lm"]
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


@dataclass(frozen=True)
class _Rows:
    """A tensor whose rows may lie apart."""

    of: Tensor


def _call(name: str, *arguments: Tensor | _Rows | tuple[Tensor, ...] | int | None) -> int:
    """A function of ``kernels.c``; tensors, which have to be contiguous, are passed by address and numbers as int64."""
    def address(tensor: Tensor) -> int:
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: a tensor of shape {tuple(tensor.shape)} is not contiguous")
        return tensor.data_ptr()

    passed = []
    for argument in arguments:
        if isinstance(argument, int):
            passed.append(ctypes.c_int64(argument))
        elif argument is None:
            passed.append(ctypes.c_void_p())
        elif isinstance(argument, _Rows):
            passed.append(ctypes.c_void_p(argument.of.data_ptr()))
        elif isinstance(argument, tuple):
            passed.append((ctypes.c_void_p * len(argument))(*map(address, argument)))
        else:
            passed.append(ctypes.c_void_p(address(argument)))
    return getattr(_loaded(), name)(*passed)


def _real(name: str, tensor: Tensor) -> str:
    return f"{name}_{ {torch.float32: 'float', torch.float64: 'double'}[tensor.dtype]}"


def negatives(keys: Tensor, own: Tensor, others: Tensor, listed: Tensor | None, start: Tensor | None,
              gaps: Tensor | None, positives: Tensor, result: Tensor) -> None:
    """The first ``own`` draws from each client's other items, then its first positive.

    Args:
        keys: of the clients' streams, shape (C,).
        own: how many each needs, shape (C,).
        others, listed, start, gaps: ``count``, ``items``, ``start`` and ``gaps`` of ``sampling.Others``.
        positives: shape (C, P).
        result: int64 of shape (C, n), written to; its rows may lie apart.
    """
    if result.stride(1) != 1:
        raise ValueError("negatives: the numbers of a row have to lie together")
    _call("negatives", keys, own, others, listed, start, None if gaps is None else gaps.contiguous(),
          0 if gaps is None else gaps.shape[1], positives, positives.shape[1], *result.shape, _Rows(result),
          result.stride(0))


def padded(indptr: Tensor, values: Tensor, users: Tensor, fill: Tensor | None, width: int) -> Tensor:
    """As ``sampling.padded``, of lists that ``stream.Ragged`` describes; ``fill``: (C, 1). int64 of shape (C, width)."""
    result = users.new_empty(len(users), width)
    _call("padded", indptr, values, users.contiguous(), None if fill is None else fill.contiguous(), len(users), width,
          result)
    return result


def gaps(ascending: Tensor, n_items: int) -> tuple[Tensor, Tensor]:
    """``gaps`` and ``count`` of ``sampling.Others``, given each client's positives in ascending order, (C, P)."""
    result, count = torch.empty_like(ascending), ascending.new_empty(len(ascending), 1)
    _call("gaps", ascending, *ascending.shape, n_items, result, count)
    return result, count


def group(keys: Tensor, head: int, head_own: Tensor | None, tail_own: Tensor, slots: Tensor | None, n: int,
          size: int) -> Tensor:
    """Each client's samples, or their slots, by local batch: the b-th of ``size`` is that of the b-th smallest keys.

    Args:
        keys: of the clients' streams, shape (C,); the key of a client's own i-th sample is the stream's i-th number.
        head, head_own: in how many columns positives lie, and how many of these are a client's own, (C,); None: none.
        tail_own: how many of the columns after that are its own, (C,).
        slots: of the samples, int64 of shape (C, n); None: their columns.

    Returns:
        int32 of shape (C, n), padded with -1; within a local batch, in the order of samples.

    Raises:
        MemoryError: if there is none.
    """
    result = torch.empty(len(keys), n, dtype=torch.int32)
    if _call("group", keys, head, head_own, tail_own, None if slots is None else slots.contiguous(), len(keys), n, size,
             result):
        raise MemoryError(f"no memory to shuffle {n:,} samples")
    return result


@dataclass(frozen=True)
class Members:
    """The samples of a local batch.

    Attributes:
        order: slots by local batch (see ``group``), (C, n).
        start, end: the columns of this one.
        share: a sample's weight, (C, 1).
        n_slots: how many slots there are.
    """

    order: Tensor
    start: int
    end: int
    share: Tensor
    n_slots: int

    def weights(self) -> Tensor:
        """Of all slots: a sample's weight for each time that they are in the batch, (C, slots)."""
        (clients, n), result = self.order.shape, self.share.new_empty(len(self.order), self.n_slots)
        _call(_real("batch_weights", self.share), self.order, self.start, min(self.end, n), self.share, clients, n,
              self.n_slots, result)
        return result


def first_slots(items: Tensor, n_items: int) -> tuple[Tensor, Tensor]:
    """As ``trainer.first_slots``."""
    items, result = items.contiguous(), torch.empty_like(items, memory_format=torch.contiguous_format)
    is_first = torch.empty(items.shape, dtype=torch.bool)
    _call("first_slots", items, *items.shape, torch.full((n_items,), -1, dtype=torch.int32), result, is_first)
    return result, is_first


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


def add_outer(table: Tensor, items: Tensor | None, steps: tuple[Tensor, ...], vectors: tuple[Tensor, ...],
              members: tuple[Members | None, ...]) -> None:
    """Add clients' steps times vectors to rows of a table, client by client.

    Args:
        table: (items, d).
        items: of each client's slots, (C, slots); None: all, in order.
        steps, vectors: of each update, (C, slots) and (C, d).
        members: the only slots for which an update has steps, if known.
    """
    if not len(steps) == len(vectors) == len(members):
        raise ValueError(f"add_outer: {len(steps)} steps, {len(vectors)} vectors, {len(members)} local batches")
    orders = [some.order for some in members if some is not None]
    if any(order is not orders[0] for order in orders):  # of several epochs
        orders, members = [], (None,) * len(steps)
    n = orders[0].shape[1] if orders else 0
    starts, ends = (torch.tensor([-1 if some is None else value(some) for some in members])
                    for value in (lambda some: some.start, lambda some: min(some.end, n)))
    if _call(_real("add_outer", table), table, items, orders[0] if orders else None, len(steps), starts, ends, steps,
             tuple(v.contiguous() for v in vectors), *steps[0].shape, n, table.shape[1]):
        raise MemoryError(f"no memory for {steps[0].shape[1]:,} slots")


def inner_batch(table: Tensor, items: Tensor | None, vectors: Tensor, constants: Tensor | None,
                steps: tuple[Tensor, ...], past: tuple[Tensor, ...], members: Members, positive: Tensor,
                to_vectors: bool, to_constants: bool,
                to_rows: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Cross-entropy of a local batch whose logits are inner products, and its gradients.

    Args:
        table: item rows, (items, d).
        items: of each client's slots, (C, slots); None: all, in order.
        vectors, constants: a logit is the client's vector (C, d) times the item's row, plus its constant (C, 1).
        steps, past: by what updates so far have moved the clients' rows: a step (C, slots) times a vector (C, d) each.
        positive: whether a slot's item is a positive, (slots,) or (C, slots).
        to_vectors, to_constants, to_rows: which gradients are needed.

    Returns:
        losses (C,); gradients of the vectors (C, d), of the constants (C, 1), and of the slots' logits (C, slots).
    """
    (clients, d), (_, n) = vectors.shape, members.order.shape
    loss = vectors.new_empty(clients)
    made = (vectors.new_empty(clients, d) if to_vectors else None,
            vectors.new_empty(clients, 1) if to_constants else None,
            vectors.new_empty(clients, members.n_slots) if to_rows else None)
    if _call(_real("inner_batch", table), table, items, members.n_slots, vectors, constants, len(steps), steps, past,
             members.order, members.start, min(members.end, n), members.share, positive,
             members.n_slots if positive.dim() == 2 else 0, clients, n, d, loss, *made):
        raise MemoryError(f"no memory for {len(steps):,} updates")
    return loss, *made


def ranks(scores: Tensor, items: Tensor) -> Tensor:
    """As ``distillation.ranks_of``."""
    result = torch.empty_like(items, memory_format=torch.contiguous_format)
    _call(_real("ranks", scores), scores.contiguous(), items.contiguous(), *scores.shape, items.shape[1], result)
    return result
