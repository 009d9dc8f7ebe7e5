"""Modules alone on the reference's inputs: the guilty one is wrong, others are not, nothing changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from aligning import align_models, batch, changed, net, record
from engine import tiny_llama
from torch import nn

import dispatch_trace as dt
from dispatch_trace.isolate import _build, _put


def change_eps(model: Any) -> None:
    model.blocks[1].norm.eps = 1e-2


def test_only_the_guilty_module_is_wrong_by_itself(tmp_path: Path) -> None:
    target = changed(change_eps)
    alignment = align_models(tmp_path, net(), target, batch())
    every = alignment.isolate(target, modules=".*")
    assert {row.module for row in every.wrong} == {"blocks.1.norm", "blocks.1", ""}  # it, and what holds it
    assert all(row.ok for row in every if row.module not in {"blocks.1.norm", "blocks.1", ""})
    assert every.ok is False
    # What follows it in the model is inherited, and right by itself.
    head = next(row for row in every if row.module == "head")
    assert head.error is not None and head.band is not None and head.error <= head.band < 1e-4
    assert "WRONG" in str(every) and "blocks.1.norm" in str(every)


def test_by_default_the_modules_of_the_findings_and_what_is_around_and_beneath_them_run(
    tmp_path: Path,
) -> None:
    target = changed(change_eps)
    alignment = align_models(tmp_path, net(), target, batch())
    assert {row.module for row in alignment.isolate(target)} == {"blocks.1", "blocks.1.norm"}
    same = align_models(tmp_path, net(), net(), batch())
    rows = same.isolate(net())
    assert {row.module for row in rows} == {
        "head",
        *(f"blocks.{i}.{name}" for i in range(3) for name in ("norm", "up", "down")),
    }
    assert rows.ok is True


def test_lower_precision_is_within_the_band_of_its_own_border(tmp_path: Path) -> None:
    half = copy.deepcopy(net()).bfloat16()
    alignment = align_models(tmp_path, net(), half, batch())
    rows = alignment.isolate(half, modules=".*")
    assert rows.ok is True and max(row.error or 0 for row in rows) > 1e-4


@pytest.mark.parametrize("options", [{"save": "leaves"}, {"level": "module", "save": "tensors"}])
def test_inputs_come_back_by_execution_or_from_module_records(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    target = changed(change_eps)
    ref = record(tmp_path / "ref", net(), batch(), **options)
    other = record(tmp_path / "target", target, batch(), **options)
    rows = dt.align(ref, other).isolate(target, modules="blocks.1.(norm|up)")
    assert [(row.module, row.ok) for row in rows] == [("blocks.1.norm", False), ("blocks.1.up", True)]
    known = options.get("level") != "module"
    assert all((row.ref_error is not None) is known for row in rows)
    assert all(("were not recorded" in row.note) is not known for row in rows)


def wrong_compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend with a bug: GELU comes out a little too large."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is nn.functional.gelu:
            node.target = lambda x: torch._C._nn.gelu(x) * 1.01
    graph.recompile()
    return graph.forward


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_modules_compiled_one_by_one(tmp_path: Path, backend: str) -> None:
    alignment = align_models(tmp_path, net(), net(), batch())
    rows = alignment.isolate(net(), modules="blocks.[0-9]+(.norm)?", compile=backend)
    assert rows.backend == backend and len(rows) == 6 and rows.ok is True


def test_a_bug_of_a_compiler_shows_in_the_module_that_has_it(tmp_path: Path) -> None:
    torch._dynamo.register_backend(wrong_compiler, name="wrong_compiler")
    alignment = align_models(tmp_path, net(), net(), batch())
    rows = alignment.isolate(net(), modules="blocks.0.*", compile="wrong_compiler")
    assert [(row.module, row.ok) for row in rows] == [
        ("blocks.0.norm", True),
        ("blocks.0.up", True),
        ("blocks.0.down", True),
        ("blocks.0", False),
    ]


class Restless(nn.Module):
    """Changes everything that a forward can change, and takes more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.cache: torch.Tensor | None = None
        self.seen = torch.zeros(1)
        self.calls = 0

    def forward(
        self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]], flag: bool = False, scale: float = 1.0
    ) -> dict[str, Any]:
        self.calls += 1
        self.seen += 1
        self.cache = pair[0] * scale
        pair[1]["state"].add_(1.0)
        return {"out": self.norm(self.cache), "more": [pair[1]["state"] * 2, flag]}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Restless()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner((x, {"state": torch.zeros(8)}), flag=True, scale=3.0)
        return out["out"] + out["more"][0]  # type: ignore[no-any-return]


def test_the_model_is_left_as_it_was_and_nested_arguments_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Outer().train()
    x = torch.randn(16, 8)
    alignment = align_models(tmp_path, copy.deepcopy(model), copy.deepcopy(model), x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    seen, random = model.inner.seen, torch.get_rng_state()
    rows = alignment.isolate(model, modules="inner")
    assert [row.ok for row in rows] == [True], str(rows)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.inner.calls == 0 and model.inner.cache is None and model.training
    assert model.inner.seen is seen and seen.item() == 0.0
    assert torch.equal(torch.get_rng_state(), random)


def test_what_cannot_be_run_is_a_row_that_says_why(tmp_path: Path) -> None:
    alignment = align_models(tmp_path, net(), net(), batch())
    other = net()
    del other.blocks[2]  # type: ignore[union-attr]
    assert {row.note for row in alignment.isolate(other, modules="blocks.2.*")} == {
        "the model has no such module"
    }

    stats = align_models(tmp_path, net(), net(), batch(), save="stats")
    rows = stats.isolate(net(), modules="head")
    assert rows.ok is None and "holds no data" in rows[0].note and "not told" in str(rows)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing")

    other = net()
    other.head.forward = broken  # type: ignore[union-attr, method-assign, assignment]
    assert alignment.isolate(other, modules="head")[0].note == "ValueError: no such thing"

    dropout = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)).train()
    drawn = align_models(tmp_path, dropout, dropout, batch())
    assert "random" in drawn.isolate(dropout, modules="1")[0].note


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    alignment = align_models(tmp_path, net(), net(), batch())
    with pytest.raises(dt.NoMatchError, match=r"modules='blocks\.9' matched 0"):
        alignment.isolate(net(), modules="blocks.9")


def test_argument_trees_follow_slot_names() -> None:
    tree: dict[Any, Any] = {}
    for place, name in enumerate(("in[0][0]", "in[0][1].k", 'in.names["a b"]', "in.names.c", "in[1]")):
        _put(tree, name, place)
    assert _build(tree) == {0: (0, {"k": 1}), 1: 4, "names": {"a b": 2, "c": 3}}


def test_modules_of_a_transformers_model_are_compiled_one_by_one(tmp_path: Path) -> None:
    ids = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(0))
    target = tiny_llama(layers=1)
    target.model.layers[0].mlp.act_fn.forward = lambda x: 1.02 * torch.nn.functional.silu(x)
    with torch.no_grad():
        for name, model in (("ref", tiny_llama(layers=1)), ("target", target)):
            with dt.record(tmp_path / name, model, save="tensors"):
                model(ids, use_cache=False)
    found = dt.align(tmp_path / "ref", tmp_path / "target")
    names = [f"model.layers.0.{name}" for name in ("self_attn", "mlp", "mlp.act_fn", "mlp.down_proj")]
    rows = found.isolate(target, modules=names, compile="aot_eager")
    assert {row.module: row.ok for row in rows} == dict(zip(names, (True, False, False, True), strict=True))
    assert rows.backend == "aot_eager" and all(row.ref_error is not None for row in rows)
