"""Makes dumps in the vLLM-Neuron capture layout by hand, as that tool writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def write_step(
    replica: Path,
    name: str,
    modules: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    *,
    req_ids: Sequence[str] = ("a",),
    positions: Sequence[int] | None = None,
    meta: Any = None,
    time_s: float | None = None,
) -> Path:
    """One step: a directory for each module with one file for each tp rank, and the metadata.

    Args:
      replica: `dp{N}`.
      modules: by directory name ("" is the step itself), a tensor or one for each tp rank.
      positions: None for 0, 1, … as the name says.
      meta: instead of the metadata; "" for none.
      time_s: of the metadata's file.
    """
    step = replica / name
    for directory, tensors in modules.items():
        (step / directory).mkdir(parents=True, exist_ok=True)
        for tp, tensor in enumerate([tensors] if isinstance(tensors, torch.Tensor) else tensors):
            torch.save(tensor, step / directory / f"rank{tp}.pt")
    step.mkdir(parents=True, exist_ok=True)
    if positions is None:
        positions = range(int(name.split("_")[1][1:]))
    file = step / f"{name}_meta.json"
    found = {"req_ids": list(req_ids), "positions": list(positions), "dp_rank": int(replica.name[2:])}
    if meta != "":
        file.write_text(json.dumps(found if meta is None else meta))
        if time_s is not None:
            os.utime(file, (time_s, time_s))
    return step


def values(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3)), generator=torch.Generator().manual_seed(seed))
