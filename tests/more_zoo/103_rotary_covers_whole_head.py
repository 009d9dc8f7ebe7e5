"""partial_rotary_factor is ignored: all of each head is rotated. Ref: NVIDIA-NeMo/Megatron-Bridge#4195 (family)"""

import torch
from transformers import PhiConfig, PhiForCausalLM


def _mk(share):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    config = PhiConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
        rope_parameters=rope,
        initializer_range=0.1,
    )
    return PhiForCausalLM(config).eval()


def reference():
    return _mk(0.5)


def target():
    return _mk(1.0)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 11)),)


EXPECT = {
    "where": {"module": "model.rotary_emb", "op": "aten.mul.Tensor"},
    "accept": ["aten.unsqueeze.default", "aten._to_copy.default"],
    "kind": "rope-partial",
    "note": "frequencies, angles and tables have another length, and the rotated slices another width",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
