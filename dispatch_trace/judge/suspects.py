"""What is listed beside the fatal findings: what healed, what changed without effect, what was granted."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from dispatch_trace.align.canon import is_factory
from dispatch_trace.align.flow import has_inputs
from dispatch_trace.align.graph import Value
from dispatch_trace.judge.blame import Blame
from dispatch_trace.judge.findings import NEVER_FATAL, Finding
from dispatch_trace.judge.margins import decision_margin
from dispatch_trace.judge.noise import NoisePass
from dispatch_trace.judge.operands import changed_arguments
from dispatch_trace.judge.parameters import changed_parameters
from dispatch_trace.per_step import or_zero
from dispatch_trace.schema import StoredRecord


class Suspects:
    """Finds suspects.

    Attributes:
      notices: what a reader should know of them.
    """

    def __init__(self, noise: NoisePass, blame: Blame, reached: Set[Value]) -> None:
        self.notices: list[str] = []
        self._noise = noise
        self._blame = blame
        self._reached = reached
        self._pairing = noise.pairing
        self._target = noise.pairing.target

    def find(self, fatal: list[Finding]) -> list[Finding]:
        """What was wrong or changed and did not reach an output, or was granted."""
        found: list[tuple[int, Finding]] = []
        named = {f.seq for f in fatal}
        casts: set[int] = set()
        for value, state in list(self._noise.states.items()):
            for kind, seq in state.flags:
                if kind == "cast" and seq not in casts and state.explained:
                    casts.add(seq)
                    found.append((seq, self._cast_suspect(seq, or_zero(state.rho))))
                elif kind == "flip" and seq == value[0]:
                    record = self._target.records[seq]
                    evidence = self._blame.sites.evidence(state)
                    if state.link is not None:
                        evidence["margin"] = decision_margin(self._noise, record, state.link)
                    finding = self._blame.sites.finding(record, record.op, "flip", evidence, state)
                    found.append((seq, finding))
            if not state.wrong or state.tainted or value in self._reached:
                continue
            record = self._target.records[value[0]]
            if not self._target.consumers.get(value) and record.kind == "op":
                continue  # an output that nobody reads
            if record.kind == "op" and not self._target.is_leaf(value) and self._heals_inside(record):
                continue  # a body written in another way
            readers = self._target.consumers.get(value)
            if record.kind == "op" and not self._target.is_leaf(value):
                finding = self._blame.value(value)
            elif readers:
                finding = self._blame.leaf(value, self._target.records[readers[0][0]])
            elif record.kind == "module" and not has_inputs(record):
                finding = self._blame.opaque(value)
            else:
                continue
            if finding.seq not in named:
                label = finding.label if finding.label in NEVER_FATAL else "suspect"
                evidence = {"kind": finding.label, "healed": True} | finding.evidence
                found.append((value[0], replace(finding, label=label, evidence=evidence)))
        found += self._silent_arguments(named)
        found += self._silent_parameters([*fatal, *(f for _, f in found)])
        return [replace(f, fatal=False) for _, f in sorted(found, key=lambda item: item[0])]

    def _heals_inside(self, record: StoredRecord) -> bool:
        """Whether the module call that an op stands in hands on nothing but what it should."""
        call = self._target.call_of(record)
        if call.record is None:
            return False
        if record.grad_phase == "bwd":
            values = self._handed_back(call.ops["bwd"])
        else:
            values = [
                origin.value
                for slot in call.record.slots
                if slot.role == "out" and slot.is_tensor
                for origin in self._target.origins(call.record, slot)
            ]
        return bool(values) and all(self._noise.state(value).explained for value in values)

    def _handed_back(self, records: list[StoredRecord]) -> list[Value]:
        """Gradients that a call's backward pass hands on: what others read, or nobody that was recorded."""
        inside = {record.seq for record in records}
        made = [
            (record.seq, slot.index)
            for record in records
            if not self._target.is_edge(record)
            for slot in self._target.outputs(record)
        ]
        readers = {value: {seq for seq, _ in self._target.consumers.get(value, ())} for value in made}
        return [value for value in made if not readers[value] or readers[value] - inside]

    def _cast_suspect(self, seq: int, error: float) -> Finding:
        record = self._target.records[seq]
        evidence = {"error": error, "dtype": [s.dtype for s in self._target.outputs(record)][:1]}
        return replace(
            self._blame.sites.finding(record, record.op, "suspect", evidence, None),
            hint="rounded through a lower precision than anything around it; declare it if it is meant",
        )

    def _silent_parameters(self, named: list[Finding]) -> list[tuple[int, Finding]]:
        """Parameters that are others than the reference's, whose effect is within the noise."""
        known = {f.evidence.get("path") for f in named}
        found = []
        for changed in changed_parameters(self._pairing):
            path = ".".join(p for p in (changed.target.module, changed.target.name) if p)
            if path in known:
                continue
            evidence = {
                "kind": "parameter",
                "parameter": changed.target.name,
                "path": path,
                "error": changed.error,
                "elements": [changed.num_changed, changed.num_elements],
            }
            reader = changed.reader
            self._target.reader.lose(reader)
            finding = self._blame.sites.finding(reader, reader.op, "suspect", evidence, None)
            hint = "differs by more than a change of dtype explains; its effect is within the noise"
            found.append((reader.seq, replace(finding, hint=hint)))
            self.notices.append(f"parameter {path} {hint} ({changed.error:.2g} of its size)")
        return found

    def _silent_arguments(self, named: set[int]) -> list[tuple[int, Finding]]:
        """Arguments that changed and whose effect, if any, is below the noise."""
        found = []
        for seq, pair in self._pairing.ops.items():
            record = self._target.records[seq]
            if record.light or seq in named or pair.method != "same op" or self._target.is_edge(record):
                continue
            changed = changed_arguments(self._pairing.ref.records[pair.ref], record)
            states = [self._noise.states.get((seq, s.index)) for s in self._target.outputs(record)]
            if changed and all(s is not None and s.explained for s in states) and not is_factory(record):
                evidence = {"kind": "argument", "arguments": changed}
                finding = self._blame.sites.finding(
                    record, record.op, "suspect", evidence, states[0] if states else None
                )
                found.append(
                    (seq, replace(finding, hint="an argument differs; its effect is within the noise"))
                )
        return found
