"""Sentence vectors are the mean of all positions, padding among them. Ref: autoliuweijie/BERT-whitening-pytorch#13, jsboige/CoursIA#15045"""

import torch
from transformers import DistilBertConfig, DistilBertModel


class Embed(torch.nn.Module):
    def __init__(self, forgets):
        super().__init__()
        torch.manual_seed(0)
        config = DistilBertConfig(
            vocab_size=64,
            dim=32,
            hidden_dim=64,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=32,
            initializer_range=0.2,
        )
        self.encoder, self.forgets = DistilBertModel(config).eval(), forgets

    def forward(self, ids, mask):
        x = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        if self.forgets:
            pooled = x.mean(1)
        else:
            kept = mask[..., None].to(x.dtype)
            pooled = (x * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(pooled, dim=-1)


def reference():
    return Embed(False)


def target():
    return Embed(True)


def inputs():
    torch.manual_seed(1)
    return torch.randint(1, 64, (2, 9)), torch.tensor([[1] * 9, [1] * 5 + [0] * 4])


EXPECT = {
    "where": {"module": "", "op": "aten.mean.dim"},
    "accept": ["aten.div.Tensor", "aten.sum.dim_IntList", "aten.mul.Tensor"],
    "kind": "pooling",
    "note": "one op in place of four; the first row has no padding and agrees",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
