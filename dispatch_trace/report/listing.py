"""What `show` and `verify` print: a trace's header, its module tree, its records, one record in full.

Works on the store's readers, so it needs no torch. Module names, op names and notes come from the trace
and are printed without control characters: a terminal obeys those.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from dispatch_trace.errors import NoMatchError, PatternError
from dispatch_trace.metrics import derived
from dispatch_trace.patterns import select_modules
from dispatch_trace.report.table import (
    columns,
    module_name,
    number,
    plain,
    plural,
    shorten,
    size,
)
from dispatch_trace.report.tree import Node, tree_lines
from dispatch_trace.schema import NO_CALL, STATISTICS, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

MAX_STEPS = 4
MAX_PROBLEMS = 20


# --- the whole trace --------------------------------------------------------------------------------


def overview(
    ranks: Sequence[RankReader], *, path: str, depth: int | None = None, steps: set[int] | None = None
) -> str:
    """Header, steps and module tree.

    Args:
      ranks: all ranks of the trace; the tree is the first one's.
      path: as the user wrote it.
      depth: levels of the tree below the root; None: as many as fit on a screen.
      steps: count only records of these steps.
    """
    first = ranks[0]
    roots, kinds = _module_trees(first, steps)
    lines = [f"{path}  {_state(ranks)}"]
    lines += columns(_header_rows(ranks, kinds), indent="  ")
    lines += _step_lines(first)
    for model, root in roots.items():
        title = f"modules of {plain(model)!r}" if model else "modules"
        lines += [f"{title}  (calls, ops in the module's own body)"]
        lines += tree_lines(root, depth)
    lines += [f"one record: dispatch-trace show {path} --record SEQ; a module's: --module PATTERN"]
    return "\n".join(lines)


def _state(ranks: Sequence[RankReader]) -> str:
    for rank in ranks:
        if not rank.closed:
            return "NOT CLOSED: readable up to its last whole frame"
        if not rank.complete:
            return "NOT COMPLETE"
    return "complete"


def _header_rows(ranks: Sequence[RankReader], kinds: Counter[str]) -> list[list[str]]:
    header = ranks[0].header
    options = header.get("options") or {}
    models = header.get("models") or {}
    started = header.get("start_time_s")
    about = [
        [
            "made by",
            f"dispatch_trace {header.get('package_version', '?')}, torch {header.get('torch_version', '?')}, "
            f"schema {header.get('schema_version', '?')}",
        ],
        [
            "ran on",
            f"{header.get('device', '?')}, {plural(int(header.get('num_threads') or 0), 'thread')}, "
            f"{header.get('cpu_capability', '?')}, lane {header.get('lane', '?')}, "
            f"gradients {'on' if header.get('grad_enabled') else 'off'}",
        ],
    ]
    if "format" in header:  # another tool's dump knows nothing of these
        about = [["made by", str((header.get("meta") or {}).get("format", header["format"]))]]
        about += [["lacks", str(notice)] for notice in header.get("notices") or ()]
    rows = [
        *about,
        [
            "options",
            ", ".join(
                f"{key}={_option(options[key])}" for key in ("level", "save", "params") if key in options
            ),
        ],
        ["holds", f"{_held(kinds)}; {size(sum(rank.num_bytes for rank in ranks))} on disk"],
    ]
    if started:
        rows.insert(0, ["started", f"{datetime.datetime.fromtimestamp(started):%Y-%m-%d %H:%M:%S}"])
    rows += [
        [f"model {name}" if name else "model", str(model.get("class", "?"))] for name, model in models.items()
    ]
    if header.get("meta"):
        rows.append(["meta", ", ".join(f"{key}={value}" for key, value in header["meta"].items())])
    if len(ranks) > 1:
        rows.append(
            ["ranks", f"{len(ranks)} of {header.get('world_size', '?')}; shown: rank {ranks[0].rank}"]
        )
    for rank in ranks:
        rows += _end_rows(rank)
    return [[plain(label), shorten(plain(text), 86)] for label, text in rows]


def _option(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _end_rows(rank: RankReader) -> list[list[str]]:
    """What was lost, and why: it must be seen."""
    rows = []
    end = rank.end or {}
    for reason, count in (end.get("dropped") or {}).items():
        rows.append(["dropped", f"{count}: {reason}"])
    for reason in end.get("perturbed") or ():
        rows.append(["perturbed", str(reason)])
    if end.get("aborted"):
        rows.append(["aborted", "the program raised while recording"])
    rows += [["problem", problem] for problem in rank.problems[:MAX_PROBLEMS]]
    return rows


def _held(kinds: Counter[str]) -> str:
    total = sum(kinds.values())
    parts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    return f"{plural(total, 'record')} ({parts})" if parts else plural(total, "record")


def _step_lines(rank: RankReader) -> list[str]:
    lines = [f"steps  {len(rank.steps)}"]
    for step in rank.steps[:MAX_STEPS]:
        meta = ", ".join(f"{key}={value}" for key, value in step.meta.items())
        name = f"{step.step} {step.model}".rstrip()
        lines.append(shorten(plain(f"  {name}  {meta}".rstrip()), 100))
    if len(rank.steps) > MAX_STEPS:
        lines.append(f"  ... and {len(rank.steps) - MAX_STEPS} more")
    return lines


def _module_trees(rank: RankReader, steps: set[int] | None) -> tuple[dict[str, Node], Counter[str]]:
    """The module tree of every root model, and how many records of each kind there are."""
    roots: dict[str, Node] = {}
    for row in rank.header.get("modules") or ():
        node = roots.setdefault(row["model"], Node()).at(row["path"])
        node.kind = row["class"].rpartition(".")[2]
    kinds: Counter[str] = Counter()
    for record in rank.records():
        if steps is not None and record.step not in steps:
            continue
        kinds[record.kind] += 1
        node = roots.setdefault(record.model, Node()).at(record.module)
        if record.kind == "module":
            node.calls += 1
        elif record.kind == "op":
            node.ops += 1
    return roots or {"": Node()}, kinds


# --- records ----------------------------------------------------------------------------------------


def records(
    ranks: Sequence[RankReader],
    *,
    module: str | None = None,
    op: str | None = None,
    kind: str | None = None,
    steps: set[int] | None = None,
    top: int = 30,
) -> str:
    """The records that match every condition given, one a line.

    Args:
      module: a pattern over module paths as in `record(select=)`; "" is the root.
      op: a regular expression on base names, with or without their namespace.
      kind: "op", "module", "inline" or "param".
      steps: only these.
      top: how many are listed; the rest is counted.

    Raises:
      PatternError, NoMatchError: a pattern is broken, or nothing matches.
    """
    wanted = _wanted_modules(ranks, module)
    pattern = _compiled(op)
    rows = [["seq", "step", "kind", "module", "what", "dtype", "shape", "mean", "rms", "nan"]]
    found = 0
    for rank in ranks:
        for record in rank.records(**({"kind": kind} if kind else {})):
            if steps is not None and record.step not in steps:
                continue
            if wanted is not None and record.module not in wanted:
                continue
            if pattern is not None and not _op_matches(pattern, record):
                continue
            found += 1
            if found <= top:
                rows.append(_record_row(rank, record, many=len(ranks) > 1))
    if not found:
        raise NoMatchError(
            f"no record of {sum(rank.num_records for rank in ranks)} matches "
            f"module={module!r}, op={op!r}, kind={kind!r}, steps={sorted(steps) if steps else 'all'}."
        )
    lines = columns(rows, right=frozenset({0, 1, 7, 8, 9}))
    if found > top:
        lines.append(f"... and {found - top} more (--top {found})")
    return "\n".join(lines)


def _wanted_modules(ranks: Sequence[RankReader], pattern: str | None) -> frozenset[str] | None:
    if pattern is None:
        return None
    if pattern == "":
        return frozenset({""})
    paths = {row["path"]: None for rank in ranks for row in rank.header.get("modules") or ()}
    paths.update((record.module, None) for rank in ranks for record in rank.records(kind="module"))
    return frozenset(select_modules([pattern], list(paths), option="--module"))


def _compiled(op: str | None) -> re.Pattern[str] | None:
    if op is None:
        return None
    try:
        return re.compile(op)
    except re.error as error:
        raise PatternError(f"--op {op!r} is no regular expression: {error}.") from error


def _op_matches(pattern: re.Pattern[str], record: StoredRecord) -> bool:
    short = record.op.partition(".")[2]
    return bool(record.op) and (pattern.fullmatch(record.op) or pattern.fullmatch(short)) is not None


def _record_row(rank: RankReader, record: StoredRecord, *, many: bool) -> list[str]:
    slot = next((slot for slot in record.slots if slot.role != "in" and slot.is_tensor), None)
    stats = stats_of(rank, slot.content) if slot is not None else {}
    seq = f"{rank.rank}:{record.seq}" if many else str(record.seq)
    module = shorten(module_name(plain(record.module)), 40)
    if record.call > 0:
        module += f"#{record.call}"
    return [
        seq,
        str(record.step),
        record.kind,
        module,
        shorten(plain(what(record)), 34),
        slot.dtype if slot is not None else "-",
        _shape(slot) if slot is not None else "-",
        number(stats.get("mean")),
        number(stats.get("rms")),
        number(stats.get("nan")),
    ]


def what(record: StoredRecord) -> str:
    """The part of a record's name that follows its module: `aten.mm #2`, `return`, `weight`."""
    if record.kind == "op":
        name = f"{record.op} #{record.n}" if record.n else record.op
    else:
        name = record.name or "return"
    phase = "" if record.grad_phase == "fwd" else f" ({record.grad_phase})"
    return name + phase


