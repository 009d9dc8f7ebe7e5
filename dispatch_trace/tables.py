"""Rows that a session prints: as columns in a terminal, as a table in a notebook, as a data frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from dispatch_trace.notebook import html_table
from dispatch_trace.report.table import columns, number, plain, plural

if TYPE_CHECKING:
    import pandas

Item = TypeVar("Item")

SHOWN = 40


class Table(Sequence[Item], Generic[Item]):
    """A list that prints as a table; at most `SHOWN` rows are shown, all are there.

    Args:
      items: the rows.
      cells: what stands in a row, by heading; the same headings for all.
      frame: what a data frame holds of a row; None: its cells.
      title: a line above the rows.
    """

    def __init__(
        self,
        items: Iterable[Item],
        cells: Callable[[Item], dict[str, Any]],
        *,
        frame: Callable[[Item], dict[str, Any]] | None = None,
        title: str = "",
    ) -> None:
        self._items = list(items)
        self._cells = cells
        self._frame = frame or cells
        self.title = title

    @overload
    def __getitem__(self, at: int) -> Item: ...
    @overload
    def __getitem__(self, at: slice) -> Table[Item]: ...
    def __getitem__(self, at: int | slice) -> Item | Table[Item]:
        if isinstance(at, slice):
            return Table(self._items[at], self._cells, frame=self._frame, title=self.title)
        return self._items[at]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def to_pandas(self) -> pandas.DataFrame:
        """One row an item. Needs pandas."""
        import pandas

        return pandas.DataFrame([self._frame(item) for item in self._items])

    def __repr__(self) -> str:
        shown = [self._cells(item) for item in self._items[:SHOWN]]
        lines = [self.title] if self.title else []
        if shown:
            figures = {
                i for i, value in enumerate(shown[0].values()) if isinstance(value, int | float | None)
            }
            rows = [
                list(shown[0]),
                *([plain(_text(value)) for value in cells.values()] for cells in shown),
            ]
            lines += columns(rows, right=frozenset(figures))
        return "\n".join([*lines, *self._rest(len(shown))])

    def _repr_html_(self) -> str:
        shown = [self._cells(item) for item in self._items[:SHOWN]]
        table = html_table(list(shown[0]), [list(map(_text, c.values())) for c in shown]) if shown else ""
        heading, rest = html_table([self.title], []) if self.title else "", self._rest(len(shown))
        return heading + table + "".join(html_table([line], []) for line in rest)

    def _rest(self, shown: int) -> list[str]:
        if not self._items:
            return ["nothing"]
        left = len(self._items) - shown
        return [f"... and {plural(left, 'row')} more"] if left else []


def _text(value: Any) -> str:
    return "" if value is None else number(value)


__all__ = ["Table"]
