"""What a hunt hands out: its rounds, and what they led to."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispatch_trace.alignment import Alignment
from dispatch_trace.judge.findings import Finding
from dispatch_trace.notebook import html_table
from dispatch_trace.programs import Run
from dispatch_trace.report.facts import jsonable
from dispatch_trace.report.table import module_name, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Both programs, recorded once and compared.

    Attributes:
      looked_at: "modules", "ops", "leaves" or "tensors".
      modules: paths of the target whose ops were recorded; empty for all.
      runs: of the reference and of the target.
      verdict: of the comparison, "" where there was none.
      said: its first finding, or what else came of it, in a line.
      seconds: of runs and comparison.
    """

    looked_at: str
    modules: tuple[str, ...]
    runs: tuple[Run, ...]
    verdict: str
    said: str
    seconds: float

    @property
    def num_bytes(self) -> int:
        return sum(run.num_bytes for run in self.runs)


@dataclass(slots=True, kw_only=True)
class Hunt:
    """What a hunt found.

    Attributes:
      verdict: "match", "diverged" or "inconclusive".
      alignment: the comparison that the verdict rests on; None where no two runs could be compared.
      rounds: in order.
      reasons: why the verdict is inconclusive.
      notices: what a reader should know besides.
      folder: where everything lies.
      report: the page; None where there is none. repro: the folder of the script, likewise.
      budget: bytes that the recordings were allowed.
      peak_bytes: what they took at most at one time.
      seconds: of everything.
    """

    verdict: str
    alignment: Alignment | None
    rounds: list[Round]
    reasons: list[str]
    notices: list[str]
    folder: Path
    report: Path | None = None
    repro: Path | None = None
    budget: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0

    @property
    def first(self) -> Finding | None:
        """The first fatal finding."""
        return None if self.alignment is None or self.verdict != "diverged" else self.alignment.first

    @property
    def num_runs(self) -> int:
        return sum(len(each.runs) for each in self.rounds)

    @property
    def bytes_written(self) -> int:
        """Of all recordings together, those that are gone included."""
        return sum(each.num_bytes for each in self.rounds)

    def table(self) -> str:
        """What was done, and the first screen of the comparison that decided."""
        from dispatch_trace.report.hunted import hunted

        return hunted(self)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """The same for programs; `alignment` as in docs/json.md.

        Args:
          path: also written there.
        """
        found: dict[str, Any] = jsonable(
            {
                "verdict": self.verdict,
                "rounds": [
                    {
                        "looked_at": each.looked_at,
                        "modules": each.modules,
                        "runs": [
                            {
                                "path": str(run.path),
                                "seconds": run.seconds,
                                "num_bytes": run.num_bytes,
                                "error": run.error,
                                "stopped": run.stopped,
                            }
                            for run in each.runs
                        ],
                        "verdict": each.verdict,
                        "said": each.said,
                        "seconds": each.seconds,
                    }
                    for each in self.rounds
                ],
                "reasons": self.reasons,
                "notices": self.notices,
                "folder": str(self.folder),
                "report": None if self.report is None else str(self.report),
                "repro": None if self.repro is None else str(self.repro),
                "num_runs": self.num_runs,
                "bytes_written": self.bytes_written,
                "peak_bytes": self.peak_bytes,
                "budget": self.budget,
                "seconds": self.seconds,
                "alignment": None if self.alignment is None else self.alignment.to_json(),
            }
        )
        if path is not None:
            Path(path).write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return found

    def __repr__(self) -> str:
        first = self.first
        where = f", {first.label} {module_name(first.module)} {first.op or ''}".rstrip() if first else ""
        return f"Hunt({self.verdict}{where}; {self.num_runs} runs, {size(self.bytes_written)})"

    def _repr_html_(self) -> str:
        rows = [
            [each.looked_at, ", ".join(each.modules) or "all", size(each.num_bytes), each.said]
            for each in self.rounds
        ]
        found = "" if self.alignment is None else self.alignment._repr_html_()
        return html_table(["looked at", "modules", "written", "said"], rows) + found


__all__ = ["Hunt", "Round"]
