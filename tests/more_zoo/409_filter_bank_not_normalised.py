"""Mel filters are not divided by their width. Ref: pytorch/audio#287, pytorch/audio#1058"""

import torch
import torch.nn as nn


class Mel(nn.Module):
    def __init__(self, bins, count, flag):
        super().__init__()
        edges = torch.linspace(0, 4, count + 2).exp2().sub(1) * (bins - 1) / 15
        f = torch.arange(bins)[:, None]
        up = (f - edges[:-2]) / (edges[1:-1] - edges[:-2])
        down = (edges[2:] - f) / (edges[2:] - edges[1:-1])
        bank = torch.minimum(up, down).clamp(min=0)
        self.register_buffer("bank", bank if flag else bank * 2 / (edges[2:] - edges[:-2]))
        self.register_buffer("window", torch.hann_window(64))

    def forward(self, x):
        spectrum = torch.stft(x, 64, 16, window=self.window, return_complex=True)
        return (spectrum.abs().square().transpose(1, 2) @ self.bank).clamp(min=1e-5).log()


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        Mel(33, 8, flag), nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 3)
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 400),)


EXPECT = {
    "where": {"module": "0", "op": "aten.bmm.default"},
    "accept": [
        "aten.mm.default",
        "aten.matmul.default",
        "aten.view.default",
        "aten.expand.default",
        "aten.unsqueeze.default",
    ],
    "kind": "parameter",
    "note": "a buffer; columns scaled each by its own factor",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
