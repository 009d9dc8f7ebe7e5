"""One run of a recorded op graph: records executed one after the other, and what came of each.

Guarantees: the surroundings of the caller (grad mode, autocast, active modes, default dtype, thread
count) neither reach the ops nor change; an op that cannot run costs itself and what depends on it, never the
run; every record ends in exactly one count of `Execution`.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dispatch_trace.errors import NotExecutableError
from dispatch_trace.execute_memory import Geometry, Memory, copy_of, geometry, has_geometry, storage_id
from dispatch_trace.execute_ops import (
    FORMULAS,
    RESIZE_OPS,
    UNWRITTEN_OPS,
    Decoder,
    NotRunnableError,
    WideCall,
    recorded_dropout,
    resolve,
    why_taken,
)
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.store.layouts import content_hash
from dispatch_trace.store.reader import RankReader

Values = dict[str, torch.Tensor]
Leaf = Callable[[int, StoredSlot], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Difference:
    """A slot whose hash did not come back, or a record that could not be run.

    Attributes:
      why: "differs", "inherited from record N", "not comparable: …", or the error of the op.
    """

    seq: int
    slot: str
    overload: str
    why: str


@dataclass(slots=True, kw_only=True)
class Execution:
    """What a run did, record by record.

    Attributes:
      dtype: "float64", or None for the recorded precision.
      executed: op records that ran, by overload.
      taken: op records whose results came from the recording, by (overload, reason).
      loaded: tensors read from the recording because no record here made them, by kind ("leaf",
        "unwritten memory").
      narrowed: op records that ran in the recorded precision because they refuse float64, by
        (overload, message).
      skipped: records that could not run, by (overload or kind, reason).
      failed: op records that raised.
      compared, equal: records with at least one recorded hash, and those of which every hash came
        back. In the recorded precision only.
      differing: slots whose hash did not come back.
    """

    dtype: str | None = None
    executed: Counter[str] = field(default_factory=Counter)
    taken: Counter[tuple[str, str]] = field(default_factory=Counter)
    loaded: Counter[str] = field(default_factory=Counter)
    narrowed: Counter[tuple[str, str]] = field(default_factory=Counter)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: list[Difference] = field(default_factory=list)
    compared: int = 0
    equal: int = 0
    differing: list[Difference] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Records whose hashes came back, of those that have hashes; 1 when there are none."""
        return self.equal / self.compared if self.compared else 1.0

    def summary(self) -> str:
        """One line: what was executed, taken and skipped, and how much came back bit-exact."""
        parts = [f"executed {self.executed.total()}", f"taken {self.taken.total()}"]
        for name, number in (
            ("in recorded precision", self.narrowed.total()),
            ("skipped", self.skipped.total()),
            ("failed", len(self.failed)),
        ):
            if number:
                parts.append(f"{name} {number}")
        if self.dtype is None:
            parts.append(f"bit-exact {self.equal}/{self.compared}")
        return ", ".join(parts)


