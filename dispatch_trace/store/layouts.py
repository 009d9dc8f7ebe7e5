"""Tensors of every dtype and layout, to contiguous parts that a shard can hold; their hash.

Guarantees: strided CPU snapshots are read in place, without a copy and without breaking the
copy-on-write link of a lazy clone; a stride-0 view is never expanded; nothing needs a kernel for the
dtype (sub-byte and quantised dtypes have next to none). Back again is `unpack`; both need torch, so that
`reader` loads them only when a tensor is asked for.

The encodings are specified in docs/format.md, section "Encodings".
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import xxhash

from dispatch_trace import extension
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.store.dtypes import SHARD_DTYPES, is_shard_dtype, shard_shape
from dispatch_trace.store.shards import ShardTensor

# Above this logical size an expanded tensor is hashed by its distinct elements (format.md, "Hash").
EXPANDED_HASH_BYTES = 1 << 28
# What an encoding may say that is no part of the value: caches that an op may fill at any time.
_UNHASHED = frozenset(("coalesced", "min_length", "max_length"))
_OWN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_CHUNK_BYTES = 1 << 21
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ, _WRITE = 0x100, 0x200


@dataclass(slots=True)
class Packed:
    """A tensor ready to be stored.

    Attributes:
      parts: contiguous strided CPU tensors, in the order in which `encoding` consumes them.
      encoding: how to put them together again; {} for one ordinary safetensors tensor.
    """

    parts: list[torch.Tensor]
    encoding: dict[str, Any]


@cache
@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the "torch."."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Raises TraceFormatError for what is no dtype of this torch."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TraceFormatError(f"this torch has no dtype {name!r}")
    return dtype


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, read-only; valid as long as the tensor lives."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(b"")
    view: memoryview = _memory_view(_address(tensor), num_bytes, _READ)
    return view


def writable_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of our own, to be written to."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(b"")
    view: memoryview = _memory_view(tensor.data_ptr(), num_bytes, _WRITE)
    return view


def _address(tensor: torch.Tensor) -> int:
    """Where the first element lies, for reading.

    Not `data_ptr()` or `numpy()`: both copy the memory of a lazy clone. `_data_address` does not, but
    knows no storage offset (measured, torch 2.13).
    """
    start: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    if not start:
        raise TypeError(f"this {type(tensor).__qualname__} on {tensor.device} has no memory to read")
    return start + int(tensor.storage_offset()) * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    """Nearly all tensors: contiguous, on the CPU, and their memory is their logical bytes."""
    return (
        tensor.is_cpu
        and type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def shard_tensor(part: torch.Tensor, number: int) -> ShardTensor:
    """A part as it stands in a shard; parts whose dtype safetensors lacks have been made bytes by `pack`."""
    dtype = dtype_name(part.dtype)
    entry = SHARD_DTYPES[dtype]
    shape = shard_shape(dtype, tuple(part.shape))
    return ShardTensor(number, entry.name, shape, entry.itemsize, view_bytes(part), owner=part)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape, with -1 for the ragged dims of a nested tensor."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    if tensor.layout is torch.jagged:
        return tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
    sizes = tensor._nested_tensor_size()
    if not len(sizes):
        return (0,) * tensor.dim()
    first = sizes[0].tolist()
    return (
        len(sizes),
        *(size if bool((sizes[:, dim] == size).all()) else -1 for dim, size in enumerate(first)),
    )


def summary_view(tensor: torch.Tensor) -> torch.Tensor:
    """The strided tensor whose statistics stand for this one: of a sparse or nested tensor, its values."""
    if tensor.is_nested:
        values: torch.Tensor = tensor.values()
        return values
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if str(tensor.layout).startswith("torch.sparse"):
        return tensor.values()
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    return tensor


# Packing ------------------------------------------------------------------------------------------


def pack(tensor: torch.Tensor) -> Packed:
    """Takes a tensor apart. Accelerator tensors are copied to the host.

    Raises:
      TypeError: a layout or subclass that the store does not know.
    """
    if is_plain(tensor) and is_shard_dtype(dtype_name(tensor.dtype), tensor.shape):
        return Packed([tensor], {})
    parts: list[torch.Tensor] = []
    return Packed(parts, _pack(tensor.detach(), parts))


def _pack(tensor: torch.Tensor, parts: list[torch.Tensor]) -> dict[str, Any]:
    if tensor.is_nested:
        return _pack_nested(tensor, parts)
    if tensor.layout is not torch.strided:
        return _pack_sparse(tensor, parts)
    if type(tensor) not in _OWN_TYPES:
        raise TypeError(f"no known way to store a {type(tensor).__qualname__}")
    if tensor.device.type == "meta":
        raise TypeError("a meta tensor has no data")
    if tensor.is_quantized:
        return _pack_quantized(tensor, parts)
    expanded = expanded_dims(tensor)
    if expanded:
        core = tensor
        for dim in expanded:
            core = core.narrow(dim, 0, 1)
        return {"form": "expanded", "shape": list(tensor.shape), "of": _pack(core, parts)}
    tensor = _plain(tensor).cpu()
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if is_shard_dtype(dtype, shape):
        parts.append(_contiguous(tensor))
        return {}
    # Dims of size 1 and empty tensors may have any strides, contiguous or not; the view needs stride 1.
    parts.append(_contiguous(tensor).as_strided((tensor.numel(),), (1,)).view(torch.uint8))
    return {"form": "bytes", "dtype": dtype, "shape": list(shape)}


def _pack_sparse(tensor: torch.Tensor, parts: list[torch.Tensor]) -> dict[str, Any]:
    layout = str(tensor.layout).removeprefix("torch.")
    encoding: dict[str, Any] = {"form": layout, "shape": list(tensor.shape)}
    if layout == "sparse_coo":
        encoding["coalesced"] = tensor.is_coalesced()
        components = [tensor._indices(), tensor._values()]
    elif layout in ("sparse_csr", "sparse_bsr"):
        components = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif layout in ("sparse_csc", "sparse_bsc"):
        components = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif layout == "_mkldnn":
        components = [tensor.to_dense()]
    else:
        raise TypeError(f"no known way to store layout {layout}")
    encoding["parts"] = _pack_components(components, parts)
    return encoding


def _pack_nested(tensor: torch.Tensor, parts: list[torch.Tensor]) -> dict[str, Any]:
    if tensor.layout is torch.jagged:
        nested: Any = tensor
        values, offsets, lengths = nested._values, nested._offsets, nested._lengths
        components = [values, offsets] if lengths is None else [values, offsets, lengths]
        metadata = nested._metadata_cache or {}
        return {
            "form": "jagged",
            "ragged_dim": nested._ragged_idx,
            "min_length": _length(metadata.get("min_seqlen")),
            "max_length": _length(metadata.get("max_seqlen")),
            "parts": _pack_components(components, parts),
        }
    return {"form": "nested", "parts": _pack_components(tensor.unbind(), parts)}


def _pack_components(tensors: Iterable[torch.Tensor], parts: list[torch.Tensor]) -> list[dict[str, Any]]:
    # Made contiguous here, so that the encoding (and with it the hash) does not depend on strides.
    return [_pack(_contiguous(tensor.detach()), parts) for tensor in tensors]


def _length(cached: torch.Tensor | None) -> int | None:
    """Jagged tensors cache their shortest and longest length as the first dim of an empty tensor."""
    return None if cached is None else int(cached.shape[0])


def _pack_quantized(tensor: torch.Tensor, parts: list[torch.Tensor]) -> dict[str, Any]:
    tensor = tensor.cpu().contiguous()
    encoding: dict[str, Any] = {
        "form": "quantized",
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "scheme": str(tensor.qscheme()).removeprefix("torch."),
    }
    parts.append(_raw_storage(tensor))
    if "per_channel" in encoding["scheme"]:
        encoding["axis"] = tensor.q_per_channel_axis()
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        encoding["parts"] = [_pack(scales, parts), _pack(zero_points, parts)]
    else:
        encoding["scale"], encoding["zero_point"] = tensor.q_scale(), tensor.q_zero_point()
    return encoding


def _raw_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The storage bytes of a contiguous tensor; sub-byte quantised dtypes pack several elements in one."""
    num_bytes = _quantized_bytes(tensor)
    raw = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    if num_bytes:
        ctypes.memmove(raw.data_ptr(), _address(tensor), num_bytes)
    return raw


