"""Modules alone: each is run on the inputs that the reference recorded for it, eager or compiled by itself.

A module that is right by itself and wrong in the model was handed something wrong; one that is wrong by
itself is to blame. Compiled one by one, a compiler's bug survives that watching every value would erase.

Guarantees: the model is left as it was (buffers and other tensors it holds, plain attributes, training flags,
random state); what cannot be run is a row that says why, never an exception.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dispatch_trace import execute
from dispatch_trace.align.pairs import Pair
from dispatch_trace.capture.frames import walk_modules
from dispatch_trace.errors import ConfigError, DispatchTraceError, NotExecutableError
from dispatch_trace.execute_ops import Decoder, why_taken
from dispatch_trace.judge.estimates import roundoff
from dispatch_trace.judge.findings import Finding
from dispatch_trace.metrics import relative_l2, worst_row
from dispatch_trace.nested import flatten
from dispatch_trace.notebook import html_table
from dispatch_trace.patterns import select_modules
from dispatch_trace.report.table import columns, module_name, number
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.store.layouts import dtype_from_name, dtype_name
from dispatch_trace.store.reader import RankReader

# How much worse than the reference a module may be (BLAME.md section 2, a module body), and its worst row.
TOLERANCE = 8.0
ROW_FACTOR = 10.0
_MISSING = object()
_TOKEN = re.compile(r'\.([A-Za-z_]\w*)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]')


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedCall:
    """One call of one module, run alone.

    Attributes:
      module, call, step: of the target.
      output: the slot of the worst output.
      error: its relative L2 error: from the float64 truth of the reference's own ops, where those were
        recorded, else from the reference's output.
      ref_error: the reference's own error, from the same truth; None where there is none.
      band: error up to which it is as good as the reference.
      ok: within the band; None where it could not be told.
      note: why not, or what to know besides.
    """

    module: str
    call: int
    step: int
    output: str = ""
    error: float | None = None
    ref_error: float | None = None
    band: float | None = None
    ok: bool | None = None
    note: str = ""


class Isolation(Sequence[IsolatedCall]):
    """What became of every call, in the order in which the target made them.

    Attributes:
      backend: "" for eager, else what each module was compiled with.
    """

    def __init__(self, rows: Iterable[IsolatedCall], backend: str) -> None:
        self.rows = list(rows)
        self.backend = backend

    @property
    def ok(self) -> bool | None:
        """False where a call is wrong, else None where one could not be told, else True."""
        found = {row.ok for row in self.rows}
        return False if False in found else None if None in found or not found else True

    @property
    def wrong(self) -> list[IsolatedCall]:
        """The calls that are wrong by themselves."""
        return [row for row in self.rows if row.ok is False]

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def _cells(self) -> list[list[str]]:
        said = {True: "ok", False: "WRONG", None: "not told"}
        return [
            [
                module_name(row.module),
                f"{row.step}/{row.call}",
                said[row.ok],
                number(row.error),
                number(row.ref_error),
                number(row.band),
                row.output,
                row.note,
            ]
            for row in self.rows
        ]

    _HEADINGS = ("module", "step/call", "", "error", "ref error", "band", "output", "note")

    def __str__(self) -> str:
        how = f"compiled one by one with {self.backend}" if self.backend else "eager"
        title = f"{len(self.rows)} module calls alone, {how}: {len(self.wrong)} wrong"
        return "\n".join([title, *columns([list(self._HEADINGS), *self._cells()], indent="  ")])

    def __repr__(self) -> str:
        return f"Isolation({len(self.rows)} calls, {len(self.wrong)} wrong)"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self).splitlines()[0])}</p>" + html_table(
            list(self._HEADINGS), [list(row) for row in self._cells()]
        )


def isolate(
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    ref: RankReader,
    target: RankReader,
    pairs: Iterable[Pair],
    findings: Sequence[Finding] = (),
    *,
    modules: str | Iterable[str] | None = None,
    compile: bool | str = False,
) -> Isolation:
    """Runs modules of the target's model on the reference's recorded inputs.

    Args:
      model: that the target was recorded from, in the state of the recording; or named models.
      ref, target: the traces' readers; pairs, findings: of their alignment.
      modules: patterns over module paths of the target. None: the modules of the findings (fatal ones, if
        there are any), those around them but the root, and the innermost ones beneath them; without a
        finding all innermost ones.
      compile: compile each module by itself: True (inductor) or the name of a backend.
    Raises:
      ConfigError: the traces pair no module calls, or a model is missing.
      PatternError, NoMatchError: of `modules`.
    """
    paired: dict[tuple[int, str, str, int], tuple[StoredRecord, StoredRecord]] = {}
    for pair in pairs:
        a, b = pair.ref, pair.target
        if a is None or b is None or not a.kind == b.kind == "module":
            continue
        if b.grad_phase == "fwd" and b.rank == target.rank:
            paired.setdefault((b.step, b.model, b.module, b.call), (a, b))
    if not paired:
        raise ConfigError(
            "isolate: the alignment pairs no module calls, so there are no inputs to run one on."
        )
    known = sorted({b.module for _, b in paired.values()})
    chosen = set(
        _default(known, findings) if modules is None else select_modules(modules, known, option="modules")
    )
    backend = "inductor" if compile is True else compile or ""
    runner = _Runner(model, ref, target, backend)
    calls = sorted((b.seq, a, b) for a, b in paired.values() if b.module in chosen)
    return Isolation([runner.row(a, b) for _, a, b in calls], backend)


def _default(known: Sequence[str], findings: Sequence[Finding]) -> list[str]:
    fatal = [f for f in findings if f.fatal]
    named = {f.module for f in (fatal or findings)}
    innermost = [p for p in known if not any(_is_below(other, p) for other in known)]
    if not named:
        return innermost
    around = [p for p in known if p in named or (p and any(_is_below(n, p) for n in named))]
    return [*around, *(p for p in innermost if any(_is_below(p, n) for n in named))]


def _is_below(path: str, above: str) -> bool:
    return path != above and (not above or path.startswith(f"{above}."))


class _Runner:
    """Runs single calls; keeps one compiled module at a time."""

    def __init__(self, model: Any, ref: RankReader, target: RankReader, backend: str) -> None:
        models = dict(model) if isinstance(model, Mapping) else {"": model}
        self._modules = {
            (name, path): module
            for name, root in models.items()
            for path, module, wraps in walk_modules(root)
            if not wraps
        }
        self._single = len(models) == 1
        self._models = models
        self._ref, self._target, self._backend = ref, target, backend
        self._compiled: tuple[torch.nn.Module, Any] | None = None

    def row(self, ref: StoredRecord, target: StoredRecord) -> IsolatedCall:
        """Runs one call and compares what it returns."""
        site: dict[str, Any] = {"module": target.module, "call": target.call, "step": target.step}
        module = self._modules.get((target.model, target.module))
        if module is None and self._single:
            module = self._modules.get((next(iter(self._models)), target.module))
        if module is None:
            return IsolatedCall(**site, note="the model has no such module")
        try:
            args, kwargs = self._arguments(ref, target)
            truth, why = self._truth(ref)
            outputs = self._run(module, args, kwargs)
        except Exception as error:  # a module alone may raise anything
            text = str(error).strip().split("\n")[0]
            what = text if isinstance(error, NotExecutableError) else f"{type(error).__name__}: {text}"
            return IsolatedCall(**site, note=what[:200])
        if why == "random":
            return IsolatedCall(**site, note="it draws random numbers: another draw is another result")
        return self._compare(site, outputs, ref, target, truth, why)

    # Running ----------------------------------------------------------------------------------------

    def _run(self, module: torch.nn.Module, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        grad = bool(self._target.header.get("grad_enabled", False))
        with _restored(module), torch.set_grad_enabled(grad):
            if self._backend:
                out = self._compile(module)(*args, **kwargs)
            else:
                out = module._call_impl(*args, **kwargs)  # also where the module itself was compiled
            return {
                name: v.detach().clone() for name, v in flatten(out, "out") if isinstance(v, torch.Tensor)
            }

    def _compile(self, module: torch.nn.Module) -> Any:
        if self._compiled is None or self._compiled[0] is not module:
            # One cache serves all modules of a class and is small: what does not fit would run eagerly.
            torch._dynamo.reset()
            self._compiled = module, torch.compile(module._call_impl, backend=self._backend)
        return self._compiled[1]

    def _arguments(self, ref: StoredRecord, target: StoredRecord) -> tuple[list[Any], dict[str, Any]]:
        """The target's call, with the reference's tensors in it, in the target's dtypes."""
        mine = [s for s in target.slots if s.role == "in"]
        theirs = [s for s in ref.slots if s.role == "in" and s.is_tensor]
        if not mine:
            raise NotExecutableError("the target recorded no inputs of this call")
        decode = Decoder(dtype_from_name, {})
        tree: dict[Any, Any] = {}
        for slot in mine:
            if slot.is_tensor:
                value: Any = self._input(ref, theirs, slot)
            else:
                if isinstance(slot.value, dict) and "opaque" in slot.value:
                    what = slot.value["opaque"]
                    raise NotExecutableError(f"{slot.name} is a {what}, which a trace does not hold")
                value = decode(slot.value, ())
            _put(tree, slot.name, value)
        built = _build(tree)
        if isinstance(built, tuple):
            return list(built), {}
        places = sorted(k for k in built if isinstance(k, int))
        return [built[i] for i in places], {k: v for k, v in built.items() if isinstance(k, str)}

    def _input(self, ref: StoredRecord, theirs: list[StoredSlot], slot: StoredSlot) -> torch.Tensor:
        twin = next((s for s in theirs if s.name == slot.name and s.shape == slot.shape), None)
        if twin is None:  # ports pass the same under other names
            alike = [s for s in theirs if s.shape == slot.shape]
            if len(alike) != 1:
                raise NotExecutableError(f"the reference recorded no input in place of {slot.name}")
            twin = alike[0]
        value = execute.tensor(self._ref, ref.seq, twin.name)
        dtype = dtype_from_name(slot.dtype)
        same_kind = value.is_floating_point() and dtype.is_floating_point
        return value.to(dtype).clone() if same_kind else value.clone()

    # Truth ------------------------------------------------------------------------------------------

    def _truth(self, ref: StoredRecord) -> tuple[dict[str, torch.Tensor], str]:
        """The reference's outputs in float64, from the inputs it recorded; ({}, why) without them."""
        body = [
            r
            for r in self._ref.records(step=ref.step, grad_phase="fwd")
            if ref.opened <= r.seq < ref.seq and r.kind == "op"
        ]
        if any(why_taken(r) == "random" for r in body):
            return {}, "random"
        outs = [s for s in ref.slots if s.role == "out" and s.is_tensor]
        inside = {r.seq for r in body}
        if not body or not any(p in inside for s in outs for p, _ in s.producers):
            return {}, "compared with the reference's output: its ops were not recorded"
        try:
            made, ran = execute.execute_body(self._ref, body, {p for s in outs for p in s.producers})
        except DispatchTraceError as error:
            return {}, f"compared with the reference's output: {error}"[:160]
        if ran.failed or ran.skipped or ran.taken:
            return {}, "compared with the reference's output: its ops could not all be run in float64"
        found = {}
        for slot in outs:
            value = made.get(slot.producers[-1]) if slot.producers else None
            if value is not None and tuple(value.shape) == slot.shape:
                found[slot.name] = value
        return found, ""

    # Comparing --------------------------------------------------------------------------------------

    def _compare(
        self,
        site: dict[str, Any],
        outputs: dict[str, torch.Tensor],
        ref: StoredRecord,
        target: StoredRecord,
        truth: dict[str, torch.Tensor],
        why: str,
    ) -> IsolatedCall:
        theirs = [s for s in ref.slots if s.role == "out" and s.is_tensor]
        units = [_border(target), _border(ref)]
        worst: IsolatedCall | None = None
        worst_badness = (False, -1.0)
        for place, slot in enumerate(theirs):
            value = outputs.get(slot.name)
            if value is None and place < len(outputs) == len(theirs):
                value = list(outputs.values())[place]
            if value is None:
                return IsolatedCall(**site, output=slot.name, ok=False, note="it does not return this output")
            if tuple(value.shape) != slot.shape:
                note = f"its shape is {list(value.shape)}, the reference's {list(slot.shape)}"
                return IsolatedCall(**site, output=slot.name, ok=False, note=note)
            try:
                recorded = execute.tensor(self._ref, ref.seq, slot.name)
            except DispatchTraceError as error:
                return IsolatedCall(**site, output=slot.name, note=f"no reference value: {error}"[:200])
            exact = truth.get(slot.name)
            base = recorded if exact is None else exact
            u, u_ref = max(units[0], roundoff(dtype_name(value.dtype))), max(units[1], roundoff(slot.dtype))
            off = relative_l2(value, base)
            own = 0.0 if exact is None else relative_l2(recorded, exact)
            band = TOLERANCE * max(u, u_ref, own, own * u / u_ref if u_ref else 0.0)
            row = worst_row(base, value)[1] if math.isfinite(off) else off
            found = IsolatedCall(
                **site,
                output=slot.name,
                error=off,
                ref_error=None if exact is None else own,
                band=band,
                ok=off <= band and row <= ROW_FACTOR * band,
                note=why if exact is None else "one row" if off <= band < row / ROW_FACTOR else "",
            )
            badness = (found.ok is False, off / band if band else off)
            if badness > worst_badness:
                worst, worst_badness = found, badness
        return worst or IsolatedCall(**site, note="the reference returned no tensor")


