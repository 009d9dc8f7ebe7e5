"""Teacher forcing: what is put in place heals what follows, is what a recorder sees, and leaves no trace."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from aligning import batch, changed, net, record
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import dispatch_trace as dt
from dispatch_trace.errors import ShapeMismatchError


def change_eps(model: Any) -> None:
    model.blocks[1].norm.eps = 1e-2


@pytest.fixture
def ref(tmp_path: Path) -> Path:
    return record(tmp_path / "ref", net(), batch())


@pytest.mark.parametrize(
    ("site", "heals"),
    [
        ("blocks.1.norm", True),
        ("blocks.1.norm:aten.native_layer_norm:0", True),
        ("blocks.1.norm:aten.native_layer_norm/out[0]", True),
        ("blocks.1", True),
        ("blocks.0", False),
        ("blocks.1:aten.add:0", True),
        ("head", True),
    ],
)
@pytest.mark.parametrize("outside", [True, False], ids=["around", "within"])
def test_what_follows_heals_and_a_recording_sees_what_was_put_in_place(
    tmp_path: Path, ref: Path, site: str, heals: bool, outside: bool
) -> None:
    target = changed(change_eps)
    forced = tmp_path / "forced"
    with torch.no_grad():
        if outside:
            with dt.inject(target, ref, at=site) as injection, dt.record(forced, target, save="tensors"):
                out = target(batch())
        else:
            with dt.record(forced, target, save="tensors"), dt.inject(target, ref, at=site) as injection:
                out = target(batch())
    expected = next(dt.open(ref).find(kind="module", module="", step=0)).tensor()
    assert torch.equal(out, expected) is heals
    done = injection.injected[0]
    assert done.site.startswith(site.split("/")[0]) and (done.step, done.call) == (0, 0)
    assert (done.change > 1e-4) is (site != "blocks.0")
    # The recorded value at the site is the reference's.
    module, _, op = site.split("/")[0].partition(":")
    where: dict[str, Any] = {"kind": "op", "op": op.split(":")[0]} if op else {"kind": "module"}
    seen, theirs = (next(dt.open(p).find(module=module, **where)).tensor() for p in (forced, ref))
    assert torch.equal(seen, theirs)
    assert not _get_current_dispatch_mode_stack()
    with torch.no_grad():
        assert not torch.equal(target(batch()), expected)  # nothing stays behind


def test_the_values_are_cast_and_every_step_takes_its_own(tmp_path: Path) -> None:
    path = tmp_path / "ref"
    model = net()
    with torch.no_grad(), dt.record(path, model, save="leaves"):
        first, second = model(batch()), model(batch() + 1)
    half = copy.deepcopy(model).bfloat16()
    with torch.no_grad(), dt.inject(half, path, at="head"):
        outs = half(batch().bfloat16()), half((batch() + 1).bfloat16())
    assert torch.equal(outs[0], first.bfloat16()) and torch.equal(outs[1], second.bfloat16())
    with torch.no_grad(), dt.inject(model, path, at="head", step=1) as injection:
        assert torch.equal(model(batch()), first)
        assert torch.equal(model(batch()), second)  # its second call takes step 1
    assert [done.step for done in injection.injected] == [1]
    with pytest.warns(RuntimeWarning, match="no value for steps 2"), dt.inject(model, path, at="head"):
        for _ in range(3):
            model(batch())


class Twice(nn.Module):
    """One module called twice, nested outputs, an op in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.fc(x)
        y.mul_(2.0)
        z = self.fc(y)
        return {"out": z, "both": (y, z + 1)}


