"""Stored parts back to tensors of every dtype and layout: the inverse of `layouts.pack`.

What comes from a file is checked before torch trusts it with memory: sizes, offsets, indices. Imports
torch; `reader` loads it when a tensor is asked for.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from dispatch_trace.errors import TraceFormatError
from dispatch_trace.store.layouts import dtype_from_name, writable_bytes


def empty_part(dtype: str, shape: tuple[int, ...], num_bytes: int) -> tuple[torch.Tensor, memoryview]:
    """An uninitialised part with a writable view of its memory, for the reader to fill.

    Raises:
      TraceFormatError: a tensor of this dtype and shape does not have so many bytes.
    """
    torch_dtype = dtype_from_name(dtype)
    if math.prod(shape) * torch_dtype.itemsize != num_bytes:
        raise TraceFormatError(f"a shard holds {num_bytes} bytes for {dtype} {list(shape)}")
    part = torch.empty(shape, dtype=torch_dtype, device="cpu")
    return part, writable_bytes(part)


def num_parts(encoding: dict[str, Any]) -> int:
    """How many parts an encoding consumes."""
    form = encoding.get("form")
    own = (
        0 if form in ("expanded", "jagged", "nested") or (form or "").startswith(("sparse", "_mkldnn")) else 1
    )
    inner = num_parts(encoding["of"]) if form == "expanded" else 0
    return own + inner + sum(num_parts(part) for part in encoding.get("parts", ()))


def unpack(parts: list[torch.Tensor], encoding: dict[str, Any]) -> torch.Tensor:
    """The inverse of `pack`. What comes from a file is checked before torch trusts it with memory.

    Raises:
      TraceFormatError: an encoding that this version does not know, or that does not fit the parts.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls several of these layouts experimental or deprecated
            return _unpack(iter(parts), encoding)
    except StopIteration as error:
        raise TraceFormatError(f"encoding {encoding!r} needs more tensors than {len(parts)}") from error
    except TraceFormatError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise TraceFormatError(f"encoding {encoding!r} does not fit its tensors: {error}") from error


def _unpack(parts: Iterator[torch.Tensor], encoding: dict[str, Any]) -> torch.Tensor:
    form = encoding.get("form")
    if form is None:
        return next(parts)
    if form == "bytes":
        raw, dtype = next(parts), dtype_from_name(encoding["dtype"])
        if not raw.numel():
            return torch.empty(encoding["shape"], dtype=dtype, device="cpu")
        return raw.view(dtype).reshape(encoding["shape"])
    if form == "reshaped":
        return next(parts).reshape(encoding["shape"])
    if form == "expanded":
        return _unpack(parts, encoding["of"]).expand(encoding["shape"])
    if form == "quantized":
        return _unpack_quantized(parts, encoding)
    components = [_unpack(parts, part) for part in encoding.get("parts", ())]
    if form == "nested":
        return torch._nested_tensor_from_tensor_list(components)
    if form == "jagged":
        from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

        _check_jagged(components, encoding["ragged_dim"])
        # Not torch.nested.nested_tensor_from_jagged: it logs a warning about fx.
        build: Any = nested_view_from_values_offsets_lengths  # untyped
        nested: torch.Tensor = build(
            components[0],
            components[1],
            components[2] if len(components) > 2 else None,
            ragged_idx=encoding["ragged_dim"],
            min_seqlen=encoding["min_length"],
            max_seqlen=encoding["max_length"],
        )
        return nested
    if form == "sparse_coo":
        indices, values = components
        return torch.sparse_coo_tensor(
            indices, values, encoding["shape"], is_coalesced=encoding["coalesced"], check_invariants=True
        )
    if form in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"):
        compressed, plain, values = components
        return torch.sparse_compressed_tensor(
            compressed, plain, values, encoding["shape"], layout=getattr(torch, form), check_invariants=True
        )
    if form == "_mkldnn":
        return components[0].to_mkldnn()
    raise TraceFormatError(f"unknown encoding {form!r}")


def _check_jagged(components: list[torch.Tensor], ragged_dim: int) -> None:
    values, offsets = components[:2]
    starts, ends = offsets[:-1], offsets[1:]
    if len(components) > 2:
        ends = starts + components[2]
    size = values.shape[ragged_dim - 1]
    if not bool(((starts >= 0) & (starts <= ends) & (ends <= size)).all()):
        raise TraceFormatError(f"a jagged tensor has offsets outside its {size} values")


def _unpack_quantized(parts: Iterator[torch.Tensor], encoding: dict[str, Any]) -> torch.Tensor:
    raw = next(parts)
    dtype = dtype_from_name(encoding["dtype"])
    if "axis" in encoding:
        scales, zero_points = (_unpack(parts, part) for part in encoding["parts"])
        tensor = torch._empty_per_channel_affine_quantized(
            encoding["shape"],
            scales=scales,
            zero_points=zero_points,
            axis=encoding["axis"],
            dtype=dtype,
            device="cpu",
        )
    else:
        tensor = torch._empty_affine_quantized(
            encoding["shape"],
            scale=encoding["scale"],
            zero_point=encoding["zero_point"],
            dtype=dtype,
            device="cpu",
        )
    if raw.numel() > tensor.untyped_storage().nbytes():
        raise TraceFormatError(f"{raw.numel()} bytes for a {dtype} tensor of shape {list(tensor.shape)}")
    if raw.numel():
        ctypes.memmove(tensor.data_ptr(), raw.data_ptr(), raw.numel())
    return tensor
