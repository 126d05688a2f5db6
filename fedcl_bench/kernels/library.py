"""The library of compiled kernels: which of its builds this processor can run, and calls whose arguments are checked.

It is built from ``kernels.c`` when the package is installed (see ``setup.py``) and lies in this folder; nothing outside
is ever loaded. Calls release Python's lock, so that threads run side by side.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import torch
from torch import Tensor

SWITCH = "FEDCL_BENCH_KERNELS"
_FOLDER = Path(__file__).parent
# On which processors each build runs, by what PyTorch calls their instructions; empty: on all. The fastest come first.
BUILDS = {"kernels_v4.so": ("AVX512",), "kernels_v3.so": ("AVX512", "AVX2"), "kernels_generic.so": ()}
_AGAIN = "install fedcl_bench again (in its folder: python -m pip install -e .)"

_TYPES = {"i64": torch.int64, "i32": torch.int32, "u8": torch.uint8, "bool": torch.bool, "f32": torch.float32,
          "f64": torch.float64}
REALS = {torch.float32: "float", torch.float64: "double"}  # what functions of real numbers take, and their names' ends
# Every function's arguments in order: a tensor as name:type(sizes), a number by its name; sizes and numbers of one name
# are equal. ``?``: may be None. ``~``: rows may lie apart. Functions after ``!`` return what is not 0 without memory.
_SIGNATURES = """
mixed numbers:i64 n
!negatives keys:i64(C) drawn:i64(C) others:i64(C,1) gaps:i32(C,G) G positives:i64(C,P) P C n distinct
    result:i64~(C,n) stride
!group keys:i64(C) head head_count:i64?(C) tail_count:i64(C) slots:i64?(C,n) C n size result:i32(C,n)
weighted_bce scores:f32(C,n) targets:f32(C,n) weights:f32(C,n) C n loss:f32(C) slopes:f32(C,n)
row_products table:real(M,d) items:i64(C,n) vectors:real(C,d) constants:real?(C,1) C n d result:real(C,n)
!nearest products:real(C,n,M) lengths:real(C,M) filled:bool(C,n) C n M K distances:real(C,K,M) entries:i64(C,K,M)
row_sums table:real(M,d) items:i64(C,n) factors:real(C,n) C n d result:real(C,d)
add_outer table:real(M,d) items:i64?(C,S) held:i64?(C) steps:real(C,S,K) vectors:real(C,K,d) K C S d
!inner_batch table:real(M,d) items:i64?(C,S) S vectors:real(C,d) constants:real?(C,1) steps:real(C,S,K) past:real(C,K,d)
    K done moves order:i32(C,n) start end share:real(C,1) positive:bool stride C n d loss:real(C) to_vectors:real?(C,d)
    to_constants:real?(C,1)
!inner_round tables:real(B,M,d) B kept:real?(A) known near:real?(N,d) near_constants:real?(N,1) N pulls:real(W)
    lists:i64?(L,Q) targets:real?(L,Q) weights:real?(L) chosen:bool?(L,Q) L Q mean eps:float keys:i64(Z)
    columns:real?(d,Y) Y vectors:real(U,d) constants:real?(U,1) rates:real(R) shuffles:i64(E) turns:u8(T) draws M d
    each distinct E size T users:i64(C) positives:i64(C,P) count:i64(C) names:i64(C) others:i64(C,1) gaps:i32(C,G) C P G
    batches K items:i64(C,S) held:i64(C) sample:i64?(C,n) replayed:i64?(C,Q) positive:bool?(C,S) steps:real(C,S,K)
    past:real(C,K,d) moved_vectors:real(C,d) moved_constants:real?(C,1) loss:f64(C)
!all_ranks scores:real(R,n) R n result:i32(R,n)
!cosine_scores table:real(F,n,d) apart keys:i64(C) threshold across:real(C,d,W) mask:bool(C,M) best:float each:real(C)
    C n d M W scores:real(C,n) lengths:real(C,n) where:i32(C,n)
!cosine_adam table:real(F,n,d) apart result:real(C,n,d) first:real(C,n,d) second:real(C,n,d) fresh rule:f64(R)
    keys:i64(C) threshold vectors:real(C,M,d) best:float each:real(C) of_scores:real(C,n) scores:real(C,n)
    lengths:real(C,n) where:i32(C,n) held:i64(C,H) of_held:real?(C,H,d) C n d M H of_vectors:real?(C,M,d)
