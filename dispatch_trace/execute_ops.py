"""Recorded ops as callables: names resolved through `torch.ops`, arguments decoded, formulas of ours.

Guarantees: a name or an argument from a trace is looked up, never evaluated. What may be taken from the
recording instead of being executed is decided here, in `why_taken`, and listed with its reasons in
docs/limits.md ("Execution").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace

from dispatch_trace.errors import TraceFormatError
from dispatch_trace.schema import StoredRecord
from dispatch_trace.store.layouts import dtype_from_name

# Namespaces whose results depend on other processes.
COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
# Single ops that are not run again, each with its reason; docs/limits.md lists the same.
TAKEN_OPS = {
    "aten.from_file": "reads a file of the recorded machine",
}
# Their memory is allocated here again; what they happen to hold is in the recording where it was read.
EMPTY_OPS = frozenset(
    {
        "aten.empty",
        "aten.empty_like",
        "aten.empty_permuted",
        "aten.empty_quantized",
        "aten.empty_strided",
        "aten.new_empty",
        "aten.new_empty_strided",
        "aten._empty_affine_quantized",
        "aten._empty_per_channel_affine_quantized",
    }
)
# What they return holds memory that nobody wrote: no hash of it is compared.
RESIZE_OPS = frozenset({"aten.resize", "aten.resize_as"})
UNWRITTEN_OPS = EMPTY_OPS | RESIZE_OPS
REASON_RANDOM = "random"
REASON_HIGHER_ORDER = "higher-order operator"
REASON_COLLECTIVE = "values from other processes"
REASON_UNKNOWN = "the op's library is not loaded here"
REASON_ARGUMENT = "an argument that a trace cannot hold"

Formula = Callable[[dict[str, Any], "WideCall"], Any]


class NotRunnableError(Exception):
    """This op cannot be run from its record; the message says why."""


def resolve(overload: str) -> OpOverload:
    """The op called `aten.add_.Tensor`.

    Raises:
      NotRunnableError: torch (with what is loaded) has no such op.
    """
    parts = overload.split(".")
    if parts[0] == "higher_order":
        raise NotRunnableError(REASON_HIGHER_ORDER)
    if len(parts) != 3:
        raise NotRunnableError(REASON_UNKNOWN)
    found: Any = torch.ops
    for part, kind in zip(parts, (_OpNamespace, OpOverloadPacket, OpOverload), strict=True):
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            raise NotRunnableError(REASON_UNKNOWN) from None
        if not isinstance(found, kind):
            raise NotRunnableError(REASON_UNKNOWN)
    assert isinstance(found, OpOverload)
    return found


def why_taken(record: StoredRecord) -> str:
    """Why the results of `record` come from the recording, "" where the op is to be executed."""
    if record.overload.startswith("higher_order."):
        return REASON_HIGHER_ORDER
    if record.overload.split(".")[0] in COLLECTIVE_NAMESPACES:
        return REASON_COLLECTIVE
    if record.op in TAKEN_OPS:
        return TAKEN_OPS[record.op]
    if record.random and _draws(record):
        return REASON_RANDOM
    if any(_is_opaque(value) for _, value in record.args):
        return REASON_ARGUMENT
    return ""


def _draws(record: StoredRecord) -> bool:
    """Whether an op that may draw random numbers does so with these arguments."""
    args = dict(record.args)
    if "scaled_dot_product" in record.op or "flash_attention" in record.op:
        return bool(args.get("dropout_p", 0.0))
    if record.op in ("aten.dropout", "aten.feature_dropout", "aten.native_dropout"):
        return bool(args.get("p", 0.5)) and args.get("train", True) is not False
    if record.op.startswith("aten.rrelu"):
        return bool(args.get("training", False))
    return True


def _is_opaque(value: Any) -> bool:
    if isinstance(value, dict):
        return "opaque" in value
    return isinstance(value, (list, tuple)) and any(_is_opaque(v) for v in value)


class Decoder:
    """Turns encoded arguments into what the dispatcher takes.

    Args:
      dtype_of: the dtype in which a recorded one is held (`Memory.dtype`).
      items: recomputed `.item()` results by record seq; the recorded value stands in for absent ones.
    """

    def __init__(self, dtype_of: Callable[[str], torch.dtype], items: dict[int, int | float]) -> None:
        self._dtype_of = dtype_of
        self._items = items

    def __call__(self, value: Any, tensors: Sequence[torch.Tensor | None]) -> Any:
        """Args:
          value: an encoded argument.
          tensors: the record's tensors by slot index.
        Raises:
          TraceFormatError: an encoding that does not exist.
        """
        if isinstance(value, (list, tuple)):
            return [self(v, tensors) for v in value]
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise TraceFormatError(f"argument {value!r} is no known encoding")
        ((kind, content),) = value.items()
        if kind == "ref":
            return tensors[content]
        if kind == "item":
            recorded, seq = content
            found = self._items.get(seq, recorded)
            return found if type(found) is type(recorded) else recorded
        if kind == "dtype":
            return self._dtype_of(content)
        if kind == "device":
            # Traces of accelerators are executed on the host.
            return torch.device("meta" if content.startswith("meta") else "cpu")
        if kind in ("layout", "memory_format"):
            found = getattr(torch, content, None)
            if isinstance(found, (torch.layout, torch.memory_format)):
                return found
        elif kind == "complex":
            return complex(*content)
        elif kind == "generator":
            return None
        elif kind == "dict":
            return {name: self(v, tensors) for name, v in content.items()}
        raise TraceFormatError(f"argument {value!r} is no known encoding")


# Formulas for float64 -----------------------------------------------------------------------------


class WideCall:
    """What a formula may need besides the decoded arguments.

    Args:
      op: the op itself.
      record: its record.
      narrow: gives an argument's value in its recorded dtype.
    """

    def __init__(self, op: OpOverload, record: StoredRecord, narrow: Callable[[str], torch.Tensor]) -> None:
        self.op = op
        self.record = record
        self.narrow = narrow


FORMULAS: dict[str, Formula] = {}


def formula(*overloads: str) -> Callable[[Formula], Formula]:
    """Registers how ops that refuse float64 (or mean something else by it) are computed in it."""

    def register(function: Formula) -> Formula:
        FORMULAS.update(dict.fromkeys(overloads, function))
        return function

    return register


@formula("aten._scaled_mm.default")
def _scaled_mm(args: dict[str, Any], call: WideCall) -> torch.Tensor:
    """(scale_a self) @ (scale_b mat2) + bias, the scales per tensor, per row or per column."""
    left = args["self"].to(torch.float64) * args["scale_a"]
    right = args["mat2"].to(torch.float64) * args["scale_b"]
    out: torch.Tensor = left @ right
    if args.get("bias") is not None:
        out = out + args["bias"]
    dtype = call.record.slots[-1].dtype
    if not dtype.startswith("float8"):
        return out
    if args.get("scale_result") is not None:
        out = out * args["scale_result"]
    return out.to(dtype_from_name(dtype))


@formula("aten._int_mm.default")
def _int_mm(args: dict[str, Any], call: WideCall) -> torch.Tensor:
    """Exact products of int8 codes in int32; float64 holds them exactly where the codes came as floats."""
    del call
    out: torch.Tensor = args["self"].to(torch.float64) @ args["mat2"].to(torch.float64)
    return out.to(torch.int32)


@formula("aten._weight_int8pack_mm.default")
def _weight_int8pack_mm(args: dict[str, Any], call: WideCall) -> torch.Tensor:
    """self [m, k] @ (mat2 [n, k] * scales [n, 1])^T."""
    del call
    out: torch.Tensor = args["self"] @ (args["mat2"].to(torch.float64) * args["scales"].reshape(-1, 1)).t()
    return out


@formula("aten._weight_int4pack_mm_for_cpu.default")
def _weight_int4pack_mm(args: dict[str, Any], call: WideCall) -> torch.Tensor:
    """self [m, k] @ weight [k, n]; the packed layout depends on the CPU, so the op itself unpacks it.

    In the recorded precision identity @ weight has one non-zero product per element: the weight.
    """
    x = args["self"]
    identity = torch.eye(x.shape[-1], dtype=torch.float32)
    scales = call.narrow("in.qScaleAndZeros").to(torch.float32)
    weight = call.op(identity, args["mat2"], args["qGroupSize"], scales)
    return x @ weight.to(x.dtype)  # type: ignore[no-any-return]


@formula("aten._grouped_mm.default")
def _grouped_mm(args: dict[str, Any], call: WideCall) -> torch.Tensor:
    """One product per group; `offs` [g] ends the groups along rows, columns or the reduced dim."""
    left, right, offsets = args["self"], args["mat2"], args.get("offs")
    if args.get("bias") is not None:
        raise NotImplementedError("_grouped_mm with a bias")
    if left.dim() == 3 and right.dim() == 3:
        return left @ right  # type: ignore[no-any-return]
    out = torch.zeros(call.record.slots[-1].shape, dtype=left.dtype)
    start = 0
    for group, end in enumerate([] if offsets is None else offsets.tolist()):
        part = slice(start, end)
        if left.dim() == 2 and right.dim() == 2:
            out[group] = left[:, part] @ right[part]
        elif left.dim() == 2:
            out[part] = left[part] @ right[group]
        else:
            out[:, part] = left[group] @ right[:, part]
        start = end
    return out


@formula("aten._softmax.default", "aten._log_softmax.default")
def _softmax(args: dict[str, Any], call: WideCall) -> torch.Tensor:
    """`half_to_float` asks for float32 from a float16 input: both are float64 here."""
    return call.op(**{**args, "half_to_float": False})  # type: ignore[no-any-return]


def recorded_dropout(args: dict[str, Any], mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """native_dropout with the recorded mask, so that its result is not rounded to the recorded dtype."""
    p = args.get("p", 0.5)
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return args["input"] * mask * scale, mask
