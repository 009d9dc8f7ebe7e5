"""Lanes beyond the head are read as zeros and stretch the range that is quantised. Ref: InternLM/lmdeploy#4849"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Cache(nn.Module):
    """Four bits for each value, one range for each token and head."""

    def __init__(self, lanes):
        super().__init__()
        self.lanes = lanes

    def forward(self, x):
        wide = F.pad(x, (0, self.lanes)) if self.lanes else x
        low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
        step = (high - low) / 15
        return ((x - low) / step).round().clamp(0, 15) * step + low


class Net(nn.Module):
    def __init__(self, lanes):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.v.bias.data += 3
        self.keys, self.values, self.out = Cache(0), Cache(lanes), nn.Linear(12, 4)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 6)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(
            F.scaled_dot_product_attention(q, self.keys(k), self.values(v)).transpose(1, 2).flatten(2)
        )


def reference():
    return Net(0).eval()


def target():
    return Net(2).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 5, 12),)


EXPECT = {
    "where": {"module": "values", "op": "aten.amin.default"},
    "accept": ["aten.constant_pad_nd.default"],
    "kind": "quant-range",
    "note": "a coarser grid, not another value",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
