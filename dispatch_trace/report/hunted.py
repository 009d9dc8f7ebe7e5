"""A hunt on one screen: what was run and written in each round, and the first screen of what decided."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from dispatch_trace.report import text
from dispatch_trace.report.table import WIDTH, columns, module_name, plain, plural, shorten, size


class RoundLike(Protocol):
    """As `hunt.Round`."""

    @property
    def looked_at(self) -> str: ...
    @property
    def modules(self) -> Sequence[str]: ...
    @property
    def runs(self) -> Sequence[Any]: ...
    @property
    def verdict(self) -> str: ...
    @property
    def said(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class HuntLike(Protocol):
    """As `hunt.Hunt`."""

    verdict: str
    reasons: list[str]
    notices: list[str]
    report: Path | None
    repro: Path | None
    budget: int
    peak_bytes: int
    seconds: float

    @property
    def alignment(self) -> Any: ...
    @property
    def rounds(self) -> Sequence[RoundLike]: ...
    @property
    def num_runs(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...


def hunted(found: HuntLike) -> str:
    """The rounds, then the comparison that decided."""
    lines = [
        f"HUNT  {found.verdict} after {plural(len(found.rounds), 'round')}, {plural(found.num_runs, 'run')}, "
        f"{found.seconds:.1f} s; {size(found.bytes_written)} written, at most {size(found.peak_bytes)} of "
        f"{size(found.budget)} at a time",
        *_rounds(found.rounds),
    ]
    lines += [f"because   {shorten(reason, WIDTH - 10)}" for reason in found.reasons]
    lines += [f"notice    {shorten(n, 3 * WIDTH)}" for n in found.notices if n not in found.reasons]
    if found.report is not None:
        lines.append(f"report    {found.report}")
    if found.repro is not None:
        lines.append(f"repro     {found.repro}")
    shown = "\n".join(plain(line) for line in lines)
    alignment = found.alignment
    if alignment is None:
        return shown
    return f"{shown}\n\n{text.alignment(alignment, ref=alignment.ref, target=alignment.target)}"


def _rounds(rounds: Sequence[RoundLike]) -> list[str]:
    rows = [["", "kept of", "written", "time", "said"]]
    for number, each in enumerate(rounds, 1):
        names = ", ".join(map(module_name, each.modules)) or "all modules"
        what = (
            "all modules: statistics" if each.looked_at == "modules" else _WHAT[each.looked_at].format(names)
        )
        said = f"{each.verdict}: {each.said}" if each.verdict else each.said
        rows.append([str(number), shorten(what, 44), size(each.num_bytes), f"{each.seconds:.1f} s", said])
    return [line[: 2 * WIDTH] for line in columns(rows, indent="  ", right=frozenset({2, 3}))]


_WHAT = {
    "ops": "{}: statistics of ops",
    "leaves": "{}: leaves of ops",
    "tensors": "{}: tensors of ops",
}

__all__ = ["hunted"]
