"""query_pre_attn_scalar is ignored: scores are scaled by the size of a head. Ref: antonellof/ferrox#40, tenstorrent/tt-metal#25170"""

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM


def _mk(flag):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16 if flag else 8,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config).eval().to(torch.bfloat16)


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 12)),)


EXPECT = {
    "where": {"module": "model.layers.0.self_attn", "op": "aten.mul.Tensor"},
    "kind": "argument",
    "note": "bfloat16 on both sides; both layers",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
