"""A finding as a script that runs by itself: the guilty op, or its region, and one safetensors file.

The script needs torch and safetensors, neither this package nor the model's code. It holds four values
against each other: what was recorded, the same op run natively on the recorded inputs, the same in float64,
and what the reference has in its place. A kernel's fault shows between the first and the third, another
program's between the first and the last. Ops that cannot be run again (unknown custom ops, random ones,
collectives) take their recorded results; script and result say which.

What is replayed: the op of the finding, or where it has no counterpart the ops up to the first that has one;
before it, views, casts and whatever else the reference lacks. Inputs are the recorded ones.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dispatch_trace.align.pairs import Pair
from dispatch_trace.errors import ConfigError, DispatchTraceError, NotExecutableError
from dispatch_trace.judge.estimates import C, roundoff
from dispatch_trace.judge.findings import Finding
from dispatch_trace.report.repro_script import SCRIPT, TENSORS
from dispatch_trace.report.table import module_name, shorten
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.store.dtypes import SHARD_DTYPES
from dispatch_trace.store.reader import RankReader

if TYPE_CHECKING:
    import torch

# A region larger than this is no region any more: what lies before it is taken from the recording.
MAX_OPS = 64
# How far ahead the first op with a counterpart is looked for.
_MAX_AHEAD = 4096

Value = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repro:
    """What was written.

    Attributes:
      script, tensors: the two files.
      ops: overloads that the script runs, in order.
      taken: {overload: why} of ops whose recorded results stand in for them.
      compared: the values that the script holds against each other.
    """

    script: Path
    tensors: Path
    ops: list[str]
    taken: dict[str, str]
    compared: list[str]

    def __str__(self) -> str:
        said = f"{self.script}: replays {', '.join(self.ops) or 'nothing: recorded results only'}"
        for overload, why in self.taken.items():
            said += f"\n  recorded results stand in for {overload}: {why}"
        return said


def write_repro(
    folder: str | os.PathLike[str],
    finding: Finding,
    pairs: Sequence[Pair],
    ref: RankReader,
    target: RankReader,
) -> Repro:
    """Writes `repro.py` and `tensors.safetensors` into a directory, which is made.

    Args:
      finding: what to replay.
      pairs: of the alignment that the finding is from.
      ref, target: readers of the rank.
    Raises:
      NotExecutableError: the target's trace lacks what the op read or what it returned; nothing is written.
      ConfigError: `folder` is a file.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"repro directory {str(path)!r} is a file.")
    plan = _Plan(finding, pairs, ref, target)
    plan.make()
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    repro = Repro(
        script=path / "repro.py",
        tensors=path / TENSORS,
        ops=[step["op"] for step in plan.steps],
        taken=plan.standing,
        compared=list(plan.compared),
    )
    save_file(plan.stored, repro.tensors, metadata={"plan": json.dumps(plan.document())})
    repro.script.write_text(SCRIPT.replace("TITLE", plan.title()), encoding="utf-8")
    return repro


