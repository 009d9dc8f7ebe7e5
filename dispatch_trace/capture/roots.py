"""Which modules are the roots of a program that names none, and what they are called.

A root is a module that is called outside every other root: the outermost one, or the ones that were asked
for. Where the module is called by a method of a larger one (`vae.decode`, `model.generate`), the larger
one is the root: the method's frame is on the stack, and its first argument holds the module. Names come from
the stack too: the attribute or the variable under which the program holds the root.

Guarantees: each module object is looked at once, so that a program whose root is never called pays a look
into a dict for each call; nothing of the program is kept alive, its frames' locals included.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Container, Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from dispatch_trace.capture.frames import walk_modules
from dispatch_trace.patterns import Selector, compile_select

_ATTRIBUTE_PATH = re.compile(r"[^\W\d]\w*(\.\w+)+")
_OPTIMIZED = 1  # the code flag CO_OPTIMIZED: a function, whose `f_locals` is a copy
_MAX_ATTRIBUTES = 2000
_OWN = ("dispatch_trace.capture", "dispatch_trace.autostart")


class RootFinder:
    """Finds the roots of one program.

    Args:
      specs: what roots are asked for; each is matched whole, as a pattern (full-match regular expression,
        `layers.0-3` expands) over a module's class (`UNet`, `models.unet.UNet`) and its path
        (`unet`, `pipe.unet`, `model.layers.3`). Empty: every outermost module that has parameters or
        buffers, and the very first one in any case.

    Attributes:
      refused: classes of modules that were called outside every root and are none, and how many of each.
      looked_at: modules that belong to no root, by id; they leave when they die.
      names: of the roots found, in order of their first calls.
    Raises:
      PatternError: a spec is no pattern.
    """

    def __init__(self, specs: tuple[str, ...] = ()) -> None:
        self.specs = specs
        self.refused: dict[str, int] = {}
        self._selector: Selector | None = compile_select(specs, option="root") if specs else None
        self.looked_at: dict[int, weakref.ref[torch.nn.Module]] = {}
        self.names: list[str] = []
        self._models: dict[str, Any] = {}
        self._modules: list[dict[str, Any]] = []

    @property
    def model_names(self) -> dict[str, str]:
        """The name that the first root, recorded without one, has got since there are several."""
        return {"": self.names[0]} if len(self.names) > 1 else {}

    def refuses(self, module: torch.nn.Module) -> bool:
        """Whether the module was looked at before and belongs to no root."""
        known = self.looked_at.get(id(module))
        return known is not None and known() is module

    def find(self, module: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
        """The root that a module called outside every known root belongs to, None where there is none.

        Returns: the name to record it under ("" for the first) and the root.
        """
        root = self.look(module)
        if root is None:
            return None
        self.names.append(name_of(root, self.names))
        return (self.names[-1] if len(self.names) > 1 else ""), root

    def look(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """The same, without taking the root for found."""
        if self.refuses(module) or torch._C._get_tracing_state() is not None:
            return None
        frames = list(_frames(sys._getframe(1)))
        candidates = [module, *_holders(module, frames)]
        if self._selector is None:
            root = candidates[-1] if not self.names or _has_state(candidates[-1]) else None
        else:
            root = next((m for m in reversed(candidates) if self._matches(m, candidates[-1], frames)), None)
        if root is None:
            self._refuse(module)
        return root

    def header(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields of the header that describe all roots, given those of the one found last."""
        self._models.update(fields["models"])
        self._modules += fields["modules"]
        names = self.model_names
        return {
            **fields,
            "models": {names.get(name, name): about for name, about in self._models.items()},
            "modules": [{**row, "model": names.get(row["model"], row["model"])} for row in self._modules],
            "model_names": names,
        }

    def _refuse(self, module: torch.nn.Module) -> None:
        key, looked_at = id(module), self.looked_at
        looked_at[key] = weakref.ref(module, lambda ref: looked_at.pop(key, None))
        name = type(module).__name__
        self.refused[name] = self.refused.get(name, 0) + 1

    def _matches(self, module: torch.nn.Module, outermost: torch.nn.Module, frames: list[FrameType]) -> bool:
        assert self._selector is not None
        cls = type(_inner(module))
        names = {cls.__name__, f"{cls.__module__}.{cls.__qualname__}", *paths_of(module, frames)}
        names.update(path for path, found, _ in walk_modules(outermost) if found is module and path)
        if any(self._selector.matches(name) for name in names):
            return True
        paths = [spec for spec in self.specs if _ATTRIBUTE_PATH.fullmatch(spec)]
        return any(_resolves(path, module, frames) for path in paths)


