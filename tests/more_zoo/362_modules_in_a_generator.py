"""A generator calls modules while their results are being used. Ref: johnmarktaylor91/torchlens#167 (family)"""

import torch
import torch.nn as nn


class Stages(nn.Module):
    """Yields the states one by one: the call returns before anything has run."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            yield x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages, self.heads = Stages(), nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def forward(self, x):
        return torch.stack([head(y) for head, y in zip(self.heads, self.stages(x), strict=True)])


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
        for i, (layer, head) in enumerate(zip(m.stages.layers, m.heads, strict=True)):
            d[f"stages.layers.{i}#0"] = y = layer(x)
            x = torch.tanh(y)
            d[f"heads.{i}#0"] = head(x)
            d[f"heads.{i}#0/in/0"] = x
    return d


EXPECT = {
    "where": None,
    "kind": "generator",
    "must_capture": [
        "modules of the generator and of its reader in turn, each under its own name",
        "no stack left over from a call that returned early",
    ],
    "note": "the output of `stages` is a generator, without a tensor",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
