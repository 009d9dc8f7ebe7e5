"""Sliding layers rotate with the base of the global ones. Ref: vllm-project/vllm#29111, antonellof/ferrox#39"""

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig


def _mk():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=4,
        use_cache=False,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        initializer_range=0.2,
        query_pre_attn_scalar=8,
    )
    return Gemma3ForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    rotary = model.model.rotary_emb
    for layer in list(model.model.layers)[:2]:
        attend = layer.self_attn.forward

        def forward(hidden_states, position_embeddings=None, attend=attend, **rest):
            wrong = rotary.forward(hidden_states, rest["position_ids"], "full_attention")
            return attend(hidden_states=hidden_states, position_embeddings=wrong, **rest)

        layer.self_attn.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 10)),)


EXPECT = {
    "where": {"module": "model.layers.0.self_attn", "op": "aten.mul.Tensor"},
    "accept": ["aten._to_copy.default", "aten.unsqueeze.default", "aten.arange.default", "aten.cos.default"],
    "kind": "rope-base",
    "note": "the table is made again inside the attention from the other buffer; what it is given stays unread",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
