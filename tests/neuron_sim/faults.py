"""What the stand-in compiler can be told to do wrong, or merely differently: passes over graphs of aten ops.

Each pass looks only at nodes of the modules that it is pointed at, so that a test knows where the fault is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

Fault = Literal[
    "bf16_matmuls", "decompositions", "dropped_mask", "swapped_operands", "narrow_integers", "eager_fallback"
]

_aten = torch.ops.aten
_MATMULS = {_aten.mm.default: (0, 1), _aten.addmm.default: (1, 2), _aten.bmm.default: (0, 1)}
_WIDE = {torch.int64: torch.int32, torch.float64: torch.float32}


def module_path(node: Node) -> str:
    """Dotted path of the innermost module that a node came from, as the program spells it."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    innermost = list(stack.values())[-1][0]
    return str(innermost).removeprefix("L['self'].").replace("_modules['", "").replace("']", "")


def _nodes(graph: Graph, module: str) -> Iterator[Node]:
    for node in list(graph.nodes):
        path = module_path(node)
        if node.op == "call_function" and (path == module or path.endswith(f".{module}") or not module):
            yield node


def _cast(graph: Graph, node: Any, dtype: torch.dtype) -> Any:
    cast: Node = graph.call_function(_aten._to_copy.default, (node,), {"dtype": dtype})
    cast.meta = dict(node.meta)
    return cast


def bf16_matmuls(graph: Graph, module: str) -> int:
    """Operands of matrix products rounded to bfloat16, products summed in float32: what the hardware does."""
    done = 0
    for node in _nodes(graph, module):
        if node.target not in _MATMULS or node.meta["val"].dtype is not torch.float32:
            continue
        with graph.inserting_before(node):
            for i in _MATMULS[node.target]:
                rounded = _cast(graph, node.args[i], torch.bfloat16)
                node.update_arg(i, _cast(graph, rounded, torch.float32))
        done += 1
    return done


def dropped_mask(graph: Graph, module: str) -> int:
    """Attention scores that go into the softmax without the mask that was added to them."""
    done = 0
    for softmax in _nodes(graph, module):
        if softmax.target not in (_aten._softmax.default, _aten._safe_softmax.default):
            continue
        masked = softmax.args[0]
        if isinstance(masked, Node) and masked.target is _aten.add.Tensor:
            softmax.update_arg(0, masked.args[0])
            done += 1
    return done


def swapped_operands(graph: Graph, module: str) -> int:
    """The two halves that a `cat` joins, joined the other way round."""
    done = 0
    for node in _nodes(graph, module):
        if node.target is _aten.cat.default and len(node.args[0]) == 2:
            first, second = node.args[0]
            node.update_arg(0, [second, first])
            done += 1
    return done


def narrow_integers(graph: Graph, module: str) -> int:
    """64-bit numbers computed in 32 bits."""
    done = 0
    arithmetic = {_aten.mul.Tensor, _aten.add.Tensor, _aten.sub.Tensor, _aten.remainder.Scalar}
    for node in _nodes(graph, module):
        dtype = node.meta["val"].dtype if isinstance(node.meta.get("val"), torch.Tensor) else None
        narrow = _WIDE.get(dtype) if dtype is not None else None
        if node.target not in arithmetic or dtype is None or narrow is None:
            continue
        with graph.inserting_before(node):
            for i, operand in enumerate(node.args):
                if isinstance(operand, Node):
                    node.update_arg(i, _cast(graph, operand, narrow))
                elif isinstance(operand, int) and narrow is torch.int32:
                    node.update_arg(i, _wrapped(operand))
        with graph.inserting_after(node):
            wide = graph.call_function(_aten._to_copy.default, (node,), {"dtype": dtype})
            wide.meta = dict(node.meta)
            node.replace_all_uses_with(wide, delete_user_cb=lambda user, own=wide: user is not own)
        done += 1
    return done


def _wrapped(number: int) -> int:
    """The 32-bit integer with the same low bits."""
    return (number + 2**31) % 2**32 - 2**31


PASSES: dict[Fault, Callable[[Graph, str], int]] = {
    "bf16_matmuls": bf16_matmuls,
    "dropped_mask": dropped_mask,
    "swapped_operands": swapped_operands,
    "narrow_integers": narrow_integers,
}


def apply(gm: GraphModule, faults: dict[Fault, str]) -> None:
    """Applies the passes that are wanted.

    Raises:
      AssertionError: a pass found nothing to change, so that a test of it would prove nothing.
    """
    for fault, module in faults.items():
        if fault in PASSES:
            assert PASSES[fault](gm.graph, module), f"{fault} found nothing to change in {module!r}"
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
