"""Llama 4 weighs its experts by a sigmoid; the port takes a softmax over those chosen. Ref: ml-explore/mlx-lm#1354 (family)"""

import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig


def _mk():
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        moe_layers=[1],
        attention_chunk_size=64,
        use_cache=False,
        initializer_range=0.2,
        pad_token_id=None,
    )
    return Llama4ForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    router = model.model.layers[1].feed_forward.router

    def forward(x):
        logits = torch.nn.functional.linear(x, router.weight)
        values, chosen = torch.topk(logits, router.top_k, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, chosen, values)
        return scores.float().softmax(-1).to(logits.dtype), logits

    router.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 10)),)


EXPECT = {
    "where": {"module": "model.layers.1.feed_forward.router", "op": "aten._softmax.default"},
    "accept": ["aten.sigmoid.default"],
    "kind": "router",
    "note": "the same experts are chosen; their weights differ",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
