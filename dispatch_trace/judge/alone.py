"""Whether a result that does not come back bit for bit is alone with that, so that its kernel is at fault.

Small errors of one kernel are less than what two sound kernels differ by: no measure tells them apart. What
does is that one machine has one kernel for an op on inputs of one form, and that all others that it computed
come back to the last bit.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, TypeAlias

from dispatch_trace import execute
from dispatch_trace.align.canon import GATHERS, short
from dispatch_trace.align.graph import Program
from dispatch_trace.align.lens import whole_of
from dispatch_trace.align.pairs import Pairing
from dispatch_trace.errors import DispatchTraceError
from dispatch_trace.execute_run import Execution
from dispatch_trace.processor import processor_name
from dispatch_trace.schema import StoredRecord

# A result is alone among those of one op on inputs of one form, if so many of them come back and only so
# large a share does not.
MIN_ALIKE = 3
MAX_SHARE = 0.25
# Where there are fewer: so many records of the program come back, so few do not. Where the processor or the
# settings may have been others, the error is also so much more than that of this machine's kernel (another
# sound kernel makes the same: 1.01 for two of GELU).
MIN_ANY = 20
MAX_ANY = 0.05
MARGIN = 1.5
# Ops that add up in the order in which threads come by (torch.use_deterministic_algorithms).
_UNORDERED = frozenset(
    [
        "_embedding_bag",
        "bincount",
        "embedding_dense_backward",
        "histc",
        "index_add",
        "index_copy",
        "index_put",
        "_index_put_impl",
        "_unsafe_index_put",
        "put",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    ]
)
# What else must be as it was for a kernel to be the same one: here, and in the reference.
_ENVIRONMENT = ("MKL_NUM_THREADS", "ONEDNN_DEFAULT_FPMATH_MODE")
_SETTINGS = ("num_threads", "onednn", "float32_matmul_precision", "deterministic", "environment")

Form: TypeAlias = tuple[Any, ...]


class Siblings:
    """The other results of a replay, by what decides which kernel makes them.

    From leaves alone nothing behind the first result that does not come back can be compared; there the
    reference's ops of one form, recorded under the same settings, stand beside those of the target.

    Args:
      pairing: the replayed target and its reference, which is replayed when it is asked for.
      odd: records of the target with a result that did not come back from right inputs.
      execution: of the replay.
    """

    def __init__(self, pairing: Pairing, odd: Iterable[StoredRecord], execution: Execution) -> None:
        self._pairing = pairing
        self._odd = Counter(form_of(record) for record in odd)
        self._back = _came_back(pairing.target, execution)
        self._execution = execution

    def figures(self, record: StoredRecord) -> dict[str, int]:
        """How many results of this form come back, and how many do not."""
        form = form_of(record)
        return {"others_equal": self._back[form], "others_differ": self._odd[form] - 1}

    def is_alone(self, record: StoredRecord, evidence: Mapping[str, Any]) -> bool:
        """Whether others of its form, else of the program, come back bit for bit and this does not.

        Args:
          evidence: local_error and native_error, where they could be measured.
        """
        name, form = short(record.op), form_of(record)
        if name in GATHERS - _UNORDERED:
            return True
        odd, back = self._odd[form], self._back[form]
        if back >= MIN_ALIKE:
            return odd <= MAX_SHARE * (odd + back)
        lone = name not in _UNORDERED and not self._is_another_kernel(record.overload)
        if lone and runs_here(self._pairing.target):
            known = self._of_ref[form]
            return known > 0 if form in self._of_ref else self._are_few()
        error, native = evidence.get("local_error", 0.0), evidence.get("native_error", math.inf)
        return self._are_few() and bool(error > MARGIN * native)

    def _is_another_kernel(self, overload: str) -> bool:
        """Whether no result of an op comes back, of several in whatever form.

        They then have a kernel of their own, or one that gives something else each time; a faulty one is told
        by its error.
        """
        odd = sum(count for form, count in self._odd.items() if form[0] == overload)
        return odd > 1 and not any(form[0] == overload for form in self._back)

    def _are_few(self) -> bool:
        ran = self._execution
        return ran.equal >= MIN_ANY and self._odd.total() <= MAX_ANY * ran.compared

    @cached_property
    def _of_ref(self) -> Counter[Form]:
        """How many results of each form came back in the reference; 0 for a form of which none did."""
        ref = self._pairing.ref
        if not runs_here(ref) or _settings(ref) != _settings(self._pairing.target):
            return Counter()
        execution = Execution()
        try:
            for _ in execute.replay(whole_of(ref.reader), execution=execution):
                pass
        except DispatchTraceError:  # it holds no data of leaves, or a shard that cannot be read
            return Counter()
        found = _came_back(ref, execution)
        for seq in {d.seq for d in execution.differing if d.why == "differs"}:
            if seq in ref.records:
                found[form_of(ref.records[seq])] += 0
        return found


def form_of(record: StoredRecord) -> Form:
    """What decides which kernel runs: the op, and shapes, strides and dtypes of what it reads."""
    inputs = [(s.name, s.shape, s.strides, s.dtype) for s in record.slots if s.role == "in" and s.is_tensor]
    return (record.overload, *inputs)


def runs_here(program: Program) -> bool:
    """Whether it ran eagerly on a processor like this one, so that its kernels are those of here.

    Other versions, capabilities and devices are told apart before (`execute.Difference.why`).
    """
    header = program.reader.header
    if header.get("lane") != "eager" or header.get("compile_backend"):
        return False
    recorded = header.get("environment") or {}
    same = all(recorded.get(name) == os.environ.get(name) for name in _ENVIRONMENT)
    return same and header.get("processor") == processor_name()


def _settings(program: Program) -> list[Any]:
    return [program.reader.header.get(name) for name in _SETTINGS]


def _came_back(program: Program, execution: Execution) -> Counter[Form]:
    odd = {d.seq for d in (*execution.differing, *execution.failed)}
    return Counter(form_of(r) for r in program.records.values() if r.kind == "op" and r.seq not in odd)


__all__ = ["Siblings", "runs_here"]
