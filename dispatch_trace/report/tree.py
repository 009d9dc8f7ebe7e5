"""The module tree of a trace as lines of text; neighbours that look the same stand together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dispatch_trace.report.table import columns, plain

MAX_TREE_LINES = 26


@dataclass(slots=True)
class Node:
    """A module in the tree.

    Attributes:
      children: by name, in order of definition.
      kind: class name without its module, "" when the header does not list it.
      calls: number of module calls, over all steps.
      ops: number of ops in the module's own body.
    """

    children: dict[str, Node] = field(default_factory=dict)
    kind: str = ""
    calls: int = 0
    ops: int = 0

    def at(self, path: str) -> Node:
        node = self
        for name in path.split(".") if path else ():
            node = node.children.setdefault(name, Node())
        return node

    def shape(self) -> tuple[Any, ...]:
        """Equal for two modules whose subtrees look the same."""
        below = tuple((name, child.shape()) for name, child in self.children.items())
        return (self.kind, self.calls, self.ops, below)

    def levels(self) -> int:
        return 1 + max((child.levels() for child in self.children.values()), default=0)


def tree_lines(root: Node, depth: int | None) -> list[str]:
    if depth is not None:
        return _rows_to_depth(root, depth)
    lines = _rows_to_depth(root, 0)
    for deeper in range(1, root.levels() + 1):
        candidate = _rows_to_depth(root, deeper)
        if len(candidate) > MAX_TREE_LINES:
            return [*lines, f"  deeper: --depth {deeper}"]
        lines = candidate
    return lines


def _rows_to_depth(root: Node, depth: int) -> list[str]:
    rows = [["(root)", root.kind, *_figures(root)]]

    def walk(node: Node, level: int) -> None:
        if level > depth:
            return
        for name, child in _siblings(node):
            rows.append(["  " * level + plain(name), plain(child.kind), *_figures(child)])
            walk(child, level + 1)

    walk(root, 1)
    return columns(rows, right=frozenset({2, 3}), indent="  ")


def _figures(node: Node) -> list[str]:
    return [str(node.calls) if node.calls else "-", str(node.ops) if node.ops else "-"]


def _siblings(node: Node) -> Iterator[tuple[str, Node]]:
    """The children; numbered neighbours that look the same stand together as `0-5`."""
    run: list[str] = []
    previous: Node | None = None
    for name, child in node.children.items():
        follows = bool(run) and name.isdigit() and run[-1].isdigit() and int(name) == int(run[-1]) + 1
        if previous is not None and follows and child.shape() == previous.shape():
            run.append(name)
            continue
        if previous is not None:
            yield _run_name(run), previous
        run, previous = [name], child
    if previous is not None:
        yield _run_name(run), previous


def _run_name(run: list[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}"
