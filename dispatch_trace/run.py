"""`dispatch-trace run -- PROGRAM ...`: starts a program so that it records itself, and says what came of it.

The program runs as it would without us, in a process of its own, with the same interpreter, arguments,
terminal and exit status: only its environment differs. `PYTHONPATH` leads to `startup/sitecustomize.py`,
and the `DISPATCH_TRACE*` variables say what to record (`autostart` does it). Imports no torch.

Exit status: the program's own, 128 + n where signal n ended it; 2 where it ended well and nothing was
recorded, or not what was asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dispatch_trace.autostart import REPORTS_VARIABLE
from dispatch_trace.environment import OTHERS, Settings, settings_from
from dispatch_trace.errors import ConfigError, DispatchTraceError, TraceExistsError
from dispatch_trace.report.summary import lines_of

_STARTUP = Path(__file__).resolve().parent / "startup"
_FORWARDED = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_FAILED = 2


def run(command: Sequence[str], settings: Settings) -> int:
    """Runs a command and records the Python program in it.

    Args:
      command: `script.py ARGS`, `-m MODULE ARGS`, `-c CODE ARGS`, or any executable with its arguments
        (`torchrun`, `pytest`, another interpreter).
      settings: what to record.
    Returns: the exit status, see above.
    Raises:
      ConfigError, PatternError: the settings are wrong, or there is no such program. Nothing has run.
      TraceExistsError: the output holds a trace already.
    """
    settings.record_arguments()
    line, name = _command_line(command)
    output = settings.output_of(name, pid=0, rank=0)
    if settings.output is None:
        settings = replace(settings, output=str(output))
    settings = replace(settings, output=os.path.abspath(settings.output or ""))
    _check_free(settings)
    with tempfile.TemporaryDirectory(prefix="dispatch-trace-") as reports:
        status = _wait(subprocess.Popen(line, env=_environment(settings, reports)))
        return _tell(status, reports, settings)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings of the command line; what it leaves out is as the environment's variables say.

    Raises:
      ConfigError: a variable of ours that does not exist, or a boolean that is none.
    """
    given: dict[str, Any] = {
        "output": options.output,
        "level": options.level,
        "save": options.save,
        "select": options.select,
        "ops": options.ops,
        "steps": _split(options.steps),
        "stats": _split([options.stats] if options.stats is not None else None),
        "root": options.root,
        "lines": options.lines,
        "overwrite": options.overwrite,
    }
    for name in ("select", "root"):
        if given[name] is not None:
            given[name] = [pattern or "()" for pattern in given[name]]  # "" is the root, and no absence
    changes: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
    return replace(settings_from(), **changes)


def _split(texts: list[str] | None) -> list[str] | None:
    if texts is None:
        return None
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _command_line(command: Sequence[str]) -> tuple[list[str], str]:
    """(what to execute, a name for the program)."""
    command = command[1:] if command and command[0] == "--" else command
    if not command:
        raise ConfigError("run: no program. Write: dispatch-trace run [OPTIONS] -- script.py ARGS")
    first, *rest = command
    if first in ("-m", "-c"):
        if not rest:
            raise ConfigError(f"run: {first} without its argument.")
        name = rest[0].removesuffix(".__main__").rpartition(".")[2] if first == "-m" else "command"
        return [sys.executable, *command], name
    path = Path(first)
    if path.suffix in (".py", ".pyz", ".pyc") or path.is_dir():
        if not path.exists():
            raise ConfigError(f"run: there is no {first!r} in {os.getcwd()!r}.")
        return [sys.executable, *command], path.stem
    found = shutil.which(first)
    if found is not None:
        return [found, *rest], path.stem
    if path.is_file():
        return [sys.executable, *command], path.stem
    raise ConfigError(f"run: {first!r} is neither a file in {os.getcwd()!r} nor a command.")


def _check_free(settings: Settings) -> None:
    """Refuses an output that holds a trace before the program runs, not after."""
    assert settings.output is not None
    if settings.overwrite or "{" in settings.output:
        return
    path = Path(settings.output)
    if path.exists() and not path.is_dir():
        raise TraceExistsError(f"{path} is a file; a trace is a directory. Give another --output.")
    rank = os.environ.get("RANK", "")
    names = [f"rank{rank}"] if rank.isdigit() else [p.name for p in path.glob("rank*")]
    taken = [name for name in names if (path / name).is_dir() and any((path / name).iterdir())]
    if taken:
        raise TraceExistsError(
            f"{path / taken[0]} is not empty. Pass --overwrite, or give another --output; "
            "{pid} in it stands for the process."
        )


def _environment(settings: Settings, reports: str) -> dict[str, str]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("DISPATCH_TRACE")}
    environ.update((name, os.environ[name]) for name in OTHERS if name in os.environ)
    paths = [str(_STARTUP), *filter(None, [environ.get("PYTHONPATH")])]
    environ.pop("_DISPATCH_TRACE_SEEN", None)
    return environ | settings.variables() | {"PYTHONPATH": os.pathsep.join(paths), REPORTS_VARIABLE: reports}


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The program's status, -n where signal n ended it; signals sent to us go to it."""
    with _forwarding(process):
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the terminal has sent it to the program as well, and its answer counts


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    def forward(number: int, _frame: Any) -> None:
        process.send_signal(number)

    before: dict[int, Any] = {}
    for name in _FORWARDED:
        number = getattr(signal, name, None)
        if number is not None:
            with contextlib.suppress(ValueError):  # not the main thread
                before[number] = signal.signal(number, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(status: int, reports: str, settings: Settings) -> int:
    """Says what came of it, and turns the program's status into ours."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(reports).glob("*.json"))]
    begun = [report for report in found if "path" in report or report["state"] == "failed"]
    begun.sort(key=lambda report: (report["rank"], report["pid"]))
    lines, failed = [], False
    for report in begun:
        if len(begun) > 1:
            report["world"] = len(begun)
        lines += lines_of(report)
        if report["state"] == "recording":
            lines.append(_unclosed(report))
        failed = failed or "error" in report
    if status < 0:
        lines.append(f"the program was killed by {signal.Signals(-status).name}")
    elif status:
        lines.append(f"the program ended with exit status {status}")
    if not begun:
        failed = True
        reasons = [report["error"] for report in found if "error" in report]
        why = (
            reasons[0] if reasons else "no Python process of the program was reached (python -I, -S or -E?)."
        )
        if any(report["state"] == "child" for report in found):
            why = (
                "only processes that the program started called modules, and they are no ranks of their own. "
                "{pid} in --output records each process."
            )
        lines.append(f"ERROR: nothing was recorded: {why}")
    sys.stdout.flush()
    sys.stderr.write("".join(f"dispatch_trace: {line}\n" for line in lines))
    if status < 0:
        return 128 - status
    return status or (_FAILED if failed else 0)


def _unclosed(report: dict[str, Any]) -> str:
    """What is left of a trace whose process had no chance to close it."""
    from dispatch_trace.store.reader import open_ranks

    try:
        ranks = open_ranks(report["path"])
        num_records = next((r.num_records for r in ranks if r.rank == report["rank"]), 0)
    except DispatchTraceError as error:
        return f"rank {report['rank']}: the trace was not closed and cannot be read: {error}"
    return (
        f"rank {report['rank']}: the process ended without closing its trace; the {num_records} records that "
        f"reached the disk are in {report['path']}"
    )
