"""Dumps of msprobe (mindstudio-probe), read as they are.

    {dump_path}/step{S}/{rank{R}|proc{pid}}/dump.json      what calls were given and returned, in order
                                           /stack.json     where they were called from
                                           /dump_tensor_data/{name}.input.0.pt    (task "tensor")

Modules (level L0, mix) become module records. Where there are none, calls of the Python API (L1) become
inline captures; they line up with those of another such dump and with ops of a trace (`align.api_calls`).
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispatch_trace.compat.dump import (
    DumpRank,
    DumpRecord,
    DumpSlot,
    Measured,
    Plain,
    make_header,
    of_one_world,
)
from dispatch_trace.compat.figures import UNKNOWN_SHAPE, moments
from dispatch_trace.compat.order import opened_by_path
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.schema import NO_CALL, StepInfo
from dispatch_trace.slot_names import slot_key
from dispatch_trace.store.reader import RankReader

NAME = "msprobe"
FORMAT = "msprobe dump"
_STEP = re.compile(r"step(\d+)")
_RANK = re.compile(r"rank(\d*)")
_PROCESS = re.compile(r"proc(\d+)")
_MODULE = re.compile(r"(?:Module|Cell)\.(?:(.+)\.)?([^.]+)\.forward\.(\d+)")
_API = re.compile(r"(.+)\.(\d+)\.forward")
_FRAME = re.compile(r"File (.+), line (\d+), in ")
_DATA = "dump_tensor_data"
_MAX_NAMED = 5

LOSSES = (
    "the root module's call is not in it, nor ops, by its layout",
    "outputs go by their order: names of nested ones may differ",
)


def detect(path: Path) -> str | None:
    """None: no such dump; "": one; else what is wrong with what looks like one."""
    files = [part.folder / "dump.json" for part in _parts(path)]
    if not files:
        return None
    for file in files:
        try:
            with file.open(encoding="utf-8") as opened:
                head = opened.read(4096)
        except (OSError, UnicodeDecodeError) as error:
            return f"{file} cannot be read: {error}."
        if '"task"' not in head or '"level"' not in head:
            return f"{file} is named like that of an {FORMAT} but names no task and level."
    return ""


def open_ranks(path: Path) -> list[RankReader]:
    """Opens a dump: all of it, one step, or one rank of one step.

    Raises:
      TraceFormatError: a `dump.json` is cut short, or several processes without a rank share the directory.
    """
    parts = _parts(path)
    unnumbered = sorted({part.folder.name for part in parts if part.rank is None})
    if len(unnumbered) > 1 or (unnumbered and any(part.rank is not None for part in parts)):
        raise TraceFormatError(
            f"{path} holds dumps of several runs: {', '.join(unnumbered[:_MAX_NAMED])} have no rank. "
            "Give one of them a directory of its own."
        )
    by_rank: dict[int, list[_Part]] = defaultdict(list)
    for part in parts:
        by_rank[part.rank or 0].append(part)
    ranks: list[RankReader] = [_Rank(path, rank, mine).open() for rank, mine in sorted(by_rank.items())]
    return of_one_world(ranks)


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank of one step.

    Attributes:
      folder: that holds its `dump.json`.
      step: its number.
      rank: None where the directory is named after a process.
    """

    folder: Path
    step: int
    rank: int | None


def _parts(path: Path) -> list[_Part]:
    if not path.is_dir():
        return []
    found = []
    for folder in (path, *_folders(path), *(inner for outer in _folders(path) for inner in _folders(outer))):
        if (folder / "dump.json").is_file():
            names = [*folder.relative_to(path).parts] or [folder.resolve().parent.name, folder.resolve().name]
            step = next((int(m[1]) for name in names if (m := _STEP.fullmatch(name))), 0)
            rank = next((int(m[1] or 0) for name in names if (m := _RANK.fullmatch(name))), None)
            found.append(_Part(folder, step, rank))
    return sorted(found, key=lambda part: (part.rank or 0, part.step, part.folder.name))


