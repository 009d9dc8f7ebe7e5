"""The reader: whole frames stay readable whatever happened to the rest; damage is named, never passed on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_records import content, op_record, open_rank, reserve_and_put, same_bits, write_trace

from dispatch_trace.errors import NotATraceError, NotExecutableError, SchemaVersionError, TraceFormatError
from dispatch_trace.schema import SCHEMA_VERSION, RawRecord, RawSlot, StoredRecord
from dispatch_trace.store.columns import decode_column, int_column, value_column
from dispatch_trace.store.reader import open_ranks
from dispatch_trace.store.records import RecordsFrame, encode_records
from dispatch_trace.store.unpack import unpack
from dispatch_trace.store.writer import TraceWriter


def three_frames(path: Path) -> Path:
    """A trace of three records, a frame and a shard each; returns the rank's directory."""
    writer = TraceWriter(path, {})
    for seq in range(3):
        reserve_and_put(writer, op_record(seq, content(torch.arange(100.0) + seq), module=f"layers.{seq}"))
        writer.flush()
    writer.close()
    return path / "rank0"


def payloads(path: Path) -> list[tuple[bytes, int]]:
    """The payload of every frame of an index, and where its pair ends."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(path.read_bytes())
    return [(payload, unpacker.tell()) for _, payload in unpacker]


def rewrite(path: Path, change: Any) -> None:
    """Applies `change` to every frame of an index; a frame it returns None for is left out."""
    frames = [msgpack.unpackb(payload) for payload, _ in payloads(path)]
    with path.open("wb") as file:
        for frame in map(change, frames):
            if frame is not None:
                payload = msgpack.packb(frame)
                file.write(msgpack.packb([zlib.crc32(payload), payload]))


# What is no trace -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text("x"), "is a file; a trace is a directory"),
        (lambda path: path.mkdir(), "holds no rank directory with an index"),
        (lambda path: (path / "rank0").mkdir(parents=True), "holds no rank directory with an index"),
        (lambda path: (path / "rankless").mkdir(parents=True), "holds no rank directory with an index"),
    ],
)
def test_what_is_no_trace_is_named_so(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "t")
    with pytest.raises(NotATraceError, match=message):
        open_ranks(tmp_path / "t")


def test_index_without_a_header_is_a_format_error(tmp_path: Path) -> None:
    (tmp_path / "t" / "rank0").mkdir(parents=True)
    (tmp_path / "t" / "rank0" / "index-00000.msgpack").write_bytes(b"")
    with pytest.raises(TraceFormatError, match="no readable header"):
        open_ranks(tmp_path / "t")
    (tmp_path / "t" / "rank0" / "index-00000.msgpack").write_bytes(b"this is no msgpack \xc1\xff" * 9)
    with pytest.raises(TraceFormatError, match=r"no readable header.*broken at byte 0"):
        open_ranks(tmp_path / "t")


def test_index_that_cannot_be_read_is_a_format_error(tmp_path: Path) -> None:
    (tmp_path / "t" / "rank0" / "index-00000.msgpack").mkdir(parents=True)
    with pytest.raises(TraceFormatError, match=r"no readable header.*cannot be read: Is a directory"):
        open_ranks(tmp_path / "t")


def test_rank_without_an_index_is_named(tmp_path: Path) -> None:
    three_frames(tmp_path / "t")
    (tmp_path / "t" / "rank1").mkdir()
    reader = open_rank(tmp_path / "t")
    assert reader.problems == ["rank1 has no index"]
    assert not reader.complete


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "t", {"schema_version": SCHEMA_VERSION + 1}).close()
    with pytest.raises(
        SchemaVersionError, match=f"schema version {SCHEMA_VERSION + 1}.*reads up to {SCHEMA_VERSION}"
    ):
        open_ranks(tmp_path / "t")


def test_ranks_come_in_order_and_one_can_be_opened_alone(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        TraceWriter(tmp_path / "t", {}, rank=rank).close()
    assert [reader.rank for reader in open_ranks(tmp_path / "t")] == [0, 2, 10]
    assert [reader.rank for reader in open_ranks(tmp_path / "t" / "rank2")] == [2]


# Damage -----------------------------------------------------------------------------------------------


def test_torn_tail_is_read_up_to_the_last_whole_frame(tmp_path: Path) -> None:
    index = three_frames(tmp_path / "t") / "index-00000.msgpack"
    whole = index.read_bytes()
    ends = [end for _, end in payloads(index)]
    kinds = [msgpack.unpackb(payload)["type"] for payload, _ in payloads(index)]
    assert kinds == ["header", "shard", "records", "shard", "records", "shard", "records", "end"]
    for cut in range(ends[0], len(whole)):
        if cut % 37 and cut not in ends and cut + 1 not in ends:
            continue
        index.write_bytes(whole[:cut])
        reader = open_rank(tmp_path / "t")
        records = sum(kind == "records" and end <= cut for kind, end in zip(kinds, ends, strict=True))
        assert reader.num_records == records, f"cut at byte {cut}"
        assert [record.seq for record in reader.records()] == list(range(records))
        assert not reader.closed
        assert not reader.complete
        assert bool(reader.problems) == (cut not in ends)
        if cut not in ends:
            assert "torn" in reader.problems[0] or "broken" in reader.problems[0]
        for record in reader.records():
            assert reader.tensor(record.slots[0].content)[0] == record.seq
    index.write_bytes(whole)
    assert open_rank(tmp_path / "t").complete


def test_flipped_bit_in_the_index_never_goes_unnoticed(tmp_path: Path) -> None:
    index = three_frames(tmp_path / "t") / "index-00000.msgpack"
    whole = index.read_bytes()
    for position in range(0, len(whole), 23):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        index.write_bytes(damaged)
        try:
            reader = open_rank(tmp_path / "t")
        except TraceFormatError:
            continue  # the header
        assert reader.problems, f"byte {position}"
        assert not reader.complete
        assert reader.verify()
        for record in reader.records():
            assert record.module == f"layers.{record.seq}"
            assert reader.tensor(record.slots[0].content)[0] == record.seq


def test_corrupt_frame_costs_its_own_records_only(tmp_path: Path) -> None:
    index = three_frames(tmp_path / "t") / "index-00000.msgpack"
    whole = index.read_bytes()
    position = whole.index(b"layers.1")
    index.write_bytes(whole.replace(b"layers.1", b"layers.9"))
    reader = open_rank(tmp_path / "t")
    assert [record.seq for record in reader.records()] == [0, 2]
    assert len(reader.problems) == 1
    assert "is corrupt" in reader.problems[0]
    assert reader.closed
    assert not reader.complete
    with pytest.raises(KeyError, match="rank 0 holds no record 1"):
        reader.record(1)
    with pytest.raises(KeyError, match="rank 0 holds no content 1"):
        reader.content(1)
    assert any("num_records=3; 2 can be read" in problem for problem in reader.verify()), position


def test_missing_segment_is_named(tmp_path: Path) -> None:
    rank = three_frames(tmp_path / "t")
    shutil.copy(rank / "index-00000.msgpack", rank / "index-00002.msgpack")
    reader = open_rank(tmp_path / "t")
    assert reader.problems == ["index-00001.msgpack is missing"]
    assert not reader.complete


def test_missing_shard_is_named_and_the_rest_stays_readable(tmp_path: Path) -> None:
    rank = three_frames(tmp_path / "t")
    (rank / "shard-00001.safetensors").unlink()
    reader = open_rank(tmp_path / "t")
    assert reader.problems == ["shard-00001.safetensors is missing"]
    assert reader.closed
    assert not reader.complete
    with pytest.raises(TraceFormatError, match=r"shard-00001\.safetensors is missing"):
        reader.tensor(1)
    with pytest.raises(TraceFormatError, match=r"shard-00001\.safetensors is missing"):
        reader.sketch(1)
    assert reader.content(1).stats["n"] == 100, "statistics lie in the index"
    assert reader.tensor(0)[0] == 0
    assert reader.tensor(2)[0] == 2
    assert any("shard-00001.safetensors" in problem for problem in reader.verify())


def test_shard_of_another_size_is_named(tmp_path: Path) -> None:
    shard = three_frames(tmp_path / "t") / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    reader = open_rank(tmp_path / "t")
    assert len(reader.problems) == 1
    assert "shard-00001.safetensors has" in reader.problems[0]
    for read in (reader.tensor, reader.array, reader.sketch):
        with pytest.raises(TraceFormatError, match=r"shard-00001\.safetensors has \d+ bytes; the index says"):
            read(1)


@pytest.mark.parametrize("place", ["header length", "header", "data", "sketch"])
def test_shard_whose_bytes_do_not_match_is_named(place: str, tmp_path: Path) -> None:
    shard = three_frames(tmp_path / "t") / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    value = np.float32(50).tobytes()  # once in the data; the sketch is the last tensor or the first
    position = {
        "header length": 6,
        "header": 20,
        "data": data.index((np.arange(100, dtype=np.float32) + 1).tobytes()) + 8,
        "sketch": 0,
    }[place]
    if place == "sketch":
        length = int.from_bytes(data[:8], "little")
        start = data.index((np.arange(100, dtype=np.float32) + 1).tobytes())
        position = start + 400 if start == 8 + length else start - 4
    data[position] ^= 0x40
    shard.write_bytes(data)
    reader = open_rank(tmp_path / "t")
    message = r"shard-00001\.safetensors"
    assert len(value) == 4
    if place == "sketch":
        assert same_bits(reader.tensor(1), torch.arange(100.0) + 1)
        with pytest.raises(TraceFormatError, match=message + " is corrupt: its sketches"):
            reader.sketch(1)
    else:
        with pytest.raises(TraceFormatError, match=message):
            reader.tensor(1)
        with pytest.raises(TraceFormatError, match=message):
            reader.array(1)
    assert any("shard-00001.safetensors" in problem for problem in reader.verify())
    assert reader.tensor(2)[0] == 2


def test_file_names_in_an_index_are_never_paths(tmp_path: Path) -> None:
    rank = three_frames(tmp_path / "t")
    secret = tmp_path / "secret.safetensors"
    shutil.copy(rank / "shard-00001.safetensors", secret)

    def escape(frame: dict[str, Any]) -> dict[str, Any]:
        if frame["type"] == "shard" and frame["number"] == 1:
            frame["file"] = "../../secret.safetensors"
        return frame

    rewrite(rank / "index-00000.msgpack", escape)
    reader = open_rank(tmp_path / "t")
    assert len(reader.problems) == 1
    assert "is no name of a shard" in reader.problems[0]
    secret.unlink()
    assert reader.tensor(1)[0] == 1, "the shard is found by its number"


def test_frames_of_unknown_type_or_shape_are_not_fatal(tmp_path: Path) -> None:
    rank = three_frames(tmp_path / "t")

    def change(frame: dict[str, Any]) -> dict[str, Any]:
        if frame["type"] == "records" and frame["first_seq"] == 1:
            del frame["num_records"]
        if frame["type"] == "end":
            frame["added later"] = 1
        return frame

    rewrite(rank / "index-00000.msgpack", change)
    reader = open_rank(tmp_path / "t")
    assert [record.seq for record in reader.records()] == [0, 2]
    assert len(reader.problems) == 1
    assert "cannot be read" in reader.problems[0]


def test_broken_columns_are_format_errors(tmp_path: Path) -> None:
    rank = three_frames(tmp_path / "t")

    def change(frame: dict[str, Any]) -> dict[str, Any]:
        if frame["type"] == "records" and frame["first_seq"] == 1:
            frame["record"] = msgpack.packb({"seq": ["range", 1], "kind": ["<i4", b"\0" * 12]})
        return frame

    rewrite(rank / "index-00000.msgpack", change)
    with pytest.raises(TraceFormatError, match=r"3 rows instead of 1|lacks the column"):
        list(open_rank(tmp_path / "t").records())


def test_crafted_indices_raise_format_errors_only(tmp_path: Path) -> None:
    rank = three_frames(tmp_path / "t")
    whole = (rank / "index-00000.msgpack").read_bytes()
    changes: list[tuple[str, str, Any]] = [
        ("record", "module", ["const", 99]),
        ("record", "args", ["const", 10**6]),
        ("record", "num_slots", ["const", "x"]),
        ("slot", "geometry", ["const", 77]),
        ("slot", "name", ["values", msgpack.packb([{}])]),
        ("content", "type", ["const", 99]),
        ("content", "tensor", ["const", 12345]),
        ("content", "shard", ["const", 7]),
        ("content", "hash", ["values", msgpack.packb(["x"])]),
        ("content", "encoding", ["const", 0]),
        ("content", "sketch_row", ["const", 5]),
    ]
    for table, column, value in changes:

        def change(
            frame: dict[str, Any], table: str = table, column: str = column, value: Any = value
        ) -> Any:
            if frame["type"] == "records" and frame["first_seq"] == 1:
                columns = msgpack.unpackb(frame[table]) | {column: value}
                frame[table] = msgpack.packb(columns)
            return frame

        (rank / "index-00000.msgpack").write_bytes(whole)
        rewrite(rank / "index-00000.msgpack", change)
        reader = open_rank(tmp_path / "t")
        raised = 0
        for read in (reader.record, reader.content, reader.tensor, reader.array, reader.sketch):
            try:
                read(1)
            except (TraceFormatError, KeyError):
                raised += 1
        assert raised, f"{table}.{column} = {value} went unnoticed"
        assert reader.verify(), f"{table}.{column} = {value} passed verification"
        assert reader.tensor(2)[0] == 2


@pytest.mark.parametrize(
    "encoding",
    [
        {"form": "bytes", "dtype": "complex128", "shape": [7]},
        {"form": "bytes", "dtype": "os", "shape": [100]},
        {"form": "bytes"},
        {"form": "expanded", "shape": [3], "of": {}},
        {"form": "sparse_coo", "shape": [2], "coalesced": True, "parts": [{}, {}]},
        {"form": "sparse_csr", "shape": [2, 2], "parts": [{}]},
        {"form": "jagged", "parts": []},
        {"form": "quantized", "dtype": "qint8", "shape": [2], "scheme": "x", "scale": 1.0, "zero_point": 0},
        {"form": "none such"},
        {"form": 3},
    ],
)
def test_encodings_that_do_not_fit_are_refused(encoding: dict[str, Any]) -> None:
    with pytest.raises(TraceFormatError):
        unpack([torch.arange(100.0)], encoding)


def test_offsets_and_indices_outside_their_values_are_refused() -> None:
    values = torch.arange(6.0).view(3, 2)
    jagged = {"form": "jagged", "ragged_dim": 1, "min_length": None, "max_length": None, "parts": [{}, {}]}
    assert unpack([values, torch.tensor([0, 1, 3])], jagged).is_nested
    for offsets in ([0, 1, 9], [0, 2, 1], [-1, 1, 3]):
        with pytest.raises(TraceFormatError, match="offsets outside"):
            unpack([values, torch.tensor(offsets)], jagged)
    sparse = {"form": "sparse_coo", "shape": [4], "coalesced": False, "parts": [{}, {}]}
    with pytest.raises(TraceFormatError, match="does not fit"):
        unpack([torch.tensor([[9]]), torch.ones(1)], sparse)


# What comes back --------------------------------------------------------------------------------------

small_ints = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ref", "dtype", "dict"]), inner)
    ),
    max_leaves=5,
)
dims = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
slots = st.builds(
    RawSlot,
    texts,
    st.sampled_from(["in", "out", "written"]),
    value=plain,
    is_tensor=st.booleans(),
    dtype=texts,
    shape=dims,
    strides=st.none() | dims,
    offset=st.none() | st.integers(0, 2**50),
    device=texts,
    layout=texts,
    storage=small_ints,
    storage_bytes=small_ints,
    alignment=st.integers(0, 63),
    producers=st.lists(st.tuples(small_ints, st.integers(0, 9)), max_size=3).map(tuple),
    leaf=st.booleans(),
    uninitialised=st.booleans(),
    note=texts,
)
records = st.builds(
    RawRecord,
    st.integers(0, 2**40),
    st.sampled_from(["op", "module", "inline", "param"]),
    step=st.integers(-1, 2**33),
    model=texts,
    grad_phase=st.sampled_from(["fwd", "bwd", "recompute"]),
    module=texts,
    call=st.integers(-1, 5),
    op=texts,
    n=st.integers(0, 300),
    overload=texts,
    name=texts,
    args=st.lists(st.tuples(texts, plain), max_size=3),
    slots=st.lists(slots, max_size=3),
    source=st.none() | st.tuples(texts, st.integers(0, 10**6)),
    light=st.booleans(),
    random=st.booleans(),
    producer=st.integers(-1, 10**7),
    thread=st.integers(0, 9),
    note=texts,
)


def as_lists(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return value


def assert_same(stored: StoredRecord, raw: RawRecord) -> None:
    for name in RawRecord.__slots__:
        if name not in ("slots", "args"):
            assert getattr(stored, name) == getattr(raw, name), name
    assert [list(arg) for arg in stored.args] == as_lists(raw.args)
    for index, (stored_slot, raw_slot) in enumerate(zip(stored.slots, raw.slots, strict=True)):
        assert stored_slot.index == index
        assert stored_slot.content == -1
        for name in RawSlot.__slots__:
            if name not in ("content", "value"):
                assert getattr(stored_slot, name) == getattr(raw_slot, name), name
        assert stored_slot.value == as_lists(raw_slot.value)


@settings(max_examples=80, deadline=None)
@given(st.lists(records, min_size=1, max_size=5))
def test_any_records_round_trip(raw: list[RawRecord]) -> None:
    frame = RecordsFrame(msgpack.unpackb(encode_records(raw, [], None)), rank=0)
    stored = list(frame.records(range(len(raw))))
    assert len(stored) == len(raw)
    for stored_record, raw_record in zip(stored, raw, strict=True):
        assert_same(stored_record, raw_record)


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300), max_size=20))
def test_any_integers_round_trip(values: list[int]) -> None:
    column = msgpack.unpackb(msgpack.packb(int_column(values)))
    assert decode_column(column, len(values)) == values


@given(st.lists(plain, max_size=10))
def test_any_values_round_trip(values: list[Any]) -> None:
    column = msgpack.unpackb(msgpack.packb(value_column(values)))
    assert decode_column(column, len(values)) == as_lists(values)


def test_columns_take_their_smallest_form() -> None:
    assert int_column([7, 7, 7]) == ["const", 7]
    assert int_column([3, 4, 5]) == ["range", 3]
    assert int_column([0, 127, -128]) == ["i1", b"\x00\x7f\x80"]
    assert int_column([0, 128])[0] == "<i2"
    assert int_column([0, 2**31 - 1])[0] == "<i4"
    assert int_column([0, 2**31])[0] == "<i8"
    assert value_column([None, None]) == ["const", None]


def test_unknown_column_encoding_is_a_format_error() -> None:
    with pytest.raises(TraceFormatError, match="unknown column encoding 'O'"):
        decode_column(["O", b"\0" * 8], 1)
    with pytest.raises(TraceFormatError, match="cannot be decoded"):
        decode_column(["<i4", b"\0" * 7], 1)


def test_filters_build_only_what_matches(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {})
    for seq in range(20):
        writer.put(
            RawRecord(seq, "op" if seq % 2 else "module", step=seq // 10, module=f"m{seq % 3}", n=seq % 4)
        )
        if seq == 9:
            writer.flush()
    writer.close()
    reader = open_rank(tmp_path / "t")
    assert [record.seq for record in reader.records(module="m1", kind="op")] == [1, 7, 13, 19]
    assert [record.seq for record in reader.records(step=1, n=3)] == [11, 15, 19]
    assert list(reader.records(module="none such")) == []
    assert reader.record(17).module == "m2"
    with pytest.raises(KeyError, match="colour"):
        list(reader.records(colour=1))


def test_sequence_numbers_may_have_gaps_and_disorder(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {})
    for seq in (5, 3, 40, 7):
        writer.put(RawRecord(seq, "op", step=0, module=str(seq)))
    writer.close()
    reader = open_rank(tmp_path / "t")
    assert [record.seq for record in reader.records()] == [5, 3, 40, 7], "in the order of writing"
    assert [reader.record(seq).module for seq in (3, 5, 7, 40)] == ["3", "5", "7", "40"]
    for missing in (4, 41, -1):
        with pytest.raises(KeyError, match=f"no record {missing}"):
            reader.record(missing)


def test_content_without_data_says_how_to_get_it(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {})
    reserve_and_put(writer, op_record(0, content(torch.ones(2, 3), keep_data=False)))
    writer.close()
    reader = open_rank(tmp_path / "t")
    assert reader.array(0) is None
    assert not reader.content(0).has_data
    with pytest.raises(NotExecutableError, match="save='tensors'"):
        reader.tensor(0)
    assert reader.verify() == []


def test_tensor_is_the_callers_own(tmp_path: Path) -> None:
    reader = write_trace(tmp_path / "t", [torch.ones(1000)])
    reader.tensor(0).zero_()
    array = reader.array(0)
    assert array is not None
    array[:] = 0
    assert torch.equal(reader.tensor(0), torch.ones(1000))
    assert reader.verify() == []


def test_opening_decodes_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = three_frames(tmp_path / "t")
    made = []
    original = RecordsFrame.__init__
    monkeypatch.setattr(RecordsFrame, "__init__", lambda self, *a: (made.append(1), original(self, *a))[1])
    reader = open_rank(rank.parent)
    assert (reader.num_records, reader.num_contents, reader.closed) == (3, 3, True)
    assert made == []
    reader.record(1)
    assert made == [1], "one frame is decoded for one record"


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    three_frames(tmp_path / "t")
    source = """
import sys
from dispatch_trace.store.reader import open_ranks
(reader,) = open_ranks(sys.argv[1])
assert [record.module for record in reader.records()] == ["layers.0", "layers.1", "layers.2"]
assert reader.sketch(1).shape == (251,) and reader.array(1)[3] == 4 and reader.content(1).stats["max"] == 100
assert "torch" not in sys.modules, "torch was imported"
"""
    root = str(Path(__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path / "t")],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


def test_nothing_is_unpickled_or_evaluated() -> None:
    store = Path(__file__).parent.parent / "dispatch_trace" / "store"
    for path in store.glob("*.py"):
        text = path.read_text()
        for word in ("pickle", "eval(", "exec(", "torch.load", "marshal"):
            assert word not in text, f"{path.name} mentions {word}"
