"""Traces and alignments in the forms of other tools: what is written is read back, field by field."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, record_mlp

import dispatch_trace as dt
from dispatch_trace.cli import main
from dispatch_trace.errors import CaptureError, ConfigError, TraceExistsError
from dispatch_trace.export import export
from dispatch_trace.export.rows import PAIR_COLUMNS, RECORD_COLUMNS, pair_rows, record_rows

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two traces, of which the second has a wrong weight, and their tables."""
    path = tmp_path_factory.mktemp("export")
    record_mlp(path / "ref.trace", steps=2)
    record_mlp(path / "target.trace", steps=2, scale=1.5)
    found = dt.align(path / "ref.trace", path / "target.trace")
    for to in ("csv", "parquet"):
        export(path / "target.trace", path / f"records.{to}", to=to)
        export(found, path / f"pairs.{to}", to=to)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, tuple[Rows, dict[str, str]]]:
    """Rows and columns of both tables, as they were before they were written."""
    found = dt.align(folder / "ref.trace", folder / "target.trace")
    return {
        "records": (list(record_rows(dt.open(folder / "target.trace").ranks)), RECORD_COLUMNS),
        "pairs": (list(pair_rows(found.pairs)), PAIR_COLUMNS),
    }


@pytest.mark.parametrize("table", ["records", "pairs"])
def test_csv_holds_every_field(table: str, folder: Path, expected: Any) -> None:
    rows, columns = expected[table]
    with (folder / f"{table}.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(rows) > 10 and list(found[0]) == list(columns)
    parse = {"BIGINT": int, "DOUBLE": float, "BOOLEAN": lambda text: text == "true", "VARCHAR": str}
    for text, row in zip(found, rows, strict=True):
        for name, kind in columns.items():
            value = row.get(name)
            read = parse[kind](text[name]) if text[name] else None
            assert read == (None if value == "" else value), (name, text[name], value)


@pytest.mark.parametrize("table", ["records", "pairs"])
def test_parquet_holds_every_field_with_its_type(table: str, folder: Path, expected: Any) -> None:
    duckdb = pytest.importorskip("duckdb")
    rows, columns = expected[table]
    with duckdb.connect() as db:
        found = db.sql(f"from '{folder / table}.parquet'")
        assert dict(zip(found.columns, map(str, found.types), strict=True)) == columns
        values = found.fetchall()
    assert len(values) == len(rows)
    for read, row in zip(values, rows, strict=True):
        assert list(read) == [row.get(name) for name in columns]


def test_queries_of_the_guide_find_the_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("duckdb")
    monkeypatch.chdir(folder)
    guide = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    (setup,) = re.findall(r"```python\n(.*?)```", guide, re.S)
    names: dict[str, Any] = {}
    exec(setup, names)
    grow, past, around = (names["db"].sql(query) for query in re.findall(r"```sql\n(.*?)```", guide, re.S))
    assert [row[0] for row in grow.fetchall()].count("fc1") == 1 and len(grow) == 4
    worst = past.fetchall()
    assert worst[0][0] == "param" and worst[0][2] >= 1
    assert any(row[0] == "aten.addmm" and row[1] == 4 for row in worst)
    rows = around.fetchall()
    assert any(row[1] == "fc1" and row[8] for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    names["db"].close()


def test_fastvideo_lines_come_back_as_a_trace(folder: Path) -> None:
    out = folder / "trace.jsonl"
    done = export(folder / "ref.trace", out, to="fastvideo")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    modules = [r for r in dt.open(folder / "ref.trace").records if r.kind == "module"]
    assert done.num_rows == len(lines) == len(modules)
    for line, record in zip(lines, modules, strict=True):
        stats, slot = record.stats(), record.slot()
        assert line == {
            "module": record.module,
            "tensor": slot.name,
            "step": record.step,
            "abs_mean": stats["abs_mean"],
            "sum": stats["sum"],
            "max": stats["max"],
            "shape": list(slot.shape),
        }
    assert any("records of ops" in what for what in done.left_out)
    # Our own op-level trace against their module-level one, through the file.
    (folder / "back").mkdir()
    back = dt.open(out.rename(folder / "back" / out.name))
    assert [(r.module, r.step) for r in back.records] == [(r.module, r.step) for r in modules]
    assert dt.align(folder / "ref.trace", back.path).verdict != "diverged"


def test_model_explorer_gets_a_graph_and_the_error_of_its_nodes(folder: Path) -> None:
    found = dt.align(folder / "ref.trace", folder / "target.trace")
    done = export(found, folder / "g.json", to="model-explorer")
    (graph,) = json.loads((folder / "g.json").read_text())["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert done.num_rows == len(nodes) and done.files == [str(folder / "g.errors.json")]
    (data,) = json.loads((folder / "g.errors.json").read_text()).items()
    assert data[0] == graph["id"] and set(data[1]["results"]) <= set(nodes)
    assert all(edge["sourceNodeId"] in nodes for node in nodes.values() for edge in node["incomingEdges"])
    linear = [n for n in nodes.values() if n["namespace"] == "step 0/fc1" and n["label"] == "aten.addmm"]
    assert len(linear) == 1 and linear[0]["incomingEdges"]
    weight = next(n for n in nodes.values() if n["label"] == "weight" and n["namespace"] == "step 0/fc1")
    assert data[1]["results"][weight["id"]]["value"] > 2  # a hundred times its band
    assert "bgColor" in data[1]["results"][linear[0]["id"]]  # the finding
    assert data[1]["results"][linear[0]["id"]]["value"] < 0  # what it was given explains its error


def test_command_writes_what_was_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ref, target, out = (str(folder / name) for name in ("ref.trace", "target.trace", "cli.csv"))
    assert main(["export", target, out, "--to", "csv", "--ref", ref]) == 0
    assert (folder / "cli.csv").read_bytes() == (folder / "pairs.csv").read_bytes()
    assert main(["export", target, str(folder / "dump"), "--to", "vllm-neuron"]) == 0
    assert dt.open(folder / "dump").header["options"]["level"] == "module"
    printed = capsys.readouterr().out
    assert "left out: " in printed and str(folder / "dump") in printed
    assert main(["export", target, out, "--to", "csv"]) == 2
    assert "TraceExistsError: " in capsys.readouterr().err


def test_what_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    trace = folder / "ref.trace"
    with pytest.raises(ConfigError, match="a trace can be written as csv, parquet, fastvideo, vllm-neuron"):
        export(trace, tmp_path / "x", to="model-explorer")
    with pytest.raises(ConfigError, match="stats='median': expected one of abs_mean, sum"):
        export(trace, tmp_path / "x", to="fastvideo", stats=["median"])
    with pytest.raises(TraceExistsError, match="is there already"):
        export(trace, trace, to="csv")
    with pytest.raises(CaptureError, match="cannot write"):
        export(trace, tmp_path / "no" / "x", to="csv")
    assert list(tmp_path.iterdir()) == []
