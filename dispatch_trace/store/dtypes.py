"""Which dtypes safetensors and NumPy know, by torch's names.

Torch-free, so that the reader can hand out arrays in a process that never imports torch. What
safetensors lacks is stored as bytes (`layouts.pack`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dispatch_trace.errors import TraceFormatError


@dataclass(frozen=True, slots=True)
class ShardDtype:
    """How one torch dtype stands in a safetensors file.

    Attributes:
      name: safetensors' name.
      itemsize: bytes of one torch element.
      per_element: safetensors elements per torch element (2 for the packed `float4_e2m1fn_x2`).
      numpy: NumPy's name, "" where it has none.
    """

    name: str
    itemsize: int
    per_element: int = 1
    numpy: str = ""


SHARD_DTYPES: dict[str, ShardDtype] = {
    "bool": ShardDtype("BOOL", 1, numpy="?"),
    "uint8": ShardDtype("U8", 1, numpy="u1"),
    "int8": ShardDtype("I8", 1, numpy="i1"),
    "uint16": ShardDtype("U16", 2, numpy="<u2"),
    "int16": ShardDtype("I16", 2, numpy="<i2"),
    "uint32": ShardDtype("U32", 4, numpy="<u4"),
    "int32": ShardDtype("I32", 4, numpy="<i4"),
    "uint64": ShardDtype("U64", 8, numpy="<u8"),
    "int64": ShardDtype("I64", 8, numpy="<i8"),
    "float16": ShardDtype("F16", 2, numpy="<f2"),
    "bfloat16": ShardDtype("BF16", 2),
    "float32": ShardDtype("F32", 4, numpy="<f4"),
    "float64": ShardDtype("F64", 8, numpy="<f8"),
    "complex64": ShardDtype("C64", 8, numpy="<c8"),
    "float8_e4m3fn": ShardDtype("F8_E4M3", 1),
    "float8_e4m3fnuz": ShardDtype("F8_E4M3FNUZ", 1),
    "float8_e5m2": ShardDtype("F8_E5M2", 1),
    "float8_e5m2fnuz": ShardDtype("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ShardDtype("F8_E8M0", 1),
    "float4_e2m1fn_x2": ShardDtype("F4", 1, per_element=2),
}

# What NumPy has but safetensors lacks: stored as bytes, readable without torch all the same.
BYTES_NUMPY = {"complex128": "<c16"}


def shard_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that safetensors writes for a tensor of torch shape `shape`."""
    per_element = SHARD_DTYPES[dtype].per_element
    return shape if per_element == 1 else (*shape[:-1], shape[-1] * per_element)


_TORCH_NAMES = {entry.name: (dtype, entry.per_element) for dtype, entry in SHARD_DTYPES.items()}


def torch_type(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Torch's dtype and shape of a tensor in a shard: the inverse of `SHARD_DTYPES` and `shard_shape`.

    Raises:
      TraceFormatError: a safetensors dtype that we never write.
    """
    if name not in _TORCH_NAMES:
        raise TraceFormatError(f"a shard holds the dtype {name!r}, which no trace uses")
    dtype, per_element = _TORCH_NAMES[name]
    return (dtype, shape) if per_element == 1 else (dtype, (*shape[:-1], shape[-1] // per_element))


def is_shard_dtype(dtype: str, shape: Sequence[int]) -> bool:
    """Whether safetensors holds this dtype at this shape (a packed dtype needs a last dim)."""
    entry = SHARD_DTYPES.get(dtype)
    return entry is not None and (entry.per_element == 1 or len(shape) > 0)


def array_from_bytes(
    data: bytes | bytearray, dtype: str, shape: tuple[int, ...]
) -> np.ndarray[Any, Any] | None:
    """The bytes of a contiguous tensor as a NumPy array, None for dtypes NumPy has nothing for.

    bfloat16 is widened to float32, which holds each of its values exactly.
    """
    if dtype == "bfloat16":
        halves = np.frombuffer(data, dtype="<u2").astype("<u4")
        return (halves << 16).view("<f4").reshape(shape)
    entry = SHARD_DTYPES.get(dtype)
    numpy_name = entry.numpy if entry is not None else BYTES_NUMPY.get(dtype, "")
    if not numpy_name:
        return None
    return np.frombuffer(data, dtype=numpy_name).reshape(shape)
