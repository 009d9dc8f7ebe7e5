"""Rows of the key weight are put in order by the number of query heads. Ref: huggingface/transformers#31788"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def _mk(flag):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    if flag:
        for layer in model.model.layers:
            weight = layer.self_attn.k_proj.weight.data
            paired = weight.view(2, 2, 4, 32).transpose(1, 2).reshape(16, 32)  # as the file holds it
            weight.copy_(paired.view(4, 2, 2, 32).transpose(1, 2).reshape(16, 32))
    return model


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "model.layers.0.self_attn.k_proj", "op": "aten.t.default"},
    "accept": ["aten.linear.default", "aten.mm.default", "aten.addmm.default"],
    "kind": "weight-layout",
    "note": "the rows are all there, in another order",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
