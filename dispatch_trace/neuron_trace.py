"""Captures through a tracing compiler (`torch_neuronx.trace`, `torch.jit.trace`, `torch.export`).

Such a compiler runs the Python code once, and what it makes of it has no hooks: captures have to be outputs.
`TracedCapture` wraps a model so that it returns `(out, *captures)`; its `layout` says which output is what,
and can be kept beside the compiled artefact, because another process may load that.

Guarantees: the list of names is made before tracing and fixed from then on; what a program did not produce
is said to be missing and has no tensor, never NaN or zeros in its place; inside the traced code there is
only `clone().detach()` and an append to a list (NEURON.md, rules 3 and 6). Works with any tracer, needs no
Neuron package, and stands beside the recorder, on top of `capture/`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dispatch_trace.capture.frames import Frame, walk_modules
from dispatch_trace.capture.inline import ACTIVE
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.errors import CaptureError, ConfigError
from dispatch_trace.nested import flatten, flatten_arguments
from dispatch_trace.neuron import lane
from dispatch_trace.patterns import select_modules
from dispatch_trace.registry import TensorRegistry


@dataclass(frozen=True, slots=True)
class TracedValue:
    """One tensor that a traced model hands out.

    Attributes:
      module: path of the module that returned it.
      call: which of the module's calls, from 0.
      slot: which tensor of what it returned: `out`, `out[1]`, `out.key`.
      opened: how many calls of the layout had returned when this one was entered: those after it ran inside.
      valid: the traced program produces it; where not, no output stands for it.
    """

    module: str
    call: int
    slot: str
    opened: int = 0
    valid: bool = True

    @property
    def name(self) -> str:
        """`layers.0`, `layers.0@1` for its second call, `layers.0[1]` for its second output."""
        call = f"@{self.call}" if self.call else ""
        return f"{self.module}{call}{self.slot.removeprefix('out')}"


@dataclass(frozen=True, slots=True)
class CaptureLayout:
    """Which output of a traced model is what. Plain data: `to_dict` and `from_dict` keep it in JSON.

    Attributes:
      values: in the order of the captures; those that are not valid have no capture.
    """

    values: tuple[TracedValue, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, of values that are not produced too."""
        return tuple(value.name for value in self.values)

    @property
    def valid(self) -> tuple[bool, ...]:
        """For each name, whether there is a value."""
        return tuple(value.valid for value in self.values)

    def unpack(self, outputs: Sequence[Any]) -> tuple[Any, dict[str, torch.Tensor]]:
        """Takes apart what the traced model returned.

        Args:
          outputs: `(out, *captures)`.
        Returns: `out`, and the captures by name, in order; names without a value are not in it.
        Raises:
          CaptureError: the number of captures is not that of the layout.
        """
        out, captures = outputs[0], list(outputs[1:])
        present = [value.name for value in self.values if value.valid]
        if len(captures) != len(present):
            raise CaptureError(
                f"the traced model returned {len(captures)} captures, its layout has {len(present)}: the "
                "layout belongs to another artefact, or the compiler dropped outputs. Keep "
                "layout.to_dict() beside the artefact that was traced with it."
            )
        return out, dict(zip(present, captures, strict=True))

    def register(self, outputs: Sequence[Any], registry: TensorRegistry) -> Any:
        """Hands the captures to a registry, one entry a module call. Returns `out`."""
        out, captures = self.unpack(outputs)
        for call in self._calls(captures):
            single = list(call.leaves) == ["out"]
            registry.register_module_tensor(call.module, call.leaves["out"] if single else call.leaves)
        return out

    def record(self, outputs: Sequence[Any], args: tuple[Any, ...] = (), **kwargs: Any) -> Any:
        """Makes one step of what a traced model returned, in every recording in progress.

        The recording must have been given the model that was traced, with `level="module"`: its own
        calls are not seen, because the artefact's Python code is gone.

        Args:
          outputs: `(out, *captures)`.
          args, kwargs: what the artefact was called with, for the input slots of the root.
        Returns: `out`.
        Raises:
          CaptureError: nothing is recording, or as `unpack`.
        """
        out, captures = self.unpack(outputs)
        if not ACTIVE:
            raise CaptureError(
                "layout.record(...) outside every recording. Call it inside `with dt.record(path, model, "
                "level='module'):`, or take layout.unpack(...)."
            )
        calls = self._calls(captures)
        for tracer in list(ACTIVE):
            try:
                _put_step(tracer, calls, out, args, kwargs)
            except Exception as error:
                tracer.fault(error)
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"values": [[v.module, v.call, v.slot, v.opened, v.valid] for v in self.values]}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> CaptureLayout:
        """Raises ConfigError where `stored` is not what `to_dict` gave."""
        try:
            rows = [(str(m), int(c), str(s), int(o), bool(v)) for m, c, s, o, v in stored["values"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no capture layout ({error!r}); pass what to_dict() gave.") from None
        return cls(tuple(TracedValue(*row) for row in rows))

    def _calls(self, captures: Mapping[str, torch.Tensor]) -> list[_Call]:
        """The module calls that have values, in the order in which they returned."""
        calls: dict[tuple[str, int], _Call] = {}
        for value in self.values:
            if value.valid:
                call = calls.setdefault((value.module, value.call), _Call(value.module, value.opened, {}))
                call.leaves[value.slot] = captures[value.name]
        return list(calls.values())


class _Call(NamedTuple):
    """One module call of a run: path, calls that had returned when it was entered, slot -> value."""

    module: str
    opened: int
    leaves: dict[str, torch.Tensor]


class TracedCapture(torch.nn.Module):
    """A model that also returns what its modules returned: `(out, *captures)`.

        wrapper = TracedCapture(model, r"layers\\.\\d+", example_inputs=(x,))
        traced = torch_neuronx.trace(wrapper, (x,))
        out, captures = wrapper.layout.unpack(traced(x))

    Making one runs the model once, without gradients, to see which of the modules return what; its buffers
    and the random state are put back.

    Args:
      model: the model; its modules carry hooks until `remove()`.
      select: one pattern or several over module paths (full-match, `layers.0-3` expands).
      example_inputs: positional arguments that the model will be traced with.
      names: the layout of an earlier trace of the same model, such as another bucket: its names and their
        order stay, and those that this one does not produce are not valid.

    Attributes:
      layout: the names, their order and which of them have a value.

    Raises:
      NoMatchError, PatternError: a pattern matches nothing or is none.
      CaptureError: no module that was selected returned a tensor, or one returned what `names` lacks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        select: str | Iterable[str],
        *,
        example_inputs: tuple[Any, ...],
        names: CaptureLayout | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._sink = _Sink()
        paths = {path: module for path, module, compiled in walk_modules(model) if not compiled and path}
        self._selected = select_modules(select, list(paths))
        self._handles = [handle for path in self._selected for handle in self._sink.watch(path, paths[path])]
        self.layout = self._dry_run(example_inputs, names)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """`(out, *captures)`, each capture in its place of the layout.

        Raises:
          CaptureError: the modules did not return what the layout says.
        """
        self._sink.clear()
        out = self.model(*args, **kwargs)
        found = {value.name: tensor for value, tensor in self._sink.values}
        expected = [value.name for value in self.layout.values if value.valid]
        self._sink.clear()
        if found.keys() != set(expected):
            missing = [name for name in expected if name not in found]
            added = [name for name in found if name not in set(expected)]
            raise CaptureError(
                f"the traced model captured {len(found)} values where its layout has {len(expected)} "
                f"(missing {missing[:3]}, new {added[:3]}): it took another way than with example_inputs. "
                "Make a TracedCapture for each bucket."
            )
        return (out, *(found[name] for name in expected))

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _dry_run(self, inputs: tuple[Any, ...], names: CaptureLayout | None) -> CaptureLayout:
        try:
            with _unchanged(self.model), torch.no_grad():
                self.model(*copy.deepcopy(inputs))
            found = [value for value, _ in self._sink.values]
            if not found:
                raise CaptureError(
                    f"none of the {len(self._selected)} selected modules returned a tensor "
                    f"({', '.join(self._selected[:3])}): nothing would be captured. Select modules that the "
                    "model calls with these example_inputs."
                )
            return _layout(found, self._selected, names)
        except BaseException:
            self.remove()
            raise
        finally:
            self._sink.clear()


class _Sink:
    """Collects what the hooks see. No module: a tracer must not take its list for a part of the model."""

    def __init__(self) -> None:
        self.values: list[tuple[TracedValue, torch.Tensor]] = []
        self._calls: dict[str, int] = {}
        self._open: list[int] = []
        self._num_returned = 0

    def clear(self) -> None:
        self.values.clear()
        self._calls.clear()
        self._open.clear()
        self._num_returned = 0

    def watch(self, path: str, module: torch.nn.Module) -> list[Any]:
        """Puts hooks on a module. Returns their handles."""

        def enter(module: torch.nn.Module, args: Any) -> None:
            self._open.append(self._num_returned)

        def leave(module: torch.nn.Module, args: Any, out: Any) -> None:
            opened = self._open.pop()
            call = self._calls[path] = self._calls.get(path, -1) + 1
            before = len(self.values)
            for slot, leaf in flatten(out, "out"):
                if isinstance(leaf, torch.Tensor):
                    self.values.append((TracedValue(path, call, slot, opened), leaf.clone().detach()))
            self._num_returned += len(self.values) > before

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _layout(found: list[TracedValue], selected: Sequence[str], names: CaptureLayout | None) -> CaptureLayout:
    if names is None:
        silent = [path for path in selected if path not in {value.module for value in found}]
        return CaptureLayout((*found, *(TracedValue(path, 0, "out", valid=False) for path in silent)))
    opened = {value.name: value.opened for value in found}
    strangers = sorted(opened.keys() - set(names.names))
    if strangers:
        raise CaptureError(
            f"names= lacks {strangers[:3]}, which the model returned with these example_inputs. The names "
            "are fixed by the first layout: make it with inputs that reach every module."
        )
    if [v.name for v in found] != [name for name in names.names if name in opened]:
        raise CaptureError(
            "with these example_inputs the modules return in another order than in names=; "
            "trace this program with a layout of its own."
        )
    return CaptureLayout(
        tuple(replace(v, opened=opened.get(v.name, 0), valid=v.name in opened) for v in names.values)
    )


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Puts the model's buffers and the random state back."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers:
                        buffer.copy_(buffers[name])


def _put_step(
    tracer: Tracer, calls: Sequence[_Call], out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """The records of one run: each module call in order, then the root."""
    model = next(iter(tracer.table.roots), "")
    step = tracer.step_of_root_call(model)
    tracer.num_calls += 1
    if not tracer.wants_step(step):
        return
    if step == 0:
        tracer.writer.amend_header({"lane": lane(importing=False) or "traced", "compile_backend": "traced"})
    with tracer.own_ops(tracer.state):
        tracer.record_parameters(tracer.state, model, step)
        before: list[int] = []  # for each call, the number that the next record would have had
        first = tracer.upcoming_seq
        for call in calls:
            before.append(tracer.upcoming_seq)
            number = tracer.counters.next_call(model, step, "fwd", call.module)
            frame = Frame(model, call.module, number, "fwd", step, None, None, False, True)
            frame.opened = before[call.opened]
            _put_module(tracer, frame, [], list(call.leaves.items()))
        number = tracer.counters.next_call(model, step, "fwd", "")
        root = Frame(model, "", number, "fwd", step, None, None, False, True)
        root.opened = first
        _put_module(tracer, root, flatten_arguments(args, kwargs), flatten(out, "out"))


def _put_module(
    tracer: Tracer, frame: Frame, inputs: list[tuple[str, Any]], outputs: list[tuple[str, Any]]
) -> None:
    if not tracer.options.wants_module(frame.path):
        return
    tracer.set_save(tracer.options.save_of(frame.path))
    slots = [slot for name, value in inputs for slot in tracer.value_slots(name, value, "in")]
    slots += [slot for name, value in outputs for slot in tracer.value_slots(name, value, "out")]
    tracer.put_module(frame, slots)


__all__ = ["CaptureLayout", "TracedCapture", "TracedValue"]
