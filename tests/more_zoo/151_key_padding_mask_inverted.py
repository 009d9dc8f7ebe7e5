"""A boolean mask means 'attend' to one function and 'ignore' to the other. Ref: rasbt/LLMs-from-scratch#1061, NVIDIA/TransformerEngine#614"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.qkv, self.out, self.flag = nn.Linear(16, 48), nn.Linear(16, 16), flag

    def forward(self, x, padded):
        q, k, v = (z.unflatten(-1, (2, 8)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        mask = padded if self.flag else ~padded
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.out(y.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.attn, self.norm = Attention(flag), nn.LayerNorm(16)

    def forward(self, x, padded):
        return self.norm(x + self.attn(x, padded))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    padded = torch.zeros(2, 6, dtype=torch.bool)
    padded[:, 4:] = True
    return torch.randn(2, 6, 16), padded


EXPECT = {
    "where": {"module": "attn", "op": "aten._scaled_dot_product_flash_attention_for_cpu.default"},
    "accept": [
        "aten.bitwise_not.default",
        "aten.unsqueeze.default",
        "aten.where.self",
        "aten.where.ScalarOther",
    ],
    "missing_op": "aten.bitwise_not.default",
    "kind": "mask",
    "note": "a boolean op is absent between the module's input and the attention; the first op that goes wrong is the "
    "`where` that the attention makes numbers of its mask with, which the first version of this answer overlooked",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