def test_calls_slots_and_ops_in_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(4, 8)
    path = record(tmp_path / "ref", model, x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc.weight.mul_(1.5)
        expected, plain = model(x), other(x)
        with dt.inject(other, path, at=["fc#1"]) as injection:
            out = other(x)
        assert [(d.call, d.slot) for d in injection.injected] == [(1, "out")]
        assert torch.equal(out["out"], expected["out"]) and torch.equal(out["both"][0], plain["both"][0])
        with dt.inject(other, path, at=":aten.mul:0"):
            out = other(x)
        assert torch.equal(out["both"][0], expected["both"][0]) and not torch.equal(
            out["out"], expected["out"]
        )
        with dt.inject(other, path, at="/out.both[1]"):
            out = other(x)
        assert torch.equal(out["both"][1], expected["both"][1])
        assert torch.equal(out["out"], plain["out"]) and isinstance(out["both"], tuple)


def test_gradients_pass_as_if_the_value_had_been_computed(tmp_path: Path, ref: Path) -> None:
    target = changed(change_eps)
    for site in ("blocks.1", "blocks.1:aten.add:0"):
        target.zero_grad()
        with dt.inject(target, ref, at=site):
            target(batch()).sum().backward()
        assert target.blocks[0].up.weight.grad.abs().sum() > 0  # type: ignore[union-attr, index]


def test_sites_under_other_names(tmp_path: Path, ref: Path) -> None:
    class Port(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * 2.0  # type: ignore[no-any-return]

    port = Port()
    with torch.no_grad(), dt.inject(port, ref, at={"body.blocks.2": "blocks.0"}) as injection:
        port(batch())
    assert injection.injected[0].site == "body.blocks.2" and injection.injected[0].change > 0.01


def test_a_site_that_is_never_reached_is_an_error_unless_the_block_raised(ref: Path) -> None:
    model = net()
    with (
        pytest.raises(dt.CaptureError, match=r"head was never reached \(the model was never called\)"),
        dt.inject(model, ref, at="head"),
    ):
        pass
    model.head.forward = lambda x: x  # type: ignore[union-attr, method-assign, assignment]
    with (
        torch.no_grad(),
        pytest.raises(dt.CaptureError, match=r"head:aten\.addmm:0 was never reached"),
        dt.inject(model, ref, at="head:aten.addmm"),
    ):
        model(batch())
    with pytest.raises(KeyError, match="mine"), dt.inject(model, ref, at="head"):
        raise KeyError("mine")
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize(
    ("site", "error", "message"),
    [
        ("blocks.7", dt.NoMatchError, "the model has no module 'blocks.7'. Closest: 'blocks"),
        ("head:aten.mm:0", dt.NoMatchError, "has no record of head:aten.mm:0"),
        ("head#3", dt.NoMatchError, "has no record of head#3"),
        ("head/out[4]", dt.NoMatchError, "no slot 'out[4]'; it has out"),
        ("head:aten.t:0", dt.ConfigError, "only looks at memory that another op wrote"),
        ("head:aten mm", dt.ConfigError, "is no site"),
        ([], dt.ConfigError, "got none"),
    ],
)
def test_sites_that_cannot_be(ref: Path, site: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught, dt.inject(net(), ref, at=site):
        pass
    assert message in str(caught.value)


def test_missing_data_other_shapes_and_shared_modules(tmp_path: Path, ref: Path) -> None:
    stats = record(tmp_path / "stats", net(), batch(), save="stats")
    with (
        pytest.raises(dt.NotExecutableError, match="holds no data to put in place"),
        dt.inject(net(), stats, at="head"),
    ):
        pass
    model = net()
    with (
        torch.no_grad(),
        pytest.raises(ShapeMismatchError) as caught,
        dt.inject(model, ref, at="head"),
    ):
        model(batch(rows=3))
    assert "the model computes [3, 8], the trace holds [6, 8]" in str(caught.value)
    model.blocks[1] = model.blocks[0]  # type: ignore[index, union-attr]
    with pytest.raises(dt.ConfigError, match="this module has 2 names"), dt.inject(model, ref, at="blocks.1"):
        pass


def test_compiled_code_is_refused_but_a_compiled_module_as_a_whole_is_not(ref: Path) -> None:
    model = net()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")  # type: ignore[index, union-attr, assignment]
    with (
        pytest.raises(dt.ConfigError, match=r"lies in compiled code \(blocks\.1\)"),
        dt.inject(model, ref, at="blocks.1.norm"),
    ):
        pass
    model.blocks[1]._orig_mod.norm.eps = 1e-2  # type: ignore[index, union-attr]
    with torch.no_grad(), dt.inject(model, ref, at="blocks.1"):
        out = model(batch())
    assert torch.equal(out, next(dt.open(ref).find(kind="module", module="")).tensor())
