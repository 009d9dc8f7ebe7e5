"""nn.MultiheadAttention against four linear layers. Ref: pytorch/text#1844 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Apart(nn.Module):
    def __init__(self, packed):
        super().__init__()
        dim, self.heads = packed.embed_dim, packed.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))
        parts = zip(packed.in_proj_weight.chunk(3), packed.in_proj_bias.chunk(3), strict=True)
        for proj, (w, b) in zip((self.q_proj, self.k_proj, self.v_proj), parts, strict=True):
            proj.weight.data, proj.bias.data = w.detach().clone(), b.detach().clone()
        self.out_proj.load_state_dict(packed.out_proj.state_dict())

    def forward(self, x, mask):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, apart):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attn, self.head = (
            nn.Embedding(20, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 3),
        )
        nn.init.normal_(self.attn.in_proj_bias)
        self.apart = apart
        if apart:
            self.attn = Apart(self.attn)

    def forward(self, ids):
        x = self.embed(ids)
        mask = torch.zeros(ids.shape[1], ids.shape[1]).masked_fill(
            torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool(), -1e9
        )
        out = self.attn(x, mask) if self.apart else self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.head(x + out)


def reference():
    return Net(False).train()


def target():
    return Net(True).train()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 6)),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-5,
    "note": "a functional call with weights of the module's own against modules",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
