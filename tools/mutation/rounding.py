"""Kernels that compute with the right operands and return slightly wrong numbers: the `--kernels` family.

Each stands in for one op of one module call, below the recorder. The op's exact result (its operands
widened to float64) is spoilt and rounded to the dtype that the op returns, so that the fault has the size
it is named after in every precision. Its effect at the model's outputs is mostly within rounding: only who
looks at the op alone can see it, and the truth is the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .cases import Subject, Truth, mutant
from .kernels import Bodies, Site, sites_of

# On fewer elements a bias cannot be told from rounding.
MIN_ELEMENTS = 64

# (exact result in float64, the op's own result, random generator) -> what it returns instead
Spoil = Callable[[torch.Tensor, torch.Tensor, torch.Generator], torch.Tensor]


@mutant(changes="fault")
def fault_scaled(subject: Subject) -> Truth:
    """Results are 1 % too large or too small. Ref: openxla/xla#46110 (an epilogue's alpha)"""
    factor = subject.draw.choice((1.01, 0.99))
    return _faulty(subject, f"times {factor:g}", lambda exact, out, _: (exact * factor).to(out.dtype))


@mutant(changes="fault")
def fault_scaled_little(subject: Subject) -> Truth:
    """Results are 0.1 % too large or too small. Ref: openxla/xla#46110 (an epilogue's alpha)"""
    factor = subject.draw.choice((1.001, 0.999))
    return _faulty(subject, f"times {factor:g}", lambda exact, out, _: (exact * factor).to(out.dtype))


@mutant(changes="fault")
def fault_ulp(subject: Subject) -> Truth:
    """Every element is one unit in the last place off, up or down. Ref: pytorch/pytorch#67384 (family)"""

    def spoil(exact: torch.Tensor, out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        up = torch.rand(out.shape, generator=generator) < 0.5
        return torch.nextafter(out, torch.where(up, torch.inf, -torch.inf).to(out.dtype))

    return _faulty(subject, "one ulp off", spoil)


@mutant(changes="fault")
def fault_truncated(subject: Subject) -> Truth:
    """Results are cut off instead of rounded to nearest. Ref: microsoft/onnxruntime#28228 (family)"""
    return _faulty(subject, "rounded towards zero", lambda exact, out, _: towards_zero(exact, out.dtype))


@mutant(changes="fault")
def fault_biased(subject: Subject) -> Truth:
    """Every element is one unit in the last place too large. Ref: pytorch/pytorch#67384 (family)"""

    def spoil(exact: torch.Tensor, out: torch.Tensor, _: torch.Generator) -> torch.Tensor:
        return torch.nextafter(out, torch.full_like(out, torch.inf).copysign(out))

    return _faulty(subject, "one ulp away from zero", spoil)


@mutant(changes="fault")
def fault_element(subject: Subject) -> Truth:
    """One element is off by the size of a typical one. Ref: NVIDIA/cutlass#3536 (a tail or a race)"""

    def spoil(exact: torch.Tensor, out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        wrong = out.clone()
        place = int(torch.randint(out.numel(), (), generator=generator))
        index = torch.unravel_index(torch.tensor(place), out.shape)
        wrong[index] += exact.square().mean().sqrt().to(out.dtype)
        return wrong

    return _faulty(subject, "one element off by 1 rms", spoil)


def towards_zero(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 values in a coarser dtype, their excess digits cut off."""
    near = exact.to(dtype)
    too_far = near.double().abs() > exact.abs()
    return torch.where(too_far, torch.nextafter(near, torch.zeros_like(near)), near)


def _faulty(subject: Subject, what: str, spoil: Spoil) -> Truth:
    site = subject.draw.choice(sites_of(subject, MIN_ELEMENTS))
    seed = subject.draw.choice(range(1 << 30))
    subject.around_target.append(_Spoilt(subject.target, site, spoil, seed).planted)
    return site.truth(what)


class _Spoilt(Bodies):
    """Replaces the (first) result of one op."""

    def __init__(self, model: torch.nn.Module, site: Site, spoil: Spoil, seed: int) -> None:
        super().__init__(model)
        self._site = site
        self._spoil = spoil
        self._seed = seed

    def run(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        if site != self._site:
            return func(*args, **kwargs)
        exact = _widened(func, args, kwargs)
        out = func(*args, **kwargs)
        first = out[0] if isinstance(out, tuple | list) else out
        generator = torch.Generator().manual_seed(self._seed)
        first.copy_(self._spoil(first.double() if exact is None else exact, first.clone(), generator))
        return out


def _widened(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The op's (first) result on float64 operands; None where it has no such kernel."""

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        return value

    args, kwargs = pytree.tree_map(widen, (args, kwargs))
    try:
        out = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        return None
    first: torch.Tensor = out[0] if isinstance(out, tuple | list) else out
    return first.double()
