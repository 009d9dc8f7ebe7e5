"""dispatch_trace: names the first op that introduces a numerical error.

Records what every op and module of a PyTorch model computed, lines two recordings up, and says where
the numbers go wrong. The public names load on first use, so that reading a trace imports no torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "record": "dispatch_trace.recorder",
    "check_observer": "dispatch_trace.recorder",
    "capture_tensor": "dispatch_trace.capture.inline",
    "ModelCapture": "dispatch_trace.model_capture",
    "CaptureConfig": "dispatch_trace.config",
    "TensorRegistry": "dispatch_trace.registry",
    "tap": "dispatch_trace.capture.graph",
    "inject": "dispatch_trace.inject",
    "trace_lines": "dispatch_trace.lines",
    "hunt": "dispatch_trace.hunt",
    "Hunt": "dispatch_trace.hunt_result",
    "open": "dispatch_trace.session",
    "align": "dispatch_trace.alignment",
    "Trace": "dispatch_trace.session",
    "Record": "dispatch_trace.session",
    "Alignment": "dispatch_trace.alignment",
    "Finding": "dispatch_trace.judge.verdict",
    "DispatchTraceError": "dispatch_trace.errors",
    "ConfigError": "dispatch_trace.errors",
    "PatternError": "dispatch_trace.errors",
    "NoMatchError": "dispatch_trace.errors",
    "HookAfterCompileError": "dispatch_trace.errors",
    "CaptureError": "dispatch_trace.errors",
    "TraceExistsError": "dispatch_trace.errors",
    "NotATraceError": "dispatch_trace.errors",
    "TraceFormatError": "dispatch_trace.errors",
    "SchemaVersionError": "dispatch_trace.errors",
    "NotExecutableError": "dispatch_trace.errors",
    "RenameError": "dispatch_trace.errors",
    "DivergenceError": "dispatch_trace.errors",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `dt.align` the function: importing the subpackage of that name would put a module there."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


if os.environ.get("DISPATCH_TRACE"):
    from dispatch_trace.autostart import start_from_environment

    start_from_environment()


if TYPE_CHECKING:
    from dispatch_trace.alignment import Alignment as Alignment
    from dispatch_trace.alignment import align as align
    from dispatch_trace.capture.graph import tap as tap
    from dispatch_trace.capture.inline import capture_tensor as capture_tensor
    from dispatch_trace.config import CaptureConfig as CaptureConfig
    from dispatch_trace.errors import *  # noqa: F403 - the names listed in _HOMES
    from dispatch_trace.hunt import hunt as hunt
    from dispatch_trace.hunt_result import Hunt as Hunt
    from dispatch_trace.inject import inject as inject
    from dispatch_trace.judge.verdict import Finding as Finding
    from dispatch_trace.lines import trace_lines as trace_lines
    from dispatch_trace.model_capture import ModelCapture as ModelCapture
    from dispatch_trace.recorder import check_observer as check_observer
    from dispatch_trace.recorder import record as record
    from dispatch_trace.registry import TensorRegistry as TensorRegistry
    from dispatch_trace.session import Record as Record
    from dispatch_trace.session import Trace as Trace
    from dispatch_trace.session import open as open
