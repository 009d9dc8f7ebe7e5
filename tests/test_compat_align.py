"""Dumps of modules against traces of ops: a planted bug is named, and a clean pair raises no alarm."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aligning import batch, record
from dumps import fastvideo_trace, nxd_capture, sglang_dump, sglang_passes
from foreign_dumps import MSPROBE, debug_log, small
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._debug_mode import DebugMode

import dispatch_trace as dt
from dispatch_trace.align.figures import apart_at_least
from dispatch_trace.compat.convert import convert
from dispatch_trace.schema import StoredContent
from dispatch_trace.stats import accumulate

transformers = pytest.importorskip("transformers")
Change = Callable[[Any], Any]


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    return transformers.BertModel(config).eval()


INPUTS = {"input_ids": torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(3))}


def clean(model: Any) -> None:
    pass


def double_row(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[5] *= 2


def other_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.9


def other_eps(model: Any) -> None:
    model.encoder.layer[0].output.LayerNorm.eps = 0.1


def negated_pooler(model: Any) -> None:
    model.pooler.dense.weight.neg_()


BUGS: dict[str, tuple[Callable[[], Any], Change, str | None]] = {
    "llama": (llama, clean, None),
    "llama-weight": (llama, double_row, "model.layers.1.mlp.up_proj"),
    "llama-attention": (llama, other_scale, "model.layers.1.self_attn"),
    "bert": (bert, clean, None),
    "bert-eps": (bert, other_eps, "encoder.layer.0.output.LayerNorm"),
    "bert-pooler": (bert, negated_pooler, "pooler.dense"),
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Our recording of a model with a bug, by name and level; made once."""
    folder = tmp_path_factory.mktemp("ours")

    def path(name: str, level: str) -> Path:
        out = folder / f"{name}-{level}"
        if not out.exists():
            make, plant, _ = BUGS[name]
            model = make()
            with torch.no_grad():
                plant(model)
                with dt.record(out, model, level=level, save="tensors"):
                    model(**INPUTS)
        return out

    return path


def debugger(folder: Path, model: Any) -> Path:
    with (
        torch.no_grad(),
        transformers.model_addition_debugger_context(
            model, debug_path=str(folder), do_prune_layers=False, use_repr=False
        ),
    ):
        model.forward(**INPUTS)
    return folder


