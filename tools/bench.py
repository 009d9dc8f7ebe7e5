#!/usr/bin/env python3
"""What recording costs, as ratios to the same run without a recorder, side by side in one process.

    python tools/bench.py [--size tiny|mid|big|deep] [--threads N] [--pass fwd|fwd+bwd] [--row ROW]
                          [--repeats N] [--json FILE]

Rows: nothing, an empty `TorchDispatchMode`, torch's DebugMode without and with hashes, and this recorder at
each `level` and `save`; then one module selected, and steps that are not recorded. `meta` is the cheapest: no
producers, no source lines. Each option may be given again; by default every size, pass, and one thread
and all of them. tools/bench_peers.py runs the same with other tools beside it.

Every repetition runs each row once, in turn, so that drift of a shared machine hits all alike. A row is
timed over several calls of the model inside one recording: `ms_*` is what the program waited for; `drained`
adds the wait until everything is on disk; `cpu` is processor time of all threads, that wait included.

The JSON is a list of {size, threads, pass, row, ms_min, ms_median, ratio_min, ratio_median, us_per_op,
drained_ratio_min, cpu_ratio, num_ops}; `us_per_op` is the least time added to each op that reaches the
dispatcher, `cpu_ratio` the least of processor time over the least without a recorder.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_model import PASSES, SELECTED, SIZES, build, count_ops

import dispatch_trace as dt
from dispatch_trace import extension, kernel


class EmptyMode(TorchDispatchMode):
    """The floor: everything that goes through Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def debug_mode(hashes: bool) -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    with DebugMode() as mode:
        if hashes:
            with mode.log_tensor_hashes():
                yield
        else:
            yield


def recording(**options: Any) -> Callable[[nn.Module, Path], Any]:
    return lambda model, path: dt.record(path, model, **options)


Context = Callable[[nn.Module, Path], Any]
ROWS: dict[str, Context] = {
    "none": lambda model, path: contextlib.nullcontext(),
    "empty_mode": lambda model, path: EmptyMode(),
    "debug_mode": lambda model, path: debug_mode(False),
    "debug_mode_hash": lambda model, path: debug_mode(True),
    "meta": recording(save="meta"),
    "stats": recording(save="stats"),
    "leaves": recording(save="leaves"),
    "tensors": recording(save="tensors"),
    "module_meta": recording(save="meta", level="module"),
    "module_stats": recording(save="stats", level="module"),
    "module_tensors": recording(save="tensors", level="module"),
    "selected_meta": recording(save="meta", select=SELECTED),
    "selected_stats": recording(save="stats", select=SELECTED),
    "selected_module": recording(save="stats", level="module", select=SELECTED),
    "other_steps": recording(save="stats", steps={0}),  # those after the first
}
DEEP_ROWS = (
    "none",
    "empty_mode",
    "meta",
    "stats",
    *(row for row in ROWS if row.startswith(("sel", "other"))),
)


@dataclass
class Times:
    """Seconds of each call, and means over a recording's calls until everything was on disk."""

    calls: list[float] = field(default_factory=list)
    drained: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def measure(context: Any, run: Callable[[], Any], calls: int, times: Times) -> None:
    """Adds the times of one recording."""
    gc.collect()  # what the row before has left is not this one's to clear away
    with context as recording:
        run()  # first call: parameters, caches
        if isinstance(recording, dt.record):
            recording.flush()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(calls):
            before = time.perf_counter()
            run()
            times.calls.append(time.perf_counter() - before)
        if isinstance(recording, dt.record):
            recording.flush()
        times.drained.append((time.perf_counter() - start) / calls)
        times.cpu.append((time.process_time() - cpu_start) / calls)


def summarise(
    size: str, threads: int, passes: str, num_ops: int, times: dict[str, Times], base: Times
) -> list[dict[str, Any]]:
    """Rows of the table, as ratios to `base`."""
    least, median = min(base.calls), statistics.median(base.calls)
    return [
        {
            "size": size,
            "threads": threads,
            "pass": passes,
            "row": row,
            "ms_min": 1e3 * min(found.calls),
            "ms_median": 1e3 * statistics.median(found.calls),
            "ratio_min": min(found.calls) / least,
            "ratio_median": statistics.median(found.calls) / median,
            "us_per_op": 1e6 * (min(found.calls) - least) / num_ops,
            "drained_ratio_min": min(found.drained) / min(base.drained),
            "cpu_ratio": min(found.cpu) / min(base.cpu),
            "num_ops": num_ops,
        }
        for row, found in times.items()
    ]


