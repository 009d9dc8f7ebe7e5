"""A position bias that all layers share is masked in place by each of them. Ref: johnmarktaylor91/torchlens#167 (family), huggingface/transformers#19728 (family)"""

import torch
import torch.nn as nn


class Layer(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.qkv, self.out, self.flag = nn.Linear(16, 48), nn.Linear(16, 16), flag

    def forward(self, x, bias, distance):
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = bias.sub_(distance) if self.flag else bias - distance
        return x + self.out((q @ k.t() * 0.25 + bias).softmax(-1) @ v)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Embedding(8, 1)
        self.layers = nn.ModuleList(Layer(flag) for _ in range(3))

    def forward(self, x):
        at = torch.arange(x.shape[0])
        distance = (at[:, None] - at).abs()
        bias = self.bias(distance.clamp(max=7))[..., 0]
        for layer in self.layers:
            x = layer(x, bias, 0.3 * distance)
        return x


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(6, 16),)


EXPECT = {
    "where": {"module": "layers.0", "op": "aten.sub_.Tensor"},
    "kind": "aliasing",
    "note": "the first layer's output is right; what it was given has changed for the second",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
