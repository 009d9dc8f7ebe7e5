"""Module calls that come down to the forward of the module's class: which they are, what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dispatch_trace.schema import GradPhase

CALL_IMPL = torch.nn.Module._call_impl
# Changed in place by those who register hooks for all modules.
HOOKS_OF_ALL: tuple[dict[int, Any], ...] = (
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)
_before, _after, _of_gradients, _before_gradients = HOOKS_OF_ALL
_is_tracing: Callable[[], Any] = torch._C._get_tracing_state


class Site:
    """What every call of one module has in common, where the module has one name.

    Attributes:
      key: of the count of its calls, see `Counters.calls_of`.
      forward, original: the forward of its class, wrapped and not.
    """

    __slots__ = ("forward", "key", "model", "original", "path", "records_module", "records_ops")

    def __init__(
        self, model: str, path: str, records_ops: bool, records_module: bool, forward: Any, original: Any
    ) -> None:
        self.model = model
        self.path = path
        self.key: tuple[GradPhase, str] = "fwd", path
        self.records_ops = records_ops
        self.records_module = records_module
        self.forward = forward
        self.original = original


def calls_forward_only(module: torch.nn.Module, wrapper: Any) -> bool:
    """Whether calling the module comes down to its class's forward: no hook, no tracing, no replacement.

    The same question that `nn.Module._call_impl` asks first; answered here, the call costs two Python
    frames less, which is about what the recorder adds.
    """
    # A module's attributes are looked up through Python; its dict is not.
    cls, own = type(module), module.__dict__
    try:
        hooks = (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        )
    except KeyError:  # no `super().__init__()`: calling it will say so
        return False
    return not (
        hooks
        or "forward" in own
        or "_compiled_call_impl" in own
        or cls.forward is not wrapper
        or cls._call_impl is not CALL_IMPL
        or _before
        or _after
        or _of_gradients
        or _before_gradients
        or _is_tracing() is not None
    )
