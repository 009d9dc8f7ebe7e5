"""Bugs and clean pairs that any model has a place for, found by what modules are and not by their names.

They are planted in the models of `other_models`. Where a module is never called, because another one reads
its weights itself, that one is right as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from . import clean as pairs
from .cases import Subject, Truth, aten, clean, mutant
from .program import SDPA_OPS
from .weights import EMBEDDING_OPS, LINEAR_OPS, NORM_OPS

_PROJECTIONS = (torch.nn.Linear, Conv1D, torch.nn.Conv1d, torch.nn.Conv2d)
_READERS = (
    *LINEAR_OPS,
    *NORM_OPS,
    *EMBEDDING_OPS,
    *aten(
        "convolution", "baddbmm", "bmm", "view", "expand", "unsqueeze", "native_group_norm", "add", "select"
    ),
)
_EPS = ("eps", "variance_epsilon", "layer_norm_eps")
_SCALES = ("scaling", "scale", "softmax_scale", "inv_norm_factor")

Place = tuple[str, Any, str]


@mutant(needs="other", changes="weights")
def parameter_scaled(subject: Subject) -> Truth:
    """A scale was left in a parameter. Ref: huggingface/transformers#29421"""
    path, module, name = _parameter(subject, lambda module, weight: True)
    factor = subject.draw.choice((1.01, 1.05, 1.5))
    _set(module, name, getattr(module, name) * factor)
    return _read(subject, path, module, f"{name} times {factor:g}")


@mutant(needs="other", changes="weights")
def parameter_row(subject: Subject) -> Truth:
    """One row of a parameter is zero, negated or doubled. Ref: microsoft/BitNet#608"""
    path, module, name = _parameter(
        subject, lambda module, weight: weight.ndim > 1 and not isinstance(module, torch.nn.Embedding)
    )
    weight = getattr(module, name).detach().clone()
    row, factor = subject.draw.choice(range(len(weight))), subject.draw.choice((0.0, -1.0, 2.0))
    weight[row] *= factor
    _set(module, name, weight)
    return _read(subject, path, module, f"row {row} of {name} times {factor:g}")


@mutant(needs="other", changes="weights")
def parameter_transposed(subject: Subject) -> Truth:
    """A square matrix was copied untransposed. Ref: AutoGPTQ/AutoGPTQ#139"""
    path, module, name = _parameter(
        subject,
        lambda module, weight: (
            weight.ndim > 1
            and weight.shape[-1] == weight.shape[-2] > 1
            and not isinstance(module, torch.nn.Embedding)
        ),
    )
    _set(module, name, getattr(module, name).transpose(-1, -2).contiguous())
    return _read(subject, path, module, f"{name} transposed")


@mutant(needs="other", changes="weights")
def siblings_swapped(subject: Subject) -> Truth:
    """Two projections of one module were exchanged. Ref: flashinfer-ai/flashinfer#4130"""
    found = []
    for path, module in subject.target.named_modules():
        children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
        children = [each for each in children if isinstance(each[1], _PROJECTIONS)]
        found += [
            (a, b)
            for i, a in enumerate(children)
            for b in children[i + 1 :]
            if a[1].weight.shape == b[1].weight.shape
        ]
    (path, one), (other_path, other) = subject.draw.choice(found)
    one.weight.data, other.weight.data = other.weight.data, one.weight.data
    truth = _read(subject, path, one, f"{path} and {other_path} exchanged")
    return Truth(
        module=path, ops=truth.ops, what=truth.what, accept_modules=(*truth.accept_modules, other_path)
    )


@mutant(needs="other")
def epsilon(subject: Subject) -> Truth:
    """Another epsilon in one norm. Ref: huggingface/candle#271"""
    found = [
        (path, module, name)
        for path, module in _called(subject)
        for name in _EPS
        if "Norm" in type(module).__name__ and isinstance(getattr(module, name, None), float)
    ]
    path, module, name = subject.draw.choice(found)
    value = subject.draw.choice((1e-3, 1e-2))
    setattr(module, name, value)
    return Truth(module=path, ops=(*NORM_OPS, *aten("add", "native_group_norm")), what=f"{name} {value:g}")


