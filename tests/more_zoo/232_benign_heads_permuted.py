"""Attention heads stored in another order, in all projections alike. Ref: onnx/onnx#7274 (family)"""

import torch
from transformers import BertConfig, BertModel


def _mk(**changes):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        **changes,
    )
    return BertModel(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    order = torch.tensor([2, 0, 3, 1])
    rows = (order[:, None] * 8 + torch.arange(8)).flatten()
    for layer in model.encoder.layer:
        attention = layer.attention.self
        for linear in (attention.query, attention.key, attention.value):
            linear.weight.data, linear.bias.data = linear.weight.data[rows], linear.bias.data[rows]
        dense = layer.attention.output.dense
        dense.weight.data = dense.weight.data[:, rows]
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-permutation",
    "tol": 5e-6,
    "note": "four weights of each layer have other rows or columns, and everything between them",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
