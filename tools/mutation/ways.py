"""Ways to put a case of the bench to the package: two recordings aligned, the hunt, live comparison."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dispatch_trace as dt
from dispatch_trace.hunt import hunt_programs
from dispatch_trace.programs import FunctionProgram, Program, RandomState, Request, Run

from .cases import Subject, Which


class _Surrounded:
    """One of a case's programs; what surrounds it is entered outside the recorder: kernels lie below it."""

    def __init__(self, subject: Subject, which: Which, model: Any) -> None:
        self.name: str = which
        self._which = which
        self._subject = subject
        call = functools.partial(subject.call, which)
        self._inner = FunctionProgram(which, call, model=model, state=RandomState())

    def record(self, path: Path, request: Request, max_bytes: int) -> Run:
        with self._subject.surrounded(self._which):
            return self._inner.record(path, request, max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a case.

    Attributes:
      verdict, findings: as of an alignment; live comparison knows no "inconclusive".
      first: the finding that it was told by, if any.
      target: trace whose records the findings number.
      runs, written_bytes: how often a program ran, and what all recordings took.
      late: live: where it became certain; "" at once.
    """

    verdict: str
    findings: Sequence[Any]
    first: Any = None
    target: Path | None = None
    runs: int = 2
    written_bytes: int = 0
    late: str = ""


def record_pair(subject: Subject, directory: Path, save: str) -> tuple[Path, Path]:
    """Records both models of a case; returns the paths of the two traces."""
    return _record(subject, "reference", directory, save), _record(subject, "target", directory, save)


def align_pair(subject: Subject, directory: Path, save: str, *, twins: bool | None = None) -> Answer:
    """Records both models and aligns the recordings."""
    ref, target = record_pair(subject, directory, save)
    found = dt.align(ref, target, twins=twins)
    return Answer(verdict=found.verdict, findings=found.findings, first=found.first, target=target)


def live_pair(subject: Subject, directory: Path) -> Answer:
    """Records the reference by its statistics, and the target against it."""
    ref = _record(subject, "reference", directory, "stats")
    target = directory / "live.trace"
    with (
        subject.surrounded("target"),
        dt.record(
            target, subject.target, against=ref, on_divergence=lambda found: None, overwrite=True
        ) as rec,
    ):
        subject.call("target", rec.step)
    findings = [each.finding for each in rec.divergences]
    return Answer(
        verdict="diverged" if findings else "match",
        findings=findings,
        first=next(iter(findings), None),
        target=target,
        late=rec.divergences[0].late if findings else "",
    )


def hunt_pair(subject: Subject, directory: Path) -> Answer:
    """Lets the hunt record for itself, as a user does who has both programs and no recording.

    A program under the hunt is not told of steps: cases of several requests pair by number.
    """
    programs: tuple[Program, Program] = (
        _Surrounded(subject, "reference", subject.reference),
        _Surrounded(subject, "target", subject.target),
    )
    found = hunt_programs(programs, folder=directory / "hunt", overwrite=True)
    last = found.alignment
    return Answer(
        verdict=found.verdict,
        findings=[] if last is None else last.findings,
        first=found.first,
        target=None if last is None else Path(last.target),
        runs=found.num_runs,
        written_bytes=found.bytes_written,
    )


def _record(subject: Subject, which: Which, directory: Path, save: str) -> Path:
    path = directory / f"{'ref' if which == 'reference' else 'target'}-{save}.trace"
    model = subject.reference if which == "reference" else subject.target
    with subject.surrounded(which), dt.record(path, model, save=save, overwrite=True) as rec:
        subject.call(which, rec.step)
    return path
