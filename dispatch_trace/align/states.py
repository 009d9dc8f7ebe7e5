"""A saved sequence of hidden states, put where the other trace has them: between the layers of its model.

`output_hidden_states` gives what goes into the first layer and what each layer returns; in most models the
last one has passed the norm behind the layers too. A file of them names no module. The other trace has the
layers: as many modules numbered from 0 beneath one path, each returning a tensor of that shape. State i is
what layer i read and layer i - 1 returned. Whether the last one is the last layer's or the norm's is told
by the values, where one of both is near and the other far; else it is left out.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch_trace.align.content import arrays_difference
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.view import ReaderView

if TYPE_CHECKING:
    pass

_STATE = re.compile(r"out\.hidden_states\[(\d+)\]")
_LAYER = re.compile(r"(?:(.+)\.)?(\d+)")
# One reading of the last state is taken when it is this near, and the other ten times as far.
_NEAR = 0.05
_FARTHER = 10.0


def placed_states(ref: RankReader, target: RankReader) -> tuple[RankReader, RankReader, list[str]]:
    """Both ranks, with a saved sequence of states of one as records of the other's layers; and notices."""
    if _is_states(target) and not _returns_states(ref):
        view, notices = _placed(target, ref)
        return ref, view, notices
    if _is_states(ref) and not _returns_states(target):
        view, notices = _placed(ref, target)
        return view, target, notices
    return ref, target, []


def _is_states(reader: RankReader) -> bool:
    return bool((reader.header.get("options") or {}).get("states"))


def _returns_states(reader: RankReader) -> bool:
    """Whether a root returned its hidden states itself, so that names tell."""
    return any(
        _STATE.fullmatch(slot.name)
        for record in reader.records(kind="module", module="")
        for slot in record.slots
    )


def _placed(saved: RankReader, other: RankReader) -> tuple[RankReader, list[str]]:
    root = next(saved.records(kind="module", module=""), None)
    if root is None:
        return saved, []
    numbered = {int(m[1]): slot for slot in root.slots if (m := _STATE.fullmatch(slot.name))}
    states = [numbered[i] for i in sorted(numbered)]
    found = _layers(other, states)
    if isinstance(found, str):
        return saved, [f"the saved hidden states were not placed: {found}"]
    layers, behind = found
    places: list[tuple[StoredRecord, StoredSlot | None, StoredSlot | None]] = []
    for number, layer in enumerate(layers):
        out = states[number + 1] if number + 1 < len(states) else None
        places.append((layer, states[number], out))
    notices = [f"hidden state N is what layer N of {_parent(layers[0].module) or '(root)'} read"]
    last_layer, read, last = places[-1]
    after = None if last is None else _last_place(saved, other, last, last_layer, behind)
    if last is not None and after is not last_layer:
        places[-1] = (last_layer, read, None)
        if after is None:
            names = f"{last_layer.module} or {behind.module if behind is not None else ''}"
            notices.append(f"the last hidden state was left out: it is no more like that of {names}")
        else:
            places.append((after, None, last))
    rest = replace(root, slots=tuple(s for s in root.slots if not _STATE.fullmatch(s.name)))
    return _Placed(saved, places, rest), notices


def _layers(
    other: RankReader, states: list[StoredSlot]
) -> tuple[list[StoredRecord], StoredRecord | None] | str:
    """The records of the layers, and of the module behind them that returns such a tensor; or why not."""
    first = next((step.step for step in other.steps if step.step >= 0), 0)
    records = [r for r in other.records(kind="module", grad_phase="fwd", step=first) if r.call == 0]
    lists: dict[tuple[str, str], dict[int, StoredRecord]] = defaultdict(dict)
    for record in records:
        match = _LAYER.fullmatch(record.module)
        out = _first(record, "out")
        if match and out is not None and _fits(out, states[-1]):
            lists[(record.model, match[1] or "")].setdefault(int(match[2]), record)
    fitting = [
        (key, layers)
        for key, layers in lists.items()
        if sorted(layers) == list(range(len(layers))) and len(layers) == len(states) - 1
    ]
    if not fitting:
        return f"no {len(states) - 1} numbered modules of the other trace return a tensor of that shape"
    fewest = min(key[1].count(".") for key, _ in fitting)
    outermost = [item for item in fitting if item[0][1].count(".") == fewest]
    if len(outermost) > 1:
        return f"they fit the layers of {' and of '.join(key[1] or '(root)' for key, _ in outermost)}"
    (model, path), layers = outermost[0]
    ordered = [layers[number] for number in range(len(layers))]
    around = _parent(path)
    behind = next(
        (
            record
            for record in records
            if record.model == model
            and record.opened > ordered[-1].seq
            and _parent(record.module) == around
            and record.module != around
            and (out := _first(record, "out")) is not None
            and _fits(out, states[-1])
        ),
        None,
    )
    return ordered, behind


def _last_place(
    saved: RankReader, other: RankReader, last: StoredSlot, layer: StoredRecord, behind: StoredRecord | None
) -> StoredRecord | None:
    """Whose output the last state is; None where the values do not tell."""
    if behind is None:
        return layer
    mine = saved.array(last.content) if last.content >= 0 else None
    errors = []
    for record in (layer, behind):
        out = _first(record, "out")
        theirs = other.array(out.content) if out is not None and out.content >= 0 else None
        if mine is None or theirs is None or mine.size != theirs.size:
            return None
        errors.append(arrays_difference(theirs.reshape(-1), mine.reshape(-1)).rho)
    near, far = min(errors), max(errors)
    if near > _NEAR or far < _FARTHER * near:
        return None
    return layer if errors[0] == near else behind


def _first(record: StoredRecord, role: str) -> StoredSlot | None:
    return next((slot for slot in record.slots if slot.role == role and slot.is_tensor), None)


def _fits(slot: StoredSlot, state: StoredSlot) -> bool:
    return math.prod(slot.shape) == math.prod(state.shape) and slot.shape[-1:] == state.shape[-1:]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


class _Placed(ReaderView):
    """A view of a rank of saved states: records of layers in place of the root's."""

    def __init__(
        self,
        saved: RankReader,
        places: list[tuple[StoredRecord, StoredSlot | None, StoredSlot | None]],
        root: StoredRecord,
    ) -> None:
        super().__init__(saved)
        self.header = {**saved.header, "options": {**saved.header["options"], "root": False, "inputs": True}}
        records = [_record(*place) for place in places]
        # What else the file holds ran before, as far as anybody knows.
        others = [r for r in saved.records() if r.module != ""] + ([root] if root.slots else [])
        records += others
        self._records_here = {
            seq: replace(record, seq=seq, opened=min(record.opened, seq) if record in others else seq)
            for seq, record in enumerate(records)
        }
        self.num_records = len(self._records_here)

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        for record in self._records_here.values():
            if all(getattr(record, name) == value for name, value in where.items()):
                yield record

    def record(self, seq: int) -> StoredRecord:
        return self._records_here[seq]


def _record(layer: StoredRecord, read: StoredSlot | None, out: StoredSlot | None) -> StoredRecord:
    """A record of the same site, with the states under the names of the other trace's slots."""
    slots: list[StoredSlot] = []
    for role, state in (("in", read), ("out", out)):
        twin = _first(layer, role)
        if state is not None:
            name = twin.name if twin is not None else "in[0]" if role == "in" else "out"
            slots.append(replace(state, name=name, role=role, index=len(slots)))
    return replace(
        layer, rank=0, step=0, slots=tuple(slots), producer=-1, source=None, note="", opened=layer.seq
    )
