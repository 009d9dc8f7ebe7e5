"""`trace_lines`: what each line of chosen Python modules assigns, recorded among the ops.

Modules that are imported from now on are compiled with hooks (`line_code`); functions of modules that are
there already get the code of their own source, compiled in the same way, and theirs back in the end. Off
unless asked for. Guarantees: nothing is written to disk (no `.pyc`); a function whose source is not what it
runs is left alone; outside a recording a hook returns at once; a fault of ours never reaches the program.
"""

from __future__ import annotations

import builtins
import linecache
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import Any

from dispatch_trace.errors import NoMatchError
from dispatch_trace.line_code import HOOK, compile_with_hooks
from dispatch_trace.patterns import Selector, compile_select

_MAX_NAMED = 4
_MAX_VALUES = 64  # tensors of one nested value
_DEEPEST = 4

_tracings: list[trace_lines] = []


class trace_lines:
    """Records the tensors that each line of the chosen modules assigns, while a recording lasts.

        with dt.trace_lines("my_model(\\\\..*)?"), dt.record("run.trace", model):
            model(x)

    Each becomes an inline record of the module call that is running, named `function.variable`
    (`Attention.forward.scores`), in the order of the run; a name used again in a call is counted (n = 0,
    1, …). Values in lists, tuples and dicts have their place in the name (`forward.outs[1]`).

    Args:
      patterns: one or several, matched whole against dotted names of Python modules; the script is
        `__main__`.

    Attributes:
      modules: names of the modules that have hooks, and how many functions of each were changed in place
        (0: it was imported with hooks).
      skipped: functions left alone because their source is not what they run, or cannot be found.
      silent: functions that torch.compile has compiled: what their lines assign there is not recorded.
    Raises:
      PatternError: a pattern is no regular expression.
      NoMatchError: at the end of the block, where no module matched.
    """

    def __init__(self, patterns: str | Iterable[str]) -> None:
        self._selector: Selector = compile_select(patterns, option="lines")
        self._replaced: list[tuple[FunctionType, CodeType]] = []
        self._seen: dict[int, FunctionType] = {}
        self.modules: dict[str, int] = {}
        self.skipped: list[str] = []
        self.silent: dict[str, None] = {}
        setattr(builtins, HOOK, _assigned)
        self._finder = _Finder(self)
        sys.meta_path.insert(0, self._finder)
        _tracings.append(self)
        self.refresh()

    def wants(self, module: str) -> bool:
        return self._selector.matches(module)

    def refresh(self) -> None:
        """Changes functions of matching modules that have come since (those of a script, for one)."""
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and self.wants(name) and self.modules.get(name) != 0:
                self.modules[name] = self.modules.get(name) or 0
                self._change(name, module)
                if not self.modules[name]:
                    del self.modules[name]

    def stop(self) -> None:
        """Gives functions their own code back; modules that were imported with hooks keep theirs, idle."""
        if self in _tracings:
            _tracings.remove(self)
            sys.meta_path.remove(self._finder)
            for function, code in self._replaced:
                function.__code__ = code
            self._replaced.clear()

    def __enter__(self) -> trace_lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None and not self.modules:
            raise NoMatchError(self.why_none())

    def why_none(self) -> str:
        """Why no module has hooks, for a message."""
        patterns = ", ".join(map(repr, self._selector.patterns))
        if self.skipped:
            return f"lines={patterns}: the source of {self.skipped[0]} is missing, or not what it runs."
        names = [name for name in sys.modules if not name.startswith(("torch.", "_"))]
        from dispatch_trace.patterns import closest_paths

        closest = ", ".join(map(repr, closest_paths(self._selector.patterns[0], names)))
        return (
            f"lines={patterns} matched no module with functions. Closest: {closest}. "
            "Patterns are full-match regexes on dotted names of Python modules; the script is '__main__'."
        )

    def _change(self, name: str, module: ModuleType) -> None:
        by_file: dict[str, tuple[dict[Any, CodeType], dict[Any, CodeType]] | None] = {}
        for function in _functions_of(module):
            code = function.__code__
            if id(function) in self._seen:
                continue
            self._seen[id(function)] = function
            if code.co_filename not in by_file:
                by_file[code.co_filename] = _codes_of(code.co_filename)
            found, key = by_file[code.co_filename], _key(code)
            if found is None or key not in found[1] or found[0][key].co_code != code.co_code:
                self.skipped.append(f"{name}.{code.co_qualname}")
                continue
            self._replaced.append((function, code))
            function.__code__ = found[1][key]
            self.modules[name] += 1


def silent_notice() -> str:
    """Says which functions with hooks were compiled, so that their lines are missing; "" where none were."""
    names = list(dict.fromkeys(name for tracing in _tracings for name in tracing.silent))
    if not names:
        return ""
    more = len(names) - _MAX_NAMED
    shown = ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
    return (
        f"lines of {shown} are not recorded where torch.compile compiled them; taps record inside compiled "
        "code (docs/compiled.md), and without compilation lines are whole"
    )


