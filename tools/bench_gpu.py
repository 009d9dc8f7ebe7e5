#!/usr/bin/env python3
"""What recording costs on a GPU: a Llama-like block, absolute times and ratios, and whether it is right.

    python tools/bench_gpu.py [--device cuda] [--d 4096] [--seq 2048] [--dtype bfloat16] [--calls 5]
                              [--repeats 5] [--json FILE]

Rows as in tools/bench.py. `ms` is what the program waits for, the device included; `drained` adds the wait
until everything is on disk; `transfers` is how often results left the device in a step. Checked: outputs
keep their bits under every row; recorded statistics are those that the host computes of the same
output; kept data is the output, bit for bit.

With `--device cpu` and a small `--d` the script and the way through a device lane are tried without a GPU.
Exit status 1 where a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import ROWS

import dispatch_trace as dt
from dispatch_trace.stats import accumulate

WANTED = ("none", "empty_mode", "meta", "stats", "leaves", "tensors", "module_stats", "module_tensors")


class Block(nn.Module):
    """Attention with rotary positions, RMS norms and a gated MLP, as in Llama."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        hidden = 11 * d // 4 // 64 * 64
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (p(h).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lanes_of(recording: Any, device: torch.device) -> Any:
    """What takes the contents; values of a CPU go through a lane here, as a GPU's do."""
    if not isinstance(recording, dt.record):
        return None
    assert recording._tracer is not None
    taker = recording._tracer.writer._taker
    if device.type == "cpu":
        taker._lane_devices = frozenset({"cpu"})
    return taker


def checks(path: Path, expected: torch.Tensor) -> list[str]:
    """What is wrong with the record of the model's return."""
    problems = []
    trace = dt.open(path)
    last = [record for record in trace.find(kind="module") if record.module == ""][-1]
    found, host = last.stats("out"), accumulate(expected.cpu()).stats
    for name, value in host.items():
        got = found[name]
        scale = abs(host["abs_sum"] or 0.0) if name == "sum" else abs(value or 0.0)
        if value is not None and not math.isclose(got, value, rel_tol=1e-6, abs_tol=1e-6 * scale):
            problems.append(f"{name} is {got}, on the host {value}")
    with contextlib.suppress(Exception):  # no data kept
        data = last.tensor("out")
        if not torch.equal(data.view(torch.uint8), expected.cpu().view(torch.uint8)):
            problems.append("the kept output has other bits")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description="Recording on a GPU.", epilog="See the head of this file.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--d", type=int, default=4096)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--calls", type=int, default=5, help="timed in each recording")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench_gpu: no GPU here; --device cpu --d 128 --seq 64 tries the script", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    heads = max(1, options.d // 128)
    model = Block(options.d, heads).to(device=device, dtype=dtype).eval()
    x = torch.randn(1, options.seq, options.d, device=device, dtype=dtype)
    angles = torch.outer(
        torch.arange(options.seq, device=device), torch.rand(options.d // heads, device=device)
    )
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    seen: dict[str, list[float]] = {row: [] for row in WANTED}
    drained: dict[str, list[float]] = {row: [] for row in WANTED}
    transfers: dict[str, float] = {}
    problems: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="dispatch_trace_gpu_"))
    with torch.no_grad():
        expected = model(x, cos, sin)
        try:
            for repeat in range(options.repeats + 1):
                for row in WANTED:
                    path = folder / "trace"
                    shutil.rmtree(path, ignore_errors=True)
                    with ROWS[row](model, path) as recording:
                        taker = lanes_of(recording, device)
                        out = model(x, cos, sin)
                        wait(device)
                        if taker is not None:
                            recording.flush()
                        start = time.perf_counter()
                        for _ in range(options.calls):
                            before = time.perf_counter()
                            out = model(x, cos, sin)
                            wait(device)
                            seen[row] += [time.perf_counter() - before] if repeat else []
                        if taker is not None:
                            recording.flush()
                        drained[row] += [(time.perf_counter() - start) / options.calls] if repeat else []
                    if taker is not None:
                        lanes = taker._lanes.values()
                        transfers[row] = sum(lane.num_transfers for lane in lanes) / (options.calls + 1)
                    if not torch.equal(out.view(torch.uint8), expected.view(torch.uint8)):
                        problems.append(f"{row}: the output has other bits than without")
                    if repeat == options.repeats and row not in ("none", "empty_mode", "meta"):
                        problems += [f"{row}: {problem}" for problem in checks(path, expected)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, d {options.d}, seq {options.seq}, {options.dtype}")
    print(f"{'row':16} {'ms min':>9} {'ratio':>7} {'drained':>9} {'ratio':>7} {'transfers':>10}")
    rows = []
    for row in WANTED:
        least, last = 1e3 * min(seen[row]), 1e3 * min(drained[row])
        base, base_last = 1e3 * min(seen["none"]), 1e3 * min(drained["none"])
        rows.append(
            {
                "row": row,
                "device": name,
                "d": options.d,
                "seq": options.seq,
                "ms_min": least,
                "ratio_min": least / base,
                "drained_ms_min": last,
                "drained_ratio_min": last / base_last,
                "transfers_per_step": transfers.get(row),
            }
        )
        moved = f"{transfers[row]:.2f}" if row in transfers else ""
        print(
            f"{row:16} {least:>9.3f} {least / base:>7.2f} {last:>9.3f} {last / base_last:>7.2f} {moved:>10}"
        )
    for problem in sorted(set(problems)):
        print(f"WRONG: {problem}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "problems": sorted(set(problems))}, indent=1))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
