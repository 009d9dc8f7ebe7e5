"""Converter writes gamma into beta and beta into gamma. Ref: tracel-ai/burn#5023 (family)"""

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
    norm = model.encoder.layer[1].output.LayerNorm
    norm.weight.data, norm.bias.data = norm.bias.data.clone(), norm.weight.data.clone()
    return model


_make = _mk


def _mk(**changes):
    model = _make(**changes)
    for layer in model.encoder.layer:
        layer.output.LayerNorm.weight.data.uniform_(0.5, 1.5)
        layer.output.LayerNorm.bias.data.uniform_(-0.5, 0.5)
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "encoder.layer.1.output.LayerNorm", "op": "aten.native_layer_norm.default"},
    "kind": "weight-order",
    "note": "two parameters of one module in each other's place, both of one shape",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
