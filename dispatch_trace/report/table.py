"""Pieces of text reports: columns, numbers, sizes and paths, made to fit a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 100


def columns(
    rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset(), indent: str = ""
) -> list[str]:
    """Aligns rows into columns, two spaces apart.

    Args:
      rows: cells, all rows equally long.
      right: numbers of the columns that are aligned to the right.
      indent: put in front of every line.
    """
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def number(value: object) -> str:
    """A figure in at most about ten characters: `1.3e-05`, `0.0142`, `12`, `nan`; `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**9 else f"{value:.3e}"
    return f"{value:.3g}"


def size(num_bytes: float) -> str:
    """Bytes for people: `812 B`, `1.4 KB`, `310 MB` (powers of 1024)."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 10 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TB"


def share(part: float) -> str:
    """A share in percent that never rounds up to 100: `99.9 %` is not everything."""
    if part >= 1:
        return "100 %"
    return f"{min(part * 100, 99.9):.1f} %"


def shorten(text: str, limit: int) -> str:
    """Cuts the middle out: both ends of a module path or file name tell more than its middle."""
    if len(text) <= limit:
        return text
    tail = (limit - 3) * 2 // 3
    return f"{text[: limit - 3 - tail]}...{text[-tail:]}"


def module_name(path: str) -> str:
    """A module's path as shown; the root's is empty, which nobody would see."""
    return path or "(root)"


def plural(count: int, noun: str) -> str:
    """`1 record`, `2 records`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def plain(text: str) -> str:
    """Without control characters: what a trace holds is data, and a terminal obeys escape sequences."""
    return "".join(char if char.isprintable() else "?" for char in text)
