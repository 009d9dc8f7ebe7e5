"""Rotary frequencies divide by half of the head's size. Ref: NVIDIA-NeMo/Megatron-Bridge#4195 (family)"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        **changes,
    )
    return Qwen2ForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    rotary = model.model.rotary_emb
    rotary.inv_freq.copy_(rotary.inv_freq**2)
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "model.rotary_emb", "op": "aten.mul.Tensor"},
    "accept": ["aten._to_copy.default", "aten.unsqueeze.default"],
    "kind": "rope-frequencies",
    "note": "the first frequency agrees, the others are squared",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
