"""What people use instead: the first module whose output differs by a fixed rule. For the scoreboard only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from .cases import Subject

Outputs = dict[tuple[str, int], torch.Tensor]


def _allclose(target: torch.Tensor, ref: torch.Tensor) -> bool:
    """With the tolerances that torch.testing takes for the coarser of the two dtypes."""
    rtol = 1.6e-2 if torch.bfloat16 in (target.dtype, ref.dtype) else 1.3e-6
    return torch.allclose(target.double(), ref.double(), rtol=rtol, atol=1e-5, equal_nan=True)


def _relative_l2(target: torch.Tensor, ref: torch.Tensor) -> bool:
    difference = (target.double() - ref.double()).norm()
    return bool(difference <= 1e-3 * ref.double().norm())


def _cosine(target: torch.Tensor, ref: torch.Tensor) -> bool:
    product = (target.double() * ref.double()).sum()
    return bool(product >= 0.99 * target.double().norm() * ref.double().norm())


RULES: dict[str, Callable[[torch.Tensor, torch.Tensor], bool]] = {
    "allclose": _allclose,
    "relative L2 > 1e-3": _relative_l2,
    "cosine < 0.99": _cosine,
}


def first_differing(subject: Subject) -> dict[str, str | None]:
    """By rule, the path of the first module (in order of completion) whose output differs; None: none does.

    Modules that only one side calls are passed over, as those rules do.
    """
    reference = _module_outputs(subject, "reference")
    found: dict[str, str | None] = dict.fromkeys(RULES)
    for key, value in _module_outputs(subject, "target").items():
        ref = reference.get(key)
        if ref is None or ref.shape != value.shape:
            continue
        for rule, agrees in RULES.items():
            if found[rule] is None and not agrees(value, ref):
                found[rule] = key[0]
    return found


def _module_outputs(subject: Subject, which: Any) -> Outputs:
    model = subject.reference if which == "reference" else subject.target
    outputs: Outputs = {}
    calls: Counter[str] = Counter()

    def keep(path: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            first = _first_tensor(output)
            if first is not None and first.is_floating_point():
                outputs[path, calls[path]] = first.detach().clone()
            calls[path] += 1

        return hook

    handles = [module.register_forward_hook(keep(path)) for path, module in model.named_modules()]
    try:
        with subject.surrounded(which):
            subject.call(which)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    items = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    for item in items:
        tensor = _first_tensor(item)
        if tensor is not None:
            return tensor
    return None
