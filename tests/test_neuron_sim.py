"""On a simulated Neuron device: captures are right, and each fault of its compiler is named.

The programs run in processes of their own, because the device's name is the process's for good; what they
leave behind is read here, where there is no such device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from neuron_sim import build

import dispatch_trace as dt

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing())

HERE = Path(__file__).parent


def run_program(name: str, folder: Path) -> dict[str, Any]:
    """Runs one of the programs and returns its facts."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "neuron_sim" / f"{name}.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("modules")
    return folder, run_program("record_modules", folder)


# -- the device ------------------------------------------------------------------------------------------


def test_the_device_is_one_of_its_own(modules: Any) -> None:
    basics = modules[1]["basics"]
    assert (basics["device"], basics["accelerator"]) == ("neuron:0", "neuron")
    assert basics["round_trip"] and basics["view_writes_through"]
    assert "Expected all tensors to be on the same device" in basics["mixing_devices"]
    assert (basics["lane"], basics["lane_of_cpu"]) == ("simulated", None)


def test_the_manifest_tells_of_the_device(modules: Any) -> None:
    manifest = modules[1]["manifest"]
    assert (manifest["lane"], manifest["backend"], manifest["fallback_ops"]) == ("simulated", "neuron", {})
    assert manifest["rank_map"]["device"] == 0 and manifest["num_graphs"] >= 1


# -- eager execution -------------------------------------------------------------------------------------


def test_the_dispatch_recorder_sees_device_tensors_with_their_values(modules: Any) -> None:
    folder, facts = modules
    trace = dt.open(folder / "eager-tensors")
    assert trace.complete and trace.verify() == []
    assert (trace.header["lane"], trace.header["device"]) == ("simulated", "neuron")
    outputs = [s for r in trace.find(kind="op") for s in r.slots if s.role == "out" and s.is_tensor]
    assert len(outputs) > facts["eager"]["num_ops"] > 100
    assert {s.device for s in outputs} == {"neuron:0"}
    for op in ("aten.mm", "aten.mul", "aten.cat"):
        records = list(trace.find(op=op))
        assert records
        for record in records:
            again, seen = record.execute()["out"], record.tensor("out")
            assert torch.allclose(again.double(), seen.double(), atol=1e-5)


def test_recording_changes_nothing_and_asks_the_device_for_nothing(modules: Any) -> None:
    eager = modules[1]["eager"]
    assert eager["same_bits"] and eager["device"] == "neuron:0" and eager["near_the_cpu"] < 1e-5
    # No cast, no sum, no comparison: values are copied, and everything else happens on the host.
    assert eager["extra_ops"] == {"stats": {}, "tensors": {}}


def test_statistics_of_device_tensors_are_those_of_their_values(modules: Any) -> None:
    stats, tensors = (dt.open(modules[0] / f"eager-{save}") for save in ("stats", "tensors"))
    compared = 0
    for a, b in zip(stats.find(op="aten.mm"), tensors.find(op="aten.mm"), strict=True):
        value = b.tensor("out")
        assert value.device.type == "cpu"
        assert a.stats("out")["sum"] == pytest.approx(float(value.double().sum()), abs=1e-5)
        assert a.hash("out") == b.hash("out") is not None
        compared += 1
    assert compared == 14


def test_an_eager_run_on_the_device_matches_the_cpu(modules: Any) -> None:
    aligned = dt.align(modules[0] / "reference", modules[0] / "eager-tensors")
    assert aligned.verdict == "match", aligned.table()


# -- compiled, at module level ---------------------------------------------------------------------------


def test_captures_come_from_one_graph_and_are_right_on_every_call(modules: Any) -> None:
    folder, facts = modules
    compiled = facts["compiled"]
    assert (compiled["graphs"], compiled["unique_graphs"]) == (1, 1)
    assert compiled["near_eager"] < 1e-5
    trace = dt.open(folder / "compiled")
    assert trace.complete and trace.verify() == []
    assert (trace.header["lane"], trace.header["compile_backend"]) == ("simulated", "neuron")
    logits = [r.tensor("out") for r in trace.find(module="head", kind="module")]
    returned = [r.tensor("out") for r in trace.find(module="", kind="module")]
    assert len(logits) == len(returned) == 3
    assert all(torch.equal(a, b) for a, b in zip(logits, returned, strict=True))
    assert not torch.equal(logits[0], logits[1]) and not torch.equal(logits[1], logits[2])


