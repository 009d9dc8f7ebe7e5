"""Directories of SGLang's dumper, read as they are.

    {dir}/{exp_name}/step=0___rank=0___dump_index=7___name={name}___….pt     {"value": …, "meta": {…}}

`dump_index` is the order of the run. Of `non_intrusive__{module}.inputs.0` and `.output` (mode "all") come
module records with inputs; `param__{name}` are parameters; any other name is an inline capture, its further
tags in brackets. Files of older releases (`forward_pass_id=`, a bare tensor) are read as well.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dispatch_trace.compat.dump import DumpRank, DumpRecord, DumpSlot, Plain, make_header, of_one_world
from dispatch_trace.compat.order import CallCounter, is_beneath
from dispatch_trace.schema import StepInfo
from dispatch_trace.slot_names import slot_key
from dispatch_trace.store.reader import RankReader

NAME = "sglang"
FORMAT = "SGLang dumper directory"
_PREFIX = "non_intrusive__"
_PARAMETER = "param__"
_SITE = re.compile(r"(?:(.+)\.)?(?:(output)|inputs\.([^.]+))(?:\.([^.]+))?")
_STEPS = ("step", "forward_pass_id")
_OWN_TAGS = frozenset({"name", "rank", "dump_index", "recompute_status", *_STEPS})
_RANK_TAGS = frozenset({"pp_rank", "tp_rank", "cp_rank", "ep_rank", "etp_rank"})
_MAX_NAMED = 5

LOSSES = ("ops are not in it, and whether the dump was finished is not known, by its layout",)


def detect(path: Path) -> str | None:
    """None: no such dump; "": one; else what is wrong with what looks like one."""
    if not path.is_dir():
        return None
    folders = _folders(path)
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders[:_MAX_NAMED])
        return f"{path} holds {len(folders)} dumps of SGLang's dumper: {names}. Give one of them."
    return "" if folders else None


def open_ranks(path: Path) -> list[RankReader]:
    """Opens a dump: the directory of one experiment, or the one around it.

    Raises:
      TraceFormatError: a file needs unpickling of something else than tensors and plain values.
    """
    folder = _folders(path)[0]
    by_rank: dict[int, list[_File]] = defaultdict(list)
    problems: list[str] = []
    for entry in _entries(folder):
        tags = _tags(entry.name)
        if tags is None:
            continue
        if entry.is_symlink() or not entry.is_file(follow_symlinks=False):
            problems.append(f"{entry.name} is no regular file and was not followed")
            continue
        rank, index = tags.get("rank", "0"), tags.get("dump_index", "")
        step = next((tags[name] for name in _STEPS if name in tags), "0")
        if not (rank.isdecimal() and (step.isdecimal() or step == "None")):
            problems.append(f"{entry.name}: step or rank is no number")
            continue
        number = int(step) if step.isdecimal() else -1
        place = int(index) if index.isdecimal() else entry.stat().st_mtime_ns
        by_rank[int(rank)].append(_File(Path(entry.path), tags, number, place, bool(index)))
    ranks: list[RankReader] = [
        _Rank(
            path, rank, sorted(files, key=lambda f: (f.index, f.path.name)), problems if not done else []
        ).open()
        for done, (rank, files) in enumerate(sorted(by_rank.items()))
    ]
    return of_one_world(ranks)


@dataclass(frozen=True, slots=True)
class _File:
    """One file of a dump.

    Attributes:
      tags: by name, from the file's name.
      step: its number, -1 where the tag says None.
      index: its place in the run.
      is_ordered: the place is known from the name, not from the file's time.
    """

    path: Path
    tags: dict[str, str]
    step: int
    index: int
    is_ordered: bool


def _entries(path: Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _folders(path: Path) -> list[Path]:
    """Directories that hold files of the dumper: the path itself, else those in it."""
    if _has_files(path):
        return [path]
    return [
        Path(entry.path)
        for entry in _entries(path)
        if entry.is_dir(follow_symlinks=False) and _has_files(Path(entry.path))
    ]


def _has_files(path: Path) -> bool:
    try:
        with os.scandir(path) as entries:
            return any(_tags(entry.name) is not None for entry in entries)
    except OSError:
        return False


def _tags(name: str) -> dict[str, str] | None:
    """The tags in a file name, None where it is none of the dumper's."""
    if not name.endswith(".pt") or "___" not in name:
        return None
    pairs = [part.partition("=") for part in name.removesuffix(".pt").split("___")]
    tags = {key: value for key, equals, value in pairs if equals}
    return tags if "name" in tags and any(step in tags for step in _STEPS) else None


@dataclass(slots=True)
class _Open:
    """A call of a module that was entered: its record gets its number when it returns."""

    module: str
    opened: int
    slots: list[DumpSlot] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return {slot.name for slot in self.slots}


