"""Records the process that imports this package with `DISPATCH_TRACE` on, without a line in its program.

The program's first call of a root begins the recording and its end, however it comes, ends it. Until
then nothing is wrapped but `nn.Module.__call__`, and that only once the program itself has imported
torch: what it sets before (`OMP_NUM_THREADS`) keeps its effect. Where the variable is off,
nothing here runs but the look at it.

Which process records: the first Python process, and below it those that are ranks of their own (a
launcher gave them `RANK`, or torch.distributed runs in them), or all where the output names `{pid}`. A
forked child records nothing. A failure of ours is told on stderr and in the report, and never reaches
the program.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dispatch_trace.environment import SWITCH, Settings, is_on, settings_from
from dispatch_trace.errors import DispatchTraceError, NoMatchError

if TYPE_CHECKING:
    from dispatch_trace.lines import trace_lines
    from dispatch_trace.recorder import record

# Of `dispatch-trace run` to the processes below it; no setting of anybody's.
REPORTS_VARIABLE = "_DISPATCH_TRACE_REPORTS"
_SEEN_VARIABLE = "_DISPATCH_TRACE_SEEN"
_OUR_COMMANDS = ("dispatch-trace", "dispatch_trace")

_started: list[Autostart] = []


def start_from_environment() -> None:
    """What importing the package does where the variable `DISPATCH_TRACE` is set.

    Raises:
      ConfigError, PatternError: a variable has a value that it cannot have.
    """
    if _started or not is_on(SWITCH, os.environ.get(SWITCH, "")) or _is_our_command():
        return
    settings = settings_from()
    settings.record_arguments()
    settings.output_of("program", pid=0, rank=0)
    autostart = Autostart(settings)
    _started.append(autostart)
    atexit.register(autostart.close)
    if settings.lines:
        from dispatch_trace.lines import trace_lines

        autostart.lines = trace_lines(settings.lines)
    _after_import_of_torch(autostart.watch)


def cancel() -> None:
    """Undoes the start: this process is a command of ours and no program."""
    for autostart in _started:
        autostart.cancel()
    _started.clear()


class Autostart:
    """One process that records itself.

    Args:
      settings: what to record.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._pid = os.getpid()
        self._folder = Path.cwd()  # the program may change it
        self._lock = threading.RLock()
        self._record: record | None = None
        self._finder: Any = None
        self._wrapper: Any = None
        self._original: Any = None
        self._done = False
        self.lines: trace_lines | None = None
        self._seen = os.environ.get(_SEEN_VARIABLE)
        self._report: dict[str, Any] = {"pid": self._pid, "state": "no torch", "rank": 0}
        os.environ.setdefault(_SEEN_VARIABLE, os.environ.get("RANK", ""))
        os.register_at_fork(after_in_child=self.cancel)

    def watch(self) -> None:
        """Waits for the first call of a root; torch is there now."""
        import torch

        from dispatch_trace.capture.roots import RootFinder

        if self._done:
            return
        self._report["state"] = "nothing"
        self._finder = RootFinder(self.settings.root)
        original = self._original = torch.nn.Module.__call__
        is_compiling = torch.compiler.is_compiling
        is_dynamo_compiling = torch.compiler.is_dynamo_compiling
        refused = self._finder.looked_at
        # As torch's own first frame does it, which is so stepped over: this is paid for by every module call
        # of a program whose root is never called.
        plain = original.__name__ == "_wrapped_call_impl"

        @functools.wraps(original)
        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(module, *args, **kwargs)
            if id(module) in refused and plain and module._compiled_call_impl is None:
                return module._call_impl(*args, **kwargs)
            if is_compiling() or self._wrapper is None or not self._begin(module):
                return original(module, *args, **kwargs)
            return module(*args, **kwargs)  # through the recorder's own wrapper now

        self._wrapper = torch.nn.Module.__call__ = call  # type: ignore[method-assign]

    def cancel(self) -> None:
        """Records nothing (more): a forked child, or a command of ours."""
        self._done = True
        self._unwatch()

    def _unwatch(self) -> None:
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None:
            import torch

            if torch.nn.Module.__call__ is wrapper:
                torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]

    # -- beginning -----------------------------------------------------------------------------------

    def _begin(self, module: Any) -> bool:
        """Begins the recording where this module belongs to a root; whether it has begun."""
        with self._lock:
            if self._wrapper is None:
                return self._record is not None and not self._done
            try:
                if not self._is_to_record():
                    self._report["state"] = "child"
                    self._unwatch()
                    return False
                if self._finder.look(module) is None:
                    return False
                self._unwatch()
                self._open()
            except Exception as error:
                self._fail(error)
                return False
            return True

    def _is_to_record(self) -> bool:
        if self._seen is None or self.settings.names_processes:
            return True
        import torch

        own_rank = os.environ.get("RANK", "")
        runs = torch.distributed.is_available() and torch.distributed.is_initialized()
        return runs or (own_rank != "" and own_rank != self._seen)

    def _open(self) -> None:
        from dispatch_trace.recorder import current_rank, record

        if self.lines is not None:
            self.lines.refresh()  # the script has defined its functions by now
        rank = current_rank()
        path = self._folder / self.settings.output_of(_program(), pid=self._pid, rank=rank)
        recording = record(path, None, **self.settings.record_arguments())
        recording._finder = self._finder
        recording.__enter__()
        self._record = recording
        atexit.register(self.close)  # later than the writer's own, so that it runs before
        self._guard_exit()
        self._report |= {"state": "recording", "rank": rank, "path": str(path)}
        self._write_report()

    def _guard_exit(self) -> None:
        """`os._exit` runs no exit handlers: the trace is closed before it."""
        leave = os._exit

        @functools.wraps(leave)
        def _exit(status: int) -> Any:
            self.close(note="os._exit")
            leave(status)

        os._exit = _exit

    # -- ending --------------------------------------------------------------------------------------

    def close(self, note: str = "") -> None:
        """Ends the recording and says what came of it; once."""
        if self._done or os.getpid() != self._pid:
            return
        self._done = True
        self._unwatch()
        recording = self._record
        raised = _uncaught()
        self._report["raised"] = type(raised).__name__ if raised is not None else ""
        self._report["note"] = note
        try:
            if recording is not None:
                self._finish(recording, raised)
            elif self._report["state"] not in ("child", "failed"):
                self._report["error"] = self._why_nothing()
        except Exception as error:
            self._fail(error)
        self._write_report()
        if not os.environ.get(REPORTS_VARIABLE) and (self._seen is None or recording is not None):
            from dispatch_trace.report.summary import lines_of

            sys.stderr.write("".join(f"dispatch_trace: {line}\n" for line in lines_of(self._report)))

    def _finish(self, recording: record, raised: BaseException | None) -> None:
        tracer = recording._tracer
        assert tracer is not None
        tracer.flush_rows()
        options = tracer.options
        modules = [(model, path) for model, path, _ in tracer.table.items()]
        wanted = [key for key in dict.fromkeys(modules) if options.wants_module(key[1])]
        ops = [info for info in tracer.op_infos.values() if info.selected and not info.dropped]
        paths = sorted({path for _, path in modules})
        ran = sorted({info.base for info in tracer.op_infos.values()})
        names = self._finder.model_names
        steps = {
            model: [step for step in range(last + 1) if options.wants_step(step)]
            for model, last in tracer._steps.items()
        }
        self._report |= {
            "models": [name or "(unnamed)" for name in self._finder.names],
            "modules": len(wanted),
            "ops": len(ops),
            "steps": sum(len(wanted) for wanted in steps.values()),
            "without_steps": [names.get(model, model) for model, wanted in steps.items() if not wanted],
            "state": "closed",
        }
        failure: Exception | None = None
        try:
            recording.__exit__(None if raised is None else type(raised), raised, None)
        except DispatchTraceError as found:
            failure = found
        num_values = tracer.num_records - tracer.num_parameters
        self._report |= {
            "records": tracer.num_records,
            "parameters": tracer.num_parameters,
            "faults": [f"{type(fault).__name__}: {fault}" for fault in tracer.faults[:1]],
        }
        if options.selector is not None:
            from dispatch_trace.patterns import select_modules

            try:
                for pattern in options.select:
                    select_modules([pattern], paths)
            except NoMatchError as found:
                failure = found
        if self.lines is not None and not self.lines.modules:
            failure = NoMatchError(self.lines.why_none())
        if options.ops is not None and not ops and failure is None:
            failure = NoMatchError(
                f"ops={options.ops!r} matched none of {len(ran)} ops that ran: {_some(ran)}."
            )
        if failure is None and num_values == 0:
            failure = NoMatchError(
                f"nothing but {tracer.num_parameters} parameters was recorded: "
                + (
                    f"no step matched steps={','.join(self.settings.steps)}."
                    if self.settings.steps
                    else "no selected module was called."
                )
            )
        if failure is not None:
            self._report |= {"error": f"{type(failure).__name__}: {failure}"}

    def _why_nothing(self) -> str:
        if self._report["state"] == "no torch":
            return "the program never imported torch."
        refused = self._finder.refused if self._finder is not None else {}
        if self.settings.root and refused:
            roots = ", ".join(map(repr, self.settings.root))
            return (
                f"root={roots} matched none of {sum(refused.values())} modules that were called; their "
                f"classes: {_some(sorted(refused))}. It is matched whole, against a class name or a path."
            )
        return "no torch.nn.Module was called."

    def _fail(self, error: Exception) -> None:
        self._unwatch()
        self._report |= {"state": "failed", "error": f"{type(error).__name__}: {error}"}
        self._write_report()

    def _write_report(self) -> None:
        folder = os.environ.get(REPORTS_VARIABLE)
        if folder:
            path = Path(folder) / f"{self._pid}.json"
            try:
                path.with_suffix(".tmp").write_text(json.dumps(self._report), encoding="utf-8")
                os.replace(path.with_suffix(".tmp"), path)
            except OSError:
                pass  # the one who asked for it is gone


