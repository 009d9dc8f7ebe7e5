#!/usr/bin/env python3
"""How fast tensors reach the disk, against plain sequential writing of as many bytes on the same disk.

    python tools/bench_store.py [--mb N] [--tensor-mb N] [--pending-mb N] [--repeats N] [--dir D] [--json F]

Each round writes the same bytes three ways, in turn, each ended by a flush to the disk: `plain` (one file,
written in order), `data` (through a trace writer, hashed twice and deduplicated) and `data+stats` (with
statistics and sketches besides). Minima are compared, and medians besides, since a disk is rarely alone;
`waits` is what a program that hands the tensors over without a pause spends in its own thread, copies
included, and `grown` how much memory the process took at most beyond what it had. `--pending-mb` bounds the
latter (`max_pending_bytes`).

The JSON is a list of {row, mb, seconds, mb_per_s, ratio, ratio_median, waits_s, grown_mb}.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dispatch_trace import kernel
from dispatch_trace.schema import Content, RawRecord, RawSlot
from dispatch_trace.store.writer import TraceWriter


def resident_mb() -> float:
    """Memory of this process that is in use now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def write_plain(path: Path, source: torch.Tensor, count: int) -> tuple[float, float]:
    """Seconds in all, and in the thread that hands the data over: the same here."""
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for number in range(count):
            source[0] = number
            file.write(memoryview(source.numpy()).cast("B"))
        os.fsync(file.fileno())
    spent = time.perf_counter() - start
    return spent, spent


def write_trace(
    path: Path, source: torch.Tensor, count: int, *, stats: bool, pending: int
) -> tuple[float, float, float]:
    """As `write_plain`, and the most memory that was taken."""
    num_bytes = source.numel() * source.element_size()
    before = most = resident_mb()
    start = time.perf_counter()
    writer = TraceWriter(path, {}, max_pending_bytes=pending)
    for number in range(count):
        writer.reserve(num_bytes)
        source[0] = number
        content = Content(source.clone(), keep_data=True, summarise=stats, num_bytes=num_bytes)
        slot = RawSlot("out", "out", dtype="float32", shape=tuple(source.shape), content=content)
        writer.put(RawRecord(number, "op", step=0, op="aten.add", overload="aten.add.Tensor", slots=[slot]))
        del content, slot
        most = max(most, resident_mb())
    handed_over = time.perf_counter() - start
    writer.close()
    return time.perf_counter() - start, handed_over, most - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="See the head of this file.")
    parser.add_argument("--mb", type=int, default=1024, help="how much to write (default: 1024)")
    parser.add_argument("--tensor-mb", type=int, default=4, help="size of one tensor (default: 4)")
    parser.add_argument("--pending-mb", type=int, default=512, help="max_pending_bytes (default: 512)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary directory)")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    kernel.find(wait=True)
    torch.set_num_threads(1)
    source = torch.randn(options.tensor_mb << 18)
    count = max(1, options.mb // options.tensor_mb)
    folder = Path(tempfile.mkdtemp(prefix="dispatch_trace_bench_", dir=options.dir))
    found: dict[str, list[tuple[float, ...]]] = {"plain": [], "data": [], "data+stats": []}
    try:
        for _ in range(options.repeats):
            for row, results in found.items():
                path = folder / "written"
                if row == "plain":
                    results.append((*write_plain(path, source, count), 0.0))
                    path.unlink()
                else:
                    stats, pending = row == "data+stats", options.pending_mb << 20
                    results.append(write_trace(path, source, count, stats=stats, pending=pending))
                    shutil.rmtree(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    plain, usual = min(found["plain"])[0], median(result[0] for result in found["plain"])
    mb = count * options.tensor_mb
    rows: list[dict[str, Any]] = [
        {
            "row": row,
            "mb": mb,
            "seconds": min(results)[0],
            "mb_per_s": mb / min(results)[0],
            "ratio": plain / min(results)[0],
            "ratio_median": usual / median(result[0] for result in results),
            "waits_s": min(result[1] for result in results),
            "grown_mb": max(result[2] for result in results),
        }
        for row, results in found.items()
    ]
    print(
        f"{'row':12} {'MB':>6} {'s':>8} {'MB/s':>8} {'of plain':>9} {'of medians':>11} {'waits s':>8} "
        f"{'grown MB':>9}"
    )
    for r in rows:
        print(
            f"{r['row']:12} {r['mb']:>6} {r['seconds']:>8.2f} {r['mb_per_s']:>8.1f} {r['ratio']:>9.2f} "
            f"{r['ratio_median']:>11.2f} {r['waits_s']:>8.2f} {r['grown_mb']:>9.0f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
