"""SGLang's dumps of one file a forward pass (`--debug-tensor-dump-output-folder`), read as they are.

    {folder}/TP{tp}_PP{pp}_Rank{R}_pid{pid}/Pass{NNNNN}.pt      {module path: tensor, or a list of tensors}

The dict is in the order in which modules returned. A file is written when the module `model` returns: its
own output and what runs behind it (`lm_head`, `logits_processor`) stand at the head of the next pass's
file, and are put back here; of the last pass they were never written.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from dispatch_trace.compat.dump import DumpRank, DumpRecord, DumpSlot, make_header, of_one_world
from dispatch_trace.compat.order import opened_by_path
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.schema import StepInfo
from dispatch_trace.store.reader import RankReader

NAME = "sglang-passes"
FORMAT = "SGLang dump of forward passes"
_RANK = re.compile(r"TP(\d+)_PP(\d+)_Rank(\d+)_pid(\d+)")
_PASS = re.compile(r"Pass(\d+)\.pt")
_BATCH = ".forward_batch_info."
_MAX_NAMED = 5

LOSSES = (
    "of each module the output of the last call, of modules with children none but the model's, and no "
    "inputs, by its layout",
)


def detect(path: Path) -> str | None:
    """None: no such dump; "": one; else what is wrong with what looks like one."""
    folders = _folders(path)
    if not folders:
        return None
    if not any(_passes(folder) for folder, _ in folders):
        return f"{folders[0][0]} is named like a rank of an {FORMAT} but holds no Pass00000.pt."
    return ""


def open_ranks(path: Path) -> list[RankReader]:
    """Opens a dump: the output folder, or the directory of one rank.

    Raises:
      TraceFormatError: two processes wrote one rank, or a file needs unpickling.
    """
    folders: dict[int, list[Path]] = defaultdict(list)
    for folder, rank in _folders(path):
        folders[rank].append(folder)
    for rank, found in folders.items():
        if len(found) > 1:
            names = ", ".join(folder.name for folder in found[:_MAX_NAMED])
            raise TraceFormatError(
                f"{path} holds {len(found)} dumps of rank {rank}: {names}. Give one of these directories."
            )
    ranks: list[RankReader] = [_rank(path, rank, found[0]) for rank, found in sorted(folders.items())]
    return of_one_world(ranks)


def _folders(path: Path) -> list[tuple[Path, int]]:
    if not path.is_dir():
        return []
    if match := _RANK.fullmatch(path.resolve().name):
        return [(path, int(match[3]))]
    with os.scandir(path) as entries:
        return sorted(
            (Path(entry.path), int(match[3]))
            for entry in entries
            if (match := _RANK.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
        )


def _passes(folder: Path) -> list[tuple[int, Path]]:
    with os.scandir(folder) as entries:
        return sorted(
            (int(match[1]), Path(entry.path))
            for entry in entries
            if (match := _PASS.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)
        )


def _rank(path: Path, number: int, folder: Path) -> DumpRank:
    from dispatch_trace.compat.tensor_files import PtContainer
    from dispatch_trace.nested import flatten

    problems: list[str] = []
    passes: list[tuple[int, PtContainer]] = []
    for step, file in _passes(folder):
        container = PtContainer(file)
        if container.problem:
            problems.append(f"{file.name} {container.problem}")
        elif not isinstance(container.content, dict):
            problems.append(f"{file.name} holds a {type(container.content).__name__}, not a dict of modules")
        else:
            passes.append((step, container))
    steps = [step for step, _ in passes]
    missing = sorted(set(range(max(steps, default=-1) + 1)) - set(steps))
    problems += [f"Pass{step:05d}.pt is missing or cannot be read" for step in missing]
    sites, batches = _sites(passes)
    records: list[DumpRecord] = []
    opened = opened_by_path([(step, module) for step, module, _, _ in sites])
    for place, (step, module, container, value) in enumerate(sites):
        slots = tuple(
            DumpSlot(name, "out", container.at(tensor))
            for name, tensor in flatten(value, "out")
            if _is_tensor(tensor)
        )
        if not slots:
            problems.append(f"{container.path.name}: {module} holds no tensor")
            continue
        records.append(
            DumpRecord(
                kind="module", seq=place, step=step, module=module, call=0, opened=opened[place], slots=slots
            )
        )
    last = f"what {_top(passes)!r} itself and modules behind it returned in the last pass was never written"
    header = make_header(
        records,
        name=NAME,
        format=FORMAT,
        notices=[*LOSSES, last],
        rank=number,
        outputs="first",
        calls="last",
        root=False,
    )
    return DumpRank(
        path,
        number,
        header=header,
        steps=[StepInfo(step=step, meta=batches.get(step, {})) for step in steps],
        records=records,
        problems=problems,
    )


def _sites(
    passes: list[tuple[int, Any]],
) -> tuple[list[tuple[int, str, Any, Any]], dict[int, dict[str, Any]]]:
    """(step, module, container, value) in the order of the run, and the metadata of steps."""
    top = _top(passes)
    batches: dict[int, dict[str, Any]] = {}
    found: dict[int, list[tuple[int, str, Any, Any]]] = {step: [] for step, _ in passes}
    # What stands outside the model in the first file ran before the model; the rest ran behind it.
    before = {name for name in (passes[0][1].content if passes else ()) if not _within(name, top)}
    earlier = -1
    for step, container in passes:
        late = []
        for name, value in container.content.items():
            module, batch, what = str(name).partition(_BATCH)
            if batch:
                if _is_tensor(value):
                    batches.setdefault(step, {})[what] = value.tolist()
            elif _within(module, top) or module in before:
                found[step].append((step, module, container, value))
            elif earlier in found:
                late.append((earlier, module, container, value))
        if late:
            found[earlier] += sorted(late, key=lambda site: site[1] != top)  # the model returns first
        earlier = step
    return [site for step in sorted(found) for site in found[step]], batches


def _top(passes: list[tuple[int, Any]]) -> str:
    """The module whose return ends a pass: it is followed by its batch, or nearly all lies beneath it."""
    counts: dict[str, int] = defaultdict(int)
    for _, container in passes[:1]:
        for name in container.content:
            module, batch, _ = str(name).partition(_BATCH)
            if batch:
                return module
            counts[module.partition(".")[0]] += 1
    return max(counts, key=counts.__getitem__, default="model")


def _within(name: Any, top: str) -> bool:
    return str(name).startswith(f"{top}.")


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)
