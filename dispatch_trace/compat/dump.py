"""A dump of another tool as a rank of a trace: records in memory, tensors read when asked for.

Guarantees: opening reads no more of a file than what the tensor looks like (where the tool kept inputs,
also its hash: a value that one module returned and the next one read has one number); statistics and sketch
of a tensor are worked out on its first use and kept, its data are not. A tensor that cannot be read has no
slot and is listed in `problems`; the rest stays readable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch_trace.errors import NotExecutableError, TraceFormatError
from dispatch_trace.schema import (
    NO_CALL,
    SCHEMA_VERSION,
    STATISTICS,
    GradPhase,
    Kind,
    StepInfo,
    StoredContent,
    StoredRecord,
    StoredSlot,
)
from dispatch_trace.sketch import SKETCH_PARAMETERS
from dispatch_trace.store.mapped import Mapped
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.records import RecordsFrame

if TYPE_CHECKING:
    import torch

    from dispatch_trace.compat.tensor_files import TensorSource

OUT = "out"


@dataclass(frozen=True, slots=True)
class Measured:
    """A tensor of which a dump holds numbers only.

    Attributes:
      dtype, shape: as in `schema.StoredSlot`; a shape that is not known is (-1,).
      stats: what was measured, by the names of `schema.STATISTICS`; the rest is unknown.
      note: why there is no data.
    """

    dtype: str
    shape: tuple[int, ...]
    stats: Mapping[str, int | float | None] = field(default_factory=dict)
    note: str = "statistics only"


@dataclass(frozen=True, slots=True)
class Plain:
    """An argument that is no tensor.

    Attributes:
      value: encoded as in a trace.
      note: what it was, where the value is not known.
    """

    value: Any = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class DumpSlot:
    """One tensor or plain value of a record.

    Attributes:
      name, role: as in `schema.RawSlot`.
      held: where its value lies, or what is known of it.
      producers: as in `schema.RawSlot`, where the dump says.
    """

    name: str
    role: str
    held: TensorSource | Measured | Plain
    producers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpRecord:
    """What a dump holds of one site; attributes as in `schema.RawRecord`."""

    kind: Kind
    seq: int
    step: int
    model: str = ""
    grad_phase: GradPhase = "fwd"
    module: str = ""
    call: int = NO_CALL
    op: str = ""
    overload: str = ""
    name: str = ""
    n: int = 0
    args: tuple[tuple[str, Any], ...] = ()
    slots: tuple[DumpSlot, ...] = ()
    source: tuple[str, int] | None = None
    light: bool = False
    opened: int = -1
    note: str = ""


class DumpRank(RankReader):
    """Stands in for a `RankReader` over files of another tool: all of its methods, none of its files."""

    def __init__(
        self,
        path: Path,
        rank: int,
        *,
        header: dict[str, Any],
        steps: Iterable[StepInfo],
        records: Iterable[DumpRecord],
        problems: Iterable[str] = (),
        joins: bool = False,
    ) -> None:
        """Looks at every tensor.

        Args:
          path: the dump.
          rank: number of the rank.
          header: as in a trace, as far as it is known.
          steps: the steps, by number and model.
          records: in the order of the run, seq ascending.
          problems: what is known to be wrong.
          joins: equal values get one number, which takes reading all data once.
        Raises:
          TraceFormatError: a file needs unpickling of something else than a tensor.
        """
        self.path = path
        self.rank = rank
        self.header = header
        self.problems = list(problems)
        self.steps = sorted(steps, key=lambda step: (step.step, step.model))
        self._joins = joins
        self._records: dict[int, StoredRecord] = {}
        self._held: list[tuple[StoredSlot, TensorSource | Measured]] = []  # by number of the content
        self._hashes: dict[int, str] = {}
        self._by_hash: dict[str, int] = {}
        self._sources: list[TensorSource] = []
        self._summaries: dict[int, tuple[StoredContent, np.ndarray[Any, Any] | None]] = {}
        for record in records:
            self._take(record)
        self._by_hash.clear()
        self.num_records = len(self._records)
        self.num_contents = len(self._held)
        # The layouts have no mark of their own for a dump that was finished.
        self.end: dict[str, Any] | None = {
            "type": "end",
            "num_records": self.num_records,
            "num_contents": self.num_contents,
            "num_bytes": self.num_bytes,
        }

    # Taking in ----------------------------------------------------------------------------------------

    def _take(self, record: DumpRecord) -> None:
        slots: list[StoredSlot] = []
        for slot in record.slots:
            stored = self._slot(slot, len(slots))
            if stored is not None:
                slots.append(stored)
        lost = any(not isinstance(slot.held, Plain) for slot in record.slots)
        if lost and not any(slot.is_tensor for slot in slots):
            return  # none of its tensors can be read; the problems say so
        self._records[record.seq] = StoredRecord(
            seq=record.seq,
            kind=record.kind,
            rank=self.rank,
            step=record.step,
            model=record.model,
            grad_phase=record.grad_phase,
            module=record.module,
            call=record.call,
            op=record.op,
            n=record.n,
            overload=record.overload,
            name=record.name,
            args=record.args,
            slots=tuple(slots),
            source=record.source,
            light=record.light,
            random=False,
            producer=-1,
            opened=record.seq if record.opened < 0 else record.opened,
            thread=0,
            note=record.note,
        )

    def _slot(self, slot: DumpSlot, index: int) -> StoredSlot | None:
        held = slot.held
        if isinstance(held, Plain):
            return StoredSlot(
                name=slot.name, role=slot.role, index=index, value=held.value, is_tensor=False, note=held.note
            )
        if isinstance(held, Measured):
            stored = StoredSlot(
                name=slot.name,
                role=slot.role,
                index=index,
                dtype=held.dtype,
                shape=held.shape,
                producers=slot.producers,
                note=held.note,
            )
            return self._numbered(stored, held) if held.stats else stored
        return self._tensor_slot(slot, index, held)

    def _tensor_slot(self, slot: DumpSlot, index: int, source: TensorSource) -> StoredSlot | None:
        import torch

        from dispatch_trace.store.layouts import content_hash, dtype_name, shape_of

        tensor = source.look()
        if isinstance(tensor, str):
            self.problems.append(f"{self._shown(source.path)} {tensor}")
            return None
        self._sources.append(source)
        strided = tensor.layout is torch.strided and not tensor.is_nested
        stored = StoredSlot(
            name=slot.name,
            role=slot.role,
            index=index,
            dtype=dtype_name(tensor.dtype),
            shape=shape_of(tensor),
            strides=tuple(tensor.stride()) if strided else None,
            layout=str(tensor.layout).removeprefix("torch."),
            device=tensor.device.type,
            producers=slot.producers,
            note="meta tensor" if tensor.is_meta else "",
        )
        if tensor.is_meta:
            return stored
        if not self._joins:
            return self._numbered(stored, source)
        digest = content_hash(tensor)
        known = self._by_hash.get(digest)
        if known is not None:
            return replace(stored, content=known)
        self._by_hash[digest] = len(self._held)
        self._hashes[len(self._held)] = digest
        return self._numbered(stored, source)

    def _numbered(self, slot: StoredSlot, held: TensorSource | Measured) -> StoredSlot:
        slot = replace(slot, content=len(self._held))
        self._held.append((slot, held))
        return slot

    def _shown(self, path: Path) -> str:
        inside = path != self.path and path.is_relative_to(self.path)
        return str(path.relative_to(self.path)) if inside else path.name

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in {source.path for source in self._sources})

    # Records ----------------------------------------------------------------------------------------

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        for record in self._records.values():
            if all(getattr(record, name) == value for name, value in where.items()):
                yield record

    def record(self, seq: int) -> StoredRecord:
        try:
            return self._records[seq]
        except KeyError:
            raise KeyError(f"rank {self.rank} holds no record {seq}") from None

    # Contents ---------------------------------------------------------------------------------------

    def content(self, id: int) -> StoredContent:
        return self._summary(id)[0]

    def contents(self) -> Iterator[StoredContent]:
        for id in range(len(self._held)):
            yield self.content(id)

    def sketch(self, id: int) -> np.ndarray[Any, Any] | None:
        found = self._summary(id)[1]
        return None if found is None else found.copy()

    def array(self, id: int) -> np.ndarray[Any, Any] | None:
        import torch

        if isinstance(self._holding(id)[1], Measured):
            return None
        tensor = self.tensor(id)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return None
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.dtype is torch.bfloat16:
            tensor = tensor.float()
        try:
            array: np.ndarray[Any, Any] = tensor.numpy()
        except TypeError:  # a dtype that NumPy lacks
            return None
        return array

    def mapped(self, id: int) -> Mapped | None:
        return None

    def frames(self) -> Iterator[RecordsFrame]:
        return iter(())  # it was not written in frames

    @property
    def model_names(self) -> dict[str, str]:
        return {}

    def sketch_table(self, place: tuple[int, int, int] | None) -> np.ndarray[Any, Any]:
        raise TraceFormatError(f"{self.path}: a dump of another tool holds no sketches")

    def tensor(self, id: int) -> torch.Tensor:
        from dispatch_trace.compat.tensor_files import load_tensor

        slot, held = self._holding(id)
        if isinstance(held, Measured):
            raise NotExecutableError(
                f"{self._shown(self.path)} holds no data of a {slot.dtype} {list(slot.shape)}: {held.note}. "
                "Dump tensors, or record the run with save='tensors'."
            )
        return load_tensor(held)

    def _holding(self, id: int) -> tuple[StoredSlot, TensorSource | Measured]:
        if not 0 <= id < len(self._held):
            raise KeyError(f"rank {self.rank} holds no content {id}")
        return self._held[id]

    def _summary(self, id: int) -> tuple[StoredContent, np.ndarray[Any, Any] | None]:
        found = self._summaries.get(id)
        if found is None:
            found = self._summaries[id] = self._summarise(id)
        return found

    def _summarise(self, id: int) -> tuple[StoredContent, np.ndarray[Any, Any] | None]:
        import torch

        from dispatch_trace.stats import accumulate
        from dispatch_trace.store.layouts import content_hash, summary_view

        slot, held = self._holding(id)
        if isinstance(held, Measured):
            stats = {name: held.stats.get(name) for name in STATISTICS}
            return StoredContent(id=id, dtype=slot.dtype, shape=slot.shape, stats=stats), None
        tensor = self.tensor(id)
        content = StoredContent(
            id=id,
            dtype=slot.dtype,
            shape=slot.shape,
            hash=self._hashes.get(id) or content_hash(tensor),
            has_data=True,
        )
        try:
            # NumPy warns of overflows that the statistics allow for.
            with torch.no_grad(), np.errstate(all="ignore"):
                summary = accumulate(summary_view(tensor), sketch=True)
        except (RuntimeError, TypeError, NotImplementedError):  # a dtype without arithmetic
            return content, None
        stats = {name: summary.stats.get(name) for name in STATISTICS}
        return replace(content, stats=stats, has_sketch=summary.sketch is not None), summary.sketch

    # Soundness --------------------------------------------------------------------------------------

    def verify(self) -> list[str]:
        from dispatch_trace.compat.tensor_files import check_bytes

        problems = list(self.problems)
        bad = {path: wrong for path in {s.path for s in self._sources} if (wrong := check_bytes(path))}
        for source in self._sources:
            found = bad.get(source.path) or source.look()
            if isinstance(found, str):
                problems.append(f"{self._shown(source.path)} {found}")
        return list(dict.fromkeys(problems))


def of_one_world(ranks: list[RankReader]) -> list[RankReader]:
    """The same ranks, whose headers now say how many there are."""
    for reader in ranks:
        reader.header["world_size"] = len(ranks)
    return ranks


def make_header(
    records: Iterable[DumpRecord],
    *,
    name: str,
    format: str,
    notices: Iterable[str],
    rank: int = 0,
    classes: Mapping[tuple[str, str], str] | None = None,
    meta: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The header of a rank, as far as a dump knows it.

    Args:
      records: of the rank.
      name: of the format, as on the command line; `format` in words.
      notices: what the format cannot say.
      classes: of modules, by (model, path).
      meta: what the dump says of itself.
      options: of the recording, where they are other than those of a module-level trace of outputs.
    """
    taken = list(records)
    known = classes or {}
    models = dict.fromkeys(record.model for record in taken) or {"": None}
    modules = sorted({(r.model, r.module) for r in taken if r.kind == "module"})
    return {
        "type": "header",
        "schema_version": SCHEMA_VERSION,
        "format": name,
        "lane": "unknown",
        "models": {model: {"class": known.get((model, ""), "?")} for model in models},
        "modules": [
            {"model": model, "path": path, "class": known.get((model, path), ""), "parameters": []}
            for model, path in modules
        ],
        "options": {
            "level": "module",
            "save": "tensors",
            "save_rules": [],
            "select": [re.escape(path) for path in dict.fromkeys(path for _, path in modules)],
            "ops": None,
            "steps": None,
            "stats": None,
            "inputs": False,
            "sketch": True,
            "params": "none",
            **options,
        },
        "sketch": SKETCH_PARAMETERS,
        "rank": rank,
        "meta": {"format": format, **(meta or {})},
        "notices": list(notices),
    }