class _Rank:
    def __init__(self, path: Path, rank: int, files: list[_File], problems: Iterable[str]) -> None:
        self._path = path
        self._number = rank
        self._files = files
        self._problems = list(problems)
        self._records: list[DumpRecord] = []
        self._open: list[_Open] = []
        self._returning: _Open | None = None  # a call whose outputs come one file after the other
        self._step = 0
        self._seq = 0
        self._calls = CallCounter()
        self._inline = CallCounter()
        self._params: set[str] = set()
        # Of a module whose outputs are no tensors only the inputs are there: nothing says when it returned.
        self._return: set[str] = set()
        self._left_out: Counter[str] = Counter()

    def open(self) -> DumpRank:
        for file in self._files:
            match = _SITE.fullmatch(file.tags["name"].removeprefix(_PREFIX))
            if match is not None and match[2]:
                self._return.add(match[1] or "")
        for file in self._files:
            if file.step != self._step:
                self._close_all()
                self._step = file.step
            self._take(file)
        self._close_all()
        notices = [*LOSSES, *(f"{count} {what}" for what, count in self._left_out.items())]
        if not all(file.is_ordered for file in self._files):
            notices.append("the order of the run is known from file times only, which copies change")
        header = make_header(
            self._records,
            name=NAME,
            format=FORMAT,
            notices=notices,
            rank=self._number,
            inputs=any(slot.role == "in" for record in self._records for slot in record.slots),
            params="tensors" if self._params else "none",
        )
        return DumpRank(
            self._path,
            self._number,
            header=header,
            steps=[StepInfo(step=step) for step in sorted({file.step for file in self._files})],
            records=self._records,
            problems=self._problems,
            joins=True,
        )

    def _take(self, file: _File) -> None:
        name = file.tags["name"]
        if name.startswith("grad__"):
            self._left_out["gradients were left out"] += 1
        elif file.tags.get("recompute_status") == "recompute":
            self._left_out["values computed again for gradients were left out"] += 1
        elif name.startswith(_PARAMETER):
            self._take_parameter(file, name.removeprefix(_PARAMETER))
        elif name.startswith(_PREFIX) and (match := _SITE.fullmatch(name.removeprefix(_PREFIX))):
            self._take_site(file, match[1] or "", match[3], match[4])
        else:
            self._close_returning()
            tags = ", ".join(
                f"{key}={value}" for key, value in file.tags.items() if key not in _OWN_TAGS | _RANK_TAGS
            )
            shown = f"{name}[{tags}]" if tags else name
            n = self._inline.next((file.step, shown))
            slots = tuple(self._slots(file, "out", "out"))[:1]
            self._add(DumpRecord(kind="inline", seq=self._seq, step=file.step, name=shown, n=n, slots=slots))

    def _take_parameter(self, file: _File, path: str) -> None:
        if path in self._params:
            self._left_out["parameters of later dumps were left out"] += 1
            return
        self._params.add(path)
        module, _, name = path.rpartition(".")
        slots = tuple(self._slots(file, "out", "out"))[:1]
        self._add(
            DumpRecord(kind="param", seq=self._seq, step=file.step, module=module, name=name, slots=slots)
        )

    def _take_site(self, file: _File, module: str, argument: str | None, key: str | None) -> None:
        tail = "" if key is None else f"[{key}]" if key.isdecimal() else slot_key(key)
        if argument is not None:
            self._close_returning()
            while self._open and self._is_over(self._open[-1].module, module):
                self._close(self._open.pop())
            name = (f"in[{argument}]" if argument.isdecimal() else f"in{slot_key(argument)}") + tail
            current = self._open[-1] if self._open else None
            if current is None or current.module != module or name in current.names:
                current = _Open(module, self._seq)
                self._open.append(current)
            current.slots += self._slots(file, name, "in")
            return
        name = f"out{tail}"
        if self._returning is None or self._returning.module != module or name in self._returning.names:
            self._close_returning()
            self._returning = self._left(module)
        self._returning.slots += self._slots(file, name, "out")

    def _is_over(self, module: str, entered: str) -> bool:
        """Whether a call that never returns in the dump must have, since one beside it is entered."""
        return module not in self._return and module != entered and not is_beneath(entered, module)

    def _left(self, module: str) -> _Open:
        """The innermost open call of a module; what was entered within and never returned goes with it."""
        for place in range(len(self._open) - 1, -1, -1):
            if self._open[place].module == module:
                call = self._open[place]
                for inner in reversed(self._open[place + 1 :]):
                    self._close(inner)
                del self._open[place:]
                return call
        return _Open(module, self._seq)

    def _close_returning(self) -> None:
        if self._returning is not None:
            self._close(self._returning)
            self._returning = None

    def _close_all(self) -> None:
        self._close_returning()
        for call in reversed(self._open):
            self._close(call)
        self._open.clear()

    def _close(self, call: _Open) -> None:
        number = self._calls.next((self._step, call.module))
        self._add(
            DumpRecord(
                kind="module",
                seq=self._seq,
                step=self._step,
                module=call.module,
                call=number,
                opened=call.opened,
                slots=tuple(call.slots),
            )
        )

    def _add(self, record: DumpRecord) -> None:
        self._records.append(record)
        self._seq += 1

    def _slots(self, file: _File, name: str, role: str) -> list[DumpSlot]:
        """The tensors of a file's value, in a slot of this name."""
        import torch

        from dispatch_trace.compat.tensor_files import PtTensor, Unreadable, try_load_object
        from dispatch_trace.nested import flatten

        loaded = try_load_object(file.path)
        if isinstance(loaded, Unreadable):
            self._problems.append(f"{file.path.name} {loaded.why}")
            return []
        key: tuple[str | int, ...] = ()
        if isinstance(loaded, dict) and loaded.keys() == {"value", "meta"}:
            loaded, key = loaded["value"], ("value",)
        if isinstance(loaded, torch.Tensor):
            return [DumpSlot(name, role, PtTensor(file.path, key))]
        if isinstance(loaded, (list, tuple)):
            return [
                DumpSlot(f"{name}[{index}]", role, PtTensor(file.path, (*key, index)))
                for index, item in enumerate(loaded)
                if isinstance(item, torch.Tensor)
            ]
        return [DumpSlot(where, role, _plain(value)) for where, value in flatten(loaded, name)]


def _plain(value: Any) -> Plain:
    known = value is None or isinstance(value, (bool, int, float, str))
    return Plain(value) if known else Plain(note=type(value).__name__)
