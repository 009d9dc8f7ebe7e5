"""A rank-stabilised adapter is scaled by alpha / r, not by alpha / sqrt(r). Ref: NVIDIA/TensorRT-LLM#1668, paiml/aprender#2189"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


class Adapted(torch.nn.Module):
    def __init__(self, base, scale):
        super().__init__()
        self.base, self.scale = base, scale
        self.a = torch.nn.Linear(base.in_features, 4, bias=False)
        self.b = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * self.scale


def _mk(scale):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj, scale)
    return model.to(torch.bfloat16)


def reference():
    return _mk(8 / 4**0.5)


def target():
    return _mk(8 / 4)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 10)),)


EXPECT = {
    "where": {"module": "model.layers.0.self_attn.v_proj", "op": "aten.mul.Tensor"},
    "kind": "argument",
    "note": "bfloat16 on both sides; a Python number by which a branch is multiplied",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
