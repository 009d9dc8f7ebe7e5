"""Two coroutines await each other's turn in the middle of their modules. Ref: pytorch/pytorch#103719 (family)"""

import asyncio

import torch
import torch.nn as nn


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    async def forward(self, x):
        for _ in range(2):
            x = torch.tanh(self.a(x))
            await asyncio.sleep(0)
            x = self.b(x)
            await asyncio.sleep(0)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches, self.head = nn.ModuleList(Branch() for _ in range(2)), nn.Linear(6, 2)

    def forward(self, x):
        async def both():
            return await asyncio.gather(*(branch(x) for branch in self.branches))

        return self.head(torch.stack(asyncio.run(both())).sum(0))


def reference():
    torch.manual_seed(0)
    return Net().eval()


target = reference


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 6),)


def truth():
    m, (x,) = reference(), inputs()
    d, made = {}, []
    with torch.no_grad():
        for i, branch in enumerate(m.branches):
            y = x
            for call in range(2):
                d[f"branches.{i}.a#{call}"] = branch.a(y)
                d[f"branches.{i}.b#{call}"] = y = branch.b(torch.tanh(branch.a(y)))
            made.append(y)
        return d | {"head#0": m.head(torch.stack(made).sum(0))}


EXPECT = {
    "where": None,
    "kind": "async",
    "must_capture": [
        "each module's values under its own name, whatever the order",
        "no call left open by a coroutine that is waiting",
    ],
    "note": "a branch's call returns a coroutine before anything of it has run",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
