#!/usr/bin/env python3
"""What reading and aligning cost as traces grow: time and memory, each in a process of its own.

    python tools/bench_scale.py [--records N ...] [--align N ...] [--keep DIR] [--json FILE]

The traces are those of a decoder that generates token by token. One step is recorded; the records of all
further steps go through the writer like the recorder's own: with sites, numbers, storages and producers of
their own, and with values that differ from step to step and by rounding from trace to trace. Rows:

* open: `dispatch_trace.open`;
* align: a stats-only `align` of two such traces, and whether it imported torch;
* read, compare: for two traces with so many MB of tensors each, what it takes to read all bytes of both from
  mapped files, and to compare them, each on all cores; minima of several runs, in turns.

Imports are part of the time of the first two. `--keep` leaves the traces in a folder, and takes those that
are there.

The JSON is a list of {row, records, seconds, cpu_s, peak_mb, torch, verdict, share}; of read and compare
{row, mb, dtype, seconds, cpu_s}.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import dispatch_trace as dt  # noqa: E402
from dispatch_trace.align.ahead import compare_ahead  # noqa: E402
from dispatch_trace.align.lineup import pair_traces  # noqa: E402
from dispatch_trace.align.pairs import Pairing  # noqa: E402

_PROGRAM = """
import json, sys, time
import dispatch_trace as dt
work = {"open": lambda path: dt.open(path), "align": lambda *paths: dt.align(*paths)}[sys.argv[1]]
start, began = time.perf_counter(), time.process_time()
found = work(*sys.argv[2:])
row = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - began}
if sys.argv[1] == "open":
    row["records"] = found.num_records
else:
    row |= {"records": len(found.pairs), "verdict": found.verdict, "share": found.coverage["share"]}
with open("/proc/self/status") as file:
    row["peak_mb"] = next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))
