"""A norm without weights and a rotation may be exchanged. Ref: karpathy/nanochat#743, marin-community/marin#5114"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb


def _mk():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:
        attn = layer.self_attn

        def forward(hidden_states, position_embeddings, attention_mask=None, cache=None, attn=attn, **kwargs):
            shape = (*hidden_states.shape[:-1], -1, attn.head_dim)
            q, k, v = (
                p(hidden_states).view(shape).transpose(1, 2) for p in (attn.q_proj, attn.k_proj, attn.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            q, k = attn.q_norm(q), attn.k_norm(k)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return attn.o_proj(y.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None

        attn.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 10)),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-4,
    "note": "weights of one; the norms are given, and return, other values than in the reference",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
