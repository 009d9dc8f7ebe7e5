"""Whose code is running: steps, module calls, grad phases, and the counters behind the site key.

Guarantees: one `Frame` per module call in progress, a stack per thread; counters run per
(step, grad_phase); backward ops find the forward call that they belong to through autograd's sequence
numbers. Leaves to others what is recorded at a site (`ops`, `modules`) and how (`snapshot`).
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dispatch_trace.schema import GradPhase, Kind, RawRecord

_current_node = torch._C._current_autograd_node
_sequence_nr = torch._C._autograd._get_sequence_nr
# AccumulateGrad and hooks carry the largest sequence number, so that they run first; no forward op owns them.
_NO_SEQUENCE_NR = 2**62
# Backward may still come for the last few steps; what is older is never asked for again.
STEPS_KEPT = 64
_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


StepCalls = dict[tuple[GradPhase, str], int]  # (phase, path) -> number of the last call


class Frame:
    """One module call (or the room outside all calls), with the op counters of its own body.

    Attributes:
      model, path, call, phase, step: the part of the site key that the call fixes.
      module: the module object; None outside all calls.
      parent: the enclosing frame of the same thread.
      records_ops, records_module: whether the selection wants the ops of this body, and its return.
      counts: op base name -> how often it ran in this body.
      opened: record counter when the call was entered.
      calls: see `Counters.calls_of`; None until a call inside asks for it.
      inputs: input slots, taken at entry; with `save="meta"` see `meta.inputs_of`.
      is_root: an outermost call of a root model.
      mode: the dispatch mode that was entered with the call, in a thread that had none.
      rested: the dispatch mode that is off the stack while this root call runs, see `ModuleRecorder`.
      shares_bodies: what is recorded of an op does not depend on the frame but for the site key.
    """

    shares_bodies = True

    __slots__ = (
        "call",
        "calls",
        "counts",
        "inputs",
        "is_root",
        "mode",
        "model",
        "module",
        "opened",
        "parent",
        "path",
        "phase",
        "records_module",
        "records_ops",
        "rested",
        "step",
    )

    def __init__(
        self,
        model: str,
        path: str,
        call: int,
        phase: GradPhase,
        step: int,
        module: torch.nn.Module | None,
        parent: Frame | None,
        records_ops: bool,
        records_module: bool,
    ) -> None:
        self.model = model
        self.path = path
        self.call = call
        self.phase: GradPhase = phase
        self.step = step
        self.module = module
        self.parent = parent
        self.records_ops = records_ops
        self.records_module = records_module
        self.counts: dict[str, int] = {}
        self.opened = 0
        self.calls: StepCalls | None = None
        self.inputs: Any = []
        self.is_root = False
        self.mode: Any = None
        self.rested: Any = None

    def count(self, name: str) -> int:
        """How often something of this name came up in the body before; counts this time."""
        n = self.counts[name] = self.counts.get(name, -1) + 1
        return n

    def record(self, seq: int, kind: Kind, **fields: Any) -> RawRecord:
        """A record at this site."""
        return RawRecord(
            seq,
            kind,
            step=self.step,
            model=self.model,
            grad_phase=self.phase,
            module=self.path,
            call=self.call,
            **fields,
        )


class ThreadState(threading.local):
    """What one thread is in the middle of.

    Attributes:
      frame: innermost module call, None outside.
      busy: the recorder itself is running ops; nothing is recorded.
      number: 0 for the thread that opened the recorder, then 1, 2, …
      marks, owners: ascending autograd sequence numbers, and the frame that owns nodes from there on.
      mode: the dispatch mode of this recording in this thread, None where there is none.
      region: the call of compiled code that is running, None outside.
      resting: a root call of a step that is not wanted is running, and the mode is off the stack.
    """

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.busy = False
        self.number = -1
        self.marks: list[int] = []
        self.owners: list[Frame | None] = []
        self.mode: Any = None
        self.region: Any = None
        self.resting = False


def walk_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    """(path, module, whether it wraps compiled code) of all modules, parents first.

    `named_modules()` drops a module that is registered twice; here each path counts, because the same
    object called through `dec.fc` belongs there and not to `enc.fc`. A compiled wrapper and what it wraps
    have one path: `_orig_mod` never shows.
    """
    # A cycle ends where an object meets itself.
    stack: list[tuple[str, torch.nn.Module, frozenset[int]]] = [("", root, frozenset())]
    while stack:
        path, module, above = stack.pop()
        while isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
            yield path, module, True
            module = inner
        if id(module) in above:
            continue
        yield path, module, False
        inside = above | {id(module)}
        for name, child in reversed(list(module._modules.items())):
            if child is not None:
                stack.append((f"{path}.{name}" if path else name, child, inside))


class ModuleTable:
    """The modules of one or several root models: object -> every path that reaches it.

    Attributes:
      roots: the root models by name.
      compiled: ids of the modules that are wrappers around compiled code.
    """

    def __init__(self) -> None:
        self._paths: dict[int, list[tuple[str, str]]] = {}
        self._modules: dict[int, torch.nn.Module] = {}
        self.roots: dict[str, torch.nn.Module] = {}
        self.compiled: set[int] = set()

    def add_root(self, model: str, root: torch.nn.Module) -> None:
        """Registers `root` and all that is below it under the name `model`."""
        self.roots[model] = root
        for path, module, compiled in walk_modules(root):
            self._register(model, path, module)
            if compiled:
                self.compiled.add(id(module))

    def _register(self, model: str, path: str, module: torch.nn.Module) -> None:
        self._modules[id(module)] = module
        paths = self._paths.setdefault(id(module), [])
        if (model, path) not in paths:
            paths.append((model, path))

    def add_wrapper(self, module: torch.nn.Module) -> None:
        """Registers a wrapper that was made during the run, by the paths of what it wraps."""
        inner = module
        while isinstance(below := getattr(inner, "_orig_mod", None), torch.nn.Module):
            inner = below
        for model, path in list(self._paths.get(id(inner), ())):
            self._register(model, path, module)
            self.compiled.add(id(module))

    def get(self, module: torch.nn.Module) -> list[tuple[str, str]] | None:
        """Every (model, path) of the object, or None."""
        return self._paths.get(id(module))

    def modules(self) -> Iterable[torch.nn.Module]:
        return self._modules.values()

    def items(self) -> Iterable[tuple[str, str, torch.nn.Module]]:
        """(model, path, module) for every path, a shared object once per path."""
        for key, module in self._modules.items():
            for model, path in self._paths[key]:
                yield model, path, module


def resolve_path(candidates: list[tuple[str, str]], parent: Frame | None) -> tuple[str, str]:
    """The path by which a shared module is being called: the one below the nearest enclosing call."""
    if len(candidates) == 1:
        return candidates[0]
    frame = parent
    while frame is not None:
        prefix = f"{frame.path}." if frame.path else ""
        below = [c for c in candidates if c[0] == frame.model and c[1].startswith(prefix)]
        if below:
            return min(below, key=lambda c: c[1].count("."))
        frame = frame.parent
    return candidates[0]


class Counters:
    """Call numbers of modules, per (model, step, grad phase), shared by all threads.

    Attributes:
      lock: held while a number is taken from `calls_of`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._steps: dict[tuple[str, int], _StepCounters] = {}

    def _of(self, model: str, step: int) -> _StepCounters:
        return self._steps.get((model, step)) or self._steps.setdefault((model, step), _StepCounters())

    def calls_of(self, model: str, step: int) -> StepCalls:
        """The numbers of the last calls of all modules in a step."""
        return self._of(model, step).calls

    def next_call(self, model: str, step: int, phase: GradPhase, path: str) -> int:
        return self.next_of(self.calls_of(model, step), (phase, path))

    def next_of(self, calls: StepCalls, key: tuple[GradPhase, str]) -> int:
        with self.lock:
            calls[key] = number = calls.get(key, -1) + 1
        return number

    def recomputed_call(self, model: str, step: int, path: str) -> int:
        """Call of a recomputation that autograd does not name: the last forward one not yet redone."""
        with self.lock:
            counters = self._of(model, step)
            done = counters.recomputed.get(path, 0)
            counters.recomputed[path] = done + 1
            return max(counters.calls.get(("fwd", path), -1) - done, 0)

    def body(
        self, *, model: str, step: int, phase: GradPhase, path: str, call: int, records_ops: bool
    ) -> Frame:
        """The frame of code that runs in no open call: backward ops of a call, ops outside all calls."""
        key = (phase, path, call)
        bodies = self._of(model, step).bodies
        frame = bodies.get(key)
        if frame is None:
            frame = Frame(
                model=model,
                path=path,
                call=call,
                phase=phase,
                step=step,
                module=None,
                parent=None,
                records_ops=records_ops,
                records_module=False,
            )
            frame = bodies.setdefault(key, frame)
        return frame

    def forget(self, model: str, step: int) -> None:
        """Drops the counters of an old step, so that a long run does not grow."""
        self._steps.pop((model, step), None)


