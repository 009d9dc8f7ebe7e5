"""What `dispatch-trace run` costs a program, whole processes against the same without it.

    python tools/bench_run.py [--runs N]

The program calls a small network many times; where the selected root is never called the ratio should
be close to 1. Prints one row a setting: the best time of 1000 module calls, and the ratio to the bare
program.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import time, torch
from torch import nn
torch.set_num_threads(1)
net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))
x = torch.ones(16, 64)
with torch.inference_mode():
    for _ in range(20):
        net(x)
    best = 1e9
    for _ in range(400):  # the best of many short ones: others compute on this machine too
        start = time.perf_counter()
        net(x)
        best = min(best, time.perf_counter() - start)
print(best / 25 * 1000)
"""
SETTINGS = {
    "bare": None,
    "root never called": ["--root", "NoSuchModel"],
    "selected module never called": ["--select", "9\\..*"],
    "module statistics": ["--level", "module"],
    "op statistics": [],
}


def seconds(options: list[str] | None, folder: Path) -> float:
    """Seconds per 1000 module calls of one run."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script)]
    if options is not None:
        run = [sys.executable, "-m", "dispatch_trace", "run", "--overwrite", "--output", str(folder / "t")]
        command = [*run, *options, "--", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        best = {
            name: min(seconds(options, Path(folder)) for _ in range(args.runs))
            for name, options in SETTINGS.items()
        }
    for name, value in best.items():
        print(f"{name:32} {1e3 * value:8.3f} ms per 1000 module calls   ratio {value / best['bare']:.2f}")


if __name__ == "__main__":
    main()
