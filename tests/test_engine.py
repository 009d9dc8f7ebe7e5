"""A model runner with a static cache, buckets and batches lines up with unpadded single requests."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ROOT
from engine import Engine, SlotCache, reference, reference_vision, tiny_llama, tiny_vit
from torch._dynamo.utils import counters

import dispatch_trace as dt

PROMPTS = {"a": [3, 14, 15, 9, 2], "b": [6, 5, 35], "c": [8, 9, 7, 9, 3, 2, 38, 4, 6, 26]}
MODULES = [
    "model.embed_tokens",
    "model.rotary_emb",
    "model.layers.0-1",
    "model.layers.0-1..*",
    "model.norm",
    "lm_head",
]

Fault = Callable[[Engine], None]


def record_reference(path: Path, model: Any, prompts: dict[str, list[int]] = PROMPTS) -> dict[str, list[int]]:
    with dt.record(path, model, save="tensors") as rec:
        return reference(model, rec, prompts)


def record_engine(path: Path, engine: Engine, **options: Any) -> dict[str, list[int]]:
    with dt.record(path, engine.target, **{"save": "tensors", **options}) as rec:
        engine.record("target", rec)
        return engine.generate(PROMPTS)


def align_engine(folder: Path, fault: Fault | None = None, **engine: Any) -> dt.Alignment:
    """An eager engine, perhaps with a fault, against the reference."""
    model = tiny_llama()
    record_reference(folder / "ref.trace", model)
    runner = Engine(copy.deepcopy(model), **engine)
    if fault is not None:
        with torch.no_grad():
            fault(runner)
    record_engine(folder / "engine.trace", runner)
    return dt.align(folder / "ref.trace", folder / "engine.trace")


# Eager: op by op ------------------------------------------------------------------------------------------


def test_an_eager_engine_matches_step_by_step(tmp_path: Path) -> None:
    model = tiny_llama()
    expected = record_reference(tmp_path / "ref.trace", model)
    assert record_engine(tmp_path / "engine.trace", Engine(copy.deepcopy(model))) == expected
    found = dt.align(tmp_path / "ref.trace", tmp_path / "engine.trace")
    assert found.verdict == "match", found.reasons
    assert "12 pairs, up to 3 steps of the reference to one of the target" in str(found.notices)
    assert found.coverage["compute_bytes"]["share"] > 0.95
    transforms = {note for pair in found.pairs for note in pair.notes if "of 4 (dim 0)" in note}
    assert any("row 2 of 4" in note for note in transforms)


def rope_restarts_at_decode(engine: Engine) -> None:
    rotary = engine.target.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(
        x, position_ids=position_ids + 1 if x.shape[1] == 1 else position_ids
    )


def mask_lets_padding_in(engine: Engine) -> None:
    cache = engine.lanes["target"].cache
    assert cache is not None
    places = torch.arange(cache.length + 1)
    cache.mask = lambda at: (places <= at[:, None, :, None]) | (places == cache.length)  # type: ignore[method-assign]


def weight_is_scaled(engine: Engine) -> None:
    engine.target.model.layers[1].mlp.up_proj.weight.mul_(1.01)


def cache_is_written_one_place_on(engine: Engine) -> None:
    cache = engine.lanes["target"].cache
    assert cache is not None
    plain = cache.update

    def update(keys: torch.Tensor, values: torch.Tensor, layer: int, kwargs: Any = None) -> Any:
        places = cache.places
        if layer == 1 and keys.shape[2] == 1:
            cache.places = places + 1
        try:
            return plain(keys, values, layer)
        finally:
            cache.places = places

    cache.update = update  # type: ignore[method-assign]


def rows_are_swapped(engine: Engine) -> None:
    mlp = engine.target.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x.flip(0) if len(x) > 1 else x)


@pytest.mark.parametrize(
    ("fault", "module", "step"),
    [
        (rope_restarts_at_decode, "model.rotary_emb", 3),
        (mask_lets_padding_in, "model.layers.0.self_attn", 0),
        (weight_is_scaled, "model.layers.1.mlp.up_proj", 0),
        (cache_is_written_one_place_on, "model.layers.1.self_attn", 3),
        (rows_are_swapped, "model.layers.1.mlp", 3),
    ],
)
def test_a_fault_of_the_engine_is_named(tmp_path: Path, fault: Fault, module: str, step: int) -> None:
    found = align_engine(tmp_path, fault)
    assert found.verdict == "diverged" and found.first is not None
    assert (found.first.module, found.first.step) == (module, step)


def test_two_engines_with_static_caches_match(tmp_path: Path) -> None:
    model = tiny_llama()
    one_by_one = Engine(model, batch=1, buckets=(12,))
    assert record_engine(tmp_path / "ref.trace", one_by_one) == record_engine(
        tmp_path / "engine.trace", Engine(copy.deepcopy(model), buckets=(16,))
    )
    found = dt.align(tmp_path / "ref.trace", tmp_path / "engine.trace")
    assert found.verdict == "match", found.reasons


def test_proposals_that_the_target_rejects_do_not_disturb(tmp_path: Path) -> None:
    model = tiny_llama()
    expected = record_reference(tmp_path / "ref.trace", model)
    engine = Engine(copy.deepcopy(model), draft=tiny_llama(layers=1, width=16, seed=1), proposals=2)
    assert record_engine(tmp_path / "engine.trace", engine) == expected
    found = dt.align(tmp_path / "ref.trace", tmp_path / "engine.trace")
    assert found.verdict == "match", found.reasons
    assert any("have no counterpart" in notice for notice in found.notices)  # what was rejected


# Compiled: module by module, as a model runner integrates it -----------------------------------------------


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    dt.TensorRegistry._instance = None
    torch._dynamo.reset()


def serve(folder: Path, engine: Engine, modules: dict[str, list[str]], backend: str) -> dict[str, list[int]]:
    """Compiles with captures, warms up, serves; no request may compile anything."""
    outside = dt.TensorRegistry._instance
    engine.attach(folder, modules)
    engine.compile(backend)
    engine.warm_up()
    engine.enable()
    graphs = counters["stats"]["unique_graphs"]
    found = engine.generate(PROMPTS)
    if engine.vision is not None:
        engine.encode(IMAGES)
    engine.close()
    dt.TensorRegistry._instance = outside
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    return found


IMAGES = {
    name: torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(seed))
    for name, seed in (("a", 1), ("b", 2))
}


def test_a_compiled_engine_of_three_models_matches_the_eager_reference(tmp_path: Path) -> None:
    target, draft, vision = tiny_llama(), tiny_llama(layers=1, width=16, seed=1), tiny_vit()
    expected = record_reference(tmp_path / "ref.trace", target)
    with dt.record(tmp_path / "vision.trace", vision, save="tensors") as rec:
        reference_vision(vision, rec, IMAGES)
    engine = Engine(*(copy.deepcopy(m) for m in (target, draft, vision)), buckets=(16,), proposals=1)
    modules = {
        "target": MODULES,
        "draft": ["model.layers.0", "lm_head"],
        "vision": ["layers.0-1", "layernorm"],
    }
    assert serve(tmp_path / "captures", engine, modules, "aot_eager") == expected

    found = dt.align(tmp_path / "ref.trace", tmp_path / "captures" / "target")
    assert found.verdict == "match", found.reasons
    assert found.coverage["records"]["target-only"] == 0
    compared = {p.target.module for p in found.pairs if p.target and p.outcome == "matched"}
    assert {"lm_head", "model.layers.0.self_attn", "model.layers.1.mlp.down_proj"} <= compared

    pictures = dt.align(tmp_path / "vision.trace", tmp_path / "captures" / "vision")
    assert pictures.verdict == "match", pictures.reasons
    drafted = dt.open(tmp_path / "captures" / "draft")
    assert {r.module for r in drafted.records} == {"model.layers.0", "lm_head"}  # nothing of the others


def test_a_fault_of_one_compiled_module_is_named(tmp_path: Path) -> None:
    model = tiny_llama()
    record_reference(tmp_path / "ref.trace", model)
    engine = Engine(copy.deepcopy(model), buckets=(16,))
    rope_restarts_at_decode(engine)
    serve(tmp_path / "captures", engine, {"target": MODULES}, "aot_eager")
    found = dt.align(tmp_path / "ref.trace", tmp_path / "captures" / "target")
    assert found.verdict == "diverged" and found.first is not None
    assert (found.first.module, found.first.step) == ("model.rotary_emb", 3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_inductor_computes_what_the_reference_does(tmp_path: Path) -> None:
    model = tiny_llama(layers=1)
    expected = record_reference(tmp_path / "ref.trace", model)
    engine = Engine(copy.deepcopy(model), buckets=(16,))
    modules = ["model.layers.0", "model.layers.0.(self_attn|mlp)", "lm_head"]
    assert serve(tmp_path / "captures", engine, {"target": modules}, "inductor") == expected
    found = dt.align(tmp_path / "ref.trace", tmp_path / "captures" / "target")
    assert found.verdict == "match", found.reasons


def test_a_cache_row_is_its_requests_own() -> None:
    cache = SlotCache(tiny_llama().config, slots=2, length=4)
    cache.rows, cache.places = torch.tensor([1]), torch.tensor([[0, 1, 4]])
    keys = torch.randn(1, 2, 3, 8)
    seen, _ = cache.update(keys, keys, 0)
    assert torch.equal(seen[0, :, :2], keys[0, :, :2]) and not seen[0, :, 2:4].any()
    assert not cache.keys[0][0].any()


def test_the_guide_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "engine.md").read_text(), re.M | re.S)
    assert len(blocks) >= 4
    (tmp_path / "guide.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "guide.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()
    assert first.startswith("match ['steps were paired by request and position: 6 pairs")
    assert second == "diverged layers.1 in step 2"
