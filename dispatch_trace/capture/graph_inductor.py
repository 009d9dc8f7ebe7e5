"""Taps in the graph that inductor compiles, placed where the value of an eager op is complete.

Inductor decomposes ops before it compiles them, so its graph does not show what eager recording shows. The
plan therefore comes from a trace of the same program without decompositions, and each of its ops is looked up
in inductor's graph: nodes that come from one op carry its name (`original_aten`) and the node of Dynamo's
graph, or the autograd node, that it ran for. Decompositions mark the nodes of their results; where nothing is
marked, because nothing was decomposed, the last node that has the op's shape and dtype is its result.

Guarantees: a tap is an opaque operator and records what the code computed; a value that cannot be told for
certain is not tapped, rather than guessed.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dispatch_trace.capture.graph_plan import Plan, accesses, is_access, is_backward, is_op, is_tap

Key = tuple[Any, ...]
_MARK = "dispatch_trace_result"  # in a node's metadata: {(op, index of the output)}


def find_results(plan: Plan, graph: torch.fx.Graph, offset: int = 0) -> dict[str, torch.fx.Node]:
    """Which node of inductor's graph holds the result of each op.

    Args:
      plan: of the same program without decompositions.
      graph: inductor's.
      offset: autograd sequence numbers of `graph` minus those of the plan.
    Returns: by name of the plan's node; of its `getitem` where the op returns several tensors.
    """
    groups: dict[Key, list[torch.fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and not is_tap(node):
            key = _key(node, plan.backward, offset)
            if key is not None:
                groups[key].append(node)
    wanted: dict[Key, list[torch.fx.Node]] = defaultdict(list)
    for node in plan.sites:
        key = _key(node, plan.backward, 0)
        if key is not None:
            wanted[key].append(node)
    found: dict[str, torch.fx.Node] = {}
    for key, ops in wanted.items():
        for op, nodes in zip(ops, _split(ops, groups.get(key, [])), strict=True):
            _match(op, nodes, found)
    return found


def _key(node: torch.fx.Node, backward: bool, offset: int) -> Key | None:
    """What nodes of one eager op have in common in both graphs."""
    meta = node.meta
    original = meta.get("original_aten")
    if original is None:
        return None
    if backward and is_backward(node):
        number = meta.get("seq_nr")
        return None if number is None else ("bwd", number - offset, str(original))
    origin = meta.get("from_node")
    return ("fwd", origin[0].name, str(original)) if origin else None


def sequence_offset(plan: Plan, graph: torch.fx.Graph) -> int:
    """How far autograd's sequence numbers of two traces of one program are apart."""
    first: dict[Key, int] = {}
    for node in plan.nodes:
        key, number = _key(node, False, 0), node.meta.get("seq_nr")
        if key is not None and isinstance(number, int) and not is_backward(node):
            first.setdefault(key, number)
    votes: Counter[int] = Counter()
    seen: set[Key] = set()
    for node in graph.nodes:
        key, number = _key(node, False, 0), node.meta.get("seq_nr")
        if key in first and key not in seen and isinstance(number, int) and not is_backward(node):
            seen.add(key)
            votes[number - first[key]] += 1
    return votes.most_common(1)[0][0] if votes else 0


def _split(ops: Sequence[torch.fx.Node], nodes: list[torch.fx.Node]) -> list[list[torch.fx.Node]]:
    """The nodes of each of several equal ops that ran for one node of Dynamo's graph."""
    if len(ops) == 1:
        return [nodes]
    same = [node for node in nodes if node.target == ops[0].target]
    if len(same) == len(ops):
        return [[node, *(user for user in node.users if user in nodes)] for node in same]
    results = [i for i, node in enumerate(nodes) if (str(ops[0].target), 0) in node.meta.get(_MARK, ())]
    if len(results) == len(ops) and isinstance(ops[0].meta.get("val"), torch.Tensor):
        ends = [i + 1 for i in results]
        return [nodes[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return [[] for _ in ops]


def _match(op: torch.fx.Node, nodes: list[torch.fx.Node], found: dict[str, torch.fx.Node]) -> None:
    described = op.meta.get("val")
    several = isinstance(described, (tuple, list))
    parts = accesses(op) if several else {0: op}
    twin = next((node for node in reversed(nodes) if node.target == op.target), None)
    if twin is not None and several:
        for index, user in accesses(twin).items():
            if index in parts and _kind(user) == _kind(parts[index]):
                found[parts[index].name] = user
        return
    marked = any(node.meta.get(_MARK) for node in nodes)
    for index, part in parts.items():
        same = [node for node in nodes if _kind(node) == _kind(part)]
        if marked:
            same = [node for node in same if (str(op.target), index) in node.meta.get(_MARK, ())]
        if same and (not several or len(same) == 1):
            found[part.name] = same[-1]


def marking_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions, which also mark the nodes that hold what each of them returns."""
    from torch._inductor.decomposition import select_decomp_table

    return {op: _marking(op, function) for op, function in select_decomp_table().items()}


def _marking(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def decompose(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        if out is not NotImplemented:
            _mark(out, str(op))
        return out

    return decompose


def _mark(out: Any, op: str) -> None:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    if mode is None:
        return
    for i, part in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
        if isinstance(part, torch.Tensor):
            node = get_proxy_slot(part, mode.tracer, None, lambda slot: slot.proxy.node)
            if node is not None:
                node.meta.setdefault(_MARK, set()).add((op, i))


def _kind(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return (tuple(map(str, value.shape)), value.dtype, value.device.type)


def add_taps(graph: torch.fx.Graph, results: Sequence[torch.fx.Node], tap: Any) -> int:
    """Puts a tap (this operator) behind each of these nodes and returns it as an extra output.

    Returns: how many outputs the graph had before.
    """
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    before = list(output.args[0])
    after = list(graph.nodes)
    place = {node: i for i, node in enumerate(after)}
    taps = []
    for node in results:
        behind = node
        # Tuple access has to follow the op that returns the tuple.
        while place[behind] + 1 < len(after) and is_access(after[place[behind] + 1]):
            behind = after[place[behind] + 1]
        with graph.inserting_after(behind):
            extra = graph.call_function(tap, (node,))
        extra.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta", "stack_trace")}
        taps.append(extra)
    output.args = ((*before, *taps),)
    return len(before)


def overwritten_inputs(graph: torch.fx.Graph) -> list[int]:
    """Positions of the inputs that a graph writes."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    written = {
        node.args[0]
        for node in graph.nodes
        if node.op == "call_function" and is_op(node) and getattr(node.target, "_schema", None) is not None
        for argument in [node.target._schema.arguments[:1]]
        if argument and argument[0].alias_info is not None and argument[0].alias_info.is_write
    }
    return [i for i, node in enumerate(inputs) if node in written]


class Materialised:
    """Names of the nodes whose values inductor keeps in buffers of their own."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Looks at what inductor generates code for; it has no hook for that, so its class is watched."""
        from torch._inductor.graph import GraphLowering

        names, original = self.names, GraphLowering.codegen

        def codegen(lowering: Any) -> Any:
            result = original(lowering)
            for buffer in lowering.buffers:
                if buffer.get_name() in lowering.removed_buffers:
                    continue
                node = buffer.get_origin_node()
                if node is not None:
                    names.add(node.name)
            return result

        GraphLowering.codegen = codegen  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            GraphLowering.codegen = original  # type: ignore[method-assign]


__all__ = [
    "Materialised",
    "add_taps",
    "find_results",
    "marking_decompositions",
    "overwritten_inputs",
    "sequence_offset",
]
