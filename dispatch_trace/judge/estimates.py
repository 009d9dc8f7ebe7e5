"""What rounding may do to one op's result: estimates from norms, where nothing is executed again.

`own_noise` is the relative error that an op adds by itself, `gains` how much larger an error at each input
gets at the output. Both speak of relative L2 errors, are meant for the typical case times a factor (`C`),
and come from the derivative of each op (docs/blame.md). Lengths of sums come from shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dispatch_trace.align.canon import EXACT, ILL_CONDITIONED, dtype_class, family, short
from dispatch_trace.align.graph import Program, slot_numel
from dispatch_trace.errors import ConfigError
from dispatch_trace.judge.magnitudes import Magnitude
from dispatch_trace.metrics import unit_roundoff
from dispatch_trace.per_step import PerStep, each, greatest, is_finite, or_zero, root, smallest
from dispatch_trace.schema import StoredRecord, StoredSlot

# A difference is noise up to C times the estimate: benign changes stayed at 0.6 of it (BLAME.md section 4).
C = 2.5
ACCUMULATOR = 2.0**-24
UNKNOWN_GAIN = 3.0
MAX_GAIN = 1e12
# A sum is nothing but rounding where one rounding of each of its terms makes this share of it.
NOTHING = 0.03

Measure = Callable[[StoredRecord, StoredSlot], Magnitude]

_REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "var",
        "var_mean",
        "std",
        "norm",
        "linalg_vector_norm",
        "cumsum",
        "prod",
        "logsumexp",
        "nansum",
        "logcumsumexp",
        "cumprod",
        "trace",
        "avg_pool2d",
        "_adaptive_avg_pool2d",
        "adaptive_avg_pool2d",
        "avg_pool1d",
        "mse_loss",
        "nll_loss_forward",
    ]
)
_POWERS = {"rsqrt": 0.5, "sqrt": 0.5, "reciprocal": 1.0, "square": 2.0, "_foreach_sqrt": 0.5}
_SUMS = frozenset({"sum", "nansum", "mean"})
# The derivative is at most about 1.
_LIPSCHITZ = frozenset(
    [
        "tanh",
        "sigmoid",
        "gelu",
        "silu",
        "relu",
        "elu",
        "selu",
        "celu",
        "mish",
        "softplus",
        "erf",
        "hardtanh",
        "hardsigmoid",
        "hardswish",
        "leaky_relu",
        "clamp",
        "clamp_min",
        "clamp_max",
        "sin",
        "cos",
        "atan",
        "maximum",
        "minimum",
        "threshold",
        "relu6",
        "abs",
        "neg",
        "log1p",
        "asinh",
        "max",
        "amax",
        "min",
        "amin",
        "topk",
        "sort",
        "max_pool2d",
        "max_pool2d_with_indices",
        "upsample_bilinear2d",
        "upsample_nearest2d",
        "upsample_bicubic2d",
        "log_sigmoid_forward",
        "_upsample_bilinear2d_aa",
        "avg_pool2d",
        "_adaptive_avg_pool2d",
        "adaptive_avg_pool2d",
    ]
)
# Gradients of parameters are sums over all that they were used on: by result, the operand that the incoming
# gradient is multiplied with ("": numbers of size 1).
_PARAMETER_GRADIENTS = {
    "convolution_backward": {"out[1]": "in.input", "out[2]": ""},
    "native_layer_norm_backward": {"out[1]": "", "out[2]": ""},
    "native_group_norm_backward": {"out[1]": "", "out[2]": ""},
    "native_batch_norm_backward": {"out[1]": "", "out[2]": ""},
    "_fused_rms_norm_backward": {"out[1]": ""},
}
_ADDITIVE = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "_foreach_add",
        "_foreach_sub",
        "lerp",
        "addcmul",
        "addcdiv",
        "index_add",
        "scatter_add",
    ]
)


def roundoff(dtype: str) -> float:
    """Unit roundoff; 0 for what does not round, and for dtypes that are not known."""
    try:
        return unit_roundoff(dtype)
    except ConfigError:
        return 0.0


def reduction_length(program: Program, record: StoredRecord, out: StoredSlot) -> int:
    """How many products or terms go into one element of the output."""
    inputs = {slot.name: slot for slot in program.inputs(record)}
    group = family(record.op)
    if group == "linear":
        first = (
            inputs.get("in.mat1")
            or inputs.get("in.batch1")
            or inputs.get("in.input")
            or inputs.get("in.self")
        )
        return max(first.shape[-1], 1) if first is not None and first.shape else 1
    if group == "conv":
        weight = inputs.get("in.weight")
        return max(math.prod(weight.shape[1:]), 1) if weight is not None and len(weight.shape) > 1 else 1
    if group == "attention":
        query = inputs.get("in.query")
        key = inputs.get("in.key")
        sizes = [s.shape[d] for s, d in ((query, -1), (key, -2)) if s is not None and len(s.shape) > 1]
        return max([*sizes, 1])
    source = next(iter(inputs.values()), None)
    if source is None or not source.shape:
        return 1
    if out.name in _PARAMETER_GRADIENTS.get(short(record.op), ()):
        parts = out.shape[0] if len(out.shape) > 2 else slot_numel(out)  # the channels of a kernel
        return max(slot_numel(source) // max(parts, 1), 1)
    if group in ("softmax", "log_softmax", "layer_norm", "rms_norm"):
        return max(source.shape[-1], 1)
    if group in ("group_norm", "batch_norm") or short(record.op) in _REDUCTIONS:
        return max(slot_numel(source) // max(slot_numel(out), 1), 1)
    if short(record.op) == "cumsum":
        return max(source.shape)
    return 1


def own_noise(program: Program, record: StoredRecord, out: StoredSlot, measure: Measure) -> float:
    """Relative error that the op's own rounding may add: tau = u_out + sqrt(n) u_acc."""
    kind = dtype_class(out.dtype)
    if kind not in "fc8" or short(record.op) in EXACT:
        return 0.0
    u_out = roundoff(out.dtype)
    u_acc = min(ACCUMULATOR, u_out) if u_out else ACCUMULATOR
    n = reduction_length(program, record, out)
    tau = u_out
    if n > 1:
        tau += root(n) * u_acc * greatest(_cancellation(program, record, out, measure), 1.0)
    group = family(record.op)
    if group == "attention":
        slots = {slot.name: measure(record, slot).rms or 1.0 for slot in program.inputs(record)}
        tau += 4 * u_acc * slots.get("in.query", 1.0) * slots.get("in.key", 1.0)
    return tau


