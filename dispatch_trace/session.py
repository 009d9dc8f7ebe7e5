"""What people hold in their hands of one recording: traces and records.

Stands on top of the reader and hands out plain data from below; `alignment` compares two. Imports no torch
until tensor data is asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch_trace.compat import open_ranks
from dispatch_trace.errors import ConfigError, NotExecutableError
from dispatch_trace.metrics import derived
from dispatch_trace.notebook import brief, html_table
from dispatch_trace.schema import NO_CALL, StepInfo, StoredRecord, StoredSlot
from dispatch_trace.slices import Place, module_paths, records_of
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.remote import place

if TYPE_CHECKING:
    import pandas
    import torch

_SHOWN_STATS = ("mean", "std", "min", "max", "nan")


class Record:
    """What was seen at one site.

    Attributes:
      step, rank, model, grad_phase, module, call, op, n: the site key; call is None outside module calls,
        op is None on all but ops.
      kind: "op", "module", "inline" or "param"; name: of inline captures and parameters, else "".
      overload, seq, args, light, random, note: as recorded.
    """

    __slots__ = ("_reader", "_record")

    def __init__(self, reader: RankReader, record: StoredRecord) -> None:
        self._reader = reader
        self._record = record

    @property
    def kind(self) -> str:
        return self._record.kind

    @property
    def step(self) -> int:
        return self._record.step

    @property
    def rank(self) -> int:
        return self._record.rank

    @property
    def model(self) -> str:
        return self._record.model

    @property
    def grad_phase(self) -> str:
        return self._record.grad_phase

    @property
    def module(self) -> str:
        return self._record.module

    @property
    def call(self) -> int | None:
        return None if self._record.call == NO_CALL else self._record.call

    @property
    def op(self) -> str | None:
        return self._record.op if self._record.kind == "op" else None

    @property
    def n(self) -> int:
        return self._record.n

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def overload(self) -> str:
        return self._record.overload

    @property
    def seq(self) -> int:
        return self._record.seq

    @property
    def args(self) -> dict[str, Any]:
        """Arguments by name, encoded as in docs/format.md; a tensor is {"ref": slot index}."""
        return dict(self._record.args)

    @property
    def light(self) -> bool:
        return self._record.light

    @property
    def random(self) -> bool:
        return self._record.random

    @property
    def note(self) -> str:
        return self._record.note

    @property
    def slots(self) -> tuple[StoredSlot, ...]:
        return self._record.slots

    @property
    def source(self) -> str | None:
        """ "file:line" of the first frame outside torch, None where unknown."""
        found = self._record.source
        return None if found is None else f"{found[0]}:{found[1]}"

    def slot(self, name: str = "out") -> StoredSlot:
        """A slot by name; "out" is also the first output of ops that name theirs otherwise.

        Raises:
          KeyError: the record has no such slot.
        """
        for slot in self._record.slots:
            if slot.name == name:
                return slot
        if name == "out":
            for slot in self._record.slots:
                if slot.role != "in" and slot.is_tensor:
                    return slot
        names = ", ".join(slot.name for slot in self._record.slots)
        raise KeyError(f"{self!r} has no slot {name!r}; it has {names or 'none'}")

    def stats(self, slot: str = "out") -> dict[str, int | float | None]:
        """Statistics, and mean, std, abs_mean, rms and l2 besides; empty where none were taken."""
        content = self.slot(slot).content
        if content < 0:
            return {}
        found = dict(self._reader.content(content).stats)
        return {**found, **derived(found)} if found else {}

    def sketch(self, slot: str = "out") -> np.ndarray[Any, Any] | None:
        """[k] float32, or None where none was taken."""
        content = self.slot(slot).content
        return None if content < 0 else self._reader.sketch(content)

    def hash(self, slot: str = "out") -> str:
        """xxh3-128 of the value as 32 hexadecimal digits, "" where none was taken."""
        content = self.slot(slot).content
        return "" if content < 0 else self._reader.content(content).hash

    def tensor(self, slot: str = "out") -> torch.Tensor:
        """The value, bit-exact: from the trace, or by running what led to it again.

        Raises:
          KeyError: the record has no such slot.
          NotExecutableError: the slot holds no tensor, or the trace not enough to compute it.
          TraceFormatError: the shard that holds it is missing or corrupt.
        """
        found = self.slot(slot)
        if found.content >= 0 and self._reader.content(found.content).has_data:
            return self._reader.tensor(found.content)
        from dispatch_trace import execute

        return execute.tensor(self._reader, self._record.seq, found.name)

    def execute(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Runs the op on its own recorded inputs, by default in float64.

        Returns: outputs and written arguments by slot name.
        Raises:
          NotExecutableError: it is no op, or its inputs are not there.
        """
        import torch

        from dispatch_trace import execute

        return execute.execute_record(
            self._reader, self._record.seq, torch.float64 if dtype is None else dtype
        )

    def __repr__(self) -> str:
        what = self.op or self.kind
        where = f"{self.module or '(root)'}#{self.call}" if self.call is not None else self.module or "(root)"
        return f"Record({self.seq}: {where} {what}{f' {self.name}' if self.name else f'[{self.n}]'})"

    def _repr_html_(self) -> str:
        site = {
            "record": self.seq,
            "what": self.overload or self.op or " ".join(filter(None, (self.kind, self.name))),
            "module": self.module or "(root)",
            "call": "" if self.call is None else self.call,
            "step": self.step,
            "source": self.source or "",
            "note": self.note,
        }
        rows = []
        for slot in self.slots:
            if slot.is_tensor:
                stats = self.stats(slot.name)
                rows.append(
                    [slot.name, slot.dtype, list(slot.shape or ())]
                    + ["" if stats.get(name) is None else brief(stats[name]) for name in _SHOWN_STATS]
                )
        about = html_table(["", ""], [[key, value] for key, value in site.items() if value != ""])
        return about + html_table(["slot", "dtype", "shape", *_SHOWN_STATS], rows)