class Run:
    """The state of one run: memory, recomputed numbers, counts."""

    def __init__(
        self,
        reader: RankReader,
        dtype: torch.dtype | None,
        execution: Execution,
        *,
        compare: bool = True,
        leaf: Leaf | None = None,
        resizes: bool = False,
    ) -> None:
        if dtype not in (None, torch.float64):
            raise NotExecutableError(f"a trace runs in its own precision or in float64, not in {dtype}")
        self.reader = reader
        self.wide = dtype is not None
        self.execution = execution
        execution.dtype = "float64" if self.wide else None
        self.memory = Memory(wide=self.wide)
        self._items: dict[int, int | float] = {}
        self._decode = Decoder(self.memory.dtype, self._items if self.wide else {})
        self._compare = compare and not self.wide
        self._leaf = leaf
        self._resizes = resizes
        self._taint: dict[int, str] = {}  # storage -> why what it holds may differ
        self._settings = _settings(reader.header, self.memory.dtype)
        self._unrestored = _unrestored(reader.header)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The recorded settings of torch; nothing of them outlives the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch._C._AutoDispatchBelowAutograd())
            stack.enter_context(torch._C._DisableAutocast())
            stack.enter_context(torch._C.DisableTorchFunction())
            if torch._C._len_torch_dispatch_stack():
                stack.enter_context(_disable_current_modes())
            for current, change, wanted in self._settings:
                before = current()
                if before != wanted:
                    stack.callback(change, before)
                    change(wanted)
            yield

    # -- inputs --------------------------------------------------------------------------------------

    def has_data(self, slot: StoredSlot) -> bool:
        return slot.content >= 0 and self.reader.content(slot.content).has_data

    def load(self, slot: StoredSlot) -> None:
        """Puts the recorded content of `slot` in its place."""
        if not self.memory.is_loaded(slot):
            value = None if self._leaf is None else self._leaf(slot.content, slot)
            self.memory.load(slot, self.reader.tensor(slot.content) if value is None else value)
            self._taint.pop(slot.storage, None)

    def restore(self, record: StoredRecord) -> None:
        """Puts the recorded results of a record in the place of what it gave here, where they are kept."""
        for slot in record.slots:
            if slot.role != "in" and slot.is_tensor and self.has_data(slot):
                self.load(slot)

    def is_blind(self, record: StoredRecord, slot: StoredSlot) -> bool:
        """Whether the op only writes the argument: nothing is known of what it held before, nor needed."""
        if slot.content >= 0 or slot.leaf or not has_geometry(slot):
            return False
        written = "out." + slot.name.removeprefix("in.")
        return any(other.role == "written" and other.name == written for other in record.slots)

    def fetch(self, record: StoredRecord, slot: StoredSlot, *, recorded: bool = False) -> str:
        """Makes `slot` readable; returns "" or why it cannot be."""
        memory = self.memory
        if slot.leaf or recorded:
            if self.has_data(slot):
                if slot.leaf and not memory.is_loaded(slot):
                    self.execution.loaded["unwritten memory" if slot.uninitialised else "leaf"] += 1
                self.load(slot)
                return ""
            if slot.leaf and not slot.uninitialised and not memory.holds(slot):
                return slot.note or "the data of a leaf is not in the trace"
        if memory.holds(slot) or slot.device == "meta":
            return ""
        if self.has_data(slot):
            self.load(slot)
            return ""
        if self.is_blind(record, slot) or slot.uninitialised:
            return ""  # `Memory.read` allocates it
        return slot.note or "an input that no record here produced"

    def fetched(self, slot: StoredSlot, *, recorded: bool = False) -> torch.Tensor:
        """The tensor of an input slot."""
        if recorded and self.has_data(slot):
            self.load(slot)
        if not self.memory.holds(slot):
            problems = [why for _, why in self.execution.skipped]
            raise NotExecutableError(problems[0] if problems else "nothing that this run made is there")
        return self.memory.read(slot)

    # -- records -------------------------------------------------------------------------------------

    def step(
        self, record: StoredRecord, *, inputs: bool = False, recorded: bool = False, ready: bool = False
    ) -> Values:
        """Runs or looks at one record.

        Args:
          inputs: also return what the op read.
          recorded: prefer recorded inputs to recomputed ones.
          ready: the inputs are in memory already.
        """
        if record.kind == "op":
            return self._step_op(record, inputs=inputs, recorded=recorded, ready=ready)
        if record.kind == "param":
            return {}
        values: Values = {}
        for slot in record.slots:
            if slot.role == "out" and slot.is_tensor:
                if slot.leaf and self.has_data(slot):
                    self.load(slot)
                if self.memory.holds(slot):
                    values[slot.name] = self.memory.read(slot)
        self._check(record, values)
        return values

    def _step_op(self, record: StoredRecord, *, inputs: bool, recorded: bool, ready: bool) -> Values:
        execution = self.execution
        reason = why_taken(record)
        if not reason:
            try:
                op = resolve(record.overload)
            except NotRunnableError as error:
                reason = str(error)
        if reason:
            return self._take(record, reason)
        tensors: list[torch.Tensor | None] = [None] * len(record.slots)
        objects: dict[Geometry | None, torch.Tensor] = {}
        taint = ""
        for slot in record.slots:
            if slot.role != "in" or not slot.is_tensor:
                continue
            problem = "" if ready else self.fetch(record, slot, recorded=recorded)
            if problem:
                return self._skip(record, problem)
            # One object for one tensor: kernels ask whether query, key and value are the same.
            same = geometry(slot) if has_geometry(slot) else None
            if same not in objects or same is None:
                objects[same] = self.memory.read(slot)
            tensors[slot.index] = objects[same]
            taint = taint or self._taint.get(slot.storage, "")
        values: Values = {}
        if inputs:
            written = {"in." + s.name.removeprefix("out.") for s in record.slots if s.role == "written"}
            for slot in record.slots:
                value = tensors[slot.index]
                if value is not None:
                    values[slot.name] = copy_of(value) if slot.name in written else value
        try:
            results = self._call(op, record, tensors)
            values |= self._store(record, results, tensors, taint)
        except Exception as error:  # the ops of a trace may raise anything
            message = str(error).strip().split("\n")[0]
            execution.failed.append(
                Difference(record.seq, "", record.overload, f"{type(error).__name__}: {message}")
            )
            return self._recover(record)
        execution.executed[record.overload] += 1
        self._check(record, values)
        return values

    def _call(self, op: Any, record: StoredRecord, tensors: list[torch.Tensor | None]) -> dict[str, Any]:
        """Runs the op; its outputs by slot name."""
        if record.op in RESIZE_OPS and any(slot.role == "written" for slot in record.slots):
            # Memory grows where it is looked at. torch refuses where NumPy has seen it, and leaves a tensor
            # behind that is longer than its memory.
            return {}
        args = {name: self._decode(value, tensors) for name, value in record.args}
        self._complete(op, record, args)
        if not self.wide:
            return _named_outputs(op(**args))
        if record.overload == "aten.view.dtype":
            return {}  # memory shows one storage in two dtypes, through the recorded precision

        def narrow(name: str) -> torch.Tensor:
            slot = find_slot(record, name)
            value = tensors[slot.index]
            assert value is not None
            return value.to(getattr(torch, slot.dtype))

        formula = FORMULAS.get(record.overload)
        try:
            if formula is not None:
                return _named_outputs(formula(args, WideCall(op, record, narrow)))
            return _named_outputs(op(**args))
        except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
            results = self._call_narrow(op, record, tensors, narrow)
            message = str(error).strip().split("\n")[0]
            self.execution.narrowed[record.overload, message] += 1
            return results

    def _call_narrow(
        self,
        op: Any,
        record: StoredRecord,
        tensors: list[torch.Tensor | None],
        narrow: Callable[[str], torch.Tensor],
    ) -> dict[str, Any]:
        """Runs an op that refuses float64 in its recorded precision, on recomputed inputs."""
        narrowed: list[torch.Tensor | None] = list(tensors)
        for slot in record.slots:
            if tensors[slot.index] is not None and self.memory.widened(slot.dtype):
                narrowed[slot.index] = narrow(slot.name)
        decode = Decoder(lambda name: Memory(wide=False).dtype(name), self._items)
        args = {name: decode(value, narrowed) for name, value in record.args}
        results = _named_outputs(op(**args))
        for slot in record.slots:
            value, own = narrowed[slot.index], tensors[slot.index]
            if value is not None and own is not None and value is not own and own.shape == value.shape:
                written = "out." + slot.name.removeprefix("in.")
                if any(s.role == "written" and s.name == written for s in record.slots):
                    own.copy_(value)
        return results

    def _complete(self, op: Any, record: StoredRecord, args: dict[str, Any]) -> None:
        """Factories that left their dtype to the default get the one that was recorded."""
        if "dtype" in args and args["dtype"] is not None:
            return
        if any(slot.role == "in" for slot in record.slots):
            return
        outs = [slot for slot in record.slots if slot.role == "out" and slot.is_tensor]
        if len(outs) == 1 and any(argument.name == "dtype" for argument in op._schema.arguments):
            args["dtype"] = self.memory.dtype(outs[0].dtype)

    # -- results -------------------------------------------------------------------------------------

    def _store(
        self, record: StoredRecord, results: dict[str, Any], tensors: list[torch.Tensor | None], taint: str
    ) -> Values:
        """Ties results to storages, notes writes; the record's outputs by slot name."""
        values: Values = {}
        memory = self.memory
        inputs = frozenset(storage_id(t) for t in tensors if t is not None)
        if any(memory.is_resized(slot) for slot in record.slots if slot.role == "in"):
            self._count_results(record, results)
        for slot in record.slots:
            if slot.role == "in":
                continue
            if not slot.is_tensor:
                self._number(record, slot, results.get(slot.name))
                continue
            note = ""
            if slot.role == "written":
                memory.touch(slot)
            elif slot.name in results:
                result = results[slot.name]
                resized = has_geometry(slot) and tuple(result.shape) != slot.shape
                if self._resizes and (resized or memory.is_resized(slot)):
                    memory.keep_resized(slot, result)
                elif resized:
                    self.execution.skipped[
                        record.overload, "the shape depends on values and came out different"
                    ] += 1
                    if self.has_data(slot):
                        self.load(slot)
                    else:
                        memory.lose(slot)
                        continue
                else:
                    _, note = memory.bind(slot, result, inputs=inputs)
            if taint or note:
                self._taint.setdefault(slot.storage, taint or f"not comparable: {note}")
            if memory.holds(slot) or slot.device == "meta":
                values[slot.name] = memory.read(slot)
        return values

    def _count_results(self, record: StoredRecord, results: dict[str, Any]) -> None:
        """Notes that an op has more or fewer results than recorded: what was done with each is not there."""
        recorded = {slot.name for slot in record.slots if slot.role == "out" and "[" in slot.name}
        made = {name for name in results if "[" in name}
        if recorded and made != recorded:
            self.execution.skipped[record.overload, "as many results as values say, other than recorded"] += 1
            for slot in record.slots:
                if slot.name in recorded - made:
                    self.memory.lose(slot)

    def _number(self, record: StoredRecord, slot: StoredSlot, result: Any) -> None:
        """A plain number that the op returned (`.item()`, `equal`)."""
        if isinstance(result, (int, float)) and not isinstance(result, bool):
            self._items[record.seq] = result
        if self._compare and type(slot.value) in (int, float, bool) and isinstance(result, (int, float)):
            self.execution.compared += 1
            if result == slot.value or (result != result and slot.value != slot.value):
                self.execution.equal += 1
            else:
                self._differs(record, slot)

    def _take(self, record: StoredRecord, reason: str) -> Values:
        """Results from the recording."""
        outs = [slot for slot in record.slots if slot.role != "in" and slot.is_tensor]
        absent = [slot for slot in outs if not self.has_data(slot) and slot.device != "meta"]
        if absent:
            return self._skip(record, f"{reason}, and its results are not in the trace")
        values: Values = {}
        for slot in outs:
            if slot.device != "meta":
                self.memory.touch(slot)
                self.load(slot)
                values[slot.name] = self.memory.read(slot)
        if self.wide and record.op == "aten.native_dropout" and len(outs) == 2:
            self._dropout(record, outs, values)
        self.execution.taken[record.overload, reason] += 1
        return values

    def _dropout(self, record: StoredRecord, outs: list[StoredSlot], values: Values) -> None:
        source = next((s for s in record.slots if s.name == "in.input"), None)
        if source is not None and not self.fetch(record, source):
            args = {**dict(record.args), "input": self.memory.read(source)}
            values[outs[0].name].copy_(recorded_dropout(args, values[outs[1].name])[0])

    def _skip(self, record: StoredRecord, reason: str) -> Values:
        self.execution.skipped[record.overload, reason] += 1
        return self._recover(record)

    def _recover(self, record: StoredRecord) -> Values:
        """After an op that did not run: its results come from the recording if they are there."""
        values: Values = {}
        for slot in record.slots:
            if slot.role != "in" and slot.is_tensor and slot.storage >= 0:
                if self.has_data(slot):
                    self.memory.touch(slot)
                    self.load(slot)
                    values[slot.name] = self.memory.read(slot)
                else:
                    self.memory.lose(slot)
        return values

    # -- comparing -----------------------------------------------------------------------------------

    def _check(self, record: StoredRecord, values: Values) -> None:
        """Compares what the record holds now with its hashes."""
        if not self._compare or record.op in UNWRITTEN_OPS:
            return
        compared, equal = False, True
        for slot in record.slots:
            value = values.get(slot.name)
            if slot.role == "in" or slot.content < 0 or value is None or slot.leaf:
                continue
            expected = self.reader.content(slot.content).hash
            if not expected:
                continue
            compared = True
            if content_hash(value) == expected:
                if slot.role == "out" and record.kind == "op":
                    self._taint.pop(slot.storage, None)
            else:
                equal = False
                self._differs(record, slot)
        self.execution.compared += compared
        self.execution.equal += compared and equal

    def _differs(self, record: StoredRecord, slot: StoredSlot) -> None:
        why = self._taint.get(slot.storage, "")
        if not why and (self._unrestored or slot.device != "cpu"):
            why = f"not comparable: {self._unrestored or 'recorded on ' + slot.device}"
        execution = self.execution
        execution.differing.append(
            Difference(record.seq, slot.name, record.overload or record.kind, why or "differs")
        )
        if slot.storage >= 0:
            self._taint.setdefault(slot.storage, why or f"inherited from record {record.seq}")


