"""Captures of NxD Inference (`TensorCaptureConfig`, `get_tensor_capture_hook`), read as they are.

    {dir}/captured_tensors_{cte|tkg}_step_{S}_module_{path}_output.pt       also _input, _output_0, .outputs
         /captured_tensors_{cte|tkg}_step_{S}_manual_tensor_{N}.pt
         /capture_metadata.json                                              optional

Steps count from 1; the first encodes the context (prefill), the others generate tokens (decode). In which
order modules ran is not known. A device pads inputs to its bucket: compare with `rows`.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from dispatch_trace.compat.dump import DumpRank, DumpRecord, DumpSlot, make_header
from dispatch_trace.compat.order import in_path_order, natural
from dispatch_trace.schema import StepInfo
from dispatch_trace.store.reader import RankReader

NAME = "nxd-inference"
FORMAT = "NxD Inference capture"
_STEP = r"captured_tensors_(cte|ctx|tkg|tg)_step_(\d+)"
_MODULE = re.compile(_STEP + r"_module_(.+?)[._](input|output)s?(?:[._](\d+))?\.pt")
_MANUAL = re.compile(_STEP + r"_manual(?:_tensor)?[._](.+)\.pt")
_PHASES = {"cte": "prefill", "ctx": "prefill", "tkg": "decode", "tg": "decode"}
_METADATA = "capture_metadata.json"
_MAX_NAMED = 5

LOSSES = (
    "of each module the outputs of one call a step, by its layout",
    "in which order modules ran, and whether the dump was finished, is not known",
)


def detect(path: Path) -> str | None:
    """None: no such dump; "": one; else what is wrong with what looks like one."""
    if not path.is_dir():
        return None
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries]
    if any(_MODULE.fullmatch(name) or _MANUAL.fullmatch(name) for name in names):
        return ""
    if _METADATA in names:
        return f"{path} holds the {_METADATA} of an {FORMAT} but none of its tensors."
    return None


def open_ranks(path: Path) -> list[RankReader]:
    """Opens a dump.

    Raises:
      TraceFormatError: a file needs unpickling.
    """
    with os.scandir(path) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    modules: dict[tuple[int, str], list[_File]] = defaultdict(list)
    manual: dict[int, list[tuple[str, Path]]] = defaultdict(list)
    phases: dict[int, str] = {}
    problems: list[str] = []
    strangers: list[str] = []
    for entry in entries:
        match = _MODULE.fullmatch(entry.name)
        other = None if match else _MANUAL.fullmatch(entry.name)
        if entry.is_symlink():
            problems.append(f"{entry.name} is a link and was not followed")
        elif match is not None:
            step = int(match[2])
            modules[(step, match[3])].append(_File(Path(entry.path), match[4], match[5]))
            phases.setdefault(step, _PHASES[match[1]])
        elif other is not None:
            manual[int(other[2])].append((other[3], Path(entry.path)))
            phases.setdefault(int(other[2]), _PHASES[other[1]])
        elif entry.name != _METADATA:
            strangers.append(entry.name)
    numbers = {step: number for number, step in enumerate(sorted(phases))}
    records = _records(modules, manual, numbers)
    notices = list(LOSSES)
    if strangers:
        named = ", ".join(strangers[:_MAX_NAMED])
        notices.append(f"passed over, no part of the layout: {len(strangers)} entries ({named})")
    has_inputs = any(file.role == "input" for files in modules.values() for file in files)
    header = make_header(
        records,
        name=NAME,
        format=FORMAT,
        notices=notices,
        inputs=has_inputs,
        outputs="first",
        calls="last",
        root=False,
    )
    steps = [
        StepInfo(step=number, meta={"phase": phases[step], "capture_step": step})
        for step, number in numbers.items()
    ]
    return [
        DumpRank(path, 0, header=header, steps=steps, records=records, problems=problems, joins=has_inputs)
    ]


@dataclass(frozen=True, slots=True)
class _File:
    """A module's tensor: role "input" or "output", its place where there are several."""

    path: Path
    role: str
    index: str | None

    @property
    def slot(self) -> DumpSlot:
        from dispatch_trace.compat.tensor_files import PtTensor

        role = "in" if self.role == "input" else "out"
        name = (
            f"in[{self.index or 0}]"
            if role == "in"
            else "out"
            if self.index is None
            else f"out[{self.index}]"
        )
        return DumpSlot(name, role, PtTensor(self.path))


def _records(
    modules: dict[tuple[int, str], list[_File]],
    manual: dict[int, list[tuple[str, Path]]],
    numbers: dict[int, int],
) -> list[DumpRecord]:
    """Records numbered as if modules had run by their paths, inner ones first."""
    from dispatch_trace.compat.tensor_files import PtTensor

    found: list[DumpRecord] = []
    for step, number in numbers.items():
        counts: Counter[str] = Counter()
        for name, path in sorted(manual.get(step, ()), key=lambda item: natural(item[0])):
            shown = f"manual_tensor_{name}" if name.isdecimal() else name
            slot = DumpSlot("out", "out", PtTensor(path))
            found.append(
                DumpRecord(
                    kind="inline", seq=len(found), step=number, name=shown, n=counts[shown], slots=(slot,)
                )
            )
            counts[shown] += 1
        first = len(found)
        for module, opened in in_path_order(m for s, m in modules if s == step):
            slots = sorted((f.slot for f in modules[(step, module)]), key=lambda s: (s.role, s.name))
            found.append(
                DumpRecord(
                    kind="module",
                    seq=len(found),
                    step=number,
                    module=module,
                    call=0,
                    opened=first + opened,
                    slots=tuple(slots),
                )
            )
    return found
