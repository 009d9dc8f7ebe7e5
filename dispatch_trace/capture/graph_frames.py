"""Module calls within compiled graphs: which call of which module an op of a graph belongs to.

A graph names modules by identity; the recording's own table turns that into a path. Calls are counted through
all graphs of a step, so that a model in several pieces has the call numbers of the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dispatch_trace.capture.frames import STEPS_KEPT, Frame, resolve_path
from dispatch_trace.capture.graph_code import Code, Tables, owners_of
from dispatch_trace.capture.graph_plan import Entry, Site
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.schema import GradPhase, Kind, RawRecord

# What is counted for each recording; a registry, because graphs outlive recordings and know nothing of them.
_COUNTS: weakref.WeakKeyDictionary[Tracer, _Counts] = weakref.WeakKeyDictionary()


class GraphFrame(Frame):
    """A frame whose ops come from a graph.

    Attributes:
      note: of every record made here.
      source: (file, line) of the op that is about to be recorded, None to leave it as found.
      run: the graph run that the frame stands for, on the frame that owns its autograd nodes.
    """

    __slots__ = ("note", "run", "source")
    shares_bodies = False

    def __init__(self, base: Frame, note: str = "") -> None:
        super().__init__(
            base.model,
            base.path,
            base.call,
            base.phase,
            base.step,
            base.module,
            base.parent,
            base.records_ops,
            base.records_module,
        )
        self.counts = base.counts  # one count for the call, whatever its ops come from
        self.opened = base.opened
        self.note = note
        self.source: tuple[str, int] | None = None
        self.run: Run | None = None

    def record(self, seq: int, kind: Kind, **fields: Any) -> RawRecord:
        if kind == "op":
            fields["note"] = self.note
            if self.source is not None and "source" in fields:
                fields["source"] = self.source
        return super().record(seq, kind, **fields)


class _Counts:
    """Calls of modules within graphs, by (model, step) and path; and who is who in the recording.

    Modules and tensors are known by identity only: a recording must not keep the program's model alive.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int], dict[str, int]] = {}
        self.tables: Tables = {}
        self._paths: dict[int, list[tuple[str, str]]] = {}
        self._looked_up: tuple[Any, ...] = ()

    def of(self, model: str, step: int) -> dict[str, int]:
        known = self.calls.get((model, step))
        if known is None:
            for old in [key for key in self.calls if key[0] == model and key[1] < step - STEPS_KEPT]:
                del self.calls[old]
            known = self.calls[(model, step)] = {}
        return known

    def look_up(self, tracer: Tracer, model: str, step: int) -> None:
        """Looks at the recorded models anew in every step: parameters may be replaced in between."""
        table = tracer.table
        now = (model, step, len(table.roots))
        if now != self._looked_up:
            self._looked_up = now
            self._paths = {id(module): table.get(module) or [] for module in table.modules()}
            self.tables = {name: owners_of(root) for name, root in table.roots.items()}

    def paths(self, module: int) -> list[tuple[str, str]]:
        """Every (model, path) of the module with this id."""
        return self._paths.get(module, [])


def counts_of(tracer: Tracer) -> _Counts:
    counts = _COUNTS.get(tracer)
    if counts is None:
        counts = _COUNTS[tracer] = _Counts()
    return counts


@dataclass(eq=False, slots=True, weakref_slot=True)
class Run:
    """One forward run of one graph, in one recording.

    Attributes:
      tracer: the recording.
      base: the call that the graph's own code belongs to.
      code: what runs.
      first: number of the first call of each path in this run.
      seen: what backward may ask for, by name of the node (`graph_emit.Seen`).
    """

    tracer: Tracer
    base: Frame
    code: Code
    first: dict[str, int] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)
    _frames: dict[tuple[Any, ...], GraphFrame] = field(default_factory=dict)
    _shared: dict[str, dict[int, int]] = field(default_factory=dict)

    def frame(self, site: Site) -> GraphFrame | None:
        """The frame of an op, None where it is not to be recorded."""
        key = (site.phase, site.entries)
        if key not in self._frames:
            self._frames[key] = self._make(site.phase, site.entries)
        frame = self._frames[key]
        return frame if frame.records_ops else None

    def _make(self, phase: GradPhase, entries: tuple[Entry, ...]) -> GraphFrame:
        base = self.base
        if phase == "fwd":
            phase = base.phase  # the graph itself may be what a checkpoint computes again
        frame = self._body(phase, base.path, base.call, base.parent)
        for entry in entries:
            site = self._resolve(entry, frame)
            if site is not None and site != (frame.path, frame.call):
                frame = self._body(phase, *site, frame)
        return frame

    def _body(self, phase: GradPhase, path: str, call: int, parent: Frame | None) -> GraphFrame:
        base, tracer = self.base, self.tracer
        own = (path, call, phase) == (base.path, base.call, base.phase)
        body = base
        if not own:
            body = tracer.counters.body(
                model=base.model, step=base.step, phase=phase, path=path, call=call, records_ops=True
            )
        frame = GraphFrame(body)
        frame.parent = parent
        frame.records_ops = tracer.options.level == "op" and tracer.wanted(path, base.step)[0]
        return frame

    def candidates(self, module: int) -> list[tuple[str, str]]:
        """Every (model, path) that a module of the code may stand for in this run."""
        base, below = self.base, self.code.below.get(module)
        if below is not None:
            prefix = f"{base.path}." if base.path else ""
            return [(base.model, f"{prefix}{path}" if path else base.path) for path in below]
        return [c for c in counts_of(self.tracer).paths(module) if c[0] == base.model]

    def _resolve(self, entry: Entry, parent: Frame) -> tuple[str, int] | None:
        """(path, call) of a module call, None for a module that the recording does not know."""
        counts = counts_of(self.tracer)
        candidates = self.candidates(entry.module)
        if not candidates:
            return None
        _, path = resolve_path(candidates, parent)
        if path == self.base.path:
            return path, self.base.call  # a wrapper's frame enters the module that it stands for
        if len(candidates) == 1:
            return path, self.first.get(path, 0) + entry.times
        # Dynamo counts entries by object, whatever name it was called by.
        numbers = self._shared.setdefault(path, {})
        if entry.times not in numbers:
            calls = counts.of(self.base.model, self.base.step)
            numbers[entry.times] = calls.get(path, 0)
            calls[path] = numbers[entry.times] + 1
        return path, numbers[entry.times]


def begin_run(tracer: Tracer, frame: Frame, code: Code, args: Sequence[Any]) -> Run:
    """Opens a run of compiled code in a recording.

    Args:
      frame: the innermost call that is open where the code runs.
      args: what it is called with.
    """
    counts = counts_of(tracer)
    counts.look_up(tracer, frame.model, frame.step)
    base = frame
    path = code.base_path(counts.tables, frame.model, args, frame)
    if path is None:
        known = [p for model, p in counts.paths(code.root) if model == frame.model]
        path = known[0] if known else frame.path
    calls = counts.of(frame.model, frame.step)
    if path != frame.path:
        call = calls.get(path, 0)
        if code.resumes and call:
            call -= 1
        else:
            calls[path] = call + 1
        base = tracer.counters.body(
            model=frame.model, step=frame.step, phase=frame.phase, path=path, call=call, records_ops=True
        )
    run = Run(tracer, base, code)
    for module, times in code.entries.items():
        candidates = run.candidates(module)
        if len(candidates) == 1 and (inner := candidates[0][1]) != base.path:
            run.first[inner] = calls.get(inner, 0)
            calls[inner] = run.first[inner] + times
    return run


__all__ = ["GraphFrame", "Run", "begin_run"]