def record(ranks: Sequence[RankReader], seq: int, *, rank: int | None = None) -> str:
    """One record in full.

    Args:
      seq: its sequence number.
      rank: its rank; None: the first.

    Raises:
      NoMatchError: there is no such record or rank.
    """
    reader = ranks[0] if rank is None else next((r for r in ranks if r.rank == rank), None)
    if reader is None:
        raise NoMatchError(f"--rank {rank}: the trace has the ranks {[r.rank for r in ranks]}.")
    try:
        found = reader.record(seq)
    except KeyError:
        raise NoMatchError(
            f"--record {seq}: rank {reader.rank} holds {plural(reader.num_records, 'record')}, none of this "
            "number. `dispatch-trace show TRACE --module PATTERN` lists them."
        ) from None
    call = "" if found.call == NO_CALL else f", call {found.call}"
    lines = [plain(f"record {seq}  {found.kind}  {module_name(found.module)}  {what(found)}")]
    rows = [["site", f"step {found.step}, rank {found.rank}{call}, {found.grad_phase}, n {found.n}"]]
    if found.model:
        rows.append(["model", repr(found.model)])
    if found.overload:
        rows.append(["op", found.overload])
    if found.source is not None:
        rows.append(["source", f"{found.source[0]}:{found.source[1]}"])
    flags = [name for name in ("light", "random") if getattr(found, name)]
    if flags:
        rows.append(["flags", ", ".join(flags)])
    if found.kind == "module" and found.producer >= 0:
        rows.append(["output from", f"record {found.producer}"])
    if found.note:
        rows.append(["note", found.note])
    lines += [plain(line) for line in columns(rows, indent="  ")]
    if found.args:
        lines.append("arguments")
        named = [
            [plain(name), shorten(plain(argument(value, found.slots)), 80)] for name, value in found.args
        ]
        lines += columns(named, indent="  ")
    for slot in found.slots:
        lines += _slot_lines(reader, slot)
    return "\n".join(lines)


