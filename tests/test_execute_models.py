"""Whole models run again from leaves, in a process that has none of their code."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ROOT, run_python
from execute_programs import record

from dispatch_trace import execute


def load_replay() -> Any:
    spec = importlib.util.spec_from_file_location("replay", ROOT / "tools" / "replay.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["replay"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_again(*paths: Path) -> list[Any]:
    """Rows of `tools/replay.py` from a fresh process, on copies of the traces."""
    arguments: list[str] = []
    for path in paths:
        copy = path.with_name(f"copy-{path.name}")
        shutil.copytree(path, copy)
        shutil.rmtree(path)
        arguments += ["--trace", str(copy)]
    done = run_python("tools/replay.py", "--rows", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_all_came_back(row: Any) -> None:
    name = row["trace"]
    skipped = [
        key for key in row["skipped"] if "an uninitialized parameter" not in key
    ]  # zoo 90: no value yet
    assert row["misses"] == [] and skipped == [], name
    assert row["equal"] == row["compared"] > 0, name
    assert row["wide_failed"] == [] and row["wide_skipped"] == row["skipped"], name
    assert all(key.endswith(" random") for key in row["taken"]), name


@torch.library.custom_op("executed_tests::gated", mutates_args={"count"})
def gated(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    count.add_(1)
    return x * torch.sigmoid(x)


def test_ops_of_absent_libraries_are_taken_with_the_reason(tmp_path: Path) -> None:
    rank = record(tmp_path / "t", lambda m, x: gated(x + 1, m.seen) * 2 + m.seen)
    here = execute.execute_rank(rank)
    assert (here.taken.total(), here.share) == (0, 1.0), "where the library is loaded, the op runs"
    (row,) = run_again(tmp_path / "t")
    assert row["taken"] == {"executed_tests.gated.default the op's library is not loaded here": 1}
    assert (row["misses"], row["skipped"], row["equal"]) == ([], {}, row["compared"])
    assert row["compared"] == 4, "add, mul, the second add, and the module"


@pytest.mark.filterwarnings("ignore")
def test_transformers_models_come_back_from_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    replay = load_replay()
    paths = []
    for name in replay.SMALL:
        paths.append(tmp_path / f"{name}.trace")
        replay.record_training(name, paths[-1], "leaves", num_steps=1)
    paths.append(tmp_path / "minilm.trace")
    replay.record_minilm(paths[-1], "leaves")
    rows = run_again(*paths)
    assert len(rows) == 7
    for row in rows:
        assert_all_came_back(row)
    assert sum(row["compared"] for row in rows) > 4000


@pytest.mark.filterwarnings("ignore")
def test_the_zoo_comes_back_from_leaves(tmp_path: Path) -> None:
    replay = load_replay()
    paths = []
    for file in sorted((ROOT / "tests" / "zoo").glob("[0-9]*.py")):
        for side in ("reference", "target"):
            path = tmp_path / f"{file.stem[:2]}-{side}.trace"
            if side == "reference" or not replay.is_compiled(file):
                replay.record_zoo(file, side, path, "leaves")
                paths.append(path)
    assert len(paths) > 100
    rows = run_again(*paths)
    unknown = "rescases.gated.default the op's library is not loaded here"
    for row in rows:
        if unknown not in row["taken"]:
            assert_all_came_back(row)
    assert sum(row["equal"] for row in rows) == sum(row["compared"] for row in rows) > 3000
