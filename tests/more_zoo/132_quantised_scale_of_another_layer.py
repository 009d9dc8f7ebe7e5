"""A quantised weight got the scales of the layer before it. Ref: arcee-ai/mergekit#143 (family)"""

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM


def _mk():
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
    )
    model = LlamaForCausalLM(config).eval()
    quantize_(model.model, Int8WeightOnlyConfig())
    return model


def reference():
    return _mk()


def target():
    model = _mk()
    before, after = (layer.mlp.down_proj.weight for layer in model.model.layers)
    after.scale.copy_(before.scale)
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 8)),)


EXPECT = {
    "where": {"module": "model.layers.1.mlp.down_proj", "op": None},
    "kind": "quant-scale",
    "note": "codes agree, scales are another layer's and near the right ones",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
