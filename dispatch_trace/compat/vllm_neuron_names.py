"""Names in the vLLM-Neuron capture layout: directories of steps, of modules and of inline captures.

A name is data: what is written never leaves its directory, and what is read comes back as it was. Module
paths of ordinary models stand as they are; a character that a file name cannot hold, or that would make
the name mean something else in this layout, is percent-encoded (UTF-8).
"""

from __future__ import annotations

import os
import re
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["prefill", "decode"]

PREFIXES: dict[Phase, str] = {"prefill": "prefill_s", "decode": "decode_b"}
# Subdirectories of the usual models beside or instead of the one at the top.
SUBDIRECTORIES = ("target", "draft", "vision")
MANUAL = "manual."
META_SUFFIX = "_meta.json"
# As that tool writes numbers: rank01.pt would be a second rank 1.
_NUMBER = "(0|[1-9][0-9]{0,8})"
RANK_FILE = re.compile(rf"rank{_NUMBER}\.pt")
DP_DIRECTORY = re.compile(f"dp{_NUMBER}")
_STEP_DIRECTORY = re.compile(f"(prefill_s|decode_b){_NUMBER}_{_NUMBER}")
_QUOTED = re.compile(r"(?:%[0-9A-F]{2})+")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-+=@,()[]#")
_COUNTED = re.compile(r"(.+)_([1-9]\d{0,8})", re.DOTALL)


def step_name(phase: Phase, size: int, counter: int) -> str:
    return f"{PREFIXES[phase]}{size}_{counter}"


def parse_step(name: str) -> tuple[Phase, int, int] | None:
    """(phase, size, counter) of a step's directory; None for any other name."""
    match = _STEP_DIRECTORY.fullmatch(name)
    if match is None:
        return None
    phase: Phase = "prefill" if match[1] == PREFIXES["prefill"] else "decode"
    return phase, int(match[2]), int(match[3])


def quote(path: str) -> str:
    """The directory name for a module path or the name of a model; not for "", which is the step itself."""
    quoted = "".join(char if char in _PLAIN else _encoded(char) for char in path)
    special = (
        quoted.startswith((".", MANUAL))
        or quoted.endswith(META_SUFFIX)
        or RANK_FILE.fullmatch(quoted)
        or DP_DIRECTORY.fullmatch(quoted)
        or parse_step(quoted)
    )
    return _encoded(quoted[0]) + quoted[1:] if special else quoted


def unquote(name: str) -> str:
    """What `quote` was given. Names that it did not write stand for themselves."""
    # Bytes of a file name that are no UTF-8 come as lone surrogates, which nothing could print or store.
    name = os.fsencode(name).decode("utf-8", "backslashreplace")
    return _QUOTED.sub(_decoded, name)


def _encoded(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))


def _decoded(match: re.Match[str]) -> str:
    try:
        return bytes.fromhex(match[0].replace("%", "")).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return match[0]


def inline_name(name: str, n: int) -> str:
    """The directory name of the n-th inline capture of a name within a step."""
    return MANUAL + "".join(c if c in _PLAIN else _encoded(c) for c in name) + (f"_{n}" if n else "")


def inline_captures(directories: list[str]) -> dict[str, tuple[str, int]]:
    """(name, n) of each directory of a step that holds an inline capture.

    `manual.X_2` is the third X where `manual.X` and `manual.X_1` are there too; else its name is X_2.
    """
    names = {directory.removeprefix(MANUAL) for directory in directories if directory.startswith(MANUAL)}
    found = {}
    for name in names:
        match = _COUNTED.fullmatch(name)
        base, n = (match[1], int(match[2])) if match else (name, 0)
        counted = base in names and n <= len(names) and all(f"{base}_{k}" in names for k in range(1, n))
        found[MANUAL + name] = (unquote(base), n) if counted else (unquote(name), 0)
    return found
