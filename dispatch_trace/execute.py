"""Runs a recorded op graph again, from its leaves, in the recorded precision or in float64.

In its own precision (`dtype=None`) a run gives back the recorded hashes bit for bit: thread count,
strides, aliases and storage alignment are those of the recording, random results come from it. What could not
be restored makes a differing hash "not comparable" instead of wrong. In float64 it gives the values that
BLAME.md's judges need: float casts vanish, casts to integers, bool and float8 are executed.

No code of the model is needed: ops are looked up in `torch.ops`, nothing is unpickled or evaluated.
What may come from the recording instead of being executed, and why: docs/limits.md, "Execution".
Memory is bounded: a storage lives from its first use to its last. `execute_memory` holds the storages,
`execute_ops` resolves names and arguments; `execute_run`
runs one record; what the numbers mean is for `judge` to say.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from dispatch_trace.errors import NotExecutableError
from dispatch_trace.executable import check_executable
from dispatch_trace.execute_memory import copy_of
from dispatch_trace.execute_run import Difference, Execution, Leaf, Run, Values, find_slot
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.store.layouts import content_hash
from dispatch_trace.store.reader import RankReader

Progress = Callable[[int, int], None]


def execute_rank(
    reader: RankReader,
    *,
    dtype: torch.dtype | None = None,
    until: int | None = None,
    progress: Progress | None = None,
) -> Execution:
    """Runs all recorded ops of a rank.

    Args:
      dtype: None for the recorded precision, or torch.float64.
      until: last record to run (its seq).
      progress: called now and then with (records done, records in all).
    Raises:
      NotExecutableError: the trace holds no data of leaves.
    """
    execution = Execution()
    for _ in iterate(reader, dtype=dtype, until=until, execution=execution, progress=progress):
        pass
    return execution


def iterate(
    reader: RankReader,
    *,
    dtype: torch.dtype | None = None,
    until: int | None = None,
    execution: Execution | None = None,
    inputs: bool = False,
    leaf: Leaf | None = None,
    resizes: bool = False,
    records: Sequence[StoredRecord] | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[StoredRecord, Values]]:
    """Runs all recorded ops of a rank and hands out their values as it goes.

    Args:
      dtype, until, progress: as in `execute_rank`.
      execution: filled in on the way.
      inputs: also hand out what ops read (`in.…` slots; a copy where the op overwrites it).
      leaf: called with (content, slot) of what is read from the recording; gives the value to take
        instead, or None for the recorded one.
      resizes: what comes out in another size than recorded, as behind a decision that falls otherwise here,
        goes on in that size; else the recorded result stands in, or what reads it does not run.
      records: all of the rank in order, where somebody has read them already.
    Yields: a record and its tensors by slot name: outputs and written arguments of ops, outputs of modules
      and inline captures. They are views of live memory, valid until the next step: clone what you keep.
    Raises:
      NotExecutableError: the trace holds no data of leaves.
    """
    run = Run(reader, dtype, Execution() if execution is None else execution, leaf=leaf, resizes=resizes)
    yield from _steps(run, until=until, inputs=inputs, records=records, progress=progress)


def replay(
    reader: RankReader,
    *,
    execution: Execution | None = None,
    records: Sequence[StoredRecord] | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[StoredRecord, Values, list[Difference]]]:
    """Runs every op in the recorded precision on what it read when it was recorded.

    What comes out other than recorded is handed out and then replaced by what was recorded, so that the ops
    behind it read that. Where only leaves were kept it cannot be: what reads it is "inherited".

    Args:
      execution, records, progress: as in `iterate`.
    Yields: an op record, what it read and what it gives here by slot name (views of live memory, valid until
      the next step), and the slots whose hash did not come back.
    Raises:
      NotExecutableError: the trace holds no data of leaves.
    """
    run = Run(reader, None, Execution() if execution is None else execution)
    differing = run.execution.differing
    known = 0
    for record, values in _steps(run, until=None, inputs=True, records=records, progress=progress):
        if len(differing) > known and record.kind == "op":
            yield record, values, differing[known:]
            run.restore(record)
        known = len(differing)


def _steps(
    run: Run,
    *,
    until: int | None,
    inputs: bool,
    records: Sequence[StoredRecord] | None,
    progress: Progress | None,
) -> Iterator[tuple[StoredRecord, Values]]:
    reader = run.reader
    check_executable(reader)
    last_use, total = _last_uses(reader.records() if records is None else records, until)
    dead = _by_last_use(last_use)
    for position, record in enumerate(reader.records() if records is None else records):
        if position >= total:
            break
        with run.settings():
            values = run.step(record, inputs=inputs)
        yield record, values
        del values
        run.memory.free(dead.pop(position, ()))
        if progress is not None and (position % 256 == 255 or position + 1 == total):
            progress(position + 1, total)


def tensor(reader: RankReader, seq: int, slot: str) -> torch.Tensor:
    """One recorded tensor: from a shard where its data is kept, else by running what led to it.

    Only the records that the tensor depends on run, writers in place included, each from recorded data as
    far downstream as there is any. The result is checked against its hash.

    Args:
      seq: the record.
      slot: its slot (`out`, `in.mat2`, `out.self`).
    Raises:
      KeyError: the record has no such slot.
      NotExecutableError: the slot is no tensor, or what it depends on is not in the trace, or it came
        back different from its hash.
    """
    record = reader.record(seq)
    wanted = find_slot(record, slot)
    if wanted.content >= 0 and reader.content(wanted.content).has_data:
        return reader.tensor(wanted.content)
    check_executable(reader)
    reasons = []
    for attempt in (_run_slice, _run_whole):
        try:
            found = attempt(reader, record, [wanted])[wanted.index]
        except NotExecutableError as error:
            reasons.append(str(error))
            continue
        expected = reader.content(wanted.content).hash if wanted.content >= 0 else ""
        if not expected or content_hash(found) == expected:
            return found
        reasons.append("it came back different from its recorded hash")
    raise NotExecutableError(f"record {seq} ({record.overload or record.kind}), slot {slot}: {reasons[-1]}")


def execute_record(reader: RankReader, seq: int, dtype: torch.dtype | None = torch.float64) -> Values:
    """Runs one op record on its own recorded inputs.

    Args:
      seq: the record.
      dtype: torch.float64, or None for the recorded precision.
    Returns: outputs and written arguments by slot name.
    Raises:
      NotExecutableError: the record is no op, cannot be run, or its inputs are neither in the trace nor
        can be recomputed.
    """
    record = reader.record(seq)
    if record.kind != "op":
        raise NotExecutableError(f"record {seq} is a {record.kind} record: only ops run by themselves")
    run = Run(reader, dtype, Execution(), compare=False)
    recomputed: list[StoredSlot] = []
    for slot in record.slots:
        if slot.role == "in" and slot.is_tensor and not run.is_blind(record, slot):
            if run.has_data(slot):
                run.load(slot)
            elif slot.device != "meta":
                recomputed.append(slot)
    if recomputed:
        check_executable(reader)
        found = _run_slice(reader, record, recomputed)
        for slot in recomputed:
            run.memory.load(slot, found[slot.index])
    return _run_ready(run, record)


def execute_on(
    reader: RankReader, record: StoredRecord, inputs: Values, dtype: torch.dtype | None = torch.float64
) -> Values:
    """Runs one op record on inputs that are given.

    Args:
      record: of an op.
      inputs: what it reads, by slot name (`in.…`), in the recorded dtypes.
      dtype: torch.float64, or None for the recorded precision.
    Returns: outputs and written arguments by slot name; empty where the op refuses float64.
    Raises:
      NotExecutableError: the op cannot be run.
    """
    run = Run(reader, dtype, Execution(), compare=False)
    for slot in record.slots:
        if slot.name in inputs:
            run.memory.load(slot, inputs[slot.name])
    values = _run_ready(run, record)
    return {} if run.execution.narrowed or run.execution.taken else values


def execute_body(
    reader: RankReader,
    body: Iterable[StoredRecord],
    wanted: Iterable[tuple[int, int]],
    *,
    given: Callable[[StoredRecord, StoredSlot], torch.Tensor | None] | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> tuple[dict[tuple[int, int], torch.Tensor], Execution]:
    """Runs the ops between a region's inputs and its outputs in float64.

    Args:
      body: op records, in order.
      wanted: results to return, by (seq, slot index).
      given: called with what an op reads; the value to take, or None for what the body made or, where it
        made none, for the recorded value.
      noise: relative error, uniform in [-noise, noise], that every op adds to its results.
      seed: of that error.
    Returns: copies of the results that could be had, and what ran and what did not.
    Raises:
      NotExecutableError: a recorded value is not in the trace and cannot be recomputed.
    """
    records = list(body)
    inside, missing = {record.seq for record in records}, set(wanted)
    run = Run(reader, torch.float64, Execution(), compare=False)
    draws = torch.Generator().manual_seed(seed)
    made: dict[tuple[int, int], torch.Tensor] = {}
    for record in records:
        for slot in record.slots:
            if slot.role != "in" or not slot.is_tensor or slot.uninitialised:
                continue
            value = None if given is None else given(record, slot)
            outside = not any(producer in inside for producer, _ in slot.producers)
            if value is None and outside and not run.memory.holds(slot):
                value = tensor(reader, record.seq, slot.name)
            if value is not None:
                run.memory.load(slot, value)
        with run.settings():
            values = run.step(record)
            for slot in record.slots:
                value = values.get(slot.name)
                if value is None or slot.role == "in":
                    continue
                if noise and not record.light and value.is_floating_point() and 0 not in value.stride():
                    error = torch.empty(value.shape, dtype=torch.float64).uniform_(
                        -noise, noise, generator=draws
                    )
                    value.mul_(1.0 + error)
                if (record.seq, slot.index) in missing:
                    made[record.seq, slot.index] = copy_of(value)
    return made, run.execution


def _run_ready(run: Run, record: StoredRecord) -> Values:
    """Results of a record whose inputs are in memory; copies."""
    with run.settings():
        values = run.step(record, ready=True)
        values = {name: copy_of(value) for name, value in values.items()}
    if not values and any(s.role != "in" and s.is_tensor for s in record.slots):
        problems = [d.why for d in run.execution.failed] or [why for _, why in run.execution.skipped]
        raise NotExecutableError(
            f"record {record.seq} ({record.overload}): {problems[0] if problems else 'no result'}"
        )
    return values


def _last_uses(records: Iterable[StoredRecord], until: int | None) -> tuple[dict[int, int], int]:
    """Position of the last record that uses each storage, and how many records run."""
    last: dict[int, int] = {}
    total = 0
    for position, record in enumerate(records):
        if until is not None and record.seq > until:
            break
        total = position + 1
        for slot in record.slots:
            if slot.is_tensor and slot.storage >= 0 and (record.kind == "op" or slot.role != "in"):
                last[slot.storage] = position
    return last, total


# Backward slices ----------------------------------------------------------------------------------


def _run_whole(reader: RankReader, record: StoredRecord, wanted: list[StoredSlot]) -> dict[int, torch.Tensor]:
    """The wanted slots of `record` after everything before it has run."""
    run = Run(reader, None, Execution(), compare=False)
    last_use, _ = _last_uses(reader.records(), record.seq)
    dead = _by_last_use(last_use)
    reads = [slot for slot in wanted if slot.role == "in" and record.kind == "op"]
    with run.settings():
        for position, other in enumerate(reader.records()):
            if other.seq == record.seq:
                return _finish(run, record, wanted, reads, recorded=False)
            run.step(other)
            run.memory.free(dead.pop(position, ()))
    raise NotExecutableError(f"record {record.seq} is not in the trace")


def _run_slice(reader: RankReader, record: StoredRecord, wanted: list[StoredSlot]) -> dict[int, torch.Tensor]:
    """The wanted slots of `record` after what they depend on has run."""
    run = Run(reader, None, Execution(), compare=False)
    reads = [slot for slot in wanted if slot.role == "in" or record.kind != "op"]
    runs, loads = _backward_slice(run, record, reads, whole=len(reads) < len(wanted))
    order = sorted((runs.keys() | loads.keys()) - {record.seq})
    last_use = {slot.storage: seq for seq in order if seq in runs for slot in runs[seq].slots}
    dead = _by_last_use({n: seq for n, seq in last_use.items() if n not in {s.storage for s in record.slots}})
    with run.settings():
        for seq in order:
            if seq in runs:
                run.step(runs[seq], recorded=True)
            else:
                for slot in loads[seq]:
                    run.load(slot)
            run.memory.free(dead.pop(seq, ()))
        return _finish(run, record, wanted, reads, recorded=True)


def _finish(
    run: Run, record: StoredRecord, wanted: list[StoredSlot], reads: list[StoredSlot], *, recorded: bool
) -> dict[int, torch.Tensor]:
    """Copies of the wanted slots, once what comes before `record` has run."""
    found = {slot.index: copy_of(run.fetched(slot, recorded=recorded)) for slot in reads}
    rest = [slot for slot in wanted if slot not in reads]
    values = run.step(record, recorded=recorded) if rest else {}
    return found | _collect(run, rest, values)


def _by_last_use(last_use: dict[int, int]) -> dict[int, list[int]]:
    dead: defaultdict[int, list[int]] = defaultdict(list)
    for number, place in last_use.items():
        dead[place].append(number)
    return dead


def _collect(run: Run, slots: list[StoredSlot], values: Values) -> dict[int, torch.Tensor]:
    found = {}
    for slot in slots:
        if slot.name not in values:
            problems = [f"{d.overload}: {d.why}" for d in run.execution.failed]
            problems += [f"{op}: {why}" for op, why in run.execution.skipped]
            raise NotExecutableError(problems[0] if problems else "it was not computed")
        found[slot.index] = copy_of(values[slot.name])
    return found


def _backward_slice(
    run: Run, record: StoredRecord, reads: list[StoredSlot], *, whole: bool
) -> tuple[dict[int, StoredRecord], dict[int, list[StoredSlot]]]:
    """What must run and be loaded, by seq, before the `reads` of `record` (`whole`: all) are there."""
    runs: dict[int, StoredRecord] = {}
    loads: defaultdict[int, list[StoredSlot]] = defaultdict(list)
    todo: list[tuple[int, int]] = []  # a heap, latest record first: each is read once, and in file order
    seen: set[tuple[int, int]] = set()

    def need(seq: int, index: int) -> None:
        if (seq, index) not in seen and seq < record.seq:
            seen.add((seq, index))
            heapq.heappush(todo, (-seq, index))

    def depend(slot: StoredSlot) -> None:
        if slot.is_tensor and not run.has_data(slot):
            for seq, index in slot.producers:
                need(seq, index)

    for slot in reads:
        depend(slot)
        if not slot.producers and record.producer >= 0:
            need(record.producer, -1)
    if whole:
        runs[record.seq] = record
        for slot in record.slots:
            if slot.role == "in":
                depend(slot)
    while todo:
        seq, index = heapq.heappop(todo)
        seq = -seq
        if seq in runs and index < 0:
            continue
        producer = run.reader.record(seq)
        source = producer.slots[index] if index >= 0 else None
        if source is not None and (producer.kind == "param" or source.role == "in"):
            if run.has_data(source):  # a leaf, known by its first reader
                loads[seq].append(source)
            continue
        if seq in runs or producer.kind != "op":
            continue
        runs[seq] = producer
        for slot in producer.slots:
            if slot.role == "in":
                depend(slot)
    return runs, dict(loads)


__all__ = [
    "Difference",
    "Execution",
    "check_executable",
    "execute_body",
    "execute_on",
    "execute_rank",
    "execute_record",
    "iterate",
    "replay",
    "tensor",
]
