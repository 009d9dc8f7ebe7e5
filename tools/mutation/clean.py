"""Pairs that are equal within noise: another order of summation, layout, precision, kernel or grad mode.

Each returns the relative L2 that it may cause at the outputs; "diverged" on any of them is a false alarm.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

from .cases import Inputs, Steps, Subject, clean, convert_reference, convert_target
from .models import eps_name, is_attention, is_linear, is_norm, matrix_of, set_matrix

FLOAT32_NOISE = 1e-5
BFLOAT16_NOISE = 0.1
INT8_NOISE = 0.1


@clean()
def threads(subject: Subject) -> float:
    """Another number of threads."""
    subject.around_reference.append(lambda: _threads(1))
    subject.around_target.append(lambda: _threads(2))
    return FLOAT32_NOISE


@clean()
def matmul_split(subject: Subject) -> float:
    """Every projection sums its products in two halves."""
    for path in subject.paths(is_linear):
        _split(subject.target.get_submodule(path))
    return FLOAT32_NOISE


@clean(needs="attention", lacks="softcap", attention="eager")
def attention_fused(subject: Subject) -> float:
    """Fused attention against the one written out."""
    _use_sdpa(subject.target)
    return FLOAT32_NOISE


@clean()
def weights_column_major(subject: Subject) -> float:
    """The same values in another memory layout, weights and inputs."""
    for path in subject.paths(is_linear):
        linear: Any = subject.target.get_submodule(path)
        linear.weight.data = linear.weight.data.t().contiguous().t()
    for name, value in subject.target_inputs.items():
        if isinstance(value, torch.Tensor):
            subject.target_inputs[name] = value.transpose(0, 1).contiguous().transpose(0, 1)
    return FLOAT32_NOISE


@clean(archs=["llama"])
def qkv_fused(subject: Subject) -> float:
    """One projection in place of three, as serving engines have it."""
    for path in subject.paths(is_attention):
        _fuse_qkv(subject.target.get_submodule(path))
    return FLOAT32_NOISE


@clean()
def norm_decomposed(subject: Subject) -> float:
    """Norms written out where they were one op, or one op where they were written out."""
    for path in subject.paths(is_norm):
        _other_norm(subject.target.get_submodule(path))
    return FLOAT32_NOISE


@clean()
def bfloat16_target(subject: Subject) -> float:
    """A bfloat16 run against the float32 reference."""
    convert_target(subject, torch.bfloat16)
    return BFLOAT16_NOISE


@clean()
def bfloat16_threads(subject: Subject) -> float:
    """Two bfloat16 runs with different numbers of threads."""
    convert_reference(subject, torch.bfloat16)
    convert_target(subject, torch.bfloat16)
    return threads(subject) * BFLOAT16_NOISE / FLOAT32_NOISE


@clean()
def saved_and_loaded(subject: Subject) -> float:
    """A round trip of the weights through a file."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        save_model(subject.target, str(file))
        with torch.no_grad():
            for parameter in subject.target.parameters():
                parameter.zero_()
        load_model(subject.target, str(file))
    return 0.0


@clean()
def inference_mode(subject: Subject) -> float:
    """inference_mode against no_grad: composite ops stay whole."""
    subject.around_target.append(torch.inference_mode)
    return FLOAT32_NOISE


@clean()
def weights_int8(subject: Subject) -> float:
    """Every projection's weight on an int8 grid with a scale per output channel."""
    for path in subject.paths(is_linear):
        linear: Any = subject.target.get_submodule(path)
        matrix = matrix_of(linear)
        scale = matrix.abs().amax(dim=1, keepdim=True) / 127
        set_matrix(linear, (matrix / scale).round() * scale)
    return INT8_NOISE


