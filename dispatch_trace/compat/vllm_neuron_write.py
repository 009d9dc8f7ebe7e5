"""Writes the module outputs and inline captures of a trace in the vLLM-Neuron capture layout.

The layout holds less than a trace; whatever finds no place in it is counted and returned, never dropped in
silence. Guarantees: the directory appears under its name only when it is whole; no name in the trace leads
out of it; steps keep their order (file times ascend with it).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dispatch_trace.compat.vllm_neuron_names import (
    META_SUFFIX,
    SUBDIRECTORIES,
    Phase,
    inline_name,
    quote,
    step_name,
)
from dispatch_trace.errors import CaptureError, ConfigError, NotExecutableError, TraceExistsError
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

TensorOf: TypeAlias = Callable[[RankReader, StoredRecord, StoredSlot], torch.Tensor]
_StepKey: TypeAlias = tuple[str, int]  # model, step
_STEP_NS = 1_000_000
_MAX_NAMED = 5


@dataclass(slots=True)
class Written:
    """What became of a trace.

    Attributes:
      num_tensors, num_steps: written.
      left_out: in words, what the layout has no place for.
    """

    num_tensors: int = 0
    num_steps: int = 0
    left_out: list[str] = field(default_factory=list)


def write_dump(ranks: Sequence[RankReader], out: Path, *, tensor_of: TensorOf) -> Written:
    """Writes a trace as a dump.

    Args:
      ranks: of the trace.
      out: the directory to make.
      tensor_of: the value of a slot; raises NotExecutableError where the trace does not hold it.
    Raises:
      TraceExistsError: `out` is there already.
      NotExecutableError: the trace holds no data of any module output or inline capture.
      CaptureError: `out` cannot be written.
    """
    check_free(out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        partial.mkdir(parents=True)
        written = _Writer(ranks, partial, tensor_of).write()
        if not written.num_tensors:
            raise NotExecutableError(
                "the trace holds no data of module outputs or inline captures, only what was measured "
                "of them. Record with save='tensors'."
            )
        partial.rename(out)
    except OSError as error:
        raise CaptureError(f"cannot write to {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def check_free(out: Path) -> None:
    """Raises TraceExistsError where something (but an empty directory) stands at `out`."""
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise TraceExistsError(f"{out} exists already. Give another path.")


class _Writer:
    def __init__(self, ranks: Sequence[RankReader], out: Path, tensor_of: TensorOf) -> None:
        self._ranks = ranks
        self._out = out
        self._tensor_of = tensor_of
        self._written = Written()
        self._counts: Counter[str] = Counter()
        self._repeated: Counter[str] = Counter()
        self._clashes: list[str] = []
        self._models = self._model_directories()
        self._start_ns = time.time_ns()

    def write(self) -> Written:
        by_dp: dict[int, list[tuple[int, RankReader]]] = defaultdict(list)
        for reader in self._ranks:
            dp, tp = coordinates(reader)
            if any(tp == other for other, _ in by_dp[dp]):
                raise ConfigError(f"two ranks of the trace are tp rank {tp} of dp {dp}.")
            by_dp[dp].append((tp, reader))
        for dp, readers in sorted(by_dp.items()):
            directories = self._make_steps(dp, [reader for _, reader in readers])
            for tp, reader in readers:
                self._write_rank(reader, tp, directories)
        self._written.left_out += self._losses()
        return self._written

    # Steps ------------------------------------------------------------------------------------------

    def _model_directories(self) -> dict[str, str]:
        """The subdirectory for each model; "" is the dump itself."""
        names = dict.fromkeys(step.model for reader in self._ranks for step in reader.steps)
        found = {name: quote(name) for name in names if name}
        if "" not in names and not set(names) & set(SUBDIRECTORIES) and names:
            # Without the target at the top, or one of the usual names, nobody would take it for a dump.
            first = next(iter(names))
            found[first] = ""
            self._written.left_out.append(f"the name of the model {first!r}: it stands at the top")
        return {"": "", **found}

    def _make_steps(self, dp: int, readers: Iterable[RankReader]) -> dict[_StepKey, Path]:
        """Makes the directory of every step, with its metadata."""
        metas: dict[_StepKey, dict[str, Any]] = {}
        for reader in readers:
            for step in reader.steps:
                if step.step >= 0:
                    metas.setdefault((step.model, step.step), step.meta)
        found: dict[_StepKey, Path] = {}
        counters: Counter[tuple[str, Phase, int]] = Counter()
        for key in sorted(metas):
            phase, requests, positions = self._described(metas[key])
            series = (key[0], phase, len(positions))
            name = step_name(phase, len(positions), counters[series])
            counters[series] += 1
            path = found[key] = self._out / self._models[key[0]] / f"dp{dp}" / name
            path.mkdir(parents=True)
            file = path / (name + META_SUFFIX)
            meta = {"req_ids": requests, "positions": positions, "dp_rank": dp}
            file.write_text(json.dumps(meta, indent=2), encoding="utf-8")
            # The counter runs for each phase and size: between them, only file times keep the order.
            time_ns = self._start_ns + self._written.num_steps * _STEP_NS
            os.utime(file, ns=(time_ns, time_ns))
            self._written.num_steps += 1
        return found

    def _described(self, meta: Mapping[str, Any]) -> tuple[Phase, list[str], list[Any]]:
        requests, positions = meta.get("req_ids"), meta.get("positions")
        phase: Phase = "decode" if meta.get("phase") == "decode" else "prefill"
        if meta.get("phase") != phase:
            self._counts["steps without a phase, written as prefill"] += 1
        if positions is None:
            self._counts["steps without positions, written as of size 0: they pair by order only"] += 1
            positions = []
        requests = [requests] if isinstance(requests, (str, int)) else list(requests or ())
        positions = [positions] if isinstance(positions, int) else list(positions)
        return phase, [str(request) for request in requests], positions

    # Tensors ----------------------------------------------------------------------------------------

    def _write_rank(self, reader: RankReader, tp: int, directories: Mapping[_StepKey, Path]) -> None:
        last: dict[tuple[_StepKey, str], StoredRecord] = {}
        inline: Counter[tuple[_StepKey, str]] = Counter()
        names: set[tuple[_StepKey, str]] = set()
        for record in reader.records():
            key = (record.model, record.step)
            if (
                record.kind not in ("module", "inline")
                or record.grad_phase != "fwd"
                or key not in directories
            ):
                self._counts[_WHAT.get(record.kind, "module records of backward or outside steps")] += 1
                continue
            if record.kind == "module":
                if (key, record.module) in last:
                    self._repeated[record.module] += 1
                last[(key, record.module)] = record
                self._counts["inputs of modules"] += sum(
                    slot.role == "in" and slot.is_tensor for slot in record.slots
                )
                continue
            name = inline_name(record.name, inline[(key, record.name)])
            inline[(key, record.name)] += 1
            if (key, name) in names:
                self._clashes.append(record.name)
                continue
            names.add((key, name))
            self._write_first(reader, record, directories[key] / name, tp)
        for (key, module), record in last.items():
            # The root has no name: its file stands in the directory of the step itself.
            self._write_first(reader, record, directories[key] / (quote(module) if module else ""), tp)

    def _write_first(self, reader: RankReader, record: StoredRecord, directory: Path, tp: int) -> None:
        outputs = [slot for slot in record.slots if slot.role == "out" and slot.is_tensor]
        if not outputs:
            self._counts["module records without a tensor"] += 1
            return
        self._counts["further outputs of modules"] += len(outputs) - 1
        try:
            tensor = self._tensor_of(reader, record, outputs[0])
        except NotExecutableError:
            self._counts["tensors of which the trace holds no data"] += 1
            return
        directory.mkdir(exist_ok=True)
        if tensor.layout is torch.strided and not tensor.is_nested:
            tensor = tensor.resolve_conj().resolve_neg().clone()  # a view would take all its storage along
        torch.save(tensor, directory / f"rank{tp}.pt")
        self._written.num_tensors += 1

    def _losses(self) -> list[str]:
        found = [f"{count} {what}" for what, count in self._counts.items() if count]
        if self._repeated:
            named = [f"{name or '(root)'} ({n})" for name, n in self._repeated.most_common(_MAX_NAMED)]
            more = ", ..." if len(self._repeated) > _MAX_NAMED else ""
            found.append(
                f"{self._repeated.total()} earlier calls of modules called more than once in a step: "
                f"the layout keeps the last ({', '.join(named)}{more})"
            )
        if self._clashes:
            found.append(
                f"{len(self._clashes)} inline captures whose name is that of another one's repetition: "
                f"{', '.join(dict.fromkeys(self._clashes[:_MAX_NAMED]))}"
            )
        return found


_WHAT = {"op": "op records", "param": "parameters", "inline": "inline captures outside steps"}


def coordinates(reader: RankReader) -> tuple[int, int]:
    """(dp, tp) of a rank: as its header says, else tp is the rank itself."""
    found = reader.header.get("coordinates") or {}
    dp, tp = found.get("dp", 0), found.get("tp", reader.rank)
    return (dp, tp) if isinstance(dp, int) and isinstance(tp, int) else (0, reader.rank)
