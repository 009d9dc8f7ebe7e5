"""The writer: durable in time, bounded in memory, silent towards the program, honest in its end frame."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raw_records import content, op_record, open_rank, reserve_and_put, same_bits, write_trace

from dispatch_trace.errors import CaptureError, NotExecutableError, TraceExistsError
from dispatch_trace.schema import STATISTICS, RawRecord, RawSlot, StepInfo
from dispatch_trace.store import frames
from dispatch_trace.store.reader import open_ranks
from dispatch_trace.store.writer import TraceWriter

REPOSITORY = Path(__file__).parent.parent


def run_program(
    source: str, *arguments: str, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program of its own, as a user's would run."""
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        env=os.environ | {"PYTHONPATH": path} | (environment or {}),
        capture_output=True,
        text=True,
        **{"timeout": 120} | options,
    )


def eventually(condition: Any, timeout_s: float = 10.0) -> float:
    """Waits for a condition; returns how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, "the condition did not come true in time"
        time.sleep(0.02)
    return time.monotonic() - start


# What is stored ---------------------------------------------------------------------------------------


def test_content_shared_by_slots_and_records_is_worked_on_once(tmp_path: Path) -> None:
    shared = content(torch.randn(4))
    writer = TraceWriter(tmp_path / "t", {})
    reserve_and_put(writer, op_record(0, shared, shared))
    reserve_and_put(writer, op_record(1, shared))
    writer.close()
    reader = open_rank(tmp_path / "t")
    ids = [slot.content for record in reader.records() for slot in record.slots]
    assert ids == [0, 0, 0]
    assert shared.id == 0
    assert shared.tensor is None, "the snapshot must be let go"
    assert (writer.num_records, writer.num_contents) == (2, 1)


def test_equal_values_are_stored_once(tmp_path: Path) -> None:
    value = torch.randn(1000)
    reader = write_trace(tmp_path / "t", [value.clone(), torch.zeros(3), value.clone(), value.view(10, 100)])
    ids = [record.slots[0].content for record in reader.records()]
    assert ids[0] == ids[2]
    assert len(set(ids)) == 3, "another shape is another content"
    assert reader.end is not None
    assert reader.end["num_contents"] == 3
    assert sum(shard.stat().st_size for shard in reader.path.glob("shard-*")) < 3 * 4000 + 3 * 1004 + 2000


def test_data_wanted_later_is_stored_later(tmp_path: Path) -> None:
    value = torch.randn(10)
    writer = TraceWriter(tmp_path / "t", {})
    for seq, keep in enumerate([False, True, False]):
        reserve_and_put(writer, op_record(seq, content(value.clone(), keep_data=keep)))
    writer.close()
    reader = open_rank(tmp_path / "t")
    ids = [record.slots[0].content for record in reader.records()]
    assert ids == [0, 1, 1]
    assert same_bits(reader.tensor(1), value)
    assert reader.content(0).hash == reader.content(1).hash
    with pytest.raises(NotExecutableError, match=r"content 0 \(float32 \[10\]\) was recorded without data"):
        reader.tensor(0)


def test_statistics_and_sketch_come_back(tmp_path: Path) -> None:
    value = torch.tensor([1.0, -2.0, float("nan"), float("inf"), 0.0])
    reader = write_trace(tmp_path / "t", [value, torch.tensor([2**62, 2**62, 2**62, 2**62])])
    stats = reader.content(0).stats
    assert list(stats) == list(STATISTICS)
    assert (stats["n"], stats["nan"], stats["posinf"], stats["neginf"], stats["zeros"]) == (5, 1, 1, 0, 1)
    assert (stats["min"], stats["max"], stats["sum"], stats["sq_sum"]) == (-2.0, 1.0, -1.0, 5.0)
    assert reader.content(1).stats["sum"] == 2**64, "integers beyond 64 bits stay exact"
    sketch = reader.sketch(0)
    assert sketch is not None
    assert sketch.shape == (251,)
    assert sketch.dtype == np.float32
    assert float(np.linalg.norm(sketch)) == pytest.approx(5**0.5)
    assert reader.verify() == []


def test_statistics_of_empty_tensors_are_undefined(tmp_path: Path) -> None:
    stats = write_trace(tmp_path / "t", [torch.empty(0, 3)]).content(0).stats
    assert stats["n"] == 0
    assert stats["min"] is None
    assert stats["max"] is None


def test_chosen_statistics_and_no_sketch(tmp_path: Path) -> None:
    reader = write_trace(tmp_path / "t", [torch.ones(3)], stats=("n", "max"), sketch=False)
    stats = reader.content(0).stats
    assert {name for name, value in stats.items() if value is not None} == {"n", "max"}
    assert reader.sketch(0) is None
    assert not reader.content(0).has_sketch


def test_steps_are_kept_and_a_later_one_replaces(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {})
    writer.put_step(StepInfo(step=0, meta={"phase": "prefill"}))
    writer.put_step(StepInfo(step=1))
    writer.flush()
    writer.put_step(StepInfo(step=1, meta={"positions": (3, 4), "req_ids": ["a"], "big": 2**70}))
    writer.close()
    steps = open_rank(tmp_path / "t").steps
    assert [step.step for step in steps] == [0, 1]
    assert steps[0].meta == {"phase": "prefill"}
    assert steps[1].meta["positions"] == [3, 4]
    assert steps[1].meta["req_ids"] == ["a"]


def test_header_is_kept_and_can_be_amended(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {"model_class": None, "options": {"level": "op"}}, rank=3)
    writer.amend_header({"model_class": "Net"})
    writer.close()
    header = open_rank(tmp_path / "t").header
    assert header["model_class"] == "Net"
    assert header["options"] == {"level": "op"}
    assert header["rank"] == 3
    assert header["schema_version"] == 1
    assert abs(header["start_time_s"] - time.time()) < 60


def test_end_frame_counts_and_confesses(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {})
    reserve_and_put(writer, op_record(0, content(torch.ones(2))))
    writer.drop("opaque region", 3)
    writer.drop("opaque region")
    writer.mark_perturbed("outputs differ with taps")
    writer.close(aborted=True)
    reader = open_rank(tmp_path / "t")
    assert reader.end is not None
    assert reader.end["dropped"] == {"opaque region": 4}
    assert reader.end["perturbed"] == ["outputs differ with taps"]
    assert reader.end["aborted"] is True
    assert (reader.end["num_records"], reader.end["num_contents"], reader.end["num_shards"]) == (1, 1, 1)
    on_disk = sum(file.stat().st_size for file in reader.path.iterdir())
    assert writer.bytes_written == on_disk
    assert reader.closed
    assert not reader.complete, "something was dropped"


def test_odd_plain_values_never_fail(tmp_path: Path) -> None:
    class Thing:
        pass

    args = [
        ("a", 2**100),
        ("b", Thing()),
        ("c", (1, None, 2.5)),
        ("d", "\ud800"),
        ("e", np.float32(0.5)),
        ("f", {1}),
    ]
    writer = TraceWriter(tmp_path / "t", {})
    writer.put(RawRecord(0, "op", step=0, args=args))
    writer.close()
    stored = dict(open_rank(tmp_path / "t").record(0).args)
    assert stored["a"] == 2**100
    assert stored["b"]["opaque"].endswith("Thing")
    assert stored["c"] == [1, None, 2.5]
    assert stored["d"] == "\\ud800"
    assert stored["e"] == 0.5
    assert stored["f"] == [1]


def test_max_bytes_stops_data_and_says_so(tmp_path: Path) -> None:
    reader = write_trace(tmp_path / "t", [torch.randn(100) for _ in range(5)], max_bytes=1000)
    assert [content.has_data for content in reader.contents()] == [True, True, False, False, False]
    assert all(content.stats and content.has_sketch for content in reader.contents()), "statistics go on"
    assert reader.end is not None
    assert reader.end["dropped"] == {"data beyond max_bytes": 3}
    assert not reader.complete


# In time ----------------------------------------------------------------------------------------------


def test_flush_makes_everything_readable(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {})
    value = torch.randn(5)
    for seq in range(3):
        reserve_and_put(writer, op_record(seq, content(value + seq)))
        writer.flush()
        reader = open_rank(tmp_path / "t")
        assert reader.num_records == seq + 1
        assert same_bits(reader.tensor(seq), value + seq)
        assert not reader.closed
        assert reader.problems == [], "a trace that is still open is not torn"
    writer.close()


def test_what_is_pending_reaches_the_disk_by_age(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {})
    reserve_and_put(writer, op_record(0, content(torch.ones(2))))
    assert eventually(lambda: open_rank(tmp_path / "t").num_records == 1) < 2.0
    writer.close()


def test_worker_that_is_behind_still_writes_large_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch_trace.store.writer.BATCH_AGE_S", -1.0)  # everything is overdue
    writer = TraceWriter(tmp_path / "t", {})
    start = time.monotonic()
    for seq in range(5000):
        writer.put(RawRecord(seq, "op", step=0))
    writer.close()
    allowed = (time.monotonic() - start) / 0.25 + 3
    num_frames = len(open_rank(tmp_path / "t")._entries)
    assert num_frames <= allowed, f"{num_frames} frames: each costs a flush to the disk"


def test_what_is_pending_reaches_the_disk_by_size(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {}, max_pending_bytes=1 << 20)
    for seq in range(8):
        reserve_and_put(writer, op_record(seq, content(torch.randn(50_000))))
    written = open_rank(tmp_path / "t").num_records
    assert written >= 3, "at most 1 MiB, five of these, may still pend"
    writer.close()
    assert open_rank(tmp_path / "t").num_records == 8


def test_segments_roll_and_stand_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SEGMENT_BYTES", 4000)
    writer = TraceWriter(tmp_path / "t", {})
    for seq in range(6):
        reserve_and_put(writer, op_record(seq, content(torch.full((3,), float(seq)))))
        writer.flush()
    writer.close()
    segments = sorted(path.name for path in writer.directory.glob("index-*"))
    assert len(segments) >= 2
    assert segments == [f"index-{number:05d}.msgpack" for number in range(len(segments))]
    reader = open_rank(tmp_path / "t")
    assert reader.complete
    assert [record.seq for record in reader.records()] == list(range(6))


def test_sigkill_leaves_everything_older_than_two_seconds(tmp_path: Path) -> None:
    source = """
        import sys, time, torch
        from raw_records import content, op_record, reserve_and_put
        from dispatch_trace.store.writer import TraceWriter
        writer = TraceWriter(sys.argv[1], {})
        for seq in range(10**9):
            reserve_and_put(writer, op_record(seq, content(torch.full((5000,), float(seq)))))
            print(seq, time.time(), flush=True)
            time.sleep(0.002)
        """
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), str(tmp_path / "t")],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    try:
        start = None
        for line in process.stdout:
            lines.append(line.split())
            start = start or time.monotonic()
            if time.monotonic() - start > 3.5:
                break
        killed = time.time()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    old = [int(seq) for seq, put_at in lines if killed - float(put_at) > 2.0]
    assert len(old) > 10, "the program hardly ran"
    reader = open_rank(tmp_path / "t")
    assert not reader.closed
    assert not reader.complete
    for seq in old:
        stored = reader.record(seq).slots[0].content
        assert reader.tensor(stored)[0] == seq
    assert reader.num_records >= len(old)
    assert reader.verify() == ["no end frame: the trace was not closed"]


def test_program_that_exits_without_closing_leaves_a_whole_trace(tmp_path: Path) -> None:
    source = """
        import sys, torch
        from raw_records import content, op_record, reserve_and_put
        from dispatch_trace.store.writer import TraceWriter
        writer = TraceWriter(sys.argv[1], {})
        reserve_and_put(writer, op_record(0, content(torch.ones(3))))
        """
    result = run_program(source, str(tmp_path / "t"))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    reader = open_rank(tmp_path / "t")
    assert reader.num_records == 1
    assert reader.end is not None
    assert reader.end["aborted"] is True


# In bounds --------------------------------------------------------------------------------------------


def test_pending_snapshots_stay_within_the_bound(tmp_path: Path) -> None:
    bound, size = 4 << 20, 1 << 18
    alive, peak = 0, 0

    def gone() -> None:
        nonlocal alive
        alive -= size

    writer = TraceWriter(tmp_path / "t", {}, max_pending_bytes=bound)
    for seq in range(100):
        writer.reserve(size)
        tensor = torch.randn(size // 4)
        alive += size
        peak = max(peak, alive)
        weakref.finalize(tensor.untyped_storage(), gone)
        writer.put(op_record(seq, content(tensor, num_bytes=size)))
        del tensor
    writer.close()
    assert peak <= bound + size, f"{peak} bytes were alive; {bound} may be"
    assert peak >= bound // 2, "the bound never mattered, so this test proves nothing"
    assert alive == 0
    assert open_rank(tmp_path / "t").complete


def test_single_larger_snapshot_passes_alone(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {}, max_pending_bytes=1000)
    for seq in range(3):
        reserve_and_put(writer, op_record(seq, content(torch.randn(5000))))
    writer.close()
    assert open_rank(tmp_path / "t").num_records == 3


def test_one_record_may_reserve_beyond_the_bound(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {}, max_pending_bytes=10_000)
    contents = []
    for _ in range(20):
        tensor = torch.randn(500)
        writer.reserve(2000)  # nothing of this record is put yet, so waiting would be for ever
        contents.append(content(tensor, num_bytes=2000))
    writer.put(op_record(0, *contents))
    writer.close()
    assert open_rank(tmp_path / "t").num_contents == 20


def test_release_gives_room_back(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {}, max_pending_bytes=1000)
    for _ in range(50):
        writer.reserve(900)
        writer.release(900)
    reserve_and_put(writer, op_record(0, content(torch.randn(10))))
    writer.close()
    assert writer._pending_bytes == 0


def test_records_without_tensors_are_bounded_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatch_trace.store.writer.QUEUE_RECORDS", 1000)
    writer = TraceWriter(tmp_path / "t", {})
    longest = 0
    for seq in range(20_000):
        writer.put(RawRecord(seq, "op", step=0))
        longest = max(longest, len(writer._queue))
    writer.close()
    assert longest <= 1001
    assert open_rank(tmp_path / "t").num_records == 20_000


def test_threads_put_side_by_side(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {}, max_pending_bytes=100_000)

    def work(offset: int) -> None:
        for seq in range(offset, 400, 4):
            reserve_and_put(writer, op_record(seq, content(torch.full((300,), float(seq)))))

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    reader = open_rank(tmp_path / "t")
    assert sorted(record.seq for record in reader.records()) == list(range(400))
    for seq in (0, 123, 399):
        assert reader.tensor(reader.record(seq).slots[0].content)[0] == seq


# Faults -----------------------------------------------------------------------------------------------


def test_unreadable_tensor_is_counted_and_reported_once(tmp_path: Path) -> None:
    faults: list[Exception] = []
    tensors = [torch.empty(3, device="meta"), torch.empty(4, device="meta"), torch.ones(2)]
    reader = write_trace(tmp_path / "t", tensors, on_fault=faults.append)
    assert len(faults) == 1
    assert "meta tensor" in str(faults[0])
    assert reader.end is not None
    assert reader.end["dropped"] == {"unreadable float32 tensor": 2}
    assert same_bits(reader.tensor(2), torch.ones(2))


def test_bad_record_costs_its_batch_only(tmp_path: Path) -> None:
    faults: list[Exception] = []
    writer = TraceWriter(tmp_path / "t", {}, on_fault=faults.append)
    writer.put(op_record(0))
    writer.flush()
    bad: Any = [3, 4]
    writer.put(RawRecord(1, "op", step=0, slots=[RawSlot("out", "out", shape=bad)]))  # not hashable
    writer.flush()
    writer.put(op_record(2))
    writer.close()
    reader = open_rank(tmp_path / "t")
    assert [record.seq for record in reader.records()] == [0, 2]
    assert reader.end is not None
    assert reader.end["dropped"] == {"records not written": 1}
    assert [type(fault) for fault in faults] == [TypeError]


def test_failing_fault_handler_does_not_stop_the_writer(tmp_path: Path) -> None:
    def handler(error: Exception) -> None:
        raise RuntimeError("the handler itself fails")

    writer = TraceWriter(tmp_path / "t", {}, on_fault=handler)
    reserve_and_put(writer, op_record(0, content(torch.empty(3, device="meta"), num_bytes=0)))
    reserve_and_put(writer, op_record(1, content(torch.ones(3))))
    writer.close()
    reader = open_rank(tmp_path / "t")
    assert reader.record(1).seq == 1
    assert reader.closed
    assert not reader.complete


FULL_DISK = """
    import sys, resource, torch
    from raw_records import content, op_record, reserve_and_put
    from dispatch_trace.store.writer import TraceWriter
    if sys.argv[2] != "0":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
    faults = []
    writer = TraceWriter(sys.argv[1], {}, max_pending_bytes=1 << 20, on_fault=faults.append)
    for seq in range(10):
        reserve_and_put(writer, op_record(seq, content(torch.full((1000,), float(seq)))))
        writer.flush()
    for seq in range(10, 40):
        reserve_and_put(writer, op_record(seq, content(torch.full((300_000,), float(seq)))))
    writer.close()
    print([type(fault).__name__ for fault in faults], writer.num_records)
    """


def check_full_disk(result: subprocess.CompletedProcess[str], path: Path) -> None:
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("['OSError'] "), "one fault, reported once"
    (reader,) = open_ranks(path)
    assert reader.num_records >= 10
    assert reader.problems == [], "the index ends with a whole frame"
    for record in reader.records():
        assert reader.tensor(record.slots[0].content)[0] == record.seq
    assert not reader.complete
    assert not list(reader.path.glob("*.tmp"))
    if reader.end is not None:
        assert reader.end["dropped"]["records not written"] == 40 - reader.num_records


def test_full_disk_leaves_what_was_written_and_a_running_program(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk; the file size limit below is the other half")
    try:
        check_full_disk(run_program(FULL_DISK, str(disk / "t"), "0"), disk / "t")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    check_full_disk(run_program(FULL_DISK, str(tmp_path / "t"), "500000"), tmp_path / "t")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_neither_waits_nor_writes(tmp_path: Path) -> None:
    source = """
        import os, sys, torch
        from raw_records import content, op_record, reserve_and_put
        from dispatch_trace.store.writer import TraceWriter
        writer = TraceWriter(sys.argv[1], {}, max_pending_bytes=1000)
        reserve_and_put(writer, op_record(0, content(torch.ones(3))))
        writer.flush()
        child = os.fork()
        if child == 0:
            for seq in range(100, 110):
                reserve_and_put(writer, op_record(seq, content(torch.ones(3000))))
            writer.flush()
            writer.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        reserve_and_put(writer, op_record(1, content(torch.zeros(3))))
        writer.close()
        """
    result = run_program(source, str(tmp_path / "t"))
    assert result.returncode == 0, result.stderr
    reader = open_rank(tmp_path / "t")
    assert [record.seq for record in reader.records()] == [0, 1]
    assert reader.complete
    assert reader.verify() == []


# Taking the path --------------------------------------------------------------------------------------


def test_existing_trace_is_not_overwritten_unasked(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [torch.ones(1)])
    with pytest.raises(TraceExistsError, match=r"rank0 is not empty.*Pass overwrite=True"):
        TraceWriter(tmp_path / "t", {})
    assert open_rank(tmp_path / "t").num_records == 1


def test_overwrite_concerns_this_rank_only(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = TraceWriter(tmp_path / "t", {}, rank=rank)
        for seq in range(3):
            reserve_and_put(writer, op_record(seq, content(torch.full((2,), float(rank)))))
            writer.flush()
        writer.close()
    (tmp_path / "t" / "notes.txt").write_text("mine")
    (tmp_path / "t" / "rank0" / "notes.txt").write_text("mine too")
    write_trace_of_rank_0 = TraceWriter(tmp_path / "t", {}, overwrite=True)
    write_trace_of_rank_0.close()
    first, second = open_ranks(tmp_path / "t")
    assert (first.num_records, second.num_records) == (0, 3)
    assert (tmp_path / "t" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "t" / "rank0" / "notes.txt").read_text() == "mine too"
    assert not list((tmp_path / "t" / "rank0").glob("shard-*")), "shards of the old trace are gone"


def test_path_that_is_a_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("something else")
    with pytest.raises(TraceExistsError, match="is a file; a trace is a directory"):
        TraceWriter(tmp_path / "t", {}, overwrite=True)
    assert (tmp_path / "t").read_text() == "something else"


def test_unwritable_path_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match=r"cannot write a trace to .*Not a directory"):
        TraceWriter(tmp_path / "file" / "t", {})


# Towards the program ----------------------------------------------------------------------------------


def test_closing_twice_and_late_calls_do_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {}, max_pending_bytes=10)
    writer.close()
    writer.close()
    writer.reserve(100)
    writer.reserve(100)
    writer.put(op_record(0, content(torch.ones(3))))
    writer.put_step(StepInfo(step=0))
    writer.release(100)
    writer.flush()
    assert open_rank(tmp_path / "t").num_records == 0
    assert not writer._queue


def test_random_state_threads_and_grad_mode_are_left_alone(tmp_path: Path) -> None:
    state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    before = threading.enumerate()  # a writer that another test abandoned ends once it is collected
    write_trace(tmp_path / "t", [torch.arange(100_000.0), torch.ones(3, requires_grad=True)])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == num_threads
    assert torch.is_grad_enabled()
    left = set(threading.enumerate()) - set(before)
    assert not [thread for thread in left if thread.name == "dispatch_trace writer"]


def test_worker_leaves_the_programs_cores_alone(tmp_path: Path) -> None:
    counts = []

    def make(seq: int) -> RawRecord:
        counts.append(torch.get_num_threads())
        return RawRecord(seq, "op", step=0)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        writer = TraceWriter(tmp_path / "t", {})
        writer.put((make, 0))
        writer.put((make, 1))
        writer.close()
        assert torch.get_num_threads() == 2
        other = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        other.start()
        other.join()
    finally:
        torch.set_num_threads(before)
    assert counts == [1, 1, 2]
    assert [record.seq for record in open_rank(tmp_path / "t").records()] == [0, 1]


_RECORD_MUCH = """
    import sys, torch
    import dispatch_trace as dt
    from dispatch_trace import kernel

    def memory(name):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) >> 10 for line in file if line.startswith(name))

    total, bound = (int(argument) << 20 for argument in sys.argv[2:])
    size = bound // 16
    kernel.find(wait=True)
    torch.set_num_threads(1)

    class Steps(torch.nn.Module):
        def forward(self, x):
            return x + 1

    model, x = Steps(), torch.randn(size // 4)
    with torch.no_grad():
        with dt.record(sys.argv[1] + ".first", model, save="tensors"):
            model(torch.randn(4))  # loads what is loaded when first used
        before = memory("VmRSS")
        with dt.record(sys.argv[1], model, save="tensors", max_pending_bytes=bound):
            for _ in range(total // size):
                x = model(x)
    print(memory("VmHWM") - before)
    """


def check_bound(path: Path, total_mb: int, bound_mb: int) -> None:
    """Records so much through so little, and looks at the most memory that the process ever took."""
    # Else the C library keeps freed blocks of less than 32 MB: what is measured is what the recorder holds.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    sizes = str(total_mb), str(bound_mb)
    result = run_program(_RECORD_MUCH, str(path), *sizes, timeout=3000, environment=environment)
    assert result.returncode == 0, result.stderr
    grown = int(result.stdout)
    print(f"{total_mb} MB through {bound_mb} MB: grew by {grown} MB")
    reader = open_rank(path)
    assert reader.complete
    assert sum(file.stat().st_size for file in reader.path.iterdir()) > total_mb << 20
    # Besides what pends: values of the program, and what it takes to write.
    assert grown <= bound_mb + bound_mb // 4 + 32, f"grew by {grown} MB with {bound_mb} MB allowed to pend"


def test_recording_600_mb_stays_within_64_mb(tmp_path: Path) -> None:
    check_bound(tmp_path / "t", 600, 64)


@pytest.mark.slow
def test_recording_10_gb_stays_within_512_mb(tmp_path: Path) -> None:
    check_bound(tmp_path / "t", 10 << 10, 512)


def test_the_same_bytes_in_another_shape_are_stored_once(tmp_path: Path) -> None:
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    tensors = [values, values.view(2, 3, 4), values.view(torch.int32), values.view(-1)]
    reader = write_trace(tmp_path / "t", tensors)
    contents = list(reader.contents())
    assert len(contents) == 4
    shard = next(reader.path.glob("shard-*.safetensors"))
    assert shard.stat().st_size < 2 * values.nbytes + 4 * 1100, "two of the four share the first one's bytes"
    for stored, tensor in zip(contents, tensors, strict=True):
        assert same_bits(reader.tensor(stored.id), tensor)
        array = reader.array(stored.id)
        assert array is not None and array.shape == tuple(tensor.shape)
    assert reader.verify() == []
