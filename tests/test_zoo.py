"""The zoo: every case judged and captured as its EXPECT says, and the tool that measures it.

The cases run in this process, those that compile in one of their own. A case that fails today would be
listed in `FAILS` with the reason, and be noticed the day it passes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
ZOO = Path(__file__).resolve().parent / "zoo"
FAILS: dict[str, str] = {}

# What the cases warn about is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo_tool", ROOT / "tools" / "zoo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()
FILES = tool.find_cases(ZOO)


def as_params() -> list[Any]:
    found = []
    for file in FILES:
        marks = []
        if tool.case_id(file) in FAILS:
            marks.append(pytest.mark.xfail(reason=FAILS[tool.case_id(file)], strict=True))
        found.append(pytest.param(file, id=file.stem, marks=marks))
    return found


def is_compiled(file: Path) -> bool:
    return '"compile":' in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", as_params())
def test_case(file: Path) -> None:
    settings = torch.backends.mha.get_fastpath_enabled(), torch.get_rng_state()
    try:
        row = tool.run_in_process(file, "tensors") if is_compiled(file) else tool.run_case(file, "tensors")
    finally:
        torch.backends.mha.set_fastpath_enabled(settings[0])
        torch.set_rng_state(settings[1])
    assert row["error"] is None, row["error"]
    if row["group"] == "defect":
        assert row["verdict"] == "diverged"
        found = f"{row['found_label']} {row['found_module']!r} {row['found_op']}"
        assert row["module_ok"], f"blames {found}"
        assert row["op_ok"], f"blames {found}"
    elif row["group"] == "benign":
        assert row["verdict"] == "match", f"{row['found_label']} {row['found_module']!r} {row['found_op']}"
    else:
        assert row["capture_ok"], row.get("missing")


def test_all_cases_are_here() -> None:
    groups = [tool.group_of(tool.load_case(file).EXPECT) for file in FILES]
    assert len(FILES) == len({tool.case_id(f) for f in FILES}) == 63
    assert (groups.count("defect"), groups.count("benign"), groups.count("recorder")) == (27, 14, 22)


# The tool ---------------------------------------------------------------------------------------------


def test_the_command_prints_rows_and_a_closing_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert tool.main([str(ZOO), "--only", "10,14,55", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == ("located 1/1 modules, 1/1 ops; false alarms 0/1; match 1/1; captured 0/0; errors 0")
    rows = json.loads(out.read_text())
    assert [row["id"] for row in rows] == ["14", "55"], "in the order of their numbers"
    assert {
        "id", "group", "kind", "verdict", "found_module", "found_op", "found_label", "module_ok", "op_ok",
        "capture_ok", "error",
    } <= set(rows[0])  # fmt: skip


def test_a_directory_without_cases_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main([str(tmp_path)])
    assert caught.value.code == 2 and "holds no case files" in capsys.readouterr().err


BROKEN = """
def reference(): raise RuntimeError("no such weights")
target = reference
def inputs(): return ()
EXPECT = {"where": None, "kind": "broken"}
"""
ENDLESS = """
import time
def reference(): time.sleep(60)
target = reference
def inputs(): return ()
EXPECT = {"where": None, "kind": "endless"}
"""


def test_a_case_that_breaks_or_hangs_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "01_broken.py").write_text(BROKEN)
    (tmp_path / "02_endless.py").write_text(ENDLESS)
    row = tool.run_case(tmp_path / "01_broken.py", "tensors")
    assert row["error"] == "RuntimeError: no such weights" and row["group"] == "benign"
    row = tool.run_in_process(tmp_path / "02_endless.py", "tensors", timeout=6)
    assert row["error"] == "time-out after 6 s"
    assert tool.closing_line([row]).endswith("errors 1")


def test_a_missing_key_fails_the_capture(tmp_path: Path) -> None:
    import dispatch_trace as dt

    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    x = torch.ones(2, 3)
    for name in ("reference", "target"):
        with torch.no_grad(), dt.record(tmp_path / name, model, save="tensors"):
            y = model(x)
    traces = {name: tmp_path / name for name in ("reference", "target")}
    good = {"0#0": y, "#0": y, "0#0/in/0": x, "0.weight@0": model[0].weight, "op:aten.addmm": y}
    assert tool.grade_capture(good, traces) == (True, [])
    for key, value in {"0#1": y, "1#0": y, "0#0/1": y, "0.weight@1": y, "op:aten.mm": y}.items():
        right, missing = tool.grade_capture({key: value}, traces)
        assert not right and missing == [f"{key}: no such key in the trace"]
    assert not tool.grade_capture({"0#0": y + 1e-7}, traces)[0], "bit-exact"
    assert not tool.grade_capture({"0#0": y.double()}, traces)[0], "with its dtype"
    assert tool.grade_capture({"0#0/last": y[-1:]}, traces)[0]


@pytest.mark.parametrize(
    ("leaf", "slots", "expected"),
    [
        ("", ["in[0]", "out"], ["out"]),
        ("/1/k/0", ["out[0]", "out[1].k[0]"], ["out[1].k[0]"]),
        ("/in/x", ["in.x", "out"], ["in.x"]),
        ("/in/0", ["in[0]", "out"], ["in[0]"]),
        ("/a b", ['out["a b"]'], ['out["a b"]']),
        ("/7", ['out["7"]'], ['out["7"]']),
        ("/missing", ["out"], []),
    ],
)
def test_leaves_are_found_by_index_key_or_field(leaf: str, slots: list[str], expected: list[str]) -> None:
    record = SimpleNamespace(slots=[SimpleNamespace(name=name) for name in slots])
    assert tool.leaf_slots(record, leaf) == expected


def test_a_parameter_is_taken_as_the_step_read_it() -> None:
    versions = [SimpleNamespace(step=s) for s in (0, 2, 5)]
    assert tool.version_at(versions, 4, num_steps=6).step == 2
    assert tool.version_at(versions, 0, num_steps=6).step == 0
    assert tool.version_at(versions, 1, num_steps=1) is versions[1], "in one step: its k-th value"
    assert tool.version_at(versions, 3, num_steps=1) is None


def test_the_tool_knows_no_case() -> None:
    text = (ROOT / "tools" / "zoo.py").read_text()
    assert not [file.stem for file in FILES if file.stem in text or f'"{tool.case_id(file)}"' in text]
