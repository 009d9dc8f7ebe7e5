"""Every dtype and layout that torch has on the CPU goes to disk and comes back bit-exact."""

from __future__ import annotations

import json
import math
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_records import open_rank, same_bits, write_trace

from dispatch_trace.store import layouts
from dispatch_trace.store.dtypes import SHARD_DTYPES, array_from_bytes, shard_shape, torch_type
from dispatch_trace.store.unpack import num_parts, unpack

ALL_DTYPES = sorted({str(d)[6:] for d in vars(torch).values() if isinstance(d, torch.dtype)})
QUANTISED = [name for name in ALL_DTYPES if name.startswith(("qint", "quint"))]
PLAIN_DTYPES = [name for name in ALL_DTYPES if name not in QUANTISED]


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bit pattern: NaN payloads, signed zeros and denormals included (booleans stay 0 or 1)."""
    torch_dtype = getattr(torch, dtype)
    num_bytes = math.prod(shape) * torch_dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    if not num_bytes:
        return torch.empty(shape, dtype=torch_dtype)
    return torch.from_numpy(raw).view(torch_dtype).reshape(shape)


@pytest.fixture(autouse=True)
def _without_deprecations() -> Any:
    with warnings.catch_warnings():
        # What torch says of making such tensors; the store must not add to it.
        warnings.filterwarnings("ignore", message="(?i).*(quantize|ComplexHalf|sparse|nested).*")
        yield


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
def test_dtype_round_trip(dtype: str, tmp_path: Path) -> None:
    tensors = [
        random_bits(dtype, shape, seed) for seed, shape in enumerate([(3, 5), (1,), (0, 3), (2, 3, 4)])
    ]
    tensors.append(random_bits(dtype, (1,)).reshape(()))
    reader = write_trace(tmp_path / "t", tensors)
    assert reader.complete, (reader.end, reader.problems)
    for seq, tensor in enumerate(tensors):
        stored = reader.record(seq).slots[0].content
        assert same_bits(tensor, reader.tensor(stored)), f"{dtype} {list(tensor.shape)}"
        assert reader.content(stored).dtype == dtype
        assert reader.content(stored).shape == tuple(tensor.shape)
    assert reader.verify() == []


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
def test_strides_do_not_show_in_data_or_hash(dtype: str, tmp_path: Path) -> None:
    whole = random_bits(dtype, (6, 8))
    views = [whole.t(), whole[1:, ::3], whole[2:4], whole.reshape(2, 3, 8).permute(2, 0, 1), whole[:, 3]]
    reader = write_trace(tmp_path / "t", views)
    for seq, view in enumerate(views):
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
        plain = view.view(carrier[view.element_size()]).contiguous().view(view.dtype)
        stored = reader.record(seq).slots[0].content
        assert same_bits(plain, reader.tensor(stored))
        assert layouts.content_hash(view) == layouts.content_hash(plain) == reader.content(stored).hash


@pytest.mark.parametrize("name", sorted(SHARD_DTYPES))
def test_safetensors_reads_what_it_has_a_dtype_for(name: str, tmp_path: Path) -> None:
    tensor = random_bits(name, (4, 6))
    reader = write_trace(tmp_path / "t", [tensor])
    with safetensors.safe_open(reader.path / "shard-00000.safetensors", framework="pt") as shard:
        assert same_bits(shard.get_tensor("0"), tensor)


@pytest.mark.parametrize("name", sorted(SHARD_DTYPES))
def test_shard_type_inverts(name: str) -> None:
    assert torch_type(SHARD_DTYPES[name].name, shard_shape(name, (2, 3))) == (name, (2, 3))
    assert getattr(torch, name).itemsize == SHARD_DTYPES[name].itemsize


@pytest.mark.parametrize("name", [n for n in PLAIN_DTYPES if n in SHARD_DTYPES or n == "complex128"])
def test_arrays_come_without_torch(name: str, tmp_path: Path) -> None:
    tensor = random_bits(name, (3, 4))
    array = write_trace(tmp_path / "t", [tensor]).array(0)
    if name == "bfloat16":
        assert array is not None
        np.testing.assert_array_equal(array.view(np.uint32), tensor.float().numpy().view(np.uint32))
    elif SHARD_DTYPES.get(name) is not None and not SHARD_DTYPES[name].numpy:
        assert array is None
    else:
        assert array is not None
        assert array.tobytes() == tensor.numpy().tobytes()
        assert array.dtype == tensor.numpy().dtype


def test_array_from_bytes_of_unknown_dtype_is_none() -> None:
    assert array_from_bytes(b"\0", "int4", (1,)) is None


def lazily_conjugated() -> list[torch.Tensor]:
    values = torch.tensor([1 + 2j, -0.0 - 3j, complex("nan")])
    return [values.conj(), values.conj().imag, values.conj()[1:], values.to(torch.complex128).conj()]


@pytest.mark.parametrize("index", range(4))
def test_lazy_conj_and_neg_are_resolved(index: int, tmp_path: Path) -> None:
    tensor = lazily_conjugated()[index]
    assert tensor.is_conj() or tensor.is_neg()
    reader = write_trace(tmp_path / "t", [tensor])
    expected = tensor.resolve_conj().resolve_neg()
    assert same_bits(expected, reader.tensor(0))
    assert reader.content(0).hash == layouts.content_hash(expected)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.ones(1).expand(2_000_000, 2_000_000), id="16 TB"),
        pytest.param(torch.arange(3.0)[:, None].expand(3, 1 << 27), id="1.5 GB"),
        pytest.param(torch.arange(3.0).expand(4, 3), id="small"),
        pytest.param(torch.arange(6).view(3, 1, 2).expand(2, 3, 5, 2), id="middle dim"),
        pytest.param(torch.randn(1, dtype=torch.complex128).conj().expand(5), id="bytes below"),
    ],
)
def test_expanded_views_are_stored_compressed_and_come_back_expanded(
    tensor: torch.Tensor, tmp_path: Path
) -> None:
    reader = write_trace(tmp_path / "t", [tensor])
    assert reader.complete, reader.end
    back = reader.tensor(0)
    assert back.shape == tensor.shape
    assert [s == 0 for s in back.stride()] == [s == 0 for s in tensor.stride()]
    assert sum(file.stat().st_size for file in reader.path.iterdir()) < 20_000
    small = tuple(slice(0, 2) for _ in tensor.shape)
    assert same_bits(tensor[small].resolve_conj(), back[small])
    array = reader.array(0)
    assert array is not None
    assert array.shape == tuple(tensor.shape)
    assert array[small].tobytes() == back[small].contiguous().numpy().tobytes()


def test_small_expanded_view_hashes_as_its_copy() -> None:
    view = torch.arange(12.0).view(3, 1, 4).expand(3, 500, 4)
    assert layouts.content_hash(view) == layouts.content_hash(view.contiguous())


def test_hash_of_large_strided_tensors_is_the_logical_one() -> None:
    whole = torch.arange(3_000_000, dtype=torch.int32).view(1000, 3000)
    for view in (whole.t(), whole[:, 1:], whole.view(10, 100, 3000).transpose(0, 1), whole.view(-1)[::3]):
        assert layouts.content_hash(view) == layouts.content_hash(view.contiguous())


def test_hash_is_the_documented_one() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    text = b"float32[2,2]" + struct.pack("<4f", 1, 2, 3, 4)
    assert layouts.content_hash(tensor) == xxhash.xxh3_128_hexdigest(text)
    scalar = torch.tensor(True)
    assert layouts.content_hash(scalar) == xxhash.xxh3_128_hexdigest(b"bool[]\x01")


def test_hash_tells_dtype_shape_and_zero_signs_apart() -> None:
    tensors = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), -torch.zeros(4)]
    tensors += [torch.zeros(4).to_sparse(), torch.zeros(4, 1)]
    assert len({layouts.content_hash(tensor) for tensor in tensors}) == len(tensors)


def test_reading_a_lazy_clone_in_place_keeps_it_lazy() -> None:
    clone = torch._lazy_clone(torch.randn(100))
    view = clone[10:]
    layouts.content_hash(clone)
    layouts.pack(view)
    assert torch._C._is_cow_tensor(clone), "hashing copied the snapshot's memory"
    assert bytes(layouts.view_bytes(view)) == view.numpy().tobytes()


def sparse_tensors() -> dict[str, torch.Tensor]:
    dense = torch.tensor([[0, 1.5, 0, 0], [2.5, 0, 0, 0], [0, 0, 0, -0.0], [0, 7, 0, 0]])
    indices = torch.tensor([[0, 0, 1], [2, 2, 0]])
    return {
        "coo": dense.to_sparse(),
        "coo uncoalesced": torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (2, 3)),
        "coo hybrid": torch.sparse_coo_tensor(indices[:1], torch.randn(3, 2), (2, 2)),
        "coo empty": torch.sparse_coo_tensor(size=(3, 4)),
        "csr": dense.to_sparse_csr(),
        "csr batched": torch.stack([dense, dense]).to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 1)),
        "bf16": dense.bfloat16().to_sparse(),
        "complex128": dense.to(torch.complex128).to_sparse(),
    }


def components(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


@pytest.mark.parametrize(
    "kind",
    [
        "coo",
        "coo uncoalesced",
        "coo hybrid",
        "coo empty",
        "csr",
        "csr batched",
        "csc",
        "bsr",
        "bsc",
        "bf16",
        "complex128",
    ],
)
def test_sparse_tensors_come_back_as_such(kind: str, tmp_path: Path) -> None:
    tensor = sparse_tensors()[kind]
    reader = write_trace(tmp_path / "t", [tensor])
    assert reader.complete, reader.end
    back = reader.tensor(0)
    assert (back.layout, back.shape, back.dtype) == (tensor.layout, tensor.shape, tensor.dtype)
    assert all(same_bits(a, b) for a, b in zip(components(tensor), components(back), strict=True))
    if kind.startswith("coo"):
        assert back.is_coalesced() == tensor.is_coalesced()
    assert reader.array(0) is None


def test_nested_tensors_come_back_as_such(tmp_path: Path) -> None:
    pieces = [torch.randn(2, 3), torch.randn(4, 3), torch.randn(1, 3)]
    strided = torch.nested.nested_tensor(pieces)
    jagged = torch.nested.nested_tensor(pieces, layout=torch.jagged)
    starts, lengths = torch.tensor([0, 2, 5]), torch.tensor([3, 1, 4])
    holes = torch.nested.narrow(torch.arange(30.0).view(3, 10), 1, starts, lengths, layout=torch.jagged)
    reader = write_trace(tmp_path / "t", [strided, jagged, jagged.transpose(1, 2), holes])
    assert reader.complete, reader.end
    for seq, tensor in enumerate([strided, jagged, jagged.transpose(1, 2), holes]):
        back = reader.tensor(reader.record(seq).slots[0].content)
        assert back.layout == tensor.layout
        assert back.is_nested
        for a, b in zip(tensor.unbind(), back.unbind(), strict=True):
            assert same_bits(a, b)
    assert reader.content(0).shape == (3, -1, 3)
    assert reader.content(1).shape == (3, -1, 3)
    assert reader.verify() == []


def quantised_tensors() -> dict[str, torch.Tensor]:
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    scales, zeros = torch.rand(6).double() + 0.1, torch.arange(6)
    return {
        "qint8": torch.quantize_per_tensor(values, 0.1, 3, torch.qint8),
        "quint8": torch.quantize_per_tensor(values, 0.1, 3, torch.quint8),
        "qint32": torch.quantize_per_tensor(values, 0.1, 3, torch.qint32),
        "channels": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8),
        "transposed": torch.quantize_per_tensor(values, 0.1, 3, torch.quint8).t(),
        "sliced": torch.quantize_per_tensor(values, 0.1, 3, torch.quint8)[2:, 1:],
        "quint4x2": torch.quantize_per_channel(values, scales.float(), torch.rand(6), 0, torch.quint4x2),
        "scalar": torch.quantize_per_tensor(torch.tensor(0.5), 0.1, 3, torch.qint8),
    }


@pytest.mark.parametrize(
    "kind", ["qint8", "quint8", "qint32", "channels", "transposed", "sliced", "quint4x2", "scalar"]
)
def test_quantised_tensors_come_back_with_their_parameters(kind: str, tmp_path: Path) -> None:
    tensor = quantised_tensors()[kind]
    reader = write_trace(tmp_path / "t", [tensor])
    assert reader.complete, reader.end
    back = reader.tensor(0)
    assert (back.dtype, back.shape, back.qscheme()) == (tensor.dtype, tensor.shape, tensor.qscheme())
    assert torch.equal(back.dequantize(), tensor.dequantize())
    if kind != "quint4x2":
        assert torch.equal(back.int_repr(), tensor.int_repr())
    assert reader.verify() == []


def test_mkldnn_tensor_comes_back_as_such(tmp_path: Path) -> None:
    tensor = torch.randn(3, 4)
    back = write_trace(tmp_path / "t", [tensor.to_mkldnn()]).tensor(0)
    assert back.layout == torch._mkldnn
    assert torch.equal(back.to_dense(), tensor)


def test_meta_and_foreign_tensors_are_counted_not_fatal(tmp_path: Path) -> None:
    class Odd(torch.Tensor):
        pass

    tensors = [torch.empty(3, device="meta"), torch.randn(3).as_subclass(Odd), torch.ones(2)]
    reader = write_trace(tmp_path / "t", tensors)
    assert reader.closed
    assert not reader.complete
    assert reader.num_records == 3
    assert not reader.content(0).has_data
    assert same_bits(reader.tensor(reader.record(2).slots[0].content), torch.ones(2))
    assert reader.end is not None
    assert sum(reader.end["dropped"].values()) == 2, reader.end["dropped"]


def test_what_has_no_memory_is_refused_not_read() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                return args[0]
            raise NotImplementedError(func)

    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (3,), dtype=torch.float32)
    for tensor in (torch.empty(3, device="meta"), wrapper):
        with pytest.raises((TypeError, RuntimeError)):
            layouts.content_hash(tensor)
        with pytest.raises((TypeError, RuntimeError)):
            layouts.view_bytes(tensor)


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(PLAIN_DTYPES), shape=shapes, seed=st.integers(0, 9))
def test_any_view_of_any_dtype_packs_and_unpacks(
    data: st.DataObject, dtype: str, shape: tuple[int, ...], seed: int
) -> None:
    tensor = random_bits(dtype, shape, seed)
    if shape:
        tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
        for dim in range(len(shape)):
            step = data.draw(st.integers(1, 3))
            tensor = tensor[(slice(None),) * dim + (slice(data.draw(st.integers(0, 2)), None, step),)]
        if data.draw(st.booleans()):
            tensor = tensor.unsqueeze(0).expand(data.draw(st.integers(1, 3)), *tensor.shape)
    packed = layouts.pack(tensor)
    encoding = json.loads(json.dumps(packed.encoding))
    assert num_parts(encoding) == len(packed.parts)
    back = unpack(packed.parts, encoding)
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    plain = tensor.view(carrier[tensor.element_size()]).contiguous().view(tensor.dtype)
    other = back.view(carrier[tensor.element_size()]).contiguous().view(tensor.dtype)
    assert same_bits(plain, other)
    assert layouts.content_digest(tensor) == layouts.content_digest(tensor, packed)
    assert layouts.content_hash(tensor) == layouts.content_hash(plain)


def test_open_rank_helper_finds_one_rank(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [torch.ones(1)])
    assert open_rank(tmp_path / "t").rank == 0
