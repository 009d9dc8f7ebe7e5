"""What a recording that nobody wrote into the program says at its end, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """The report of one process (`autostart`), a line for each thing to say.

    Args:
      report: plain values; `state` is "closed", "recording" (it never came to its end), "failed", "nothing",
        "no torch" or "child".
    """
    lines = []
    rank = f"rank {report['rank']}: " if report.get("rank") or report.get("world") else ""
    if report["state"] == "closed":
        models = report["models"]
        of = f" of {len(models)} models ({', '.join(models)})" if len(models) > 1 else ""
        lines.append(
            f"{rank}attached to {_many(report['modules'], 'module')}{of} and {_many(report['ops'], 'op')}; "
            f"wrote {_many(report['records'], 'record')} of {_many(report['steps'], 'step')} "
            f"to {report['path']}"
        )
        if report["without_steps"] and report["steps"]:
            lines.append(f"{rank}no step of {', '.join(report['without_steps'])} is among those asked for")
    if report.get("raised"):
        lines.append(f"{rank}the program raised {report['raised']}; what was recorded until then is kept")
    elif report.get("note"):
        lines.append(f"{rank}the program ended by {report['note']}; the trace was closed before")
    for fault in report.get("faults", ()):
        lines.append(f"{rank}the trace is INCOMPLETE, the recorder failed: {fault}")
    if report.get("error"):
        state = "nothing was recorded: " if report["state"] in ("nothing", "no torch", "failed") else ""
        lines.append(f"{rank}ERROR: {state}{report['error']}")
    return lines


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
