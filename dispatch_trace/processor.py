"""Which processor this process runs on: kernels are picked by it, and built for it. Imports no torch."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_TARGET = ("model name", "flags", "Features", "CPU part")
_FIELDS = ("model name", "cpu family", "model", "stepping")


@lru_cache(maxsize=1)
def processor_name() -> str:
    """Model, family and stepping of the first processor; what `platform` knows where Linux does not say."""
    try:
        first = _CPUINFO.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    known = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())
    }
    return " ".join(known[name] for name in _FIELDS if name in known) or platform.machine()


@lru_cache(maxsize=1)
def build_target() -> str:
    """What code built here may be made for: model and instruction sets of all processors.

    A cache of builds may be shared by machines that differ.
    """
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(_TARGET)}))


__all__ = ["build_target", "processor_name"]
