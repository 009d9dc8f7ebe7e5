"""Logs of torch's DebugMode (`print(mode.debug_string())`), read as far as they suffice.

      [nn.Mod] Net.head                                                 record_nn_module=True
        aten::addmm(t$1: f32[8], t$0: f32[2, 4], t$2: f32[4, 8])  ->  t$3: f32[2, 8]  # {'hash': 3.2}

Ops in order with their arguments, shapes and dtypes; modules with record_nn_module=True; who read whose
result with record_ids=True; of log_tensor_hashes() the L1 norm, which is no hash: unequal tensors may share
it. There are no values, so such a log can show another program, and never that two runs match.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dispatch_trace.compat.dump import DumpRank, DumpRecord, DumpSlot, Measured, make_header
from dispatch_trace.compat.figures import moments
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.schema import NO_CALL, StepInfo
from dispatch_trace.store.reader import RankReader

NAME = "debug-mode"
FORMAT = "DebugMode log"
_MODULE = re.compile(r"\[nn\.Mod(?: \([^)]*\))?\] (\S+)")
_OP = re.compile(r"(\w+)::(\w+)(?:\.(\w+))?\((.*)")
_SOURCE = re.compile(r"# File: (.+?):(\d+) in ")
_TENSOR = re.compile(r"(?:dt|ft|t)(?:\$(\d+))?: (\w+)\[([^\]]*)\](?:\{.*\})?(?:\| .*)?")
_ARROW = "  ->  "
_LOG = "  # {"
_HEAD = re.compile(r"\s*(?:\[nn\.Mod|aten::\w+[.(]|# File: .+ in .+, code: |torch\.[\w.]+\(.*  ->  )")
_MAX_NAMED = 5

LOSSES = ("no values: shapes, arguments and at most an L1 norm of each tensor, by its layout",)


def detect(path: Path) -> str | None:
    """None: no such log; "": one."""
    if not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8") as file:
            head = file.read(1 << 16)
    except (OSError, UnicodeDecodeError):
        return None
    first = next((line for line in head.splitlines() if line.strip()), "")
    return "" if _HEAD.match(first) and ("aten::" in head or "[nn.Mod" in head) else None


def open_ranks(path: Path) -> list[RankReader]:
    """Opens a log.

    Raises:
      TraceFormatError: it holds no op.
    """
    log = _Log(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            log.read(number, line.rstrip("\n"))
    log.close_modules(-1)
    if not any(record.kind == "op" for record in log.records):
        raise TraceFormatError(f"{path} looks like a {FORMAT} but holds no op.")
    notices = list(LOSSES)
    if not log.has_ids:
        notices.append("who read whose result is not known: log with record_ids=True")
    if not any(record.kind == "module" for record in log.records):
        notices.append("modules are not known: log with record_nn_module=True")
    header = make_header(
        log.records,
        name=NAME,
        format=FORMAT,
        notices=notices,
        classes={("", ""): log.root} if log.root else None,
        level="op",
        save="stats",
        stats=["abs_sum"],
        sketch=False,
        inputs=log.has_ids,
        select=[],
    )
    steps = [StepInfo(step=step) for step in range(-1 if log.ran_outside else 0, log.step + 1)]
    return [DumpRank(path, 0, header=header, steps=steps, records=log.records, problems=log.problems)]


@dataclass(slots=True)
class _Open:
    """A module that is entered and not yet left."""

    indent: int
    path: str
    call: int
    opened: int
    counts: Counter[str] = field(default_factory=Counter)


class _Log:
    def __init__(self, path: Path) -> None:
        self.records: list[DumpRecord] = []
        self.problems: list[str] = []
        self.root = ""
        self.step = -1
        self.has_ids = False
        self.ran_outside = False
        self._path = path
        self._stack: list[_Open] = []
        self._calls: Counter[str] = Counter()
        self._outside: Counter[tuple[int, str]] = Counter()
        self._made: dict[str, tuple[int, int]] = {}
        self._source: tuple[str, int] | None = None
        self._dtypes: dict[str, str] = {}

    def read(self, number: int, line: str) -> None:
        text = line.lstrip()
        indent = len(line) - len(text)
        if match := _SOURCE.match(text):
            self._source = (match[1], int(match[2]))
        elif match := _MODULE.match(text):
            self.close_modules(indent)
            self._enter(indent, match[1])
        elif match := _OP.match(text):
            self.close_modules(indent)
            try:
                self._op(match, text)
            except (ValueError, SyntaxError, IndexError, KeyError) as error:
                self.problems.append(f"line {number} cannot be read ({error})")

    def close_modules(self, indent: int) -> None:
        """Leaves the modules that a line of this indentation stands outside of."""
        while self._stack and self._stack[-1].indent >= indent:
            module = self._stack.pop()
            self.records.append(
                DumpRecord(
                    kind="module",
                    seq=len(self.records),
                    step=self.step,
                    module=module.path,
                    call=module.call,
                    opened=module.opened,
                )
            )

    def _enter(self, indent: int, name: str) -> None:
        """Names start with the class of the root, which is no part of the path."""
        if not self._stack:
            self.step += 1
            self._calls.clear()
            self.root = self.root or name
        path = "" if name == self.root else name.removeprefix(f"{self.root}.")
        self._stack.append(_Open(indent, path, self._calls[path], len(self.records)))
        self._calls[path] += 1

    def _op(self, match: re.Match[str], text: str) -> None:
        call, _, rest = text.partition(_ARROW)
        if not rest and not text.rstrip().endswith(")"):
            raise ValueError("it is cut short")
        results, _, log = rest.partition(_LOG)
        call = call.partition(_LOG)[0]
        given = _split(call[call.index("(") + 1 : call.rindex(")")])
        name = match[2][:-1] if match[2].endswith("_") and not match[2].endswith("__") else match[2]
        op, overload = f"{match[1]}.{name}", f"{match[1]}.{match[2]}.{match[3] or 'default'}"
        where = self._stack[-1] if self._stack else None
        step = self.step
        if where is None:
            self.ran_outside = self.ran_outside or step < 0
            n = self._outside[(step, op)]
            self._outside[(step, op)] += 1
        else:
            n = where.counts[op]
            where.counts[op] += 1
        seq = len(self.records)
        slots, args = self._inputs(given, overload)
        for index, (result, norm) in enumerate(_results(results, log)):
            slot = self._tensor(result, f"out[{index}]" if results.startswith("(") else "out", "out", norm)
            if slot is not None:
                found = _TENSOR.fullmatch(result)
                if found and found[1]:
                    self._made[found[1]] = (seq, len(slots))
                slots.append(slot)
        self.records.append(
            DumpRecord(
                kind="op",
                seq=seq,
                step=step,
                module="" if where is None else where.path,
                call=NO_CALL if where is None else where.call,
                op=op,
                overload=overload,
                n=n,
                args=tuple(args),
                slots=tuple(slots),
                source=self._source,
            )
        )

    def _inputs(self, given: list[str], overload: str) -> tuple[list[DumpSlot], list[tuple[str, Any]]]:
        names = _argument_names(overload)
        slots: list[DumpSlot] = []
        args: list[tuple[str, Any]] = []
        for index, text in enumerate(given):
            name, equals, value = text.partition("=")
            if not (equals and name.isidentifier()):
                name, value = names[index] if index < len(names) else f"arg{index}", text
            items = _list_items(value)
            if items is not None and any(_TENSOR.fullmatch(item) for item in items):
                refs = []
                for place, item in enumerate(items):
                    slot = self._tensor(item, f"in.{name}[{place}]", "in", None)
                    if slot is not None:
                        refs.append({"ref": len(slots)})
                        slots.append(slot)
                args.append((name, refs))
                continue
            slot = self._tensor(value, f"in.{name}", "in", None)
            if slot is None:
                args.append((name, _plain(value)))
            else:
                args.append((name, {"ref": len(slots)}))
                slots.append(slot)
        return slots, args

    def _tensor(self, text: str, name: str, role: str, norm: float | None) -> DumpSlot | None:
        match = _TENSOR.fullmatch(text)
        if match is None:
            return None
        self.has_ids = self.has_ids or match[1] is not None
        shape = tuple(
            int(size) if size.strip().isdecimal() else -1 for size in match[3].split(",") if size.strip()
        )
        dtype = self._dtype(match[2])
        stats = {} if norm is None or -1 in shape else moments({"abs_sum": norm}, shape)
        made = self._made.get(match[1] or "") if role == "in" else None
        return DumpSlot(name, role, Measured(dtype, shape, stats), producers=() if made is None else (made,))

    def _dtype(self, short: str) -> str:
        if not self._dtypes:
            from torch.utils._dtype_abbrs import dtype_abbrs

            self._dtypes = {value: str(key).removeprefix("torch.") for key, value in dtype_abbrs.items()}
        return self._dtypes.get(short, short)


def _split(text: str) -> list[str]:
    """The parts of an argument list, cut at its own commas."""
    parts, depth, start, quote = [], 0, 0, ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _list_items(text: str) -> list[str] | None:
    if not (text.startswith(("[", "(")) and text.endswith(("]", ")"))):
        return None
    return [item.strip("'\"") for item in _split(text[1:-1])]


def _results(text: str, log: str) -> list[tuple[str, float | None]]:
    """What an op returned and its L1 norm, where that was logged."""
    items = _list_items(text.strip())
    found = [text.strip()] if items is None else items
    norms: Any = None
    if log:
        try:
            norms = ast.literal_eval("{" + log).get("hash")
        except (ValueError, SyntaxError):  # nan and inf have no literal
            norms = None
    many = norms if isinstance(norms, tuple) else (norms,)
    return [
        (item, many[i] if i < len(many) and isinstance(many[i], float) else None)
        for i, item in enumerate(found)
    ]


def _plain(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return re.sub(r" at 0x[0-9a-f]+", "", text)  # an address says nothing
    return list(value) if isinstance(value, tuple) else value


def _argument_names(overload: str) -> list[str]:
    """Names of an op's arguments, by its schema; [] for an op that this torch does not have."""
    import torch

    namespace, name, variant = overload.split(".")
    try:
        schema = getattr(getattr(getattr(torch.ops, namespace), name), variant)._schema
    except (AttributeError, RuntimeError):
        return []
    return [argument.name for argument in schema.arguments]
