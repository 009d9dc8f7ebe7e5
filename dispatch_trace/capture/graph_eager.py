"""Runs a Dynamo graph node by node: the backend `eager`, recorded.

Its nodes are torch functions. The recording's own dispatch mode sees the ops below each of them, in forward
and in backward, and the node says whose they are; nothing is added to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dispatch_trace.capture.frames import mark_sequence
from dispatch_trace.capture.graph_frames import GraphFrame, Run
from dispatch_trace.capture.graph_plan import Site, entries_of, is_own, source_of
from dispatch_trace.capture.graph_run import CompiledFrame
from dispatch_trace.capture.inline import ACTIVE


class DynamoGraph(torch.fx.Interpreter):
    """One run of a Dynamo graph under the dispatch modes of some recordings."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        sites: Mapping[torch.fx.Node, Site | None],
        runs: Sequence[Run],
        note: str,
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False  # the program's exceptions pass unchanged
        self._sites = sites
        self._runs = [(run, GraphFrame(run.base, note)) for run in runs]
        for _, silent in self._runs:
            silent.records_ops = False
        self._note = note

    def run_node(self, n: torch.fx.Node) -> Any:
        if n in self._sites:
            for run, silent in self._runs:
                self._enter(run, silent, self._sites[n])
        return super().run_node(n)

    def _enter(self, run: Run, silent: GraphFrame, site: Site | None) -> None:
        tracer = run.tracer
        try:
            frame = run.frame(site) if site is not None else None
            if frame is None:
                frame = silent
            elif site is not None:
                frame.note, frame.source = self._note, site.source
            if tracer.state.frame is not frame:
                tracer.state.frame = frame
                if torch.is_grad_enabled():
                    mark_sequence(tracer.state, frame)
        except Exception as error:
            tracer.fault(error)


def run_under_modes(
    frame: CompiledFrame, module: torch.fx.GraphModule, wanted: Callable[[torch.fx.Node], bool]
) -> Callable[..., Any]:
    """The code of a Dynamo graph: run as it is, and node by node where somebody records."""
    sites = {
        node: Site(entries_of(node), "fwd", source_of(node.meta.get("stack_trace")))
        if wanted(node) and not is_own(node)
        else None
        for node in module.graph.nodes
        if node.op in ("call_function", "call_method", "call_module")
    }

    def run(*args: Any) -> Any:
        runs = frame.forward_runs() if ACTIVE else []
        if not runs:
            return module(*args)
        before = [(each.tracer.state, each.tracer.state.frame) for each in runs]
        for state, _ in before:
            state.busy = False  # the modes are what records here
        try:
            return DynamoGraph(module, sites, runs, frame.note).run(*args)
        finally:
            for state, frame_before in before:
                state.frame = frame_before
                state.busy = True

    return run


__all__ = ["DynamoGraph", "run_under_modes"]
