"""Arrow's arrays to and from NumPy's and texts.

pyarrow's own conversions import pandas, which takes longer than to read a dataset or to write a record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


def from_numbers(values: NDArray[Any]) -> pa.Array:
    """Numbers as an Arrow array on the same memory."""
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def from_texts(texts: Sequence[str]) -> pa.Array:
    """Texts as an Arrow array."""
    import pyarrow as pa

    each = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, each)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(each), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(each))])


def numbers(column: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    """Numbers of an Arrow array, for reading only; what is missing is nan."""
    import pyarrow as pa

    array = column
    if isinstance(column, pa.ChunkedArray):
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # which copies
    if array.null_count:  # takes pandas
        return np.asarray(array.cast(pa.float64()).to_numpy(zero_copy_only=False))
    name = str(array.type)
    dtype = np.dtype("float32" if name == "float" else name)
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
