"""Layers take turns in one buffer that their weights are copied into. Ref: vllm-project/vllm-gguf-plugin#103 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    def __init__(self, dim, buffer):
        super().__init__()
        self.norm, self.fc, self.buffer = nn.LayerNorm(dim), nn.Linear(dim, dim), buffer

    def forward(self, x):
        if self.buffer is None:
            return x + torch.relu(self.fc(self.norm(x)))
        self.buffer[0].copy_(self.fc.weight)
        self.buffer[1].copy_(self.fc.bias)
        return x + torch.relu(F.linear(self.norm(x), *self.buffer))


class Net(nn.Module):
    def __init__(self, offload):
        super().__init__()
        torch.manual_seed(0)
        buffer = (torch.empty(8, 8), torch.empty(8)) if offload else None
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList(Layer(8, buffer) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 7)),)


EXPECT = {
    "where": None,
    "kind": "memory",
    "tol": 1e-6,
    "note": "memory that is written again for each layer; a module is not called",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
