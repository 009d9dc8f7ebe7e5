"""The curve of error over depth, drawn with matplotlib: the report's first picture, elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dispatch_trace.align.pairs import Pair
from dispatch_trace.errors import ConfigError
from dispatch_trace.judge.findings import Finding, row_of
from dispatch_trace.report.table import module_name, plain, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_TICKS = 16


def error_curve(
    pairs: Sequence[Pair],
    findings: Sequence[Finding],
    *,
    title: str = "",
    path: str | os.PathLike[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the error of every compared pair, in execution order, over the band of what noise explains.

    What agrees bit for bit stands on the lowest line, because a logarithm has no zero.

    Raises:
      ConfigError: matplotlib is not installed, or no pair was compared.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError(f"plot needs matplotlib ({error}): pip install 'dispatch-trace[plot]'.") from error
    shown = _computed(pairs)
    if not shown:
        raise ConfigError("plot: no pair of this alignment was compared, so there is no curve.")
    errors = [float(pair.error or 0.0) for pair in shown]
    bands = [pair.band for pair in shown]
    floor = _floor([*errors, *(band for band in bands if band)])
    depth = range(len(shown))
    if ax is None:
        _, ax = pyplot.subplots(figsize=(9, 4), layout="constrained")
    top = [max(band or 0.0, floor) for band in bands]
    ax.fill_between(
        depth, floor, top, step="mid", color="tab:gray", alpha=0.25, label="noise band", linewidth=0
    )
    ax.plot(
        depth,
        [max(e, floor) for e in errors],
        color="tab:blue",
        linewidth=1,
        marker=".",
        markersize=3,
        label="error",
    )
    for finding in findings:
        at = row_of(shown, finding)
        if at is not None:
            _mark(ax, at, max(errors[at], floor), finding, first=finding is findings[0])
    ax.set_yscale("log")
    ax.set_ylim(bottom=floor)
    ax.set_xlim(-0.5, len(shown) - 0.5)
    ax.set_ylabel("relative L2 error")
    ax.set_xlabel("execution order")
    _ticks(ax, shown)
    ax.set_title(plain(title), loc="left", fontsize="medium")
    ax.legend(loc="upper left", frameon=False, fontsize="small")
    if path is not None:
        ax.get_figure(root=True).savefig(path, dpi=150)  # type: ignore[union-attr]
    return ax


def _computed(pairs: Sequence[Pair]) -> list[Pair]:
    """What was computed and compared; where bands are known, only what has one: a module returns what an op
    in it made, and would stand there twice."""
    compared = [p for p in pairs if p.error is not None and (p.target or p.ref).kind != "param"]  # type: ignore[union-attr]
    return [pair for pair in compared if pair.band is not None] or compared


def _floor(values: Sequence[float]) -> float:
    """Below all that is not zero, a power of ten."""
    least = min((v for v in values if 0 < v < float("inf")), default=1e-7)
    power = 1.0
    while power >= least:
        power /= 10
    return power


def _mark(ax: Axes, at: int, error: float, finding: Finding, *, first: bool) -> None:
    """A finding; only the first is named, the others would hide it."""
    ax.plot(
        [at], [error], marker="v" if finding.fatal else "o", color="tab:red", markersize=9 if first else 5
    )
    if first:
        name = shorten(
            plain(f"{finding.label}: {module_name(finding.module)} {finding.op or ''}".rstrip()), 60
        )
        left = at > ax.get_xlim()[1] / 2
        ax.annotate(
            name,
            (at, error),
            xytext=(-10 if left else 10, 12),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize="small",
        )


def _ticks(ax: Axes, shown: Sequence[Pair]) -> None:
    """Ticks where another module begins, at the depth of the tree that gives at most `MAX_TICKS`."""
    paths = [(pair.target or pair.ref).module.split(".") for pair in shown]  # type: ignore[union-attr]
    best: list[tuple[int, str]] = []
    for level in range(1, max(map(len, paths)) + 1):
        starts: list[tuple[int, str]] = []
        for number, parts in enumerate(paths):
            name = ".".join(parts[:level])
            if not starts or starts[-1][1] != name:
                starts.append((number, name))
        named = list(dict((name, at) for at, name in reversed(starts)).items())
        if len(named) > MAX_TICKS:
            break
        best = [(at, name) for name, at in named]
    best.sort()
    ax.set_xticks([at for at, _ in best], [shorten(plain(module_name(n)), 24) for _, n in best])
    ax.tick_params(axis="x", labelrotation=40, labelsize="x-small")
    for label in ax.get_xticklabels():
        label.set_horizontalalignment("right")