def _folders(path: Path) -> list[Path]:
    wanted = (_STEP, _RANK, _PROCESS)
    return sorted(
        entry
        for entry in path.iterdir()
        if any(p.fullmatch(entry.name) for p in wanted) and entry.is_dir() and not entry.is_symlink()
    )


class _Rank:
    def __init__(self, path: Path, rank: int, parts: list[_Part]) -> None:
        self._path = path
        self._number = rank
        self._parts = parts
        self._records: list[DumpRecord] = []
        self._problems: list[str] = []
        self._classes: dict[tuple[str, str], str] = {}
        self._params: set[tuple[str, str]] = set()
        self._left_out: Counter[str] = Counter()
        self._meta: dict[str, Any] = {}

    def open(self) -> DumpRank:
        for part in self._parts:
            self._read(part)
        notices = [*LOSSES, *(f"{count} {what}" for what, count in self._left_out.items())]
        has_modules = any(record.kind == "module" for record in self._records)
        header = make_header(
            self._records,
            name=NAME,
            format=FORMAT,
            notices=notices,
            rank=self._number,
            classes=self._classes,
            meta=self._meta,
            inputs=has_modules,
            params="tensors" if self._params else "none",
            root=False,
            api=not has_modules,
        )
        return DumpRank(
            self._path,
            self._number,
            header=header,
            steps=[StepInfo(step=part.step) for part in self._parts],
            records=self._records,
            problems=self._problems,
            joins=True,
        )

    def _read(self, part: _Part) -> None:
        file = part.folder / "dump.json"
        try:
            dump = json.loads(file.read_bytes())
            data = dump["data"]
            calls = [(name, entry) for name, entry in data.items() if isinstance(entry, dict)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TraceFormatError(
                f"{file} is no whole {FORMAT} ({type(error).__name__}: {error}): the run may have ended "
                "before it was written. Call stop() and step(), or dump again."
            ) from error
        self._meta = {key: dump.get(key) for key in ("task", "level", "framework")}
        frames = self._frames(part)
        modules = [(name, entry, m) for name, entry in calls if (m := _MODULE.fullmatch(name))]
        for name, _ in calls:
            if name.endswith("parameters_grad") or ".backward." in name or ".parameters_grad." in name:
                self._left_out["gradients were left out: backward runs are not read"] += 1
            elif not _MODULE.fullmatch(name) and modules:
                self._left_out["calls of the Python API were left out: modules stand for them"] += 1
        if not modules:
            self._read_api(part, calls, frames)
            return
        opened = opened_by_path([(part.step, match[1] or "") for _, _, match in modules])
        places: list[int] = []
        for (name, entry, match), first in zip(modules, opened, strict=True):
            module = match[1] or ""
            self._classes[("", module)] = match[2]
            start = len(self._records)
            self._read_params(part, module, entry.get("parameters") or {})
            seq = len(self._records)
            places.append(start)
            self._records.append(
                DumpRecord(
                    kind="module",
                    seq=seq,
                    step=part.step,
                    module=module,
                    call=int(match[3]),
                    opened=min(places[first], seq),
                    slots=tuple(self._slots(part, entry)),
                    source=frames.get(name),
                )
            )

    def _read_params(self, part: _Part, module: str, params: dict[str, Any]) -> None:
        """Parameters stand with every call; one record is enough."""
        for name, entry in params.items():
            if (module, name) in self._params or not _is_tensor(entry):
                continue
            self._params.add((module, name))
            self._records.append(
                DumpRecord(
                    kind="param",
                    seq=len(self._records),
                    step=part.step,
                    module=module,
                    name=name,
                    slots=(DumpSlot("out", "out", self._held(part, entry)),),
                )
            )

    def _read_api(
        self, part: _Part, calls: list[tuple[str, dict[str, Any]]], frames: dict[str, tuple[str, int]]
    ) -> None:
        for name, entry in calls:
            match = _API.fullmatch(name)
            outputs = [slot for slot in self._slots(part, entry) if slot.role == "out"]
            tensors = [slot for slot in outputs if not isinstance(slot.held, Plain)]
            if match is None or not tensors:
                continue
            self._records.append(
                DumpRecord(
                    kind="inline",
                    seq=len(self._records),
                    step=part.step,
                    call=NO_CALL,
                    name=match[1],
                    n=int(match[2]),
                    slots=(tensors[0],),
                    source=frames.get(name),
                )
            )

    # Slots --------------------------------------------------------------------------------------------

    def _slots(self, part: _Part, entry: dict[str, Any]) -> Iterator[DumpSlot]:
        for index, value in enumerate(entry.get("input_args") or ()):
            yield from self._nested(part, value, f"in[{index}]", "in")
        for name, value in (entry.get("input_kwargs") or {}).items():
            yield from self._nested(part, value, f"in.{name}", "in")
        outputs = entry.get("output") or []
        if len(outputs) == 1:
            yield from self._nested(part, outputs[0], "out", "out")
        else:
            for index, value in enumerate(outputs):
                yield from self._nested(part, value, f"out[{index}]", "out")

    def _nested(self, part: _Part, value: Any, name: str, role: str) -> Iterator[DumpSlot]:
        if _is_tensor(value):
            yield DumpSlot(name, role, self._held(part, value))
        elif value is None:
            yield DumpSlot(name, role, Plain())
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from self._nested(part, item, f"{name}[{index}]", role)
        elif isinstance(value, dict) and "type" in value and not any(map(_is_nested, value.values())):
            plain = value.get("value")
            known = isinstance(plain, (bool, int, float, str))
            yield DumpSlot(name, role, Plain(plain) if known else Plain(note=str(value["type"])[:200]))
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from self._nested(part, item, name + slot_key(key), role)

    def _held(self, part: _Part, entry: dict[str, Any]) -> Any:
        from dispatch_trace.compat.tensor_files import NpzTensor, PtTensor

        name = entry.get("data_name")
        if isinstance(name, str) and name != "-1":
            if Path(name).name != name or not name.endswith((".pt", ".npy")):
                self._problems.append(f"{name!r} is no file of {_DATA}")
            else:
                file = part.folder / _DATA / name
                return NpzTensor(file, "") if name.endswith(".npy") else PtTensor(file)
        shape = entry.get("shape")
        sound = isinstance(shape, list) and all(isinstance(size, int) for size in shape)
        figures = {"min": entry.get("Min"), "max": entry.get("Max"), "mean": entry.get("Mean")}
        stats = moments({**figures, "l2": entry.get("Norm")}, shape if sound else None)
        self._left_out["tensors without data: statistics only"] += 1
        dtype = str(entry.get("dtype", "")).removeprefix("torch.")
        return Measured(dtype, tuple(shape or ()) if sound else UNKNOWN_SHAPE, stats)

    def _frames(self, part: _Part) -> dict[str, tuple[str, int]]:
        """By call the first place outside torch and the tool that it was called from; {} where unknown."""
        try:
            stack = json.loads((part.folder / "stack.json").read_bytes())
            groups = [
                (value[0], value[1]) if value and isinstance(value[0], list) else ([key], value)
                for key, value in stack.items()
            ]
            return {
                name: place
                for names, frames in groups
                if (place := _place(frames)) is not None
                for name in names
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError, IndexError) as error:
            self._problems.append(
                f"{(part.folder / 'stack.json').relative_to(self._path)} cannot be read: {error}"
            )
            return {}


def _place(frames: list[str]) -> tuple[str, int] | None:
    for frame in frames:
        match = _FRAME.match(frame)
        if match and not any(part in ("torch", "msprobe") for part in Path(match[1]).parts):
            return match[1], int(match[2])
    return None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "Tensor" in str(value.get("type", "")) and "dtype" in value


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list))
