"""What a graph computes, op by op, under the keys that eager recording gives the same ops.

Reads the metadata that Dynamo and AOTAutograd leave on nodes: the module calls around a node (by the identity
of the module object, so that names under which a traced function knew its modules do not matter), the
forward's module calls of a backward node, and the line of the program. Decides nothing about values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload

from dispatch_trace.capture.ops import base_name
from dispatch_trace.capture.sources import is_internal
from dispatch_trace.capture.tapop import NAME
from dispatch_trace.schema import GradPhase

_LOCATION = re.compile(r'File "([^"]+)", line (\d+)')
_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HOOK_FILES = (_PACKAGE_DIR + "registry.py", _PACKAGE_DIR + "capture" + os.sep + "compiled.py")
_TAP = NAME.replace("::", ".")
_SYMBOLIC = frozenset({"aten.sym_size", "aten.sym_stride", "aten.sym_numel", "aten.sym_storage_offset"})


class Entry(NamedTuple):
    """One module call within a graph: id of the module object, and how often the graph entered it before."""

    module: int
    times: int


@dataclass(frozen=True, slots=True)
class Site:
    """Where an op stands.

    Attributes:
      entries: the module calls around it, outermost first; the code that was compiled itself is not listed.
      phase: of the op.
      source: (file, line) of the innermost frame of the program.
    """

    entries: tuple[Entry, ...]
    phase: GradPhase
    source: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The ops of one graph.

    Attributes:
      module: the graph.
      sites: of every node that is an op, in order.
      backward: the graph is a backward one.
      sparse: what has no value gets no record: the compiler fused it away, and was meant to.
    """

    module: torch.fx.GraphModule
    sites: dict[torch.fx.Node, Site]
    backward: bool
    sparse: bool = False

    @property
    def nodes(self) -> Iterator[torch.fx.Node]:
        return iter(self.module.graph.nodes)


def plan_of(module: torch.fx.GraphModule, *, backward: bool = False) -> Plan:
    """Works out the site of every op of a graph."""
    sites: dict[torch.fx.Node, Site] = {}
    last = 0
    around: tuple[Entry, ...] = ()
    for node in module.graph.nodes:
        if not is_op(node) or is_own(node) or _puts_back(node):
            continue
        phase: GradPhase = "fwd"
        entries = entries_of(node)
        if backward:
            phase = "bwd" if is_backward(node) else "recompute"
            number = node.meta.get("seq_nr")
            if phase == "bwd" and isinstance(number, int):
                if last and number > last and not entries and base_name(node.target) == "aten.add":
                    # The engine runs from high numbers to low ones. What stands out of turn adds up
                    # gradients, when the op before it has made the second of them.
                    entries = around
                else:
                    last, around = number, entries
        sites[node] = Site(entries, phase, source_of(node.meta.get("stack_trace")))
    return Plan(module, sites, backward)


def is_op(node: torch.fx.Node) -> bool:
    """Whether eager recording would show the node as an op."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, HigherOrderOperator):
        return True
    return (
        isinstance(node.target, OpOverload) and not is_tap(node) and base_name(node.target) not in _SYMBOLIC
    )


def is_tap(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and base_name(node.target) == _TAP


def _puts_back(node: torch.fx.Node) -> bool:
    """Whether the node writes an input: how a graph without in-place ops shows that one was changed."""
    target: Any = node.target
    source = node.args[0] if node.args else None
    return bool(
        target is torch.ops.aten.copy_.default
        and isinstance(source, torch.fx.Node)
        and source.op == "placeholder"
    )


def is_access(node: torch.fx.Node) -> bool:
    """Whether the node takes one of several results."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def accesses(node: torch.fx.Node) -> dict[int, torch.fx.Node]:
    """The nodes that take the results of one that returns several, by index."""
    return {u.args[1]: u for u in node.users if is_access(u) and isinstance(u.args[1], int)}


def is_backward(node: torch.fx.Node) -> bool:
    """Whether a node of a backward graph is one of backward's own, not forward's computed again."""
    meta = node.meta
    if "fwd_nn_module_stack" in meta:
        return True
    tag = meta.get("partitioner_tag")
    return bool(tag != "is_forward") if tag is not None else bool(meta.get("autograd_backward"))


def is_own(node: torch.fx.Node) -> bool:
    """Whether the node comes from a hook of ours, which copies what a module returns."""
    places = _LOCATION.findall(node.meta.get("stack_trace") or "")
    return bool(places) and places[-1][0] in _HOOK_FILES


def _stack(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    return meta.get("fwd_nn_module_stack") or meta.get("nn_module_stack") or {}


def entries_of(node: torch.fx.Node) -> tuple[Entry, ...]:
    """The module calls around a node; Dynamo's key is the module's id, `@k` at its k-th next entry."""
    found = []
    for key in _stack(node.meta):
        identity, _, times = str(key).partition("@")
        if identity.isdigit():
            found.append(Entry(int(identity), int(times) if times.isdigit() else 0))
    return tuple(found)


def num_entries(graph: torch.fx.Graph) -> dict[int, int]:
    """How often a Dynamo graph enters each module."""
    counts: dict[int, int] = {}
    for node in graph.nodes:
        for entry in entries_of(node):
            counts[entry.module] = max(counts.get(entry.module, 0), entry.times + 1)
    return counts


def source_of(stack_trace: str | None) -> tuple[str, int] | None:
    """File and line of the innermost frame that belongs to the program."""
    for file, line in reversed(_LOCATION.findall(stack_trace or "")):
        if not is_internal(file):
            return file, int(line)
    return None
