"""Compiled regions within a recording: watched, entered, left, and their captures made into records.

Guarantees: the records of a region have the keys that eager capture gives the same modules, and come before
the record of the region itself, in the order in which the modules returned; what a region should have
captured and did not is a fault that is reported, never silence; the program's random state and its own
buffers are as they were after the check of the outputs. Leaves to `compiled` how values get out of a graph.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from dispatch_trace import neuron
from dispatch_trace.capture.captures import CaptureRecords
from dispatch_trace.capture.compiled import Region, compile_context, num_graphs
from dispatch_trace.capture.frames import Frame, ThreadState
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.errors import CaptureError, HookAfterCompileError
from dispatch_trace.nested import flatten


def find_regions(roots: Iterable[torch.nn.Module]) -> list[Region]:
    """The compiled regions below some root models; one inside another belongs to the outer one."""
    found: list[Region] = []
    stack = list(roots)
    seen: set[int] = set()
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if compile_context(module) is not None:
            found.append(Region(module))
        else:
            stack += module.children()
    return found


def check_fresh(regions: Iterable[Region]) -> None:
    """Says so where a region has been compiled before: hooks that come later see nothing.

    Raises:
      HookAfterCompileError: it has.
    """
    for region in regions:
        if region.has_compiled:
            name = type(region.body).__name__
            raise HookAfterCompileError(
                f"{name} (backend {region.backend!r}) has been compiled and run already; hooks that come now "
                "would not be in its code. Enter the recording before the first call, or pass "
                "recompile=True: it is then compiled once more for the recording, and its own code is kept."
            )


@dataclass(slots=True)
class _Call:
    """A call of a region in progress.

    Attributes:
      plain: what the region returned without capture; None where that was not asked, or could not be.
      kernels: kernels generated before the plain run, and before the captured one.
    """

    region: Region
    frame: Frame
    plain: list[tuple[str, Any]] | None = None
    kernels: tuple[int, int] = (0, 0)


@dataclass(slots=True, eq=False)
class Regions:
    """The compiled regions of one recording.

    Attributes:
      recompile: compile again what has been compiled before.
      check_outputs: run each region once more without hooks, and compare what it returns.
    """

    tracer: Tracer
    recompile: bool = False
    check_outputs: bool = True
    _regions: dict[int, Region] = field(default_factory=dict)
    _checked: set[int] = field(default_factory=set)
    _observed: dict[str, Any] = field(default_factory=dict)

    def watch(self, regions: Iterable[Region]) -> None:
        """Hooks the modules of these regions whose returns are wanted."""
        tracer = self.tracer
        for region in regions:
            modules = [
                m
                for m in region.body.modules()
                if m is not region.body
                and any(tracer.options.wants_module(path) for _, path in tracer.table.get(m) or ())
            ]
            self._regions[id(region.module)] = region
            region.watch(modules, inputs=tracer.options.inputs)

    def add_late(self, module: torch.nn.Module) -> None:
        """A region that was compiled during the run: its border is recorded, its modules get no hooks.

        Hooks need a compilation of their own, and the program may go on with what it has compiled before
        (by another wrapper around the same module, say).
        """
        self._regions[id(module)] = Region(module)

    def release(self) -> None:
        for region in self._regions.values():
            region.release()
        self._regions.clear()

    def __contains__(self, module: torch.nn.Module) -> bool:
        return id(module) in self._regions

    def header(self) -> dict[str, Any]:
        """What a header says of them: the backend, also by path, and on Neuron the manifest."""
        table = self.tracer.table
        backends = {
            path: region.backend
            for region in self._regions.values()
            for _, path in (table.get(region.module) or ())[:1]
        }
        backend = next(iter(backends.values()), None)
        fields: dict[str, Any] = {"compile_backend": backend, "regions": backends}
        lanes = [r.lane for r in self._regions.values() if r.lane]
        if lanes:
            fields |= {"lane": lanes[0], "neuron": neuron.manifest(compile_backend=backend)}
        return fields

    def note_of(self, module: torch.nn.Module | None) -> str:
        """What the record of a module says where its call runs compiled code; else empty."""
        region = self._regions.get(id(module))
        return f"opaque: compiled region ({region.backend})" if region is not None else ""

    def not_captured(self) -> str:
        """What to say of regions whose compiled code was not captured; empty where all is well."""
        for region in self._regions.values():
            if region.num_calls and region.modules and not region.num_captures:
                return (
                    f"{type(region.body).__name__} (backend {region.backend!r}) ran {region.num_calls} times "
                    f"as compiled code and none of its {len(region.modules)} hooks captured anything: its "
                    "code was compiled without them. Call torch._dynamo.reset() before the recording."
                )
            if region.num_eager and region.num_eager == region.num_entered:
                return (
                    f"{type(region.body).__name__} (backend {region.backend!r}) was to run compiled and ran "
                    "eagerly as a whole: a fallback, or a stance of torch.compiler. What was recorded is "
                    "kept; compiled code did not compute it."
                )
        return ""

    def never_ran(self) -> list[str]:
        """Paths of modules that were asked for by name and whose hooks never fired in regions that ran."""
        if self.tracer.options.selector is None:
            return []
        table = self.tracer.table
        return [
            path
            for region in self._regions.values()
            if region.num_captures
            for number, module in enumerate(region.modules)
            if number not in region.seen
            for _, path in (table.get(module) or ())[:1]
        ]

    # -- one call ------------------------------------------------------------------------------------

    def enter(
        self, state: ThreadState, frame: Frame, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Before compiled code runs: what it does is seen by its hooks only."""
        region = self._regions[id(module)]
        frame.records_ops = False
        call = _Call(region, frame)
        state.region = call
        if region.lane and region.tracked is None:
            region.tracked = neuron.op_tracking()
            region.graphs_before = num_graphs()
        watched = bool(region.modules) or region.tapped
        if self.check_outputs and watched and not region.lane and id(region) not in self._checked:
            self._checked.add(id(region))
            before = num_kernels()
            call.plain = self._run_plain(state, region, args, kwargs)
            call.kernels = before, num_kernels()
        region.enter()

    def leave(self, state: ThreadState, frame: Frame, out: Any, *, raised: bool) -> None:
        """After it: makes records of what was captured."""
        call: _Call = state.region
        if call is None or call.frame is not frame:
            return
        state.region = None
        region, tracer = call.region, self.tracer
        entries = region.leave()
        if not tracer.wants_step(frame.step):
            return
        try:
            with tracer.own_ops(state):
                self._records(region).put(frame, entries)
            if raised:
                return
            if region.modules and not any(kind == "module" for kind, _, _ in entries):
                raise CaptureError(self.not_captured() or "a compiled call captured nothing")
            if region.tracked is not None:
                neuron.check_compiled(
                    region.tracked,
                    num_graphs=num_graphs() - region.graphs_before,
                    where=type(region.body).__name__,
                )
            if region.hooks is not None and region.hooks.num_eager:
                self._warn_of_eager(region)
            if call.plain is not None:
                self._compare(call, call.plain, out)
        except Exception as error:
            tracer.fault(error)

    def _records(self, region: Region) -> CaptureRecords:
        table = self.tracer.table
        return CaptureRecords(
            self.tracer,
            lambda name: table.get(region.modules[int(name)]) or [],
            note=f"compiled: {region.backend}",
        )

    def _warn_of_eager(self, region: Region) -> None:
        assert region.hooks is not None
        num, region.hooks.num_eager = region.hooks.num_eager, 0
        region.num_eager += num
        self.tracer.writer.amend_header({"ran_eagerly": True})
        warnings.warn(
            f"dispatch_trace: {num} modules of the compiled {type(region.body).__name__} ran eagerly (graph "
            "breaks, or a fallback to eager): what the trace holds of them is not compiled code's.",
            RuntimeWarning,
            stacklevel=6,
        )

    # -- does watching change what is watched? -------------------------------------------------------

    def _run_plain(
        self, state: ThreadState, region: Region, args: tuple[Any, ...], kwargs: Any
    ) -> list[tuple[str, Any]] | None:
        """What a copy of the region without hooks returns, or None where no copy can be made."""
        tracer = self.tracer
        grad = torch.is_grad_enabled()
        try:
            with tracer.own_ops(state), torch.random.fork_rng(devices=_devices()):
                plain = region.plain_copy()
                copied_args, copied_kwargs = copy_values(args), copy_values(kwargs)
                with torch.set_grad_enabled(grad):
                    out = plain(*copied_args, **copied_kwargs)
                return [
                    (name, leaf.detach())
                    for name, leaf in flatten(out, "out")
                    if isinstance(leaf, torch.Tensor)
                ]
        except Exception as error:
            reason = str(error).partition("\n")[0]
            self._note(region, f"not compared: {type(error).__name__}: {reason}")
            return None

    def _compare(self, call: _Call, plain: list[tuple[str, Any]], out: Any) -> None:
        tracer, region = self.tracer, call.region
        with tracer.own_ops(tracer.state):
            watched = {n: v.detach() for n, v in flatten(out, "out") if isinstance(v, torch.Tensor)}
            differing = [n for n, v in plain if n not in watched or not same_bits(v, watched[n])]
        first, second = call.kernels
        kernels = {"without": second - first, "with": num_kernels() - second}
        self._note(region, f"differ: {', '.join(differing)}" if differing else "equal bit for bit", kernels)
        if differing:
            tracer.writer.mark_perturbed(
                f"capture changed what the compiled {type(region.body).__name__} returns "
                f"({', '.join(differing[:4])}): with it the compiler fuses otherwise. Select fewer modules, "
                "or judge the outputs without it."
            )

    def _note(self, region: Region, outputs: str, kernels: dict[str, int] | None = None) -> None:
        """Keeps in the header what came of the comparison."""
        paths = self.tracer.table.get(region.module) or [("", "")]
        self._observed[paths[0][1]] = {"outputs": outputs, "kernels": kernels}
        self.tracer.writer.amend_header({"observer": dict(self._observed)})


def num_kernels() -> int:
    """Kernels that inductor has generated in this process; 0 where it was never used."""
    metrics = sys.modules.get("torch._inductor.metrics")
    return int(getattr(metrics, "generated_kernel_count", 0))


def _devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def copy_values(value: Any) -> Any:
    """A deep copy of arguments in which tensors that need gradients are cut off from their graph."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(copy_values(item) for item in value)
    if type(value) is dict:
        return {key: copy_values(item) for key, item in value.items()}
    return copy.deepcopy(value)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if a.numel() == 0:
        return True
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
