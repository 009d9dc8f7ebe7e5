"""What a module of the target must have read, where the target recorded no inputs: the reference knows.

A dump of module outputs has no data flow of its own. Its values stand for values of the reference, and
between those the reference's ops lead from one to the next. Where the reference has no ops either, equal
contents of what modules return and take do. What neither tells counts as read: rather too much than a
module blamed for what it was given.
"""

from __future__ import annotations

from collections import defaultdict

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.graph import Call, Value
from dispatch_trace.align.pairs import Link, Pairing
from dispatch_trace.schema import StoredRecord, StoredSlot


def has_inputs(record: StoredRecord) -> bool:
    return any(slot.role == "in" for slot in record.slots)


class Flow:
    """Values of the target that come before others, by the reference's data flow."""

    def __init__(self, pairing: Pairing) -> None:
        self._pairing = pairing
        self._ref = pairing.ref
        self._has_ops = any(record.kind == "op" for record in pairing.ref.records.values())
        self._before: dict[Value, list[Value]] = {}
        self._returned: dict[int, list[Value]] = defaultdict(
            list
        )  # content of the reference -> who returns it
        if not self._has_ops:
            for ref, _ in pairing.modules:
                for slot in ref.slots:
                    if slot.role == "out" and slot.content >= 0:
                        self._returned[slot.content].append((ref.seq, slot.index))

    def unfed(self) -> list[Value]:
        """What modules of the target return that recorded no inputs, in the order of the reference."""
        return [
            (target.seq, slot.index)
            for _, target in sorted(self._pairing.modules, key=lambda pair: pair[0].seq)
            if not has_inputs(target)
            for slot in target.slots
            if slot.role == "out" and slot.is_tensor and self._links((target.seq, slot.index))
        ]

    def before(self, value: Value) -> list[Value]:
        """The nearest compared values of the target that this one was computed from.

        Args:
          value: what a module of the target returned. Of one whose inputs were recorded nothing is said.
        """
        found = self._before.get(value)
        if found is None:
            unfed = not has_inputs(self._pairing.target.records[value[0]])
            links = self._links(value) if unfed else []
            found = self._before[value] = [] if not links else self._sources(value, links[0])
        return found

    def between(self, value: Value) -> list[StoredRecord]:
        """Ops of the reference on the way to a value from those before, outside the module returning it."""
        link = next(iter(self._links(value)), None)
        if link is None or not self._has_ops or self._inner(value, link):
            return []
        module = self._ref.call_of(self._ref.records[link.slots[0]])
        fed: set[Value] = set()
        found: dict[int, StoredRecord] = {}
        # Producers come first in the order of the run.
        for place in sorted(self._visited([link.ref], through=link.ref)):
            inputs = self._inputs(place)
            if place != link.ref and self.compared(place):
                continue
            if not any(before in fed or self.compared(before) for before in inputs):
                continue
            fed.add(place)
            record = self._ref.records[place[0]]
            if module not in self._ref.call_of(record).enclosing():
                found[record.seq] = record
        return list(found.values())

    def order_is_known(self, value: Value) -> bool:
        """Whether what came before a value is known; else only the order of paths says so."""
        links = self._links(value)
        return self._has_ops or not links or has_inputs(self._ref.records[links[0].slots[0]])

    def is_made_outside(self, value: Value) -> bool:
        """Whether a module was given what no module returned, as far as contents tell: its caller made it."""
        links = self._links(value)
        if self._has_ops or not links:
            return False
        record = self._ref.records[links[0].slots[0]]
        around = self._ref.call_of(record).enclosing()[1:]
        handed_on = {s.content for c in around if c.record is not None for s in self._ref.inputs(c.record)}
        return any(
            slot.content not in handed_on
            and all(seq >= record.seq for seq, _ in self._returned[slot.content])
            for slot in self._ref.inputs(record)
            if slot.content >= 0 and dtype_class(slot.dtype) in "fc"
        )

    def uncaptured(self, value: Value) -> list[str]:
        """Modules that a value was computed from, that are not inside the one returning it nor captured."""
        found: dict[str, None] = {}
        for link in self._links(value)[:1] if self._has_ops else ():
            module = self._ref.call_of(self._ref.records[link.slots[0]])
            for place in self._visited([link.ref], through=link.ref):
                if self._ref.is_leaf(place):
                    continue
                call = self._ref.call_of(self._ref.records[place[0]])
                inner = call.key not in self._pairing.calls and call.record is not None
                if inner and call.parent is not None and module not in call.enclosing():
                    found[call.path] = None
        return list(found)

    def captured(self, record: StoredRecord, slot: StoredSlot) -> tuple[list[Link], bool]:
        """Where the target has what a module of the reference returns.

        Returns: links to the same value and True; else to the last values before it and False.
        """
        same: list[Link] = []
        nearest: list[Link] = []
        for value in self._values(record, slot):
            same += self.compared(value)[:1]
            nearest += self._walk([value])
        return (same, True) if same else (nearest, False)

    def compared(self, value: Value) -> list[Link]:
        """Links of a value of the reference to what modules of the target return, inner modules first."""
        links = [
            link
            for link in self._pairing.ref_links.get(value, ())
            if link.method == "module" and self._pairing.compare(link).known
        ]
        return sorted(links, key=lambda link: link.slots[0])

    def _links(self, value: Value) -> list[Link]:
        return [link for link in self._pairing.links.get(value, ()) if link.method == "module"]

    # The reference's flow ---------------------------------------------------------------------------

    def _sources(self, value: Value, link: Link) -> list[Value]:
        inner = self._inner(value, link)
        if inner:
            return [inner[-1]]  # the module returns what one inside it returned
        if not self._has_ops:
            return self._by_contents(link.slots[0])
        found = self._walk(self._inputs(link.ref))
        return list(dict.fromkeys(other.target for other in found if other.target != value))

    def _inner(self, value: Value, link: Link) -> list[Value]:
        """What modules inside the one that returns a value return, where it is the same value."""
        same = [other.target for other in self.compared(link.ref)]
        return same[: same.index(value)] if value in same else same

    def _walk(self, start: list[Value]) -> list[Link]:
        """Back from values of the reference to the nearest that the target has too."""
        return [link for value in self._visited(start) for link in self.compared(value)]

    def _visited(self, start: list[Value], *, through: Value | None = None) -> list[Value]:
        """Values passed on the way back, the nearest that the target has too among them.

        Args:
          through: this one does not end the way, though the target has it.
        """
        seen = dict.fromkeys(start)
        todo = list(start)
        while todo:
            value = todo.pop()
            if value != through and self.compared(value):
                continue
            fresh = [before for before in self._inputs(value) if before not in seen]
            seen.update(dict.fromkeys(fresh))
            todo += fresh
        return list(seen)

    def _inputs(self, value: Value) -> list[Value]:
        """The values that the maker of a value read; none for leaves."""
        record = self._ref.records[value[0]]
        if self._ref.is_leaf(value):
            return []
        return [
            origin.value for slot in self._ref.inputs(record) for origin in self._ref.origins(record, slot)
        ]

    def _values(self, record: StoredRecord, slot: StoredSlot) -> list[Value]:
        if not self._has_ops and slot.content >= 0:
            return [value for value in self._returned[slot.content] if value[0] != record.seq]
        return [origin.value for origin in self._ref.origins(record, slot)]

    # Without ops ------------------------------------------------------------------------------------

    def _by_contents(self, seq: int) -> list[Value]:
        """What a call of the reference was given, and what the calls inside it return."""
        record = self._ref.records[seq]
        call = self._ref.call_of(record)
        values = [value for child in call.children for value in self._returns(child)]
        if not has_inputs(record):
            values += self._earlier(call)
        for slot in self._ref.inputs(record):
            given = [value for value in self._returned[slot.content] if value[0] < seq]
            values += given or self._earlier(call)
        links = [link for value in values for link in self.compared(value)]
        return list(dict.fromkeys(link.target for link in links))

    def _earlier(self, call: Call) -> list[Value]:
        """What the code around a call may have made its inputs of: results of earlier calls within the same
        call, and what that was given; where it is not known who made those, the same one level up."""
        found: list[Value] = []
        around = call.parent
        while around is not None:
            found += [
                value
                for child in around.children
                if child.closed < call.opened
                for value in self._returns(child)
            ]
            record = around.record
            given = [] if record is None else [s for s in self._ref.inputs(record) if s.content >= 0]
            makers = [[v for v in self._returned[slot.content] if v[0] < call.opened] for slot in given]
            found += [value for values in makers for value in values]
            if given and all(makers):
                break
            around = around.parent
        return found

    def _returns(self, call: Call) -> list[Value]:
        if call.record is None:
            return [value for child in call.children for value in self._returns(child)]
        return [(call.record.seq, s.index) for s in call.record.slots if s.role == "out" and s.is_tensor]
