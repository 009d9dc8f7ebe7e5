"""What people hold: traces, records, alignments."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from aligning import batch, changed, net, record

import dispatch_trace as dt
from dispatch_trace.errors import ConfigError, NotATraceError, NotExecutableError


def double_row(model: Any) -> None:
    model.blocks[1].up.weight[3] *= 2


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    for save in ("tensors", "stats", "leaves"):
        record(folder / f"ref-{save}", net(), batch(), save=save)
    record(folder / "wrong", changed(double_row), batch())
    return folder


# Traces and records -----------------------------------------------------------------------------------


def test_a_trace_says_what_it_is(traces: Path) -> None:
    trace = dt.open(traces / "ref-tensors")
    assert trace.closed and trace.complete and trace.executable
    assert trace.header["options"]["save"] == "tensors"
    assert [step.step for step in trace.steps] == [0]
    assert {"", "blocks.1", "head"} <= {row["path"] for row in trace.modules}
    assert trace.verify() == []
    assert "complete" in repr(trace) and "<table>" in trace._repr_html_()


def test_a_record_shows_its_site_and_its_tensors_in_a_notebook(traces: Path) -> None:
    (gelu,) = dt.open(traces / "ref-tensors").find(op="aten.gelu", module="blocks.1")
    shown = gelu._repr_html_()
    assert "<td>blocks.1</td>" in shown and "<td>aten.gelu.default</td>" in shown and "aligning.py:" in shown
    assert f"<td>out</td><td>float32</td><td>[6, 64]</td><td>{gelu.stats()['mean']:.4g}</td>" in shown
    light = next(r for r in dt.open(traces / "ref-stats").records if r.light)
    assert "<td>[32, 64]</td><td></td>" in light._repr_html_()  # a view has no statistics


def test_without_data_a_trace_is_not_executable(traces: Path) -> None:
    assert not dt.open(traces / "ref-stats").executable
    assert dt.open(traces / "ref-leaves").executable


def test_records_come_in_order_with_the_fields_of_their_key(traces: Path) -> None:
    records = list(dt.open(traces / "ref-tensors").records)
    assert [r.seq for r in records] == sorted(r.seq for r in records)
    gelu = next(r for r in records if r.op == "aten.gelu")
    site = (gelu.step, gelu.rank, gelu.model, gelu.grad_phase, gelu.module, gelu.call, gelu.op, gelu.n)
    assert site == (0, 0, "", "fwd", "blocks.0", 0, "aten.gelu", 0)
    assert gelu.overload == "aten.gelu.default" and gelu.source is not None and "aligning.py:" in gelu.source
    param = next(r for r in records if r.kind == "param")
    assert param.op is None and param.call is None and param.name == "weight"
    module = next(r for r in records if r.kind == "module")
    assert module.op is None and module.slot("in[0]").role == "in"


def test_find_narrows_by_every_field(traces: Path) -> None:
    trace = dt.open(traces / "ref-tensors")
    assert [r.module for r in trace.find(op="aten.gelu")] == ["blocks.0", "blocks.1", "blocks.2"]
    assert len(list(trace.find(op="aten.gelu.default", module="blocks.1", step=0, call=0, n=0))) == 1
    assert {r.kind for r in trace.find(module="head")} == {"param", "op", "module"}
    assert [r.name for r in trace.find(kind="param", module="head")] == ["weight", "bias"]
    assert list(trace.find(module="head", step=1)) == []


@pytest.mark.parametrize("save", ["tensors", "leaves"])
def test_a_tensor_comes_back_bit_exact(traces: Path, save: str) -> None:
    model = net()
    with torch.no_grad():
        expected = model.blocks[0](batch())
    (found,) = dt.open(traces / f"ref-{save}").find(kind="module", module="blocks.0")
    assert torch.equal(found.tensor(), expected)
    assert torch.equal(found.tensor("in[0]"), batch())


def test_statistics_follow_from_the_values(traces: Path) -> None:
    (found,) = dt.open(traces / "ref-stats").find(kind="module", module="blocks.0")
    with torch.no_grad():
        expected = net().blocks[0](batch())  # type: ignore[index, operator]
    stats = found.stats("out")
    assert stats["n"] == expected.numel()
    assert stats["rms"] == pytest.approx(float(expected.pow(2).mean().sqrt()), rel=1e-6)
    assert found.sketch() is not None and len(found.hash()) == 32
    with pytest.raises(NotExecutableError, match="save='stats'"):
        found.tensor()


def test_an_op_runs_again_in_float64(traces: Path) -> None:
    found = next(dt.open(traces / "ref-tensors").find(op="aten.gelu"))
    out = found.execute()["out"]
    assert out.dtype == torch.float64
    assert float((out - found.tensor().double()).abs().max()) < 1e-6


def test_an_unknown_slot_is_an_error_that_lists_the_slots(traces: Path) -> None:
    found = next(dt.open(traces / "ref-tensors").find(op="aten.gelu"))
    with pytest.raises(KeyError, match=r"no slot 'output'; it has in\.self, out"):
        found.tensor("output")


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotATraceError, match="does not exist"):
        dt.open(tmp_path / "nothing")


def test_records_as_a_table(traces: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = dt.open(traces / "ref-tensors").to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert {"module", "op", "slot", "sq_sum"} <= set(table.columns)
    assert (table[table.op == "aten.gelu"].slot == "out").sum() == 3
    gelu = table[(table.op == "aten.gelu") & (table.slot == "out")]
    assert set(gelu.n) == {0} and (gelu.numel == gelu["shape"].map(math.prod)).all()


# Alignments -------------------------------------------------------------------------------------------


def test_a_trace_against_itself_matches_with_a_notice(traces: Path) -> None:
    alignment = dt.align(traces / "ref-tensors", traces / "ref-tensors")
    assert (alignment.verdict, alignment.findings, alignment.first) == ("match", [], None)
    assert any("itself" in notice for notice in alignment.notices)
    copy = shutil.copytree(traces / "ref-tensors", traces / "copy", dirs_exist_ok=True)
    assert any("same recording" in notice for notice in dt.align(traces / "ref-tensors", copy).notices)


def test_every_record_of_both_traces_stands_in_one_row(traces: Path) -> None:
    alignment = dt.align(traces / "ref-tensors", traces / "wrong")
    for side, name in (("ref", "ref-tensors"), ("target", "wrong")):
        rows = [getattr(pair, side).seq for pair in alignment.pairs if getattr(pair, side) is not None]
        assert sorted(rows) == [r.seq for r in dt.open(traces / name).records]
    counts = alignment.coverage["records"]
    assert sum(counts.values()) == sum(2 if p.ref and p.target else 1 for p in alignment.pairs)
    targets = [pair.target.seq for pair in alignment.pairs if pair.target is not None]
    assert targets == sorted(targets), "in the order in which the target ran"


def test_open_traces_can_be_aligned(traces: Path) -> None:
    alignment = dt.align(dt.open(traces / "ref-tensors"), dt.open(traces / "wrong"))
    assert alignment.verdict == "diverged" and "parameter blocks.1.up" in repr(alignment)
    assert "blocks.1.up" in alignment.table() and "blocks.1.up" in alignment._repr_html_()
    assert alignment.first is not None
    shown = alignment.first._repr_html_()
    assert "<td>parameter (fatal)</td>" in shown and "<td>blocks.1.up#0</td>" in shown
    assert f"<td>{alignment.first.evidence['error']:.4g}</td>" in shown


def test_json_holds_the_same_facts(traces: Path, tmp_path: Path) -> None:
    alignment = dt.align(traces / "ref-tensors", traces / "wrong")
    alignment.to_json(tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == json.loads(json.dumps(alignment.to_json()))
    assert found["verdict"] == "diverged" and found["first"] == 0
    assert found["findings"][0]["label"] == "parameter"
    assert found["findings"][0]["evidence"]["path"] == "blocks.1.up.weight"
    assert len(found["pairs"]) == len(alignment.pairs)
    assert {"seq", "module", "call", "op", "source"} <= set(found["pairs"][0]["target"])


def test_numbers_that_json_lacks_are_written_as_text(traces: Path, tmp_path: Path) -> None:
    def nan(model: Any) -> None:
        model.blocks[1].down.bias[0] = math.nan

    target = record(tmp_path / "nan", changed(nan), batch())
    alignment = dt.align(traces / "ref-tensors", target)
    alignment.to_json(tmp_path / "out.json")
    json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_a_trace_that_was_not_closed_never_matches(traces: Path, tmp_path: Path) -> None:
    torn = Path(shutil.copytree(traces / "ref-tensors", tmp_path / "torn"))
    index = torn / "rank0" / "index-00000.msgpack"
    index.write_bytes(index.read_bytes()[:-9])
    alignment = dt.align(traces / "ref-tensors", torn)
    assert alignment.verdict != "match"
    assert any("not complete" in notice for notice in alignment.notices)


def test_settings_that_differ_are_noticed(traces: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        target = record(tmp_path / "threads", net(), batch())
    finally:
        torch.set_num_threads(threads)
    alignment = dt.align(traces / "ref-tensors", target)
    assert f"num threads: {threads} in the reference, {threads + 1} in the target" in alignment.notices
    assert alignment.verdict == "match"


def test_bad_arguments_are_errors(traces: Path) -> None:
    path = traces / "ref-tensors"
    for bad in (
        {"tolerance": -1.0},
        {"tolerance": math.inf},
        {"steps": "one"},
        {"rows": 3},
        {"declared": "?"},
    ):
        with pytest.raises(ConfigError):
            dt.align(path, path, **bad)  # type: ignore[arg-type]


def test_progress_is_reported(traces: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    dt.align(traces / "ref-tensors", traces / "wrong", progress=lambda *args: seen.append(args))
    assert {what for _, _, what in seen} >= {"reading the reference", "reading the target", "aligning ops"}
    assert all(0 <= done <= total for done, total, _ in seen)


def test_statistics_are_aligned_without_torch(traces: Path) -> None:
    code = (
        "import sys, dispatch_trace as dt; a = dt.align(sys.argv[1], sys.argv[1]); "
        "a.to_json(); t = dt.open(sys.argv[1]); [r.stats() for r in t.records if r.slots]; "
        "print(a.verdict, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(traces / "ref-stats")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[1],
    )
    assert done.stdout.split() == ["match", "False"], done.stderr


@pytest.mark.parametrize("level", ["op", "module"])
def test_inputs_that_one_side_did_not_record_are_said_not_to_be_compared(tmp_path: Path, level: str) -> None:
    full = record(tmp_path / "full", net(), batch(), level=level)
    bare = record(tmp_path / "bare", net(), batch(), level=level, inputs=False)
    for ref, target, who in (
        (full, bare, "the target holds"),
        (bare, full, "the reference holds"),
        (bare, bare, "both traces hold"),
    ):
        said = [n for n in dt.align(ref, target).notices if "inputs=False" in n]
        assert len(said) == 1 and said[0].startswith(f"{who} no inputs"), said
        assert "only what modules returned was compared, not what they were handed" in said[0]
        assert ("no ops" in said[0]) == (level == "op")
    again = record(tmp_path / "again", net(), batch(), level=level)
    assert not any("inputs" in notice for notice in dt.align(full, again).notices)


@pytest.mark.parametrize("bare", [("target",), ("ref", "target")])
def test_without_operands_modules_are_blamed_and_never_a_later_op(
    tmp_path: Path, bare: tuple[str, ...]
) -> None:
    paths = [
        record(tmp_path / name, model, batch(), inputs=name not in bare)
        for name, model in (("ref", net()), ("target", changed(double_row)))
    ]
    first = dt.align(*paths).first
    assert first is not None and first.op is None
    assert first.module in ("blocks.1", "blocks.1.up")
    other = record(tmp_path / "other", net(), batch() + 1, inputs=False)
    again = dt.align(record(tmp_path / "same", net(), batch(), inputs=False), other)
    assert not any("nondeterministic" in notice for notice in again.notices)