def argument(value: Any, slots: Sequence[StoredSlot]) -> str:
    """An encoded argument for people: a tensor is shown as its slot."""
    if isinstance(value, dict) and len(value) == 1:
        key, inner = next(iter(value.items()))
        if key == "ref" and isinstance(inner, int) and 0 <= inner < len(slots):
            return slots[inner].name
        if key == "item":
            return f"{inner[0]} (from .item() of record {inner[1]})"
        if key == "dict":
            return "{" + ", ".join(f"{k}: {argument(v, slots)}" for k, v in inner.items()) + "}"
        if key == "complex":
            return str(complex(*inner))
        return str(inner)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(argument(item, slots) for item in value) + "]"
    return repr(value)


def _slot_lines(rank: RankReader, slot: StoredSlot) -> list[str]:
    if not slot.is_tensor:
        return [plain(f"{slot.name}  {argument(slot.value, ())}  {slot.note}".rstrip())]
    facts = [slot.dtype, _shape(slot)]
    if slot.strides is not None:
        facts.append(f"strides {list(slot.strides)}")
    if slot.offset:
        facts.append(f"offset {slot.offset}")
    if slot.device != "cpu":
        facts.append(slot.device)
    if slot.layout != "strided":
        facts.append(slot.layout)
    if slot.storage >= 0:
        facts.append(f"storage {slot.storage}")
    if slot.role == "in" and slot.leaf:
        facts.append("leaf")
    if slot.uninitialised:
        facts.append("reads memory that nothing wrote")
    if slot.producers:
        facts.append("from record " + ", ".join(str(seq) for seq, _ in slot.producers[:4]))
    lines = [plain(f"{slot.name}  {'  '.join(facts)}")]
    stats = stats_of(rank, slot.content)
    shown = {name: value for name, value in stats.items() if value is not None}
    if shown:
        cells = [f"{name} {number(value)}" for name, value in shown.items()]
        lines += [f"    {'  '.join(chunk)}" for chunk in _chunks(cells, 8)]
    if slot.content >= 0:
        content = rank.content(slot.content)
        kept = "data kept" if content.has_data else "no data"
        lines.append(f"    {kept}, content {content.id}" + (f", hash {content.hash}" if content.hash else ""))
    elif slot.note:
        lines.append(plain(f"    no data: {slot.note}"))
    return lines


