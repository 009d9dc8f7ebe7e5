"""Faulty kernels: one op of one module returns something else than it should.

The fault sits *below* the recorder: a dispatch mode entered before it stands in for the kernel, so that the
trace holds the same ops with the same arguments, and one wrong result. Which op is drawn from those that
the module's own body runs on floats.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .cases import Subject, Truth, aten, mutant
from .models import BATCH, SEQ

# Moves and casts compute nothing; a mask's huge constants would overflow.
_NO_ARITHMETIC = frozenset(
    aten(
        "_to_copy",
        "_unsafe_view",
        "arange",
        "bernoulli",
        "clone",
        "copy",
        "empty",
        "empty_like",
        "full",
        "full_like",
        "lift_fresh",
        "masked_fill",
        "ones",
        "scalar_tensor",
        "where",
        "zeros",
        "zeros_like",
    )
)
_HUGE = 1e30
MATMULS = aten("mm", "addmm", "bmm")

Corrupt = Callable[[torch.Tensor], None]


@mutant(changes="kernel")
def kernel_scaled(subject: Subject) -> Truth:
    """A kernel's results are off by a constant factor. Ref: openxla/xla#46110 (an epilogue's alpha)"""
    factor = subject.draw.choice((1.01, 1.03, 0.98))
    return _faulty(subject, f"times {factor:g}", lambda out: out.mul_(factor))


@mutant(changes="kernel")
def kernel_element(subject: Subject) -> Truth:
    """A kernel writes one element wrongly (a tail or a race). Ref: NVIDIA/cutlass#3536"""

    def corrupt(out: torch.Tensor) -> None:
        # Row SEQ - 1 of the first, unpadded sequence: no mask hides it.
        rows = out.shape[-2] if out.ndim > 1 else 1
        row = SEQ - 1 if rows in (SEQ, BATCH * SEQ) else 0
        index = (*[0] * (out.ndim - 2), row, 0) if out.ndim > 1 else (0,)
        out[index] += 8 * out.square().mean().sqrt()

    return _faulty(subject, "one element off by 8 rms", corrupt)


@mutant(changes="kernel")
def kernel_bfloat16(subject: Subject) -> Truth:
    """A float32 matmul runs on bfloat16 operands. Ref: ml-explore/mlx#3860, pytorch/pytorch#67384"""
    return _faulty(subject, "operands rounded to bfloat16", None, only=MATMULS)


def _faulty(
    subject: Subject, what: str, corrupt: Corrupt | None, only: tuple[str, ...] | None = None
) -> Truth:
    sites = [site for site in _sites(subject) if only is None or site[1] in only]
    path, op, n = subject.draw.choice(sites)
    fault = _Fault(subject.target, path, op, n, corrupt)
    subject.around_target.append(fault.planted)
    return Truth(module=path, ops=(op,), what=f"{op} {n}: {what}")


def base_name(func: torch._ops.OpOverload) -> str:
    """`aten.add` of `aten::add_.Tensor`."""
    return func._schema.name.replace("::", ".").removesuffix("_")


class _Bodies(TorchDispatchMode):
    """Knows, for every op, in which module's own body it runs."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._stack: list[str] = []
        self._seen: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Follows the module calls and the ops of one run."""
        self._seen.clear()
        kept: list[tuple[torch.nn.Module, Any]] = []
        try:
            for path, module in self._model.named_modules():
                kept.append((module, module.__dict__.get("forward")))
                module.forward = self._followed(path, module.forward)
            with self:
                yield
        finally:
            for module, forward in kept:
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _followed(self, path: str, forward: Any) -> Any:
        @functools.wraps(forward)
        def followed(*args: Any, **kwargs: Any) -> Any:
            self._stack.append(path)
            try:
                return forward(*args, **kwargs)
            finally:
                self._stack.pop()

        return followed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._stack:
            return func(*args, **(kwargs or {}))
        site = (self._stack[-1], base_name(func))
        n = self._seen[site]
        self._seen[site] += 1
        return self.run((*site, n), func, args, kwargs or {})

    def run(self, site: tuple[str, str, int], func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Log(_Bodies):
    """Lists the ops that a kernel fault can be planted in."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.sites: list[tuple[str, str, int]] = []

    def run(self, site: tuple[str, str, int], func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        first = out[0] if isinstance(out, tuple | list) and out else out
        aliases = any(result.alias_info is not None for result in func._schema.returns)
        if (
            isinstance(first, torch.Tensor)
            and first.is_floating_point()
            and first.numel() > 1
            and not aliases
            and site[1] not in _NO_ARITHMETIC
            and first.abs().max().item() < _HUGE
        ):
            self.sites.append(site)
        return out


class _Fault(_Bodies):
    """Corrupts the result (or, without `corrupt`, rounds the operands) of the n-th such op of a body."""

    def __init__(self, model: torch.nn.Module, path: str, op: str, n: int, corrupt: Corrupt | None) -> None:
        super().__init__(model)
        self._site = (path, op, n)
        self._corrupt = corrupt

    def run(self, site: tuple[str, str, int], func: Any, args: Any, kwargs: Any) -> Any:
        if site != self._site:
            return func(*args, **kwargs)
        if self._corrupt is None:
            args = [a.bfloat16().to(a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        out = func(*args, **kwargs)
        if self._corrupt is not None:
            self._corrupt(out[0] if isinstance(out, tuple | list) else out)
        return out


def _sites(subject: Subject) -> list[tuple[str, str, int]]:
    log = _Log(copy.deepcopy(subject.target))
    with torch.no_grad(), log.planted():
        log._model(**subject.target_inputs)
    return log.sites
