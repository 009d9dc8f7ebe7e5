"""is_causal aligns the mask at the top left: a chunk behind a cache sees too little. Ref: pytorch/pytorch#144858, pytorch/pytorch#108108"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.qkv, self.out, self.flag = nn.Linear(32, 96), nn.Linear(32, 32), flag

    def forward(self, x, past):
        q, k, v = (z.unflatten(-1, (4, 8)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        if self.flag:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2)), (k, v)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.attn = Attention(flag)

    def forward(self, x):
        past, made = None, []
        for chunk in x.split(4, 1):
            y, past = self.attn(chunk, past)
            made.append(y)
        return torch.cat(made, 1)


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 8, 32),)


EXPECT = {
    "where": {"module": "attn", "op": "aten._scaled_dot_product_flash_attention_for_cpu.default"},
    "call": 1,
    "kind": "mask",
    "note": "the first chunk agrees though its mask is made otherwise; the same flag is wrong in the second",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
