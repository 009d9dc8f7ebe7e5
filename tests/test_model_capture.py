"""The engine's side: hooks before compilation, brackets around forwards, one trace for each model."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import dispatch_trace as dt
from dispatch_trace import (
    CaptureConfig,
    CaptureError,
    ConfigError,
    HookAfterCompileError,
    ModelCapture,
    NoMatchError,
    PatternError,
    TensorRegistry,
    TraceExistsError,
)


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.fc = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = torch.tanh(self.fc(x))
        dt.capture_tensor("activation", y)
        return {"hidden": x + y, "extras": (y, None)}


class Model(nn.Module):
    def __init__(self, d: int = 8, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(d) for _ in range(num_layers))
        self.head = nn.Linear(d, 3)
        self.unused = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)["hidden"]
        return self.head(x)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    outside, TensorRegistry._instance = TensorRegistry._instance, None
    yield
    TensorRegistry._instance = outside
    torch._dynamo.reset()


def model(seed: int = 0, **sizes: int) -> Model:
    torch.manual_seed(seed)
    return Model(**sizes).eval()


def tokens(seed: int = 1, d: int = 8) -> torch.Tensor:
    return torch.randn(3, d, generator=torch.Generator().manual_seed(seed))


def engine(
    body: nn.Module, folder: Path, modules: Any = ("layers.0-1", "head"), **options: Any
) -> tuple[Any, Any]:
    capture = ModelCapture(body, modules, folder, **options)
    TensorRegistry._instance = capture._registry
    compiled = torch.compile(body, backend="aot_eager", fullgraph=True)
    capture.register_clear_hook(compiled)
    return capture, compiled


def forward(capture: ModelCapture, compiled: Any, x: torch.Tensor, **step: Any) -> torch.Tensor:
    capture.setup_tensor_capture()
    with torch.no_grad():
        out: torch.Tensor = compiled(x)
    capture.save_tensor_captures(torch.arange(x.shape[0]), **{"is_prefill": True, "req_ids": ["a"], **step})
    return out


def test_every_forward_is_a_step_with_the_values_of_that_call(tmp_path: Path) -> None:
    body, reference = model(), model()
    with engine(body, tmp_path / "cap", inputs=True)[0] as capture:
        compiled = torch.compile(body, backend="aot_eager", fullgraph=True)
        capture.register_clear_hook(compiled)
        with torch.no_grad():
            compiled(tokens())  # warm-up
        capture.enable()
        for seed in range(20):
            forward(capture, compiled, tokens(seed), is_prefill=seed == 0, req_ids=[f"r{seed}"])
    assert counters["stats"]["unique_graphs"] == 1
    trace = dt.open(capture.path)
    assert trace.complete and len(list(trace.steps)) == 20
    assert [s.meta["phase"] for s in trace.steps][:2] == ["prefill", "decode"]
    assert trace.steps[7].meta["req_ids"] == ["r7"] and trace.steps[7].meta["positions"] == [0, 1, 2]
    with torch.no_grad():
        for seed in (0, 7, 19):
            x = tokens(seed)
            for i, layer in enumerate(reference.layers):
                out = layer(x)
                (record,) = trace.find(module=f"layers.{i}", step=seed, kind="module")
                assert torch.equal(record.tensor("in[0]"), x)
                assert torch.equal(record.tensor("out.hidden"), out["hidden"])
                assert torch.equal(record.tensor("out.extras[0]"), out["extras"][0])
                (inline,) = trace.find(module=f"layers.{i}", step=seed, kind="inline")
                assert inline.name == "activation" and torch.equal(inline.tensor(), out["extras"][0])
                x = out["hidden"]
            (record,) = trace.find(module="head", step=seed)
            assert torch.equal(record.tensor(), reference.head(x))


def test_switching_writing_on_and_off_compiles_nothing(tmp_path: Path) -> None:
    capture, compiled = engine(model(), tmp_path / "cap")
    with capture:
        for on in (False, True, False, True):
            capture.enable() if on else capture.disable()
            forward(capture, compiled, tokens())
    assert counters["stats"]["unique_graphs"] == 1
    assert len(list(dt.open(capture.path).steps)) == 2


def test_target_draft_and_vision_stay_apart(tmp_path: Path) -> None:
    """All of one class and one shape: only their hooks tell them apart."""
    names = ("target", "draft", "vision")
    bodies = {name: model(seed) for seed, name in enumerate(names)}
    engines = {name: engine(body, tmp_path, subdirectory=name) for name, body in bodies.items()}
    for capture, _ in engines.values():
        capture.enable()
    for name in (*names, "draft", "target"):
        TensorRegistry._instance = engines["target"][0]._registry
        forward(*engines[name], tokens())
        assert TensorRegistry._instance is engines["target"][0]._registry
    for name, (capture, _) in engines.items():
        capture.close()
        trace = dt.open(tmp_path / name)
        assert len(list(trace.steps)) == (1 if name == "vision" else 2)
        (first, *_) = trace.find(module="layers.0", kind="module")
        with torch.no_grad():
            assert torch.equal(
                first.tensor("out.hidden"), model(names.index(name)).layers[0](tokens())["hidden"]
            )
        assert len(list(trace.find(kind="inline", step=0))) == 2


def test_one_bracket_may_hold_several_forwards(tmp_path: Path) -> None:
    capture, compiled = engine(model(), tmp_path / "cap")
    with capture, torch.no_grad():
        capture.enable()
        capture.setup_tensor_capture()
        for seed in range(3):
            compiled(tokens(seed))
        capture.save_tensor_captures(torch.arange(3), is_prefill=False, req_ids=["a"])
    records = list(dt.open(capture.path).find(module="head"))
    assert [(r.step, r.call) for r in records] == [(0, 0), (0, 1), (0, 2)]
    assert not torch.equal(records[0].tensor(), records[2].tensor())


def test_a_forward_that_raises_restores_the_registry(tmp_path: Path) -> None:
    outside = TensorRegistry()
    capture, compiled = engine(model(), tmp_path / "cap")
    TensorRegistry._instance = outside
    with capture:
        capture.enable()
        with pytest.raises(RuntimeError), capture.bracket(torch.arange(3), True, ["a"]):
            raise RuntimeError("the engine's own")
        assert TensorRegistry._instance is outside
        # An engine without the context manager: the next bracket takes over.
        capture.setup_tensor_capture()
        forward(capture, compiled, tokens())
        assert TensorRegistry._instance is outside
    assert len(list(dt.open(capture.path).steps)) == 1


def test_the_filter_takes_names_and_patterns(tmp_path: Path) -> None:
    for number, (given, expected) in enumerate(
        [
            ("head", {"head"}),
            ({"layers.0", "manual.activation_1"}, {"layers.0", "activation"}),
            ([r"layers\.\d"], {"layers.0", "layers.1"}),
        ]
    ):
        torch._dynamo.reset()
        capture, compiled = engine(model(), tmp_path / str(number), capture_filter=given)
        with capture:
            capture.enable()
            forward(capture, compiled, tokens())
        found = {r.name if r.kind == "inline" else r.module for r in dt.open(capture.path).records}
        assert found == expected
    with pytest.raises(NoMatchError, match=r"capture_filter='haed' matched 0 of 3 captured modules"):
        ModelCapture(model(), ["layers.0-1", "head"], tmp_path / "none", capture_filter=["haed"])


def test_the_registry_hands_out_modules_first_then_inline_captures() -> None:
    registry = TensorRegistry()
    x, y = torch.ones(2), torch.zeros(2)
    registry.register_manual_tensor("x", x)
    registry.register_module_tensor("layer", (None, y))
    registry.register_manual_tensor("x", y)
    x.add_(1)
    assert registry.get_all_names() == ["layer", "manual.x", "manual.x_1"]
    assert [t.tolist() for t in registry.get_all_tensors()] == [[0, 0], [1, 1], [0, 0]]
    registry.configure(enabled=False)
    assert registry.get_all_tensors() == []
    registry.configure(enabled=True)
    registry.clear()
    assert registry.get_all_names() == []


class TestBadInput:
    def test_a_model_that_has_run_compiled(self, tmp_path: Path) -> None:
        body = model()
        compiled = torch.compile(body, backend="aot_eager")
        with torch.no_grad():
            compiled(tokens())
        with pytest.raises(HookAfterCompileError, match="Model has been compiled and run already"):
            ModelCapture(compiled, ["head"], tmp_path / "a")
        with (
            ModelCapture(body, ["head"], tmp_path / "b") as capture,
            pytest.raises(HookAfterCompileError, match="before warm-up"),
        ):
            capture.register_clear_hook(compiled)

    def test_what_is_no_module(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module, got function"):
            ModelCapture(lambda x: x, ["head"], tmp_path / "a")  # type: ignore[arg-type]
        with ModelCapture(model(), ["head"], tmp_path / "b") as capture:
            with pytest.raises(ConfigError, match="expected the compiled module, got function"):
                capture.register_clear_hook(lambda x: x)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="wraps another model"):
                capture.register_clear_hook(torch.compile(model(), backend="aot_eager"))

    def test_patterns(self, tmp_path: Path) -> None:
        with pytest.raises(NoMatchError, match=r"modules='layer\.0' matched 0 of"):
            ModelCapture(model(), ["layer.0"], tmp_path / "a")
        with pytest.raises(PatternError, match="upside down"):
            ModelCapture(model(), ["layers.1-0"], tmp_path / "a")
        assert not (tmp_path / "a").exists()

    def test_modules_that_never_run_and_outputs_without_tensors(self, tmp_path: Path) -> None:
        capture, compiled = engine(model(), tmp_path / "cap", ["head", "unused"])
        with capture:
            capture.enable()
            with pytest.raises(CaptureError, match=r"2 modules are hooked and 1 were captured.*'unused'"):
                forward(capture, compiled, tokens())
            forward(capture, compiled, tokens())  # said once; the rest is kept
        assert len(list(dt.open(capture.path).find(module="head"))) == 2

        class Shape(nn.Module):
            def forward(self, x: torch.Tensor) -> int:
                return x.dim()

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.shape = Shape()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.shape(x)

        capture, compiled = engine(Outer(), tmp_path / "shape", ["shape"])
        with capture:
            capture.enable()
            with pytest.raises(CaptureError, match="no tensor in the output of 'shape'"):
                forward(capture, compiled, tokens())

    def test_saving_without_a_bracket_and_too_few_positions(self, tmp_path: Path) -> None:
        capture, compiled = engine(model(), tmp_path / "cap")
        with capture:
            capture.enable()
            with pytest.raises(CaptureError, match=r"without setup_tensor_capture\(\)"):
                capture.save_tensor_captures(torch.arange(3), True, ["a"])
            forward(capture, compiled, tokens())
            with pytest.raises(ConfigError, match=r"positions: 3 for 4 requests \(a, b, c, d\)"):
                forward(capture, compiled, tokens(), req_ids=["a", "b", "c", "d"])
            forward(capture, compiled, tokens())
        assert len(list(dt.open(capture.path).steps)) == 2

    def test_two_captures_into_one_directory(self, tmp_path: Path) -> None:
        capture, compiled = engine(model(), tmp_path / "cap")
        with capture:
            capture.enable()
            forward(capture, compiled, tokens())
            with pytest.raises(TraceExistsError):
                ModelCapture(model(), ["head"], tmp_path / "cap")
            forward(capture, compiled, tokens())
        assert len(list(dt.open(capture.path).steps)) == 2

    def test_an_unwritable_directory(self, tmp_path: Path) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("in the way")
        with pytest.raises(dt.DispatchTraceError, match="file"):
            ModelCapture(model(), ["head"], blocked / "cap")
        assert stat.S_ISREG(blocked.stat().st_mode)

    def test_a_forward_that_captured_nothing(self, tmp_path: Path) -> None:
        capture, _ = engine(model(), tmp_path / "cap")
        with capture:
            capture.enable()
            capture.setup_tensor_capture()
            with pytest.raises(CaptureError, match="captured nothing, of 3 hooked modules"):
                capture.save_tensor_captures(torch.arange(3), True, ["a"])


def test_the_configuration_of_an_engine() -> None:
    config = CaptureConfig.from_neuron_config(
        {
            "tensor_capture": {
                "modules": ["layers.0-3", "visual.blocks.0"],
                "draft_modules": "head",
                "capture_dir": "captures",
                "capture_filter": {"layers.1", "layers.0"},
            },
            "tp_degree": 2,
        }
    )
    assert config.modules == ("layers.0-3",) and config.vision_modules == ("blocks.0",)
    assert config.draft_modules == ("head",) and config.capture_dir == "captures"
    assert config.capture_filter == ("layers.0", "layers.1") and config.enabled
    assert CaptureConfig.from_neuron_config({"modules": "head", "capture_dir": "c"}).modules == ("head",)
    for nothing in (None, {}, {"tp_degree": 2}, {"tensor_capture": None}):
        assert not CaptureConfig.from_neuron_config(nothing).enabled
    for bad, message in [
        ({"modules": "head"}, "no 'capture_dir'"),
        ({"tensor_capture": {"module": "head"}}, "no such key"),
        ({"tensor_capture": ["head"]}, "expected a dict"),
        ({"tensor_capture": {"modules": [1], "capture_dir": "c"}}, "list of strings"),
        ({"tensor_capture": {"modules": "head", "capture_dir": 1}}, "expected a path"),
    ]:
        with pytest.raises(ConfigError, match=message):
            CaptureConfig.from_neuron_config(bad)
    with pytest.raises(PatternError, match="upside down"):
        CaptureConfig.from_neuron_config({"modules": "layers.3-1", "capture_dir": "c"})