def bench(
    size: str,
    threads: int,
    passes: str,
    repeats: int,
    rows: Sequence[str],
    beside: Callable[[bool], None] = lambda counted: None,
) -> list[dict[str, Any]]:
    """One table: every row of one size, interleaved.

    Args:
      beside: run in each repetition as well; told whether it counts.
    """
    model, _, run = build(size, threads, passes)
    num_ops = count_ops(run)
    folder = Path(tempfile.mkdtemp(prefix="dispatch_trace_bench_"))
    times = {row: Times() for row in rows}
    try:
        for repeat in range(repeats + 1):
            for row in rows:
                path = folder / "trace"
                shutil.rmtree(path, ignore_errors=True)
                counted = times[row] if repeat else Times()  # the first round warms up
                measure(ROWS[row](model, path), run, SIZES[size].calls, counted)
            beside(repeat > 0)
            print(f"\r{size} {passes} {threads}: {repeat}/{repeats} ", end="", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\r", end="", file=sys.stderr)
    return summarise(size, threads, passes, num_ops, times, times["none"])


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'size':5} {'threads':>7} {'pass':8} {'row':22} {'min ms':>9} {'median':>9} {'ratio':>6} "
        f"{'of medians':>10} {'drained':>8} {'cpu':>6} {'added us/op':>12}"
    ]
    lines += [
        f"{r['size']:5} {r['threads']:>7} {r['pass']:8} {r['row']:22} "
        f"{r['ms_min']:>9.3f} {r['ms_median']:>9.3f} {r['ratio_min']:>6.2f} "
        f"{r['ratio_median']:>10.2f} {_ratio(r['drained_ratio_min']):>8} {_ratio(r['cpu_ratio']):>6} "
        f"{r['us_per_op']:>12.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks of recording share."""
    found = argparse.ArgumentParser(description=description, epilog="See the head of this file.")
    again = "may be given again"
    found.add_argument("--size", choices=SIZES, action="append", help=f"which model; {again} (default: all)")
    found.add_argument(
        "--threads", type=int, action="append", help=f"torch threads; {again} (default: 1 and all)"
    )
    found.add_argument(
        "--pass", dest="passes", choices=PASSES, action="append", help=f"{again} (default: both)"
    )
    found.add_argument("--row", choices=ROWS, action="append", help=f"{again} (default: all)")
    found.add_argument("--repeats", type=int, default=5, help="rounds counted (default: 5)")
    found.add_argument("--json", type=Path, help="write the rows there")
    return found


def rows_of(size: str, wanted: Sequence[str] | None) -> list[str]:
    """Rows to run: those asked for and the base, or what makes sense for the size."""
    usual = DEEP_ROWS if size == "deep" else tuple(ROWS)
    return [row for row in ROWS if row == "none" or row in (wanted or usual)]


def wait_for_builds() -> None:
    """Until what is compiled once for a machine is there, so that no row runs beside a compiler."""
    print("waiting for the compiled functions, once a machine ...", end="", file=sys.stderr, flush=True)
    kernel.find(wait=True)
    extension.find(wait=True)
    print("\r\033[K", end="", file=sys.stderr)
    for why in filter(None, (kernel.why_not(), extension.why_not())):
        print(f"not compiled: {why}", file=sys.stderr)


def main() -> int:
    options = parser("Slow-down of recording, as ratios in one run.").parse_args()
    rows: list[dict[str, Any]] = []
    wait_for_builds()
    every = torch.get_num_threads()
    for size in options.size or list(SIZES):
        for passes in options.passes or PASSES:
            for threads in options.threads or sorted({1, every}):
                rows += bench(size, threads, passes, options.repeats, rows_of(size, options.row))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
