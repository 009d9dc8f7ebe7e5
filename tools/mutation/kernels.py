"""Faulty kernels: one op of one module call returns something else than it should.

The fault sits *below* the recorder: a dispatch mode entered before it stands in for the kernel, so that the
trace holds the same ops with the same arguments, and one wrong result. Which op is drawn from those that
the module's own body runs on floats. The `kernel_*` kinds are coarse enough to be seen in the output of a
float32 model; the `fault_*` kinds (in `rounding`) are not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


@mutant(changes="kernel", fp32_only=True)
def kernel_bfloat16(subject: Subject) -> Truth:
    """A float32 matmul runs on bfloat16 operands. Ref: ml-explore/mlx#3860, pytorch/pytorch#67384"""
    return _faulty(subject, "operands rounded to bfloat16", None, only=MATMULS)


def _faulty(
    subject: Subject, what: str, corrupt: Corrupt | None, only: tuple[str, ...] | None = None
) -> Truth:
    site = subject.draw.choice([s for s in sites_of(subject) if only is None or s.op in only])
    fault = _Fault(subject.target, site, corrupt)
    subject.around_target.append(fault.planted)
    return site.truth(what)


class Site(NamedTuple):
    """The n-th op of a name in the body of one module call."""

    module: str
    call: int
    op: str
    n: int

    def truth(self, what: str) -> Truth:
        return Truth(
            module=self.module, call=self.call, ops=(self.op,), n=self.n, what=f"{self.op} {self.n}: {what}"
        )


def base_name(func: torch._ops.OpOverload) -> str:
    """`aten.add` of `aten::add_.Tensor`."""
    return func._schema.name.replace("::", ".").removesuffix("_")


class Bodies(TorchDispatchMode):
    """Knows, for every op, in which module call's own body it runs."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._stack: list[tuple[str, int]] = []
        self._seen: Counter[tuple[str, int, str]] = Counter()
        self._calls: Counter[str] = Counter()

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Follows the module calls and the ops of one run."""
        self._seen.clear()
        self._calls.clear()
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
            self._stack.append((path, self._calls[path]))
            self._calls[path] += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._stack.pop()

        return followed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._stack:
            return func(*args, **(kwargs or {}))
        key = (*self._stack[-1], base_name(func))
        site = Site(*key, self._seen[key])
        self._seen[key] += 1
        return self.run(site, func, args, kwargs or {})

    def run(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Log(Bodies):
    """Lists the ops that a kernel fault can be planted in."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.sites: list[Site] = []
        self.sizes: dict[Site, int] = {}

    def run(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        first = out[0] if isinstance(out, tuple | list) and out else out
        aliases = any(result.alias_info is not None for result in func._schema.returns)
        if (
            isinstance(first, torch.Tensor)
            and first.is_floating_point()
            and first.numel() > 1
            and not aliases
            and site.op not in _NO_ARITHMETIC
            and first.abs().max().item() < _HUGE
        ):
            self.sites.append(site)
            self.sizes[site] = first.numel()
        return out


class _Fault(Bodies):
    """Corrupts the result (or, without `corrupt`, rounds the operands) of the n-th such op of a body."""

    def __init__(self, model: torch.nn.Module, site: Site, corrupt: Corrupt | None) -> None:
        super().__init__(model)
        self._site = site
        self._corrupt = corrupt

    def run(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        if site != self._site:
            return func(*args, **kwargs)
        if self._corrupt is None:
            args = [a.bfloat16().to(a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        out = func(*args, **kwargs)
        if self._corrupt is not None:
            self._corrupt(out[0] if isinstance(out, tuple | list) else out)
        return out


def sites_of(subject: Subject, at_least: int = 2) -> list[Site]:
    """Where a kernel fault can be planted: ops on floats whose result has that many elements."""
    log = _Log(copy.deepcopy(subject.target))
    with torch.no_grad(), log.planted():
        log._model(**subject.target_inputs)
    return [site for site in log.sites if log.sizes[site] >= at_least]
