"""Live comparison: each record of a running program is judged against a reference as it is made.

`dt.record(path, model, against="ref.trace", on_divergence=...)`. What must hold: rounding never stops the
program (bands as in `judge`, from the error that was measured at the inputs); a stop that comes late is
better than a false one. So a result is held against the program at once only where nothing is open: its op
is the reference's, with all operands compared, the same and right (`live_ops`), or nothing that follows could
make it good (`live_replaced`). Everything else (another weight, another op, another input) may be a rewrite
that heals: it is a suspicion until a module around it returns something wrong (`live_modules`).

Leaves to `align` what takes both whole traces: pairing of modules without rules, twins, causes.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dispatch_trace.align.modules import Renames, table_paths
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.errors import DivergenceError, RenameError
from dispatch_trace.judge.findings import Finding
from dispatch_trace.live_modules import LiveModules
from dispatch_trace.live_ops import LiveOps
from dispatch_trace.live_state import Known, body_of, twin_of
from dispatch_trace.live_stop import Divergence, action_of, operands_here, stop_here
from dispatch_trace.patterns import closest_paths
from dispatch_trace.schema import RawRecord, StoredRecord
from dispatch_trace.store.reader import RankReader

_MAX_NOTED = 100


class LiveJudge:
    """Holds what a program computes against a reference.

    Args:
      ref: the reference, whole.
      on_divergence: "note", "raise", "break" or a callable, see `dt.record`.
      rename: rules as of `align`.

    Attributes:
      divergences: found so far.
    """

    def __init__(self, ref: RankReader, on_divergence: Any, rename: Any = None) -> None:
        self._action = action_of(on_divergence)
        self._ref = ref
        self._renames = Renames(rename)
        self._known = Known(ref, self._renames)
        self._ops = LiveOps(self._known, ref.records(kind="param"), self._renames)
        self._modules = LiveModules(self._known)
        self._stopped = False
        self.divergences: list[Divergence] = []
        self._tracer: Tracer | None = None

    @property
    def counts(self) -> Counter[str]:
        """Values by outcome: "equal", "within noise", "wrong", "not compared"."""
        return self._known.counts

    def check_paths(self, paths: Sequence[str]) -> None:
        """Whether the modules of a program are those of the reference, by name or by rule.

        Args:
          paths: of the program's modules, its root's "" included.
        Raises:
          RenameError: a rule matches nothing; or no module but the root has a counterpart, so that nothing
            would be compared.
        """
        theirs = table_paths(self._ref.header) | {r.module for r in self._ref.records(kind="module")}
        self._renames.check(theirs, paths)
        mine = {path for path in paths if path}
        if not mine or not any(theirs) or mine & {self._renames.apply(path) for path in theirs}:
            return
        first = min(mine)
        closest = closest_paths(first, sorted(theirs))
        raise RenameError(
            f"against: none of the program's {len(mine)} modules is called as one of the "
            f"{len(theirs - {''})} of {self._ref.path}; nothing could be compared. "
            f"Give rename={{reference path: path here}} ({first!r} here is closest to "
            f"{', '.join(map(repr, closest)) or 'none'}), or record without against= and align the two "
            "traces, which pairs modules by their weights."
        )

    # The writer's questions ------------------------------------------------------------------------

    def look(self, record: RawRecord) -> tuple[bool, Divergence | None]:
        """Judges a record that has just been made.

        Returns: whether it differs, so that its data is to be kept; and what is certain now, if anything.
        """
        with self._own_work():
            wrong, found, ref = False, None, None
            if record.kind == "param":
                wrong = self._ops.param(record)
            elif record.kind == "op":
                wrong, found, ref = self._ops.op(record)
            elif record.kind == "module" and record.grad_phase == "fwd" and not record.note:
                wrong, found = self._modules.module(record)
                ref = self._known.modules.get(body_of(record))
            self._known.contents.forget_data()
            return wrong, None if found is None else self._divergence(found, record, ref)

    def act(self, divergence: Divergence) -> None:
        """Does what was asked for at a divergence; only a callable hears of more than the first.

        Raises:
          DivergenceError: so it was asked. What a callable raises passes unchanged, and the debugger's end.
        """
        if len(self.divergences) < _MAX_NOTED:
            self.divergences.append(divergence)
        first, self._stopped = not self._stopped, True
        try:
            if callable(self._action):
                with self._unrecorded():
                    self._action(divergence)
            elif first and self._action == "break":
                with self._unrecorded():
                    stop_here(divergence)
            elif first and self._action == "raise":
                raise DivergenceError(str(divergence), divergence)
            elif first:
                sys.stderr.write(f"dispatch_trace: {divergence}\n")
        except Exception as error:
            if self._tracer is not None:
                self._tracer.let_through = error
            raise

    def attach(self, tracer: Tracer) -> None:
        """Tells whose records these are."""
        self._tracer = tracer

    def _own_work(self) -> AbstractContextManager[Any]:
        """Ops in here are the recorder's own."""
        tracer = self._tracer
        if tracer is None or tracer.state.busy:
            return contextlib.nullcontext()
        return tracer.own_ops(tracer.state)

    @contextlib.contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """The user's own ops at a stop are no part of the program."""
        state = None if self._tracer is None else self._tracer.state
        before = state is not None and state.busy
        if state is not None:
            state.busy = True
        try:
            yield
        finally:
            if state is not None:
                state.busy = before

    def summary(self) -> dict[str, Any]:
        """For the header of the trace: plain values."""
        return {
            "reference": str(self._ref.path),
            "counts": dict(self.counts),
            "divergences": [str(each) for each in self.divergences],
        }

    def _divergence(self, finding: Finding, record: RawRecord, ref: StoredRecord | None) -> Divergence:
        """What was found, with the values at hand: those of the record that made it certain."""
        late = str(finding.evidence.get("certain_since", ""))
        if not late:
            self._known.steps[finding.step].certain.append(finding.module)
        slot = next(
            (s for s in record.slots if s.role != "in" and s.is_tensor and s.content is not None), None
        )
        expected = None
        twin = None if ref is None or slot is None else twin_of(ref, slot)
        if twin is not None and twin.content >= 0 and self._ref.content(twin.content).has_data:
            expected = self._ref.tensor(twin.content)
        output = None if slot is None or slot.content is None else slot.content.tensor
        return Divergence(finding, output, expected, operands_here(), late=late)


__all__ = ["LiveJudge"]
