"""A dump of single tensor files as a rank of a trace: records in memory, tensors read when asked for.

Guarantees: opening reads no more of a file than what the tensor looks like; statistics, hash and sketch of
a tensor are worked out on its first use and kept, its data are not. A file that cannot be read has no
record and is listed in `problems`; the rest stays readable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch_trace.errors import NotExecutableError
from dispatch_trace.schema import NO_CALL, STATISTICS, Kind, StepInfo, StoredContent, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

if TYPE_CHECKING:
    import torch

OUT = "out"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """One tensor of a dump, and the site that it belongs to.

    Attributes:
      path: the file.
      kind: "module" or "inline".
      step, model, module, call, name, n: the site key, as in `schema.RawRecord`.
      seq, opened: place in the order of the rank, as in `schema.RawRecord`.
    """

    path: Path
    kind: Kind
    step: int
    model: str
    module: str = ""
    call: int = NO_CALL
    name: str = ""
    n: int = 0
    seq: int = -1
    opened: int = -1


class DumpRank(RankReader):
    """Stands in for a `RankReader` over files of another tool: all of its methods, none of its files.

    Every file is a record with one output slot, and its content has the number of the record.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        *,
        header: dict[str, Any],
        steps: Iterable[StepInfo],
        files: Iterable[TensorFile],
        problems: Iterable[str] = (),
    ) -> None:
        """Looks at every file.

        Args:
          path: the dump.
          rank: number of the rank.
          header: as in a trace, as far as it is known.
          steps: the steps, by number and model.
          files: in the order of the run, seq ascending.
          problems: what is known to be wrong.
        Raises:
          TraceFormatError: a file needs unpickling of something else than a tensor.
        """
        self.path = path
        self.rank = rank
        self.header = header
        self.problems = list(problems)
        self.steps = sorted(steps, key=lambda step: (step.step, step.model))
        self._records: dict[int, StoredRecord] = {}
        self._paths: dict[int, Path] = {}
        self._summaries: dict[int, tuple[StoredContent, np.ndarray[Any, Any] | None]] = {}
        for file in files:
            self._take(file)
        self.num_records = len(self._records)
        self.num_contents = sum(record.slots[0].content >= 0 for record in self._records.values())
        # The layouts have no mark of their own for a dump that was finished.
        self.end: dict[str, Any] | None = {
            "type": "end",
            "num_records": self.num_records,
            "num_contents": self.num_contents,
            "num_bytes": self.num_bytes,
        }

    def _take(self, file: TensorFile) -> None:
        import torch

        from dispatch_trace.compat.tensor_files import try_load
        from dispatch_trace.store.layouts import dtype_name, shape_of

        tensor = try_load(file.path)
        if isinstance(tensor, str):
            self.problems.append(f"{self._shown(file.path)} {tensor}")
            return
        strided = tensor.layout is torch.strided and not tensor.is_nested
        slot = StoredSlot(
            name=OUT,
            role="out",
            index=0,
            dtype=dtype_name(tensor.dtype),
            shape=shape_of(tensor),
            strides=tuple(tensor.stride()) if strided else None,
            layout=str(tensor.layout).removeprefix("torch."),
            device=tensor.device.type,
            content=-1 if tensor.is_meta else file.seq,
            note="meta tensor" if tensor.is_meta else "",
        )
        self._paths[file.seq] = file.path
        self._records[file.seq] = StoredRecord(
            seq=file.seq,
            kind=file.kind,
            rank=self.rank,
            step=file.step,
            model=file.model,
            grad_phase="fwd",
            module=file.module,
            call=file.call,
            op="",
            n=file.n,
            overload="",
            name=file.name,
            args=(),
            slots=(slot,),
            source=None,
            light=False,
            random=False,
            producer=-1,
            opened=file.seq if file.opened < 0 else file.opened,
            thread=0,
            note="",
        )

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.path)) if path.is_relative_to(self.path) else str(path)

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._paths.values())

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
        for record in self._records.values():
            if record.slots[0].content >= 0:
                yield self.content(record.seq)

    def sketch(self, id: int) -> np.ndarray[Any, Any] | None:
        found = self._summary(id)[1]
        return None if found is None else found.copy()

    def array(self, id: int) -> np.ndarray[Any, Any] | None:
        import torch

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

    def tensor(self, id: int) -> torch.Tensor:
        from dispatch_trace.compat.tensor_files import load_tensor

        slot = self._content_slot(id)
        if slot.content < 0:
            raise NotExecutableError(f"{self._shown(self._paths[id])} holds a meta tensor: there is no data")
        return load_tensor(self._paths[id])

    def _content_slot(self, id: int) -> StoredSlot:
        record = self._records.get(id)
        if record is None:
            raise KeyError(f"rank {self.rank} holds no content {id}")
        return record.slots[0]

    def _summary(self, id: int) -> tuple[StoredContent, np.ndarray[Any, Any] | None]:
        found = self._summaries.get(id)
        if found is None:
            found = self._summaries[id] = self._summarise(id)
        return found

    def _summarise(self, id: int) -> tuple[StoredContent, np.ndarray[Any, Any] | None]:
        import torch

        from dispatch_trace.stats import accumulate
        from dispatch_trace.store.layouts import content_hash, summary_view

        slot = self._content_slot(id)
        tensor = self.tensor(id)
        content = StoredContent(
            id=id, dtype=slot.dtype, shape=slot.shape, hash=content_hash(tensor), has_data=True
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
        from dispatch_trace.compat.tensor_files import check_bytes, try_load

        problems = list(self.problems)
        for path in self._paths.values():
            wrong = check_bytes(path)
            found = wrong or try_load(path)
            if isinstance(found, str):
                problems.append(f"{self._shown(path)} {found}")
        return list(dict.fromkeys(problems))
