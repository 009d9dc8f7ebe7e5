"""Every fourth layer has no rotary positions; the port rotates in all. Ref: pytorch/executorch#22043, airockchip/rknn-llm#501"""

import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM


def _mk():
    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        no_rope_layers=[1, 1, 1, 0],
        use_cache=False,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return SmolLM3ForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:
        layer.self_attn.use_rope = True
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(3, 64, (1, 9)),)


EXPECT = {
    "where": {"module": "model.layers.3.self_attn", "op": "aten.mul.Tensor"},
    "accept": ["aten.neg.default", "aten.cat.default", "aten.add.Tensor", "aten.slice.Tensor"],
    "extra_op": "aten.mul.Tensor",
    "kind": "rope",
    "note": "ops are inserted in one layer of four, on both operands of the attention",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
