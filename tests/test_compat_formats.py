"""Dumps of other tools, opened as they are: what is in them, what they cannot say, and bad files."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import dispatch_trace
from dumps import fastvideo_trace, nxd_capture, sglang_dump, sglang_passes
from foreign_dumps import MAKERS, MSPROBE, Wrapped, debug_log, runs, saved_states, small
from safetensors.torch import save_file
from torch import nn

import dispatch_trace as dt
from dispatch_trace.compat import foreign_format
from dispatch_trace.errors import NotATraceError, NotExecutableError, TraceFormatError
from dispatch_trace.export import export


def recorded(folder: Path, model: nn.Module, count: int = 1) -> dt.Trace:
    with torch.no_grad(), dt.record(folder / "ours", model, level="module", save="tensors"):
        for inputs in runs(count):
            model(**inputs)
    return dt.open(folder / "ours")


@pytest.mark.parametrize("name", MAKERS)
def test_a_dump_is_known_by_what_is_in_it_shown_and_sound(name: str, tmp_path: Path) -> None:
    dump = MAKERS[name](tmp_path)
    renamed = dump.with_name("renamed" + dump.suffix)
    dump.rename(renamed)
    found = foreign_format(renamed)
    assert found is not None and found.name == name
    trace = dt.open(renamed)
    assert trace.verify() == [] and trace.complete and trace.header["format"] == name
    assert trace.num_records > 0 and trace.header["notices"], "what the format cannot say is said"
    alignment = dt.align(renamed, renamed)
    assert alignment.verdict in ("match", "inconclusive") and not alignment.findings
    assert any(notice in said for said in alignment.notices for notice in trace.header["notices"])


def test_the_command_line_shows_and_verifies_a_dump(tmp_path: Path) -> None:
    dump = sglang_dump(tmp_path / "d", small(), runs())
    shown = dispatch_trace("show", dump)
    assert shown.returncode == 0 and "blocks" in shown.stdout and "head" in shown.stdout, shown.stderr
    assert "made by  SGLang dumper directory" in shown.stdout and "lacks    ops are not in it" in shown.stdout
    torn = next((dump / "dump_1").glob("*head.output*"))
    torn.write_bytes(torn.read_bytes()[:-100])
    result = dispatch_trace("verify", dump)
    assert result.returncode == 2 and torn.name in result.stdout


@pytest.mark.parametrize("name", ["sglang", "sglang-passes", "nxd-inference"])
def test_values_are_those_of_our_own_recording(name: str, tmp_path: Path) -> None:
    model = Wrapped().eval() if name == "sglang-passes" else small()
    ours, theirs = recorded(tmp_path, model, 2), dt.open(MAKERS[name](tmp_path))
    compared = 0
    for record in theirs.find(kind="module"):
        twin = next(ours.find(module=record.module, kind="module", step=record.step, call=record.call))
        for slot in record.slots:
            if slot.is_tensor:
                assert torch.equal(record.tensor(slot.name), twin.tensor(slot.name)), (record, slot.name)
                compared += 1
    assert compared >= 4


def test_sglang_inputs_and_outputs_are_one_call_and_calls_nest(tmp_path: Path) -> None:
    trace = dt.open(sglang_dump(tmp_path, small(), runs()))
    up = next(trace.find(module="blocks.1.up", kind="module"))
    assert [(slot.name, slot.role) for slot in up.slots] == [("in[0]", "in"), ("out", "out")]
    norm = next(trace.find(module="blocks.1.norm", kind="module"))
    assert up.slot("in[0]").content == norm.slot("out").content, "one value, one number"
    block = next(trace.find(module="blocks.1", kind="module"))
    assert block._record.opened <= norm.seq < up.seq < block.seq


def test_sglang_names_parameters_and_points_of_the_users(tmp_path: Path) -> None:
    folder = tmp_path / "dump_x"
    folder.mkdir()
    for index, (name, tags) in enumerate(
        [
            ("param__fc.weight", ""),
            ("router", "___layer_id=3"),
            ("grad__router", ""),
            ("router", "___layer_id=3"),
        ]
    ):
        file = folder / f"step=0___rank=0___dump_index={index}___name={name}{tags}.pt"
        torch.save({"value": torch.full((2,), float(index)), "meta": {"name": name}}, file)
    trace = dt.open(tmp_path)
    assert [(r.kind, r.module, r.name, r.n) for r in trace.records] == [
        ("param", "fc", "weight", 0),
        ("inline", "", "router[layer_id=3]", 0),
        ("inline", "", "router[layer_id=3]", 1),
    ]
    assert "1 gradients were left out" in trace.header["notices"]


def test_what_runs_behind_the_model_is_put_back_into_its_pass(tmp_path: Path) -> None:
    model = Wrapped().eval()
    trace = dt.open(sglang_passes(tmp_path / "d", model, runs(2)))
    heads = list(trace.find(module="lm_head", kind="module"))
    with torch.no_grad():
        assert [head.step for head in heads] == [0]
        assert torch.equal(heads[0].tensor(), model(**runs()[0]))
    assert any("last pass was never written" in notice for notice in trace.header["notices"])


def test_nxd_phases_inputs_and_tensors_registered_by_hand(tmp_path: Path) -> None:
    folder = nxd_capture(tmp_path / "d", small(), ["head"], runs(2), inputs=True)
    torch.save(torch.ones(2), folder / "captured_tensors_tkg_step_2_manual_tensor_0.pt")
    trace = dt.open(folder)
    assert [(s.step, s.meta["phase"], s.meta["capture_step"]) for s in trace.steps] == [
        (0, "prefill", 1),
        (1, "decode", 2),
    ]
    assert [slot.name for slot in next(trace.find(module="head")).slots] == ["in[0]", "out"]
    assert next(trace.find(name="manual_tensor_0")).step == 1


def test_fastvideo_lines_are_calls_with_their_figures(tmp_path: Path) -> None:
    file = fastvideo_trace(tmp_path / "t.jsonl", small(), runs(2))
    ours, theirs = recorded(tmp_path, small(), 2), dt.open(file)
    for record in theirs.records:
        twin = next(ours.find(module=record.module, kind="module", step=record.step, call=record.call))
        mine, stats = twin.stats(), record.stats()
        for name in ("n", "min", "max", "sum", "abs_sum", "sq_sum"):
            assert stats[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-4), (record, name)
        assert record.slot().shape == twin.slot().shape and record.slot().dtype == "float32"
    with pytest.raises(NotExecutableError, match="statistics only"):
        theirs.ranks[0].tensor(0)
    fastvideo_trace(file, small(), runs(2))  # as a second run appends
    assert any("second run may have been appended" in n for n in dt.open(file).header["notices"])


def test_what_export_writes_for_fastvideo_is_read_back_figure_by_figure(tmp_path: Path) -> None:
    ours = recorded(tmp_path, small(), 2)
    export(tmp_path / "ours", tmp_path / "t.jsonl", to="fastvideo")
    theirs = dt.open(tmp_path / "t.jsonl")
    assert theirs.verify() == []
    written = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert len(written) == sum(len(record.slots) for record in theirs.records)
    for record in theirs.records:
        twin = next(ours.find(module=record.module, kind="module", step=record.step, call=record.call))
        for slot in record.slots:
            mine, read = twin.stats(slot.name), record.stats(slot.name)
            assert slot.shape == twin.slot(slot.name).shape
            known = {name for name in ("n", "min", "max", "sum", "abs_sum") if read[name] is not None}
            assert {"n", "max", "sum", "abs_sum"} <= known
            assert {name: read[name] for name in known} == pytest.approx({name: mine[name] for name in known})


def test_msprobe_modules_come_with_inputs_parameters_and_places() -> None:
    trace = dt.open(MSPROBE / "tensor-L0")
    up = next(trace.find(module="blocks.0.up", kind="module"))
    assert [slot.name for slot in up.slots] == ["in[0]", "out"] and up.source is not None
    assert "aligning.py:" in up.source
    weight = next(trace.find(kind="param", module="blocks.0.up", name="weight")).tensor()
    bias = next(trace.find(kind="param", module="blocks.0.up", name="bias")).tensor()
    assert torch.allclose(up.tensor("in[0]") @ weight.T + bias, up.tensor(), atol=1e-6)
    assert {m["class"] for m in trace.modules} == {"Block", "LayerNorm", "Linear"}
    statistics = next(dt.open(MSPROBE / "statistics-L0").find(module="blocks.0.up", kind="module"))
    assert statistics.stats()["max"] == pytest.approx(float(up.tensor().max()))
    assert statistics.stats()["l2"] == pytest.approx(float(up.tensor().norm()), rel=1e-5)


def test_calls_of_the_python_api_pair_by_name_with_those_of_another_dump() -> None:
    trace = dt.open(MSPROBE / "tensor-L1")
    linear = list(trace.find(kind="inline", name="Functional.linear"))
    assert [record.n for record in linear] == list(range(7)) and linear[0].slot().shape == (3, 16)
    alignment = dt.align(MSPROBE / "tensor-L1", MSPROBE / "tensor-L1")
    matched = [
        p for p in alignment.pairs if p.outcome == "matched" and p.target and p.target.kind == "inline"
    ]
    assert len(matched) == trace.num_records and alignment.verdict == "inconclusive"


def test_a_debug_mode_log_has_ops_arguments_and_who_read_what(tmp_path: Path) -> None:
    trace = dt.open(debug_log(tmp_path / "log.txt", small()))
    norm = next(trace.find(module="blocks.1.norm", op="aten.native_layer_norm"))
    assert norm.args["eps"] == 1e-05 and norm.slot("in.input").shape == (3, 8)
    assert [slot.name for slot in norm.slots if slot.role == "out"] == ["out[0]", "out[1]", "out[2]"]
    up = next(trace.find(module="blocks.1.up", op="aten.addmm"))
    assert up.slot("in.mat1").producers == ((norm.seq, norm.slot("out[0]").index),)
    assert {record.module for record in trace.find(kind="module")} >= {"", "blocks.0", "head"}


def states(kind: str, file: Path) -> Path:
    tensors = [torch.full((1, 2, 4), float(index)) for index in range(3)]
    if kind == "tuple":
        torch.save(tuple(tensors), file.with_suffix(".pt"))
        return file.with_suffix(".pt")
    if kind == "npz":
        np.savez(file.with_suffix(".npz"), *[tensor.numpy() for tensor in tensors])
        return file.with_suffix(".npz")
    named = {f"hidden_states.{index}": tensor for index, tensor in enumerate(tensors)}
    save_file(named, file.with_suffix(".safetensors"))
    return file.with_suffix(".safetensors")


@pytest.mark.parametrize("kind", ["tuple", "npz", "safetensors"])
def test_states_are_a_sequence_however_they_were_saved(kind: str, tmp_path: Path) -> None:
    (root,) = dt.open(states(kind, tmp_path / "s")).records
    assert [slot.name for slot in root.slots] == [f"out.hidden_states[{index}]" for index in range(3)]
    assert float(root.tensor("out.hidden_states[2]")[0, 0, 0]) == 2.0


def test_a_dict_of_activations_names_modules_and_what_a_model_returns(tmp_path: Path) -> None:
    torch.save(
        {"model.layers.0": torch.ones(2), "model.layers.1": (torch.ones(3), None), "logits": torch.ones(4)},
        tmp_path / "acts.pt",
    )
    found = {r.module: [slot.name for slot in r.slots] for r in dt.open(tmp_path / "acts.pt").records}
    assert found == {"model.layers.0": ["out"], "model.layers.1": ["out[0]"], "": ["out.logits"]}


# Bad input -------------------------------------------------------------------------------------------


class Marker:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["sglang", "sglang-passes", "nxd-inference", "msprobe", "saved-states"])
def test_nothing_in_a_file_is_ever_run(name: str, tmp_path: Path) -> None:
    dump, marker = MAKERS[name](tmp_path), tmp_path / "ran"
    victim = dump if dump.is_file() else sorted(dump.rglob("*.pt"))[0]
    torch.save({"value": Marker(marker), "meta": {}}, victim)
    with pytest.raises(TraceFormatError, match="nothing of it was read"):
        dt.open(dump)
    victim.write_bytes(pickle.dumps(Marker(marker)))  # the older form, without a zip around it
    with pytest.raises(TraceFormatError, match="nothing of it was read"):
        dt.open(dump)
    assert not marker.exists()


def test_arrays_of_objects_are_refused_too(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    np.savez(tmp_path / "s.npz", a=np.array([Marker(marker)], dtype=object))
    with pytest.raises(TraceFormatError, match="array of objects"):
        dt.open(tmp_path / "s.npz")
    assert not marker.exists()


def test_two_formats_or_two_dumps_in_one_folder_are_told_apart_by_the_user(tmp_path: Path) -> None:
    both = tmp_path / "both"
    nxd_capture(both, small(), ["head"], runs())
    fastvideo_trace(both / "t.jsonl", small(), runs())
    with pytest.raises(
        TraceFormatError, match="2 formats: NxD Inference capture, FastVideo activation trace"
    ):
        dt.open(both)
    for name in ("dump_1", "dump_2"):
        sglang_dump(tmp_path / "sglang", small(), runs(), exp=name)
    with pytest.raises(TraceFormatError, match=r"holds 2 dumps of SGLang's dumper: dump_1, dump_2. Give one"):
        dt.open(tmp_path / "sglang")
    assert dt.open(tmp_path / "sglang" / "dump_2").complete
    for pid in (1, 2):
        sglang_passes(tmp_path / "passes", Wrapped().eval(), runs(), pid=pid)
    with pytest.raises(TraceFormatError, match="2 dumps of rank 0: TP0_PP0_Rank0_pid1, TP0_PP0_Rank0_pid2"):
        dt.open(tmp_path / "passes")
    shutil.copytree(MSPROBE / "tensor-L0", tmp_path / "msprobe")
    process = next((tmp_path / "msprobe" / "step0").iterdir())
    shutil.copytree(process, process.with_name("proc1"))
    with pytest.raises(TraceFormatError, match="dumps of several runs: proc"):
        dt.open(tmp_path / "msprobe")


def test_a_trace_beside_a_dump_is_ambiguous(tmp_path: Path) -> None:
    with torch.no_grad(), dt.record(tmp_path, model := small()):
        model(**runs()[0])
    nxd_capture(tmp_path, small(), ["head"], runs())
    with pytest.raises(TraceFormatError, match="holds a trace and a NxD Inference capture"):
        dt.open(tmp_path)


def test_files_named_like_those_of_a_dump_say_what_they_lack(tmp_path: Path) -> None:
    (tmp_path / "step0" / "rank0").mkdir(parents=True)
    (tmp_path / "step0" / "rank0" / "dump.json").write_text("{}")
    with pytest.raises(
        TraceFormatError, match=r"named like that of an msprobe dump but names no task and level"
    ):
        dt.open(tmp_path)
    (tmp_path / "x.pt").write_bytes(b"no tensor")
    with pytest.raises(TraceFormatError, match=r"x.pt is neither a file of torch.save nor a NumPy file"):
        dt.open(tmp_path / "x.pt")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(NotATraceError, match="nor is it a dump that is known"):
        dt.open(tmp_path / "notes.txt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    with pytest.raises(TraceFormatError, match="holds no activations"):
        dt.open(tmp_path / "numbers.pt")


def test_a_shard_of_a_trace_leads_to_the_trace(tmp_path: Path) -> None:
    recorded(tmp_path, small())
    with pytest.raises(TraceFormatError, match="is a shard of a trace: give the trace's directory"):
        dt.open(next((tmp_path / "ours" / "rank0").glob("shard-*.safetensors")))


def test_what_was_cut_short_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    file = MAKERS["fastvideo"](tmp_path)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines)[:-30])
    trace = dt.open(file)
    assert not trace.complete and trace.verify() == [f"trace.jsonl: line {len(lines)} is cut short"]
    passes = MAKERS["sglang-passes"](tmp_path)
    torn = passes / "TP0_PP0_Rank0_pid7" / "Pass00001.pt"
    torn.write_bytes(torn.read_bytes()[:200])
    assert any("Pass00001.pt cannot be read" in problem for problem in dt.open(passes).verify())
    dump = MAKERS["msprobe"](tmp_path / "m")
    (victim,) = dump.rglob("Module.head.Linear.forward.0.output.0.pt")
    victim.unlink()
    assert any("head" in problem and "cannot be read" in problem for problem in dt.open(dump).verify())
    (index,) = dump.rglob("dump.json")
    index.write_text(index.read_text()[:-50])
    with pytest.raises(TraceFormatError, match="no whole msprobe dump"):
        dt.open(dump)
    states_file = saved_states(tmp_path / "cut.pt")
    states_file.write_bytes(states_file.read_bytes()[:300])
    with pytest.raises(TraceFormatError, match="is cut short"):
        dt.open(states_file)


def test_names_in_a_dump_never_lead_out_of_it(tmp_path: Path) -> None:
    dump = MAKERS["msprobe"](tmp_path)
    torch.save(torch.ones(1), tmp_path / "secret.pt")
    (index,) = dump.rglob("dump.json")
    text = json.loads(index.read_text())
    text["data"]["Module.head.Linear.forward.0"]["output"][0]["data_name"] = "../../../../secret.pt"
    index.write_text(json.dumps(text))
    trace = dt.open(dump)
    head = next(trace.find(module="head", kind="module"))
    assert not trace.complete and head.stats()["n"] == 24, "the figures stand in"
    with pytest.raises(NotExecutableError):
        head.tensor()
