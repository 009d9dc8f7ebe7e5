"""Which processor this process runs on: a kernel is picked by it. Imports no torch."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
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


__all__ = ["processor_name"]
