#!/usr/bin/env python3
"""What capture below `torch.compile` costs, as ratios to the same compiled model without it, in one process.

    python tools/bench_compiled.py [--backend inductor] [--threads N] [--repeats N] [--json FILE]

The model is a transformer of width 256, of which 25 modules are captured. Rows: `plain`; `hooked` (hooks in
the graph, nothing written); `stats` and `tensors` (written). Every repetition runs each row once, in turn.
`copy` is the time of copying what is captured, measured in the same rounds: what cannot be saved. `net` is
(row - copy) / plain, by minima.

The JSON is a list of {row, ms_min, ms_median, ratio_min, net_ratio_min, copy_ms_min, num_modules,
num_captures, captured_bytes}.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_model import SIZES, Transformer

import dispatch_trace as dt

MODULES = ["embed", "norm", "head", "blocks.0-3", "blocks.0-2.(ln1|ln2|qkv|out|up|down)"]
CALLS = 4


def compiled(backend: str) -> tuple[torch.nn.Module, Any]:
    """A fresh model and what runs it; every row has its own, with the same weights."""
    layers, d, heads, *_ = SIZES["mid"]
    torch.manual_seed(0)
    model = Transformer(layers, d, heads).eval()
    return model, torch.compile(model, backend=backend, fullgraph=True)


def timed(run: Callable[[], object]) -> list[float]:
    seen = []
    for _ in range(CALLS):
        before = time.perf_counter()
        run()
        seen.append(time.perf_counter() - before)
    return seen


def bench(backend: str, threads: int, repeats: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    _, _, _, seq, batch, _ = SIZES["mid"]
    ids = torch.randint(0, 1000, (batch, seq))
    folder = Path(tempfile.mkdtemp(prefix="dispatch_trace_bench_"))
    times: dict[str, list[float]] = {row: [] for row in ("plain", "hooked", "stats", "tensors", "copy")}
    with torch.no_grad(), contextlib.ExitStack() as captures:
        _, plain = compiled(backend)
        runs: dict[str, Callable[[], object]] = {"plain": lambda: plain(ids)}
        kept: list[torch.Tensor] = []
        num_modules = 0
        for row in ("hooked", "stats", "tensors"):
            body, target = compiled(backend)
            save = row if row != "hooked" else "stats"
            capture = captures.enter_context(
                dt.ModelCapture(body, MODULES, folder, subdirectory=row, save=save)
            )
            capture.register_clear_hook(target)
            target(ids)
            num_modules = len(capture._hooks.names)
            kept = [tensor.clone() for tensor in capture._registry.get_all_tensors()]
            if row != "hooked":
                capture.enable()

            def forward(capture: Any = capture, target: Any = target) -> None:
                capture.setup_tensor_capture()
                target(ids)
                capture.save_tensor_captures(torch.arange(seq), is_prefill=True, req_ids=["a"])

            runs[row] = forward
        runs["copy"] = lambda: [tensor.clone() for tensor in kept]
        plain(ids)
        for repeat in range(repeats + 1):
            for row, run in runs.items():
                seen = timed(run)
                if repeat:  # the first round warms up
                    times[row] += seen
            print(f"\rcompiled {repeat}/{repeats}", end="", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    print("\r", end="", file=sys.stderr)
    base, copy = min(times["plain"]), min(times["copy"])
    return [
        {
            "row": row,
            "ms_min": 1e3 * min(found),
            "ms_median": 1e3 * statistics.median(found),
            "ratio_min": min(found) / base,
            "net_ratio_min": (min(found) - (0.0 if row == "plain" else copy)) / base,
            "copy_ms_min": 1e3 * copy,
            "num_modules": num_modules,
            "num_captures": len(kept),
            "captured_bytes": sum(t.nbytes for t in kept),
        }
        for row, found in times.items()
        if row != "copy"
    ]


def table(rows: list[dict[str, Any]], backend: str) -> str:
    first = rows[0]
    lines = [
        f"{backend}: {first['num_modules']} modules, {first['num_captures']} captures, "
        f"{first['captured_bytes'] / 2**20:.1f} MiB a call; copying them takes {first['copy_ms_min']:.3f} ms",
        f"{'row':10} {'min ms':>9} {'median':>9} {'ratio':>6} {'net':>6}",
    ]
    lines += [
        f"{r['row']:10} {r['ms_min']:>9.3f} {r['ms_median']:>9.3f} "
        f"{r['ratio_min']:>6.2f} {r['net_ratio_min']:>6.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Slow-down of capture below torch.compile.", epilog="See the head of this file."
    )
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: inductor)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--repeats", type=int, default=12, help="rounds counted (default: 12)")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    rows = bench(options.backend, options.threads, options.repeats)
    print(table(rows, options.backend))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