@mutant(needs="other")
def output_scaled(subject: Subject) -> Truth:
    """What a module returns is off by a few per cent."""
    right: Any
    tensors = [
        path
        for path, out in _outputs(subject).items()
        if path and isinstance(out, torch.Tensor) and out.is_floating_point()
    ]
    path = subject.draw.choice(sorted(tensors))
    module: Any = subject.target.get_submodule(path)
    factor, right = subject.draw.choice((1.01, 0.97, 1.05)), module.forward
    module.forward = lambda *args, **kwargs: right(*args, **kwargs) * factor
    return Truth(module=path, ops=aten("mul"), what=f"times {factor:g}")


@mutant(needs="other")
def score_scale(subject: Subject) -> Truth:
    """Scores are scaled otherwise; where no module holds a scale, its output is. Ref: mlc-ai/mlc-llm#3426"""
    found = [
        (path, module, name)
        for path, module in _called(subject)
        for name in _SCALES
        if isinstance(vars(module).get(name), float)
    ]
    if not found:
        return output_scaled(subject)
    path, module, name = subject.draw.choice(found)
    factor = subject.draw.choice((1.1, 2.0, 0.5))
    setattr(module, name, getattr(module, name) * factor)
    return Truth(
        module=path, ops=(*aten("mul", "div", "baddbmm"), *SDPA_OPS), what=f"{name} times {factor:g}"
    )


@mutant(needs="other")
def through_bfloat16(subject: Subject) -> Truth:
    """What a projection reads loses half of its digits and more. Ref: ml-explore/mlx#3860 (family)"""
    path, module = subject.draw.choice(
        [(path, module) for path, module in _called(subject) if isinstance(module, torch.nn.Linear)]
    )
    module.forward = lambda x: F.linear((x.bfloat16() * 1.02).to(x.dtype), module.weight, module.bias)
    return Truth(
        module=path, ops=(*LINEAR_OPS, *aten("_to_copy", "mul")), what="input in bfloat16, times 1.02"
    )


@clean(needs="other")
def other_threads(subject: Subject) -> float:
    """Another number of threads, the weights through a file."""
    pairs.saved_and_loaded(subject)
    return pairs.threads(subject)


@clean(needs="other")
def other_bfloat16(subject: Subject) -> float:
    """A bfloat16 run against the float32 reference."""
    return pairs.bfloat16_target(subject)


def _called(subject: Subject) -> list[tuple[str, Any]]:
    """The target's modules that its run calls."""
    found = _outputs(subject)
    return [(path, module) for path, module in subject.target.named_modules() if path in found]


def _outputs(subject: Subject) -> dict[str, Any]:
    """What each module of the target returned last, by path."""
    found: dict[str, Any] = {}

    def keep(path: str) -> Callable[[Any, Any, Any], None]:
        return lambda module, args, out: found.update({path: out})

    hooks = [module.register_forward_hook(keep(path)) for path, module in subject.target.named_modules()]
    try:
        subject.run_target()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _parameter(subject: Subject, wanted: Callable[[Any, torch.Tensor], bool]) -> Place:
    found = [
        (path, module, name)
        for path, module in subject.target.named_modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.numel() > 1 and wanted(module, weight)
    ]
    return subject.draw.choice(found)


def _set(module: Any, name: str, value: torch.Tensor) -> None:
    getattr(module, name).data = value.detach().clone()


def _read(subject: Subject, path: str, module: Any, what: str) -> Truth:
    called = dict(_called(subject))
    around = path
    while around and around not in called:
        around = around.rpartition(".")[0]
    plain = isinstance(module, (*_PROJECTIONS, torch.nn.Embedding)) or type(module).__name__.endswith("Norm")
    ops = _READERS if plain and around == path else None
    return Truth(module=path, ops=ops, what=what, accept_modules=() if around == path else (around,))
