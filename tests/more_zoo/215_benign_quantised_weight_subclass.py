"""An int8 weight as tensor subclass against the same weight dequantised ahead of time. Ref: pytorch/ao#871 (family), pytorch/ao#875 (family)"""

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM


def _mk(dequantised):
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
    if dequantised:
        for module in model.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return model


def reference():
    return _mk(True)


def target():
    return _mk(False)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-quantised",
    "tol": 2e-5,
    "note": "float weights against codes and scales; the same products up to rounding",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
