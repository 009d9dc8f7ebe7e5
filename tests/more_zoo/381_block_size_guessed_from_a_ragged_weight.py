"""The block size is derived from the number of scales, which a ragged last block shrinks. Ref: NVIDIA/TensorRT-Model-Connect#1115"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class BlockLinear(nn.Module):
    """Codes in float8 with one scale for 8 rows; 20 rows need three scales."""

    def __init__(self, linear, flag):
        super().__init__()
        weight = linear.weight.detach()
        scale = torch.stack([part.abs().max() / 448 for part in weight.split(8)])
        self.register_buffer(
            "codes", (weight / scale.repeat_interleave(8)[:20, None]).to(torch.float8_e4m3fn)
        )
        self.register_buffer("scale", scale)
        self.bias, self.flag = linear.bias, flag

    def forward(self, x):
        rows = self.codes.shape[0]
        block = -(-rows // self.scale.shape[0]) if self.flag else 8
        scale = self.scale[:, None].expand(-1, block).flatten()[:rows, None]
        return F.linear(x, self.codes.float() * scale, self.bias)


def _mk(flag):
    torch.manual_seed(0)
    first, second = nn.Linear(6, 16), nn.Linear(16, 20)
    second.weight.data *= torch.tensor([1.0, 0.3, 2.0]).repeat_interleave(8)[:20, None]
    return nn.Sequential(first, nn.GELU(), BlockLinear(second, flag), nn.Tanh(), nn.Linear(20, 3)).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)


EXPECT = {
    "where": {"module": "2", "op": "aten.expand.default"},
    "accept": [
        "aten.clone.default",
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.slice.Tensor",
        "aten.mul.Tensor",
    ],
    "kind": "quant-layout",
    "note": "a view of another size, cut to the same size behind it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
