"""Random draws of a pass that is computed again for the backward: they must be those of the first pass.

Both passes are in one trace, so that no other run is asked whether they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dispatch_trace.schema import StoredContent, StoredRecord


def redrawn(records: Iterable[StoredRecord], content: Callable[[int], StoredContent]) -> frozenset[int]:
    """Recomputed random ops that draw other numbers than the same op of the forward pass did.

    Args:
      records: of one program, in order; content: what the trace says of a content, by number.
    Returns: their sequence numbers; without those whose draws were kept without a hash.
    """
    first: dict[tuple[object, ...], StoredRecord] = {}
    again: list[tuple[StoredRecord, StoredRecord]] = []
    for record in records:
        if record.kind != "op" or not record.random or record.grad_phase == "bwd":
            continue
        site = (record.step, record.model, record.module, record.call, record.op, record.n)
        if record.grad_phase == "fwd":
            first[site] = record
        elif site in first:
            again.append((first[site], record))

    def drawn(record: StoredRecord) -> list[str | None]:
        made = [s.content for s in record.slots if s.role != "in" and s.is_tensor]
        return [content(number).hash if number >= 0 else None for number in made]

    found = set()
    for before, after in again:
        hashes = drawn(before), drawn(after)
        if all(hashes[0]) and all(hashes[1]) and hashes[0] != hashes[1]:
            found.add(after.seq)
    return frozenset(found)
