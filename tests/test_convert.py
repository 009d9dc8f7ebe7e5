"""`convert`: traces written as vLLM-Neuron dumps and back, and dumps judged against op-level traces."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aligning import batch, changed, net, record
from command_line import dispatch_trace, record_mlp
from foreign_dumps import MAKERS
from torch import nn

import dispatch_trace as dt
from dispatch_trace.compat.convert import convert
from dispatch_trace.compat.vllm_neuron_write import Written
from dispatch_trace.errors import (
    CaptureError,
    ConfigError,
    NotExecutableError,
    TraceExistsError,
)


def to_dump(trace: Path, **options: Any) -> Path:
    out = trace.with_name(trace.name + "-dump")
    convert(trace, out, to="vllm-neuron", **options)
    return out


def dump_of(path: Path, model: nn.Module, *inputs: Any) -> Path:
    """The dump of a run recorded by modules only, as on a device."""
    return to_dump(record(path, model, *inputs, level="module"))


def keep_modules(dump: Path, *names: str) -> None:
    """Removes what was captured besides; "" is the root."""
    for step in (dump / "dp0").iterdir():
        for entry in step.iterdir():
            if entry.is_dir() and entry.name not in names:
                shutil.rmtree(entry)
            elif entry.name == "rank0.pt" and "" not in names:
                entry.unlink()


# Writing --------------------------------------------------------------------------------------------


def test_a_round_trip_is_a_match_of_every_module(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch())
    alignment = dt.align(ref, to_dump(ref))
    assert alignment.verdict == "match", alignment.reasons
    modules = [pair for pair in alignment.pairs if (pair.ref or pair.target).kind == "module"]  # type: ignore[union-attr]
    assert len(modules) == 14 and {pair.outcome for pair in modules} == {"matched"}
    assert {pair.error for pair in modules} == {0.0}
    assert {pair.outcome for pair in alignment.pairs} == {"matched", "deselected"}
    assert any("no inputs" in notice for notice in alignment.notices)


def test_directories_and_metadata_are_those_of_the_layout(tmp_path: Path) -> None:
    model = net()
    with torch.no_grad(), dt.record(tmp_path / "ref", model, level="module", save="tensors") as rec:
        with rec.step(phase="prefill", req_ids=["a"], positions=torch.arange(6)):
            model(batch())
        for position in (6, 7):
            with rec.step(phase="decode", req_ids=["a", "b"], positions=[position, 3]):
                model(batch(2))
        with rec.step(phase="decode", req_ids=["a"], positions=[8]):
            model(batch(1))
    dump = to_dump(tmp_path / "ref")
    steps = {"prefill_s6_0", "decode_b2_0", "decode_b2_1", "decode_b1_0"}
    assert {entry.name for entry in (dump / "dp0").iterdir()} == steps
    assert {entry.name for entry in dump.iterdir()} == {"dp0"}
    meta = json.loads((dump / "dp0" / "decode_b2_1" / "decode_b2_1_meta.json").read_text())
    assert meta == {"req_ids": ["a", "b"], "positions": [7, 3], "dp_rank": 0}
    tensor = torch.load(dump / "dp0" / "prefill_s6_0" / "head" / "rank0.pt", weights_only=True)
    assert torch.equal(
        tensor, next(dt.open(tmp_path / "ref").find(module="head", kind="module", step=0)).tensor("out")
    )
    assert [s.meta["positions"] for s in dt.open(dump).steps] == [list(range(6)), [6, 3], [7, 3], [8]]
    assert dt.align(tmp_path / "ref", dump).verdict == "match"


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.pair(self.fc(self.fc(x)))
        dt.capture_tensor("../../gate", first)
        dt.capture_tensor("../../gate", second)
        return first + second


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.relu(), x.sin()


def test_what_finds_no_place_is_told(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ref = record(tmp_path / "ref", Twice(), batch(width=8))
    written = convert(ref, tmp_path / "dump", to="vllm-neuron")
    assert (written.num_steps, written.num_tensors) == (1, 5)
    for what in (
        "1 earlier calls of modules called more than once in a step: the layout keeps the last (fc (1))",
        "1 further outputs of modules",
        "4 inputs of modules",
        "2 parameters",
        "1 steps without positions, written as of size 0: they pair by order only",
    ):
        assert what in written.left_out, written.left_out
    step = tmp_path / "dump" / "dp0" / "prefill_s0_0"
    names = {"fc", "pair", "rank0.pt", "prefill_s0_0_meta.json"}
    inline = {"manual...%2F..%2Fgate", "manual...%2F..%2Fgate_1"}
    assert {entry.name for entry in step.iterdir()} == names | inline
    trace, original = dt.open(tmp_path / "dump"), dt.open(ref)
    calls = list(original.find(module="fc", kind="module"))
    assert torch.equal(next(trace.find(module="fc")).tensor("out"), calls[1].tensor("out"))
    assert torch.equal(
        next(trace.find(name="../../gate", n=1)).tensor("out"),
        next(original.find(name="../../gate", n=1)).tensor("out"),
    )


def test_the_last_call_and_the_first_output_pair_with_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ref = record(tmp_path / "ref", Twice(), batch(width=8))
    alignment = dt.align(ref, to_dump(ref))
    assert alignment.verdict == "match", alignment.reasons
    pairs = {(p.ref.module, p.ref.call): p for p in alignment.pairs if p.ref and p.ref.kind == "module"}
    assert pairs[("fc", 1)].outcome == pairs[("pair", 0)].outcome == "matched"
    assert pairs[("fc", 0)].outcome == "deselected"


def test_models_and_ranks_have_their_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"": net(), "draft": net(), "odd/../name": net()}
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with torch.no_grad(), dt.record(tmp_path / "ref", models, level="module", save="tensors"):
            for model in models.values():
                model(batch() + rank)
    dump = to_dump(tmp_path / "ref")
    assert {entry.name for entry in dump.iterdir()} == {"dp0", "draft", "odd%2F..%2Fname"}
    assert (dump / "draft" / "dp0" / "prefill_s0_0" / "head" / "rank1.pt").is_file()
    assert [rank.rank for rank in dt.open(dump).ranks] == [0, 1]
    alignment = dt.align(tmp_path / "ref", dump)
    assert alignment.verdict == "match", alignment.reasons
    assert len([p for p in alignment.pairs if p.outcome == "matched"]) == 2 * 3 * 14


def test_odd_module_names_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    names = ["a/b", "manual", "\N{SNOWMAN} %41", "dp0"]
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Sequential(nn.Linear(8, 8)))
    ref = record(tmp_path / "ref", model, batch(width=8), level="module")
    dump = to_dump(ref)
    step = dump / "dp0" / "prefill_s0_0"
    assert all(entry.parent == step and entry.name.isascii() for entry in step.iterdir())
    assert {r.module for r in dt.open(dump).records} == {"", *names, *(f"{name}.0" for name in names)}
    assert dt.align(ref, dump).verdict == "match"


def test_leaves_suffice_because_values_are_computed_again(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch(), save="leaves")
    with pytest.raises(NotExecutableError, match="no data"):
        convert(ref, tmp_path / "stored", to="vllm-neuron")
    result = dispatch_trace("convert", ref, tmp_path / "dump", "--to", "vllm-neuron")
    assert result.returncode == 0 and "14 tensors of 1 steps" in result.stdout, result.stderr
    tensors = record(tmp_path / "tensors", net(), batch())
    assert dt.align(tensors, tmp_path / "dump", exact=True).verdict == "match"


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    stats = record(tmp_path / "stats", net(), batch(), save="stats")
    ref = record(tmp_path / "ref", net(), batch())
    with pytest.raises(NotExecutableError, match="holds no data of module outputs"):
        convert(stats, tmp_path / "out", to="vllm-neuron")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for taken in (tmp_path / "taken", tmp_path / "taken" / "file"):
        with pytest.raises(TraceExistsError, match="exists already"):
            convert(ref, taken, to="vllm-neuron")
    with pytest.raises(CaptureError, match="cannot write to"):
        convert(ref, tmp_path / "taken" / "file" / "out", to="vllm-neuron")
    with pytest.raises(ConfigError, match="is a trace already"):
        convert(ref, tmp_path / "out", to="trace")
    with pytest.raises(ConfigError, match="expected one of vllm-neuron, trace"):
        convert(ref, tmp_path / "out", to="pickle")
    assert {entry.name for entry in tmp_path.iterdir()} == {"stats", "ref", "taken"}


def test_the_command_line_converts_both_ways(tmp_path: Path) -> None:
    record_mlp(tmp_path / "ref")
    there = dispatch_trace("convert", tmp_path / "ref", tmp_path / "dump", "--to", "vllm-neuron")
    assert there.returncode == 0 and "left out: 4 parameters" in there.stdout, there.stderr
    back = dispatch_trace("convert", tmp_path / "dump", tmp_path / "trace", "--to", "trace")
    assert back.returncode == 0 and "4 tensors of 1 steps" in back.stdout, back.stderr
    for dump in ("dump", "trace"):
        aligned = dispatch_trace("align", tmp_path / "ref", tmp_path / dump)
        assert aligned.returncode == 0 and aligned.stdout.startswith("MATCH"), aligned.stdout
    again = dispatch_trace("convert", tmp_path / "ref", tmp_path / "dump", "--to", "vllm-neuron")
    assert again.returncode == 2 and again.stderr.startswith("TraceExistsError"), again.stderr


def test_a_dump_becomes_a_trace_with_all_that_it_holds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dump = to_dump(record(tmp_path / "ref", Twice(), batch(width=8)))
    written = convert(dump, tmp_path / "trace", to="trace")
    assert written == Written(num_tensors=5, num_steps=1)
    before, after = dt.open(dump), dt.open(tmp_path / "trace")
    assert after.verify() == [] and after.complete and after.steps == before.steps
    for ours, theirs in zip(before.records, after.records, strict=True):
        assert ours._record.key == theirs._record.key and ours._record.opened == theirs._record.opened
        assert torch.equal(ours.tensor("out"), theirs.tensor("out"))
    assert after.header["notices"] == before.header["notices"]


def test_a_torn_dump_becomes_a_trace_that_is_not_complete(tmp_path: Path) -> None:
    dump = dump_of(tmp_path / "ref", net(), batch())
    (dump / "dp0" / "prefill_s0_0" / "head" / "rank0.pt").write_bytes(b"PK\x03\x04")
    written = convert(dump, tmp_path / "trace", to="trace")
    assert written.num_tensors == 13 and "head/rank0.pt cannot be read" in written.left_out[0]
    trace = dt.open(tmp_path / "trace")
    assert trace.closed and not trace.complete
    for target in (dump, tmp_path / "trace"):
        alignment = dt.align(tmp_path / "ref", target)
        assert alignment.verdict == "inconclusive"
        assert any("head/rank0.pt cannot be read" in notice for notice in alignment.notices)


# Judging --------------------------------------------------------------------------------------------


def double_row(model: Any) -> None:
    model.blocks[1].up.weight[3] *= 2


def other_eps(model: Any) -> None:
    model.blocks[2].norm.eps = 1e-2


def negated_head(model: Any) -> None:
    model.head.weight.neg_()


def nan_weight(model: Any) -> None:
    model.blocks[0].up.weight[0, 0] = float("nan")


def no_residual(model: Any) -> None:
    block = model.blocks[1]
    block.forward = lambda x: block.down(torch.nn.functional.gelu(block.up(block.norm(x))))


FAULTS = [
    (double_row, "introduced", "blocks.1.up"),
    (other_eps, "introduced", "blocks.2.norm"),
    (negated_head, "introduced", "head"),
    (nan_weight, "nonfinite", "blocks.0.up"),
    (no_residual, "introduced", "blocks.1"),
]


@pytest.mark.parametrize("level", ["op", "module"])
@pytest.mark.parametrize(("plant", "label", "module"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_the_module_is_named_though_the_dump_has_no_inputs(
    plant: Callable[[Any], None], label: str, module: str, level: str, tmp_path: Path
) -> None:
    ref = record(tmp_path / "ref", net(), batch(), level=level)
    alignment = dt.align(ref, dump_of(tmp_path / "target", changed(plant), batch()))
    assert alignment.verdict == "diverged" and alignment.first is not None, alignment.reasons
    assert (alignment.first.label, alignment.first.module) == (label, module), alignment.first
    assert [f.module for f in alignment.findings if f.fatal] == [module]


def test_bfloat16_against_float32_is_noise(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch())
    alignment = dt.align(ref, dump_of(tmp_path / "target", net().bfloat16(), batch().bfloat16()))
    assert alignment.verdict == "match", alignment.first or alignment.reasons


def test_a_stats_only_reference_judges_a_dump_too(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch(), save="stats")
    assert dt.align(ref, dump_of(tmp_path / "same", net(), batch())).verdict == "match"
    alignment = dt.align(ref, dump_of(tmp_path / "target", changed(double_row), batch()))
    assert alignment.first is not None and alignment.first.module == "blocks.1.up"


class Attention(nn.Module):
    """Code between captured modules that is more than a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        return self.o((q @ q.transpose(0, 1) * self.scale).softmax(-1) @ q)