ranks scores:real(R,n) rows:i64(P) items:i64(P) n P first_before result:i64(P)
"""


@dataclass(frozen=True)
class _Argument:
    """A function's argument; ``sizes`` of a tensor, or None for any."""

    name: str
    dtype: torch.dtype | None
    optional: bool
    apart: bool
    sizes: tuple[str, ...] | None

    @staticmethod
    def of(text: str, real: torch.dtype | None) -> "_Argument":
        name, kind, mark, sizes = re.fullmatch(r"(\w+)(?::(\w+)([?~]?)(?:\(([\w,]*)\))?)?", text).groups()
        return _Argument(name, real if kind == "real" else _TYPES.get(kind), mark == "?", mark == "~",
                         None if sizes is None else tuple(sizes.split(",")))

    def check(self, tensor: Tensor, known: dict[str, int]) -> None:
        """Raise ValueError for a tensor that the function cannot read; ``known``: sizes so far, to which its are added.
        """
        shape, fits = tensor.shape, True
        if tensor.dtype != self.dtype or not tensor.is_cpu:
            raise ValueError(f"{self.name} is {tensor.dtype} on {tensor.device.type}, expected {self.dtype} on cpu")
        if not (tensor.stride(-1) == 1 if self.apart else tensor.is_contiguous()):
            raise ValueError(f"{self.name}, a tensor of shape {tuple(shape)}, is not contiguous")
        for size, number in zip(self.sizes or (), shape):
            fits = fits and known.setdefault(size, number) == number
        if self.sizes is not None and not (fits and len(shape) == len(self.sizes)):
            raise ValueError(f"{self.name} has shape {tuple(shape)}, expected ({', '.join(self.sizes)}) with {known}")


class _Function(NamedTuple):
    call: Callable[..., int]
    arguments: tuple[_Argument, ...]


def functions(library: ctypes.CDLL) -> Iterator[tuple[str, _Function]]:
    """The functions of ``kernels.c`` by name."""
    for line in _SIGNATURES.replace("\n    ", " ").strip().splitlines():
        name, *texts = line.split()
        ends = {f"_{end}": real for real, end in REALS.items()} if ":real" in line else {"": None}
        for end, real in ends.items():
            arguments = tuple(_Argument.of(text, real) for text in texts)
            call = library[name.lstrip("!") + end]
            call.restype = ctypes.c_int if name.startswith("!") else None
            call.argtypes = [ctypes.c_double if text.endswith(":float") else ctypes.c_int64 if argument.dtype is None
                             else ctypes.c_void_p for text, argument in zip(texts, arguments)]
            yield name.lstrip("!") + end, _Function(call, arguments)


def sources(folder: Path) -> str:
    """A digest of the sources, which a library tells of those that it was built from."""
    parts = [path.read_bytes() for path in sorted(folder.glob("kernels*.[ch]"))]
    return hashlib.blake2b(b"".join(parts), digest_size=12).hexdigest()


def load(folder: Path) -> dict[str, _Function] | str:
    """The functions of the fastest library in a folder that this processor can run, or why there are none."""
    built = {name: kinds for name, kinds in BUILDS.items() if (folder / name).is_file()}
    if not built:
        return f"compiled kernels were not built: install gcc (11 or later) or clang (12 or later), then {_AGAIN}"
    processor = torch.backends.cpu.get_cpu_capability()
    fitting = [name for name, kinds in built.items() if not kinds or processor in kinds]
    if not fitting:
        return "compiled kernels need a processor with AVX2 or AVX-512 (x86-64-v3 or x86-64-v4)"
    try:
        library = ctypes.CDLL(str(folder / fitting[0]))
        library.sources.restype = ctypes.c_char_p
        if library.sources().decode() != sources(folder):
            return f"compiled kernels were built from other sources: {_AGAIN}"
        return dict(functions(library))
    except (OSError, AttributeError) as error:
        return f"compiled kernels cannot be loaded ({error}): {_AGAIN}"


@functools.cache
def _loaded() -> dict[str, _Function] | str:
    return f"switched off by {SWITCH}=0" if os.environ.get(SWITCH, "") == "0" else load(_FOLDER)


def why_not() -> str | None:
    """Why there are no compiled kernels here, and what to do; None: there are."""
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else None


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """A function of ``kernels.c``. Raises ValueError if a tensor is not what the function can read, and MemoryError if
    there is none."""
    function, known, passed = _loaded()[name], {"1": 1}, []
    try:
        for argument, value in zip(function.arguments, arguments, strict=True):
            if isinstance(value, Tensor):
                argument.check(value, known)
                passed.append(value.data_ptr())
                continue
            if not argument.optional if value is None else argument.dtype is not None:
                raise ValueError(f"{argument.name} is {value}, expected a tensor")
            if isinstance(value, int) and known.setdefault(argument.name, value) != value:
                raise ValueError(f"{argument.name} is {value}, expected {known[argument.name]}")
            passed.append(value)
    except ValueError as error:
        raise ValueError(f"kernels: {name}: {error}") from None
    if function.call(*passed):
        raise MemoryError(f"no memory for {name} with {known}")
