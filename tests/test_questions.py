"""Asking traces and alignments: slices by pattern, completion, upstream, errors by token, rows followed."""

from __future__ import annotations

import os
import rlcompleter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aligning import batch, changed, net, record
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import dispatch_trace as dt
from dispatch_trace.errors import ConfigError, NoMatchError, NotExecutableError

HEADS, BAD_HEAD, BAD_TOKEN = 4, 2, (1, 3)


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=97,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def one_token_off(model: Any) -> None:
    """A layer whose output is scaled at one position of one sequence only."""

    def forward(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        mask = torch.ones((*output.shape[:2], 1))
        mask[BAD_TOKEN] = 1.5
        return output * mask

    model.model.layers[1].mlp.register_forward_hook(forward)


def one_head_off(model: Any) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.view(HEADS, -1, weight.shape[1])[BAD_HEAD] *= 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    ids = torch.arange(12).reshape(2, 6) * 7 % 97
    for save in ("tensors", "leaves"):
        record(folder / f"ref-{save}", llama(), ids, save=save)
        record(folder / f"token-{save}", changed(one_token_off, llama()), ids, save=save)
    record(folder / "head", changed(one_head_off, llama()), ids)
    return folder


# Traces -------------------------------------------------------------------------------------------------


def test_a_pattern_takes_modules_with_all_beneath_them(folder: Path) -> None:
    trace = dt.open(folder / "ref-tensors")
    found = trace["model.layers.0-1.mlp"]
    assert {r.module.split(".")[2] for r in found} == {"0", "1"}
    assert {"model.layers.0.mlp", "model.layers.0.mlp.up_proj"} <= {r.module for r in found}
    assert all(".mlp" in r.module for r in found)
    assert len(found[:3]) == 3 and found[0] in list(found)
    assert len(found.to_pandas()) == len(found)
    shown = repr(trace["model.layers.0.mlp.up_proj"]).splitlines()
    assert shown[0].split() == ["record", "step", "module", "what", "dtype", "shape", "mean", "rms", "nan"]
    assert any("aten.mm" in line and "[12, 96]" in line for line in shown)
    assert "<th>module</th>" in found._repr_html_()


def test_a_long_slice_says_how_much_it_does_not_show(folder: Path) -> None:
    everything = dt.open(folder / "ref-tensors")["model.*"]
    assert f"... and {len(everything) - 40} rows more" in repr(everything)


def test_a_pattern_that_matches_nothing_names_the_closest_module(folder: Path) -> None:
    with pytest.raises(NoMatchError, match=r"model\.layers\.0\.mlp"):
        dt.open(folder / "ref-tensors")["model.layers.0.mpl"]


def test_a_number_is_one_record(folder: Path) -> None:
    trace = dt.open(folder / "ref-tensors")
    assert trace[5].seq == 5 and next(iter(trace)).seq == 0


def test_modules_complete_on_the_tab_key(folder: Path) -> None:
    trace = dt.open(folder / "ref-tensors")
    assert "model.layers.1.mlp.up_proj" in trace._ipython_key_completions_()
    completer = rlcompleter.Completer({"trace": trace, "layer": trace.at.model.layers[1]})
    assert completer.complete("trace.at.model.emb", 0) == "trace.at.model.embed_tokens"
    assert completer.complete("layer.self_attn.q", 0) == "layer.self_attn.q_proj"
    assert trace.at.model.layers[1].mlp.path == "model.layers.1.mlp"
    assert trace.at.model.layers._ipython_key_completions_() == ["0", "1"]
    assert list(map(repr, trace.at.lm_head.records)) == list(map(repr, trace["lm_head"]))


def test_a_child_that_is_not_there_is_named_with_those_like_it(folder: Path) -> None:
    at = dt.open(folder / "ref-tensors").at
    with pytest.raises(AttributeError, match="embed_tokens"):
        _ = at.model.embed_token
    with pytest.raises(NoMatchError, match="no child '7'"):
        at.model.layers[7]


# Alignments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["tensors", "leaves"])
def test_a_row_is_followed_to_where_it_goes_wrong(folder: Path, save: str) -> None:
    found = dt.align(folder / f"ref-{save}", folder / f"token-{save}")
    trail = found.follow_row()
    assert trail.row == BAD_TOKEN and "goes wrong in" in repr(trail)
    assert trail.first is not None and trail.first.target is not None
    assert trail.first.target.module.startswith("model.layers.1")
    before = [row for row in trail.rows if row.pair.target.seq < trail.first.target.seq]  # type: ignore[union-attr]
    assert len(before) > 20 and max(row.error for row in before) < 1e-6
    whole = found.follow_row((0, 0))
    assert whole.first is None and "stays within its bands" in repr(whole)
    assert max(row.error for row in whole.rows) < 1e-6


def test_a_row_is_followed_through_heads_and_flattened_dims(folder: Path) -> None:
    found = dt.align(folder / "ref-tensors", folder / "token-tensors")
    shapes = {
        next(s.shape for s in row.pair.target.slots if s.role != "in")  # type: ignore[union-attr]
        for row in found.follow_row(9).rows
    }
    assert {(12, 64), (2, 6, 64), (2, 4, 6, 16), (8, 6, 6)} <= shapes
    assert found.follow_row(9).row == (1, 3)


def test_errors_by_token_batch_row_and_channel(folder: Path) -> None:
    found = dt.align(folder / "ref-tensors", folder / "token-tensors")
    tokens = found.error_by("token", "model.layers.1")
    assert tokens.worst(1)[0][0] == BAD_TOKEN[1] and len(tokens) == 6
    assert np.asarray(tokens).argmax() == BAD_TOKEN[1]
    assert found.error_by("batch", "").worst(1)[0][0] == BAD_TOKEN[0]
    assert found.error_by(1, "model.layers.1").worst(1)[0][0] == BAD_TOKEN[1]
    assert len(found.error_by("channel", "model.layers.1")) == 64
    assert tokens.to_pandas().index.name == "token"
    shown = repr(tokens)
    assert "5 equal" in shown and "########" in shown and "<th>token</th>" in tokens._repr_html_()


def test_errors_by_head_of_four_dims_or_of_heads_side_by_side(folder: Path) -> None:
    found = dt.align(folder / "ref-tensors", folder / "head")
    assert found.error_by("head", "model.layers.0.self_attn.q_proj", heads=HEADS).worst(1)[0][0] == BAD_HEAD
    scores = next(
        pair
        for pair in found["model.layers.0.self_attn"]
        if pair.target is not None and pair.target.op == "aten._softmax"
    )
    assert found.error_by("head", scores).worst(1)[0][0] == BAD_HEAD


def test_upstream_is_what_was_read(folder: Path) -> None:
    found = dt.align(folder / "ref-tensors", folder / "head")
    near = found.upstream("model.layers.0.self_attn.o_proj", depth=1)
    assert [pair.target.op for pair in near if pair.target is not None] != []
    whole = found.upstream("lm_head")
    modules = {pair.target.module for pair in whole if pair.target is not None}
    assert {"model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.norm"} <= modules
    assert all(pair.target.module != "lm_head" or pair.target.kind != "module" for pair in whole)  # type: ignore[union-attr]
    assert "nearest first" in repr(whole)


def test_sites_are_named_in_many_ways(folder: Path) -> None:
    found = dt.align(folder / "ref-tensors", folder / "head")
    assert found.first is not None
    sites = [None, found.first, found.first.seq, dt.open(folder / "head")[found.first.seq]]
    assert len({repr(found.upstream(site, depth=2)) for site in sites}) == 1


def test_rows_of_an_alignment_by_pattern_and_as_a_frame(folder: Path) -> None:
    found = dt.align(folder / "ref-tensors", folder / "head")
    some = found["model.layers.0.mlp"]
    assert some and all(pair.target.module.startswith("model.layers.0.mlp") for pair in some)  # type: ignore[union-attr]
    frame = found.to_pandas()
    assert len(frame) == len(found.pairs) and {"target_module", "ref_op", "error", "band"} <= set(frame)
    assert "model.layers.0.mlp" in found._ipython_key_completions_()
    assert str(found) == found.table() and "fatal" in repr(found.first)


def test_the_curve_is_drawn(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "MPLBACKEND", "agg")
    pytest.importorskip("matplotlib")
    found = dt.align(folder / "ref-tensors", folder / "head")
    ax = found.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert ax.get_yscale() == "log" and {"error", "noise band"} <= {
        text.get_text() for text in ax.get_legend().get_texts()
    }
    (line,) = (line for line in ax.lines if line.get_label() == "error")
    assert max(line.get_ydata()) == pytest.approx(
        max(p.error or 0 for p in found.pairs if p.band is not None)
    )
    assert any("q_proj" in text.get_text() for text in ax.texts)


def test_what_cannot_be_answered_says_why(folder: Path, tmp_path: Path) -> None:
    found = dt.align(folder / "ref-tensors", folder / "token-tensors")
    with pytest.raises(ConfigError, match="expected one of batch, token, channel, head"):
        found.error_by("row", "model.layers.1")
    with pytest.raises(ConfigError, match=r"heads=N"):
        found.error_by("head", "model.layers.1")
    with pytest.raises(ConfigError, match="no multiple"):
        found.error_by("head", "model.layers.1", heads=7)
    with pytest.raises(ConfigError, match="no such dim"):
        found.error_by(5, "model.layers.1")
    with pytest.raises(NoMatchError, match=r"model\.layers\.1"):
        found.upstream("model.layer.1")
    with pytest.raises(ConfigError, match="12 rows"):
        found.follow_row(12)
    with pytest.raises(ConfigError, match="expected an index"):
        found.follow_row((0, 0, 0))
    stats = dt.align(
        record(tmp_path / "a", net(), batch(), save="stats"),
        record(tmp_path / "b", net(), batch(), save="stats"),
    )
    with pytest.raises(NotExecutableError):
        stats.error_by("channel", "head")