def _cancellation(program: Program, record: StoredRecord, out: StoredSlot, measure: Measure) -> float:
    """How much larger the terms of a sum are than its result; at least 1."""
    gains = gains_of(program, record, out, measure)
    found = [g for _, g in gains if is_finite(g)]
    return smallest(greatest(*found), 1e3) if found else 1.0


def is_rounding_alone(program: Program, record: StoredRecord, out: StoredSlot, measure: Measure) -> bool:
    """Whether a sum cancels so far that what is left of it is the rounding of its terms: it is zero.

    The gradient of a bias that a norm or a softmax takes away again is such a sum.
    """
    name = short(record.op)
    if name not in _SUMS and out.name not in _PARAMETER_GRADIENTS.get(name, ()):
        return False
    inputs, result = program.inputs(record), measure(record, out).rms
    if result is None or result == 0.0:
        return False
    unit = smallest(ACCUMULATOR, roundoff(out.dtype) or ACCUMULATOR)
    if name == "mean":
        unit = unit / root(reduction_length(program, record, out))
    sizes = {slot.name: measure(record, slot) for slot in inputs}
    gains = (_gain(program, record, out, s, sizes, result, name, family(record.op)) for s in inputs)
    return any(gain * unit > NOTHING for gain in gains)


def gains_of(
    program: Program, record: StoredRecord, out: StoredSlot, measure: Measure
) -> list[tuple[StoredSlot, float]]:
    """Growth of a relative error from each tensor input to the output."""
    inputs = program.inputs(record)
    if not inputs:
        return []
    result = measure(record, out).rms
    sizes = {slot.name: measure(record, slot) for slot in inputs}
    name, group = short(record.op), family(record.op)
    if name in ILL_CONDITIONED:
        return [(slot, MAX_GAIN) for slot in inputs]
    if result is None or result == 0.0:
        return [(slot, 1.0 if result is None else UNKNOWN_GAIN) for slot in inputs]
    return [
        (slot, smallest(_gain(program, record, out, slot, sizes, result, name, group), MAX_GAIN))
        for slot in inputs
    ]


