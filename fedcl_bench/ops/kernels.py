"""Compiled inner loops for the processor (``kernels.c``), and PyTorch's own operations where there are none.

The C compiler of the machine makes them when they are first needed, in about three seconds, and keeps them in the user's
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
from typing import Sequence

import torch
from torch import Tensor

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "kernels_real.h"))
# No contraction of products and sums: results do not depend on the processor.
_FLAGS = "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"
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


def serve_on(device: torch.device) -> bool:
    """Whether there are kernels for tensors on a device."""
    return device.type == "cpu" and why_not() is None


def serve(tensor: Tensor) -> bool:
    """Whether there are kernels for tensors like this one."""
    return serve_on(tensor.device)


@dataclass(frozen=True)
class _Rows:
    """A tensor whose rows may lie apart."""

    of: Tensor


def _call(name: str, *arguments: Tensor | _Rows | ctypes.Array | int | float | None) -> int:
    """A function of ``kernels.c``; tensors, which have to be contiguous, are passed by address and numbers as int64 or
    double."""
    passed = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            passed.append(ctypes.c_void_p(_address(argument)))
        elif isinstance(argument, int):
            passed.append(ctypes.c_int64(argument))
        elif isinstance(argument, float):
            passed.append(ctypes.c_double(argument))
        elif argument is None:
            passed.append(ctypes.c_void_p())
        elif isinstance(argument, _Rows):
            passed.append(ctypes.c_void_p(argument.of.data_ptr()))
        else:
            passed.append(argument)
    return getattr(_loaded(), name)(*passed)


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(f"kernels: a tensor of shape {tuple(tensor.shape)} is not contiguous")
    return tensor.data_ptr()


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*map(_address, tensors))


REALS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}  # what functions of real numbers take
_SUFFIXES = {torch.float32: "float", torch.float64: "double"}


def _real(name: str, tensor: Tensor) -> str:
    """The function for numbers of a tensor's type."""
    return f"{name}_{_SUFFIXES[tensor.dtype]}"


def mixed(numbers: Tensor) -> None:
    """``draws.mix`` of every number, in its place; int64 of any shape."""
    _call("mixed", numbers, numbers.numel())


def negatives(keys: Tensor, own: Tensor, others: Tensor, gaps: Tensor, positives: Tensor, result: Tensor) -> None:
    """The first ``own`` draws from each client's other items, then its first positive.

    Args:
        keys: of the clients' streams, shape (C,).
        own: how many each needs, shape (C,).
        others, gaps: ``count`` and ``gaps`` of ``sampling.Others``.
        positives: shape (C, P).
        result: int64 of shape (C, n), written to; its rows may lie apart.

    Raises:
        MemoryError: if there is none.
    """
    if result.stride(1) != 1:
        raise ValueError("negatives: the numbers of a row have to lie together")
    if _call("negatives", keys, own, others, gaps.contiguous(), gaps.shape[1], positives, positives.shape[1],
             *result.shape, _Rows(result), result.stride(0)):
        raise MemoryError(f"no memory to draw {result.shape[1]:,} negatives")


def padded(indptr: Tensor, values: Tensor, users: Tensor, fill: Tensor | None, width: int) -> Tensor:
    """As ``sampling.padded``, of lists that ``stream.Ragged`` describes; ``fill``: (C, 1). int64 of shape (C, width)."""
    result = users.new_empty(len(users), width)
    _call("padded", indptr, values, users.contiguous(), None if fill is None else fill.contiguous(), len(users), width,
          result)
    return result


def gaps(ascending: Tensor, n_items: int) -> tuple[Tensor, Tensor]:
    """``gaps`` and ``count`` of ``sampling.Others``, given each client's positives in ascending order, (C, P)."""
    result, count = torch.empty(ascending.shape, dtype=torch.int32), ascending.new_empty(len(ascending), 1)
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


def add_outer(table: Tensor, items: Tensor | None, held: Tensor | None, steps: Tensor, vectors: Tensor) -> None:
    """Add clients' steps times vectors to rows of a table, client by client.

    Args:
        table: (items, d).
        items: of each client's slots, (C, slots); None: all, in order.
        held: how many of them, the first, have steps that are not 0, (C,); None: any may.
        steps, vectors: of each update, (C, slots, updates) and (C, updates, d).
    """
    (clients, slots, updates), d = steps.shape, table.shape[1]
    if vectors.shape != (clients, updates, d):
        raise ValueError(f"add_outer: vectors of shape {tuple(vectors.shape)}, expected {(clients, updates, d)}")
    _call(_real("add_outer", table), table, items, held, steps, vectors.contiguous(), updates, clients, slots, d)


