"""The tap: an operator that compilers cannot see through, whose result is what its input really held.

Guarantees: the copy is made when compiled code reaches it, from the value that the code computed. A plain
`clone()` or an extra graph output gives no such promise: inductor moves and re-derives what it
understands, and hands back a wrong copy where it reuses a buffer (https://github.com/pytorch/pytorch/issues/198094).
Its result has to be used (a graph output, a list that the program reads), or it is removed as dead code.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

NAME = "dispatch_trace::tap"


@functools.cache
def tap_op() -> Any:
    """The overload `dispatch_trace::tap(Tensor x) -> Tensor`, defined when first asked for.

    It works on every device, also for fake and functional tensors, and lets no gradient through.
    """
    # The library object owns the registrations; the cache keeps it as long as the process runs.
    return _Registration().overload


class _Registration:
    """The operator, together with the library object that keeps it registered."""

    def __init__(self) -> None:
        namespace, _, name = NAME.partition("::")
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(f"{name}(Tensor x) -> Tensor", tags=(torch.Tag.needs_exact_strides,))
        library.impl(name, _copy, "CompositeExplicitAutograd")
        # Without this autograd would warn when a backward pass meets a tap.
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(NAME, _copy, lib=library)
        self.overload: Any = getattr(getattr(torch.ops, namespace), name).default
        self.overload._dispatch_trace_library = library


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


__all__ = ["NAME", "tap_op"]