@pytest.mark.parametrize(("level", "candidates"), [("op", ["1.o", "aten._softmax"]), ("module", ["1.o"])])
def test_where_code_around_a_module_may_be_wrong_instead_the_call_around_both_is_named(
    level: str, candidates: list[str], tmp_path: Path
) -> None:
    def attention() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 32), Attention()).eval()

    def other_scale(model: Any) -> None:
        model[1].scale = 3.0

    ref = record(tmp_path / "ref", attention(), batch(), level=level)
    alignment = dt.align(ref, dump_of(tmp_path / "target", changed(other_scale, attention()), batch()))
    assert alignment.first is not None and alignment.first.module == "1"
    assert set(candidates) <= set(alignment.first.evidence["candidates"])
    assert alignment.first.hint == "either its own code before 1.o, or 1.o"


class Backwards(nn.Module):
    """Runs its modules against the order of their names, with code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(x).tanh())


@pytest.mark.parametrize("level", ["op", "module"])
def test_the_reference_knows_in_which_order_modules_ran(level: str, tmp_path: Path) -> None:
    def backwards() -> nn.Module:
        torch.manual_seed(0)
        return Backwards().eval()

    def other_bias(model: Any) -> None:
        model.b.bias += 1

    ref = record(tmp_path / "ref", backwards(), batch(), level=level)
    alignment = dt.align(ref, dump_of(tmp_path / "target", changed(other_bias, backwards()), batch()))
    assert [finding.module for finding in alignment.findings if finding.fatal] == ["b"]


def test_a_dump_of_some_modules_matches_where_one_returns_the_final_output(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch())
    dump = dump_of(tmp_path / "same", net(), batch())
    keep_modules(dump, "blocks.0", "blocks.1", "head")
    alignment = dt.align(ref, dump)
    assert alignment.verdict == "match", alignment.reasons
    assert {pair.outcome for pair in alignment.pairs} == {"matched", "deselected"}
    target = dump_of(tmp_path / "target", changed(double_row), batch())
    keep_modules(target, "blocks.0", "blocks.1", "blocks.2", "head")
    first = dt.align(ref, target).first
    assert first is not None and first.module == "blocks.1"


def test_without_the_final_output_it_may_diverge_but_never_match(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch())
    for plant, verdict in ((double_row, "diverged"), (lambda model: None, "inconclusive")):
        dump = dump_of(tmp_path / verdict, changed(plant), batch())
        keep_modules(dump, "blocks.0", "blocks.1", "blocks.2")
        alignment = dt.align(ref, dump)
        assert alignment.verdict == verdict
        if verdict == "diverged":
            assert alignment.first is not None and alignment.first.module == "blocks.1"
        else:
            assert "final outputs that no captured module of the target returns: out" in alignment.reasons


def test_a_dump_may_be_the_reference(tmp_path: Path) -> None:
    ref = dump_of(tmp_path / "ref", net(), batch())
    assert dt.align(ref, record(tmp_path / "same", net(), batch())).verdict == "match"
    alignment = dt.align(ref, record(tmp_path / "target", changed(double_row), batch()))
    assert alignment.first is not None and alignment.first.module == "blocks.1.up"


def test_two_dumps_name_no_module_whose_place_in_the_run_is_unknown(tmp_path: Path) -> None:
    ref = dump_of(tmp_path / "ref", net(), batch())
    assert dt.align(ref, dump_of(tmp_path / "same", net(), batch())).verdict == "match"
    alignment = dt.align(ref, dump_of(tmp_path / "target", changed(double_row), batch()))
    assert alignment.verdict == "diverged" and alignment.first is not None
    assert alignment.first.module == "blocks.1"
    assert alignment.first.evidence["candidates"] == ["blocks.1.down", "blocks.1.up"]


@pytest.mark.parametrize("fault", [None, "model.layers.1.mlp.up_proj"])
def test_a_llama_with_decode_steps_is_judged_by_request_and_position(
    fault: str | None, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()

    def run(path: Path, **options: Any) -> Path:
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad(), dt.record(path, model, save="tensors", **options) as rec:
            for positions in ([0, 1, 2, 3], [4], [5]):
                phase = "decode" if len(positions) == 1 else "prefill"
                with rec.step(phase=phase, req_ids=["a"], positions=positions):
                    ids = torch.tensor([positions])
                    model(ids, position_ids=ids, **{_cache_name(model): cache}, use_cache=True)
        return path

    ref = run(tmp_path / "ref", level="op")
    if fault is not None:
        with torch.no_grad():
            model.get_submodule(fault).weight[5] *= 2
    alignment = dt.align(ref, to_dump(run(tmp_path / "target", level="module")))
    if fault is None:
        assert alignment.verdict == "match", alignment.reasons
    else:
        assert alignment.verdict == "diverged"
        assert {finding.module for finding in alignment.findings if finding.fatal} == {fault}
        assert alignment.first is not None and alignment.first.step == 0


def _cache_name(model: nn.Module) -> str:
    """Newer releases of transformers renamed it, and warn of the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


