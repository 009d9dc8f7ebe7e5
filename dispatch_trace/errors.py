"""Every error that this package raises on purpose.

One base class, so that a caller can catch all of them; each subclass also derives from the built-in
class that describes it best. A message says where, what was expected, what came and what to do. On
the command line each becomes one message on stderr and exit status 2.
"""

from __future__ import annotations

from typing import Any


class DispatchTraceError(Exception):
    """Base of all errors of this package."""


class ConfigError(DispatchTraceError, ValueError):
    """An option has a value that it cannot have, or options contradict each other."""


class PatternError(DispatchTraceError, ValueError):
    """A module or op pattern is no valid regular expression, or holds an upside-down range."""


class NoMatchError(DispatchTraceError, LookupError):
    """A pattern matched nothing."""


class HookAfterCompileError(DispatchTraceError, RuntimeError):
    """Recording was asked for on a model that has been compiled and run already."""


class CaptureError(DispatchTraceError, RuntimeError):
    """Nothing was captured, fewer values arrived than were asked for, or the recorder failed."""


class TraceExistsError(DispatchTraceError, FileExistsError):
    """The output path holds a trace (or something else) already and `overwrite` is off."""


class NotATraceError(DispatchTraceError, ValueError):
    """The path does not exist or is no trace."""


class TraceFormatError(DispatchTraceError, ValueError):
    """A trace is torn, corrupt or lacks a file; what is whole stays readable."""


class SchemaVersionError(DispatchTraceError, ValueError):
    """A trace was written by a newer schema than this package reads."""


class NotExecutableError(DispatchTraceError, RuntimeError):
    """The trace or record lacks what is needed to run it again."""


class DivergenceError(DispatchTraceError, ArithmeticError):
    """A program that was recorded with `against=..., on_divergence="raise"` parted from its reference.

    Attributes:
      divergence: where and how (`live_stop.Divergence`).
    """

    def __init__(self, message: str, divergence: Any = None) -> None:
        super().__init__(message)
        self.divergence = divergence


class RenameError(DispatchTraceError, ValueError):
    """A rename rule matches nothing, more than one thing, or contradicts another."""


class ShapeMismatchError(DispatchTraceError, ValueError):
    """Two tensors that must have one shape do not."""
