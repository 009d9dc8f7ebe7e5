"""Dumps of transformers' model debugger (`model_addition_debugger_context`), read as they are.

    {debug_path}/{Class}_debug_tree_FULL_TENSORS.json          calls within calls, with arguments
                /{Class}.{module}_inputs_args_0.safetensors    one tensor, "data" (use_repr=False)

The tree gives the order of the run and what each module was given. It keeps outputs of modules without
children only; the root's are in files that the tree does not mention, and are found by their names. With
use_repr=True tensors are printed with four digits: that is no data.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dispatch_trace.compat.dump import DumpRank, DumpRecord, DumpSlot, Measured, Plain, make_header
from dispatch_trace.compat.order import CallCounter
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.schema import StepInfo
from dispatch_trace.slot_names import slot_key
from dispatch_trace.store.reader import RankReader

NAME = "transformers-debug"
FORMAT = "transformers model debugger"
_SUFFIX = "_debug_tree_FULL_TENSORS.json"
_HEAD = re.compile(r'\s*\{\s*"module_path"\s*:\s*"')
_SHAPE = re.compile(r"torch\.Size\(\[([\d, ]*)\]\)")
_LAYER = re.compile(r"(.*)\.(\d+)")
_MAX_NAMED = 5
_PRINTED = "printed with four digits only (use_repr=True)"
_OVERWRITTEN = "overwritten by a later call"

LOSSES = (
    "outputs of modules with children are not in it, nor parameters and ops, by its layout",
    "one forward: an earlier one in the same directory was overwritten",
)


def detect(path: Path) -> str | None:
    """None: no such dump; "": one; else what is wrong with what looks like one."""
    trees = _trees(path)
    if not trees:
        return None
    if len(trees) > 1:
        names = ", ".join(tree.name for tree in trees[:_MAX_NAMED])
        return f"{path} holds {len(trees)} dumps of the {FORMAT}: {names}. Give one of these files."
    try:
        with trees[0].open(encoding="utf-8") as file:
            head = file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        return f"{trees[0]} cannot be read: {error}."
    if not _HEAD.match(head):
        return (
            f"{trees[0]} is named like a tree of the {FORMAT} but starts otherwise than with a module_path."
        )
    return ""


def open_ranks(path: Path) -> list[RankReader]:
    """Opens a dump: its directory, or the file of the tree.

    Raises:
      TraceFormatError: the tree is cut short or none.
    """
    tree = _trees(path)[0]
    try:
        root = json.loads(tree.read_bytes())
        return [_Tree(path, tree, root).rank()]
    except RecursionError:
        raise TraceFormatError(f"{tree} nests deeper than any model.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceFormatError(
            f"{tree} is no whole tree of the {FORMAT} ({error}): it was cut short or changed. Dump again."
        ) from error


def _trees(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(entry for entry in path.iterdir() if entry.name.endswith(_SUFFIX) and entry.is_file())
    return [path] if path.name.endswith(_SUFFIX) and path.is_file() else []


class _Tree:
    def __init__(self, path: Path, tree: Path, root: dict[str, Any]) -> None:
        self._path = path
        self._folder = tree.parent
        self._root = root
        self._class: str = root["module_path"]
        self._records: list[DumpRecord] = []
        self._problems: list[str] = []
        self._calls = CallCounter()
        self._later: Counter[str] = Counter(self._files(root))
        self._lost: Counter[str] = Counter()
        self._pruned: list[str] = []

    def rank(self) -> DumpRank:
        self._walk(self._root)
        if not any(slot.role for record in self._records for slot in record.slots):
            self._problems.append("holds no tensor")
        notices = [*LOSSES]
        if self._lost[_PRINTED]:
            notices.append(f"{self._lost[_PRINTED]} tensors without data: {_PRINTED}")
        if self._lost[_OVERWRITTEN]:
            notices.append(
                f"{self._lost[_OVERWRITTEN]} tensors without data: {_OVERWRITTEN} of the same module"
            )
        if self._pruned:
            named = ", ".join(self._pruned[:_MAX_NAMED])
            notices.append(f"layers between the first and the last were pruned (do_prune_layers): {named}")
        header = make_header(
            self._records,
            name=NAME,
            format=FORMAT,
            notices=notices,
            classes={("", ""): self._class},
            inputs=True,
        )
        return DumpRank(
            self._path,
            0,
            header=header,
            steps=[StepInfo(step=0)],
            records=self._records,
            problems=self._problems,
            joins=True,
        )

    # Calls --------------------------------------------------------------------------------------------

    def _walk(self, node: dict[str, Any]) -> None:
        opened = len(self._records)
        module = self._module(node["module_path"])
        given = node.get("inputs") or {}
        slots = [
            slot
            for index, value in enumerate(given.get("args") or ())
            for slot in self._slots(value, f"in[{index}]", "in")
        ]
        for name, value in (given.get("kwargs") or {}).items():
            slots += self._slots(value, f"in.{name}", "in")
        call = self._calls.next(module)
        children = node.get("children") or ()
        for child in children:
            self._walk(child)
        self._note_pruned([self._module(child["module_path"]) for child in children])
        if node.get("outputs") is not None:
            slots += self._slots(node["outputs"], "out", "out")
        elif node is self._root:
            slots += self._root_outputs()
        self._records.append(
            DumpRecord(
                kind="module",
                seq=len(self._records),
                step=0,
                module=module,
                call=call,
                opened=opened,
                slots=tuple(slots),
            )
        )

    def _module(self, path: str) -> str:
        if path == self._class:
            return ""
        if not path.startswith(f"{self._class}."):
            raise ValueError(f"module_path {path!r} is not beneath {self._class!r}")
        return path.removeprefix(f"{self._class}.")

    def _note_pruned(self, children: list[str]) -> None:
        """Layers are numbered: a gap between neighbours is what pruning left."""
        numbers: dict[str, list[int]] = {}
        for child in children:
            if match := _LAYER.fullmatch(child):
                numbers.setdefault(match[1], []).append(int(match[2]))
        for path, found in numbers.items():
            missing = sorted(set(range(min(found), max(found))) - set(found))
            self._pruned += [f"{path}.{number}" for number in missing]

    # Tensors ------------------------------------------------------------------------------------------

    def _slots(self, value: Any, name: str, role: str) -> Iterator[DumpSlot]:
        if _is_tensor(value):
            yield DumpSlot(name, role, self._held(value))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from self._slots(item, f"{name}[{index}]", role)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from self._slots(item, name + slot_key(key), role)
        else:
            yield DumpSlot(name, role, _plain(value))

    def _held(self, entry: dict[str, Any]) -> Any:
        from dispatch_trace.compat.tensor_files import SafetensorsTensor

        dtype = str(entry["dtype"]).removeprefix("torch.")
        match = _SHAPE.fullmatch(entry["shape"])
        if match is None:
            raise ValueError(f"shape {entry['shape']!r} is none")
        shape = tuple(int(size) for size in match[1].split(",") if size.strip())
        value = entry["value"]
        if not isinstance(value, str):
            self._lost[_PRINTED] += 1
            return Measured(dtype, shape, note=_PRINTED)
        self._later[value] -= 1
        if self._later[value]:
            self._lost[_OVERWRITTEN] += 1
            return Measured(dtype, shape, note=_OVERWRITTEN)
        return SafetensorsTensor(self._file(value), "data")

    def _file(self, value: str) -> Path:
        name = value.removeprefix("./")
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise ValueError(f"{value!r} is no file of this directory")
        return self._folder / name

    def _files(self, node: Any) -> Iterator[str]:
        """Names of the files of all tensors in a part of the tree, one for each mention."""
        if isinstance(node, dict):
            if _is_tensor(node):
                if isinstance(node["value"], str):
                    yield node["value"]
            else:
                for item in node.values():
                    yield from self._files(item)
        elif isinstance(node, list):
            for item in node:
                yield from self._files(item)

    def _root_outputs(self) -> Iterator[DumpSlot]:
        """The root's outputs: `{Class}_outputs_logits.safetensors` and the like."""
        from dispatch_trace.compat.tensor_files import SafetensorsTensor

        start = f"{self._class}_outputs"
        found = []
        for file in self._folder.glob("*.safetensors"):
            if file.stem == start or file.stem.startswith(f"{start}_"):
                found.append((file, file.stem.removeprefix(start).removeprefix("_")))
        for file, rest in sorted(found, key=lambda item: _natural(item[1])):
            yield DumpSlot(_output_name(rest), "out", SafetensorsTensor(file, "data"))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and {"shape", "dtype", "value"} <= value.keys()


def _plain(text: Any) -> Plain:
    """The value that a repr stands for, where that is None, a number or a string."""
    try:
        value = ast.literal_eval(text) if isinstance(text, str) and len(text) < 100 else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return Plain(note=str(text)[:200])
    return (
        Plain(value)
        if isinstance(value, (bool, int, float, str, type(None)))
        else Plain(note=str(text)[:200])
    )


def _output_name(rest: str) -> str:
    """The slot of a file: "logits" is out.logits, "hidden_states_3" out.hidden_states[3], "0" out[0]."""
    name, numbers = rest, ""
    while match := re.fullmatch(r"(.*?)_?(?<!\d)(\d+)", name):
        name, numbers = match[1], f"[{match[2]}]{numbers}"
    return f"out{slot_key(name) if name else ''}{numbers}"


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]
