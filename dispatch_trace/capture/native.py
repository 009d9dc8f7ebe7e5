"""The two modes that note rows, with the way of an op compiled (extension.cpp).

With the torch that it knows, an op does not come to Python at all (extension_direct.h); with others it comes
to the compiled `__torch_dispatch__`.

Guarantees: rows and facts are those of `values` and `meta`, whose methods do all that is not the plain case;
where nothing is compiled those modes run as they are.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch

from dispatch_trace import extension
from dispatch_trace.capture.frames import Frame, mark_sequence
from dispatch_trace.capture.keys import CONSTANTS
from dispatch_trace.capture.meta import MetaRecorder
from dispatch_trace.capture.ops import OpRecorder, site
from dispatch_trace.capture.plain import PLAIN_TENSORS
from dispatch_trace.capture.plain_calls import CALL_IMPL, HOOKS_OF_ALL
from dispatch_trace.capture.rows import RowRecorder
from dispatch_trace.capture.sources import SourceFinder
from dispatch_trace.capture.storage import StorageEntry
from dispatch_trace.capture.values import NO_TENSOR, Leaves, ValueRecorder, introduce
from dispatch_trace.schema import SLOT_IS_NEW, SLOT_LEAF, Content


def compiled(mode: type[OpRecorder]) -> type[OpRecorder]:
    """The mode with the compiled way of an op, where there is one; itself elsewhere."""
    module = extension.find()
    return mode if module is None else _modes(module).get(mode, mode)


@cache
def _modes(module: ModuleType) -> dict[type[OpRecorder], type[OpRecorder]]:
    return {ValueRecorder: _value_mode(module), MetaRecorder: _meta_mode(module)}


def _value_mode(module: ModuleType) -> type[ValueRecorder]:
    class NativeValueRecorder(ValueRecorder):
        __torch_dispatch__ = module.dispatch
        started, stopped = module.started, module.stopped
        enter, leave = module.enter, module.leave
        inputs_of = module.value_inputs
        note_module = module.value_note_module
        plain_inputs_of = ValueRecorder.inputs_of
        plain_note_module = ValueRecorder.note_module

        def start(self) -> None:
            storages = self._storages
            known = (storages, storages.by_address, self._items)
            held = (*known, Content, StorageEntry, introduce, NO_TENSOR, Leaves)
            self._native = _way(module, self, held, keep=self._keep, shares=storages.may_share())
            super().start()
            self.started()

        def stop(self) -> None:
            super().stop()
            self.stopped()

    return NativeValueRecorder


def _meta_mode(module: ModuleType) -> type[MetaRecorder]:
    class NativeMetaRecorder(MetaRecorder):
        __torch_dispatch__ = module.dispatch
        started, stopped = module.started, module.stopped
        enter, leave = module.enter, module.leave
        note_module = module.meta_note_module
        plain_note_module = MetaRecorder.note_module

        def start(self) -> None:
            self._native = _way(module, self, (None,) * 8)
            super().start()
            self.started()

        def stop(self) -> None:
            super().stop()
            self.stopped()

    return NativeMetaRecorder


def _way(
    module: ModuleType,
    mode: RowRecorder,
    values: tuple[Any, ...],
    *,
    keep: bool = False,
    shares: bool = False,
) -> Any:
    """What the compiled code has at hand, in the order of `Way::Held`."""
    plain = (torch.Tensor, *(kind for kind in PLAIN_TENSORS if kind is not torch.Tensor))
    calls = (Frame, mark_sequence, CALL_IMPL, HOOKS_OF_ALL)
    held = (*mode.at_hand(), site, plain, tuple(CONSTANTS), *calls, *values, SourceFinder)
    return module.Way(held, SLOT_IS_NEW, SLOT_LEAF, mode.wants_inputs, keep, shares)


__all__ = ["compiled"]
