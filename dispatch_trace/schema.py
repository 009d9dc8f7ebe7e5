"""What a trace holds, as plain data: the one vocabulary that capture, store, align and judge share.

Guarantees: no torch import; every class is a value. Two families:

* `Raw*`: what a capture path hands to the writer. Built in the hot path, so plain slotted classes;
  tensors stand in them as `Content` handles (snapshots that the writer summarises in the background).
* `Stored*`: what the reader hands out. Everything decoded, no torch objects.

How they are laid out on disk is `docs/format.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

SCHEMA_VERSION = 1

Kind = Literal["op", "module", "inline", "param"]
GradPhase = Literal["fwd", "bwd", "recompute"]
Save = Literal["meta", "stats", "leaves", "tensors"]
SAVES: tuple[Save, ...] = ("meta", "stats", "leaves", "tensors")

STATISTICS = (
    "n",
    "nan",
    "posinf",
    "neginf",
    "zeros",
    "min",
    "max",
    "sum",
    "abs_sum",
    "sq_sum",
    "quad_sum",
)
DERIVED_STATISTICS = ("mean", "std", "abs_mean", "rms", "l2")

NO_CALL = -1  # `call` of what ran outside every module call (None in the public API)


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of a tensor that is not there: another tool measured it and kept no data.

    Attributes:
      dtype, shape: as in `StoredSlot`; a shape that is not known is (-1,).
      stats: by the names of `STATISTICS`; the rest is unknown.
    """

    dtype: str
    shape: tuple[int, ...]
    stats: Mapping[str, int | float | None]


class Content:
    """One tensor value to be summarised, and perhaps kept: a snapshot and, later, what came of it.

    Made by `capture.snapshot`; filled in by the writer's background thread; shared by every slot that
    sees the same value. `tensor` is dropped as soon as the writer is done with it.

    Attributes:
      tensor: the snapshot (torch.Tensor; any layout), never written to by the program any more; `Figures`
        where there is none and never was.
      keep_data: the bytes go to a shard.
      summarise: statistics, sketch and hash are wanted.
      num_bytes: what the snapshot pins in memory, for back-pressure.
      ready: on an accelerator, the event after which the snapshot holds its value; None elsewhere.
      id: number of the content within the rank, given by the writer when it is written; -1 before.
    """

    __slots__ = ("id", "keep_data", "num_bytes", "ready", "summarise", "tensor")

    def __init__(self, tensor: Any, *, keep_data: bool, summarise: bool, num_bytes: int) -> None:
        self.tensor = tensor
        self.keep_data = keep_data
        self.summarise = summarise
        self.num_bytes = num_bytes
        self.ready: Any = None
        self.id = -1


class RawSlot:
    """One tensor or plain value of a record.

    Attributes:
      name: slot name as in DESIGN.md (`in.mat2`, `out[1].k[0]`, `out.self`).
      role: "in" (read), "out" (returned) or "written" (an argument the op wrote, seen after the op).
      value: the encoded plain value where the slot holds no tensor (None included), see `encode_value`.
      is_tensor: False for plain values and for objects that could not be looked into.
      dtype, shape, strides, offset, device, layout: geometry; dtype is torch's name without "torch.",
        offset is in elements from the start of the storage. strides and offset are None where the
        layout has no storage of its own (sparse, nested, subclasses). layout is torch's name without
        "torch.", "quantized", or "strided+conj", "strided+neg" for a lazily conjugated or negated view.
        A dimension that is ragged or symbolic is -1.
      storage: number of the storage within the rank, -1 where there is none (meta, no tracking).
      storage_bytes: its size in bytes, 0 when unknown.
      alignment: data_ptr % 64 of the storage, 0 when unknown.
      content: the value, or None (light records, `save="meta"`, no data).
      producers: (record seq, slot index) of the records that wrote the value which this input holds:
        the record that defined it (an op, a view, a parameter record) and then every later write
        that overlaps it. Empty when unknown.
      leaf: no record here produced the current content (a parameter record is no producer).
      uninitialised: reads memory that came from `empty*` and was not (wholly) written since.
      note: why there is no data ("meta tensor", "fake tensor", "type Q8"), or "".
    """

    __slots__ = (
        "alignment",
        "content",
        "device",
        "dtype",
        "is_tensor",
        "layout",
        "leaf",
        "name",
        "note",
        "offset",
        "producers",
        "role",
        "shape",
        "storage",
        "storage_bytes",
        "strides",
        "uninitialised",
        "value",
    )

    def __init__(
        self,
        name: str,
        role: str,
        *,
        value: Any = None,
        is_tensor: bool = True,
        dtype: str = "",
        shape: tuple[int, ...] = (),
        strides: tuple[int, ...] | None = None,
        offset: int | None = None,
        device: str = "cpu",
        layout: str = "strided",
        storage: int = -1,
        storage_bytes: int = 0,
        alignment: int = 0,
        content: Content | None = None,
        producers: tuple[tuple[int, int], ...] = (),
        leaf: bool = False,
        uninitialised: bool = False,
        note: str = "",
    ) -> None:
        self.name = name
        self.role = role
        self.value = value
        self.is_tensor = is_tensor
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.offset = offset
        self.device = device
        self.layout = layout
        self.storage = storage
        self.storage_bytes = storage_bytes
        self.alignment = alignment
        self.content = content
        self.producers = producers
        self.leaf = leaf
        self.uninitialised = uninitialised
        self.note = note


