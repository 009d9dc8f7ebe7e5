"""Dumps in the vLLM-Neuron capture layout, opened as they are: ranks, models, order, metadata, bad files."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ROOT, dispatch_trace, environment
from dumps import values, write_step
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_records import same_bits

import dispatch_trace as dt
from dispatch_trace.compat import foreign_format, open_ranks
from dispatch_trace.compat.dump import DumpRank
from dispatch_trace.compat.vllm_neuron_names import inline_captures, quote, unquote
from dispatch_trace.errors import NotATraceError, TraceFormatError
from dispatch_trace.store.reader import RankReader


def test_a_dump_is_recognised_and_an_ordinary_trace_is_none(tmp_path: Path) -> None:
    write_step(tmp_path / "dump" / "dp0", "prefill_s2_0", {"fc": values()})
    model = torch.nn.Linear(3, 3)
    with dt.record(tmp_path / "trace", model):
        model(values())
    found = foreign_format(tmp_path / "dump")
    assert found is not None and found.name == "vllm-neuron"
    assert foreign_format(tmp_path / "trace") is None and foreign_format(tmp_path) is None


@pytest.mark.parametrize(
    "tensor",
    [
        values(),
        values().bfloat16(),
        values().to(torch.float8_e4m3fn),
        torch.arange(4),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(4, 6).t()[1:3],
        torch.complex(values(1), values(2)).conj(),
    ],
    ids=["float32", "bfloat16", "float8", "int64", "scalar", "empty", "view", "conj"],
)
def test_tensors_come_back_bit_exact_with_their_statistics(tensor: torch.Tensor, tmp_path: Path) -> None:
    write_step(tmp_path / "dp0", "decode_b1_0", {"fc": tensor})
    (record,) = dt.open(tmp_path).records
    slot = record.slot("out")
    assert (slot.dtype, slot.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    assert same_bits(record.tensor("out").resolve_conj(), tensor.resolve_conj())
    assert record.stats("out")["n"] == tensor.numel() * (2 if tensor.is_complex() else 1)
    assert len(record.hash("out")) == 32


def test_a_dump_has_the_hashes_and_sketches_of_a_trace_of_the_same_values(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 5)
    with torch.no_grad(), dt.record(tmp_path / "trace", model, level="module"):
        out = model(values())
    write_step(tmp_path / "dump" / "dp0", "prefill_s2_0", {"": out})
    ours = next(dt.open(tmp_path / "trace").find(kind="module"))
    theirs = next(dt.open(tmp_path / "dump").find(module="", kind="module"))
    assert ours.hash("out") == theirs.hash("out")
    sketches = ours.sketch("out"), theirs.sketch("out")
    assert sketches[0] is not None and sketches[1] is not None and (sketches[0] == sketches[1]).all()


def test_dp_and_tp_become_ranks_and_subdirectories_models(tmp_path: Path) -> None:
    for dp in (0, 1):
        both = [values(10 * dp), values(10 * dp + 1)]
        write_step(tmp_path / f"dp{dp}", "prefill_s2_0", {"layers.0": both})
        write_step(tmp_path / "draft" / f"dp{dp}", "decode_b1_0", {"fc": values(dp)})
    write_step(tmp_path / "vision" / "dp0", "prefill_s2_0", {"blocks.0": [values(7), values(8)]})
    trace = dt.open(tmp_path)
    assert [rank.rank for rank in trace.ranks] == [0, 1, 2, 3]
    coordinates = [rank.header["coordinates"] for rank in trace.ranks]
    assert coordinates == [{"dp": dp, "tp": tp} for dp in (0, 1) for tp in (0, 1)]
    assert all(rank.header["world_size"] == 4 for rank in trace.ranks)
    record = next(trace.find(rank=3, module="layers.0"))
    assert torch.equal(record.tensor("out"), values(11))
    models = [{record.model for record in trace.find(rank=rank)} for rank in range(4)]
    assert models == [{"", "draft", "vision"}, {"", "vision"}, {"", "draft"}, {""}]
    assert trace.complete  # a draft model of one tp rank lacks nothing


def test_steps_are_in_numeric_order_with_their_metadata(tmp_path: Path) -> None:
    for counter in (10, 2, 1, 0, 9):
        write_step(
            tmp_path / "dp0", f"decode_b1_{counter}", {"fc": values(counter)}, positions=[40 + counter]
        )
    write_step(tmp_path / "dp0", "prefill_s40_0", {"fc": values(99)}, time_s=4e9)  # written last, ran first
    steps = dt.open(tmp_path).steps
    names = ["prefill_s40_0", *(f"decode_b1_{counter}" for counter in (0, 1, 2, 9, 10))]
    assert [step.meta["directory"] for step in steps] == names
    assert steps[0].meta["phase"] == "prefill" and steps[0].meta["positions"] == list(range(40))
    expected = {"phase": "decode", "req_ids": ["a"], "positions": [42], "dp_rank": 0}
    assert steps[3].meta == {**expected, "directory": "decode_b1_2"}


def test_requests_order_steps_of_different_sizes_and_times_only_the_rest(tmp_path: Path) -> None:
    replica = tmp_path / "dp0"
    # a: prefill, decode alone, then with b; the file times say the opposite.
    write_step(replica, "decode_b2_0", {"fc": values()}, req_ids="ab", positions=[5, 3], time_s=1e9)
    write_step(replica, "decode_b1_0", {"fc": values()}, req_ids="a", positions=[4], time_s=2e9)
    write_step(replica, "prefill_s3_0", {"fc": values()}, req_ids="b", time_s=3e9)
    write_step(replica, "prefill_s4_0", {"fc": values()}, req_ids="a", time_s=4e9)
    trace = dt.open(tmp_path)
    order = [step.meta["directory"] for step in trace.steps]
    assert order.index("prefill_s4_0") < order.index("decode_b1_0") < order.index("decode_b2_0") == 3
    assert order.index("prefill_s3_0") < order.index("decode_b2_0")
    assert any("file times only" in notice for notice in trace.header["notices"])


def test_counters_and_positions_that_contradict_each_other_are_said(tmp_path: Path) -> None:
    write_step(tmp_path / "dp0", "decode_b1_0", {"fc": values()}, positions=[9])
    write_step(tmp_path / "dp0", "decode_b1_1", {"fc": values()}, positions=[8])
    trace = dt.open(tmp_path)
    assert [step.meta["positions"] for step in trace.steps] == [[9], [8]]
    assert "contradict" in trace.verify()[0] and not trace.complete


def test_inline_captures_are_numbered_by_name(tmp_path: Path) -> None:
    step = {f"manual.{name}": values(seed) for seed, name in enumerate(("X", "X_1", "Y_1", "Z"))}
    write_step(tmp_path / "dp0", "decode_b1_0", step)
    records = {(r.name, r.n): r for r in dt.open(tmp_path).find(kind="inline")}
    assert set(records) == {("X", 0), ("X", 1), ("Y_1", 0), ("Z", 0)}
    assert torch.equal(records[("X", 1)].tensor("out"), values(1))


def test_modules_nest_by_path_with_numbers_in_order(tmp_path: Path) -> None:
    names = ["layers.10", "layers.2.fc", "layers.2", "layers", "head"]
    write_step(tmp_path / "dp0", "decode_b1_0", {name: values() for name in names})
    records = list(dt.open(tmp_path).records)
    assert [r.module for r in records] == ["head", "layers.2.fc", "layers.2", "layers.10", "layers"]
    stored = {r.module: r._record for r in records}
    assert stored["layers"].opened <= stored["layers.2"].opened <= stored["layers.2.fc"].seq
    assert stored["layers.2"].seq < stored["layers.10"].opened + 1


class Hostile:
    def __reduce__(self) -> Any:
        return (os.system, ("touch pickle-was-run",))


@pytest.mark.parametrize("form", ["torch", "legacy", "pickle"])
def test_a_file_that_needs_unpickling_is_refused_by_name_and_not_run(form: str, tmp_path: Path) -> None:
    step = write_step(tmp_path / "dump" / "dp0", "decode_b1_0", {"fc": values()})
    file = step / "fc" / "rank0.pt"
    if form == "pickle":
        file.write_bytes(pickle.dumps(Hostile()))
    else:
        torch.save(Hostile(), file, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(
        TraceFormatError, match=r"decode_b1_0/fc/rank0\.pt holds something else than a tensor"
    ):
        dt.open(tmp_path / "dump")
    for verb in ("show", "verify"):
        result = dispatch_trace(verb, tmp_path / "dump", cwd=tmp_path)
        assert result.returncode == 2 and "rank0.pt" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "pickle-was-run").exists()


@pytest.mark.parametrize("length", [0, 3, 100, -20])
def test_a_torn_file_is_named_and_the_rest_stays_readable(length: int, tmp_path: Path) -> None:
    step = write_step(tmp_path / "dp0", "decode_b1_0", {"a": values(1), "b": values(2)})
    file = step / "a" / "rank0.pt"
    file.write_bytes(file.read_bytes()[:length])
    trace = dt.open(tmp_path)
    assert [record.module for record in trace.records] == ["b"] and not trace.complete
    assert torch.equal(next(trace.records).tensor("out"), values(2))
    (problem,) = trace.verify()
    assert problem.startswith("dp0/decode_b1_0/a/rank0.pt cannot be read")


def test_a_flipped_bit_is_found_by_verify(tmp_path: Path) -> None:
    step = write_step(tmp_path / "dp0", "decode_b1_0", {"a": values(1)})
    file = step / "a" / "rank0.pt"
    data, raw = bytearray(file.read_bytes()), values(1).numpy().tobytes()
    data[data.find(raw) + 5] ^= 1
    file.write_bytes(data)
    (problem,) = dt.open(tmp_path).verify()
    assert "a/rank0.pt is corrupt" in problem


def test_files_without_a_tensor_are_problems(tmp_path: Path) -> None:
    step = write_step(tmp_path / "dp0", "decode_b1_0", {"a": values(), "b": values(), "c": values()})
    torch.save({"out": values()}, step / "a" / "rank0.pt")
    (step / "b" / "rank0.pt").write_bytes(b"no file of torch\n")
    trace = dt.open(tmp_path)
    assert [r.module for r in trace.records] == ["c"]
    assert [problem.partition("rank0.pt ")[2] for problem in trace.verify()] == [
        "holds a dict, not a tensor",
        "cannot be read: it is no file of torch.save",
    ]


@pytest.mark.parametrize(
    ("meta", "what"),
    [
        ("", "decode_b1_0_meta.json is missing"),
        ([1], "holds a list, not a dict"),
        ({"req_ids": [1], "positions": [0], "dp_rank": 0}, "req_ids is missing or not of its type"),
        ({"req_ids": ["a"], "positions": "0", "dp_rank": 0}, "positions is missing or not of its type"),
        ({"req_ids": ["a"], "positions": [0, 1], "dp_rank": 0}, "has 2 positions; its name says 1"),
    ],
)
def test_metadata_that_is_missing_or_wrong_is_said(meta: Any, what: str, tmp_path: Path) -> None:
    write_step(tmp_path / "dp0", "decode_b1_0", {"fc": values()}, meta=meta)
    trace = dt.open(tmp_path)
    assert torch.equal(next(trace.records).tensor("out"), values())
    assert any(what in problem for problem in trace.verify()) and not trace.complete
    assert trace.steps[0].meta["phase"] == "decode"


def test_torn_metadata_is_said(tmp_path: Path) -> None:
    step = write_step(tmp_path / "dp0", "decode_b1_0", {"fc": values()})
    (step / "decode_b1_0_meta.json").write_text('{"req_ids": [')
    assert "decode_b1_0_meta.json cannot be read" in dt.open(tmp_path).verify()[0]


def test_missing_ranks_and_empty_directories_are_said(tmp_path: Path) -> None:
    step = write_step(tmp_path / "dp0", "decode_b1_0", {"a": [values(), values()], "b": [values(), values()]})
    (step / "b" / "rank1.pt").unlink()
    (step / "c").mkdir()
    write_step(tmp_path / "dp0", "decode_b1_1", {}, positions=[1])
    problems = dt.open(tmp_path).verify()
    assert problems == [
        "rank 0: dp0/decode_b1_0/c holds no tensor",
        "rank 0: dp0/decode_b1_1 holds no module",
        "rank 0: dp0/decode_b1_0/b/rank1.pt is missing",
    ]


def test_empty_directories_are_errors(tmp_path: Path) -> None:
    with pytest.raises(NotATraceError, match="is no trace"):
        open_ranks(tmp_path)
    (tmp_path / "dp0").mkdir()
    with pytest.raises(TraceFormatError, match=r"holds no tensor.*dp0 holds no step"):
        open_ranks(tmp_path)


def test_numbers_that_the_tool_would_not_write_are_passed_over(tmp_path: Path) -> None:
    step = write_step(tmp_path / "dp0", "decode_b1_0", {"a": values(1)})
    torch.save(values(2), step / "a" / "rank00.pt")
    shutil.copytree(step, tmp_path / "dp00" / "decode_b1_0")
    shutil.copytree(step, tmp_path / "dp0" / "decode_b1_00")
    trace = dt.open(tmp_path)
    (record,) = trace.records
    assert torch.equal(record.tensor("out"), values(1)) and len(trace.steps) == 1
    (notice,) = [notice for notice in trace.header["notices"] if notice.startswith("passed over")]
    assert "dp0/decode_b1_00" in notice and "a/rank00.pt" in notice


def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.pt"
    torch.save(values(5), secret)
    outside = write_step(tmp_path / "outside" / "dp0", "decode_b1_0", {"fc": values(5)})
    step = write_step(tmp_path / "dump" / "dp0", "decode_b1_0", {"a": values(), "b": values()})
    (step / "a" / "rank0.pt").unlink()
    (step / "a" / "rank0.pt").symlink_to(secret)
    (step / "linked").symlink_to(outside / "fc")
    (tmp_path / "dump" / "dp1").symlink_to(tmp_path / "outside" / "dp0")
    (tmp_path / "dump" / "draft").symlink_to(tmp_path / "outside")
    trace = dt.open(tmp_path / "dump")
    assert [(r.model, r.module) for r in trace.records] == [("", "b")]
    problems = trace.verify()
    for name in ("a/rank0.pt", "linked", "dp1", "draft"):
        assert any(f"{name} is a link and was not followed" in problem for problem in problems), name


def test_what_lies_beside_no_dump_is_not_looked_into(tmp_path: Path) -> None:
    """Else a directory above many others would be read before it is refused."""
    write_step(tmp_path / "runs" / "one" / "dp0", "decode_b1_0", {"a": values()})
    assert foreign_format(tmp_path / "runs") is None
    write_step(tmp_path / "runs" / "dp0", "decode_b1_0", {"a": values()})
    assert {r.model for r in dt.open(tmp_path / "runs").records} == {"", "one"}


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    step = write_step(tmp_path / "dp0", "decode_b1_0", {"a": values(), "b": values()})
    (step / "a" / "rank0.pt").unlink()
    os.mkfifo(step / "a" / "rank0.pt")
    trace = dt.open(tmp_path)
    assert [r.module for r in trace.records] == ["b"]
    assert any("a/rank0.pt" in notice for notice in trace.header["notices"])


def test_odd_names_are_data(tmp_path: Path) -> None:
    names = ["a b", "%2E%2E%2Fx", "\N{SNOWMAN}", "bell\x07"]
    write_step(tmp_path / "dp0", "decode_b1_0", {name: values() for name in names})
    assert {r.module for r in dt.open(tmp_path).records} == {"a b", "../x", "\N{SNOWMAN}", "bell\x07"}
    shown = dispatch_trace("show", tmp_path)
    assert shown.returncode == 0 and "\x07" not in shown.stdout


@given(st.text(min_size=1, max_size=20))
@settings(max_examples=300, deadline=None)
def test_quoted_names_are_single_file_names_and_come_back(name: str) -> None:
    quoted = quote(name)
    assert unquote(quoted) == name
    assert quoted not in (".", "..") and not set(quoted) & set("/\\\0\n")
    assert not quoted.startswith("manual.") and not quoted.endswith("_meta.json")


def test_names_of_ordinary_modules_stand_as_they_are() -> None:
    for name in ("model.layers.0.self_attn.q_proj", "visual.blocks.11", "lm_head"):
        assert quote(name) == name


def test_inline_names_that_only_look_counted_are_their_own() -> None:
    names = ["manual.X", "manual.X_2", "manual.X_1_1", "manual.X_1"]
    assert inline_captures(names) == {
        "manual.X": ("X", 0),
        "manual.X_1": ("X", 1),
        "manual.X_2": ("X", 2),
        "manual.X_1_1": ("X_1", 1),
    }
    assert inline_captures(["manual.X", "manual.X_2"])["manual.X_2"] == ("X_2", 0)


def test_a_dump_has_every_method_of_a_rank_itself() -> None:
    """An inherited one would look for files that a dump has not."""
    inherited = {"closed", "complete", "has_hash"}  # computed from what it has
    public = {
        name
        for name, member in vars(RankReader).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }
    assert public - inherited <= set(vars(DumpRank)) and inherited <= public


def test_show_tells_the_format_steps_and_modules(tmp_path: Path) -> None:
    write_step(tmp_path / "dp0", "decode_b2_0", {"layers.0": values()}, req_ids="ab", positions=[3, 4])
    shown = dispatch_trace("show", tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "vLLM-Neuron capture layout" in shown.stdout and "positions=[3, 4]" in shown.stdout
    listed = dispatch_trace("show", tmp_path, "--module", "layers.0")
    assert "layers.0" in listed.stdout and "float32" in listed.stdout
    assert dispatch_trace("verify", tmp_path).returncode == 0


def test_looking_for_a_foreign_format_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from dispatch_trace.compat import open_ranks\n"
        "try:\n    open_ranks(sys.argv[1])\n"
        "except Exception as error:\n    print(type(error).__name__)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (0, "NotATraceError\n"), result.stderr


def test_opening_reads_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path / "dp0", "decode_b1_0", {"fc": values()})
    import dispatch_trace.stats

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("the data were read")

    monkeypatch.setattr(dispatch_trace.stats, "accumulate", refuse)
    (record,) = dt.open(tmp_path).records
    assert record.slot("out").shape == (2, 3)
    with pytest.raises(AssertionError, match="the data were read"):
        record.stats("out")


def test_a_dump_shows_as_a_table(tmp_path: Path) -> None:
    write_step(tmp_path / "dp0", "decode_b1_0", {"fc": values(), "manual.X": values(1)})
    trace = dt.open(tmp_path)
    table = trace.to_pandas()
    assert list(table["kind"]) == ["inline", "module"] and list(table["slot"]) == ["out", "out"]
    assert "complete" in trace._repr_html_() and not trace.executable


def test_metadata_beside_the_step_counts_too(tmp_path: Path) -> None:
    step = write_step(tmp_path / "dp0", "decode_b1_0", {"fc": values()}, positions=[7], meta="")
    meta = {"req_ids": ["a"], "positions": [7], "dp_rank": 0}
    (step.parent / "decode_b1_0_meta.json").write_text(json.dumps(meta))
    trace = dt.open(tmp_path)
    assert trace.complete and trace.steps[0].meta["positions"] == [7]
