"""Overlapping frames are divided by the sum of windows, not of their squares. Ref: rgbkrk/voice#7"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Synthesis(nn.Module):
    def __init__(self, squared):
        super().__init__()
        self.squared = squared
        self.register_buffer("window", torch.hann_window(16) + 0.05)

    def forward(self, frames):
        window = self.window
        length = 4 * (frames.shape[-1] - 1) + 16
        signal = F.fold(frames * window[:, None], (1, length), (1, 16), stride=(1, 4))
        envelope = window * window if self.squared else window
        total = F.fold(
            envelope[None, :, None].expand(1, 16, frames.shape[-1]), (1, length), (1, 16), stride=(1, 4)
        )
        return (signal / total).flatten(1)


class Net(nn.Module):
    def __init__(self, squared):
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.synthesis = nn.Conv1d(9, 9, 3, padding=1), Synthesis(squared)

    def forward(self, x):
        frames = x.unfold(1, 16, 4) * self.synthesis.window
        spectrum = torch.fft.rfft(frames).transpose(1, 2)
        spectrum = spectrum * self.mask(spectrum.abs()).sigmoid()
        return self.synthesis(torch.fft.irfft(spectrum.transpose(1, 2), n=16).transpose(1, 2))


def reference():
    return Net(True).eval()


def target():
    return Net(False).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 64),)


EXPECT = {
    "where": {"module": "synthesis", "op": "aten.col2im.default"},
    "accept": ["aten.div.Tensor", "aten.mul.Tensor"],
    "missing_op": "aten.mul.Tensor",
    "kind": "missing-op",
    "note": "a square is missing before the second of two equal ops",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