def find_slot(record: StoredRecord, name: str) -> StoredSlot:
    """The tensor slot called `name`.

    Raises:
      KeyError: there is none.
      NotExecutableError: it holds no tensor.
    """
    for slot in record.slots:
        if slot.name == name:
            if not slot.is_tensor:
                raise NotExecutableError(f"record {record.seq}, slot {name} holds no tensor")
            return slot
    raise KeyError(f"record {record.seq} has no slot {name!r}; it has {[s.name for s in record.slots]}")


def _named_outputs(result: Any, name: str = "out") -> dict[str, Any]:
    """What an op returned, by slot name."""
    if isinstance(result, (tuple, list)):
        named: dict[str, Any] = {}
        for i, value in enumerate(result):
            named |= _named_outputs(value, f"{name}[{i}]")
        return named
    return {name: result}


def _settings(
    header: dict[str, Any], dtype_of: Callable[[str], torch.dtype]
) -> list[tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
    """(how to read, how to set, recorded value) of every global setting that results depend on."""

    def set_deterministic(on: bool) -> None:
        torch.use_deterministic_algorithms(on, warn_only=True)

    return [
        (torch.get_num_threads, torch.set_num_threads, header.get("num_threads", torch.get_num_threads())),
        (torch.get_default_dtype, torch.set_default_dtype, dtype_of(header.get("default_dtype", "float32"))),
        (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            header.get("float32_matmul_precision", torch.get_float32_matmul_precision()),
        ),
        (
            torch.are_deterministic_algorithms_enabled,
            set_deterministic,
            header.get("deterministic", torch.are_deterministic_algorithms_enabled()),
        ),
        (
            torch._C._get_mkldnn_enabled,
            torch._C._set_mkldnn_enabled,
            header.get("onednn", torch._C._get_mkldnn_enabled()),
        ),
    ]


def _unrestored(header: dict[str, Any]) -> str:
    """What of the recorded surroundings this process cannot restore and which bits depend on, or ""."""
    found = []
    recorded = str(header.get("torch_version", torch.__version__))
    if recorded != torch.__version__:
        found.append(f"recorded with torch {recorded}")
    capability = header.get("cpu_capability")
    if capability and capability != torch.backends.cpu.get_cpu_capability():
        found.append(f"recorded on a CPU with {capability}")
    environment = header.get("environment", {})
    for name in ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA"):
        if environment.get(name) != os.environ.get(name):
            found.append(f"recorded with {name}={environment.get(name)}")
    return ", ".join(found)
