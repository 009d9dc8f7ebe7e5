"""Parts of a trace by module: by pattern (`trace["layers.0-3"]`) and by attribute (`trace.at.layers[3]`).

Both complete on the tab key: the first in IPython and notebooks, the second in any Python prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dispatch_trace.errors import NoMatchError
from dispatch_trace.patterns import closest_paths, compile_select, select_modules
from dispatch_trace.tables import Table

if TYPE_CHECKING:
    from dispatch_trace.session import Record, Trace


def module_paths(trace: Trace) -> list[str]:
    """Paths of all modules that the trace knows, each once, in order; the root's is ""."""
    return list(dict.fromkeys(row["path"] for row in trace.modules)) or [""]


def records_of(trace: Trace, pattern: str) -> Table[Record]:
    """The records of the modules that a pattern matches, and of all beneath them.

    Raises:
      PatternError: the pattern is no regular expression.
      NoMatchError: it matches no module; names the closest paths.
    """
    paths = module_paths(trace)
    select_modules(pattern, paths, option="module")
    selector = compile_select(pattern, option="module")
    covered = {path for path in paths if selector.covers(path)}
    return record_table(record for record in trace.records if record.module in covered)


def record_table(records: Iterable[Record]) -> Table[Record]:
    """Records as rows: where, what, and the statistics of the main output."""
    return Table(records, _cells)


class Place:
    """A module of a trace, with its children as attributes (`at.encoder.layer[3]`).

    Attributes:
      path: the module's dotted path; the root's is "".
      records: what the trace holds of it and of all beneath it.
    A child that is called `path` or `records` is reached as `place["records"]`.
    """

    __slots__ = ("_trace", "path")

    def __init__(self, trace: Trace, path: str = "") -> None:
        self._trace = trace
        self.path = path

    @property
    def records(self) -> Table[Record]:
        inside = f"{self.path}."
        return record_table(
            record
            for record in self._trace.records
            if not self.path or record.module == self.path or record.module.startswith(inside)
        )

    def __getattr__(self, name: str) -> Place:
        if name.startswith("__"):  # what Python asks every object for
            raise AttributeError(name)
        return self._child(name, AttributeError)

    def __getitem__(self, name: str | int) -> Place:
        return self._child(str(name), NoMatchError)

    def __dir__(self) -> list[str]:
        return sorted(["path", "records", *(name for name in self._children() if name.isidentifier())])

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._children())

    def _child(self, name: str, error: type[Exception]) -> Place:
        children = self._children()
        if name not in children:
            near = closest_paths(name, children)
            hint = f" Closest: {', '.join(near)}." if near else " It has no children."
            raise error(f"{self.path or 'the root'} has no child {name!r} in this trace.{hint}")
        return Place(self._trace, f"{self.path}.{name}" if self.path else name)

    def _children(self) -> dict[str, None]:
        inside = f"{self.path}." if self.path else ""
        names = (
            p[len(inside) :].partition(".")[0] for p in module_paths(self._trace) if p.startswith(inside)
        )
        return dict.fromkeys(name for name in names if name)

    def __repr__(self) -> str:
        children = ", ".join(self._children())
        return f"Place({self.path or '(root)'}{': ' + children if children else ''})"


def _cells(record: Record) -> dict[str, Any]:
    slot = next((s for s in record.slots if s.role != "in" and s.is_tensor), None)
    stats = {} if slot is None else record.stats(slot.name)
    return {
        "record": record.seq,
        "step": record.step,
        "module": f"{record.module or '(root)'}{f'#{record.call}' if record.call else ''}",
        "what": record.op or " ".join(filter(None, (record.kind, record.name))),
        "dtype": "" if slot is None else slot.dtype,
        "shape": "" if slot is None else str(list(slot.shape)),
        "mean": stats.get("mean"),
        "rms": stats.get("rms"),
        "nan": stats.get("nan"),
    }


__all__ = ["Place", "module_paths", "record_table", "records_of"]
