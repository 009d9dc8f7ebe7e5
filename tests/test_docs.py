"""The documents tell what the code does: errors, links, options, make targets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ROOT
from torch import nn

import dispatch_trace as dt
from dispatch_trace import errors

DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def error_names() -> set[str]:
    return {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.DispatchTraceError)
    }


def test_every_error_has_a_section() -> None:
    sections = set(re.findall(r"^## (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    assert sections == error_names() - {"DispatchTraceError"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_the_documents_are_ones_that_the_parser_takes(document: Path) -> None:
    import shlex

    from dispatch_trace.cli import _parser

    for line in re.findall(
        r"^ {4}(dispatch-trace (?:align|show|verify|demo).*)$", document.read_text(), re.M
    ):
        _parser().parse_args(shlex.split(line, comments=True)[1:])  # exits where it does not know an option


def test_the_readme_opens_with_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines[2:4] == ["    make demo", "    make test"]


def test_make_targets_named_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "lint", "types", "bench", "zoo"} <= targets
    for document in DOCUMENTS:
        for target in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", document.read_text(), re.MULTILINE):
            assert target in targets, f"{document.name} says `make {target}`"


class Layers(nn.Module):
    """Four layers with an `mlp` each; what the documents say of `layers.3.mlp` can be done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": nn.Linear(8, 8)}) for _ in range(4)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](layer["norm"](x)).tanh()
        result: torch.Tensor = self.head(x)
        return result


def run_blocks(document: str) -> dict[str, Any]:
    """Runs the Python of a document beside two traces; the last layer of `target` is wrong."""
    torch.manual_seed(0)
    model, x = Layers().eval(), torch.randn(3, 8)
    with torch.no_grad(), dt.record("ref.trace", model, save="tensors"):
        model(x)
    with torch.no_grad():
        model.layers[3]["mlp"].weight[2] *= 2
    with torch.no_grad(), dt.record("target.trace", model, save="tensors"):
        model(x)
    text = (ROOT / "docs" / document).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks, f"{document} has no Python"
    names: dict[str, Any] = {"dt": dt, "torch": torch, "target": model, "x": x}
    with torch.no_grad():
        for block in blocks:
            exec(compile(block, document, "exec"), names)
    return names


def test_the_python_of_the_proofs_does_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_blocks("proofs.md")
    printed = capsys.readouterr().out
    assert "replays aten.t.default, aten.addmm.default" in printed
    assert (tmp_path / "repro" / "repro.py").exists()
    rows = {row.module: row.ok for row in names["rows"].rows}
    assert rows["layers.3.mlp"] is False
    assert dt.align("ref.trace", "target.trace").verdict == "diverged"
    forced = dt.align("ref.trace", "forced.trace")
    assert forced.first is None or forced.first.label == "parameter"  # the weight itself is still wrong


def test_the_python_of_the_report_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks("report.md")
    assert "layers.3.mlp" in (tmp_path / "report.html").read_text()


def test_contributing_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60