class _StepCounters:
    """What is counted within one step of one model."""

    __slots__ = ("bodies", "calls", "recomputed")

    def __init__(self) -> None:
        self.calls: StepCalls = {}
        self.bodies: dict[tuple[GradPhase, str, int | None], Frame] = {}
        self.recomputed: dict[str, int] = {}


def mark_sequence(state: ThreadState, owner: Frame | None) -> None:
    """Says that autograd nodes made from now on in this thread belong to `owner`."""
    nr = _sequence_nr()
    if state.marks and state.marks[-1] == nr:
        state.owners[-1] = owner  # nothing was made in between
        return
    state.marks.append(nr)
    state.owners.append(owner)


def forget_marks(state: ThreadState, model: str, step: int) -> None:
    """Drops the oldest marks of this thread, those of calls before `step` of `model`."""
    kept = (i for i, o in enumerate(state.owners) if o is not None and (o.model != model or o.step >= step))
    at = next(kept, len(state.owners))
    del state.marks[:at], state.owners[:at]


def owner_of_node(state: ThreadState, node: Any) -> Frame | None:
    """The forward call that made an autograd node, None for gradient accumulation and strangers."""
    nr = node._sequence_nr()
    if nr >= _NO_SEQUENCE_NR or not state.marks:
        return None
    at = bisect_right(state.marks, nr) - 1
    return state.owners[at] if at >= 0 else None


def in_checkpoint_recompute() -> bool:
    """Whether the Python stack holds a recomputation by torch.utils.checkpoint.

    Asked only for ops that run during backward with grad mode on, which is what a recomputation looks
    like from below; with `create_graph=True` plain backward ops look alike.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


__all__ = [
    "STEPS_KEPT",
    "Counters",
    "Frame",
    "ModuleTable",
    "StepCalls",
    "ThreadState",
    "forget_marks",
    "in_checkpoint_recompute",
    "mark_sequence",
    "owner_of_node",
    "resolve_path",
    "walk_modules",
]
