"""Whether single ops of the target compute badly: each runs again on what it read, with float64 as truth.

`find_faults` replays a recording op by op. Nearly all results come back bit for bit; those that do not are
measured: the recorded result and that of this machine's kernel against the op in float64 on the same
inputs. A result is a fault when its error is more than rounding and more than this machine's kernel makes, in
one of four ways (as a whole, as a scale, as an offset, in its worst element; BLAME.md section 2), or when it
alone does not come back where the others of its kind do to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dispatch_trace import execute
from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.figures import DEVIATIONS, ROUNDED
from dispatch_trace.align.lens import whole_of
from dispatch_trace.align.summaries import EXTREME, SKETCH_FLOOR
from dispatch_trace.errors import NotExecutableError
from dispatch_trace.execute_run import Execution, Values
from dispatch_trace.judge.alone import Siblings
from dispatch_trace.judge.estimates import ACCUMULATOR, gains_of, own_noise, roundoff
from dispatch_trace.judge.noise import NoisePass
from dispatch_trace.judge.twin_keys import recording
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.sketch import fold, relative_distance
from dispatch_trace.store.reader import RankReader

# Error as a whole, in units of tau; correct rounding alone makes 0.42, one unit too many 1.5.
WHOLE = 1.25
NATIVE = 3.0
# What two sound kernels of a function compute with differs by 0.25 units on average (GELU, float32).
BIAS = 1.0
WORST = 8.0


@dataclass(frozen=True, slots=True)
class Fault:
    """An op's result that is not what the op makes of its inputs.

    Attributes:
      record, slot: the result.
      how: which test it fails: "error", "scale", "offset", "element", "nonfinite", "bits", "value".
      evidence: local_error, native_error, tau (all relative L2), and the figure of the test.
    """

    record: StoredRecord
    slot: StoredSlot
    how: str
    evidence: dict[str, Any]


@dataclass(slots=True)
class _Tested:
    """A result that did not come back bit for bit; `repeatable`: this machine gives one result each time."""

    record: StoredRecord
    slot: StoredSlot
    how: str
    evidence: dict[str, Any]
    repeatable: bool


@dataclass(frozen=True, slots=True)
class _Errors:
    """Errors of a result against the truth, relative to the truth's norm; `worst` in units of tolerance."""

    whole: float
    scale: float
    offset: float
    worst: float
    num_eff: float
    numel: int


def find_faults(noise: NoisePass, progress: Callable[[int, int], None] | None = None) -> list[Fault]:
    """Replays the target's ops on their own recorded inputs; faults in the order in which it ran.

    Args:
      noise: of the recordings; for sizes, borders and what was declared.
      progress: called with (records done, records in all).
    Raises:
      DispatchTraceError: the target cannot be executed, or cannot be read.
    """
    execution = Execution()
    tested: list[_Tested] = []
    target = noise.pairing.target
    whole = whole_of(target.reader)  # what one step left in a cache the next ones read
    records = list(recording(target) if whole is target.reader else whole.records())
    for ran, values, differing in execute.replay(
        whole, execution=execution, records=records, progress=progress
    ):
        own = {d.slot: d.why for d in differing if not d.why.startswith("inherited")}
        record = target.records.get(ran.seq)
        if record is None:
            continue  # of a step that another round shows
        for slot in record.slots:
            if slot.role != "in" and slot.name in own:
                tested += _test(noise, record, slot, values, own[slot.name] == "differs")
    siblings = Siblings(noise.pairing, {t.record.seq: t.record for t in tested}.values(), execution)
    return [fault for one in tested if (fault := _fault(one, siblings)) is not None]


def _fault(one: _Tested, siblings: Siblings) -> Fault | None:
    how = one.how
    if not how and one.repeatable and siblings.is_alone(one.record, one.evidence):
        how = "bits"
    if not how:
        return None
    evidence = {**one.evidence, **siblings.figures(one.record), "test": how}
    return Fault(one.record, one.slot, how, evidence)


