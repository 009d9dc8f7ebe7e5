"""`capture_tensor`: a value named by the model's own code, recorded where it stands.

Outside a recording, and for a tensor outside every recorded call, it does nothing but return its argument.
"""

from __future__ import annotations

import torch

from dispatch_trace.capture.frames import Frame
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.registry import TensorRegistry

# The recordings in progress; a registry, because model code has no other way to reach them.
ACTIVE: list[Tracer] = []


def capture_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Records `tensor` under `name` in the module call that is running, and returns it.

    Args:
      name: what to find it by; a name used again in the same call is counted (n = 0, 1, …).
      tensor: [*shape], any dtype and layout. It is neither changed nor kept alive.
    Returns: `tensor` itself.
    """
    if torch.compiler.is_compiling():
        registry = TensorRegistry._instance
        if registry is not None:
            registry.register_manual_tensor(name, tensor)
        return tensor
    if not ACTIVE:
        return tensor
    for tracer in ACTIVE:
        frame = open_frame(tracer)
        if frame is None:
            continue
        try:
            put_inline(tracer, frame, name, tensor, tracer.find_source(2))
        except Exception as error:
            tracer.fault(error)
    return tensor


def open_frame(tracer: Tracer) -> Frame | None:
    """The frame that an inline capture of this thread belongs to; None where nothing is recorded now."""
    state = tracer.state
    if state.busy or not tracer.active:
        return None
    frame = state.frame or tracer.outside_frame()
    return frame if frame is not None and (frame.records_module or frame.records_ops) else None


def put_inline(
    tracer: Tracer, frame: Frame, name: str, tensor: torch.Tensor, source: tuple[str, int] | None
) -> None:
    """Records a tensor under a name in a frame, where names that are used again are counted."""
    n = frame.count(f"inline:{name}")
    with tracer.own_ops(tracer.state):
        tracer.put_inline(frame, name, n, tensor, source=source)
