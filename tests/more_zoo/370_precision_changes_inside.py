"""Autocast is switched on, off and on again inside, under inference mode. Ref: pytorch/pytorch#141446 (family), aws-neuron/aws-neuron-sdk#765 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.exact, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        y = self.fc(x)
        with torch.autocast("cpu", enabled=False):
            z = self.exact(x.float())
            with torch.autocast("cpu", dtype=torch.float16):
                u = self.fc(z)
        return self.norm(y + u.to(y.dtype)), z, u


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(6, 2)

    def forward(self, x):
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            y, z, u = self.block(x)
            return self.head(y) + z[:, :2] + u[:, :2]


def reference():
    torch.manual_seed(0)
    return Net().eval()


target = reference


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 6),)


def truth():
    m, (x,) = reference(), inputs()
    with torch.no_grad():

        def half(layer, t, dtype):
            return F.linear(t.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))

        y, z = half(m.block.fc, x, torch.bfloat16), m.block.exact(x)
        u = half(m.block.fc, z, torch.float16)
        return {"block.fc#0": y, "block.exact#0": z, "block.fc#1": u, "block#0/1": z, "block#0/2": u}


EXPECT = {
    "where": None,
    "kind": "autocast",
    "must_capture": [
        "two calls of one module in two precisions",
        "inference tensors, which have no version counter",
    ],
    "note": "a cache of cast weights lives for the outermost autocast; the recorder must not fill or clear it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
