"""The vLLM-Neuron capture layout, read as it is (docs/vllm_neuron.md).

    {dir}[/draft|/vision]/dp{N}/{prefill_s|decode_b}{size}_{counter}/{module}/rank{tp}.pt
                                                                   /{step}_meta.json

Each tp rank of each dp replica becomes a rank, each subdirectory a model. No link is followed and no file is
unpickled. What the layout cannot say (inputs, further outputs, earlier calls of a module, ops) is left
out by the choice of a format, and the header says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dispatch_trace.compat.dump import OUT, DumpRank, DumpRecord, DumpSlot, make_header, of_one_world
from dispatch_trace.compat.order import in_path_order
from dispatch_trace.compat.vllm_neuron_names import MANUAL, inline_captures, unquote
from dispatch_trace.compat.vllm_neuron_scan import Replica, Scan, replica_directories
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.schema import StepInfo
from dispatch_trace.store.reader import RankReader

NAME = "vllm-neuron"
FORMAT = "vLLM-Neuron capture layout"
_MAX_NAMED = 5

LOSSES = (
    "of each module one output of the last call and no inputs, by its layout",
    "in which order modules ran, and whether the dump was finished, is not known",
)


def detect(path: Path) -> str | None:
    """None: no such dump; "": one, for it holds, or draft and the like hold, a `dp{N}`."""
    return "" if path.is_dir() and replica_directories(path, []) else None


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
    return of_one_world(ranks)


# Ranks ------------------------------------------------------------------------------------------------


def _rank(
    root: Path, replicas: Iterable[Replica], dp: int, tp: int, tp_size: int, problems: list[str]
) -> DumpRank:
    steps: list[StepInfo] = []
    files: list[DumpRecord] = []
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
    rank = dp * tp_size + tp
    header = make_header(
        files, name=NAME, format=FORMAT, notices=notices, rank=rank, outputs="first", calls="last"
    )
    header["coordinates"] = {"dp": dp, "tp": tp}
    return DumpRank(root, rank, header=header, steps=steps, records=files, problems=problems)


def _step_files(directories: dict[str, Path], step: int, model: str, *, first_seq: int) -> list[DumpRecord]:
    """One rank's files of a step, numbered as if modules had run by their paths, inner ones first."""
    files: list[DumpRecord] = []
    inline = inline_captures([name for name in directories if name.startswith(MANUAL)])
    for directory, (name, n) in sorted(inline.items(), key=lambda item: item[1]):
        seq = first_seq + len(files)
        files.append(
            DumpRecord(
                kind="inline",
                step=step,
                model=model,
                name=name,
                n=n,
                seq=seq,
                slots=_slots(directories[directory]),
            )
        )
    modules = {unquote(name): path for name, path in directories.items() if name not in inline}
    first = first_seq + len(files)
    for module, opened in in_path_order(modules):
        files.append(
            DumpRecord(
                kind="module",
                step=step,
                model=model,
                module=module,
                call=0,
                seq=first_seq + len(files),
                opened=first + opened,
                slots=_slots(modules[module]),
            )
        )
    return files


def _slots(path: Path) -> tuple[DumpSlot, ...]:
    from dispatch_trace.compat.tensor_files import PtTensor

    return (DumpSlot(OUT, "out", PtTensor(path)),)
