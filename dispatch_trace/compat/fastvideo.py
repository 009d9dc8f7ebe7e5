"""FastVideo's activation trace (`FASTVIDEO_TRACE_ACTIVATIONS`), a file of JSON lines, read as it is.

    {"module": "blocks.0", "tensor": "out[0]", "step": 3, "abs_mean": 0.1, "shape": [2, 8], …}

One line a tensor that a module returned, in the order of the run. There are no data, no inputs and no
calls: the n-th time that a module's tensor stands in a step is call n. A file that a second run was
appended to looks as if every module had been called twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dispatch_trace.compat.dump import DumpRank, DumpRecord, DumpSlot, Measured, make_header
from dispatch_trace.compat.figures import UNKNOWN_SHAPE, moments
from dispatch_trace.compat.order import CallCounter, opened_by_path
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.schema import StepInfo
from dispatch_trace.store.reader import RankReader

NAME = "fastvideo"
FORMAT = "FastVideo activation trace"
_KEYS = frozenset({"module", "tensor", "step"})
_MAX_NAMED = 5
_MAX_LINE = 1 << 20

LOSSES = (
    "statistics only: no data, no inputs and no ops, by its layout",
    "calls of a module in one step are told apart by their order alone",
)


def detect(path: Path) -> str | None:
    """None: no such dump; "": one; else what is wrong with what looks like one."""
    files = _files(path)
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:_MAX_NAMED])
        return f"{path} holds {len(files)} files of a {FORMAT}: {names}. Give one of them."
    return "" if files else None


def open_ranks(path: Path) -> list[RankReader]:
    """Opens a trace: the file, or a directory with one.

    Raises:
      TraceFormatError: no line of it can be read.
    """
    file = _files(path)[0]
    problems: list[str] = []
    lines = list(_lines(file, problems))
    if not lines:
        raise TraceFormatError(f"{file} holds no line of a {FORMAT}: {'; '.join(problems[:_MAX_NAMED])}.")
    steps = [step for step in dict.fromkeys(line["step"] for line in lines) if step is not None]
    # Lines without a step come from a program that counts none: they are one step of their own.
    numbers = {None: 0, **{step: step for step in steps}}
    calls = list(_calls(lines))
    runs = [(step, module) for step, module, _ in calls]
    opened = opened_by_path(runs)
    counter = CallCounter()
    records = [
        DumpRecord(
            kind="module",
            seq=place,
            step=numbers[step],
            module=module,
            call=counter.next((step, module)),
            opened=opened[place],
            slots=tuple(_slot(line) for line in group),
        )
        for place, (step, module, group) in enumerate(calls)
    ]
    if None in {line["step"] for line in lines} and 0 in steps:
        problems.append("some lines have no step, others step 0: they cannot be told apart")
    notices = list(LOSSES)
    if not all(line.get("dtype") for line in lines):
        notices.append("dtypes were not asked for (FASTVIDEO_TRACE_STATS) and are taken for float32")
    repeated = [site for site, count in Counter(runs).items() if count > 1]
    if repeated and len(repeated) == len(set(runs)):
        notices.append("every module stands more than once in each step: a second run may have been appended")
    header = make_header(
        records,
        name=NAME,
        format=FORMAT,
        notices=notices,
        save="stats",
        stats=sorted({key for line in lines for key in line if key not in _KEYS}),
        sketch=False,
        root=False,
    )
    infos = [StepInfo(step=number) for number in sorted({numbers[line["step"]] for line in lines})]
    return [DumpRank(path, 0, header=header, steps=infos, records=records, problems=problems)]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _is_trace(path) else []
    return sorted(entry for entry in path.glob("*.jsonl") if entry.is_file() and _is_trace(entry))


def _is_trace(file: Path) -> bool:
    """Whether the first line is one of ours."""
    try:
        with file.open("rb") as opened:
            first = opened.readline(_MAX_LINE)
        return bool(json.loads(first).keys() >= _KEYS)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _lines(file: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    with file.open("rb") as opened:
        for number, text in enumerate(opened, start=1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                cut = "is cut short" if not text.endswith(b"\n") else "is no JSON"
                problems.append(f"{file.name}: line {number} {cut}")
                continue
            step = line.get("step") if isinstance(line, dict) else False
            sound = step is None or (isinstance(step, int) and not isinstance(step, bool))
            if not (
                sound and line.keys() >= _KEYS and all(isinstance(line[k], str) for k in ("module", "tensor"))
            ):
                problems.append(f"{file.name}: line {number} is no record with module, tensor and step")
                continue
            yield line


def _calls(lines: list[dict[str, Any]]) -> Iterator[tuple[int | None, str, list[dict[str, Any]]]]:
    """(step, module, lines) of each call: neighbours of one module whose tensors all differ."""
    group: list[dict[str, Any]] = []
    for line in lines:
        same = group and (group[0]["step"], group[0]["module"]) == (line["step"], line["module"])
        if not same or line["tensor"] in {other["tensor"] for other in group}:
            if group:
                yield group[0]["step"], group[0]["module"], group
            group = []
        group.append(line)
    if group:
        yield group[0]["step"], group[0]["module"], group


def _slot(line: dict[str, Any]) -> DumpSlot:
    shape = line.get("shape")
    known = isinstance(shape, list) and all(isinstance(size, int) for size in shape)
    names = ("min", "max", "sum", "mean", "abs_mean", "std")
    stats = moments({name: line[name] for name in names if name in line}, shape if known else None)
    dtype = str(line.get("dtype") or "").removeprefix("torch.")
    return DumpSlot(
        line["tensor"],
        "out",
        Measured(dtype or "float32", tuple(shape or ()) if known else UNKNOWN_SHAPE, stats),
    )