DUMPS: dict[str, Callable[[Path, Any], Path]] = {
    "transformers-debug": debugger,
    "sglang": lambda folder, model: sglang_dump(folder, model, [INPUTS]),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Another tool's dump of the clean model, by format and model."""
    folder = tmp_path_factory.mktemp("theirs")

    def path(format: str, name: str) -> Path:
        out = folder / f"{format}-{name}"
        return out if out.exists() else DUMPS[format](out, {"llama": llama, "bert": bert}[name]())

    return path


CASES = [
    *(("transformers-debug", "op", bug) for bug in BUGS),
    *(("sglang", "op", bug) for bug in ("llama", "llama-attention", "bert-eps")),
    *(("transformers-debug", "module", bug) for bug in ("bert", "llama-attention", "llama-weight")),
]


@pytest.mark.parametrize(("format", "level", "bug"), CASES)
def test_the_guilty_module_is_named_and_nothing_else(
    format: str, level: str, bug: str, ours: Any, theirs: Any
) -> None:
    alignment = dt.align(theirs(format, bug.partition("-")[0]), ours(bug, level))
    module = BUGS[bug][2]
    if module is None:
        assert alignment.verdict == "match", (alignment.reasons, alignment.first)
    else:
        assert alignment.verdict == "diverged"
        assert {finding.module for finding in alignment.findings if finding.fatal} == {module}


@pytest.mark.parametrize("format", DUMPS)
def test_a_dump_may_be_the_target(format: str, ours: Any, theirs: Any) -> None:
    assert dt.align(ours("llama", "op"), theirs(format, "llama")).verdict == "match"
    alignment = dt.align(ours("llama-weight", "op"), theirs(format, "llama"))
    assert alignment.first is not None and alignment.first.module == "model.layers.1.mlp.up_proj"


def changed(change: Change) -> Any:
    model = copy.deepcopy(small())
    with torch.no_grad():
        change(model)
    return model


def record_small(path: Path, model: Any, level: str = "op") -> Path:
    with torch.no_grad(), dt.record(path, model, level=level, save="tensors"):
        model(batch(3, 8))
    return path


@pytest.mark.parametrize("level", ["op", "module"])
def test_msprobe_dumps_name_the_module_and_match_where_they_may(level: str, tmp_path: Path) -> None:
    """A dump that msprobe wrote of the same small network."""
    dump = MSPROBE / "tensor-L0"
    same = dt.align(dump, record_small(tmp_path / "same", small(), level))
    assert same.verdict == "match", (same.reasons, same.first)
    for plant, module in (
        (lambda m: m.blocks[1].up.weight[3].mul_(2), "blocks.1.up"),
        (lambda m: setattr(m.blocks[2].norm, "eps", 0.1), "blocks.2.norm"),
        (lambda m: setattr(m.blocks[0], "scale", 2.0), "blocks.0"),
        (lambda m: m.head.weight.neg_(), "head"),
    ):
        target = record_small(tmp_path / f"{module}-{level}", changed(plant), level)
        alignment = dt.align(dump, target)
        assert {f.module for f in alignment.findings if f.fatal} == {module}, alignment.first


@pytest.mark.parametrize("save", ["tensors", "stats"])
def test_api_calls_of_msprobe_line_up_with_ops(save: str, tmp_path: Path) -> None:
    dump = MSPROBE / "tensor-L1"
    ours = record(tmp_path / "same", small(), batch(3, 8), save=save)
    same = dt.align(dump, ours)
    assert same.verdict == "match"
    assert "19 of 19 API calls were held against ops, by family, size and order" in same.notices
    rows = {(p.ref.name, p.ref.n): p for p in same.pairs if p.ref is not None and p.ref.kind == "inline"}
    assert len(rows) == 19 and all(row.outcome == "matched" and row.error == 0 for row in rows.values())
    for name, plant, module, op in (
        ("scale", lambda m: setattr(m.blocks[1], "scale", 1.2), "blocks.1", "aten.mul"),
        ("weight", lambda m: m.blocks[1].up.weight[3].mul_(2), "blocks.1.up", "aten.addmm"),
    ):
        other = record(tmp_path / name, changed(plant), batch(3, 8), save=save)
        for sides in ((dump, other), (other, dump)):
            first = dt.align(*sides).first
            assert first is not None and (first.module, first.op) == (module, op), sides


def test_api_calls_that_are_not_told_apart_are_left_out(tmp_path: Path) -> None:
    model = changed(lambda m: m.blocks.append(copy.deepcopy(m.blocks[0])))
    found = dt.align(MSPROBE / "tensor-L1", record(tmp_path / "deeper", model, batch(3, 8)))
    assert found.first is None
    assert "0 of 19 API calls were held against ops, by family, size and order" in found.notices


def test_norms_of_a_log_tell_the_first_op_that_is_apart(tmp_path: Path) -> None:
    log = debug_log(tmp_path / "log.txt", small())
    same = dt.align(log, debug_log(tmp_path / "same.txt", small()))
    assert same.verdict == "inconclusive" and same.first is None
    assert any("op results are alike, which proves nothing" in notice for notice in same.notices)
    model = changed(lambda m: setattr(m.blocks[1], "scale", 1.5))
    said = (
        "judged by statistics, blocks.1 aten.mul (step 0, call 0, out) is the first that is certainly apart"
    )
    for other in (debug_log(tmp_path / "other.txt", model), record_small(tmp_path / "ours", model)):
        found = dt.align(log, other)
        assert found.verdict == "inconclusive"
        assert any(notice.startswith(said) for notice in found.notices), found.notices
    kept = convert(log, tmp_path / "kept", to="trace")
    assert kept.left_out == []
    again = dt.align(tmp_path / "kept", debug_log(tmp_path / "third.txt", model))
    assert any(notice.startswith(said) for notice in again.notices)


def test_passes_put_back_line_up_step_by_step(tmp_path: Path, ours: Any) -> None:
    dump = sglang_passes(tmp_path / "d", llama(), [INPUTS] * 2)
    alignment = dt.align(dump, ours("llama-weight", "op"))
    assert {f.module for f in alignment.findings if f.fatal} == {"model.layers.1.mlp.up_proj"}
    alone = dt.align(dump, ours("llama", "op"))
    assert alone.verdict == "inconclusive" and "steps that only the reference has: 1" in alone.reasons


def test_of_modules_that_were_not_captured_the_call_around_is_named(tmp_path: Path, ours: Any) -> None:
    chosen = ["model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    dump = nxd_capture(tmp_path / "d", llama(), chosen, [INPUTS])
    assert dt.align(dump, ours("llama", "op")).verdict == "match"
    for level in ("op", "module"):
        found = [f.module for f in dt.align(dump, ours("llama-weight", level)).findings if f.fatal]
        assert found == ["model.layers.1"], level


def states(path: Path, model: Any) -> Path:
    with torch.no_grad():
        torch.save(model(**INPUTS, output_hidden_states=True).hidden_states, path)
    return path


@pytest.mark.parametrize("level", ["op", "module"])
def test_hidden_states_find_their_places_between_the_layers(level: str, tmp_path: Path, ours: Any) -> None:
    saved = states(tmp_path / "states.pt", bert())
    same = dt.align(saved, ours("bert", level))
    assert same.verdict == "inconclusive" and not same.findings
    assert same.reasons == ["final outputs of which the reference has no value: out.pooler_output"]
    found = [f.module for f in dt.align(saved, ours("bert-eps", level)).findings if f.fatal]
    assert found == ["encoder.layer.0"]
    # The norm behind the layers made Llama's last state; with a bug before it nobody can tell.
    alignment = dt.align(states(tmp_path / "llama.pt", llama()), ours("llama-weight", level))
    assert alignment.verdict == "diverged" and alignment.first is not None
    assert alignment.first.module == "model"
    assert {"model.layers.1", "model.norm"} <= set(alignment.first.evidence["candidates"])


def test_statistics_never_match_and_say_what_is_certainly_apart(tmp_path: Path, ours: Any) -> None:
    trace = fastvideo_trace(tmp_path / "t.jsonl", llama(), [INPUTS])
    same = dt.align(trace, ours("llama", "op"))
    assert same.verdict == "inconclusive" and not same.findings
    assert any("are alike, which proves nothing" in notice for notice in same.notices)
    other = dt.align(trace, ours("llama-weight", "op"))
    assert other.verdict == "inconclusive"
    assert any(
        notice.startswith("judged by statistics, model.layers.1.mlp.up_proj") for notice in other.notices
    )


def test_a_log_without_values_tells_which_argument_differs(tmp_path: Path) -> None:
    model = changed(lambda m: setattr(m.blocks[1].norm, "eps", 0.1))
    with torch.no_grad(), DebugMode(record_nn_module=True, record_ids=True) as mode:
        model(batch(3, 8))
    (tmp_path / "log.txt").write_text(mode.debug_string())
    alignment = dt.align(record_small(tmp_path / "ref", small()), tmp_path / "log.txt")
    assert alignment.verdict == "inconclusive"
    said = [notice for notice in alignment.notices if notice.startswith("without values")]
    assert said == [
        "without values: aten.native_layer_norm in blocks.1.norm (step 0) is the first op that got other "
        "arguments: eps [1e-05, 0.1]"
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.floats(0.0, 3.0))
def test_statistics_never_claim_more_than_there_is(n: int, seed: int, apart: float) -> None:
    generator = np.random.default_rng(seed)
    a = generator.standard_normal(n)
    b = a + apart * generator.standard_normal(n)
    first, second = (
        StoredContent(
            id=0, dtype="float64", shape=(n,), stats=dict(accumulate(torch.tensor(x), sketch=False).stats)
        )
        for x in (a, b)
    )
    actual = math.sqrt(((b - a) ** 2).sum() / (a**2).sum())
    assert apart_at_least(first, second) <= actual * (1 + 1e-9) + 1e-9
