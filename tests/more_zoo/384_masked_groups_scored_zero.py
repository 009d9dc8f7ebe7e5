"""Experts outside the chosen groups get score 0, which beats negative ones. Ref: vllm-project/vllm#13474, flashinfer-ai/flashinfer#2168"""

import torch
import torch.nn as nn


class Router(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.proj, self.flag = nn.Linear(dim, 8, bias=False), flag
        self.register_buffer("correction", torch.randn(8) - 4)

    def forward(self, x):
        shares = self.proj(x).sigmoid()
        choice = shares + self.correction
        best = choice.view(-1, 4, 2).sum(-1).topk(2, -1).indices
        allowed = torch.zeros(x.shape[0], 4).scatter(1, best, 1.0).bool().repeat_interleave(2, 1)
        chosen = choice.masked_fill(~allowed, 0.0 if self.flag else float("-inf")).topk(2, -1).indices
        return shares.gather(1, chosen), chosen


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.router, self.head = nn.Linear(5, 8), Router(8, flag), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x):
        x = self.up(x)
        weights, chosen = self.router(x)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        picked = every.gather(1, chosen[..., None].expand(-1, -1, 8))
        return self.head((picked * weights[..., None]).sum(1))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(6, 5),)


EXPECT = {
    "where": {"module": "router", "op": "aten.masked_fill.Scalar"},
    "accept": ["aten.topk.default"],
    "kind": "argument",
    "note": "a number for another one in a mask; what is chosen changes",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