def _quantized_bytes(tensor: torch.Tensor) -> int:
    per_byte = {torch.quint4x2: 2, torch.quint2x4: 4}.get(tensor.dtype)
    if per_byte is None:
        return tensor.numel() * tensor.element_size()
    rows, row = math.prod(tensor.shape[:-1]), tensor.shape[-1] if tensor.dim() else 1
    return min(rows * -(-row // per_byte), tensor.untyped_storage().nbytes())


def expanded_dims(tensor: torch.Tensor) -> list[int]:
    """Dims in which a non-empty strided tensor repeats one element."""
    if not tensor.numel():
        return []
    return [
        dim
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1 and not stride
    ]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without lazy conjugation and negation, whose bytes are not the values."""
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor
    if tensor.element_size() == 1 and not tensor.is_complex():
        # Sub-byte dtypes have no copy kernel; their bytes do.
        return tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    return tensor.contiguous()


# Hashing ------------------------------------------------------------------------------------------


def content_hash(tensor: torch.Tensor) -> str:
    """`content_digest` in hexadecimal, as `StoredContent.hash` has it."""
    return content_digest(tensor).hex()


def content_digest(tensor: torch.Tensor, packed: Packed | None = None) -> bytes:
    """xxh3-128 over dtype, shape and logical bytes (docs/format.md, "Hash").

    Equal for equal bytes whatever the strides, thread count or process. Values that compare equal with
    other bits (signed zeros) differ.

    Args:
      tensor: any tensor that `pack` takes.
      packed: what `pack(tensor)` returned, to spare packing again.
    """
    if is_plain(tensor):
        hasher = xxhash.xxh3_128(_label(tensor.dtype, tensor.shape))
        hasher.update(view_bytes(tensor))
        return hasher.digest()
    tensor = tensor.detach()
    hasher = xxhash.xxh3_128(_label(tensor.dtype, shape_of(tensor)))
    if packed is not None and packed.encoding.get("form") in (None, "bytes"):
        hasher.update(view_bytes(packed.parts[0]))
    elif _is_hashed_by_elements(tensor):
        for chunk in _byte_chunks(tensor):
            hasher.update(chunk)
    else:
        packed = pack(tensor) if packed is None else packed
        described = {key: value for key, value in packed.encoding.items() if key not in _UNHASHED}
        hasher.update(json.dumps(described, sort_keys=True, separators=(",", ":")).encode())
        for part in packed.parts:
            hasher.update(_label(part.dtype, part.shape))
            hasher.update(view_bytes(part))
    return hasher.digest()


def plain_digest(tensor: torch.Tensor) -> bytes | None:
    """`content_digest` of what `is_plain`, in one look; None of others, or where nothing is compiled."""
    module = extension.find()
    found = None if module is None else module.plain(tensor)
    if found is None:
        return None
    hasher = xxhash.xxh3_128(found[0])
    hasher.update(found[1])
    return hasher.digest()


def _label(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    return f"{dtype_name(dtype)}[{','.join(map(str, shape))}]".encode()


def _is_hashed_by_elements(tensor: torch.Tensor) -> bool:
    if type(tensor) not in _OWN_TYPES:
        return False  # `pack` says why
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= EXPANDED_HASH_BYTES or not expanded_dims(tensor)


def _byte_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a strided tensor in logical order, copied chunk by chunk unless it is contiguous."""
    tensor = _plain(tensor)
    if tensor.is_contiguous():
        tensor = tensor.cpu()
        yield view_bytes(tensor)
        return
    # As integers of the same size: every dtype has those bytes, few have a copy kernel.
    for piece in _pieces(tensor.view(_CARRIERS[tensor.element_size()])):
        chunk = piece.contiguous().cpu()  # a name of its own: the view does not keep it alive
        yield view_bytes(chunk)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Slices that together are the tensor in logical order, each of at most about `_CHUNK_BYTES`."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes <= _CHUNK_BYTES:
        yield tensor
        return
    rows = _CHUNK_BYTES * tensor.shape[0] // num_bytes
    if rows:
        for start in range(0, tensor.shape[0], rows):
            yield tensor[start : start + rows]
        return
    for row in tensor:
        yield from _pieces(row)