@clean(needs="causal", lacks="window")
def cached_decode(subject: Subject) -> float:
    """Half of the tokens at once and then one after the other, with a cache, against all at once."""
    ids = subject.inputs["input_ids"][:1]
    _set_inputs(subject, {"input_ids": ids})
    half, length = ids.shape[1] // 2, ids.shape[1]
    pieces = [(0, half), *((place, place + 1) for place in range(half, length))]
    subject.reference_steps = Steps(calls=(_request(ids, 0, length),), cached=False, join=1)
    subject.target_steps = Steps(
        calls=tuple(_request(ids, first, end) for first, end in pieces), cached=True, join=1
    )
    return FLOAT32_NOISE


@clean(needs="causal")
def batched(subject: Subject) -> float:
    """Both requests in one batch against one after the other."""
    ids = subject.inputs["input_ids"]
    _set_inputs(subject, {"input_ids": ids})
    single = tuple(_request(ids[row : row + 1], 0, ids.shape[1], f"r{row}") for row in range(len(ids)))
    meta = {
        "phase": "prefill",
        "req_ids": [f"r{row}" for row in range(len(ids))],
        "positions": [list(range(ids.shape[1]))] * len(ids),
    }
    together = (meta, {"input_ids": ids, "use_cache": False})
    subject.reference_steps = Steps(calls=single, cached=False, join=0)
    subject.target_steps = Steps(calls=(together,), cached=False, join=0)
    return FLOAT32_NOISE


def _set_inputs(subject: Subject, inputs: Inputs) -> None:
    subject.inputs, subject.target_inputs = inputs, dict(inputs)


def _request(ids: torch.Tensor, first: int, end: int, name: str = "r0") -> tuple[dict[str, Any], Inputs]:
    """The step that computes some tokens of a request."""
    meta = {
        "phase": "prefill" if first == 0 else "decode",
        "req_ids": [name],
        "positions": [list(range(first, end))],
    }
    return meta, {"input_ids": ids[:, first:end], "use_cache": True}


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _split(linear: Any) -> None:
    half = matrix_of(linear).shape[1] // 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        matrix = matrix_of(linear)
        first = F.linear(x[..., :half], matrix[:, :half])
        second = F.linear(x[..., half:], matrix[:, half:], linear.bias)
        return first + second

    linear.forward = forward


def _use_sdpa(model: Any) -> None:
    # Every module of a transformers model shares one config.
    model.config._attn_implementation = "sdpa"


def _fuse_qkv(attention: Any) -> None:
    """LlamaAttention with one projection; grouped heads, bias-free."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    sizes = [projection.out_features for projection in projections]
    fused = torch.nn.Linear(attention.q_proj.in_features, sum(sizes), bias=False)
    fused.weight = torch.nn.Parameter(torch.cat([projection.weight.data for projection in projections]))
    attention.qkv_proj = fused
    del attention.q_proj, attention.k_proj, attention.v_proj

    def forward(
        hidden_states: Any, position_embeddings: Any, attention_mask: Any, cache: Any, **rest: Any
    ) -> Any:
        batch, seq = hidden_states.shape[:2]
        q, k, v = (
            part.view(batch, seq, -1, attention.head_dim).transpose(1, 2)
            for part in attention.qkv_proj(hidden_states).split(sizes, dim=-1)
        )
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, attention.layer_idx, kwargs=rest)
        attend = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface(
            attention.config._attn_implementation, modeling_llama.eager_attention_forward
        )
        output, weights = attend(
            attention, q, k, v, attention_mask, dropout=0.0, scaling=attention.scaling, **rest
        )
        return attention.o_proj(output.reshape(batch, seq, -1).contiguous()), weights

    attention.forward = forward


def _other_norm(norm: Any) -> None:
    if not isinstance(norm, torch.nn.LayerNorm):
        size = tuple(norm.weight.shape)
        one = float(type(norm).__name__.startswith("Gemma"))
        norm.forward = lambda x: F.rms_norm(x, size, one + norm.weight, getattr(norm, eps_name(norm)))
        return

    def forward(x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + norm.eps) * norm.weight + norm.bias

    norm.forward = forward
