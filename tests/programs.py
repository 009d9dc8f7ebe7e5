"""Runs programs under the recorder, many of them quickly: forked off a process that has imported torch.

A child here goes the way of a process that `dispatch-trace run` started, from the variables on: only the
interpreter's start and the search for the startup file are left out, which test_run.py tests apart.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import environment

_SERVER = """
import atexit, json, os, runpy, sys, traceback
for name in json.loads(sys.argv[1]):
    __import__(name)
import dispatch_trace, dispatch_trace.recorder, dispatch_trace.autostart
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps(status), flush=True)
        continue
    out = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
    os.chdir(job["cwd"])
    os.environ.update(job["variables"])
    sys.argv = job["argv"]
    status = 0
    try:
        dispatch_trace.autostart.start_from_environment()
        # What runs is __main__ here as well, as `python FILE` has it.
        main = sys.modules["__main__"]
        main.__dict__.update(__file__=sys.argv[0], __spec__=None)
        for name in ("job", "line", "child", "out"):
            main.__dict__.pop(name, None)
        exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"), main.__dict__)
    except SystemExit as stop:
        status = stop.code or 0
    except BaseException as error:
        traceback.print_exc()
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: its exit status (-n for signal n) and what it and the recorder printed."""

    status: int
    output: str

    @property
    def said(self) -> str:
        """The recorder's own lines."""
        lines = [line for line in self.output.splitlines() if line.startswith("dispatch_trace: ")]
        return "\n".join(line.removeprefix("dispatch_trace: ") for line in lines)


class Programs:
    """A process that has imported what programs need, and forks one off for each."""

    def __init__(self, folder: Path, imports: Sequence[str]) -> None:
        self._folder = folder
        self._number = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, json.dumps(["torch", *imports])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(OMP_NUM_THREADS="1"),
        )

    def run(self, program: Path | str, *args: str, **variables: str) -> Ended:
        """Runs a script, given as a file or as its text.

        Args:
          variables: `DISPATCH_TRACE_NAME` by NAME, and SWITCH for `DISPATCH_TRACE` itself.
        """
        self._number += 1
        path = program
        if isinstance(program, str):
            path = self._folder / f"program{self._number}.py"
            Path(path).write_text(program, encoding="utf-8")
        log = self._folder / f"log{self._number}"
        job: dict[str, Any] = {
            "argv": [str(path), *args],
            "cwd": str(self._folder),
            "log": str(log),
            "variables": {"DISPATCH_TRACE": variables.pop("SWITCH", "1")}
            | {f"DISPATCH_TRACE_{name}": value for name, value in variables.items()},
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        status = json.loads(self._process.stdout.readline())
        return Ended(status, log.read_text(encoding="utf-8"))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


@contextlib.contextmanager
def programs(folder: Path, *imports: str) -> Iterator[Programs]:
    """A `Programs` for the length of a test module."""
    found = Programs(folder, imports)
    try:
        yield found
    finally:
        found.close()


NET = """
import sys, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
with torch.no_grad():
    for _ in range(3):
        out = net(torch.ones(2, 4))
"""

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
