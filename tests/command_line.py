"""Runs the command line as a user would, in a process of its own, and makes small traces for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(**changes: str) -> dict[str, str]:
    """The environment of a child: this checkout is importable, and no terminal is wider than another."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "100", **changes}


def run_python(*args: str, cwd: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    """`python -W error ARGS`."""
    return subprocess.run(
        [sys.executable, "-W", "error", *args],
        capture_output=True,
        text=True,
        cwd=cwd or ROOT,
        env=environment(**changes),
        timeout=300,
    )


def dispatch_trace(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`dispatch-trace ARGS`."""
    return run_python("-m", "dispatch_trace", *map(str, args), cwd=cwd)


def record_mlp(
    path: Path, *, save: str = "tensors", scale: float = 1.0, steps: int = 1, root: str = "fc"
) -> None:
    """Records a two-layer network with fixed weights.

    Args:
      scale: factor on one row of the second layer's weight; 1.0 is the sound network.
      steps: how often it is called.
      root: name of the layers: "fc" gives fc0, act, fc1.
    """
    import torch

    import dispatch_trace as dt

    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential()
    for number in range(2):
        linear = torch.nn.Linear(16, 16)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        model.add_module(f"{root}{number}", linear)
        if number == 0:
            model.add_module("act", torch.nn.ReLU())
    with torch.no_grad():
        model[-1].weight[3] *= scale
    x = torch.randn(8, 16, generator=generator)
    with torch.no_grad(), dt.record(path, model, save=save):
        for step in range(steps):
            model(x + step)