@dataclass(slots=True)
class _Plan:
    finding: Finding
    pairs: Sequence[Pair]
    ref: RankReader
    target: RankReader
    steps: list[dict[str, Any]] = field(default_factory=list)
    stored: dict[str, torch.Tensor] = field(default_factory=dict)
    strides: dict[str, list[int]] = field(default_factory=dict)
    compared: dict[str, str] = field(default_factory=dict)
    limit: float = 0.0
    unit: float = 0.0
    _pairs: dict[int, Pair] = field(default_factory=dict)
    standing: dict[str, str] = field(default_factory=dict)
    taken: dict[int, str] = field(default_factory=dict)
    _read: dict[Value, str] = field(default_factory=dict)
    _names: dict[Value, str] = field(default_factory=dict)
    _loaded: dict[Any, str] = field(default_factory=dict)

    # What to replay -----------------------------------------------------------------------------------

    def make(self) -> None:
        for row in self.pairs:
            if row.target is not None and row.target.rank == self.target.rank:
                self._pairs.setdefault(row.target.seq, row)
        if self.finding.seq < 0:
            raise NotExecutableError(f"{self._where()}: the finding names no record of the target")
        anchor = self.target.record(self.finding.seq)
        final, path = self._final(anchor)
        slot = self._result_slot(final)
        self._put("recorded", "recorded", self._fetch(self.target, final, slot, "what the target returned"))
        self._region(final, slot, path)
        self.unit = 8 * roundoff(slot.dtype)
        pair = self._pairs.get(final.seq)
        reference = self._reference(final, slot, pair)
        self.limit = self._noise(slot, reference)
        if reference is not None:
            self._put("reference", "reference", reference)

    def _noise(self, slot: StoredSlot, reference: torch.Tensor | None) -> float:
        """Up to which error the result may differ from the reference's: rounding and what right inputs carry.

        Not the band of the alignment: that reckons with the error of every input, a wrong weight's too.
        """
        from dispatch_trace.store.layouts import dtype_name

        units = [roundoff(slot.dtype), 0.0 if reference is None else roundoff(dtype_name(reference.dtype))]
        inherited = [0.0]
        for seq, index in self._read:
            for producer, _ in self.target.record(seq).slots[index].producers:
                made = self._pairs.get(producer)
                if made is not None and made.error is not None and made.error <= (made.band or 0.0):
                    inherited.append(made.error)
        return C * math.hypot(4 * max(units), max(inherited))

    def _put(self, what: str, name: str, value: torch.Tensor) -> None:
        self._store(name, value)
        self.compared[what] = name

    def _final(self, anchor: StoredRecord) -> tuple[StoredRecord, set[int]]:
        """The record whose result tells, and the ops on the way to it from the one that is named."""
        if anchor.kind != "op" or self._has_twin(anchor):
            return anchor, {anchor.seq} if anchor.kind == "op" else set()
        before: dict[int, int] = {}
        reached = {anchor.seq}
        for seq in range(anchor.seq + 1, anchor.seq + _MAX_AHEAD):
            try:
                record = self.target.record(seq)
            except (KeyError, DispatchTraceError):
                break
            if record.kind != "op":
                continue
            sources = [p for s in record.slots if s.role == "in" for p, _ in s.producers if p in reached]
            if not sources:
                continue
            reached.add(seq)
            before[seq] = sources[-1]
            if self._has_twin(record):
                path = {anchor.seq, seq}
                while seq in before:
                    seq = before[seq]
                    path.add(seq)
                return record, path
        return anchor, {anchor.seq}

    def _has_twin(self, record: StoredRecord) -> bool:
        pair = self._pairs.get(record.seq)
        return pair is not None and pair.ref is not None and pair.outcome == "matched" and not record.light

    def _result_slot(self, record: StoredRecord) -> StoredSlot:
        for slot in record.slots:
            if slot.role != "in" and slot.is_tensor:
                return slot
        raise NotExecutableError(f"{self._where()}: record {record.seq} returned no tensor")

    def _region(self, final: StoredRecord, slot: StoredSlot, path: set[int]) -> None:
        """The ops to run: the last one, those on the way to it, and what the reference lacks before them."""
        todo = [final.seq] if final.kind == "op" else [seq for seq, _ in slot.producers[-1:]]
        if final.kind != "op" and not todo:
            raise NotExecutableError(
                f"{self._where()}: the trace holds no ops of this module, so there is none to replay. Record "
                'with level="op", or run the module alone: Alignment.isolate(model).'
            )
        chosen: dict[int, StoredRecord] = {}
        while todo:
            seq = todo.pop()
            record = self.target.record(seq)
            if seq in chosen or record.kind != "op" or len(chosen) >= MAX_OPS:
                continue
            chosen[seq] = record
            for read in record.slots:
                if read.role == "in" and read.is_tensor:
                    todo += [p for p, _ in read.producers if p in path or self._belongs(p)]
        for seq in sorted(chosen):
            self._add(chosen[seq], frozenset(chosen))
        made = (final.seq, slot.index)
        if final.kind != "op":
            made = next((p for p in reversed(slot.producers) if p in self._names), made)
        if made in self._names and not self.taken.get(made[0]):
            self.compared["rerun"] = self._names[made]
            exact = self._exact(chosen, made)
            if exact is not None:
                self._put("float64", "float64", exact)

    def _exact(self, chosen: dict[int, StoredRecord], made: Value) -> torch.Tensor | None:
        """The result of the same ops, from the same inputs, in float64; None where it cannot be had."""
        from dispatch_trace import execute

        def given(record: StoredRecord, slot: StoredSlot) -> torch.Tensor | None:
            name = self._read.get((record.seq, slot.index))
            return None if name is None else self.stored[name].reshape(slot.shape)

        records = [chosen[seq] for seq in sorted(chosen) if seq <= made[0]]
        try:
            values, _ = execute.execute_body(self.target, records, [made], given=given)
        except DispatchTraceError:
            return None
        return values.get(made)

    def _belongs(self, seq: int) -> bool:
        """Whether an op before the guilty one is replayed too: a view, a cast, one that nobody compared."""
        from dispatch_trace.execute_ops import UNWRITTEN_OPS

        record = self.target.record(seq)
        if record.kind != "op" or record.op in UNWRITTEN_OPS:
            return False
        pair = self._pairs.get(seq)
        return record.light or pair is None or pair.outcome != "matched"

    # The plan -----------------------------------------------------------------------------------------

    def _add(self, record: StoredRecord, chosen: frozenset[int]) -> None:
        from dispatch_trace.execute_ops import NotRunnableError, resolve, why_taken

        reason = why_taken(record)
        names: dict[int, str] = {}
        args: dict[str, Any] = {}
        try:
            if not reason:
                resolve(record.overload)
                for slot in record.slots:
                    if slot.role == "in" and slot.is_tensor:
                        names[slot.index] = self._input(record, slot, chosen)
                args = {name: _argument(value, names) for name, value in record.args}
        except (NotRunnableError, NotExecutableError) as error:
            reason = str(error)
        outs = [s for s in record.slots if s.role == "out" and s.is_tensor]
        step: dict[str, Any] = {"op": record.overload, "args": args, "outs": []}
        for slot in record.slots:
            if slot.role == "written" and not reason:
                read = "in." + slot.name.removeprefix("out.")
                index = next((s.index for s in record.slots if s.name == read), -1)
                if index in names:
                    self._names[(record.seq, slot.index)] = names[index]
            elif slot.role == "written" or slot in outs:
                name = f"v{record.seq}.{slot.index}"
                self._names[(record.seq, slot.index)] = name
                if reason:
                    self._store(
                        name, self._fetch(self.target, record, slot, f"the result of {record.overload}")
                    )
                else:
                    step["outs"].append([name, _position(slot.name)])
        if reason:
            self.taken[record.seq] = reason
            self.standing[record.overload] = reason
        else:
            self.steps.append(step)

    def _input(self, record: StoredRecord, slot: StoredSlot, chosen: frozenset[int]) -> str:
        """The name of what an op reads: made by an op before it, or stored."""
        geometry = (slot.storage, slot.offset, slot.shape, slot.strides, slot.dtype)
        inside = [p for p in slot.producers if p[0] in chosen and p in self._names]
        for seq, index in reversed(inside):
            made = self.target.record(seq).slots[index]
            if (made.storage, made.offset, made.shape, made.strides, made.dtype) == geometry:
                return self._names[(seq, index)]
        key = (geometry, slot.producers, slot.content)
        name = self._loaded.get(key)
        if name is None:
            value = self._fetch(self.target, record, slot, f"what {record.overload} read as {slot.name}")
            name = f"{record.seq}.{slot.name.removeprefix('in.')}"
            self._store(name, value)
            self._loaded[key] = name
        self._read[(record.seq, slot.index)] = name
        return name

    def _store(self, name: str, value: torch.Tensor) -> None:
        import torch

        dense = (
            torch.empty_like(value).stride() == value.stride()
        )  # no overlap, no gaps: it can be laid out so
        if dense and not value.is_contiguous():
            self.strides[name] = list(value.stride())
        self.stored[name] = value.contiguous()

    def _fetch(self, reader: RankReader, record: StoredRecord, slot: StoredSlot, what: str) -> torch.Tensor:
        import torch

        from dispatch_trace import execute

        try:
            value = execute.tensor(reader, record.seq, slot.name)
        except DispatchTraceError as error:
            raise NotExecutableError(f"{self._where()}: the trace does not hold {what}: {error}") from error
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            raise NotExecutableError(f"{what} is no plain tensor, which the file could hold")
        if slot.dtype not in SHARD_DTYPES:
            raise NotExecutableError(f"{what} is {slot.dtype}, which safetensors lacks")
        return value.detach().resolve_conj().resolve_neg().contiguous().clone() if value.is_conj() else value

    def _reference(self, final: StoredRecord, slot: StoredSlot, pair: Pair | None) -> torch.Tensor | None:
        """What the reference has in place of the result; None where it has nothing to lay beside it."""
        ref = pair.ref if pair is not None else None
        if ref is None and self.finding.ref_seq >= 0:
            ref = self.ref.record(self.finding.ref_seq)
        if ref is None:
            return None
        outs = [s for s in ref.slots if s.role != "in" and s.is_tensor]
        if not outs:
            return None
        twin = next((s for s in outs if s.name == slot.name), outs[0])
        try:
            found = self._fetch(self.ref, ref, twin, "the reference's result")
        except NotExecutableError:
            return None
        if found.shape != slot.shape and sorted(found.shape) != sorted(slot.shape):
            found = found.reshape(slot.shape) if found.numel() == math.prod(slot.shape) else found
        return found.contiguous()

    # What is said -------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        return {
            "ops": self.steps,
            "strides": self.strides,
            "compared": self.compared,
            "limit": self.limit,
            "unit": self.unit,
            "threads": int(self.target.header.get("num_threads") or 1),
        }

    def title(self) -> str:
        finding = self.finding
        counts: dict[str, int] = defaultdict(int)
        for step in self.steps:
            counts[step["op"]] += 1
        runs = ", ".join(f"{op} x{n}" if n > 1 else op for op, n in counts.items())
        lines = [f"{self._where()}: {finding.label}"]
        lines.append(f"Replays {shorten(runs, 90)} on recorded inputs." if runs else "Replays no op.")
        if self.standing:
            why = "; ".join(f"{op} ({why})" for op, why in self.standing.items())
            lines.append(shorten(f"Recorded results stand in for {why}", 110) + ".")
        if "reference" not in self.compared:
            lines.append("The reference has no value in its place that could be stored.")
        if finding.hint:
            lines.append(shorten(finding.hint, 100))
        return "\n".join(line.replace("\\", "/").replace('"', "'") for line in lines)

    def _where(self) -> str:
        finding = self.finding
        op = f" {finding.op}" if finding.op else ""
        call = f", call {finding.call}" if finding.call else ""
        return f"{module_name(finding.module)}{op} (step {finding.step}{call})"


def _argument(value: Any, names: dict[int, str]) -> Any:
    """An encoded argument as the script takes it: tensors by name, torch's constants by name."""
    if isinstance(value, (list, tuple)):
        return [_argument(v, names) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "ref":
        return {"tensor": names[content]} if content in names else None
    if kind == "item":
        return content[0]
    if kind in ("dtype", "layout", "memory_format"):
        return {"torch": content}
    if kind == "device":
        return "cpu"
    if kind == "generator":
        return None
    raise NotExecutableError(f"an argument of the kind {kind!r}, which the script cannot hold")


def _position(name: str) -> int:
    """Which of the returned values an output slot is: `out` and `out[0]` are the first."""
    digits = name.removeprefix("out").strip("[]")
    return int(digits) if digits.isdecimal() else 0


__all__ = ["Repro", "write_repro"]
