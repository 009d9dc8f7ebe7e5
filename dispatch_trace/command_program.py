"""A program of its own process that can be recorded again and again: `dispatch-trace run` does it.

What the program prints goes to a file beside the trace. A recording that outgrows its room ends the program:
it was started for the recording alone.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dispatch_trace.errors import ConfigError
from dispatch_trace.programs import Request, Run, Watch, size_on_disk

_GRACE_S = 5.0


class CommandProgram:
    """A command line.

    Args:
      name: "reference" or "target".
      command: `script.py ARGS`, `-m MODULE ARGS` or any command, as for `dispatch-trace run`; in one string
        as a shell splits it, or in parts.
      root: which modules are roots, as `--root` of `dispatch-trace run`.

    Raises:
      ConfigError: there is no command.
    """

    def __init__(self, name: str, command: str | Sequence[str], *, root: Sequence[str] = ()) -> None:
        self.name = name
        try:
            self._command = shlex.split(command) if isinstance(command, str) else list(command)
        except ValueError as error:
            raise ConfigError(f"hunt: the {name}'s command {command!r} cannot be split: {error}.") from None
        if not self._command:
            raise ConfigError(f"hunt: the {name} has no command. Write: 'script.py ARGS'.")
        self._root = tuple(root)

    def record(self, path: Path, request: Request, max_bytes: int) -> Run:
        """See `programs.Program`."""
        started = time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.with_suffix(".log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._line(path, request), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
            with Watch(path, max_bytes, process.terminate) as watch:
                while True:
                    try:
                        status = process.wait(_GRACE_S)
                        break
                    except subprocess.TimeoutExpired:
                        if watch.tripped:
                            process.kill()
        written = size_on_disk(path)
        return Run(
            path=path,
            seconds=time.perf_counter() - started,
            num_bytes=written,
            error="" if status == 0 or watch.tripped else _what_happened(log, status),
            stopped=watch.tripped or written > max_bytes,
        )

    def _line(self, path: Path, request: Request) -> list[str]:
        line = [sys.executable, "-m", "dispatch_trace", "run", "--overwrite", "--output", str(path.resolve())]
        line += ["--level", request.level, "--save", request.save]
        for option, values in (("--select", request.select), ("--root", self._root)):
            line += [f"{option}={value}" for value in values]
        if request.steps is not None:
            line += ["--steps", ",".join(map(str, sorted(request.steps)))]
        return [*line, "--", *self._command]


def _what_happened(log: Path, status: int) -> str:
    """Why a program ended badly: its last line that is no remark of ours, and ours where it says more."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    ours = [
        line.removeprefix("dispatch_trace: ") for line in lines if line.startswith("dispatch_trace: ERROR")
    ]
    own = [line for line in lines if line and not line.startswith("dispatch_trace: ")]
    said = ours[0].removeprefix("ERROR: ") if ours else own[-1] if own else ""
    said = said if len(said) <= 300 else f"{said[:300]} ..."
    return f"exit status {status}: {said} (see {log})" if said else f"exit status {status} (see {log})"


__all__ = ["CommandProgram"]
