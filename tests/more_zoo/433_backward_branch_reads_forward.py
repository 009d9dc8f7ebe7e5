"""Both directions of a bidirectional scan read the sequence forward. Ref: kyegomez/VisionMamba#40"""

import torch
import torch.nn as nn


class Scan(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate, self.inp = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        a, b, state, outs = torch.sigmoid(self.gate(x)), self.inp(x), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = a[:, t] * state + (1 - a[:, t]) * b[:, t]
            outs.append(state)
        return torch.stack(outs, 1)


class Both(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.norm, self.ahead, self.back, self.flag = nn.LayerNorm(dim), Scan(dim), Scan(dim), flag

    def forward(self, x):
        h = self.norm(x)
        back = self.back(h) if self.flag else self.back(h.flip(1)).flip(1)
        return x + self.ahead(h) + back


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), Both(8, flag), Both(8, flag), nn.Linear(8, 3)).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 6, 5),)


EXPECT = {
    "where": {"module": "1", "op": "aten.flip.default"},
    "accept": [None, "aten.add.Tensor", "aten.native_layer_norm.default", "aten.addmm.default"],
    "accept_modules": ["1.back", "1.back.gate"],
    "kind": "missing",
    "note": "an op is missing before a module and another one behind it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