def _test(
    noise: NoisePass, record: StoredRecord, slot: StoredSlot, values: Values, same_machine: bool
) -> Iterator[_Tested]:
    reader = noise.pairing.target.reader
    native = values.get(slot.name)
    if native is None or native.layout != torch.strided or native.is_quantized:
        return
    inputs = {name: value for name, value in values.items() if name.startswith("in.")}
    repeatable = same_machine and _repeats(reader, record, slot, inputs, native)
    if not reader.content(slot.content).has_data:
        how, evidence = _measure_sketch(noise, record, slot, native, _truth(noise, record, slot, inputs))
        yield _Tested(record, slot, how, evidence, repeatable)
        return
    recorded = reader.tensor(slot.content)
    if recorded.shape != native.shape:
        return
    if dtype_class(slot.dtype) not in "f8":
        share = float((recorded != native).double().mean()) if recorded.numel() else 0.0
        if not native.dtype.is_complex:
            evidence = {"differing_share": share}
            yield _Tested(record, slot, "value" if repeatable else "", evidence, repeatable)
        return
    truth = _truth(noise, record, slot, inputs)
    how, evidence = _measure(noise, record, slot, recorded, native, native if truth is None else truth)
    if truth is None:
        evidence["truth"] = "this machine's kernel: the op does not run in float64"
    yield _Tested(record, slot, how, evidence, repeatable)


def _repeats(
    reader: RankReader, record: StoredRecord, slot: StoredSlot, inputs: Values, native: torch.Tensor
) -> bool:
    """Whether the op gives the same here once more."""
    try:
        again = execute.execute_on(reader, record, inputs, None).get(slot.name)
    except NotExecutableError:
        return False
    return again is not None and torch.equal(again.nan_to_num(), native.nan_to_num())


def _truth(noise: NoisePass, record: StoredRecord, slot: StoredSlot, inputs: Values) -> torch.Tensor | None:
    """The result in float64, None where the op has none."""
    try:
        return execute.execute_on(noise.pairing.target.reader, record, inputs).get(slot.name)
    except NotExecutableError:
        return None


def _measure(
    noise: NoisePass,
    record: StoredRecord,
    slot: StoredSlot,
    recorded: torch.Tensor,
    native: torch.Tensor,
    truth: torch.Tensor,
) -> tuple[str, dict[str, Any]]:
    """Which test a result fails ("" for none), and the figures."""
    unit, tau = _rounding(noise, record, slot)
    t, f, g = (x.detach().reshape(-1).to(torch.float64) for x in (recorded, native, truth))
    evidence: dict[str, Any] = {"tau": tau}
    if not torch.equal(_kinds(t), _kinds(f)):
        evidence["nonfinite"] = int((_kinds(t) != _kinds(f)).sum())
        return "nonfinite", evidence
    plain = torch.isfinite(t) & torch.isfinite(g) & (g.abs() < EXTREME)
    masks = torch.isfinite(t) & ~plain
    if bool(((t - f).abs() > WORST * tau * f.abs())[masks].any()):
        return "element", evidence
    t, f, g = t[plain], f[plain], g[plain]
    if not g.numel() or not bool(g.any()):
        return ("value" if bool((t != f).any()) and not bool(f.any()) else ""), evidence
    ours, theirs = _errors(t, g, unit, tau), _errors(f, g, unit, tau)
    evidence |= {"local_error": ours.whole, "native_error": theirs.whole}
    deviation = DEVIATIONS * ROUNDED * tau
    bias = BIAS * min(unit, ACCUMULATOR)
    if ours.whole > max(WHOLE * tau, NATIVE * theirs.whole):
        return "error", evidence
    if abs(ours.scale) > max(deviation / math.sqrt(ours.num_eff), NATIVE * abs(theirs.scale), bias):
        return "scale", evidence | {"scale": 1.0 + ours.scale}
    if abs(ours.offset) > max(deviation / math.sqrt(ours.numel), NATIVE * abs(theirs.offset), bias):
        return "offset", evidence | {"offset": ours.offset}
    if ours.worst > WORST * max(1.0, theirs.worst):
        return "element", evidence | {"worst_element": ours.worst}
    return "", evidence