def test_a_dispatch_recorder_around_compiled_device_code_is_refused(modules: Any) -> None:
    kind, message = modules[1]["refused"]
    assert kind == "ConfigError" and "level='op' around a compiled Neuron model" in message


def test_the_python_of_the_guide_runs(modules: Any) -> None:  # docs/neuron.md
    guide = modules[1]["guide"]
    assert guide["verdict"] == "match" and len(guide["captures"]) == 2


def test_a_silent_eager_fallback_is_a_loud_error(modules: Any) -> None:
    errors = modules[1]["faults"]
    assert list(errors) == ["eager_fallback"]
    kind, message = errors["eager_fallback"]
    assert kind == "CaptureError"
    assert "fell back to eager execution in silence" in message and "aten::mm" in message


def align_modules(modules: Any, name: str, **options: Any) -> dt.Alignment:
    return dt.align(modules[0] / "reference", modules[0] / name, **options)


@pytest.mark.parametrize("name", ["plain", "decompositions"])
def test_another_lowering_alone_is_a_match(modules: Any, name: str) -> None:
    aligned = align_modules(modules, name)
    assert aligned.verdict == "match", aligned.table()
    assert aligned.findings == []


def test_bf16_matmuls_match_at_the_declared_precision(modules: Any) -> None:
    aligned = align_modules(modules, "bf16_matmuls", declared="matmul operands bf16")
    assert aligned.verdict == "match", aligned.table()


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("dropped_mask", "llama.layers.1.self_attn"),
        ("swapped_operands", "llama.layers.1.self_attn"),
        ("narrow_integers", "buckets"),
    ],
)
def test_a_fault_is_named_by_module(modules: Any, name: str, module: str) -> None:
    aligned = align_modules(modules, name)
    assert aligned.verdict == "diverged"
    assert aligned.first is not None and aligned.first.module == module, aligned.table()


# -- compiled, with taps on every op ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def taps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("taps")
    return folder, run_program("record_taps", folder)


def test_a_tapped_graph_stays_one_and_holds_its_ops(taps: Any) -> None:
    assert set(taps[1]["graphs"].values()) == {1}
    trace = dt.open(taps[0] / "plain")
    assert trace.complete and trace.verify() == []
    ops = [r for r in trace.find(kind="op") if r.op == "aten.mm"]
    assert len(ops) == 14 and all(s.device == "neuron:0" for r in ops for s in r.slots if s.role == "out")
    modules = {r.module for r in ops}
    assert "llama.layers.1.self_attn.q_proj" in modules


@pytest.mark.parametrize("name", ["plain", "decompositions"])
def test_another_lowering_alone_is_a_match_op_by_op(taps: Any, name: str) -> None:
    aligned = dt.align(taps[0] / "reference", taps[0] / name)
    assert aligned.verdict == "match", aligned.table()
    assert aligned.findings == []


@pytest.mark.parametrize(
    ("name", "module", "ops"),
    [
        ("dropped_mask", "llama.layers.1.self_attn", {"aten._softmax", "aten._safe_softmax", "aten.bmm"}),
        ("swapped_operands", "llama.layers.1.self_attn", {"aten.cat"}),
        ("narrow_integers", "buckets", {"aten.mul", "aten.add", "aten.remainder"}),
    ],
)
def test_a_fault_is_named_by_op_or_region(taps: Any, name: str, module: str, ops: set[str]) -> None:
    aligned = dt.align(taps[0] / "reference", taps[0] / name)
    assert aligned.verdict == "diverged"
    assert aligned.first is not None and aligned.first.module == module, aligned.table()
    assert aligned.first.op is None or aligned.first.op in ops, aligned.table()
    assert {f.module for f in aligned.findings if f.fatal} == {module}
