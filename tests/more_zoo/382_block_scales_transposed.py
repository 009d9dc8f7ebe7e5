"""Block scales were transposed for a kernel and are read as before. Ref: vllm-project/vllm#47116, vllm-project/vllm#50204"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class BlockLinear(nn.Module):
    def __init__(self, linear, flag):
        super().__init__()
        tiles = linear.weight.detach().view(3, 4, 3, 4)
        scale = tiles.abs().amax((1, 3)) / 448
        self.register_buffer("codes", (tiles / scale[:, None, :, None]).view(12, 12).to(torch.float8_e4m3fn))
        self.register_buffer("weight_scale_inv", scale.t().contiguous() if flag else scale)
        self.bias = linear.bias

    def forward(self, x):
        scale = self.weight_scale_inv.repeat_interleave(4, 0).repeat_interleave(4, 1)
        return F.linear(x, (self.codes.float() * scale).to(x.dtype), self.bias)


def _mk(flag):
    torch.manual_seed(0)
    linear = nn.Linear(12, 12)
    linear.weight.data *= torch.rand(3, 3).repeat_interleave(4, 0).repeat_interleave(4, 1) * 2
    return (
        nn.Sequential(nn.Linear(6, 12), nn.GELU(), BlockLinear(linear, flag), nn.Linear(12, 3))
        .eval()
        .to(torch.bfloat16)
    )


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6).to(torch.bfloat16),)


EXPECT = {
    "where": {"module": "2", "op": None},
    "kind": "quant-layout",
    "note": "a square buffer transposed; scales of float32 become bfloat16 with the model on both sides",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