def _gain(
    program: Program,
    record: StoredRecord,
    out: StoredSlot,
    slot: StoredSlot,
    sizes: dict[str, Magnitude],
    result: float,
    name: str,
    group: str,
) -> float:
    size = sizes[slot.name].rms
    if size is None:
        return UNKNOWN_GAIN
    if name == "addcdiv" and slot.name != "in.self":
        return _quotient_gain(record, sizes, result)
    if out.name in _PARAMETER_GRADIENTS.get(name, ()):
        return _gradient_gain(program, record, out, sizes, result)
    if name in _ADDITIVE and not _is_known(program, record, slot):
        return 1.0
    if name in _ADDITIVE:
        return size / result * max(abs(_number(record, "alpha", 1.0)), abs(_number(record, "value", 1.0)))
    if name in ("mul", "_foreach_mul"):
        other = next((m.rms for key, m in sizes.items() if key != slot.name), None)
        return 1.0 if other is None else greatest(size * other / result, 1.0)
    if name in ("div", "_foreach_div"):
        top, bottom = sizes.get("in.self"), sizes.get("in.other")
        if top is None or bottom is None or not top.rms or not bottom.rms:
            return 1.0
        return greatest(1.0, top.rms / (bottom.rms * result))
    if name == "pow" or name in _POWERS:
        exponent = _POWERS.get(name, abs(_number(record, "exponent", 1.0)))
        if slot.name == "in.exponent":
            return greatest(1.0, size * abs(math.log(max(abs(_number(record, "self", math.e)), 1e-9))))
        least = sizes[slot.name].least
        spread = greatest(1.0, smallest(size / least, 30.0)) if least and exponent <= 1.0 else 1.0
        return exponent * spread
    if name in ("exp", "expm1", "exp2"):
        return greatest(1.0, sizes[slot.name].top)  # the largest results make up the norm
    if name == "log":
        return greatest(1.0, 1.0 / result)
    if group == "softmax":
        return greatest(1.0, size)
    if group == "log_softmax":
        return greatest(1.0, 1.5 * size / result)
    if group in ("layer_norm", "group_norm", "batch_norm", "rms_norm"):
        return _norm_gain(slot, sizes, result, group)
    if group == "linear" or group == "conv":
        return _product_gain(program, record, out, slot, sizes, result)
    if group == "attention":
        return _attention_gain(slot, sizes, result)
    if name in ("sum", "nansum", "cumsum"):
        n = (
            max(slot_numel(slot) // max(slot_numel(out), 1), 1)
            if name != "cumsum"
            else max(slot.shape, default=1)
        )
        return greatest(1.0, root(n) * size / result)
    if name == "mean":
        return greatest(1.0, size / result)
    if name.startswith("grid_sampler") and slot.name == "in.grid":
        return _sampling_gain(record, slot, sizes, result)
    if name in _LIPSCHITZ:
        return 1.1 * size / result
    if name in EXACT:
        return greatest(1.0, size / result) if dtype_class(slot.dtype) in "fc8" else 1.0
    return greatest(UNKNOWN_GAIN, size / result)


def _is_known(program: Program, record: StoredRecord, slot: StoredSlot) -> bool:
    """Whether the size of a slot is its own: of a part of a tensor only the whole's may be known."""
    if slot.content >= 0:
        return True
    return all(origin.share >= 1.0 for origin in program.origins(record, slot))


def _norm_gain(slot: StoredSlot, sizes: dict[str, Magnitude], result: float, group: str) -> float:
    source = sizes.get("in.input") or sizes[slot.name]
    weight = sizes.get("in.weight")
    scale = (weight.rms or 1.0) if weight is not None else 1.0
    if slot.name == "in.bias":
        return or_zero(sizes[slot.name].rms) / result
    if slot.name != "in.input":
        return greatest(1.0, scale / result)
    spread = source.rms if group == "rms_norm" else source.std
    centred = or_zero(source.rms) / spread if spread else UNKNOWN_GAIN
    return 1.5 * centred * greatest(1.0, scale / result)


def _product_gain(
    program: Program,
    record: StoredRecord,
    out: StoredSlot,
    slot: StoredSlot,
    sizes: dict[str, Magnitude],
    result: float,
) -> float:
    size = or_zero(sizes[slot.name].rms)
    names = set(sizes)
    bias = "in.bias" if "in.bias" in names else ("in.self" if names & {"in.mat1", "in.batch1"} else "")
    if slot.name == bias:
        return size / result
    others = [or_zero(m.rms) for key, m in sizes.items() if key not in (slot.name, bias)]
    other = others[0] if others else size
    n = reduction_length(program, record, out)
    return greatest(1.0, root(n) * size * other / result)


def _quotient_gain(record: StoredRecord, sizes: dict[str, Magnitude], result: float) -> float:
    """Of the operands of value * tensor1 / tensor2: the smallest divisors let errors grow most."""
    top, bottom = sizes.get("in.tensor1"), sizes.get("in.tensor2")
    if top is None or bottom is None or not top.rms or not bottom.least:
        return MAX_GAIN
    return abs(_number(record, "value", 1.0)) * top.rms / (bottom.least * result)


def most_of(program: Program, record: StoredRecord, out: StoredSlot, measure: Measure) -> float:
    """The largest relative error that wrong operands may bring to self + value * tensor1 / tensor2: twice the
    quotient's size, where small divisors stand below small numbers (as in Adam). Of other ops infinity."""
    if short(record.op) != "addcdiv":
        return math.inf
    sizes = {slot.name: measure(record, slot) for slot in program.inputs(record)}
    top, bottom, result = sizes.get("in.tensor1"), sizes.get("in.tensor2"), measure(record, out).rms
    if top is None or bottom is None or not bottom.rms or not result:
        return math.inf
    return 2.0 * abs(_number(record, "value", 1.0)) * top.top / (bottom.rms * result)


def _gradient_gain(
    program: Program, record: StoredRecord, out: StoredSlot, sizes: dict[str, Magnitude], result: float
) -> float:
    """Of what a parameter's gradient is summed up from."""
    other = sizes.get(_PARAMETER_GRADIENTS[short(record.op)][out.name])
    incoming = or_zero(next(iter(sizes.values())).rms)
    scale = 1.0 if other is None or other.rms is None else other.rms
    return greatest(1.0, root(reduction_length(program, record, out)) * incoming * scale / result)


def _sampling_gain(
    record: StoredRecord, slot: StoredSlot, sizes: dict[str, Magnitude], result: float
) -> float:
    """Of coordinates in [-1, 1]: in pixels, times what neighbours that have nothing in common differ by."""
    image = next((s for s in record.slots if s.name == "in.input"), None)
    source = sizes.get("in.input")
    if image is None or source is None or source.rms is None:
        return UNKNOWN_GAIN
    pixels = max(image.shape[2:], default=1) / 2.0
    return greatest(1.0, math.sqrt(2.0) * pixels * (sizes[slot.name].rms or 1.0) * source.rms / result)


def _attention_gain(slot: StoredSlot, sizes: dict[str, Magnitude], result: float) -> float:
    query, key, value = (sizes.get(f"in.{n}") for n in ("query", "key", "value"))
    spread = greatest(1.0, (or_zero(value.rms) / result) if value is not None else 1.0)
    if slot.name in ("in.query", "in.key") and query is not None and key is not None:
        return spread * greatest(1.0, (query.rms or 1.0) * (key.rms or 1.0))
    return spread


def _number(record: StoredRecord, name: str, default: float) -> float:
    for key, value in record.args:
        if key == name and isinstance(value, PerStep):
            return each(value.values, value.together)
        if key == name and isinstance(value, (int, float)):
            return float(value)
    return default
