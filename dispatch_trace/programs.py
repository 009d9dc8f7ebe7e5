"""Programs that can be run again and again under the recorder: Python callables, and commands.

Guarantees: every run of a callable starts from the random state in which the first one did; what a program
raises is a fact about the run, never an exception here; a run that would take more room on the disk than it
may is not recorded any further, and says so.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch

from dispatch_trace.errors import CaptureError
from dispatch_trace.recorder import record

OVER_BUDGET = "the disk budget"
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a run is to record.

    Attributes:
      level, save, select, steps: as of `dt.record`; `select` empty for all modules, `steps` None for all.
    """

    level: str
    save: str = "stats"
    select: tuple[str, ...] = ()
    steps: frozenset[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One recorded run.

    Attributes:
      path: of the trace.
      seconds: of the whole run.
      num_bytes: of the trace.
      error: what the program raised, or why nothing was recorded; "" where it ran to its end.
      stopped: recording ended early, for want of room.
    """

    path: Path
    seconds: float
    num_bytes: int
    error: str = ""
    stopped: bool = False


class Program(Protocol):
    """Something that can be recorded.

    Attributes:
      name: "reference" or "target".
    """

    name: str

    def record(self, path: Path, request: Request, max_bytes: int) -> Run:
        """Runs it once.

        Args:
          path: of the trace; an earlier one is replaced.
          request: what to record.
          max_bytes: how large the trace may become.
        """
        ...


def size_on_disk(path: Path) -> int:
    """Bytes of all files below a path; 0 where there is none."""
    total = 0
    for file in path.rglob("*") if path.is_dir() else ():
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue  # renamed in this moment
    return total


class Watch:
    """Calls back, once, when a folder has become larger than it may.

    Attributes:
      tripped: it has.
    """

    def __init__(self, path: Path, max_bytes: int, then: Callable[[], None]) -> None:
        self.tripped = False
        self._path, self._max_bytes, self._then = path, max_bytes, then
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="dispatch_trace disk budget", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_POLL_S):
            if size_on_disk(self._path) > self._max_bytes:
                self.tripped = True
                self._then()
                return


class RandomState:
    """The state of the random generators of Python, NumPy and torch, to be put back."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
        )
        self._cuda: Any = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


class FunctionProgram:
    """A callable of this process.

    Args:
      name: "reference" or "target".
      call: runs the model; called without arguments, once for each run.
      model: as of `dt.record`.
      state: random state to start from.
    """

    def __init__(self, name: str, call: Callable[[], object], *, model: Any, state: RandomState) -> None:
        self.name = name
        self._call = call
        self._model = model
        self._state = state

    def record(self, path: Path, request: Request, max_bytes: int) -> Run:
        """See `Program`.

        Raises:
          DispatchTraceError: the recording could not begin.
        """
        started = time.perf_counter()
        self._state.restore()
        crash: Exception | None = None
        error, stopped = "", False
        try:
            recording = record(
                path,
                self._model,
                level=request.level,
                save=request.save,
                select=request.select or None,
                steps=request.steps,
                overwrite=True,
            )
            with recording, Watch(path, max_bytes, lambda: recording.stop(OVER_BUDGET)) as watch:
                try:
                    self._call()
                except Exception as raised:
                    crash = raised
                    raise
                finally:
                    stopped = watch.tripped
        except CaptureError as nothing:
            error = str(nothing) if crash is None else _said(crash)
        except Exception as raised:
            if raised is not crash:
                raise
            error = _said(raised)
        written = size_on_disk(path)
        return Run(
            path=path,
            seconds=time.perf_counter() - started,
            num_bytes=written,
            error=error,
            stopped=stopped or written > max_bytes,
        )


def _said(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


__all__ = ["FunctionProgram", "Program", "RandomState", "Request", "Run", "Watch", "size_on_disk"]
