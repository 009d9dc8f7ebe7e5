"""Module calls within compiled graphs: which call of which module an op of a graph belongs to.

A graph names modules by identity; the recording's own table turns that into a path. Calls are counted through
all graphs of a step, so that a model in several pieces has the call numbers of the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dispatch_trace.capture.frames import STEPS_KEPT, Frame, resolve_path
from dispatch_trace.capture.graph_plan import Entry, Site
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.schema import NO_CALL, GradPhase, Kind, RawRecord

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
    """Calls of modules within graphs, by (model, step) and path."""

    def __init__(self, tracer: Tracer) -> None:
        self.calls: dict[tuple[str, int], dict[str, int]] = {}
        self._modules: dict[int, torch.nn.Module] = {}
        self._num_roots = -1
        self._table = tracer.table

    def of(self, model: str, step: int) -> dict[str, int]:
        known = self.calls.get((model, step))
        if known is None:
            for old in [key for key in self.calls if key[0] == model and key[1] < step - STEPS_KEPT]:
                del self.calls[old]
            known = self.calls[(model, step)] = {}
        return known

    def paths(self, module: int) -> list[tuple[str, str]] | None:
        """Every (model, path) of the module with this id."""
        if self._num_roots != len(self._table.roots):
            self._num_roots = len(self._table.roots)
            self._modules = {id(m): m for m in self._table.modules()}
        found = self._modules.get(module)
        return None if found is None else self._table.get(found)


def counts_of(tracer: Tracer) -> _Counts:
    counts = _COUNTS.get(tracer)
    if counts is None:
        counts = _COUNTS[tracer] = _Counts(tracer)
    return counts


@dataclass(eq=False, slots=True)
class Run:
    """One forward run of one graph, in one recording.

    Attributes:
      tracer: the recording.
      base: the call that the graph's own code belongs to.
      first: number of the first call of each path in this run.
      seen: what backward may ask for, by name of the node (`graph_emit.Seen`).
    """

    tracer: Tracer
    base: Frame
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

    def _resolve(self, entry: Entry, parent: Frame) -> tuple[str, int] | None:
        """(path, call) of a module call, None for a module that the recording does not know."""
        counts = counts_of(self.tracer)
        candidates = [c for c in counts.paths(entry.module) or () if c[0] == self.base.model]
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

    def opened(self, frame: GraphFrame, seq: int) -> None:
        """Notes when the first op of a call, and of those around it, was recorded."""
        around: Frame | None = frame
        while around is not None and around.phase == "fwd" and around.call != NO_CALL:
            body = self.tracer.counters.body(
                model=around.model,
                step=around.step,
                phase="fwd",
                path=around.path,
                call=around.call,
                records_ops=True,
            )
            if body.opened:
                return
            body.opened = seq + 1  # 0 stands for "nothing yet"
            around = around.parent


def first_op(tracer: Tracer, model: str, step: int, path: str, call: int) -> int | None:
    """Number of the first op that a graph's taps recorded within a module call, None where there is none."""
    body = tracer.counters.body(model=model, step=step, phase="fwd", path=path, call=call, records_ops=True)
    return body.opened - 1 if body.opened else None


def begin_run(tracer: Tracer, frame: Frame, root: int, *, resumes: bool, entries: Mapping[int, int]) -> Run:
    """Opens a run of a graph in a recording.

    Args:
      frame: the innermost call that is open where the graph runs.
      root: id of the module whose code was compiled, 0 where it is none.
      resumes: the graph goes on where an earlier one of the same call ended.
      entries: how often the graph enters each module, by id.
    """
    counts = counts_of(tracer)
    base = frame
    candidates = [c for c in counts.paths(root) or () if c[0] == frame.model]
    calls = counts.of(frame.model, frame.step)
    if candidates:
        _, path = resolve_path(candidates, frame)
        if path != frame.path:
            call = calls.get(path, 0)
            if resumes and call:
                call -= 1
            else:
                calls[path] = call + 1
            base = tracer.counters.body(
                model=frame.model, step=frame.step, phase=frame.phase, path=path, call=call, records_ops=True
            )
    run = Run(tracer, base)
    for module, times in entries.items():
        found = [c for c in counts.paths(module) or () if c[0] == base.model]
        if len(found) != 1:
            continue
        path = found[0][1]
        if path == base.path:
            continue
        run.first[path] = calls.get(path, 0)
        calls[path] = run.first[path] + times
    return run


__all__ = ["GraphFrame", "Run", "begin_run", "counts_of", "first_op"]
