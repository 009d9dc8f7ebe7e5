"""Top-p drops the token that crosses the threshold. Ref: fishaudio/fish-speech#1171, rasbt/reasoning-from-scratch#164"""

import torch
import torch.nn as nn


class TopP(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def forward(self, logits):
        ordered, index = logits.sort(-1, descending=True)
        remove = ordered.softmax(-1).cumsum(-1) > 0.7
        if self.shift:
            remove[..., 1:] = remove[..., :-1].clone()
        remove[..., 0] = False
        remove = torch.zeros_like(remove).scatter(-1, index, remove)
        return logits.masked_fill(remove, float("-inf")).softmax(-1)


class Net(nn.Module):
    def __init__(self, shift):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12))
        self.filter = TopP(shift)

    def forward(self, x):
        return self.filter(4 * self.body(x))


def reference():
    return Net(True)


def target():
    return Net(False)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 8),)


EXPECT = {
    "where": {"module": "filter", "op": "aten.copy_.default"},
    "accept": [
        "aten.scatter.src",
        "aten.clone.default",
        "aten.fill_.Tensor",
        "aten.slice.Tensor",
        "aten.masked_fill.Scalar",
        None,
    ],
    "missing_op": "aten.copy_.default",
    "kind": "missing-op",
    "note": "a shift of a mask in its own memory is missing",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
