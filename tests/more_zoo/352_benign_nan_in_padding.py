"""Rows of padding are NaN in one attention and zero in the other; both are dropped. Ref: pytorch/pytorch#103749 (family), pytorch/pytorch#16317 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, fused):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.head, self.fused = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3), fused

    def forward(self, x, kept):
        q, k, v = self.qkv(x).chunk(3, -1)
        both = kept[:, :, None] & kept[:, None]
        if self.fused:
            y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=both[:, None])[
                :, 0
            ]
        else:
            y = (q @ k.mT * 8**-0.5).masked_fill(~both, float("-inf")).softmax(-1) @ v
        return self.head(torch.relu(self.out(y)))[kept]


def reference():
    return Net(True).eval()


def target():
    return Net(False).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 6, 8), torch.tensor([[True] * 6, [True] * 4 + [False] * 2])


EXPECT = {
    "where": None,
    "kind": "non-finite",
    "tol": 1e-5,
    "note": "two rows are NaN up to the last layer and are not among the results",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