class Trace:
    """A recorded run.

    Attributes:
      path: its directory.
      ranks: one reader for each rank.
      header: of the first rank.
      closed: it has its end frames. complete: closed, nothing dropped, files sound.
      executable: its leaves suffice to run it again.
      steps, modules: steps, and the table of modules.
      records: an iterator over all records, in order.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = place(path)
        self.ranks = open_ranks(path)

    @property
    def header(self) -> dict[str, Any]:
        return self.ranks[0].header

    @property
    def closed(self) -> bool:
        return all(rank.closed for rank in self.ranks)

    @property
    def complete(self) -> bool:
        return all(rank.complete for rank in self.ranks)

    @property
    def executable(self) -> bool:
        if self.header.get("options", {}).get("level") == "module":
            return False
        from dispatch_trace import execute

        try:
            for rank in self.ranks:
                execute.check_executable(rank)
        except NotExecutableError:
            return False
        return self.complete

    @property
    def steps(self) -> list[StepInfo]:
        return self.ranks[0].steps

    @property
    def modules(self) -> list[dict[str, Any]]:
        """[{model, path, class, parameters}] of every module of the recorded models."""
        return list(self.header.get("modules") or [])

    @property
    def records(self) -> Iterator[Record]:
        return self.find()

    @property
    def num_records(self) -> int:
        return sum(rank.num_records for rank in self.ranks)

    def find(
        self,
        *,
        module: str | None = None,
        op: str | None = None,
        step: int | None = None,
        kind: str | None = None,
        call: int | None = None,
        n: int | None = None,
        name: str | None = None,
        grad_phase: str | None = None,
        model: str | None = None,
        rank: int | None = None,
    ) -> Iterator[Record]:
        """Records whose fields equal what is given, in order; None stands for any.

        Args:
          op: base name (`aten.mm`) or overload (`aten.mm.default`).
        """
        where: dict[str, Any] = {
            key: value
            for key, value in (
                ("module", module),
                ("step", step),
                ("kind", kind),
                ("call", call),
                ("n", n),
                ("name", name),
                ("grad_phase", grad_phase),
                ("model", model),
            )
            if value is not None
        }
        for reader in self.ranks:
            if rank is not None and reader.rank != rank:
                continue
            for record in reader.records(**where):
                if op is None or op in (record.op, record.overload):
                    yield Record(reader, record)

    def __iter__(self) -> Iterator[Record]:
        return self.records

    def __getitem__(self, at: str | int) -> Any:
        """Records of modules by pattern, with all beneath them, or one record by its number.

        Args:
          at: a pattern as in `select` (`"encoder.layer.0-3"`), or the `seq` of a record of the first rank.
        Returns: a `Table` of records, which prints, slices and gives a data frame; of a number the record.
        Raises:
          PatternError, NoMatchError: of the pattern.
          KeyError: there is no record of that number.
        """
        if isinstance(at, str):
            return records_of(self, at)
        return Record(self.ranks[0], self.ranks[0].record(at))

    def _ipython_key_completions_(self) -> list[str]:
        return module_paths(self)

    @property
    def at(self) -> Place:
        """The root module; its children are attributes, so that a prompt completes paths."""
        return Place(self)

    def verify(self) -> list[str]:
        """What is wrong with the files, in words; empty when sound."""
        many = len(self.ranks) > 1
        return [f"rank {r.rank}: {p}" if many else p for r in self.ranks for p in r.verify()]

    def execute(self, dtype: torch.dtype | None = None, *, rank: int = 0) -> Any:
        """Runs the recorded op graph of a rank again, in the recorded precision or in torch.float64.

        Returns: an `execute.Execution`.
        Raises:
          NotExecutableError: the trace holds no data of leaves.
        """
        from dispatch_trace import execute

        return execute.execute_rank(self._rank(rank), dtype=dtype)

    def _rank(self, number: int) -> RankReader:
        for reader in self.ranks:
            if reader.rank == number:
                return reader
        raise ConfigError(
            f"rank={number}: {self.path} has ranks {', '.join(str(r.rank) for r in self.ranks)}."
        )

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each tensor slot of each record, with its statistics, as `export` has. Needs pandas.

        The statistic `n`, a count of elements, is the column `numel`: `n` is part of the site key.
        """
        import pandas

        from dispatch_trace.export.rows import record_rows

        frame = pandas.DataFrame([row for row in record_rows(self.ranks) if "slot" in row])
        if len(frame):
            frame["shape"] = [tuple(json.loads(text)) for text in frame["shape"]]
        return frame

    def __repr__(self) -> str:
        state = "complete" if self.complete else "closed" if self.closed else "not closed"
        return f"Trace({str(self.path)!r}, {self.num_records} records, {len(self.steps)} steps, {state})"

    def _repr_html_(self) -> str:
        rows = {
            "path": self.path,
            "records": self.num_records,
            "steps": len(self.steps),
            "ranks": len(self.ranks),
            "state": "complete" if self.complete else "not complete",
            "torch": self.header.get("torch_version", ""),
            "save": self.header.get("options", {}).get("save", ""),
        }
        return html_table(["", ""], [[key, value] for key, value in rows.items()])


def open(path: str | os.PathLike[str]) -> Trace:
    """Opens a recorded trace.

    Raises:
      NotATraceError, TraceFormatError, SchemaVersionError: as `compat.open_ranks`.
    """
    return Trace(path)


__all__ = ["Record", "Trace", "open"]