def stats_of(rank: RankReader, content: int) -> dict[str, int | float | None]:
    """The statistics of a content, stored and derived; empty when there are none."""
    if content < 0:
        return {}
    stats = rank.content(content).stats
    if not stats:
        return {}
    named = {name: stats.get(name) for name in STATISTICS}
    return {**named, **derived(named)}


def _shape(slot: StoredSlot) -> str:
    return "[" + ", ".join(str(length) for length in slot.shape) + "]"


def _chunks(cells: Sequence[str], length: int) -> Iterator[list[str]]:
    iterator = iter(cells)
    while chunk := list(islice(iterator, length)):
        yield chunk


# --- verify -----------------------------------------------------------------------------------------


def verification(ranks: Sequence[RankReader], problems: Sequence[str], *, path: str) -> str:
    """What `verify` found.

    Args:
      problems: what is wrong, in words.
      path: as the user wrote it.
    """
    held = f"{plural(len(ranks), 'rank')}, {plural(sum(rank.num_records for rank in ranks), 'record')}"
    if problems:
        lines = [f"{path}: NOT SOUND, {plural(len(problems), 'problem')}  ({held} can be read)"]
        lines += [plain(f"  {problem}") for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            lines.append(f"  ... and {len(problems) - MAX_PROBLEMS} more")
        return "\n".join(lines)
    lines = [f"{path}: sound  ({held})"]
    for rank in ranks:
        lines += [plain(f"  {label}: {text}") for label, text in _end_rows(rank)]
    return "\n".join(lines)
