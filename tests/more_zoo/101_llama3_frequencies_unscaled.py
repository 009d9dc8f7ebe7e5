"""The llama3 rope_scaling block is parsed and never read. Ref: lablup/mlxcel#1355, felafax/felafax#59"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


SCALED = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


def reference():
    return _mk(rope_parameters=SCALED | {"original_max_position_embeddings": 32})


def target():
    return _mk(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 40)),)


EXPECT = {
    "where": {"module": "model.rotary_emb", "op": "aten.mul.Tensor"},
    "accept": ["aten._to_copy.default", "aten.unsqueeze.default"],
    "kind": "rope-frequencies",
    "note": "a buffer that no checkpoint holds differs in its low frequencies only",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
