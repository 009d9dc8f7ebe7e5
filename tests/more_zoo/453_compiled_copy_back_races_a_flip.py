"""A compiled write through an index is fused with a read of the same memory at other places. Ref: pytorch/pytorch#198270"""

import torch
import torch.nn as nn


class Mirror(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.rand(4, 8))

    def forward(self, x):
        state = self.state
        state.index_put_((torch.arange(4),), state * 2.0)
        state.add_(state.flip(0))
        return x + state


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.mirror, self.out = nn.Linear(6, 8), Mirror(), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.mirror(self.inp(x)))


def reference():
    return Net().eval()


def target():
    torch._dynamo.reset()
    return torch.compile(Net().eval())


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)


EXPECT = {
    "where": {"module": "mirror", "op": "aten.add_.Tensor"},
    "accept": [
        "aten.add.Tensor",
        "aten.index_put_.default",
        "aten.index_put.default",
        "aten.copy_.default",
        "aten.flip.default",
    ],
    "compile": "inductor",
    "kind": "compiler-bug",
    "note": "wrong where both statements are in one graph",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
