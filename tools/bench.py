#!/usr/bin/env python3
"""What recording costs, as ratios to the same run without a recorder, side by side in one process.

    python tools/bench.py [--size tiny|mid|big] [--threads N] [--pass fwd|fwd+bwd] [--repeats N] [--json FILE]

Rows: nothing, an empty `TorchDispatchMode`, torch's DebugMode without and with hashes, and this recorder at
each `save` (op level) and with statistics of modules only. Every repetition runs each row once, in turn, so
that drift of a shared machine hits all alike. A row is timed over several calls of the model inside one
recording: `ms_*` is what the program waited for; `drained` adds the wait until everything is on disk.

The JSON is a list of {size, threads, pass, row, ms_min, ms_median, ratio_min, ratio_median, us_per_op,
drained_ratio_min, num_ops}; `us_per_op` is the least time added to each op that reaches the dispatcher.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dispatch_trace as dt

SIZES = {  # layers, d, heads, seq, batch: the transformers that the published figures of other tools are for
    "tiny": (2, 64, 4, 16, 2),
    "mid": (4, 256, 4, 128, 2),
    "big": (6, 512, 8, 256, 2),
}
CALLS = {"tiny": 40, "mid": 4, "big": 2}


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int, d: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 1000, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class EmptyMode(TorchDispatchMode):
    """The floor: everything that goes through Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class CountMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
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


Context = Callable[[nn.Module, Path], Any]
ROWS: dict[str, Context] = {
    "none": lambda model, path: contextlib.nullcontext(),
    "empty_mode": lambda model, path: EmptyMode(),
    "debug_mode": lambda model, path: debug_mode(False),
    "debug_mode_hash": lambda model, path: debug_mode(True),
    "meta": lambda model, path: dt.record(path, model, save="meta"),
    "stats": lambda model, path: dt.record(path, model, save="stats"),
    "leaves": lambda model, path: dt.record(path, model, save="leaves"),
    "tensors": lambda model, path: dt.record(path, model, save="tensors"),
    "module_stats": lambda model, path: dt.record(path, model, level="module", save="stats"),
}


def measure(context: Any, run: Callable[[], Any], calls: int) -> tuple[list[float], float]:
    """Seconds that the program sees of each call, and the mean of them until everything is on disk."""
    seen = []
    with context as recording:
        run()  # first call: parameters, caches
        if isinstance(recording, dt.record):
            recording.flush()
        start = time.perf_counter()
        for _ in range(calls):
            before = time.perf_counter()
            run()
            seen.append(time.perf_counter() - before)
        if isinstance(recording, dt.record):
            recording.flush()
        drained = time.perf_counter() - start
    return seen, drained / calls


def bench(size: str, threads: int, backward: bool, repeats: int) -> list[dict[str, Any]]:
    """One table: every row of one size, interleaved."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers, d, heads, seq, batch = SIZES[size]
    model = Transformer(layers, d, heads)
    ids = torch.randint(0, 1000, (batch, seq))

    def run() -> None:
        if backward:
            model.zero_grad()
            model(ids).float().logsumexp(-1).sum().backward()
        else:
            with torch.no_grad():
                model(ids)

    counter = CountMode()
    with counter:
        run()
    folder = Path(tempfile.mkdtemp(prefix="dispatch_trace_bench_"))
    times: dict[str, list[float]] = {row: [] for row in ROWS}
    drained: dict[str, list[float]] = {row: [] for row in ROWS}
    try:
        for repeat in range(repeats + 1):
            for row, context in ROWS.items():
                path = folder / "trace"
                shutil.rmtree(path, ignore_errors=True)
                seen, until_on_disk = measure(context(model, path), run, CALLS[size])
                if repeat:  # the first round warms up
                    times[row] += seen
                    drained[row].append(until_on_disk)
            print(f"\r{size} {repeat}/{repeats}", end="", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\r", end="", file=sys.stderr)
    base = min(times["none"])
    return [
        {
            "size": size,
            "threads": threads,
            "pass": "fwd+bwd" if backward else "fwd",
            "row": row,
            "ms_min": 1e3 * min(found),
            "ms_median": 1e3 * statistics.median(found),
            "ratio_min": min(found) / base,
            "ratio_median": statistics.median(found) / statistics.median(times["none"]),
            "us_per_op": 1e6 * (min(found) - base) / counter.count,
            "drained_ratio_min": min(drained[row]) / min(drained["none"]),
            "num_ops": counter.count,
        }
        for row, found in times.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'size':5} {'threads':>7} {'pass':8} {'row':16} {'min ms':>9} {'median':>9} {'ratio':>6} "
        f"{'of medians':>10} {'drained':>8} {'added us/op':>12}"
    ]
    lines += [
        f"{r['size']:5} {r['threads']:>7} {r['pass']:8} {r['row']:16} "
        f"{r['ms_min']:>9.3f} {r['ms_median']:>9.3f} {r['ratio_min']:>6.2f} "
        f"{r['ratio_median']:>10.2f} {r['drained_ratio_min']:>8.2f} {r['us_per_op']:>12.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Slow-down of recording, as ratios in one run.", epilog="See the head of this file."
    )
    parser.add_argument(
        "--size", choices=SIZES, action="append", help="which model; may be given again (default: all)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--pass", dest="passes", choices=["fwd", "fwd+bwd"], default="fwd")
    parser.add_argument("--repeats", type=int, default=7, help="rounds counted (default: 7)")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for size in options.size or list(SIZES):
        rows += bench(size, options.threads, options.passes == "fwd+bwd", options.repeats)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
