"""Padding is removed, all tokens run as one row under a block mask, and put back. Ref: MeetKai/functionary#265 (family), huggingface/nanoVLM#204 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x, mask):
        q, k, v = (z.unflatten(-1, (4, 8)).transpose(-3, -2) for z in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(-3, -2).flatten(-2))


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.embed, self.flag = nn.Embedding(40, 32), flag
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids, keep):
        if self.flag:
            at = keep.flatten().nonzero().squeeze(-1)
            row = at // ids.shape[1]
            x, mask = self.embed(ids.flatten()[at])[None], (row[:, None] == row)[None, None]
        else:
            x, mask = self.embed(ids), keep[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        if self.flag:
            x = torch.zeros(ids.numel(), 32).index_copy(0, at, x[0]).view(*ids.shape, 32)
        return x * keep[..., None]


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    keep = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    return torch.randint(0, 40, (2, 5)), keep


EXPECT = {
    "where": None,
    "kind": "benign-padding",
    "tol": 5e-6,
    "note": "eight tokens in one row against two rows of five, in every record between first and last",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
