"""One small dump of every foreign format, of the same small networks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from aligning import Net, batch
from dumps import fastvideo_trace, nxd_capture, sglang_dump, sglang_passes, write_step
from torch import nn
from torch.utils._debug_mode import DebugMode

MSPROBE = Path(__file__).parent / "fixtures" / "msprobe"


class Wrapped(nn.Module):
    """A model as SGLang lays it out: `model`, and a head behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Net(8)
        self.lm_head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.model(x))
        return out


def small() -> nn.Module:
    torch.manual_seed(0)
    return Net(8).eval()


def runs(count: int = 1) -> list[dict[str, torch.Tensor]]:
    return [{"x": batch(3, 8) + step} for step in range(count)]


def debug_log(file: Path, model: nn.Module) -> Path:
    with (
        torch.no_grad(),
        DebugMode(record_nn_module=True, record_ids=True) as mode,
        DebugMode.log_tensor_hashes(),
    ):
        model(**runs()[0])
    file.write_text(mode.debug_string())
    return file


def saved_states(file: Path) -> Path:
    torch.save(tuple(torch.randn(1, 3, 8) for _ in range(4)), file)
    return file


MAKERS: dict[str, Callable[[Path], Path]] = {
    "vllm-neuron": lambda folder: write_step(
        folder / "d" / "dp0", "prefill_s2_0", {"fc": torch.ones(2)}
    ).parents[1],
    "nxd-inference": lambda folder: nxd_capture(folder / "d", small(), ["head", "blocks.0"], runs(2)),
    "sglang": lambda folder: sglang_dump(folder / "d", small(), runs(2)),
    "sglang-passes": lambda folder: sglang_passes(folder / "d", Wrapped().eval(), runs(2)),
    "msprobe": lambda folder: Path(shutil.copytree(MSPROBE / "tensor-L0", folder / "d")),
    "fastvideo": lambda folder: fastvideo_trace(folder / "trace.jsonl", small(), runs(2)),
    "debug-mode": lambda folder: debug_log(folder / "log.txt", small()),
    "saved-states": lambda folder: saved_states(folder / "states.pt"),
}
