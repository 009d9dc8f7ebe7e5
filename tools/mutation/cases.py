"""What a case of the mutation bench is: a reference, a target with one thing changed, and the truth.

Guarantees: a case is a function of its name and the seed alone; the reference is never touched; whether a
planted bug changes the output is measured before anything is recorded, so that no case is dropped
afterwards. Adding a case is one decorated function in `program`, `kernels`, `weights` or `clean`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

T = TypeVar("T")
Changes = Literal["program", "kernel", "weights", "fault"]
Precision = Literal["fp32", "bf16", "mixed"]
Inputs = dict[str, Any]
Which = Literal["reference", "target"]
Step = Callable[..., AbstractContextManager[Any]]

# A planted bug counts when it moves the output by this much more than float32 rounding does.
_MIN_EFFECT_OVER_NOISE = 30.0
_MAX_DRAWS = 10


class Draw:
    """Random choices that depend on a text alone (Python's and torch's generators)."""

    def __init__(self, text: str) -> None:
        self._random = random.Random(text)
        self.generator = torch.Generator().manual_seed(self._random.getrandbits(48))

    def choice(self, options: Sequence[T]) -> T:
        assert options, "nothing to choose from"
        return self._random.choice(options)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Where a planted bug is, by whoever planted it.

    Attributes:
      module: path of the module call whose body goes wrong first. Glue code belongs to the module whose
        forward holds it; a module that is handed a wrong input is innocent, its caller is not.
      ops: base names of the ops that may be named; None where no op of the target is to blame (an op is
        missing, or only the wiring is wrong), so that the module alone is judged.
      call: 0-based call of the module.
      n: which op of that name in the call's own body; None where any of `ops` will do.
      accept_modules: other modules that are right too.
      what: what was planted, in words.
    """

    module: str
    what: str
    ops: tuple[str, ...] | None = None
    call: int = 0
    n: int | None = None
    accept_modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A run of several calls, as an engine makes them.

    Attributes:
      calls: (what `rec.step` is told, keyword arguments), in order.
      cached: each call continues the one before it, by its cache.
      join: along which dim the outputs of the calls are one.
    """

    calls: tuple[tuple[dict[str, Any], Inputs], ...]
    cached: bool
    join: int


@dataclass(slots=True, kw_only=True)
class Subject:
    """A pair under construction: a mutant changes `target` (or what surrounds its run), nothing else.

    Attributes:
      arch: name of the architecture.
      attention: "eager" or "sdpa", of both models.
      reference, target: equal models in eval mode, float32.
      inputs, target_inputs: keyword arguments of the two calls.
      draw: the case's random choices.
      around_reference, around_target: context managers to be entered around each run.
      reference_steps, target_steps: the calls of each run; None: one call with the inputs.
    """

    arch: str
    attention: str
    reference: torch.nn.Module
    target: torch.nn.Module
    inputs: Inputs
    target_inputs: Inputs
    draw: Draw
    around_reference: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    around_target: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    reference_steps: Steps | None = None
    target_steps: Steps | None = None

    def paths(self, wanted: Callable[[str, torch.nn.Module], bool]) -> list[str]:
        """Paths of the target's modules that satisfy `wanted(path, module)`, in order of definition."""
        return [path for path, module in self.target.named_modules() if wanted(path, module)]

    def choose(self, wanted: Callable[[str, torch.nn.Module], bool]) -> tuple[str, Any]:
        """One of those modules by chance: (path, module)."""
        path = self.draw.choice(self.paths(wanted))
        return path, self.target.get_submodule(path)

    def run_reference(self) -> list[torch.Tensor]:
        return _run(self.reference, self.inputs, self.around_reference, self.reference_steps)

    def run_target(self) -> list[torch.Tensor]:
        return _run(self.target, self.target_inputs, self.around_target, self.target_steps)

    def call(self, which: Which, step: Step | None = None) -> None:
        """Runs that model, whatever hooks and modes are in place; to be called within `surrounded(which)`.

        Args:
          step: entered around each call with what is known of it, where there are several.
        """
        if which == "reference":
            _call(self.reference, self.inputs, self.reference_steps, step)
        else:
            _call(self.target, self.target_inputs, self.target_steps, step)

    def surrounded(self, which: Which) -> contextlib.ExitStack:
        """A context in which that model is to be run: no_grad, a fixed random state, what the case adds."""
        around = self.around_reference if which == "reference" else self.around_target
        return _surrounded(around)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A registered kind of bug; `plant` changes the subject and returns the truth.

    `fp32_only`: it is a rounding to bfloat16, which is no bug where all is rounded to it.
    """

    kind: str
    archs: tuple[str, ...]
    changes: Changes
    attention: str | None
    fp32_only: bool
    plant: Callable[[Subject], Truth]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clean:
    """A registered harmless change; `apply` changes the subject and returns the tolerated relative L2."""

    kind: str
    archs: tuple[str, ...]
    attention: str | None
    apply: Callable[[Subject], float]


MUTANTS: dict[str, Mutant] = {}
CLEAN: dict[str, Clean] = {}
ARCHS: dict[str, Callable[[Draw, str], tuple[torch.nn.Module, Inputs]]] = {}
# What each architecture's model has: the places where bugs live.
TRAITS: dict[str, frozenset[str]] = {}
OTHER = "other"


def with_traits(needs: str, lacks: str = "") -> tuple[str, ...]:
    """The architectures that have all of some traits and none of others; "other" ones where needed."""
    wanted, unwanted = set(needs.split()), set(lacks.split())
    unwanted |= {OTHER} - wanted
    return tuple(name for name, traits in TRAITS.items() if wanted <= traits and not unwanted & traits)


def drawn(archs: Sequence[str], named: Collection[str]) -> list[str]:
    """Of the architectures of a kind those that are named; where none is, all but the "other" ones."""
    return [arch for arch in archs if (arch in named if named else OTHER not in TRAITS[arch])]


def mutant(
    *,
    needs: str = "",
    lacks: str = "",
    archs: Sequence[str] = (),
    changes: Changes = "program",
    attention: str | None = None,
    fp32_only: bool = False,
) -> Callable[[Callable[[Subject], Truth]], Callable[[Subject], Truth]]:
    """Registers a kind of bug under the function's name.

    Args:
      needs, lacks: traits that an architecture must have, and must not have, for the bug to have a place.
      archs: instead of these, the architectures by name.
      changes: "weights" where a parameter differs, "program" or "kernel"; "fault" for a kernel whose results
        are off by so little that they need not show at the outputs.
      attention: the attention implementation it needs; None: either, by chance.
      fp32_only: it is a rounding to bfloat16, which is no bug where all is rounded to it.
    """

    def register(plant: Callable[[Subject], Truth]) -> Callable[[Subject], Truth]:
        kind = plant.__name__
        MUTANTS[kind] = Mutant(
            kind=kind,
            archs=tuple(archs) or with_traits(needs, lacks),
            changes=changes,
            attention=attention,
            fp32_only=fp32_only,
            plant=plant,
        )
        return plant

    return register


def clean(
    *, needs: str = "", lacks: str = "", archs: Sequence[str] = (), attention: str | None = None
) -> Callable[[Callable[[Subject], float]], Callable[[Subject], float]]:
    """Registers a harmless change under the function's name; arguments as in `mutant`."""

    def register(apply: Callable[[Subject], float]) -> Callable[[Subject], float]:
        kind = apply.__name__
        CLEAN[kind] = Clean(
            kind=kind, archs=tuple(archs) or with_traits(needs, lacks), attention=attention, apply=apply
        )
        return apply

    return register


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A case ready to be recorded.

    Attributes:
      subject: the pair.
      truth: where the bug is; None for a clean pair.
      effect: relative L2 between the two models' outputs, the worst of the outputs; unitless.
      noise: the same between the reference and itself in float64.
      tolerated: bound on `effect` of a clean pair; inf for a mutant.
      draws: how many draws it took until the bug reached the output.
    """

    subject: Subject
    truth: Truth | None
    effect: float
    noise: float
    tolerated: float
    draws: int


def build(name: str, seed: int, precision: Precision = "fp32") -> Built:
    """The case `arch-kind-number`, a function of its name, the seed and the precision.

    A draw whose bug does not reach the output (a corrupted element that the mask hides) is drawn again.

    Args:
      precision: "bf16": both models, once the bug is planted, are converted to bfloat16; "mixed": the target
        alone; a bug that this rounds away bit for bit is drawn again. "fp32": both stay in float32.

    Raises:
      ValueError: there is no such architecture or kind.
      AssertionError: no draw reached the output.
    """
    arch, kind, _ = parse_name(name)
    harmless = CLEAN.get(kind)
    faulty = not harmless and MUTANTS[kind].changes == "fault"
    for attempt in range(_MAX_DRAWS):
        draw = Draw(f"{seed}/{name}/{attempt}")
        wanted = harmless.attention if harmless else MUTANTS[kind].attention
        attention = draw.choice(("eager", "sdpa"))
        subject = _subject(arch, wanted or attention, draw)
        truth, tolerated = None, float("inf")
        if faulty:  # which ops there are, and how they round, depends on the precision
            _convert(subject, precision)
        if harmless:
            tolerated = harmless.apply(subject)
        else:
            truth = MUTANTS[kind].plant(subject)
        reference = subject.run_reference()
        effect = _worst_distance(subject.run_target(), reference)
        if not harmless and effect == 0:
            continue
        exact = copy.deepcopy(subject.reference).double()
        noise = _worst_distance(reference, _run(exact, _with_floats(subject.inputs, torch.float64), []))
        if faulty and _is_rounded_away(subject):
            continue
        if harmless or faulty or effect > _MIN_EFFECT_OVER_NOISE * noise:
            if not faulty and precision != "fp32":
                _convert(subject, precision)
                if not harmless and _is_rounded_away(subject):
                    continue
            return Built(
                subject=subject,
                truth=truth,
                effect=effect,
                noise=noise,
                tolerated=tolerated,
                draws=attempt + 1,
            )
    raise AssertionError(f"{name}: none of {_MAX_DRAWS} draws reached the output")


def _convert(subject: Subject, precision: Precision) -> None:
    if precision == "bf16":
        convert_reference(subject, torch.bfloat16)
    if precision != "fp32":
        convert_target(subject, torch.bfloat16)


def convert_reference(subject: Subject, dtype: torch.dtype) -> None:
    """Parameters and inputs; rotary frequencies stay float32, as they do in a loaded checkpoint."""
    _convert_parameters(subject.reference, dtype)
    subject.inputs = _with_floats(subject.inputs, dtype)


def convert_target(subject: Subject, dtype: torch.dtype) -> None:
    """The same for the target."""
    _convert_parameters(subject.target, dtype)
    subject.target_inputs = _with_floats(subject.target_inputs, dtype)


def _with_floats(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: _as_float(value, dtype) for name, value in inputs.items()}


def _as_float(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _convert_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _is_rounded_away(subject: Subject) -> bool:
    """Whether the target gives, bit for bit, what the reference would in its dtype."""
    clean = copy.deepcopy(subject.reference)
    for mine, theirs in zip(clean.parameters(), subject.target.parameters(), strict=True):
        mine.data = mine.data.to(theirs.dtype)
    sound = _run(clean, subject.target_inputs, subject.around_reference)
    return all(map(torch.equal, subject.run_target(), sound))


def parse_name(name: str) -> tuple[str, str, int]:
    """`arch-kind-number` in its parts.

    Raises:
      ValueError: there is no such architecture or kind, or no number.
    """
    arch, _, rest = name.partition("-")
    kind, _, number = rest.rpartition("-")
    known = MUTANTS.get(kind) or CLEAN.get(kind)
    if known is None or arch not in known.archs or not number.isdigit():
        raise ValueError(f"{name!r} is no case: expected arch-kind-number, see --list")
    return arch, kind, int(number)


def while_running(module: torch.nn.Module, home: str, **replacements: Any) -> None:
    """Replaces names of the module `home` whenever `module`'s forward runs, for this instance alone.

    So the target runs the library's own code with one helper changed, as a fork of it would.
    """
    owner = importlib.import_module(home)
    forward = module.forward

    @functools.wraps(forward)
    def patched(*args: Any, **kwargs: Any) -> Any:
        kept = {name: getattr(owner, name) for name in replacements}
        try:
            for name, value in replacements.items():
                setattr(owner, name, value)
            return forward(*args, **kwargs)
        finally:
            for name, value in kept.items():
                setattr(owner, name, value)

    module.forward = patched


def aten(*names: str) -> tuple[str, ...]:
    """Base names of aten ops, as findings name them."""
    return tuple(f"aten.{name}" for name in names)


def _subject(arch: str, attention: str, draw: Draw) -> Subject:
    reference, inputs = ARCHS[arch](draw, attention)
    return Subject(
        arch=arch,
        attention=attention,
        reference=reference,
        target=copy.deepcopy(reference),
        inputs=inputs,
        target_inputs=dict(inputs),
        draw=draw,
    )


@contextlib.contextmanager
def _fixed_random_state() -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _surrounded(around: Sequence[Callable[[], AbstractContextManager[Any]]]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(_fixed_random_state())
    for enter in around:
        stack.enter_context(enter())
    return stack


def _run(
    model: torch.nn.Module,
    inputs: Inputs,
    around: Sequence[Callable[[], AbstractContextManager[Any]]],
    steps: Steps | None = None,
) -> list[torch.Tensor]:
    with _surrounded(around):
        results = _call(model, inputs, steps)
    values = [[v.detach().double().clone() for v in result.values() if _is_float(v)] for result in results]
    if steps is None:
        return values[0]
    return [torch.cat(parts, dim=steps.join) for parts in zip(*values, strict=True)]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _call(model: torch.nn.Module, inputs: Inputs, steps: Steps | None, step: Step | None = None) -> list[Any]:
    if steps is None:
        return [model(**inputs)]
    results: list[Any] = []
    for meta, given in steps.calls:
        if steps.cached and results:
            given = {**given, "past_key_values": results[-1].past_key_values}
        with contextlib.nullcontext() if step is None else step(**meta):
            results.append(model(**given))
    return results


def _worst_distance(values: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    assert len(values) == len(reference) > 0, "the models return different numbers of outputs"
    return max(
        ((value - ref).norm() / ref.norm()).item() for value, ref in zip(values, reference, strict=True)
    )
