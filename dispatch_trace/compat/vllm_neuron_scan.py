"""Reads the directories of a dump in the vLLM-Neuron capture layout: which files there are, what is amiss.

Guarantees: no link is followed, nothing but metadata is read, and whatever is passed over is listed.
"""

from __future__ import annotations

import json
import os
import stat
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dispatch_trace.compat.vllm_neuron_names import (
    DP_DIRECTORY,
    META_SUFFIX,
    RANK_FILE,
    SUBDIRECTORIES,
    Phase,
    parse_step,
    unquote,
)
from dispatch_trace.compat.vllm_neuron_steps import Order, StepDirectory, in_order


@dataclass(slots=True)
class Replica:
    """One dp replica of one model.

    Attributes:
      model: "" for what stands at the top.
      dp: its number.
      order: its steps.
      tensors: for each step, (directory name, tp rank, file).
      problems, strangers: what is wrong, and what is no part of the layout.
    """

    model: str
    dp: int
    order: Order
    tensors: list[list[tuple[str, int, Path]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)


def replica_directories(root: Path, problems: list[str]) -> list[tuple[str, int, Path]]:
    """(model, dp, directory) of every replica; the top-level model first, named ""."""
    found = [("", dp, path) for dp, path in _dp_directories(root, problems)]
    entries = [entry for entry in _entries(root) if not DP_DIRECTORY.fullmatch(entry.name)]
    found += _models([entry for entry in entries if entry.name in SUBDIRECTORIES], problems)
    if not found:
        return []
    # Any other directory above a dp0/ is a model of a dump, but makes none: it may be a dump of its own.
    return found + _models([entry for entry in entries if entry.name not in SUBDIRECTORIES], problems)


def _models(entries: list[os.DirEntry[str]], problems: list[str]) -> list[tuple[str, int, Path]]:
    found: list[tuple[str, int, Path]] = []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            below = _dp_directories(Path(entry.path), problems)
            found += [(unquote(entry.name), dp, path) for dp, path in below]
        elif entry.is_symlink():
            problems.append(f"{entry.name} is a link and was not followed")
    return found


def _dp_directories(parent: Path, problems: list[str]) -> list[tuple[int, Path]]:
    found = []
    try:
        entries = _entries(parent)
    except OSError as error:
        problems.append(f"{parent.name} cannot be read: {error.strerror}")
        return []
    for entry in entries:
        match = DP_DIRECTORY.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            found.append((int(match[1]), Path(entry.path)))
        elif match and entry.is_symlink():
            problems.append(f"{entry.name} is a link and was not followed")
    return sorted(found)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return sorted(entries, key=lambda entry: entry.name)


class Scan:
    """Reads the directories of one replica."""

    def __init__(self, root: Path, model: str, dp: int, path: Path) -> None:
        self._root = root
        self._path = path
        self._replica = Replica(model, dp, Order([], 0, contradictory=False))

    def replica(self) -> Replica:
        found = self._replica
        steps = []
        for entry in _entries(self._path):
            named = parse_step(entry.name)
            if entry.is_symlink():
                found.problems.append(f"{self._shown(entry.path)} is a link and was not followed")
            elif named is None or not entry.is_dir(follow_symlinks=False):
                if not entry.name.endswith(META_SUFFIX):
                    found.strangers.append(self._shown(entry.path))
            else:
                steps.append(self._step(Path(entry.path), *named))
        if not steps:
            found.problems.append(f"{self._shown(self._path)} holds no step (prefill_s8_0, decode_b1_0)")
        found.order = in_order(steps)
        if found.order.contradictory:
            found.problems.append(
                f"{self._shown(self._path)}: counters and positions of the steps contradict each other; "
                "they are in the order of the counters and file times"
            )
        found.tensors = [self._tensors(step.path) for step in found.order.steps]
        self._check_ranks()
        return found

    def _shown(self, path: str | Path) -> str:
        return str(Path(path).relative_to(self._root))

    def _step(self, path: Path, phase: Phase, size: int, counter: int) -> StepDirectory:
        meta, time_ns = self._meta(path)
        if len(meta.get("positions", ())) != size and "positions" in meta:
            self._replica.problems.append(
                f"{self._shown(path)} has {len(meta['positions'])} positions; its name says {size}"
            )
        return StepDirectory(path=path, phase=phase, size=size, counter=counter, meta=meta, time_ns=time_ns)

    def _meta(self, path: Path) -> tuple[dict[str, Any], int]:
        """The metadata of a step, and when it was written."""
        name = path.name + META_SUFFIX
        for file in (path / name, path.parent / name):
            try:
                state = file.lstat()
                if not stat.S_ISREG(state.st_mode):
                    self._replica.problems.append(f"{self._shown(file)} is no regular file")
                    continue
                return self._checked(file, json.loads(file.read_bytes())), state.st_mtime_ns
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError) as error:
                self._replica.problems.append(f"{self._shown(file)} cannot be read: {error}")
                return {}, path.lstat().st_mtime_ns
        self._replica.problems.append(f"{self._shown(path / name)} is missing")
        return {}, path.lstat().st_mtime_ns

    def _checked(self, file: Path, meta: Any) -> dict[str, Any]:
        """What of the metadata is of its type; the rest is a problem."""
        if not isinstance(meta, dict):
            self._replica.problems.append(f"{self._shown(file)} holds a {type(meta).__name__}, not a dict")
            return {}
        kept = dict(meta)
        for key, is_sound in _META_CHECKS.items():
            if key not in meta or not is_sound(meta[key]):
                self._replica.problems.append(f"{self._shown(file)}: {key} is missing or not of its type")
                kept.pop(key, None)
        return kept

    def _tensors(self, step: Path) -> list[tuple[str, int, Path]]:
        """Every tensor file of a step; files beside the modules' directories are the root module's."""
        found = self._files(step, "", is_step=True)
        for entry in _entries(step):
            if entry.is_dir(follow_symlinks=False):
                files = self._files(Path(entry.path), entry.name, is_step=False)
                if not files:
                    self._replica.problems.append(f"{self._shown(entry.path)} holds no tensor")
                found += files
        if not found:
            self._replica.problems.append(f"{self._shown(step)} holds no module")
        return found

    def _files(self, directory: Path, name: str, *, is_step: bool) -> list[tuple[str, int, Path]]:
        found: dict[int, tuple[str, int, Path]] = {}
        for entry in _entries(directory):
            match = RANK_FILE.fullmatch(entry.name)
            if entry.is_symlink():
                self._replica.problems.append(f"{self._shown(entry.path)} is a link and was not followed")
            elif match and entry.is_file(follow_symlinks=False) and int(match[1]) not in found:
                found[int(match[1])] = (name, int(match[1]), Path(entry.path))
            elif not (is_step and (entry.is_dir() or entry.name == directory.name + META_SUFFIX)):
                self._replica.strangers.append(self._shown(entry.path))
        return list(found.values())

    def _check_ranks(self) -> None:
        """A tp rank that a replica has must have every module that another one has."""
        replica = self._replica
        tps = {tp for step in replica.tensors for _, tp, _ in step}
        for step, tensors in zip(replica.order.steps, replica.tensors, strict=True):
            present: dict[str, set[int]] = defaultdict(set)
            for name, tp, _ in tensors:
                present[name].add(tp)
            for name, have in present.items():
                replica.problems += [
                    f"{self._shown(step.path / name / f'rank{tp}.pt')} is missing"
                    for tp in sorted(tps - have)
                ]


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_integers(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    if value and all(isinstance(row, list) for row in value):
        return all(_is_integers(row) for row in value)
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


_META_CHECKS: dict[str, Callable[[Any], bool]] = {
    "req_ids": _is_strings,
    "positions": _is_integers,
    "dp_rank": lambda value: isinstance(value, int) and not isinstance(value, bool),
}
