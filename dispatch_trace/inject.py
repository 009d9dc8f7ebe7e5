"""Teacher forcing: the reference's tensor in place of what the model computes at a site, to see what heals.

If everything behind the site is right afterwards, what was wrong lies before it or at it; if not, there is
another fault behind. A site is a module's return, or the result of one op of a module's body:

    layers.3.mlp            what layers.3.mlp returns, in every call
    layers.3.mlp#1          in its second call of a step only
    layers.3.mlp:aten.mm:2  the result of the third aten.mm in its own body
    layers.3.mlp/out[1]     one slot of several

Guarantees: outside the sites the model computes what it would; hooks and mode are gone after the block,
whatever the program raises. A recording that runs at the same time, around the block or within it, sees the
tensor that was put in place. Leaves to `align` what became of it.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from dispatch_trace import execute
from dispatch_trace.capture.frames import walk_modules
from dispatch_trace.capture.ops import base_name
from dispatch_trace.capture.regions import find_regions
from dispatch_trace.compat import open_ranks
from dispatch_trace.errors import (
    CaptureError,
    ConfigError,
    NoMatchError,
    NotExecutableError,
    ShapeMismatchError,
)
from dispatch_trace.metrics import relative_l2
from dispatch_trace.nested import flatten
from dispatch_trace.patterns import closest_paths
from dispatch_trace.schema import StoredRecord
from dispatch_trace.store.reader import RankReader

_SITE = re.compile(
    r"(?P<module>[^#:/]*)(?:#(?P<call>\d+))?(?::(?P<op>[\w.]+)(?::(?P<n>\d+))?)?(?:/(?P<slot>out.*))?"
)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a tensor is put in place; `call` None stands for every call, `slot` "" for every output."""

    module: str
    call: int | None
    op: str
    n: int
    slot: str

    @classmethod
    def of(cls, text: str) -> Site:
        """Reads `MODULE[#CALL][:OP[:N]][/SLOT]`.

        Raises:
          ConfigError: it is not of this form.
        """
        found = _SITE.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ConfigError(
                f"at={text!r} is no site. Write MODULE[#CALL][:OP[:N]][/SLOT], as layers.3:aten.mm:0."
            )
        call = found["call"]
        return cls(
            found["module"],
            None if call is None else int(call),
            found["op"] or "",
            int(found["n"] or 0),
            found["slot"] or "",
        )

    def __str__(self) -> str:
        call = "" if self.call is None else f"#{self.call}"
        op = f":{self.op}:{self.n}" if self.op else ""
        return f"{self.module or '(root)'}{call}{op}{f'/{self.slot}' if self.slot else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """One tensor that was put in place.

    Attributes:
      site: as it was asked for; step, call, slot: where exactly.
      change: relative L2 distance of what the model had computed from it.
    """

    site: str
    step: int
    call: int
    slot: str
    change: float


class inject:
    """Puts tensors of a trace in place of what a model computes while the block runs.

        with dt.inject(target, "ref.trace", at="layers.3.mlp"), dt.record("forced.trace", target):
            target(x)
        dt.align("ref.trace", "forced.trace")    # is the rest right now?

    The n-th call of the model inside the block takes the values of step n of the trace. Values are cast to
    the dtype that the model computes in, and gradients pass as if they had been computed.

    Args:
      model: the model that runs; eager, or compiled as a whole below the sites.
      trace: path of the reference's trace, or a trace that is open. Its data must be there, or executable.
      at: one site or several (see the module's text), or {site of the model: site of the trace} where
        names differ.
      step: only this step of the trace (and call of the model); None: each.

    Attributes:
      injected: what was put in place, in order.

    Raises:
      ConfigError: a site is no site, is inside compiled code, holds a view, or its module has two names.
      NoMatchError: the model has no such module, or the trace no such record.
      NotExecutableError: the trace holds no data for it.
      ShapeMismatchError: while the model runs: the shapes differ.
      CaptureError: at the end: a site was never reached. Not where the block raised itself.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trace: Any,
        *,
        at: str | Iterable[str] | Mapping[str, str],
        step: int | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
        pairs = (
            at.items() if isinstance(at, Mapping) else ((s, s) for s in ([at] if isinstance(at, str) else at))
        )
        self._sites = [(Site.of(here), Site.of(there)) for here, there in pairs]
        if not self._sites:
            raise ConfigError("at: expected one site or several, got none.")
        self._model = model
        self._trace = trace
        self._step = step
        self.injected: list[Injected] = []
        self._values: list[dict[tuple[int, int], dict[str, torch.Tensor]]] = []
        self._handles: list[Any] = []
        self._mode: _OpSites | None = None
        self._depth = 0
        self._now = -1
        self._calls: dict[str, int] = {}
        self._missed: set[int] = set()
        self.stack: list[tuple[str, int, dict[str, int]]] = []  # open calls: path, number, ops counted

    # Setting up -------------------------------------------------------------------------------------

    def __enter__(self) -> inject:
        if self._handles:
            raise ConfigError("this injection was entered before; make a new dt.inject(...) for each block.")
        modules = self._modules()
        ranks = getattr(self._trace, "ranks", None) or open_ranks(os.fspath(self._trace))
        rank = int(os.environ.get("RANK", "0") or 0)
        reader = next((r for r in ranks if r.rank == rank), ranks[0])
        self._values = [_values_of(reader, here, there, self._step) for here, there in self._sites]
        self.injected = []
        self._now, self._calls, self._missed = -1, {}, set()
        try:
            self._install(modules)
        except BaseException:
            self._remove()
            raise
        return self

    def _modules(self) -> dict[str, torch.nn.Module]:
        """The module to watch at each path; checks that the sites can be seen."""
        modules: dict[str, torch.nn.Module] = {}
        names: dict[int, list[str]] = {}
        for path, module, _ in walk_modules(self._model):
            modules.setdefault(path, module)  # a wrapper around compiled code comes first: it runs eagerly
            names.setdefault(id(module), []).append(path)
        regions = {id(m) for region in find_regions([self._model]) for m in (region.module, region.body)}
        compiled = [path for path, module in modules.items() if id(module) in regions]
        for here, _ in self._sites:
            watched = modules.get(here.module)
            if watched is None:
                close = ", ".join(map(repr, closest_paths(here.module, modules)))
                raise NoMatchError(
                    f"at={str(here)!r}: the model has no module {here.module!r}. Closest: {close}."
                )
            if len(set(names[id(watched)])) > 1:
                raise ConfigError(
                    f"at={str(here)!r}: this module has {len(names[id(watched)])} names "
                    f"({', '.join(names[id(watched)][:3])}); calls of it cannot be told apart by one of them."
                )
            for path in compiled:
                inside = here.module != path and (not path or here.module.startswith(f"{path}."))
                at_region = here.module == path and (here.op or not hasattr(modules[path], "_orig_mod"))
                if inside or at_region:
                    raise ConfigError(
                        f"at={str(here)!r} lies in compiled code ({path or '(root)'}), where nothing can be "
                        "put in place. Inject into the eager model, or where the compiled code returns."
                    )
        return modules

    def _install(self, modules: dict[str, torch.nn.Module]) -> None:
        root = modules[""]
        with_ops = any(here.op for here, _ in self._sites)
        watched = modules if with_ops else {here.module: modules[here.module] for here, _ in self._sites}
        self._handles.append(root.register_forward_pre_hook(self._root_enters, prepend=True))
        compiled = {id(m) for region in find_regions([self._model]) for m in region.body.modules()}
        for path, module in watched.items():
            if id(module) not in compiled or hasattr(module, "_orig_mod"):
                self._handles.append(module.register_forward_pre_hook(self._enterer(path)))
                self._handles.append(module.register_forward_hook(self._leaver(path), always_call=True))
        self._handles.append(root.register_forward_hook(self._root_leaves, always_call=True))
        if with_ops:
            self._mode = _OpSites(self)
            self._mode.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
        if error is not None:
            return
        reached = {done.site for done in self.injected}
        missing = [str(here) for here, _ in self._sites if str(here) not in reached]
        if missing:
            ran = (
                f"the model was called {self._now + 1} times"
                if self._now >= 0
                else "the model was never called"
            )
            raise CaptureError(
                f"inject: {', '.join(missing)} was never reached ({ran}); nothing was put in place."
            )
        if self._missed:
            steps = ", ".join(map(str, sorted(self._missed)[:5]))
            warnings.warn(
                f"dispatch_trace: the trace has no value for steps {steps} of the model: nothing was put in "
                "place in them",
                RuntimeWarning,
                stacklevel=2,
            )

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._mode is not None:
            self._mode.stop()
            self._mode = None
        self.stack = []
        self._depth = 0

    # While the model runs ---------------------------------------------------------------------------

    def _root_enters(self, module: torch.nn.Module, args: Any) -> None:
        if not _in_backward():
            self._depth += 1
            if self._depth == 1:
                self._now += 1
                self._calls = {}
                self.stack = []

    def _root_leaves(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        if not _in_backward():
            self._depth -= 1

    def _enterer(self, path: str) -> Callable[[Any, Any], None]:
        def entered(module: torch.nn.Module, args: Any) -> None:
            if self._depth and not _in_backward():
                self._calls[path] = call = self._calls.get(path, -1) + 1
                self.stack.append((path, call, {}))

        return entered

    def _leaver(self, path: str) -> Callable[[Any, Any, Any], Any]:
        def left(module: torch.nn.Module, args: Any, out: Any) -> Any:
            if not self._depth or _in_backward() or not self.stack:
                return None
            while self.stack and self.stack[-1][0] != path:
                self.stack.pop()  # a call that raised, and whose error was caught
            if not self.stack:
                return None
            _, call, _ = self.stack.pop()
            changed = None
            for place, (here, _) in enumerate(self._sites):
                if here.module == path and not here.op and out is not None:
                    values = self._wanted(place, call)
                    if values:
                        out = changed = _replaced(
                            out, values, lambda *a, p=place, c=call: self._put(p, c, *a)
                        )
            return changed

        return left

    def _wanted(self, place: int, call: int) -> dict[str, torch.Tensor] | None:
        here = self._sites[place][0]
        if (self._step is not None and self._now != self._step) or here.call not in (None, call):
            return None
        found = self._values[place].get((self._now, call))
        if found is None:
            self._missed.add(self._now)
        return found

    def _put(
        self, place: int, call: int, slot: str, computed: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Notes that `value` stands for `computed` from here on; the value in the dtype of the model."""
        here = self._sites[place][0]
        if computed.shape != value.shape:
            raise ShapeMismatchError(
                f"inject at {here}, {slot}: the model computes {list(computed.shape)}, the trace holds "
                f"{list(value.shape)} (step {self._now}, call {call})."
            )
        cast = value.to(dtype=computed.dtype, device=computed.device)
        change = relative_l2(computed.detach(), cast)
        self.injected.append(Injected(site=str(here), step=self._now, call=call, slot=slot, change=change))
        return cast

    def op_results(self, base: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Overwrites what an op has just returned or written, where it is one of the sites."""
        if not self.stack:
            return
        path, call, counts = self.stack[-1]
        n = counts[base] = counts.get(base, -1) + 1
        for place, (here, _) in enumerate(self._sites):
            if (here.module, here.op, here.n) != (path, base, n):
                continue
            values = self._wanted(place, call)
            if not values:
                continue
            results = dict(flatten(out, "out"))
            names = [a.name for a in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            for name, value in values.items():
                computed = results.get(name)
                if computed is None:
                    computed = given.get(name.removeprefix("out."))
                if not isinstance(computed, torch.Tensor):
                    raise ConfigError(f"inject at {here}: {func} returns no {name}.")
                computed.copy_(self._put(place, call, name, computed, value))


class _OpSites(TorchDispatchMode):
    """Counts the ops of every open call, and overwrites results at the sites.

    It lies below all other modes, so that a recorder above sees what it leaves.
    """

    def __init__(self, owner: inject) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def start(self) -> None:
        above = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
        self.__enter__()  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            _push_mode(mode)

    def stop(self) -> None:
        above = []
        while self in _get_current_dispatch_mode_stack():
            mode = _get_current_dispatch_mode_stack()[-1]
            if mode is self:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                break
            above.append(_pop_mode())
        for mode in reversed(above):
            _push_mode(mode)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and not _in_backward():
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                self._owner.op_results(base_name(func), func, args, kwargs, out)
        return out


class _Put(torch.autograd.Function):
    """A value in place of another; the gradient passes to what was computed."""

    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone(memory_format=torch.preserve_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _replaced(
    out: Any, values: dict[str, torch.Tensor], put: Callable[..., torch.Tensor], name: str = "out"
) -> Any:
    """The same structure, with values in place of the leaves that have one."""
    if isinstance(out, torch.Tensor):
        value = values.get(name)
        if value is None:
            return out
        # Hidden from recorders: to them the tensor is a value from outside.
        with torch._C._DisableTorchDispatch():
            cast = put(name, out, value)
            return _Put.apply(out, cast) if out.requires_grad else cast.clone()  # type: ignore[no-untyped-call]
    leaves = flatten(out, name)
    if not any(leaf in values for leaf, _ in leaves):
        return out
    if isinstance(out, Mapping):
        changed = {k: _replaced(v, values, put, flatten({k: 0}, name)[0][0]) for k, v in out.items()}
        if isinstance(out, dict) and type(out) is dict:
            return changed
        for key, value in changed.items():  # ordered dicts that are classes of their own (`ModelOutput`)
            out[key] = value  # type: ignore[index]
        return out
    if isinstance(out, (list, tuple)):
        fields = getattr(out, "_fields", None)
        items = [
            _replaced(v, values, put, f"{name}.{fields[i]}" if fields else f"{name}[{i}]")
            for i, v in enumerate(out)
        ]
        return type(out)(*items) if fields else type(out)(items)
    for leaf, value in leaves:
        attribute = leaf.removeprefix(f"{name}.")
        if leaf in values and attribute.isidentifier() and getattr(out, attribute, None) is value:
            setattr(out, attribute, _replaced(value, values, put, leaf))
    return out


def _values_of(
    reader: RankReader, here: Site, there: Site, step: int | None
) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """The tensors of a site of the trace, by (step, call) and slot."""
    where: dict[str, Any] = {
        "module": there.module,
        "grad_phase": "fwd",
        "kind": "op" if there.op else "module",
    }
    records: list[StoredRecord] = [
        r
        for r in reader.records(**where)
        if (step is None or r.step == step)
        and there.call in (None, r.call)
        and (not there.op or (r.op == there.op and r.n == there.n))
    ]
    if not records:
        raise NoMatchError(
            f"at={str(here)!r}: {reader.path} has no record of {there}"
            f"{'' if step is None else f' in step {step}'}. dispatch-trace show lists what it has."
        )
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for record in records:
        if record.light:
            raise ConfigError(
                f"at={str(here)!r}: {record.op} only looks at memory that another op wrote, or allocates. "
                "Inject at the op that wrote it."
            )
        slots = [s for s in record.slots if s.role != "in" and s.is_tensor and there.slot in ("", s.name)]
        if not slots:
            names = ", ".join(s.name for s in record.slots if s.role != "in")
            raise NoMatchError(
                f"at={str(here)!r}: the record has no slot {there.slot!r}; it has {names or 'none'}."
            )
        try:
            # The model's call may be another than the trace's where both sites name one.
            call = record.call if there.call is None or here.call is None else here.call
            found[(record.step, call)] = {
                (here.slot or s.name): execute.tensor(reader, record.seq, s.name) for s in slots
            }
        except NotExecutableError as error:
            raise NotExecutableError(
                f"at={str(here)!r}: the trace holds no data to put in place: {error}"
            ) from None
    return found


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


__all__ = ["Injected", "inject"]
