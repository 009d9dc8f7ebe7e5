"""Missing segment ids are taken as ones. Ref: huggingface/transformers#5664 (family)"""

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
    )
    return BertModel(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    embed = model.embeddings.forward

    def forward(input_ids=None, token_type_ids=None, **rest):
        return embed(input_ids=input_ids, token_type_ids=torch.ones_like(input_ids), **rest)

    model.embeddings.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 7)),)


EXPECT = {
    "where": {"module": "embeddings", "op": "aten.ones_like.default"},
    "accept": ["aten.embedding.default", "aten.gather.default", "aten.expand.default"],
    "accept_modules": ["embeddings.token_type_embeddings"],
    "kind": "argument",
    "note": "integers made by another op; the lookup itself is right",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
