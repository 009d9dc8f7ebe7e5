"""The two modes that note rows, with the way of an op compiled (native.cpp).

Guarantees: rows, keys and facts are those of `values` and `meta`, whose methods do all that is not the plain
case; where nothing is compiled (no compiler, no headers of Python, not yet) those modes run as they are.
The build takes half a minute of a processor, once for a machine and a torch (`builds`).
"""

from __future__ import annotations

import importlib.util
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dispatch_trace.builds import Build, Plan
from dispatch_trace.capture.keys import CONSTANTS, KEYWORDS
from dispatch_trace.capture.meta import MetaRecorder
from dispatch_trace.capture.ops import OpRecorder, site
from dispatch_trace.capture.rows import RowRecorder
from dispatch_trace.capture.snapshot import StorageEntry
from dispatch_trace.capture.tracer import PLAIN_TENSORS, SourceFinder
from dispatch_trace.capture.values import NO_TENSOR, Leaves, ValueRecorder, introduce
from dispatch_trace.schema import SLOT_IS_NEW, SLOT_LEAF, Content

_SOURCE = Path(__file__).with_name("native.cpp")
_NAME = "dispatch_trace_native"


def _plan() -> Plan:
    home = Path(torch.__file__).parent
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise OSError(f"no headers of Python in {python}")
    headers = [home / "include", home / "include/torch/csrc/api/include", python]
    abi = int(torch.compiled_with_cxx11_abi())
    return Plan(
        "native",
        _SOURCE,
        (
            *("-std=c++20", "-O2", "-w", "-fvisibility=hidden", "-shared", "-fPIC"),
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            *(f"-I{each}" for each in headers),
        ),
        (f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"),
        (torch.__version__, str(torch.version.git_version), str(sysconfig.get_config_var("SOABI"))),
    )


class _Modes:
    """The compiled module, and the modes made with it."""

    def __init__(self, path: Path) -> None:
        loader = ExtensionFileLoader(_NAME, str(path))
        spec = importlib.util.spec_from_loader(_NAME, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        self.by_plain: dict[type[OpRecorder], type[OpRecorder]] = {
            ValueRecorder: _value_mode(module),
            MetaRecorder: _meta_mode(module),
        }


def _value_mode(module: ModuleType) -> type[ValueRecorder]:
    class NativeValueRecorder(ValueRecorder):
        __torch_dispatch__ = module.value_dispatch
        inputs_of = module.value_inputs
        note_module = module.value_note_module
        plain_inputs_of = ValueRecorder.inputs_of
        plain_note_module = ValueRecorder.note_module

        def start(self) -> None:
            storages = self._storages
            known = (storages, storages.by_address, self._items)
            held = (*known, Content, StorageEntry, introduce, NO_TENSOR, Leaves)
            self._native = _way(module, self, held, keep=self._keep)
            super().start()

    return NativeValueRecorder


def _meta_mode(module: ModuleType) -> type[MetaRecorder]:
    class NativeMetaRecorder(MetaRecorder):
        __torch_dispatch__ = module.meta_dispatch

        def start(self) -> None:
            self._native = _way(module, self, (None,) * 8, keep=False)
            super().start()

    return NativeMetaRecorder


def _way(module: ModuleType, mode: RowRecorder, values: tuple[Any, ...], *, keep: bool) -> Any:
    """What the compiled code has at hand, in the order of `Way::Held`."""
    plain = (torch.Tensor, *(kind for kind in PLAIN_TENSORS if kind is not torch.Tensor))
    held = (*mode.at_hand(), site, KEYWORDS, plain, tuple(CONSTANTS), *values, SourceFinder)
    return module.Way(held, SLOT_IS_NEW, SLOT_LEAF, keep)


_THE_BUILD = Build(_plan, _Modes)


def find(*, wait: bool = False) -> bool:
    """Whether the compiled way is there; starts its build where there is none.

    Args:
      wait: until it is built, half a minute once a machine.
    """
    return _THE_BUILD.find(wait) is not None


def why_not() -> str:
    """Why there is no compiled way; "" where there is one, or it is not known yet."""
    return _THE_BUILD.why_not


def compiled(mode: type[OpRecorder]) -> type[OpRecorder]:
    """The mode with the compiled way of an op, where there is one; itself elsewhere."""
    modes = _THE_BUILD.find()
    return mode if modes is None else modes.by_plain.get(mode, mode)


__all__ = ["compiled", "find", "why_not"]
