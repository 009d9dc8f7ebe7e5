"""`run` on programs as transformers' and torchao's examples have them (docs/examples), unedited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import EXAMPLES, Programs, programs

import dispatch_trace as dt


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    modules = ("llama.modeling_llama", "bert.modeling_bert", "vit.modeling_vit")
    imports = [f"transformers.models.{name}" for name in modules]
    with programs(tmp_path_factory.mktemp("programs"), *imports, "torchao.quantization.qat") as found:
        yield found


# Models by name with their steps, and ops of which each program must have records.
EXPECTED = {
    "generate_text": ({"": 4}, {"aten.argmax"}),
    "classify_text": ({"": 4}, {"aten._softmax_backward_data", "aten.nll_loss_forward"}),
    "classify_images": ({"preprocess": 1, "model": 1}, {"aten.convolution"}),
    "quantize_linear": ({"model": 1, "quantized": 1}, {"aten.mm", "aten.linalg_vector_norm"}),
    "train_quantized": ({"": 3}, {"aten.mse_loss_backward"}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_example_runs_as_before_and_is_recorded_whole(name: str, tmp_path: Path, server: Programs) -> None:
    expected, ops = EXPECTED[name]
    bare = server.run(EXAMPLES / f"{name}.py", SWITCH="0")
    ended = server.run(EXAMPLES / f"{name}.py", OUTPUT=str(tmp_path / "t"), SAVE="leaves")
    assert (bare.status, ended.status) == (0, 0), ended.output
    printed = [line for line in ended.output.splitlines() if not line.startswith("dispatch_trace: ")]
    assert printed == bare.output.splitlines()
    assert (
        ended.said.startswith("attached to ") and "ERROR" not in ended.said and "INCOMPLETE" not in ended.said
    )

    trace = dt.open(tmp_path / "t")
    assert trace.complete and trace.verify() == []
    names = dict.fromkeys(step.model for step in trace.steps)
    assert {model: sum(s.model == model for s in trace.steps) for model in names} == expected
    assert ops <= {record.op for record in trace.records}
