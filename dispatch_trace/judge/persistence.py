"""Whether something wrong stays wrong: it reaches a later module's result and is hidden there, or heals.

A residual sum can hide a wrong branch from the output: its error is still there, below the noise of the
sum. A rewrite heals instead: the next result is right, though its input's error would have shown.
"""

from __future__ import annotations

import numpy as np

from dispatch_trace.align.canon import DISCRETE, family, is_factory, short
from dispatch_trace.align.flow import has_inputs
from dispatch_trace.align.graph import Program, Value, slot_numel
from dispatch_trace.align.views import elements
from dispatch_trace.judge.noise import NoisePass, State
from dispatch_trace.schema import StoredRecord

# An explained result that carries at least this share of the error predicted from its wrong inputs still has
# it. Where an op only bounds how errors grow (softmax, norms), what arrives may be far below the prediction.
CARRIED = 0.2
CARRIED_BOUND = 0.02
_EXACT_GAIN = frozenset({"linear", "conv", "add", "sub", "mul", "div", "concat"})


def is_hidden(noise: NoisePass, value: Value, module_values: dict[Value, list[int]]) -> bool:
    """Whether a wrong value reaches the result of a later module and is diluted, not healed, after that.

    Args:
      value: of the target, wrong with right inputs.
      module_values: values that module calls return: value -> seq of the module records.
    """
    target = noise.pairing.target
    culprit = target.records[value[0]]
    if culprit.kind == "module" and not has_inputs(culprit):
        later = (v for v in noise.flow.unfed() if v != value and noise.state(v).wrong)
        return any(value in noise.flow.before(v) for v in later)
    around: set[int] = set()  # what a wrong weight does to its own module shows already
    if culprit.kind == "op" and not target.is_leaf(value):
        around = {call.record.seq for call in target.call_of(culprit).enclosing() if call.record is not None}
    reached = healed = read = False
    seen = {value}
    todo = [value]
    while todo:
        current = todo.pop()
        state = noise.state(current)
        if state.wrong and any(seq not in around for seq in module_values.get(current, ())):
            reached = True
        spoiled, healing = False, []
        for seq, _ in target.consumers.get(current, ()):
            reader = target.records[seq]
            if is_factory(reader):
                continue  # it takes a shape, no numbers
            for out in target.outputs(reader):
                following = (seq, out.index)
                after = noise.state(following)
                if after.suspicious:
                    spoiled = True
                    if following not in seen:
                        seen.add(following)
                        todo.append(following)
                    continue
                read = True
                if short(reader.op) in DISCRETE:
                    continue  # it decides the same on a wrong number
                if not _lost_error(reader, after):
                    continue
                if _reads_part(target, reader, current):
                    healing.append(reader)  # it may read right numbers beside wrong ones
                else:
                    healed = True
        healed = healed or (not spoiled and bool(healing) and _is_read_whole(target, healing, current))
    # What nobody reads at the end, as an unused head, is not hidden; who raised has not come to reading it.
    return reached and not healed and (read or _has_raised(noise))


def _has_raised(noise: NoisePass) -> bool:
    return any(record.note.startswith("raised ") for _, record in noise.pairing.modules)


def is_other_form(noise: NoisePass, value: Value) -> bool:
    """Whether a wrong value is a right one in another form: all ops that read it and nothing wrong are right.

    Args:
      value: of the target, wrong with right inputs.
    """
    target, shown = noise.pairing.target, False
    for seq, _ in target.consumers.get(value, ()):
        reader = target.records[seq]
        others = {o.value for s in target.inputs(reader) for o in target.origins(reader, s)} - {value}
        if is_factory(reader) or any(noise.state(other).suspicious for other in others):
            continue
        for out in target.outputs(reader):
            after = noise.state((seq, out.index))
            if after.wrong:
                return False
            shown = shown or (short(reader.op) not in DISCRETE and _lost_error(reader, after))
    return shown


def _lost_error(reader: StoredRecord, after: State) -> bool:
    """Whether a result is right though the error of what its op read would have shown."""
    if not after.explained or after.rho is None:
        return False
    carried = CARRIED if family(reader.op) in _EXACT_GAIN else CARRIED_BOUND
    return after.rho < carried * after.predicted


def _reads_part(target: Program, reader: StoredRecord, value: Value) -> bool:
    """Whether an op reads a part of a value only."""
    shares = [
        origin.share
        for slot in target.inputs(reader)
        for origin in target.origins(reader, slot)
        if origin.value == value
    ]
    return max(shares, default=1.0) < 1.0


def _is_read_whole(target: Program, readers: list[StoredRecord], value: Value) -> bool:
    """Whether the parts of a value that some ops read are all of it, as columns in another order are."""
    missing = np.ones(slot_numel(target.slot(value)), dtype=bool)
    for reader in readers:
        for slot in target.inputs(reader):
            for origin in target.origins(reader, slot):
                shown = elements(target, reader, slot, origin) if origin.value == value else None
                if shown is not None:
                    missing[shown.reshape(-1)] = False
    return not missing.any()


def module_values(noise: NoisePass) -> dict[Value, list[int]]:
    """What module calls of the target return, by value."""
    found: dict[Value, list[int]] = {}
    target = noise.pairing.target
    for _, record in noise.pairing.modules:
        for slot in record.slots:
            if slot.role == "out" and slot.is_tensor:
                for origin in target.origins(record, slot):
                    found.setdefault(origin.value, []).append(record.seq)
    return found
