#!/usr/bin/env python3
"""How large a golden trace of MiniLM is, and whether repeated runs fail against it.

    python tools/bench_golden.py [--runs N] [--threads N ...]

Real weights, eight sentences. Prints one row a level: the golden trace, the same compressed by zlib (about
what git stores), and failures of all runs at each number of torch's threads. A weight off by 2 % must fail:
it is tried at the end, so that the zeros mean something. Exit status 1 where anything is otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dispatch_trace.demo import load_minilm
from dispatch_trace.testing import Regression

OFF = 1.02  # one row of a weight, in the trial that must fail


def failures(check: Regression, model: torch.nn.Module, inputs: dict[str, torch.Tensor], level: str) -> int:
    """1 where a run fails against the golden trace, else 0."""
    try:
        with torch.no_grad(), check.recording(model, level=level):
            model(**inputs)
    except AssertionError:
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Golden traces of MiniLM: size and steadiness.")
    parser.add_argument("--runs", type=int, default=20, help="at each number of threads (default: 20)")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="default: 1 2")
    options = parser.parse_args()
    model, inputs = load_minilm()
    sound = True
    print(f"{'level':8} {'KB':>7} {'zlib KB':>8} {'failures at threads':24} a weight off by 2 %")
    for level in ("op", "module"):
        with tempfile.TemporaryDirectory() as folder:
            golden, scratch = Path(folder) / "golden", Path(folder) / "scratch"
            torch.set_num_threads(options.threads[0])
            write = Regression(golden, scratch, name="minilm", update=True)
            with torch.no_grad(), write.recording(model, level=level):
                model(**inputs)
            files = [file.read_bytes() for file in golden.rglob("*") if file.is_file()]
            check = Regression(golden, scratch, name="minilm")
            counts = {}
            for threads in options.threads:
                torch.set_num_threads(threads)
                counts[threads] = sum(failures(check, model, inputs, level) for _ in range(options.runs))
            row = model.encoder.layer[3].attention.output.dense.weight.data[0]
            kept = row.clone()
            row.mul_(OFF)
            found = failures(check, model, inputs, level)
            row.copy_(kept)
            said = ", ".join(f"{threads}: {count} of {options.runs}" for threads, count in counts.items())
            sizes = sum(map(len, files)) / 1e3, sum(len(zlib.compress(data)) for data in files) / 1e3
            print(f"{level:8} {sizes[0]:7.0f} {sizes[1]:8.0f} {said:24} {'fails' if found else 'PASSES'}")
            sound = sound and bool(found) and not any(counts.values())
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
