"""Which line of the user's called an op."""

from __future__ import annotations

import os
import sys

import torch

_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEMO_FILE = _PACKAGE_DIR + "demo.py"  # its models stand for a user's code


def is_internal(file: str) -> bool:
    """Whether a source file is torch's or this package's, and so none of the user's."""
    return file != _DEMO_FILE and (
        file.startswith((_TORCH_DIR, _PACKAGE_DIR, "<")) or f"{os.sep}contextlib" in file
    )


class SourceFinder:
    """File and line of the innermost frame that belongs to the user, by walking the Python stack."""

    def __init__(self) -> None:
        self._internal: dict[str, bool] = {}

    def __call__(self, depth: int = 2) -> tuple[str, int] | None:
        frame = sys._getframe(depth)
        while frame is not None:
            name = frame.f_code.co_filename
            internal = self._internal.get(name)
            if internal is None:
                internal = self._internal[name] = is_internal(name)
            if not internal:
                return name, frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return None
