"""A rank each of whose records and contents stands for itself.

Where steps repeat (`align.repeated`), one record stands for one in each step, and so do contents: who reads a
rank asks these methods, and all ranks but that view answer so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from dispatch_trace.schema import StoredRecord, StoredSlot

if TYPE_CHECKING:
    from dispatch_trace.per_step import Together
    from dispatch_trace.store.mapped import Mapped
    from dispatch_trace.store.table import ContentTable, StepContents


class Singly:
    """What readers of ranks share, and what those of other things than a rank's files are not asked for.

    Attributes:
      reads_across: steps that repeat read what other steps made (`sources`).
      content_table: all contents, where steps repeat.
    """

    reads_across = False
    content_table: ContentTable | None = None

    def mapped(self, id: int) -> Mapped | None:
        """The data of a content as it lies in a file; None where it does not lie there as it is."""
        return None

    def together(self, id: int) -> Together | None:
        """The steps that the number of a content stands for; None where it is that of one content."""
        return None

    def per_step(self, id: int, steps: Together) -> StepContents:
        """The content of each step that a number stands for, or the one content for each of them."""
        raise NotImplementedError

    def chosen(self, first: int, second: int, where: npt.NDArray[Any], steps: Together) -> int:
        """A number for the contents behind the second of two numbers in some steps, else behind the first.

        Args:
          where: [num steps] bool, the second's steps.
        """
        raise NotImplementedError

    @property
    def is_astray(self) -> bool:
        """Whether some of the steps that stand for each other do not go the way of the first."""
        return False

    @property
    def unfolded(self) -> Any:
        """The rank with all its steps."""
        return self

    def in_step(self, record: StoredRecord, position: int) -> StoredRecord:
        """The record that one stands for in one of the steps that repeat, 0 for the first."""
        return record

    def lose(self, record: StoredRecord) -> None:
        """Notes that each of the steps that a record stands for has something of its own to say of it."""

    def doubt(self, record: StoredRecord) -> None:
        """Notes that what a record of steps that repeat made may be wrong, and so what others read of it."""

    def lose_readers(self, record: StoredRecord, slot: StoredSlot, source: tuple[int, int]) -> None:
        """Notes that one of `sources` is not as it was taken to be, for the steps that read it."""

    def sources(self, record: StoredRecord, slot: StoredSlot) -> Sequence[tuple[int, int]]:
        """What other steps made of what a slot of steps that repeat reads, by (record, slot) that show."""
        return ()

    def handed(self, record: StoredRecord, slot: StoredSlot) -> Mapping[tuple[int, int], npt.NDArray[Any]]:
        """`sources`, each with [n, 2], positions of the steps that read it, in order, and of those that made
        what they read; -1 where one stands for itself."""
        return {}

    def joined(self, record: StoredRecord) -> Together | None:
        """The steps that a record stands for; None where it stands for itself."""
        return None

    def turns(self) -> Sequence[tuple[int, Together, int]]:
        """Of all steps that stand for each other, in order: the number of the first record, with whom and at
        which position."""
        return ()

    def run_of(self, record: StoredRecord, position: int) -> int:
        """Which run of neighbours one of the steps that a record stands for is in; -1 where it stands for
        itself."""
        return -1

    def num_runs(self, record: StoredRecord) -> int:
        """How many such runs there are; 0 where a record stands for itself."""
        return 0

    def repeats(self, record: StoredRecord) -> int:
        """How many records, one in each step, a record stands for."""
        return 1


__all__ = ["Singly"]
