"""A trace that keeps one output of a module, or its last call only, under the names of the trace beside it.

Some dumps (docs/vllm_neuron.md) know neither what an output is called nor which call of a module it came
from; their headers say so (`options.outputs` is "first", `options.calls` is "last"). The other trace knows
both. Here such a dump gets its names, so that pairing finds the same key on both sides and nothing above
has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from dispatch_trace.schema import StoredRecord
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.view import ReaderView

if TYPE_CHECKING:
    pass

_Module: TypeAlias = tuple[str, str]  # model, path


def keeps_first_output(reader: RankReader) -> bool:
    """Whether a trace holds one output of each module, without its name."""
    return (reader.header.get("options") or {}).get("outputs") == "first"


def keeps_last_call(reader: RankReader) -> bool:
    """Whether a trace holds one call of each module and step, the last, whatever its number."""
    return (reader.header.get("options") or {}).get("calls") == "last"


def named_alike(
    ref: RankReader, target: RankReader, models: dict[str, str], renamed: Callable[[str], str]
) -> tuple[RankReader, RankReader]:
    """Both ranks, with names of the other where one of them has none.

    Args:
      models: models of the reference to models of the target.
      renamed: the target's path for a path of the reference.
    """

    def of_ref(module: _Module) -> _Module | None:
        return (models[module[0]], renamed(module[1])) if module[0] in models else None

    if keeps_first_output(target) and not keeps_first_output(ref):
        return ref, _Named(target, *_sites(ref, of_ref))
    if keeps_first_output(ref) and not keeps_first_output(target):
        theirs = _sites(target, lambda module: module)
        paths = {record.module for record in ref.records(kind="module")}
        back = {(models[model], renamed(path)): (model, path) for model in models for path in paths}
        names, calls = ({back[m]: v for m, v in table.items() if m in back} for table in theirs)
        return _Named(ref, names, calls), target
    return ref, target


def _sites(
    reader: RankReader, name_of: Callable[[_Module], _Module | None]
) -> tuple[dict[_Module, Any], dict[_Module, Any]]:
    """Of each module the name of its first output, and the number of its last call in any step."""
    names: dict[_Module, str] = {}
    calls: dict[_Module, int] = {}
    for record in reader.records(kind="module", grad_phase="fwd"):
        module = name_of((record.model, record.module))
        if module is None:
            continue
        calls[module] = max(record.call, calls.get(module, 0))
        first = next((slot.name for slot in record.slots if slot.role == "out" and slot.is_tensor), None)
        if first is not None:
            names.setdefault(module, first)
    return names, calls


class _Named(ReaderView):
    """A view of a rank; only module records look different."""

    def __init__(self, reader: RankReader, names: dict[_Module, str], calls: dict[_Module, int]) -> None:
        super().__init__(reader)
        self._names = names
        self._calls = calls if keeps_last_call(reader) else {}

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        call = where.pop("call", None)
        for record in self._whole.records(**where):
            named = self._record(record)
            if call is None or named.call == call:
                yield named

    def _record(self, record: StoredRecord) -> StoredRecord:
        if record.kind != "module":
            return record
        module = (record.model, record.module)
        lone = sum(slot.role == "out" and slot.is_tensor for slot in record.slots) == 1
        slots = [
            replace(slot, name=self._names.get(module, slot.name)) if lone and slot.role == "out" else slot
            for slot in record.slots
        ]
        return replace(record, call=self._calls.get(module, record.call), slots=tuple(slots))

    def record(self, seq: int) -> StoredRecord:
        return self._record(self._whole.record(seq))
