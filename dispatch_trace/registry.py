"""`TensorRegistry`: where values wait between the place that captured them and the writer.

Module hooks and inline captures append to one list, in eager code and inside a compiled graph alike, so
that their order is kept; whoever brackets a forward takes the entries out afterwards. Guarantees: what is
appended is a copy of its own, made before the program can write over the original; appending reads no
flag and no length, because every value that traced code reads becomes a guard and may compile a second
graph. Leaves to others which modules are hooked, and what becomes of the values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal, TypeAlias

import torch

Kind: TypeAlias = Literal["enter", "module", "manual"]
Entry: TypeAlias = tuple[Kind, str, Any]
MANUAL_PREFIX: Final = "manual."


class Opaque:
    """Stands for an object that cannot be looked into.

    Attributes:
      name: qualified name of its type.
    """

    def __init__(self, name: str) -> None:
        self.name = name


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """The copy that every backend can trace (NEURON.md, rule 3)."""
    return tensor.clone()


class TensorRegistry:
    """An ordered store of captured values.

    Integrators may put one at `TensorRegistry._instance`: inline captures in compiled code go to whichever
    stands there, so it must be the same object at warm-up and later.

    Args:
      tap: makes the copy that is kept, [*shape] -> [*shape]; runs inside the compiled graph.
    """

    _instance: ClassVar[TensorRegistry | None] = None

    def __init__(self, tap: Callable[[torch.Tensor], torch.Tensor] = clone) -> None:
        self._entries: list[Entry] = []
        self._tap = tap
        self._enabled = True

    @classmethod
    def get_instance(cls) -> TensorRegistry:
        """The registry that inline captures go to; made on first use."""
        if cls._instance is None:
            cls._instance = TensorRegistry()
        return cls._instance

    def configure(self, *, enabled: bool = True) -> None:
        """Says whether `get_all_tensors` hands anything out; capturing itself is never switched."""
        self._enabled = enabled

    @property
    def enabled(self) -> bool:
        return self._enabled

    def use_tap(self, tap: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Changes what makes the copies; before anything is compiled."""
        self._tap = tap

    def clear(self) -> None:
        """Forgets everything; must run before each forward of a compiled model."""
        self._entries.clear()

    def register_module_tensor(self, name: str, tensor: Any) -> None:
        """Keeps what a module returned.

        Args:
          name: path of the module.
          tensor: a tensor [*shape], or any nesting of lists, tuples, mappings and dataclasses of them.
        """
        self._entries.append(("module", name, self._copied(tensor)))

    def register_module_inputs(self, name: str, inputs: Any) -> None:
        """Keeps that a module was entered, and with what (None where that is not wanted)."""
        self._entries.append(("enter", name, self._copied(inputs)))

    def register_manual_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Keeps a value from inside model code.

        Args:
          name: any text; a repeated one gets `_1`, `_2`, … when it is read.
          tensor: [*shape].
        """
        self._entries.append(("manual", name, self._copied(tensor)))

    def take(self) -> list[Entry]:
        """Every entry in the order of capture, and forgets them."""
        entries = list(self._entries)
        self._entries.clear()
        return entries

    def get_all(self) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of what modules returned, then of inline captures as `manual.NAME`.

        Of an output with several tensors the first; `take` has all.
        """
        if not self._enabled:
            return []
        modules = [(name, first_tensor(value)) for kind, name, value in self._entries if kind == "module"]
        manual: list[tuple[str, torch.Tensor | None]] = []
        seen: dict[str, int] = {}
        for kind, name, value in self._entries:
            if kind == "manual":
                number = seen[name] = seen.get(name, -1) + 1
                manual.append((manual_name(name, number), value))
        return [(name, value) for name, value in modules + manual if value is not None]

    def get_all_names(self) -> list[str]:
        return [name for name, _ in self.get_all()]

    def get_all_tensors(self) -> list[torch.Tensor]:
        """The tensors of `get_all`, in its order."""
        return [tensor for _, tensor in self.get_all()]

    def _copied(self, value: Any) -> Any:
        """`value` with every tensor copied, in plain containers: what tracing can follow."""
        if isinstance(value, torch.Tensor):
            return self._tap(value.detach())
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            return value
        if isinstance(value, Mapping):
            return {key: self._copied(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {name: self._copied(getattr(value, name)) for name in value._fields}
        if isinstance(value, (list, tuple)):
            return [self._copied(item) for item in value]
        if dataclasses.is_dataclass(value):
            return {name: self._copied(getattr(value, name)) for name in value.__dataclass_fields__}
        return Opaque(f"{type(value).__module__}.{type(value).__qualname__}")


def manual_name(name: str, number: int) -> str:
    """What the `number`-th inline capture of one name in a forward is called."""
    return f"{MANUAL_PREFIX}{name}_{number}" if number else f"{MANUAL_PREFIX}{name}"


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor of a nest of lists and dicts, depth first; None where there is none."""
    if isinstance(value, torch.Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        found = first_tensor(item)
        if found is not None:
            return found
    return None