class RawRecord:
    """One record on its way to the writer.

    Attributes:
      seq: number of the record within the rank, ascending in the order of completion.
      kind, step, model, grad_phase, module, call, op, n: the site key (DESIGN.md); call is `NO_CALL`
        outside every module call; op is "" and n is 0 on all but ops.
      overload: full op name (`aten.add_.Tensor`), "" on all but ops.
      name: of inline captures and parameters ("weight"), else "".
      args: [(argument name, encoded value)], every argument that was passed; a tensor is
        `{"ref": index into slots}` (see `encode_value`).
      slots: inputs, outputs and written arguments, in this order.
      source: (file name, line) of the first frame outside torch and this package, or None.
      light: a view, `detach`, `lift_fresh` or `empty*`: no statistics, no data of its own.
      random: its result depends on a random state.
      producer: for a module record, the seq of the op record that produced its (first) output; -1.
      opened: value of the record counter when the module call was entered; ops of the call have
        seq >= opened. Own seq on all but module records.
      thread: 0 for the thread that opened the recorder, else a small number.
      note: free text ("raised ValueError", "opaque: compiled region", "type Q8"), or "".
    """

    __slots__ = (
        "args",
        "call",
        "grad_phase",
        "kind",
        "light",
        "model",
        "module",
        "n",
        "name",
        "note",
        "op",
        "opened",
        "overload",
        "producer",
        "random",
        "seq",
        "slots",
        "source",
        "step",
        "thread",
    )

    def __init__(
        self,
        seq: int,
        kind: Kind,
        *,
        step: int,
        model: str = "",
        grad_phase: GradPhase = "fwd",
        module: str = "",
        call: int = NO_CALL,
        op: str = "",
        n: int = 0,
        overload: str = "",
        name: str = "",
        args: list[tuple[str, Any]] | None = None,
        slots: list[RawSlot] | None = None,
        source: tuple[str, int] | None = None,
        light: bool = False,
        random: bool = False,
        producer: int = -1,
        opened: int = -1,
        thread: int = 0,
        note: str = "",
    ) -> None:
        self.seq = seq
        self.kind = kind
        self.step = step
        self.model = model
        self.grad_phase = grad_phase
        self.module = module
        self.call = call
        self.op = op
        self.n = n
        self.overload = overload
        self.name = name
        self.args = args if args is not None else []
        self.slots = slots if slots is not None else []
        self.source = source
        self.light = light
        self.random = random
        self.producer = producer
        self.opened = seq if opened < 0 else opened
        self.thread = thread
        self.note = note


# A record that the writer's thread puts together: (make, seq, *arguments) stands for make(seq, *arguments).
LaterRecord = tuple[Any, ...]


class NotedSite(Protocol):
    """The module call that noted rows belong to; the attributes are those of `RawRecord`.

    Attributes:
      phase: `grad_phase`.
      path: `module`.
    """

    model: str
    phase: GradPhase
    path: str
    step: int
    call: int
    opened: int


# What a slot of a noted row says beyond its body: (storage, storage_bytes, alignment, producers, content,
# flags) as in `RawSlot`, with these flags, and what stands for its geometry, which no two share.
SlotFacts = tuple[int, int, int, tuple[tuple[int, int], ...], Content | None, int, object]
SLOT_LEAF = 1
SLOT_IS_NEW = 2  # a leaf that the record which reads it next introduces

# A record that shares what it says with others: (body, seq, site, n, thread, source, facts). All of the body
# counts but its site key, seq, opened, thread and source, and its slots but for what the facts say of each;
# facts are None where nothing is known of values. A body holds no content and is never changed. What a module
# returned first may have a producer: then it is the record's.
NotedRow = tuple[RawRecord, int, NotedSite, int, int, tuple[str, int] | None, list[SlotFacts] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """One execution of a root model.

    Attributes:
      step: number from 0 (-1 for what ran before the first).
      model: name of the root model, "" when there is one.
      meta: plain values given by the program: phase, req_ids, positions, valid_lengths and others.
    """

    step: int
    model: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredContent:
    """What is known of one tensor value.

    Attributes:
      id: number within the rank.
      dtype, shape: of the logical tensor.
      hash: 32 hexadecimal digits of xxh3-128, or "" when none was taken.
      stats: STATISTICS by name; undefined or unwanted ones are None. Empty when not summarised.
      has_sketch: a sketch row exists (see `reader.sketch`).
      has_data: the bytes are in a shard.
      encoding: how the bytes are stored, {} for an ordinary safetensors tensor (docs/format.md).
    """

    id: int
    dtype: str
    shape: tuple[int, ...]
    hash: str = ""
    stats: dict[str, int | float | None] = field(default_factory=dict)
    has_sketch: bool = False
    has_data: bool = False
    encoding: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSlot:
    """One tensor or plain value of a record; attributes as in `RawSlot`, content by number (-1: none)."""

    name: str
    role: str
    index: int
    value: Any = None
    is_tensor: bool = True
    dtype: str = ""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    offset: int | None = None
    device: str = "cpu"
    layout: str = "strided"
    storage: int = -1
    storage_bytes: int = 0
    alignment: int = 0
    content: int = -1
    producers: tuple[tuple[int, int], ...] = ()
    leaf: bool = False
    uninitialised: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """One stored record; attributes as in `RawRecord`, plus the rank it came from."""

    seq: int
    kind: Kind
    rank: int
    step: int
    model: str
    grad_phase: GradPhase
    module: str
    call: int
    op: str
    n: int
    overload: str
    name: str
    args: tuple[tuple[str, Any], ...]
    slots: tuple[StoredSlot, ...]
    source: tuple[str, int] | None
    light: bool
    random: bool
    producer: int
    opened: int
    thread: int
    note: str

    @property
    def key(self) -> tuple[int, int, str, str, str, int, str, int]:
        """The site key: (step, rank, model, grad_phase, module, call, op or kind:name, n)."""
        op = self.op if self.kind == "op" else f"{self.kind}:{self.name}"
        return (self.step, self.rank, self.model, self.grad_phase, self.module, self.call, op, self.n)