# Other tools' dumps, field by field ------------------------------------------------------------------


def fields(path: Path) -> list[Any]:
    """All that a trace says of its records, values by their hashes."""
    trace = dt.open(path)
    found: list[Any] = [(step.step, step.model, step.meta) for step in trace.steps]
    for each in trace.records:
        raw = each._record
        slots = [
            (
                *(getattr(slot, name) for name in ("name", "role", "value", "is_tensor", "dtype", "shape")),
                *(getattr(slot, name) for name in ("strides", "layout", "producers", "note")),
                each.hash(slot.name) if slot.is_tensor and slot.content >= 0 else "",
                # figures that the tool measured; of data each trace measures its own
                each.stats(slot.name) if slot.content >= 0 and not each.hash(slot.name) else {},
            )
            for slot in raw.slots
        ]
        found.append((raw.key, raw.opened, raw.overload, raw.args, raw.source, raw.note, slots))
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_what_another_tool_dumped_comes_back_field_by_field(name: str, tmp_path: Path) -> None:
    dump = MAKERS[name](tmp_path)
    written = convert(dump, tmp_path / "trace", to="trace")
    assert fields(tmp_path / "trace") == fields(dump)
    before, after = dt.open(dump), dt.open(tmp_path / "trace")
    assert after.verify() == [] and after.header["notices"] == before.header["notices"]
    without = name in ("fastvideo", "debug-mode")
    assert (written.num_tensors == 0) == without
    assert written.left_out == before.ranks[0].problems
