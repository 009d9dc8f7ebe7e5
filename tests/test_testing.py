"""Parity tests: golden traces are small and portable, catch a moved op, and never fail for rounding."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from aligning import batch, changed, net, record
from command_line import ROOT
from torch import nn

import dispatch_trace as dt
import dispatch_trace.pytest_plugin
import dispatch_trace.recorder  # else each inner run of pytest imports it anew
from dispatch_trace.errors import ConfigError
from dispatch_trace.testing import MissingGolden, Regression, assert_match

pytest_plugins = ["pytester"]
PLUGIN = dispatch_trace.pytest_plugin.__name__

TEST_FILE = """
import torch
from torch import nn

def model(scale=1.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        net[2].weight[1] *= scale
    return net

def test_port(trace_regression):
    trace_regression(model({scale}), torch.ones(3, 16))

def test_two_steps(trace_regression):
    net = model()
    with trace_regression.recording(net), torch.no_grad():
        net(torch.ones(3, 16))
        net(torch.ones(2, 16))
"""


def scaled(model: nn.Module) -> None:
    model.blocks[1].scale = 1.05  # type: ignore[index,union-attr]


def run(pytester: pytest.Pytester, *options: str, scale: float = 1.0) -> pytest.RunResult:
    pytester.makepyfile(test_port=TEST_FILE.format(scale=scale))
    installed = any(e.value == PLUGIN for e in entry_points(group="pytest11"))
    plugin = () if installed else ("-p", PLUGIN)
    return pytester.runpytest_inprocess(*plugin, "-p", "no:cacheprovider", *options)


def test_the_plugin_writes_compares_and_fails_with_the_first_screen(pytester: pytest.Pytester) -> None:
    missing = run(pytester)
    missing.assert_outcomes(failed=2)
    missing.stdout.fnmatch_lines(
        ["*there is no golden trace golden/test_port/test_port.trace*--trace-update*"]
    )

    written = run(pytester, "--trace-update")
    written.assert_outcomes(passed=2)
    written.stdout.fnmatch_lines(["*golden traces*", "wrote *golden/test_port/test_port.trace (*KB)"])

    run(pytester).assert_outcomes(passed=2)

    moved = run(pytester, scale=1.01)
    moved.assert_outcomes(failed=1, passed=1)
    moved.stdout.fnmatch_lines(
        [
            "*the traces do not match*",
            "*DIVERGED  1 fatal finding*",
            "*parameter*weight*",
            "*look further: dispatch-trace align golden/test_port/test_port.trace *",
            "*where the change is meant: pytest --trace-update*",
        ]
    )


def test_a_golden_trace_names_no_path_of_somebodys_disk(tmp_path: Path) -> None:
    Regression(tmp_path / "golden", tmp_path, name="net", root=Path(__file__).parent, update=True)(
        net(), batch()
    )
    files = [f for f in (tmp_path / "golden").rglob("*") if f.is_file()]
    assert files
    for file in files:
        content = file.read_bytes()
        assert str(tmp_path).encode() not in content
        assert str(Path(__file__).parent).encode() not in content
    assert b"aligning.py" in b"".join(f.read_bytes() for f in files)
    assert sum(f.stat().st_size for f in files) < 60_000


def test_no_failure_over_repeated_runs_and_thread_counts(tmp_path: Path) -> None:
    regression = Regression(tmp_path / "golden", tmp_path, name="net", update=True)
    regression(net(), batch())
    check = Regression(tmp_path / "golden", tmp_path, name="net")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for _ in range(3):
                found = check(net(), batch())
                assert found is not None and found.verdict == "match"
    finally:
        torch.set_num_threads(before)


def test_several_golden_traces_in_one_test(tmp_path: Path) -> None:
    update = Regression(tmp_path / "golden", tmp_path, name="test_x[a/b]", update=True)
    update(net(), batch(), name="short", level="module")
    update(net(), batch(9), name="long", level="module")
    assert [p.name for p in update.written] == ["test_x-a-b-short.trace", "test_x-a-b-long.trace"]
    check = Regression(tmp_path / "golden", tmp_path, name="test_x[a/b]")
    check(net(), batch(), name="short", level="module")
    with pytest.raises(AssertionError, match="the traces do not match"):
        check(changed(scaled), batch(9), name="long", level="module")
    with pytest.raises(MissingGolden, match="golden/test_x-a-b-other"):
        check(net(), batch(), name="other")


def test_assert_match_shows_the_first_screen(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch())
    same = record(tmp_path / "same", net(), batch())
    wrong = record(tmp_path / "wrong", changed(scaled), batch())
    assert assert_match(ref, same).verdict == "match"
    with pytest.raises(AssertionError) as raised:
        assert_match(ref, wrong)
    assert "DIVERGED  1 fatal finding" in str(raised.value) and "blocks.1" in str(raised.value)
    assert assert_match(ref, wrong, tolerance=0.2).verdict == "match"
    with pytest.raises(ConfigError, match="inconclusive='ignore': expected one of 'fail', 'pass'"):
        assert_match(ref, same, inconclusive="ignore")


def test_an_inconclusive_comparison_fails_unless_it_may_pass(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch(), save="meta")
    other = record(tmp_path / "other", net(), batch(), save="meta")
    with pytest.raises(AssertionError, match="INCONCLUSIVE"):
        assert_match(ref, other)
    assert assert_match(ref, other, inconclusive="pass").verdict == "inconclusive"


def test_the_python_of_testing_md_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"dt": dt, "torch": torch, "model": net(), "port": net(), "tokens": batch()}
    for block in re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "testing.md").read_text(), re.M | re.S
    ):
        exec(block, names)
    for update in (True, False):
        for test in ("test_port", "test_generation"):
            names[test](Regression(tmp_path / "golden", tmp_path, name=test, update=update))


def test_golden_traces_have_narrow_sketches_and_compare_with_wide_ones(tmp_path: Path) -> None:
    golden = Regression(tmp_path / "golden", tmp_path / "scratch", name="net", update=True)
    golden(net(), batch())
    (path,) = golden.written
    trace = dt.open(path)
    assert trace.header["sketch"]["narrowed_to"] == 63
    gelu = next(trace.find(module="blocks.0", op="aten.gelu"))
    assert gelu.sketch().shape == (63,)
    assert trace.verify() == []
    for change, verdict in ((lambda m: None, "match"), (scaled, "diverged")):
        wide = record(tmp_path / verdict, changed(change), batch(), save="stats")
        for sides in ((path, wide), (wide, path)):
            assert dt.align(*sides).verdict == verdict
    low = record(tmp_path / "low", net().to(torch.bfloat16), batch().to(torch.bfloat16), save="stats")
    assert dt.align(path, low).verdict != "diverged"