print(json.dumps(row | {"torch": "torch" in sys.modules}))
"""

_COMPARE = """
import json, sys
sys.path[:0] = ["tools"]
from bench_scale import compare
print(json.dumps(compare(*sys.argv[1:])))
"""


def build(path: Path, num_records: int, *, noise: float = 0.0) -> None:
    """Writes a stats-only trace of at least so many records.

    Args:
      noise: relative size of what is added to each value, in rounding errors.
    """
    import torch
    from bench_model import Transformer

    from dispatch_trace.schema import Content, RawRecord, RawSlot, StepInfo
    from dispatch_trace.store.writer import TraceWriter

    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        step = Path(folder) / "step"
        with torch.no_grad(), dt.record(step, Transformer(2, 16, 2).eval(), save="tensors") as recording:
            model = next(iter(recording._models.values()))
            model(torch.randint(0, 1000, (1, 4)))
        reader = dt.open(step).ranks[0]
        records = list(reader.records())
        values = {content.id: reader.tensor(content.id) for content in reader.contents()}
        header = {key: value for key, value in reader.header.items() if key != "type"}
    shared = {s.content for r in records if r.kind == "param" for s in r.slots}
    shift = 1 + max(record.seq for record in records)
    storages = 1 + max(slot.storage for record in records for slot in record.slots)
    params = {record.seq for record in records if record.kind == "param"}
    fixed = {slot.storage for record in records if record.kind == "param" for slot in record.slots}
    header["options"] = {**header["options"], "save": "stats"}
    generator = torch.Generator().manual_seed(1)
    writer = TraceWriter(path, header)
    written = number = 0
    known: dict[int, Content] = {}
    while written < num_records:
        contents = dict(known)
        for record in records:
            if number and record.seq in params:
                continue
            slots = []
            for old in record.slots:
                slot = RawSlot(old.name, old.role)
                for name in RawSlot.__slots__:
                    if name not in ("content", "producers"):
                        setattr(slot, name, getattr(old, name))
                if old.storage >= 0 and old.storage not in fixed:
                    slot.storage = old.storage + number * storages
                slot.producers = tuple(
                    (seq if seq in params else seq + number * shift, index) for seq, index in old.producers
                )
                if old.content >= 0:
                    content = contents.get(old.content)
                    if content is None:
                        value = values[old.content]
                        if old.content not in shared and value.is_floating_point():
                            value = value * (1 + 0.01 * number)
                            value += noise * 2**-24 * value * torch.randn(value.shape, generator=generator)
                        num_bytes = value.numel() * value.element_size()
                        content = Content(value, keep_data=False, summarise=True, num_bytes=num_bytes)
                        writer.reserve(num_bytes)
                        contents[old.content] = content
                        if old.content in shared:
                            known[old.content] = content
                    slot.content = content
                slots.append(slot)
            fields: dict[str, Any] = {
                name: copy.copy(getattr(record, name))
                for name in RawRecord.__slots__
                if name not in ("seq", "kind", "slots", "step", "args", "producer", "opened")
            }
            writer.put(
                RawRecord(
                    record.seq + number * shift,
                    record.kind,
                    step=number,
                    args=list(record.args),
                    slots=slots,
                    producer=record.producer + number * shift if record.producer >= 0 else -1,
                    opened=record.opened + number * shift,
                    **fields,
                )
            )
            written += 1
        writer.put_step(StepInfo(step=number, meta={}))
        number += 1
    writer.close()


def build_tensors(path: Path, megabytes: int, dtype: str, *, factor: float = 1.0) -> None:
    """Writes a trace that keeps so many MB of tensors, of 32 MB each."""
    import torch

    class Chain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(max(megabytes // 32, 1)):
                x = x * 1.01
            return x

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    model = Chain()
    with torch.no_grad(), dt.record(path, model, save="tensors"):
        model((torch.randn((32 << 20) // (4096 * kind.itemsize), 4096) * factor).to(kind))


def compare(ref: str, target: str) -> list[dict[str, Any]]:
    """Rows "read" and "compare", from one process: minima of runs in turns, each on files mapped anew."""
    best: dict[str, tuple[float, float]] = {}
    num_bytes = 0
    for _ in range(5):
        for row in ("read", "compare"):
            pairing = pair_traces(dt.open(ref).ranks[0], dt.open(target).ranks[0])
            data = _mapped_data(pairing)
            num_bytes = sum(each.size for each in data)
            start, began = time.perf_counter(), time.process_time()
            if row == "read":
                _read_all(data)
            else:
                compare_ahead(pairing)
            seconds, cpu_s = time.perf_counter() - start, time.process_time() - began
            known = best.get(row, (seconds, cpu_s))
            best[row] = min(seconds, known[0]), min(cpu_s, known[1])
    return [{"row": row, "mb": num_bytes / 1e6, "seconds": s, "cpu_s": c} for row, (s, c) in best.items()]


def _mapped_data(pairing: Pairing) -> list[Any]:
    """The bytes of all that two traces are compared by, as they lie in files."""
    contents = {(k.ref_content, k.target_content) for links in pairing.links.values() for k in links}
    pairs = [pairing.comparer.mapped(*key) for key in sorted(contents) if min(key) >= 0]
    return [side.data for pair in pairs if pair is not None for side in pair]


def _read_all(data: list[Any]) -> None:
    """Reads bytes once, by the fastest reduction of NumPy, on all cores."""
    cores = os.cpu_count() or 1
    parts = [d[start : start + (1 << 18)].view("<u8") for d in data for start in range(0, d.size, 1 << 18)]

    def read(mine: list[Any]) -> None:
        for part in mine:
            np.bitwise_or.reduce(part)

    threads = [threading.Thread(target=read, args=(parts[i::cores],)) for i in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(program: str, *arguments: str | Path) -> Any:
    """What a program prints as JSON in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description="What reading and aligning cost as traces grow.", epilog="See the head of this file."
    )
    parser.add_argument("--records", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--align", type=int, nargs="*", default=[10_000, 30_000, 100_000])
    parser.add_argument("--compare", type=int, default=512, help="MB of tensors a trace; 0: no such row")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="of these tensors")
    parser.add_argument("--keep", type=Path, help="build the traces there and leave them")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dispatch_trace_bench_") as made:
        folder = options.keep or Path(made)
        for count in sorted({*options.records, *options.align}):
            paths = [folder / f"ref-{count}", folder / f"target-{count}"]
            for path, noise in zip(paths, (0.0, 1.0), strict=True):
                if not path.exists() and (noise == 0.0 or count in options.align):
                    build(path, count, noise=noise)
            if count in options.records:
                rows.append(
                    {"row": "open", **min((run(_PROGRAM, "open", paths[0]) for _ in range(3)), key=_seconds)}
                )
                print(line(rows[-1]), flush=True)
            if count in options.align:
                rows.append({"row": "align", **run(_PROGRAM, "align", *paths)})
                print(line(rows[-1]), flush=True)
        for dtype in options.dtypes if options.compare else ():
            paths = [folder / f"{name}-{options.compare}-{dtype}" for name in ("ref", "target")]
            for path, factor in zip(paths, (1.0, 1.0 + 2**-7), strict=True):
                if not path.exists():
                    build_tensors(path, options.compare, dtype, factor=factor)
            both = [row | {"dtype": dtype} for row in run(_COMPARE, *paths)]
            rows += both
            print(compared(*both), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def _seconds(row: dict[str, Any]) -> float:
    return float(row["seconds"])


def compared(read: dict[str, Any], compare: dict[str, Any]) -> str:
    rates = [row["mb"] / row["seconds"] / 1e3 for row in (read, compare)]
    return (
        f"compare  {compare['mb']:>9.0f} MB {compare['dtype']:9} {compare['seconds']:>8.3f} s "
        f"({compare['cpu_s']:.3f} s CPU) {rates[1]:.1f} GB/s; reading alone {read['seconds']:.3f} s "
        f"({read['cpu_s']:.3f} s CPU) {rates[0]:.1f} GB/s: {rates[1] / rates[0]:.2f} of it, "
        f"{read['cpu_s'] / compare['cpu_s']:.2f} by CPU"
    )


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['row']:8} {row['records']:>9} records {row['seconds']:>8.3f} s "
        f"({row['cpu_s']:.3f} s CPU) "
        f"{1e6 * row['seconds'] / row['records']:>8.2f} us/record {row['peak_mb']:>7.0f} MB peak "
        f"{'with' if row['torch'] else 'without'} torch"
        + (f"  {row['verdict']} {row['share']:.0%}" if "verdict" in row else "")
    )


if __name__ == "__main__":
    sys.exit(main())
