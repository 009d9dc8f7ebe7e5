"""The vLLM-Neuron capture layout, read as it is (docs/vllm_neuron.md).

    {dir}[/draft|/vision]/dp{N}/{prefill_s|decode_b}{size}_{counter}/{module}/rank{tp}.pt
                                                                   /{step}_meta.json

Each tp rank of each dp replica becomes a rank, each subdirectory a model. No link is followed and no file is
unpickled. What the layout cannot say (inputs, further outputs, earlier calls of a module, ops) is left
out by the choice of a format, and the header says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dispatch_trace.compat.dump import DumpRank, TensorFile
from dispatch_trace.compat.vllm_neuron_names import MANUAL, inline_captures, unquote
from dispatch_trace.compat.vllm_neuron_scan import Replica, Scan, replica_directories
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.schema import SCHEMA_VERSION, StepInfo
from dispatch_trace.sketch import SKETCH_PARAMETERS
from dispatch_trace.store.reader import RankReader

FORMAT = "vLLM-Neuron capture layout"
_MAX_NAMED = 5

LOSSES = (
    "of each module one output of the last call and no inputs, by its layout",
    "in which order modules ran, and whether the dump was finished, is not known",
)


def is_dump(root: Path) -> bool:
    """Whether a directory is a dump in this layout: it holds, or draft and the like hold, a `dp{N}`."""
    return bool(replica_directories(root, []))


def open_ranks(root: Path) -> list[RankReader]:
    """Opens a dump.

    Returns: rank dp * T + tp for T tp ranks, in order.
    Raises:
      TraceFormatError: it holds no step or no tensor, or a file needs unpickling.
    """
    problems: list[str] = []
    replicas = [
        Scan(root, model, dp, path).replica() for model, dp, path in replica_directories(root, problems)
    ]
    found = [tp for replica in replicas for step in replica.tensors for _, tp, _ in step]
    if not found:
        wrong = [*problems, *(problem for replica in replicas for problem in replica.problems)]
        raise TraceFormatError(
            f"{root} looks like a {FORMAT} but holds no tensor: expected "
            f"dp0/prefill_s8_0/MODULE/rank0.pt{''.join(f'; {problem}' for problem in wrong[:_MAX_NAMED])}"
        )
    tp_size = max(found) + 1
    ranks: list[RankReader] = []
    for dp in sorted({replica.dp for replica in replicas}):
        mine = [replica for replica in replicas if replica.dp == dp]
        tps = sorted({tp for replica in mine for step in replica.tensors for _, tp, _ in step})
        for tp in tps or [0]:
            # What concerns no single tp rank is said once.
            shared = (
                [problem for replica in mine for problem in replica.problems] if tp == min(tps or [0]) else []
            )
            first = [] if ranks else problems
            ranks.append(_rank(root, mine, dp, tp, tp_size, [*first, *shared]))
    for reader in ranks:
        reader.header["world_size"] = len(ranks)
    return ranks


# Ranks ------------------------------------------------------------------------------------------------


def _rank(
    root: Path, replicas: Iterable[Replica], dp: int, tp: int, tp_size: int, problems: list[str]
) -> DumpRank:
    steps: list[StepInfo] = []
    files: list[TensorFile] = []
    notices = list(LOSSES)
    num_by_time, strangers = 0, []
    for replica in replicas:
        num_by_time += replica.order.num_by_time
        strangers += replica.strangers
        for number, step in enumerate(replica.order.steps):
            meta = {**step.meta, "phase": step.phase, "directory": step.path.name}
            steps.append(StepInfo(step=number, model=replica.model, meta=meta))
    # Records in the order of steps, models within a step.
    for number in range(max((len(replica.tensors) for replica in replicas), default=0)):
        for replica in replicas:
            if number < len(replica.tensors):
                mine = {name: path for name, has, path in replica.tensors[number] if has == tp}
                files += _step_files(mine, number, replica.model, first_seq=len(files))
    if num_by_time:
        notices.append(
            f"the place of {num_by_time} of {len(steps)} steps is known from file times only, "
            "which copies change"
        )
    if strangers:
        named = ", ".join(strangers[:_MAX_NAMED])
        notices.append(f"passed over, no part of the layout: {len(strangers)} entries ({named})")
    return DumpRank(
        root,
        dp * tp_size + tp,
        header=_header(files, dp, tp, dp * tp_size + tp, notices),
        steps=steps,
        files=files,
        problems=problems,
    )


def _step_files(directories: dict[str, Path], step: int, model: str, *, first_seq: int) -> list[TensorFile]:
    """One rank's files of a step, numbered as if modules had run by their paths, inner ones first."""
    files: list[TensorFile] = []
    inline = inline_captures([name for name in directories if name.startswith(MANUAL)])
    for directory, (name, n) in sorted(inline.items(), key=lambda item: item[1]):
        seq = first_seq + len(files)
        files.append(
            TensorFile(
                path=directories[directory], kind="inline", step=step, model=model, name=name, n=n, seq=seq
            )
        )
    open_calls: list[tuple[str, Path, int]] = []

    def close() -> None:
        module, path, opened = open_calls.pop()
        seq = first_seq + len(files)
        files.append(
            TensorFile(
                path=path,
                kind="module",
                step=step,
                model=model,
                module=module,
                call=0,
                seq=seq,
                opened=opened,
            )
        )

    modules = sorted(
        ((unquote(name), path) for name, path in directories.items() if name not in inline),
        key=lambda item: _natural(item[0]),
    )
    for module, path in modules:
        while open_calls and not _is_beneath(module, open_calls[-1][0]):
            close()
        open_calls.append((module, path, first_seq + len(files)))
    while open_calls:
        close()
    return files


def _is_beneath(path: str, above: str) -> bool:
    return not above or path.startswith(f"{above}.")


def _natural(path: str) -> tuple[tuple[tuple[int, int, str], ...], ...]:
    """Sorts numbers as numbers, and a path before those beneath it."""
    return tuple(
        tuple(
            (1, int(part), part) if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d+)", piece)
        )
        for piece in (path.split(".") if path else ())
    )


def _header(files: Iterable[TensorFile], dp: int, tp: int, rank: int, notices: list[str]) -> dict[str, Any]:
    paths = sorted({(file.model, file.module) for file in files if file.kind == "module"})
    models = dict.fromkeys(file.model for file in files)
    return {
        "type": "header",
        "schema_version": SCHEMA_VERSION,
        "format": "vllm-neuron",
        "lane": "unknown",
        "models": {model: {"class": "?"} for model in models},
        "modules": [{"model": model, "path": path, "class": "", "parameters": []} for model, path in paths],
        "options": {
            "level": "module",
            "save": "tensors",
            "save_rules": [],
            "select": [re.escape(path) for path in dict.fromkeys(path for _, path in paths)],
            "ops": None,
            "steps": None,
            "stats": None,
            "inputs": False,
            "sketch": True,
            "params": "none",
            "outputs": "first",
            "calls": "last",
        },
        "sketch": SKETCH_PARAMETERS,
        "rank": rank,
        "coordinates": {"dp": dp, "tp": tp},
        "meta": {"format": FORMAT},
        "notices": notices,
    }
