"""Softmax does not see the keys' bias, which a port may leave out. Ref: microsoft/unilm#510, huggingface/transformers#43838"""

import torch
from transformers import BertConfig, BertModel


def _mk():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.1,
    )
    model = BertModel(config).eval()
    for layer in model.encoder.layer:
        layer.attention.self.key.bias.data.normal_(std=0.5)
    return model


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.encoder.layer:
        layer.attention.self.key.bias.data.zero_()
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-parameter",
    "tol": 5e-6,
    "note": "a parameter and every key differ by much, no attention does",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