def _some(names: Sequence[str], limit: int = 6) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


def _uncaught() -> BaseException | None:
    """The exception that ended the program; test runners leave others in the same place."""
    raised: BaseException | None = getattr(sys, "last_value", None)
    trace = getattr(sys, "last_traceback", None)
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith("<frozen runpy"):
        trace = trace.tb_next
    if raised is None or trace is None or trace.tb_frame.f_globals.get("__name__") != "__main__":
        return None
    return raised if trace.tb_frame.f_code.co_name == "<module>" else None


def _program() -> str:
    """A name for the running program: its script's, or its module's."""
    main = sys.modules.get("__main__")
    spec: ModuleSpec | None = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "builtins"):
        return spec.name.removesuffix(".__main__").rpartition(".")[2]
    return Path(sys.argv[0] if sys.argv and sys.argv[0] else "program").stem or "program"


def _is_our_command() -> bool:
    """Whether this process is a command of ours: it is no program to record."""
    argv = sys.orig_argv
    if "-m" in argv[1:-1] and argv[argv.index("-m") + 1].partition(".")[0] in _OUR_COMMANDS:
        return True
    return any(os.path.basename(arg) in _OUR_COMMANDS for arg in argv[:2])


# --- after the import of torch ----------------------------------------------------------------------


def _after_import_of_torch(then: Callable[[], None]) -> None:
    """Calls `then` when torch has been imported; at once where it is there."""
    if "torch" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _TorchImport(then))


class _TorchImport:
    """Finds torch as everybody else does, once, and calls back when it is loaded."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            load(module)
            self._then()

        loader.exec_module = exec_module
        return spec


__all__ = ["REPORTS_VARIABLE", "Autostart", "cancel", "start_from_environment"]
