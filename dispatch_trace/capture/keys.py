"""What stands for a call in the search for what is recorded of it: equal only where a record shows the same.

Numbers need care: 1, 1.0 and True are equal, and so are 0.0 and -0.0.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from dispatch_trace.capture.ops import OpInfo
from dispatch_trace.capture.plain import PLAIN_TENSORS

KEYWORDS = object()
_BOOLS = ("false", "true")  # no argument takes a text or a truth value in the same place
CONSTANTS = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format})
shape_and_dtype = attrgetter("shape", "dtype")

Key = tuple[Any, ...]


class NoKey(Exception):
    """A value that equality and hash do not tell from every other."""


def exact(value: Any, of_tensor: Callable[[torch.Tensor], Any] | None = None) -> Any:
    """What stands for a value.

    Args:
      of_tensor: what stands for a plain tensor.
    Raises:
      NoKey: there is no such thing.
    """
    kind = type(value)
    if kind is int or kind is str or value is None:
        return value
    if kind is bool:
        return _BOOLS[value]
    if kind is float:
        return value.hex()
    if kind is list or kind is tuple:
        if value and type(value[0]) is int:
            return tuple(value)
        return tuple([exact(v, of_tensor) for v in value])
    if kind in PLAIN_TENSORS and of_tensor is not None:
        return of_tensor(value)
    if kind in CONSTANTS:
        return value
    raise NoKey


def call_key(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> Key:
    """What stands for a call of an op by shapes, dtypes and plain arguments.

    Raises:
      NoKey: as `exact`.
    """
    key = [info, *[exact(value, shape_and_dtype) for value in args]]
    if kwargs:
        key.append(KEYWORDS)
        for name, value in kwargs.items():
            key += (name, exact(value, shape_and_dtype))
    key.append(exact(out, shape_and_dtype))
    return tuple(key)


def quick_key(info: OpInfo, num_args: int) -> Callable[..., Key]:
    """A function (out, *args) that does what `call_key` does, for so many arguments and no keywords.

    Its keys look otherwise, and equal none of those. It has no loop and asks no question: arguments come by
    the dispatcher, so that each has the type that the schema says. It is Python compiled from the schema, and
    goes through `exact` where a type leaves a choice. None where there may be a tensor raises AttributeError.
    """
    schema = info.func._schema
    names = [f"a{i}" for i in range(num_args)]
    returns = [str(each.type) for each in schema.returns]
    outs = ["out"] if len(returns) == 1 else [f"out[{i}]" for i in range(len(returns))]
    types = [*(str(each.type) for each in schema.arguments[:num_args]), *returns]
    parts = [_part(name, kind) for name, kind in zip([*names, *outs], types, strict=True)]
    made: Callable[..., Key] = eval(
        f"lambda {', '.join(['out', *names])}: (info, {', '.join(parts)})",
        {"info": info, "exact": exact, "shape_and_dtype": shape_and_dtype},
    )
    return made


def _part(name: str, kind: str) -> str:
    """What stands for an argument of this type, as source code."""
    if kind in ("Tensor", "Optional[Tensor]"):
        return f"{name}.shape, {name}.dtype"
    if kind in ("int", "bool", "str"):
        return name
    if kind == "float":
        return f"{name}.hex()"
    if kind == "List[int]":
        return f"tuple({name})"
    return f"exact({name}, shape_and_dtype)"