def _measure_sketch(
    noise: NoisePass, record: StoredRecord, slot: StoredSlot, native: torch.Tensor, truth: torch.Tensor | None
) -> tuple[str, dict[str, Any]]:
    """The same where only a sketch is left of the result: its error as a whole can be told."""
    sketch = noise.pairing.target.reader.sketch(slot.content)
    if sketch is None or truth is None or dtype_class(slot.dtype) not in "f8":
        return "", {"compared": "by hash"}
    _, tau = _rounding(noise, record, slot)
    exact = fold(truth)
    ours = float(relative_distance(sketch, exact))
    theirs = float(relative_distance(fold(native), exact))
    evidence: dict[str, Any] = {"tau": tau, "compared": "by sketch"}
    if ours > SKETCH_FLOOR:  # a sketch is of float32 numbers
        evidence |= {"local_error": ours, "native_error": theirs}
    limit = max(WHOLE * tau, NATIVE * theirs, SKETCH_FLOOR)
    return ("error" if ours > limit else ""), evidence


def _rounding(noise: NoisePass, record: StoredRecord, slot: StoredSlot) -> tuple[float, float]:
    """Unit roundoff of a result, and tau: the relative error that rounding inside the op may make."""
    unit = max(roundoff(slot.dtype), _ref_unit(noise, record))
    tau = max(own_noise(noise.pairing.target, record, slot, noise.sizes.of_slot), unit)
    tau += 2.0 * noise.declared.operands(record) * _largest_gain(noise, record, slot)
    return unit, tau + noise.declared.output(record)


def _errors(result: torch.Tensor, truth: torch.Tensor, unit: float, tau: float) -> _Errors:
    """Errors of a result.

    Args:
      result, truth: [n] float64, finite; the truth not all zero.
      unit: roundoff of the result's dtype, relative to each element; tau - unit is relative to their RMS.
    """
    difference = result - truth
    square = float(truth @ truth)
    norm, numel = math.sqrt(square), truth.numel()
    tolerance = unit * truth.abs() + max(tau - unit, 0.25 * unit) * norm / math.sqrt(numel)
    fourth = float((truth * truth).square().sum())
    return _Errors(
        whole=float(difference.norm()) / norm,
        scale=float(difference @ truth) / square,
        offset=float(difference.sum()) / (math.sqrt(numel) * norm),
        worst=float((difference.abs() / tolerance).max()),
        num_eff=max(square * square / fourth, 1.0) if fourth else 1.0,
        numel=numel,
    )


def _kinds(value: torch.Tensor) -> torch.Tensor:
    """0 for finite elements, 1, 2 and 3 for NaN, inf and -inf."""
    return value.isnan().int() + 2 * value.isposinf().int() + 3 * value.isneginf().int()


def _ref_unit(noise: NoisePass, record: StoredRecord) -> float:
    """Roundoff of the reference at this op: no more precision is asked for than it had."""
    pair = noise.pairing.ops.get(record.seq)
    if pair is None:
        return 0.0
    owner = noise.pairing.ref.records[pair.ref]
    return max((roundoff(s.dtype) for s in noise.pairing.ref.outputs(owner)), default=0.0)


def _largest_gain(noise: NoisePass, record: StoredRecord, slot: StoredSlot) -> float:
    gains = gains_of(noise.pairing.target, record, slot, noise.sizes.of_slot)
    return max((g for _, g in gains if math.isfinite(g)), default=1.0)


__all__ = ["Fault", "find_faults"]
