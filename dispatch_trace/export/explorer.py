"""An alignment for Google's Model Explorer: the target's graph, and the error of each node to lay over it.

Two JSON files, both of Model Explorer's own forms: a graph collection (`graph_builder.py` of
model_explorer: nodes with a namespace, attributes and incoming edges) and, beside it, node data
(`node_data_builder.py`: results by node id, by graph id). Overlays for graphs of other origin cannot be
written: Model Explorer finds a node by the id that the exporter of its graph gave it, which no trace
knows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dispatch_trace.align.pairs import Pair
from dispatch_trace.export.rows import Exported
from dispatch_trace.export.tables import whole_file
from dispatch_trace.schema import StoredRecord

GRAPH = "target"
_MOST = 9.0  # a value of its own kind: JSON has no infinity
_NODES = ("op", "param")  # what computes, and what it starts from
_FATAL, _PAST, _WITHIN = "#d94801", "#fdae6b", "#c7e9c0"


def errors_path(path: Path) -> Path:
    """Where the node data lie that belong to a graph."""
    return path.with_name(f"{path.stem}.errors.json")


def write_graph(pairs: Iterable[Pair], path: Path) -> Exported:
    """Writes the graph of the target's ops and parameters to `path`, and their errors to `errors_path(path)`.

    A node's value is the base-10 logarithm of its error over its band: above 0 it is past what noise
    explains; 9 is the most, where noise explains nothing.
    Raises:
      OSError: a file cannot be written.
    """
    found = [pair for pair in pairs if pair.target is not None and pair.target.kind in _NODES]
    nodes = {pair.target.seq: pair.target for pair in found if pair.target is not None}
    graph = {"id": GRAPH, "nodes": [_node(record, nodes) for record in nodes.values()]}
    results = {
        str(pair.target.seq): result
        for pair in found
        if pair.target is not None and (result := _result(pair)) is not None
    }
    data = {
        GRAPH: {
            "results": results,
            "thresholds": [{"value": 0, "bgColor": _WITHIN}, {"value": _MOST, "bgColor": _PAST}],
        }
    }
    beside = errors_path(path)
    with whole_file(path) as file:
        json.dump({"label": "dispatch_trace", "graphs": [graph]}, file, indent=1, allow_nan=False)
    with whole_file(beside) as file:
        json.dump(data, file, indent=1, allow_nan=False)
    left = len(nodes) - len(results)
    return Exported(
        num_rows=len(nodes),
        files=[str(beside)],
        left_out=[f"{left} nodes without an error of their own"] if left else [],
    )


def _node(record: StoredRecord, nodes: dict[int, StoredRecord]) -> dict[str, Any]:
    module = [part for part in (record.model, *record.module.split(".")) if part]
    if record.call > 0:
        module.append(f"call {record.call}")
    attributes = {
        "step": record.step,
        "overload": record.overload,
        "source": "" if record.source is None else f"{record.source[0]}:{record.source[1]}",
        "dtype": next((slot.dtype for slot in record.slots if slot.role == "out"), ""),
        "shape": next((str(list(slot.shape)) for slot in record.slots if slot.role == "out"), ""),
    }
    edges = [
        {"sourceNodeId": str(seq), "sourceNodeOutputId": str(number), "targetNodeInputId": str(place)}
        for place, slot in enumerate(slot for slot in record.slots if slot.role == "in")
        for seq, number in slot.producers
        if seq in nodes
    ]
    return {
        "id": str(record.seq),
        "label": record.op or record.name,
        "namespace": "/".join((f"step {record.step}", *module)),
        "attrs": [{"key": key, "value": str(value)} for key, value in attributes.items() if value != ""],
        "incomingEdges": edges,
    }


def _result(pair: Pair) -> dict[str, Any] | None:
    if pair.label == "nonfinite":
        return {"value": _MOST, "bgColor": _FATAL}
    if pair.error is None or pair.band is None or not math.isfinite(pair.error):
        return None
    value = -_MOST
    if pair.error > 0:
        value = _MOST if pair.band == 0 else math.log10(pair.error / pair.band)
    result: dict[str, Any] = {"value": max(-_MOST, min(value, _MOST))}
    if pair.label and pair.label not in ("inherited", "flip", "suspect"):
        result["bgColor"] = _FATAL
    return result
