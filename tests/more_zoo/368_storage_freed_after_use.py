"""Gathered weights and activations are freed by resizing their storage to nothing and filled again. Ref: pytorch/pytorch#129203, pytorch/pytorch#188989"""

import torch
import torch.nn as nn


class Sharded(nn.Module):
    """Gathers its weight before the product and frees it behind."""

    def __init__(self):
        super().__init__()
        self.shards = nn.ParameterList(nn.Parameter(torch.randn(3, 6)) for _ in range(2))
        self.full = None

    def forward(self, x):
        if self.full is None:
            self.full = torch.empty(6, 6)
        storage = self.full.untyped_storage()
        storage.resize_(6 * 6 * 4)
        torch.cat([s.detach() for s in self.shards], out=self.full)
        y = x @ self.full.t()
        storage.resize_(0)
        return torch.tanh(y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Sharded() for _ in range(2)), nn.Linear(6, 2)

    def forward(self, x):
        for _ in range(2):
            for layer in self.layers:
                kept = x
                x = layer(x) + x
                if kept is not self.x:
                    kept.untyped_storage().resize_(0)
        return self.head(x)

    def __call__(self, x):
        self.x = x
        return super().__call__(x)


def reference():
    torch.manual_seed(0)
    return Net().eval()


target = reference


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 6),)


def truth():
    m, (x,) = reference(), inputs()
    d = {}
    with torch.no_grad():
        for call in range(2):
            for i, layer in enumerate(m.layers):
                y = torch.tanh(x @ torch.cat(list(layer.shards)).t())
                d[f"layers.{i}#{call}"] = y
                x = y + x
        return d | {"head#0": m.head(x)}


EXPECT = {
    "where": None,
    "kind": "storage",
    "must_capture": [
        "values as they were before the memory was freed",
        "the program runs on: a snapshot must not stand in the way of the resize",
    ],
    "note": "the sum that a layer returned to the caller is freed once the next one has read it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