def mean(sums: Tensor, table: Tensor, whole: float) -> None:
    """Write over sums: ``sums / whole + table``."""
    _call(_real("mean", sums), sums, table, whole, sums.numel())


def inner_batch(table: Tensor, items: Tensor | None, vectors: Tensor, constants: Tensor | None, steps: Tensor,
                past: Tensor, done: int, members: Members, positive: Tensor, to_vectors: bool, to_constants: bool,
                to_rows: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Cross-entropy of a local batch whose logits are inner products, and its gradients.

    Args:
        table: item rows, (items, d).
        items: of each client's slots, (C, slots); None: all, in order.
        vectors, constants: a logit is the client's vector (C, d) times the item's row, plus its constant (C, 1).
        steps, past, done: the first ``done`` updates have moved a client's rows, by steps (C, slots, updates) times
            vectors (C, updates, d). The slots' logits' gradients are written to the next step, if ``to_rows``.
        positive: whether a slot's item is a positive, (slots,) or (C, slots).
        to_vectors, to_constants, to_rows: which gradients are needed.

    Returns:
        losses (C,); gradients of the vectors (C, d) and of the constants (C, 1).
    """
    (clients, d), (_, n) = vectors.shape, members.order.shape
    loss = vectors.new_empty(clients)
    made = (vectors.new_empty(clients, d) if to_vectors else None,
            vectors.new_empty(clients, 1) if to_constants else None)
    if _call(_real("inner_batch", table), table, items, members.n_slots, vectors, constants, steps, past,
             steps.shape[2], done, int(to_rows), members.order, members.start, min(members.end, n), members.share,
             positive, members.n_slots if positive.dim() == 2 else 0, clients, n, d, loss, *made):
        raise MemoryError(f"no memory for {done:,} updates")
    return loss, *made


def _structure(name: str, pointers: str, numbers: str) -> type[ctypes.Structure]:
    """A structure of ``kernels.c``: addresses, then whole numbers."""
    fields = [*((field, ctypes.c_void_p) for field in pointers.split()),
              *((field, ctypes.c_int64) for field in numbers.split())]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Round = _structure("Round", "table vectors constants rates shuffles turns", "draws n_items d each epochs size n_turns")
_Clients = _structure("Clients", "users positives count names others gaps",
                      "clients width n_gaps batches updates")
_Made = _structure("Made", "items held sample positive steps past moved_vectors moved_constants loss", "")


@dataclass(frozen=True)
class InnerTask:
    """What clients do in a round whose logits are inner products, plus a constant: draw negatives, deal samples out to
    local batches, and train on each.

    Attributes:
        table: item rows, (items, d).
        vectors, constants: of all users, (users, d) and (users, 1) or None.
        each: negatives per positive.
        draws, shuffles: keys of negatives, and of the order of samples in each epoch, without the client.
        size: samples in a local batch.
        turns: what takes its step one after the other in a local batch: 1 vectors and constants, 2 rows, 3 all.
        rates: factors of the gradients of vectors, constants and rows in each local batch, one batch after the other:
            of as many as the client with most has, or more.
    """

    table: Tensor
    vectors: Tensor
    constants: Tensor | None
    each: int
    draws: int
    shuffles: Sequence[int]
    size: int
    turns: Sequence[int]
    rates: Sequence[float]

    def updates(self, batches: int) -> int:
        """How many updates of rows so many local batches per epoch are."""
        return len(self.shuffles) * batches * sum(turn >= 2 for turn in self.turns)

    def structure(self) -> tuple[ctypes.Structure, list]:
        """For the kernel, and what has to live as long."""
        table, rates, turns = self.table, self.rates, self.turns
        arrays = [(REALS[table.dtype] * len(rates))(*rates), (ctypes.c_uint64 * len(self.shuffles))(*self.shuffles),
                  (ctypes.c_uint8 * len(turns))(*turns)]
        addresses = [_address(tensor) for tensor in (table, self.vectors, self.constants)]
        return _Round(*addresses, *map(ctypes.addressof, arrays), self.draws, *table.shape, self.each,
                      len(self.shuffles), self.size, len(turns)), [self, *arrays]


@dataclass(frozen=True)
class InnerClients:
    """The clients of an ``InnerTask``.

    Attributes:
        users: ids of the clients, (C,).
        positives, count: of each client, (C, P), and how many are its own, (C,).
        names: the numbers by which clients draw, (C,).
        others, gaps: ``count`` and ``gaps`` of ``sampling.Others``.
        batches: local batches per epoch of the client with most.
    """

    users: Tensor
    positives: Tensor
    count: Tensor
    names: Tensor
    others: Tensor
    gaps: Tensor
    batches: int

    def structure(self, task: InnerTask) -> ctypes.Structure:
        """For the kernel."""
        result = _Clients.from_buffer_copy(self._structure)
        result.updates = task.updates(self.batches)
        return result

    @functools.cached_property
    def _structure(self) -> ctypes.Structure:
        """Made once: rounds can be short."""
        tensors = self.users, self.positives, self.count, self.names, self.others, self.gaps
        return _Clients(*map(_address, tensors), *self.positives.shape, self.gaps.shape[1], self.batches)


@dataclass(frozen=True)
class InnerRound:
    """What ``inner_round`` has made of C clients.

    Attributes:
        items: of ``trainer.Slots``, (C, n).
        sample, positive: too, each (C, n); None: not asked for.
        held: how many items each looks up, (C,).
        steps, vectors: what updates added to the rows at the slots, as in ``inner.Outer``: a step, of shape
            (C, n, updates), times a vector, of shape (C, updates, d), each.
        moved: what was added to the vectors (C, d) and constants (C, 1), if there are any.
        loss: float64 of shape (C,): the mean over a client's local batches.
    """

    items: Tensor
    sample: Tensor | None
    positive: Tensor | None
    held: Tensor
    steps: Tensor
    vectors: Tensor
    moved: tuple[Tensor, Tensor | None]
    loss: Tensor


def inner_round(task: InnerTask, some: InnerClients, samples: bool) -> InnerRound:
    """Train some clients; ``samples``: whether ``sample`` and ``positive`` are asked for.

    Raises:
        MemoryError: if there is none.
    """
    positives, table, updates = some.positives, task.table, task.updates(some.batches)
    (clients, width), d = positives.shape, table.shape[1]
    n = width * (1 + task.each)
    result = InnerRound(
        positives.new_empty(clients, n), positives.new_empty(clients, n) if samples else None,
        torch.empty(clients, n, dtype=torch.bool) if samples else None, torch.empty_like(some.count),
        table.new_empty(clients, n, updates), table.new_empty(clients, updates, d),
        (table.new_empty(clients, d), None if task.constants is None else table.new_empty(clients, 1)),
        torch.empty(clients, dtype=torch.float64))
    made = _Made(*map(_address, (result.items, result.held, result.sample, result.positive, result.steps,
                                 result.vectors, *result.moved, result.loss)))
    structure, kept = task.structure()
    if _call(_real("inner_round", table), *map(ctypes.byref, (structure, some.structure(task), made))):
        raise MemoryError(f"no memory to train on {n:,} samples of a client")
    return result


def add_rows(table: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add rows (n, d) to those of a table at ``places``, (n,), in its place."""
    _call(_real("add_rows_at", table), table, places, rows.contiguous(), places.numel(),
          rows.numel() // max(places.numel(), 1))


_FEW, _COLUMNS_PER_PLACE = 128, 16  # places in a list up to which, or columns for each from which, a heap is fast


def serve_highest(scores: Tensor, k: int) -> bool:
    """Whether there is a kernel for the k highest of scores (n, m)."""
    return scores.dtype in REALS and (k <= _FEW or _COLUMNS_PER_PLACE * k <= scores.shape[1]) and serve(scores)


def highest(scores: Tensor, k: int) -> Tensor:
    """As ``highest.highest``, in single or double precision."""
    rows, n = scores.shape
    result = torch.empty(rows, min(k, n), dtype=torch.int64)
    if _call(_real("highest", scores), scores.contiguous(), rows, n, min(k, n), result):
        raise MemoryError(f"no memory for the {k:,} highest scores")
    return result


def ranks(scores: Tensor, items: Tensor) -> Tensor:
    """As ``distillation.ranks_of``."""
    result = torch.empty_like(items, memory_format=torch.contiguous_format)
    _call(_real("ranks", scores), scores.contiguous(), items.contiguous(), *scores.shape, items.shape[1], result)
    return result
