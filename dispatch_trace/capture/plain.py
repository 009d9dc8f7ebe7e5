"""Plain tensors and plain arguments: what they are, and how a trace keeps them."""

from __future__ import annotations

from typing import Any

import torch

from dispatch_trace.registry import Opaque
from dispatch_trace.store.layouts import dtype_name

PLAIN = frozenset({type(None), bool, int, float, str})
PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def intercepts_ops(cls: type) -> bool:
    """Whether a tensor class sees ops itself; one with `__torch_function__` alone holds plain data."""
    return cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def encode(value: Any) -> Any:
    """A plain argument in the form that a trace keeps (schema of values: docs/format.md)."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is torch.dtype:
        return {"dtype": dtype_name(value)}
    if kind is torch.device:
        return {"device": str(value)}
    if kind is torch.layout:
        return {"layout": str(value).removeprefix("torch.")}
    if kind is torch.memory_format:
        return {"memory_format": str(value).removeprefix("torch.")}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.Generator):
        return {"generator": str(value.device)}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        return {"dict": {str(k): encode(v) for k, v in value.items()}}
    if kind is Opaque:
        return {"opaque": value.name}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {"opaque": kind.__name__}
    if isinstance(value, int):  # an enum, a bool subclass
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    return {"opaque": f"{kind.__module__}.{kind.__qualname__}"}