def name_of(root: torch.nn.Module, taken: Container[str]) -> str:
    """What the running program calls a module: an attribute, a variable, or else its class.

    Args:
      taken: names of other models.
    """
    candidates = [path.rpartition(".")[2] for path in paths_of(root, list(_frames(sys._getframe(1))))]
    candidates.append(type(_inner(root)).__name__)
    for name in candidates:
        if name not in taken:
            return name
    number = 2
    while f"{candidates[0]}_{number}" in taken:
        number += 1
    return f"{candidates[0]}_{number}"


def paths_of(module: torch.nn.Module, frames: list[FrameType]) -> list[str]:
    """Every path by which the running code reaches a module directly, the most telling first.

    `unet` for an attribute of a method's own object, `pipe.unet` for one of another object or for a dict's
    entry, then variables, those of the outermost code first.
    """
    own: list[str] = []
    held: list[str] = []
    variables: list[str] = []
    for frame in frames:
        first = _first_argument(frame)
        with_locals = _Locals(frame)
        for name, value in with_locals.items():
            if value is module:
                if name != first and not name.startswith("_"):
                    variables.append(name)
            elif not isinstance(value, (torch.nn.Module, type, ModuleType, FunctionType)):
                for attribute in _attributes_holding(module, value):
                    if name == first:
                        own.append(attribute)
                    else:
                        held.append(f"{name}.{attribute}")
        with_locals.forget()
    return list(dict.fromkeys([*own, *held, *reversed(variables)]))


class _Locals:
    """The variables of a frame, without leaving a copy of them behind in the frame."""

    def __init__(self, frame: FrameType) -> None:
        self._values: Any = frame.f_locals
        # Up to Python 3.12 the dict of a function's locals is a copy that the frame keeps, and with it every
        # value; a debugger at work may be about to write it back.
        self._is_copy = (
            bool(frame.f_code.co_flags & _OPTIMIZED)
            and isinstance(self._values, dict)
            and sys.gettrace() is None
        )

    def items(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in list(self._values.items()) if isinstance(name, str)]

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def forget(self) -> None:
        if self._is_copy:
            self._values.clear()
        self._values = {}


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the running code, innermost first, without those of this package's recorder."""
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OWN):
            yield frame
        frame = frame.f_back


def _first_argument(frame: FrameType) -> str:
    code = frame.f_code
    return code.co_varnames[0] if code.co_argcount else ""


def _holders(module: torch.nn.Module, frames: list[FrameType]) -> list[torch.nn.Module]:
    """The modules whose methods are running and that hold this one, inner ones first."""
    found: list[torch.nn.Module] = []
    for frame in frames:
        first = _first_argument(frame)
        if not first:
            continue
        with_locals = _Locals(frame)
        owner = with_locals.get(first)
        with_locals.forget()
        if (
            isinstance(owner, torch.nn.Module)
            and owner is not module
            and not any(owner is other for other in found)
            and any(part is module for part in owner.modules())
        ):
            found.append(owner)
    return found


def _attributes_holding(module: torch.nn.Module, value: Any) -> list[str]:
    """Names under which a plain object, or a dict, holds a module."""
    table = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not isinstance(table, dict) or len(table) > _MAX_ATTRIBUTES:
        return []
    if table.get("__name__") is not None and "__builtins__" in table:
        return []  # somebody's globals()
    return [
        name
        for name, held in list(table.items())
        if held is module and isinstance(name, str) and not name.startswith("_")
    ]


def _resolves(path: str, module: torch.nn.Module, frames: list[FrameType]) -> bool:
    """Whether a dotted path leads to the module from a variable of the running code."""
    first, *rest = path.split(".")
    for frame in frames:
        with_locals = _Locals(frame)
        value = with_locals.get(first)
        with_locals.forget()
        for name in rest:
            if value is None:
                break
            try:
                value = value[name] if isinstance(value, dict) else _part(value, name)
            except Exception:  # a property of the program's may raise whatever it likes
                value = None
        if value is module:
            return True
    return False


def _part(value: Any, name: str) -> Any:
    if isinstance(value, torch.nn.Module) and name in value._modules:
        return value._modules[name]
    return value[int(name)] if name.isdigit() else getattr(value, name, None)


def _inner(module: torch.nn.Module) -> torch.nn.Module:
    """What a compiled wrapper wraps."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def _has_state(module: torch.nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


__all__ = ["RootFinder", "name_of", "paths_of"]
