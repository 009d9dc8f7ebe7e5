"""Finds what is to blame in programs too large to record whole: look coarsely, run again, look closer.

Rounds, each of which runs both programs once and records a little more of a lot less:

1. *modules*: what every module returned, by its statistics.
2. *ops*: every op of the modules that this puts under suspicion, by their statistics. Where nothing is found
   there, of all modules.
3. *tensors*: data of the ops that remain, so that they can be run again; the finding, the script that
   reproduces it and the page are made from this.

Guarantees: the recordings never take more room than the budget, and what does not fit is said; a program that
crashes, that differs from run to run or that shows no difference ends the hunt with that answer, never with a
guess. Each round is judged by the rules of `align` (docs/blame.md), later ones with the inputs of the modules
taken as given, because the round before has judged them.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dispatch_trace.align.pairs import Pair
from dispatch_trace.alignment import Alignment, align
from dispatch_trace.errors import ConfigError, DispatchTraceError, NotExecutableError, TraceExistsError
from dispatch_trace.hunt_places import Places, data_bytes
from dispatch_trace.hunt_result import Hunt, Round
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.reruns import first_change
from dispatch_trace.programs import FunctionProgram, Program, RandomState, Request, Run, size_on_disk
from dispatch_trace.report.table import module_name, size
from dispatch_trace.session import Trace

DEFAULT_BUDGET = 2 << 30
# What two runs of one program differ by must be this many times smaller than what is held against the target.
_REPEATABLE = 8.0
# Statistics of all ops take a few times what those of all modules take.
_OPS_PER_MODULE_BYTES = 6.0
# Beside the data itself: statistics, index.
_MARGIN = 1.1

Say = Callable[[str], None]


def hunt(
    ref: Callable[[], object],
    target: Callable[[], object],
    *,
    folder: str | os.PathLike[str] = "hunt",
    budget: int = DEFAULT_BUDGET,
    models: tuple[Any, Any] = (None, None),
    rename: Mapping[str, str] | Iterable[str] | str | None = None,
    declared: str | Iterable[str] | None = None,
    tolerance: float | None = None,
    overwrite: bool = False,
    progress: Say | None = None,
) -> Hunt:
    """Narrows a divergence down by running both programs again and again.

        found = dt.hunt(lambda: reference(x), lambda: port(x))
        print(found.table())

    Args:
      ref, target: run the trusted model, and the one under suspicion; called several times, each time with
        the random generators of Python, NumPy and torch in the same state. Whatever else they change
        (weights, caches) they must set back themselves.
      folder: for recordings, page and script.
      budget: bytes that the recordings may take at any time.
      models: what to record of each, as `model` of `dt.record`; None for the outermost module called.
      rename, declared, tolerance: as of `dt.align`.
      overwrite: empty the folder first, where it is an earlier hunt's.
      progress: called with a line at each step.

    Returns: always; a crash, a difference between runs or a budget that is too small are answers.
    Raises:
      TraceExistsError: the folder is not empty. ConfigError: an argument that cannot be.
      DispatchTraceError: as of `dt.record` and `dt.align`.
    """
    if not callable(ref) or not callable(target):
        raise ConfigError("hunt: expected two callables without arguments, the reference first.")
    state = RandomState()
    programs = (
        FunctionProgram("reference", ref, model=models[0], state=state),
        FunctionProgram("target", target, model=models[1], state=state),
    )
    try:
        return hunt_programs(
            programs,
            folder=folder,
            budget=budget,
            rename=rename,
            declared=declared,
            tolerance=tolerance,
            overwrite=overwrite,
            progress=progress,
        )
    finally:
        state.restore()


def hunt_programs(
    programs: tuple[Program, Program],
    *,
    folder: str | os.PathLike[str],
    budget: int = DEFAULT_BUDGET,
    rename: Any = None,
    declared: Any = None,
    tolerance: float | None = None,
    overwrite: bool = False,
    progress: Say | None = None,
) -> Hunt:
    """`hunt` for anything that can be recorded; arguments as there."""
    if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
        raise ConfigError(f"budget={budget!r}: expected a number of bytes above 0.")
    where = _empty_folder(Path(folder), overwrite)
    options = {"declared": declared, "tolerance": tolerance}
    search = _Search(programs, where, budget, rename, options, progress or (lambda line: None))
    return search.run()


def _empty_folder(folder: Path, overwrite: bool) -> Path:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"hunt: {folder} is a file; a folder is wanted.")
    if folder.is_dir() and any(folder.iterdir()):
        if not overwrite or not (folder / _MARKER).exists():
            what = (
                "overwrite=True (--overwrite) replaces it"
                if (folder / _MARKER).exists()
                else "choose another"
            )
            raise TraceExistsError(f"hunt: the folder {folder} is not empty; {what}.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).write_text("made by a hunt of dispatch_trace; may be deleted\n", encoding="utf-8")
    return folder


_MARKER = "hunt.txt"


class _Stop(Exception):
    """The hunt ends here, and why."""


@dataclass(slots=True)
class _Search:
    """One hunt.

    Attributes:
      programs: reference and target.
      places: what the round of modules knew of steps and paths.
      rounds, notices: so far.
      latest: the last comparison.
    """

    programs: tuple[Program, Program]
    folder: Path
    budget: int
    rename: Any
    options: dict[str, Any]
    say: Say
    rounds: list[Round] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    latest: Alignment | None = None
    places: Places | None = None
    peak: int = 0
    steps: frozenset[int] | None = None

    def run(self) -> Hunt:
        started = time.perf_counter()
        reasons: list[str] = []
        verdict = "inconclusive"
        try:
            verdict = self._narrow()
        except _Stop as stop:
            reasons.append(str(stop))
        found = self.latest
        if verdict == "inconclusive" and not reasons and found is not None:
            reasons += found.reasons or ["neither a match nor a divergence could be shown"]
        result = Hunt(
            verdict=verdict,
            alignment=found,
            rounds=self.rounds,
            reasons=reasons,
            notices=self.notices,
            folder=self.folder,
            budget=self.budget,
            peak_bytes=self.peak,
        )
        self._write(result)
        result.seconds = time.perf_counter() - started
        return result

    # Rounds -----------------------------------------------------------------------------------------

    def _narrow(self) -> str:
        """The verdict; what it rests on is `latest`."""
        everything = self._modules()
        if _equal_throughout(everything):
            self.notices.append("what modules returned is equal bit for bit: there is nothing to narrow down")
            return everything.verdict
        places = self.places = Places(everything)
        suspects = places.suspects()
        looked: set[tuple[str, ...]] = set()
        refuted: list[str] = []
        handed: Alignment | None = None
        for modules in [*suspects, ()]:
            if modules in looked or (not modules and not self._fits_all_ops(everything, bool(suspects))):
                continue
            looked.add(modules)
            ops = self._look("ops", "stats", modules)
            self._check_repeats(ops)
            held = ops.first
            if held is None and modules and everything.first is not None:
                held = next(iter(ops.findings), None)  # its statistics raise a suspicion: data may settle it
            if held is None:
                continue
            found = self._tensors(ops, held, modules)
            if ops.first is not None and (found is None or found.first is not None):
                if modules and _was_handed(ops if found is None else found):
                    handed = self.latest
                    continue
                return "diverged"
            if found is not None and found.first is not None:
                return "diverged"
            if ops.first is None:
                continue
            refuted.append(
                f"{ops.first.label} in {module_name(ops.first.module)}, which the statistics showed, is not "
                "confirmed by running its ops again"
            )
            self.notices.append(refuted[-1])
        if handed is not None:
            self.latest = handed
            self.notices.append(
                "what the module was handed is wrong already, and nothing around it that was looked at is "
                "to blame"
            )
            return "diverged"
        if refuted:
            raise _Stop(refuted[0])
        return self._nothing_found(everything)

    def _modules(self) -> Alignment:
        """The first round; where many steps are too large for the budget, of the first step alone."""
        try:
            return self._look("modules", "stats", ())
        except _Stop:
            stopped = [run for run in self.rounds[-1].runs if run.stopped]
            if not stopped or len(Trace(stopped[0].path).steps) < 2:
                raise
        self.notices.append(
            "only the first step is looked at: all steps take more room than the budget leaves"
        )
        self.steps = frozenset([0])
        return self._look("modules", "stats", ())

    def _tensors(self, ops: Alignment, finding: Finding, modules: tuple[str, ...]) -> Alignment | None:
        """Data of what is to blame; None where it does not fit, and the statistics have to do."""
        assert self.places is not None
        needed = 0
        for path in self.places.contexts(finding.module, modules):
            for save in ("tensors", "leaves"):
                sides = [self.places.ref_path(path), path]
                readers = [_reader(run) for run in self.rounds[-1].runs]
                needed = int(
                    sum(data_bytes(r, p, save) for r, p in zip(readers, sides, strict=True)) * _MARGIN
                )
                if needed <= self._left():
                    return self._look(save, save, (path,), finding.step)
        self.notices.append(
            f"no data was kept: that of {module_name(finding.module)} takes {size(needed)}, and "
            f"{size(self._left())} of the budget of {size(self.budget)} are left: statistics have to do"
        )
        return None

    def _nothing_found(self, everything: Alignment) -> str:
        """No op is wrong by its statistics: what both programs say in float64, where their leaves fit."""
        latest = self.latest
        assert latest is not None and self.places is not None
        if self.rounds[-1].looked_at == "ops" and not self.rounds[-1].modules:
            readers = [_reader(run) for run in self.rounds[-1].runs]
            needed = int(sum(data_bytes(reader, "", "leaves") for reader in readers) * _MARGIN)
            if needed <= self._left():
                found = self._look("leaves", "leaves", ())
                return found.verdict
            self.notices.append(
                f"both programs were not run again in float64, which needs their leaves ({size(needed)}; "
                f"{size(self._left())} of the budget are left): what hides below the noise was not looked for"
            )
        if everything.verdict == "diverged":
            raise _Stop("the modules' statistics show a divergence that no op's statistics confirm")
        return latest.verdict if latest.verdict != "diverged" else "inconclusive"

    # One round --------------------------------------------------------------------------------------

    def _look(
        self, looked_at: str, save: str, modules: tuple[str, ...], step: int | None = None
    ) -> Alignment:
        """Records both programs and compares them.

        Raises:
          _Stop: there is nothing to compare.
        """
        started = time.perf_counter()
        number = len(self.rounds) + 1
        names = ", ".join(map(module_name, modules)) or "all modules"
        what = names if looked_at == "modules" else f"{looked_at} of {names}"
        runs: list[Run] = []
        try:
            for side, program in enumerate(self.programs):
                self.say(f"round {number}: {what}: running the {program.name}")
                path = self.folder / f"{number}-{looked_at}" / f"{'target' if side else 'ref'}.trace"
                request = self._request(looked_at, save, modules, side, step)
                left = self._left()
                run = program.record(path, request, left if side else left // 2)
                runs.append(run)
                self.peak = max(self.peak, size_on_disk(self.folder))
                self._check_run(run, program)
            self.say(f"round {number}: {what}: comparing")
            found = align(
                runs[0].path,
                runs[1].path,
                rename=self._renames(looked_at, modules),
                given_inputs=looked_at != "modules" and bool(modules),
                **self.options,
            )
        except _Stop as stop:
            self._add(
                Round(
                    looked_at=looked_at,
                    modules=modules,
                    runs=tuple(runs),
                    verdict="",
                    said=str(stop),
                    seconds=time.perf_counter() - started,
                )
            )
            raise
        self.latest = found
        first = found.first
        said = "no difference beyond noise" if first is None else _place(first)
        self._add(
            Round(
                looked_at=looked_at,
                modules=modules,
                runs=tuple(runs),
                verdict=found.verdict,
                said=said,
                seconds=time.perf_counter() - started,
            )
        )
        return found

    def _add(self, done: Round) -> None:
        self.rounds.append(done)
        number = len(self.rounds)
        what = f"{done.verdict}: {done.said}" if done.verdict else done.said
        self.say(f"round {number}: {what} ({size(done.num_bytes)}, {done.seconds:.1f} s)")

    def _request(
        self, looked_at: str, save: str, modules: tuple[str, ...], side: int, step: int | None
    ) -> Request:
        places = self.places
        steps = self.steps
        if places is not None and modules and steps is None:
            steps = places.steps(modules, step, side)
        paths = modules if side or places is None else tuple(places.ref_path(path) for path in modules)
        return Request(
            level="module" if looked_at == "modules" else "op",
            save=save,
            select=() if "" in paths else tuple(re.escape(path) for path in paths),
            steps=steps,
        )

    def _renames(self, looked_at: str, modules: tuple[str, ...]) -> Any:
        """The user's rules for whole recordings; for parts of them what those led to."""
        if self.places is None or not modules:
            return self.rename
        return self.places.renames(modules) or None

    def _check_run(self, run: Run, program: Program) -> None:
        """What went wrong with a run.

        Raises:
          _Stop: it is of no use.
        """
        if run.stopped:
            raise _Stop(
                f"the budget of {size(self.budget)} is too small: recording the {program.name} had written "
                f"{size(run.num_bytes)} and was not at its end"
            )
        if run.error:
            notice = f"the {program.name} ended with {run.error}"
            try:
                usable = program.name != "reference" and Trace(run.path).num_records > 0
            except DispatchTraceError:
                usable = False
            if not usable:
                raise _Stop(notice)
            if notice not in self.notices:
                self.notices.append(f"{notice}; what it had done until then is compared")

    def _left(self) -> int:
        return self.budget - size_on_disk(self.folder)

    def _fits_all_ops(self, everything: Alignment, narrowed: bool) -> bool:
        """Whether statistics of all ops can be expected to fit."""
        needed = int(self.rounds[0].num_bytes * _OPS_PER_MODULE_BYTES)
        if needed <= self._left():
            return True
        self.notices.append(
            f"the ops of all modules were not looked at: their statistics take about {size(needed)}, and "
            f"{size(self._left())} of the budget are left"
        )
        return False

    def _check_repeats(self, ops: Alignment) -> None:
        """Whether this round's runs gave what the first round's gave.

        Raises:
          _Stop: the runs of a program differ by about as much as the programs do.
        """
        held = _largest_error(ops)
        for before, again, program in zip(
            self.rounds[0].runs, self.rounds[-1].runs, self.programs, strict=True
        ):
            change = first_change(_reader(before), _reader(again))
            if change is None:
                continue
            said = f"two runs of the {program.name} differ, first in {change}"
            if said not in self.notices:
                self.notices.append(said)
            if change.error * _REPEATABLE > held:
                raise _Stop(
                    f"{said}: a program that differs from run to run cannot be narrowed down. Seed it, and "
                    "see torch.use_deterministic_algorithms"
                )

    # The end ----------------------------------------------------------------------------------------

    def _write(self, found: Hunt) -> None:
        """Page and script, and what only the way there needed goes."""
        alignment = found.alignment
        if alignment is None:
            return
        kept = {Path(alignment.ref).parent, Path(alignment.target).parent}
        for child in self.folder.iterdir():
            if child.is_dir() and child not in kept and re.fullmatch(r"\d+-\w+", child.name):
                if any(run.path.parent == child for run in self.rounds[0].runs):
                    continue  # the overview of all modules is small, and worth a look
                shutil.rmtree(child)
        alignment.notices.extend(n for n in found.notices if n not in alignment.notices)
        found.report = self.folder / "report.html"
        alignment.to_html(found.report)
        if found.verdict == "diverged":
            try:
                alignment.repro(self.folder / "repro")
                found.repro = self.folder / "repro"
            except NotExecutableError as error:
                found.notices.append(f"no script was written: {error}")


def _reader(run: Run) -> Any:
    return Trace(run.path).ranks[0]


def _place(finding: Finding) -> str:
    return f"{finding.label} {module_name(finding.module)} {finding.op or ''}".rstrip()


def _was_handed(found: Alignment) -> bool:
    """Whether a comparison of some modules ends at what they were handed: then the fault lies around them."""
    first = found.first
    return first is not None and first.label in ("argument", "wiring") and first.op is None


def _equal_throughout(found: Alignment) -> bool:
    """Whether every result is the same to the last bit."""
    matched = [p for p in found.pairs if p.outcome == "matched"]
    return found.verdict == "match" and bool(matched) and all(_is_equal(pair) for pair in matched)


def _is_equal(pair: Pair) -> bool:
    return pair.error == 0.0 or pair.error is None


def _largest_error(found: Alignment) -> float:
    """What is held against the target: the error of its finding, else of what is farthest off."""
    if found.first is not None:
        error = found.first.evidence.get("error")
        if isinstance(error, (int, float)) and not math.isnan(error):
            return float(error)
        return math.inf
    return max((pair.error for pair in found.pairs if pair.error is not None), default=0.0)


__all__ = ["DEFAULT_BUDGET", "Hunt", "Round", "hunt", "hunt_programs"]
