"""Local replay: ops that compute badly on their own inputs, and what looks like it and is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aligning import Net, batch, changed, net
from torch.utils._python_dispatch import TorchDispatchMode

import dispatch_trace as dt

Spoil = Callable[[torch.Tensor], torch.Tensor]


class Faulty(TorchDispatchMode):
    """A backend whose kernel for one op is wrong in its n-th call; the recorder sees an ordinary op."""

    def __init__(self, overload: str, number: int, spoil: Spoil) -> None:
        super().__init__()
        self._overload, self._number, self._spoil = overload, number, spoil

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func) == self._overload:
            self._number -= 1
            if self._number == -1:
                return self._spoil(out)
        return out


def ulp_up(x: torch.Tensor) -> torch.Tensor:
    """One unit in the last place further from zero."""
    kind = torch.int32 if x.dtype == torch.float32 else torch.int16
    return (x.view(kind) + 1).view(x.dtype)


def one_element(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[x.abs().argmax()] *= 1.1
    return x


def not_a_number(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[5] = float("nan")
    return x


SPOILS: dict[str, Spoil] = {
    "scale": lambda x: x * (1.01 if x.dtype == torch.bfloat16 else 1.001),
    "one ulp": ulp_up,
    "one element": one_element,
}


@contextmanager
def kernel(fault: Faulty | None) -> Iterator[None]:
    if fault is None:
        yield
    else:
        with fault:
            yield


def aligned(
    tmp_path: Path,
    fault: Faulty | None,
    *,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    save: str = "tensors",
    target: torch.nn.Module | None = None,
    **options: Any,
) -> dt.Alignment:
    models = (net(), net() if target is None else target)
    for name, model, dtype, wrong in zip(("ref", "target"), models, dtypes, (None, fault), strict=True):
        model, x = model.to(dtype), batch().to(dtype)
        with torch.no_grad(), kernel(wrong), dt.record(tmp_path / name, model, save=save, overwrite=True):
            model(x)
    return dt.align(tmp_path / "ref", tmp_path / "target", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_faulty_kernel_is_named_by_the_op(spoil: str, dtype: torch.dtype, tmp_path: Path) -> None:
    found = aligned(tmp_path, Faulty("aten.gelu.default", 1, SPOILS[spoil]), dtypes=(dtype, dtype))
    first = found.first
    assert found.verdict == "diverged" and first is not None, found.reasons
    assert (first.module, first.op, first.label) == ("blocks.1", "aten.gelu", "introduced")
    assert first.judge == first.evidence["judge"] == "local replay"
    assert [f.module for f in found.findings if f.fatal] == ["blocks.1"]


def test_below_the_rounding_of_the_target_s_precision(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    fault = Faulty("aten.addmm.default", 3, SPOILS["scale"])
    first = aligned(tmp_path, fault, dtypes=dtypes).first
    assert first is not None and (first.module, first.op) == ("blocks.1.down", "aten.addmm")
    assert aligned(tmp_path, None, dtypes=dtypes).verdict == "match"


def test_from_leaves_alone(tmp_path: Path) -> None:
    first = aligned(tmp_path, Faulty("aten.gelu.default", 2, one_element), save="leaves").first
    assert first is not None and (first.module, first.op) == ("blocks.2", "aten.gelu")


@pytest.mark.parametrize(
    ("overload", "number", "module"),
    [("aten.gelu.default", 0, "blocks.0"), ("aten.addmm.default", 6, "head")],
    ids=["the first of three", "the only one of its form"],
)
def test_a_unit_in_the_last_place_from_leaves_alone(
    overload: str, number: int, module: str, tmp_path: Path
) -> None:
    first = aligned(tmp_path, Faulty(overload, number, ulp_up), save="leaves").first
    assert first is not None and (first.module, first.op) == (module, overload.removesuffix(".default"))
    assert first.evidence["test"] == "bits"


def test_nothing_is_known_of_a_lone_kernel_on_another_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Faulty("aten.addmm.default", 6, ulp_up)
    aligned(tmp_path, fault, save="leaves")
    monkeypatch.setattr("dispatch_trace.judge.alone.processor_name", lambda: "another")
    assert dt.align(tmp_path / "ref", tmp_path / "target").verdict == "match"


def test_a_nan_that_the_op_does_not_make_here(tmp_path: Path) -> None:
    first = aligned(tmp_path, Faulty("aten.gelu.default", 0, not_a_number)).first
    assert first is not None and (first.module, first.label) == ("blocks.0", "nonfinite")


def test_the_sound_target_is_not_blamed(tmp_path: Path) -> None:
    assert aligned(tmp_path, None).verdict == "match"
    assert not [
        f for f in aligned(tmp_path, None, dtypes=(torch.float32, torch.bfloat16)).findings if f.fatal
    ]


def test_another_program_is_blamed_before_a_kernel(tmp_path: Path) -> None:
    def scaled(model: Any) -> None:
        model.blocks[2].scale = 1.5

    fault = Faulty("aten.gelu.default", 0, one_element)
    first = aligned(tmp_path, fault, target=changed(scaled)).first
    assert first is not None and first.judge == "twins" and first.module == "blocks.2"


def test_twins_false_executes_nothing(tmp_path: Path) -> None:
    found = aligned(tmp_path, Faulty("aten.gelu.default", 1, ulp_up), twins=False)
    assert not [f for f in found.findings if f.judge == "local replay"]


OTHER_KERNELS = """
import sys, torch
sys.path[:0] = sys.argv[3:]
from aligning import Net, batch, net, record
torch.backends.mkldnn.enabled = sys.argv[2] != "plain"
for save in ("tensors", "leaves"):
    record(f"{sys.argv[1]}-{save}", net().to(torch.float32), batch(rows=64), save=save)
"""


@pytest.mark.parametrize("which", ["plain", "capability"])
def test_other_sound_kernels_are_no_fault(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(Path(__file__).parent), str(Path(dt.__file__).parents[1])]
    for name in ("ref", "target"):
        if name == "target" and which == "capability":
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
        kind = which if name == "target" else "usual"
        command = [sys.executable, "-c", OTHER_KERNELS, str(tmp_path / name), kind, *paths]
        subprocess.run(command, check=True, timeout=120)
    for save in ("tensors", "leaves"):
        found = dt.align(tmp_path / f"ref-{save}", tmp_path / f"target-{save}")
        assert found.verdict == "match", (save, found.findings[:2])
    assert isinstance(net(), Net)
