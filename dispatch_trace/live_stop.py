"""What happens at a divergence that is found while the program runs: noted, raised, handed over, or debugged.

The debugger stands in the user's own frame, in the middle of the line that computed the value; `up` and
`down` walk the user's stack, and `divergence` is a name at its prompt.
"""

from __future__ import annotations

import bdb
import os
import pdb
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from dispatch_trace.capture.sources import is_internal
from dispatch_trace.errors import ConfigError
from dispatch_trace.judge.findings import Finding
from dispatch_trace.report.table import module_name, number

NAME = "divergence"


@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """The running program parts from the reference.

    Attributes:
      finding: where, and by how much; `finding.judge` is "live".
      output: the value, as it was made.
      expected: the reference's, None where its trace holds no data.
      operands: the op's arguments, or what the module was called with; the program's own tensors.
      late: it began earlier, at `finding`, and only what a module around it returned made it certain.
    """

    finding: Finding
    output: torch.Tensor | None = None
    expected: torch.Tensor | None = None
    operands: dict[str, Any] = field(default_factory=dict)
    late: str = ""

    def __str__(self) -> str:
        found = self.finding
        error, band = found.evidence.get("error"), found.evidence.get("band")
        where = f"{module_name(found.module)} {found.op or ''}".rstrip()
        return (
            f"{found.label}: {where} (step {found.step}) is off by {number(error)}, noise is {number(band)}"
            + (f"; {found.source}" if found.source else "")
            + (f"; certain since {self.late} returned" if self.late else "")
        )


Action = Callable[[Divergence], object]


def action_of(on_divergence: Any) -> str | Action:
    """Checks `on_divergence`.

    Raises:
      ConfigError: it is neither one of the words nor callable.
    """
    if on_divergence in ("note", "raise", "break") or callable(on_divergence):
        checked: str | Action = on_divergence
        return checked
    raise ConfigError(
        f"on_divergence={on_divergence!r}: expected 'note', 'raise', 'break' or a callable that takes what "
        "was found."
    )


def user_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def stop_here(divergence: Divergence) -> None:
    """Opens the debugger in the user's frame.

    Where the user has a debugger of his own (`sys.breakpointhook`, PYTHONBREAKPOINT) that one is called; it
    stands a few frames below the user's.

    Raises:
      bdb.BdbQuit: the user typed `q`.
    """
    frame = user_frame()
    own = sys.breakpointhook is not sys.__breakpointhook__ or os.environ.get("PYTHONBREAKPOINT")
    if own or frame is None:
        breakpoint()
        return
    debugger = _Debugger(divergence)
    debugger.stop_in(frame)


class _Debugger(pdb.Pdb):
    def __init__(self, divergence: Divergence) -> None:
        super().__init__(nosigint=True)
        self._divergence = divergence

    def stop_in(self, frame: FrameType) -> None:
        """A prompt in the middle of a line of `frame`; `c`, `n`, `s` and `q` do what they always do."""
        self.message(f"dispatch_trace: {self._divergence}")
        self.message(f"Its values: {NAME}.output, {NAME}.expected, {NAME}.operands.")
        self.reset()
        spaces: list[dict[str, Any]] = []
        walked: FrameType | None = frame
        while walked is not None:
            walked.f_trace = self.trace_dispatch
            self.botframe = walked
            if not is_internal(walked.f_code.co_filename) and NAME not in walked.f_globals:
                spaces.append(walked.f_globals)
                walked.f_globals[NAME] = self._divergence
            walked = walked.f_back
        self.set_step()
        try:
            self.interaction(frame, None)
        finally:
            for names in spaces:
                names.pop(NAME, None)
        if self.quitting:
            raise bdb.BdbQuit
        if self.stopframe is not self.botframe or self.breaks:
            sys.settrace(self.trace_dispatch)


def operands_here() -> dict[str, Any]:
    """The arguments of the op or call that is being recorded: they stand in the recorder's own frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_internal(frame.f_code.co_filename):
        names = frame.f_locals
        if "args" in names and "kwargs" in names and isinstance(names["args"], tuple):
            schema = getattr(names.get("info"), "names", [])
            first = list(zip(schema, names["args"], strict=False)) if schema else enumerate(names["args"])
            return {**{str(name): value for name, value in first}, **(names["kwargs"] or {})}
        frame = frame.f_back
    return {}


__all__ = ["Divergence", "action_of", "operands_here", "stop_here"]
