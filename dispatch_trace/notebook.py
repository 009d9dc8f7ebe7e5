"""Small HTML tables, as notebooks show them (`_repr_html_`)."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any


def html_table(headings: list[str], rows: list[list[Any]]) -> str:
    """A table; every cell is escaped."""

    def cells(row: Iterable[Any], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)

    head = f"<thead><tr>{cells(headings, 'th')}</tr></thead>" if any(headings) else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table>{head}<tbody>{body}</tbody></table>"


def brief(value: Any) -> Any:
    """A number at four digits, as a reader compares them; anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else value