def stop_all() -> None:
    for tracing in list(_tracings):
        tracing.stop()


# --- modules that are imported ----------------------------------------------------------------------


class _Finder:
    """Finds a module as the others do, and has it compiled with hooks where it is wanted."""

    def __init__(self, tracing: trace_lines) -> None:
        self._tracing = tracing

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._tracing.wants(name):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if isinstance(finder, _Finder) or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if type(spec.loader) is SourceFileLoader:
                    spec.loader = _Loader(spec.loader.name, spec.loader.path)
                    self._tracing.modules[name] = 0
                return spec
        return None


class _Loader(SourceFileLoader):
    """Compiles with hooks, and neither reads nor writes `.pyc` files."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile_with_hooks(self.get_data(path), path)


# --- modules that are there -------------------------------------------------------------------------


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that a module defines: its own, its classes', and what decorators have wrapped."""
    stack: list[Any] = [value for value in list(vars(module).values())]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            stack += [value.fget, value.fset]
        elif isinstance(value, FunctionType):
            if value.__globals__ is vars(module) and value.__code__.co_name != "<lambda>":
                yield value
            stack.append(getattr(value, "__wrapped__", None))
        elif isinstance(value, type) and value.__module__ == module.__name__:
            stack += list(vars(value).values())


def _codes_of(filename: str) -> tuple[dict[Any, CodeType], dict[Any, CodeType]] | None:
    """The code objects of a source file, as it stands and with hooks; None where there is no source."""
    source = "".join(linecache.getlines(filename))
    if not source:
        return None
    try:
        plain = compile(source, filename, "exec", dont_inherit=True)
        return dict(_inner(plain)), dict(_inner(compile_with_hooks(source, filename)))
    except (SyntaxError, ValueError):
        return None


def _inner(code: CodeType) -> Iterator[tuple[Any, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield _key(constant), constant
            yield from _inner(constant)


def _key(code: CodeType) -> tuple[Any, ...]:
    return code.co_qualname, code.co_firstlineno, code.co_freevars


# --- the hook ---------------------------------------------------------------------------------------

_PLAIN = frozenset({int, float, bool, str, bytes, type(None), slice, range})
_torch: Any = None
_inline: Any = None
_active: list[Any] = []


def _assigned(function: str, *named: Any) -> Any:
    """Records the tensors among (name, value, name, value, …), and returns the last value."""
    value = named[-1]
    if not _tracings or _is_idle(function):
        return value
    try:
        for name, held in zip(named[::2], named[1::2], strict=True):
            if type(held) in _PLAIN:
                continue
            if "." in name and type(held) is tuple:
                held = _attribute(*held)
            for suffix, tensor in _tensors(held, "", 0):
                _record(f"{function}.{name}{suffix}", tensor)
    except Exception as error:
        for tracer in _active:
            tracer.fault(error)
    return value


def _is_idle(function: str) -> bool:
    """Whether no recording is on; where code is being compiled nothing may be looked at, but is told."""
    global _torch, _inline, _active
    if _torch is None:
        inline = sys.modules.get("dispatch_trace.capture.inline")
        if inline is None:
            return True
        _torch, _inline, _active = sys.modules["torch"], inline, inline.ACTIVE
    if _torch.compiler.is_compiling():
        return _silenced(function)
    return not _active


def _silenced(function: str) -> bool:
    """Notes that a function is being compiled: Dynamo runs this itself, while it compiles."""
    for tracing in _tracings:
        tracing.silent[function] = None
    return True


# What torch.compiler.assume_constant_result does, before torch is imported.
_silenced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that was just set, without running anybody's property."""
    table = getattr(owner, "__dict__", {})
    if name in table:
        return table[name]
    for kind in ("_buffers", "_parameters"):
        if name in (held := table.get(kind) or {}):
            return held[name]
    return None


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _torch.Tensor):
        yield name, value
    elif depth < _DEEPEST and isinstance(value, (list, tuple)) and len(value) <= _MAX_VALUES:
        for index, each in enumerate(value):
            yield from _tensors(each, f"{name}[{index}]", depth + 1)
    elif depth < _DEEPEST and isinstance(value, dict) and len(value) <= _MAX_VALUES:
        for key, each in value.items():
            yield from _tensors(each, f"{name}[{key!r}]", depth + 1)


def _record(name: str, tensor: Any) -> None:
    caller = sys._getframe(2)
    source = (caller.f_code.co_filename, caller.f_lineno)
    for tracer in _active:
        frame = _inline.open_frame(tracer)
        if frame is not None:
            _inline.put_inline(tracer, frame, name, tensor, source)


__all__ = ["stop_all", "trace_lines"]