def _border(record: StoredRecord) -> float:
    return max((roundoff(s.dtype) for s in record.slots if s.is_tensor), default=0.0)


# Arguments from slots -------------------------------------------------------------------------------


def _put(tree: dict[Any, Any], name: str, value: Any) -> None:
    """Puts a value where its slot name (`in[0].k[1]`) says."""
    keys: list[Any] = []
    for word, digits, quoted in _TOKEN.findall(name.removeprefix("in")):
        keys.append(word or (int(digits) if digits else json.loads(quoted)))
    if not keys:
        raise NotExecutableError(f"{name} is no argument that can be passed")
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = _Leaf(value)


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: Any


def _build(tree: Any) -> Any:
    if isinstance(tree, _Leaf):
        return tree.value
    if all(isinstance(key, int) for key in tree) and sorted(tree) == list(range(len(tree))):
        return tuple(_build(tree[i]) for i in range(len(tree)))
    return {key: _build(value) for key, value in tree.items()}


# State ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _restored(module: torch.nn.Module) -> Iterator[None]:
    """Puts back what running a module may change: its tensors, attributes and flags, the random state."""
    saved = []
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for part in module.modules():
        registered = [dict(getattr(part, name)) for name in ("_parameters", "_buffers", "_modules")]
        saved.append((part, dict(part.__dict__), registered))
        for value in [*part.__dict__.values(), *registered[1].values()]:
            if isinstance(value, torch.Tensor):
                tensors[id(value)] = value, value.detach().clone()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for part, attributes, registered in saved:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            for name, before in zip(("_parameters", "_buffers", "_modules"), registered, strict=True):
                current = getattr(part, name)
                current.clear()
                current.update(before)
        with torch.no_grad():
            for value, copy in tensors.values():
                if not torch.equal(value, copy):  # versions do not tell: batch norm writes past them
                    value.copy_(copy)


__all__ = ["IsolatedCall", "Isolation", "isolate"]
